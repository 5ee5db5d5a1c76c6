"""The trained policy on the new machine, beside the logs that it was trained on, as a figure.

    python examples/own_robot/show.py RUN_FOLDER      writes policy.png beside this file

The policy is loaded with `load_agent`, as any program of your own would do.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where taf_dt.py is
from make_logs import NEW, STEPS

from dynashift.errors import one_line_errors
from dynashift.files import atomic, check_folder
from taf_dt import load_agent

HERE = Path(__file__).parent


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # folder of the run
    logs: Path = HERE / "new.hdf5"  # what it was trained on
    out: Path = HERE / "policy.png"
    episodes: int = 20  # as many as there are logs


def play(agent, n: int) -> tuple[np.ndarray, np.ndarray]:
    """n episodes side by side: heights of the tips [n, STEPS], and returns [n]."""
    envs = [gymnasium.make("Pendulum-v1", g=NEW) for _ in range(n)]
    observations = np.array([env.reset(seed=10_000 + i)[0] for i, env in enumerate(envs)])
    agent.reset()
    heights, returns = [], np.zeros(n)
    for _ in range(STEPS):
        heights.append(observations[:, 0])
        actions = agent.act(observations)
        steps = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        observations = np.array([step[0] for step in steps])
        returns += [step[1] for step in steps]
    return np.array(heights).T, returns


def main(args: Args) -> None:
    check_folder(args.out.parent)
    played = play(load_agent(args.run, n=args.episodes), args.episodes)
    with h5py.File(args.logs) as file:
        heights = file["observations"][:, 0].reshape(-1, STEPS)
        logged = heights, file["rewards"][:].reshape(-1, STEPS).sum(1)
    from matplotlib.figure import Figure  # here, because its first use on a machine takes seconds

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, title, episodes in zip(axes, ("logs", "policy"), (logged, played), strict=True):
        heights, returns = episodes
        axis.plot(heights.T, color="tab:blue", alpha=0.5, linewidth=1)
        up = np.mean(heights[:, -50:].mean(1) > 0.9)
        text = f"{len(returns)} episodes, {up:.0%} end upright, mean return {returns.mean():.0f}"
        axis.set(title=f"{title}: {text}", xlabel="step")
        axis.title.set_fontsize(9)
        print(f"{title:7} {text}")
    axes[0].set_ylabel("height of the tip (1: upright)")
    with atomic(args.out) as temporary:
        figure.savefig(temporary, dpi=100, format=args.out.suffix[1:] or "png")
    print(args.out)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, description=__doc__))
