"""Steps per second of the environments beside gymnasium's own: python benchmarks/bench_env.py

Actions are random, only `step` is timed, and only steps of simulators whose episode has not ended
count. The three take turns, round after round, and the median of the rounds' ratios counts, so that
a busy moment of the machine affects all of them. Bars, as geometric means over the robots:
single >= 1.4x, batch of ten >= 2.5x gymnasium.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import gymnasium
import mujoco
import numpy as np
import tyro

import dynashift
from dynashift.errors import one_line_errors

STOCK = {
    "halfcheetah": "HalfCheetah-v5",
    "hopper": "Hopper-v5",
    "walker2d": "Walker2d-v5",
    "ant": "Ant-v5",
}
BLOCK, ROUNDS, N = 400, 21, 10


def clocks(on):
    """MjData() switches MuJoCo's own clocks on. They stay on in gymnasium, and are off here."""
    mujoco.MjData(mujoco.MjModel.from_xml_string("<mujoco/>"))
    if not on:
        mujoco.set_mjcb_time(None)


def single(env, actions):
    clocks(on=not isinstance(env.unwrapped, dynashift.envs.ShiftedEnv))
    env.reset(seed=0)
    seconds = 0.0
    for action in actions:
        start = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(action)
        seconds += time.perf_counter() - start
        if terminated or truncated:
            env.reset()
    return len(actions) / seconds


def batch(env, actions):
    """Step in lockstep until a fifth of the episodes have ended, then restart all of them."""
    clocks(on=False)
    env.reset(0)
    steps, seconds = 0, 0.0
    for action in actions.reshape(-1, N, actions.shape[1]):
        steps += N - env.done.sum()
        start = time.perf_counter()
        env.step(action)
        seconds += time.perf_counter() - start
        if env.done.sum() > N // 5:
            env.reset(steps)
    return steps / seconds


def main():
    head = f"{'gymnasium':>10} {'make':>8} {'ratio':>6} {f'batch({N})':>10} {'ratio':>6}"
    print(f"{'robot':12} {head}   steps/s")
    ratios = []
    for robot, stock_id in STOCK.items():
        envs = gymnasium.make(stock_id), dynashift.make(robot), dynashift.make_batch(robot, n=N)
        shape = (BLOCK * N, envs[0].action_space.shape[0])
        actions = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
        rounds = []
        for _ in range(ROUNDS):
            stock, ours = (single(env, actions[:BLOCK]) for env in envs[:2])
            rounds.append((stock, ours, batch(envs[2], actions)))
        rates = np.median(rounds, 0)
        ratio = np.median([(ours / stock, many / stock) for stock, ours, many in rounds], 0)
        ratios.append(ratio)
        row = rates[0], rates[1], ratio[0], rates[2], ratio[1]
        print("{:12} {:10.0f} {:8.0f} {:6.2f} {:10.0f} {:6.2f}".format(robot, *row), flush=True)
    single_ratio, batch_ratio = np.exp(np.log(ratios).mean(0))
    ratios = f"single {single_ratio:.2f}x (bar 1.4x), batch {batch_ratio:.2f}x (bar 2.5x)"
    print(f"geometric mean: {ratios}")
    sys.exit(int(single_ratio < 1.4 or batch_ratio < 2.5))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
