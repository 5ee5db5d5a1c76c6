"""Arguments of the scripts: the parts they share, their flat names, and defaults by task.

A script's Args is composed of parts (the task, the run, ...), so that code says `args.run.seed`.
The command line, args.json and result.json know every argument by the name of its flag alone, which
is unique.
"""

import dataclasses
import difflib
import glob
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar, get_args, get_type_hints

import tyro

from dynashift.any_env import refuse_shift
from dynashift.errors import UserError
from dynashift.files import check_folder, slug

# Flags of a part of Args keep their own names: --seed, not --run.seed.
Flat = tyro.conf.OmitArgPrefixes


# A flag's type says which values it takes: lr: Positive[float] = 3e-4. `check_args` refuses others.
class Range(NamedTuple):
    holds: Callable[[float], bool]
    words: str


Number = TypeVar("Number", int, float)
Positive = Annotated[Number, Range(lambda x: x > 0, "must be positive, not")]
NotNegative = Annotated[Number, Range(lambda x: x >= 0, "must not be negative, and is")]
Share = Annotated[float, Range(lambda x: 0 <= x < 1, "lies between 0 and 1, and is")]
# With an expectile of 0 or 1, errors of one sign would cost nothing.
Expectile = Annotated[float, Range(lambda x: 0 < x < 1, "lies between 0 and 1, and is")]


@dataclass(frozen=True)
class RunArgs:
    """Flags of the run, the same in all training scripts."""

    out: Path = Path("runs")
    """folder of the runs; gates and transport costs are kept in its folder preprocess"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one"""
    quick: bool = False
    """run for a few minutes: less data, smaller networks, fewer updates; other flags override it"""
    seed: NotNegative[int] = 1
    """seed of networks, batches and dropout; evaluation episodes have their own"""
    resume: bool = True
    """continue from the run folder's checkpoint; --no-resume starts from the beginning"""
    eval_only: bool = False
    """only evaluate the run folder's last checkpoint again"""
    torch_deterministic: bool = True
    """refuse operations whose result may differ between two runs"""
    log_every: Positive[int] = 500
    """log every N updates"""
    save_every: Positive[int] = 5_000
    """save a checkpoint every N updates"""
    eval_every: Positive[int] = 10_000
    """evaluate every N updates, and three more times at 98, 99 and 100 % of the updates"""
    eval_episodes: Positive[int] = 10
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


# Arguments that choose the task and the place of a run. Neither a task nor --quick sets them.
GIVEN = {
    "env", "shift", "source", "target", "data", "data_dir", "env_kwargs", "score_range",
    "seed", "out", "device", "quick", "preset",
}  # fmt: skip
# What chooses other defaults, and its value where the folder's name does not mention it.
UNNAMED = {"quick": False, "preset": None}
# Arguments that are part of the run folder's path (the shift of a task of your own says what its
# env_kwargs and score_range are), are its inputs, or have no effect on the result.
IGNORE = {
    "env", "shift", "source", "target", "seed", "data", "data_dir", "env_kwargs", "score_range",
    "out", "device", "resume", "eval_only", "log_every", "save_every", "track", "capture_video",
    "export",
}  # fmt: skip


def plain(Args, defaults, args):
    """What Args would be for the task of `args` if the command line gave nothing else.

    defaults(args) is the script's own function: the values, by the names of their flags, that the
    task and --quick have where the command line gives none.
    """
    given = {name: value for name, value in flatten(args).items() if name in GIVEN}
    return compose(Args, **defaults(args) | given)


def read_args(Args, defaults, description: str, words: list[str] | None = None, released=None):
    """The arguments of the command line, or of these words.

    They are read twice: first for the task and --quick, and then all flags with the defaults that
    these two imply, which --help shows. released: the script that --preset released became.
    """
    words = sys.argv[1:] if words is None else words
    if released:
        refuse_preset(released, words)
    rest = [word for word in words if word not in ("-h", "--help")]
    first, unknown = tyro.cli(Args, args=rest, return_unknown_args=True)
    if unknown:
        refuse_unknown(Args, unknown)
    refuse_shift(first.task.env, words)
    if any(word.split("=")[0] == "--updates" for word in words) and first.updates == Args.updates:
        # The class's own number would count as not given, and --quick as the budget.
        first = replace(first, updates=Args.updates + 1)
    return tyro.cli(Args, args=words, default=plain(Args, defaults, first), description=description)


def refuse_preset(script: str, words: list[str]) -> None:
    """Answer --preset released, which has become a script of its own, with its command."""
    for i, word in enumerate(words):
        if word == "--preset=released" or words[i : i + 2] == ["--preset", "released"]:
            rest = words[:i] + words[i + (1 if "=" in word else 2) :]
            command = shlex.join(["python", script, *rest])
            raise UserError(f"there is no --preset released any more; use {command}")


# Flags that have become another one.
RENAMED = {"--bf16": "--precision bf16", "--no-bf16": "--precision fp32"}


def refuse_unknown(Args, words: list[str]) -> None:
    """Name the first flag that does not exist, and the one that was probably meant.

    words: what of the command line is unknown, the values of unknown flags included.
    """
    word = next((word for word in words if word.startswith("--")), words[0]).split("=")[0]
    known = []
    for name, default in flatten(Args()).items():
        flag = name.replace("_", "-")
        known += [f"--{flag}"] + [f"--no-{flag}"] * isinstance(default, bool)
    if word in RENAMED and RENAMED[word].split()[0] in known:
        raise UserError(f"there is no {word} any more; use {RENAMED[word]}")
    near = difflib.get_close_matches(word.replace("_", "-"), known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "--help lists the flags"
    raise UserError(f"there is no flag {word}; {remedy}")


def budget(args, values: dict) -> int:
    """Updates of a run.

    args: what the command line gave. values: the defaults that hold where it gave nothing.
    """
    default = type(args).updates
    return max(1, args.updates if args.updates != default else values.get("updates", default))


def short_run_rates(args, values: dict, official: int) -> dict:
    """These defaults, and slow copies that know the networks before a short run ends.

    official: the number of updates to which the default of --ema-start belongs.
    """
    updates = budget(args, values)
    default = type(args)
    rates = {"tau": averaging_rate(default.tau, updates)}
    if hasattr(default, "ema_decay"):
        rate = averaging_rate(1 - default.ema_decay, updates, default.ema_every)
        rates["ema_decay"] = 1 - rate
        rates["ema_start"] = round(min(1.0, updates / official) * default.ema_start)
    return values | rates


def averaging_rate(rate: float, updates: int, every: int = 1) -> float:
    """The rate of a moving average that moves every `every` updates, in a run of so many updates.

    It is the official rate, unless the average would then remember more than a fiftieth of the
    run and end close to where it began.
    """
    # An average remembers the last every / rate updates. At rates above 1/20 a copy is hardly slow.
    return max(rate, min(0.05, 50 * every / updates))


def ranges(args) -> dict:
    """The ranges that Args declares, by the names of the flags."""
    found = {}
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        if dataclasses.is_dataclass(value):
            found |= ranges(value)
        for kind in (hint, *get_args(hint)):  # NotNegative[float], or that | None
            for note in getattr(kind, "__metadata__", ()):
                if isinstance(note, Range):
                    found[name] = note
    return found


def check_args(args) -> None:
    """Refuse arguments outside their range, and an --out that is of no use."""
    values = flatten(args)
    if args.run.eval_only:
        check_checkpoint(args)
    else:
        check_output(args)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} must be a number, not {value}")
    for name, wanted in ranges(args).items():
        value = values[name]
        if value is None or not wanted.holds(value):
            raise UserError(f"--{name.replace('_', '-')} {wanted.words} {value}")
    if args.run.track:
        import_wandb()
    # Evaluation episodes have seeds of their own, from 10,000 times this one.
    if args.run.seed >= 2**31 // 10_000:
        raise UserError(f"--seed {args.run.seed} is too large; use one below {2**31 // 10_000}")


def runs_folder(args) -> Path:
    """The folder of this script's runs. Args belongs to the script."""
    script = getattr(sys.modules.get(type(args).__module__), "__file__", None) or ""
    return args.run.out / Path(script).stem


def task_words(task) -> list[str]:
    """The names of a task and its data, which begin the name of its folder."""
    return [task.env, task.shift, *(Path(data).stem for data in (task.source, task.target))]


def check_checkpoint(args) -> None:
    """Refuse --eval-only without a checkpoint of this task and seed, before data are loaded.

    Which folder is exactly that of these arguments also depends on the data; `Run.begin` looks.
    """
    folder, seed = runs_folder(args), args.run.seed
    task = glob.escape(slug("-".join(task_words(args.task)))[:91])  # a longer name ends in a hash
    if not any(folder.glob(f"{task}*/seed{seed}*/ckpt.pt")):
        raise UserError(
            f"there is no checkpoint of this task with seed {seed} in {folder}; "
            "run the same command without --eval-only first"
        )


def check_output(args) -> None:
    """Refuse an --out in which the script's folders cannot be written to: another user's, say."""
    check_folder(args.run.out)
    check_folder(runs_folder(args))
    if "ot_reg" in flatten(args):  # gates or transport costs are kept, and may be there already
        check_folder(args.run.out / "preprocess", filled="*.npz")


def note_guidance(name: str, weight: float) -> None:
    """Say so if the Q term, which is divided by the mean of |Q|, leaves imitation no influence."""
    # Actions lie in [-1, 1], so their mean squared error is at most 4. Published weights are at
    # most 5.
    if weight > 100:
        print(
            f"note: --{name} {weight:g} lets Q swamp imitation: the Q term is of size {weight:g}, "
            f"the imitation loss at most 4; use a smaller --{name} unless that is what you want",
            file=sys.stderr,
        )


def import_wandb():
    try:
        import wandb
    except ImportError:
        raise UserError("--track needs a further package: pip install wandb") from None
    return wandb
