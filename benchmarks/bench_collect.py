"""Transitions per second of data collection beside a plain loop: python benchmarks/bench_collect.py

The plain loop is what one would write first: one environment, and one observation through the
network at a time. Bars: 200,000 hopper transitions in at most 60 s and 1,000,000 in at most 180 s
on two cores. The rate for 200,000 is extrapolated to the million unless --steps asks for all.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import tyro

import dynashift
from dynashift.errors import one_line_errors
from dynashift.policies import Policy, act, load_policy, rollout
from dynashift.tasks import ROBOTS


def stand_in(env: str) -> Policy:
    """A random network of D4RL's size (two layers of 256), if no real policy is at hand."""
    rng, robot = np.random.default_rng(0), ROBOTS[env]

    def layer(n_in: int, n_out: int):
        return rng.normal(0, n_in**-0.5, (n_out, n_in)).astype("f"), np.zeros(n_out, "f")

    mean, log_std = layer(256, robot.act_dim), layer(256, robot.act_dim)
    return Policy([layer(robot.obs_dim, 256), layer(256, 256)], mean, log_std, Path("random"))


def plain(policy: Policy, env: str, steps: int) -> float:
    simulator, rng = dynashift.make(env), np.random.default_rng(0)
    obs, start = simulator.reset(seed=0)[0], time.perf_counter()
    for _ in range(steps):
        noise = rng.standard_normal((1, ROBOTS[env].act_dim), np.float32)
        action = act(policy, obs[None].astype(np.float32), noise)[0]
        obs, _, terminated, truncated, _ = simulator.step(action)
        if terminated or truncated:
            obs = simulator.reset()[0]
    return steps / (time.perf_counter() - start)


def main(env: str = "hopper", policy: Path | None = None, steps: int = 200_000) -> None:
    """Measure.

    Args:
        env: robot
        policy: a stored policy; a random network of D4RL's size if none is given
        steps: transitions to collect
    """
    network = load_policy(policy, env) if policy else stand_in(env)
    slow = plain(network, env, 3_000)
    start = time.perf_counter()
    rollout(network, env, "none", steps)
    fast = steps / (time.perf_counter() - start)
    rates = f"plain loop {slow:.0f}/s, rollout {fast:.0f}/s, ratio {fast / slow:.1f}"
    print(f"{env}, policy {network.path.name}: {rates}")
    times = f"200,000 transitions take {2e5 / fast:.0f} s and 1,000,000 take {1e6 / fast:.0f} s"
    print(f"at this rate {times}")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main)
