"""Arguments of the scripts: the parts they share, their flat names, and defaults by task.

A script's Args is composed of parts (the task, the run, ...), so that code says `args.run.seed`.
The command line, args.json and result.json know every argument by the name of its flag alone, which
is unique.
"""

import dataclasses
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from dynashift.errors import UserError
from dynashift.files import check_folder

# Flags of a part of Args keep their own names: --seed, not --run.seed.
Flat = tyro.conf.OmitArgPrefixes


@dataclass(frozen=True)
class RunArgs:
    """Flags of the run, the same in all training scripts."""

    out: Path = Path("runs")
    """folder of the runs; gates and transport costs are kept in its folder preprocess"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one"""
    quick: bool = False
    """a run of a few minutes: less data, smaller networks, fewer updates; other flags override it"""
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
    """evaluate every N updates, and three more times at 98, 99 and 100 % of the updates"""
    eval_episodes: int = 10
    """episodes of an evaluation"""
    track: bool = False
    """log to Weights & Biases as well (pip install wandb)"""


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
        if dataclasses.is_dataclass(old):
            changed[field.name] = _replaced(old, values)
        else:
            changed[field.name] = values.get(field.name, old)
    return type(args)(**changed)


def compose(Args, **values):
    """Args with these values, by the names of their flags: the inverse of `flatten`."""
    return replace(Args(), **values)


# Arguments that choose the task and the place of a run. No default of a task or --quick changes them.
GIVEN = {
    "env", "shift", "source", "target", "data", "data_dir",
    "seed", "out", "device", "quick", "preset",
}  # fmt: skip
# Arguments that are part of the run folder's path, are its inputs, or have no effect on the result.
IGNORE = {
    "env", "shift", "source", "target", "seed", "data", "data_dir",
    "out", "device", "resume", "eval_only", "log_every", "save_every", "track",
}  # fmt: skip


def plain(Args, defaults, args):
    """What Args would be for the task of `args` if the command line gave nothing else.

    defaults(args) is the script's own function: the values, by the names of their flags, that the
    task and --quick have where the command line gives none.
    """
    given = {name: value for name, value in flatten(args).items() if name in GIVEN}
    return compose(Args, **defaults(args) | given)


def read_args(Args, defaults, description: str, words: list[str] | None = None):
    """The arguments of the command line, or of these words.

    They are read twice: first for the task and --quick, whose values then are the defaults under
    which all flags are read, and which --help shows.
    """
    words = sys.argv[1:] if words is None else words
    first = tyro.cli(Args, args=[word for word in words if word not in ("-h", "--help")])
    return tyro.cli(Args, args=words, default=plain(Args, defaults, first), description=description)


def refuse_preset(script: str) -> None:
    """Answer --preset, which has become a script of its own, with the command that replaces it."""
    words = list(sys.argv[1:])
    for i, word in enumerate(words):
        if word == "--preset" or word.startswith("--preset="):
            value = word.partition("=")[2] or "".join(words[i + 1 : i + 2])
            rest = words[:i] + words[i + (1 if "=" in word else 2) :]
            command = shlex.join(["python", script if value == "released" else sys.argv[0], *rest])
            raise UserError(f"there is no --preset any more; use {command}")


def budget_share(args, values: dict, official: int) -> float:
    """Updates of a run as a share of the official number, at most 1.

    args: what the command line gave. values: the defaults that hold where it gave nothing.
    """
    default = type(args).updates
    updates = args.updates if args.updates != default else values.get("updates", default)
    return min(1.0, max(1, updates) / official)


def averaging_rate(rate: float, share: float) -> float:
    """The rate of a moving average in a run with this share of the official updates."""
    # An average remembers the last 1 / rate updates. In a shorter run this memory keeps its share of
    # the run, because otherwise the average would end close to where it began. At rates above 1/20
    # it would hardly be slower than the network itself.
    return max(rate, min(0.05, rate / share))


def check_args(args, positive: str, not_negative: str = "", shares: str = "") -> None:
    """Refuse arguments outside their range, and an --out that cannot be written to.

    positive, not_negative and shares (from 0 to below 1) are names with spaces in between; the
    arguments of the run are checked as well.
    """
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
            raise UserError(
                f"--{name.replace('_', '-')} must not be negative, and is {values[name]}"
            )
    if args.run.track:
        import_wandb()
    for name in shares.split():
        if not 0 <= values[name] < 1:
            raise UserError(
                f"--{name.replace('_', '-')} lies between 0 and 1, and is {values[name]}"
            )
    # Evaluation episodes have seeds of their own, from 10,000 times this one.
    if args.run.seed >= 2**31 // 10_000:
        raise UserError(f"--seed {args.run.seed} is too large; use one below {2**31 // 10_000}")


def note_guidance(name: str, weight: float) -> None:
    """Say so if the Q term, which is divided by the mean of |Q|, leaves imitation no influence."""
    # Actions lie in [-1, 1], so their mean squared error is at most 4. Published weights are below 10.
    if weight > 100:
        print(
            f"note: --{name} {weight:g} lets Q swamp imitation: the Q term is of size {weight:g}, the "
            f"imitation loss at most 4; use a smaller --{name} unless that is what you want",
            file=sys.stderr,
        )


def import_wandb():
    try:
        import wandb
    except ImportError:
        raise UserError("--track needs a further package: pip install wandb") from None
    return wandb
