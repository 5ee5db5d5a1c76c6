"""What surrounds the stages of TAF-DT's training: speed, records and diagnostics.

The algorithm itself is in taf_dt.py, and its loops call these functions.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dynashift import faster
from dynashift.arguments import note_guidance
from dynashift.datasets import returns_to_ask
from dynashift.errors import UserError
from dynashift.tasks import find_task


@dataclass(frozen=True)
class ToolArgs:
    """Flags of tools around the training. None of them is part of the algorithm."""

    compile: bool = False  # compile every stage's update (on a CPU not the policy's); slow to start
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the policy's products; auto: measured
    diagnostics: bool = False  # measure jumps at stitch junctions (Fig. fig:jumps)
    capture_video: bool = False  # write one episode of the final policy as video.gif
    export: Path | None = None  # write the policy to this new folder, for use without this project


def task_defaults(task) -> dict:
    """Values of flags that follow from the task."""
    row = find_task(task.env, task.shift)
    values = {"K": row.K, "eta_reg": row.eta_reg}
    values["return_target"] = returns_to_ask(task)[1]  # DIFF 49: with --token rtg
    if task.target == "none":  # there is one dataset, and it plays the target
        values["beta"] = 0.0
    return values


def check(args, source_batch: int) -> None:
    """Refuse values that do not fit together in either reading of TAF-DT."""
    note_guidance("alpha", args.alpha)
    if args.beta and args.task.target == "none":
        raise UserError("--target none leaves no second dataset to mix with; leave out --beta")
    if args.beta and not source_batch:
        raise UserError(f"--beta {args.beta} leaves a batch no source data; raise it")
    if args.gate.K < 2:
        raise UserError("--K must be at least 2: Eq. (26) bootstraps from a later step")
    if args.width % args.heads:
        raise UserError(f"--width {args.width} must be a multiple of --heads {args.heads}")


def begin(run, nets: dict, pre: dict, data, target, args) -> None:
    """Begin the run, or continue it."""
    kept = {name: torch.tensor(pre[name]) for name in ("mu", "sd")}  # for load_agent
    kept["bounds"] = target.bounds
    run.begin(nets, diagnostics=[], **kept)
    limit_values(run, data.rewards, args.gamma)


def limit_values(run, rewards, gamma: float) -> None:
    """Values beyond ten times the largest possible return have diverged."""
    run.limit = 10 * float(rewards.abs().amax()) / (1 - gamma)
    run.remedy = "--lr or --alpha"


def run_stage(run, name: str, updates: int, update, nets, data, args, shown: dict | None = None):
    """The updates of a stage that are left, each with its logs.

    update(nets, data, args) returns what to log. shown: further numbers, the same at every update.
    """
    if not updates:  # nothing to prepare for
        return
    logs = {f"charts/{key}": x for key, x in (shown or {}).items()}
    update = faster.prepare(run, name, update, nets, data, args)
    for step in run.steps(name, updates):
        rate = set_learning_rate(nets, (name,), args, step, updates)
        run.log(step, update(nets, data, args) | logs | {"charts/learning_rate": rate})


def token_range(data) -> dict:
    """Commands should lie within the range of the tokens, and towards its upper end."""
    low, high = data.tokens[data.target_rows].aminmax()
    return {"token_min": low.item(), "token_max": high.item()}


def diagnostics(run, nets: dict, data, args):
    """A function of the step, which with --diagnostics measures jumps at stitch junctions."""
    if not args.tools.diagnostics:
        return lambda step: None
    from studies import junctions  # here, because it imports taf_dt.py

    pool = junctions.junction_pool(data, args.gate.K)
    every = max(1, args.updates // 20)  # twenty times in a run

    def measure(step: int) -> None:
        if step % every == 0:
            run.diagnosed(step, junctions.measure(nets, data, pool, args.gamma))

    return measure


def set_learning_rate(nets: dict, names: tuple, args, step: int, updates: int) -> float:
    """The rate of these optimisers at this update; with --cosine it falls to 0 in the end."""
    rate = args.lr
    if args.cosine:
        rate *= 0.5 * (1 + math.cos(math.pi * (step - 1) / updates))
    for name in names:
        nets[f"adam_{name}"].set_rate(rate)
    return rate
