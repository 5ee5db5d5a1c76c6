"""Speed of evaluation: ten episodes in lockstep beside a plain loop over the episodes.

    python benchmarks/bench_eval.py [--env halfcheetah] [--K 5] [--steps 1000] [--rounds 1]

Compares `taf_dt.evaluate` at the paper's configuration with the loop of published Decision
Transformers: histories that grow by concatenation, cut and padded to K steps, and the plain
Transformer of published.py at batch size 1. Both play the same number of steps, because halfcheetah
never falls.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import torch
import tyro

import taf_dt
from benchmarks.published import PlainPolicy
from dynashift import evaluation, make, make_batch, runs
from dynashift.errors import one_line_errors
from dynashift.scores import normalized_score
from dynashift.tasks import ROBOTS


@torch.no_grad()
def plain_evaluation(policy, command, pre: dict, args, steps: int) -> float:
    """Mean return of ten episodes, one after the other."""
    returns = []
    env = make(args.task.env, args.task.shift)
    d_s, d_a = len(pre["mu"]), ROBOTS[args.task.env].act_dim
    K = args.gate.K
    mu, sd = torch.as_tensor(pre["mu"]).float(), torch.as_tensor(pre["sd"]).float()
    for episode in range(args.run.eval_episodes):
        obs, _ = env.reset(seed=episode)
        states, actions = torch.zeros(0, d_s), torch.zeros(0, d_a)
        commands, times, total = torch.zeros(0), torch.zeros(0, dtype=torch.long), 0.0
        for t in range(steps):
            s = ((torch.from_numpy(obs).float() - mu) / (sd + 1e-8)).clamp(-10, 10)
            states = torch.cat([states, s[None]])
            actions = torch.cat([actions, torch.zeros(1, d_a)])
            commands = torch.cat([commands, command(s[None])[0]])
            times = torch.cat([times, torch.tensor([t])])
            n = min(K, t + 1)

            def last(x, n=n):
                return torch.cat([torch.zeros(K - n, *x.shape[1:], dtype=x.dtype), x[-n:]])[None]

            valid = torch.cat([torch.zeros(K - n), torch.ones(n)])[None]
            window = last(commands)[..., None], last(states), last(actions)
            no_reward = torch.zeros(1, K, 1)
            action = policy(*window, no_reward, last(times), valid)[1][0, -1]
            actions[-1] = action
            obs, reward, terminated, _, _ = env.step(action.numpy())
            total += reward
            if terminated:
                break
        returns.append(total)
    env.close()
    return float(np.mean(returns))


def main(env: str = "halfcheetah", K: int = 5, steps: int = 1000, rounds: int = 1) -> None:
    args = runs.compose(taf_dt.Args, env=env, K=K, return_target=0.0, eta_reg=0.5)
    d_s, d_a = ROBOTS[env].obs_dim, ROBOTS[env].act_dim
    runs.reuse_memory()  # as the script does
    nets, plain = taf_dt.build(args, d_s, d_a, "cpu"), PlainPolicy(d_s, d_a, args).eval()
    pre = {"mu": np.zeros(d_s), "sd": np.ones(d_s)}

    def short_batch(*arguments, **options):  # the same simulators, which end after `steps` steps
        batch = make_batch(*arguments, **options)
        step = batch.step

        def shorter(actions):
            obs, reward, terminated, truncated = step(actions)
            return obs, reward, terminated, truncated | (batch.steps >= steps)

        batch.step = shorter
        return batch

    evaluation.make_batch = short_batch
    agent = taf_dt.Agent(nets, pre, args, args.run.eval_episodes)
    episodes = f"{args.run.eval_episodes} episodes of {steps} steps"
    print(f"{env}, K = {K}, {episodes}, {torch.get_num_threads()} threads")
    ratios = []
    for _ in range(rounds):
        start = time.perf_counter()
        found = taf_dt.evaluate(agent, args)
        ours = time.perf_counter() - start
        start = time.perf_counter()
        mean = plain_evaluation(plain, nets["command"], pre, args, steps)
        one_by_one = time.perf_counter() - start
        ratios.append(one_by_one / ours)
        print(f"  lockstep {ours:.1f} s, one by one {one_by_one:.1f} s: {ratios[-1]:.2f}x", end="")
        score = normalized_score(env, args.task.shift, mean)
        print(f"   (scores {found['score']:.1f} and {score:.1f}, untrained)")
    print(f"  median {np.median(ratios):.2f}x   (bar: at least 5)")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main)
