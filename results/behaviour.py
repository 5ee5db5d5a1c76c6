"""The behaviour model alone:  python results/behaviour.py --targets data/target

L_reg ties the policy to a model of the target's behaviour, and so the policy can hardly clone better than that does.
Here it is trained as by taf_dt.py --quick (or, with --no-quick, at full size), with the L2 penalty of the released code
and without: after so many updates, squared error of the actions over their variance, with the latent 0, and score over
ten episodes of its decoder as policy, for every seed.
"""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import policy

import taf_dt
from dynashift import runs
from dynashift.datasets import load_target
from dynashift.files import progress_bar
from taf_preprocess import statistics


def grow(args: taf_dt.Args, updates: tuple[int, ...]) -> list[tuple[float, float]]:
    """(error, score) of one model after so many updates."""
    target = load_target(args)
    mu, sd = statistics(target.observations)
    s, a = torch.as_tensor(taf_dt.normalise(target.observations, mu, sd)), torch.as_tensor(target.actions)
    data = SimpleNamespace(states=s, actions=a, starts_t=torch.arange(len(s)))
    torch.manual_seed(args.seed)
    nets, found = taf_dt.build(args, s.shape[1], a.shape[1], "cpu"), []
    for step in progress_bar(range(1, max(updates) + 1), desc=f"{args.env} {args.shift}", unit="update"):
        taf_dt.update_cvae(nets, data, args)
        if step in updates:
            error, _ = policy.behaviour(nets["cvae"], s, a)
            found.append((error, runs.play(args, policy.decoder(nets["cvae"], mu, sd))["score"]))
    return found


def main(
    targets: Path,
    tasks: tuple[str, ...] = ("walker2d gravity", "hopper kinematic"),
    updates: tuple[int, ...] = (3_000, 30_000),
    penalties: tuple[float, ...] = (1e-4, 0.0),
    seeds: tuple[int, ...] = (1, 2),
    quick: bool = True,
) -> None:
    print("| task | penalty | updates | error | score |\n|---|---|---|---|---|", flush=True)
    for env, shift in map(str.split, tasks):
        args = taf_dt.defaults(taf_dt.Args(env=env, shift=shift, data="d4rl", data_dir=targets, quick=quick))
        for penalty in penalties:
            models = [grow(dataclasses.replace(args, cvae_decay=penalty, seed=seed), updates) for seed in seeds]
            for n, *found in zip(sorted(updates), *models, strict=True):
                errors, scores = zip(*found, strict=True)
                cells = [f"{env} {shift}", f"{penalty:g}", f"{n:,}", ", ".join(f"{x:.4f}" for x in errors)]
                print(f"| {' | '.join(cells)} | {', '.join(f'{x:.1f}' for x in scores)} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
