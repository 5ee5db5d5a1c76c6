"""Logs of a robot that is none of the four: a pendulum that must be swung up and balanced.

    python examples/own_robot/make_logs.py            writes old.hdf5 and new.hdf5 beside this file

The old machine has the usual gravity and many logs. The new one has six tenths of it and few logs.
Each is driven by a controller made for it, whose gains and noise differ from episode to episode.
Now and then somebody tries the motor out: for half a second it has a torque drawn at random, and
the controller must recover. So the logs show how to recover, and they are worse than they need be.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from dynashift.errors import one_line_errors
from dynashift.files import atomic, check_folder

OLD, NEW = 10.0, 6.0  # gravity
STEPS = 200  # of an episode, 0.05 s each
TRIAL, CHANCE = 10, 0.02  # steps with a random torque, and the chance that they begin at a step


@dataclass
class Args:
    out: Path = Path(__file__).parent  # folder of the two files
    old_episodes: int = 150
    new_episodes: int = 20
    seed: int = 0


def controller(gravity: float, rng: np.random.Generator):
    """Pump energy until the pendulum is near the top, then balance it there; more or less well."""
    gain, stiffness, noise = rng.uniform(0.2, 1.0), rng.uniform(8, 16), rng.uniform(0, 1.5)
    trial = []  # torques still to come

    def act(observation: np.ndarray) -> np.ndarray:
        cos, sin, speed = observation
        angle = np.arctan2(sin, cos)  # 0 is upright
        # Energy that is missing, for a rod of mass 1 and length 1, and a little more to get there.
        missing = 1.15 * gravity / 2 * (1 - cos) - speed**2 / 6
        if abs(angle) < 0.4:
            torque = -stiffness * angle - stiffness / 4 * speed
        else:
            torque = gain * missing * np.sign(speed)
        if not trial and rng.random() < CHANCE:
            trial.extend([rng.uniform(-2, 2)] * TRIAL)
        if trial:
            torque = trial.pop()
        return np.clip([torque + noise * rng.normal()], -2, 2).astype(np.float32)

    return act


def log(gravity: float, episodes: int, seed: int) -> dict[str, np.ndarray]:
    """The columns that the training reads, one row per step."""
    env, rng = gymnasium.make("Pendulum-v1", g=gravity), np.random.default_rng(seed)
    rows = []
    for episode in range(episodes):
        act = controller(gravity, rng)
        observation, _ = env.reset(seed=1000 * seed + episode)
        for t in range(STEPS):
            action = act(observation)
            after, reward, terminated, _, _ = env.step(action)
            rows.append((observation, action, reward, after, terminated, t == STEPS - 1))
            observation = after
    names = "observations actions rewards next_observations terminals timeouts"
    return dict(zip(names.split(), map(np.array, zip(*rows, strict=True)), strict=True))


def main(args: Args) -> None:
    check_folder(args.out)
    machines = {"old": (OLD, args.old_episodes), "new": (NEW, args.new_episodes)}
    for i, (name, (gravity, episodes)) in enumerate(machines.items()):
        columns = log(gravity, episodes, args.seed + i)
        with atomic(args.out / f"{name}.hdf5") as path, h5py.File(path, "w") as file:
            for key, column in columns.items():
                file[key] = column
        returns = columns["rewards"].reshape(episodes, STEPS).sum(1)
        print(
            f"{args.out / name}.hdf5: {episodes} episodes at gravity {gravity:g}, mean return",
            end=" ",
        )
        print(f"{returns.mean():.0f}, from {returns.min():.0f} to {returns.max():.0f}")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, description=__doc__))
