"""Arguments of the scripts: parts that all have in common, flat names for all of them, and defaults by task.

A script's Args is composed of parts (the task, the run, ...), so that code says `args.run.seed`. The command line,
args.json and result.json know every argument by the name of its flag alone, which is unique.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from dynashift.errors import UserError
from dynashift.files import check_folder

Flat = tyro.conf.OmitArgPrefixes  # the flags of a part of Args keep their own names: --seed, not --run.seed


@dataclass(frozen=True)
class RunArgs:
    """Flags of the run, the same in all training scripts."""

    out: Path = Path("runs")
    """folder of the runs; taf_dt.py and otdf.py keep their gates and costs in its folder preprocess"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one"""
    quick: bool = False
    """a small run of a few minutes: less data, smaller networks, fewer updates; a flag given beside it wins"""
    seed: int = 1
    """of networks, batches and dropout; evaluation episodes have their own"""
    resume: bool = True
    """go on from the run folder's checkpoint; --no-resume starts from the beginning"""
    eval_only: bool = False
    """evaluate the run folder's last checkpoint again, and nothing else"""
    torch_deterministic: bool = True
    """refuse operations that would not repeat themselves"""
    log_every: int = 500
    """log every N updates"""
    save_every: int = 5_000
    """save a checkpoint every N updates"""
    eval_every: int = 10_000
    """evaluate every N updates; there are three more evaluations at 98, 99 and 100 % of the updates"""
    eval_episodes: int = 10
    """episodes of an evaluation"""


def flatten(args) -> dict:
    """All arguments by the names of their flags, whichever part of Args they are in."""
    values = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        values |= flatten(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def replace(args, **values):
    """A copy with other values of the arguments of these names."""
    if unknown := values.keys() - flatten(args).keys():
        raise TypeError(f"{type(args).__name__} has no {', '.join(sorted(unknown))}")
    return _replaced(args, values)


def _replaced(args, values: dict):
    changed = {}
    for field in dataclasses.fields(args):
        old = getattr(args, field.name)
        changed[field.name] = _replaced(old, values) if dataclasses.is_dataclass(old) else values.get(field.name, old)
    return type(args)(**changed)


def compose(Args, **values):
    """Args with these values, by the names of their flags: the inverse of `flatten`."""
    return replace(Args(), **values)


# Arguments that choose the task and the place of a run: no default of a task, preset or --quick changes them.
GIVEN = ("env", "shift", "source", "target", "seed", "data", "data_dir", "out", "device", "quick", "preset")
# Arguments that are part of the run folder's path, are its inputs, or have no effect on the result.
IGNORE = {
    "env", "shift", "source", "target", "seed", "data", "data_dir",
    "out", "device", "resume", "eval_only", "log_every", "save_every",
}  # fmt: skip


def plain(Args, defaults, args):
    """What Args would be for the task of `args` if the command line gave nothing else.

    defaults(args) is the script's own function: the values, by the names of their flags, that the task, a preset and
    --quick have where the command line says nothing.
    """
    values = flatten(args)
    return compose(Args, **defaults(args) | {name: values[name] for name in GIVEN if name in values})


def read_args(Args, defaults, description: str, words: list[str] | None = None):
    """The arguments of the command line, or of these words. They are read twice: the first time for the task, preset
    and --quick, whose values are then the defaults under which all flags are read, and which --help shows."""
    words = sys.argv[1:] if words is None else words
    first = tyro.cli(Args, args=[word for word in words if word not in ("-h", "--help")])
    return tyro.cli(Args, args=words, default=plain(Args, defaults, first), description=description)


def budget_share(args, values: dict, official: int) -> float:
    """Updates of a run as a share of the official number, at most 1. args: what the command line gave; values: the
    defaults that hold where it gave nothing."""
    default = type(args).updates
    updates = args.updates if args.updates != default else values.get("updates", default)
    return min(1.0, max(1, updates) / official)


def averaging_rate(rate: float, share: float) -> float:
    """The rate at which a slow copy follows its network, in a run of this share of the official updates."""
    # A copy remembers the last 1 / rate updates. A shorter run keeps that memory's share of the run, or its copies
    # would end with what they began with; but beyond 1/20 a copy would hardly be slower than its network.
    return max(rate, min(0.05, rate / share))


def check_args(args, positive: str, not_negative: str = "") -> None:
    """Refuse an --out that cannot be written to, and any of these arguments, named with spaces in between, or of the
    run's, that does not have the sign it must have."""
    values = flatten(args)
    if not args.run.eval_only:
        check_folder(args.run.out)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} must be a number, not {value}")
    for name in f"updates log_every save_every eval_every eval_episodes {positive}".split():
        if values[name] is None or not values[name] > 0:
            raise UserError(f"--{name.replace('_', '-')} must be positive, not {values[name]}")
    for name in f"seed {not_negative}".split():
        if values[name] is None or not values[name] >= 0:
            raise UserError(f"--{name.replace('_', '-')} must not be negative, and is {values[name]}")
    if args.run.seed >= 2**31 // 10_000:  # evaluation episodes have seeds of their own, from 10,000 times this one
        raise UserError(f"--seed {args.run.seed} is too large; use one below {2**31 // 10_000}")
