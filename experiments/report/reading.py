"""Results of runs, and gates and weights, as the report uses them."""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dynashift.errors import UserError
from dynashift.files import read_npz
from dynashift.results import read_result
from experiments.grid import ABLATIONS, Value
from experiments.methods import METHODS, OURS, label_of
from experiments.paper import ROBOTS, SHIFTS, SOURCES, Task

FACTORS = {ablation.factor: ablation.default for ablation in ABLATIONS.values()}
# Changed arguments that are named elsewhere, or that only measure more.
HARMLESS = {"quick", "diagnostics", "guided", "save_every", "log_every"}
# How long and how large a run was: --own-budgets lets this differ between methods.
EFFORT = {"source_size", "updates", "label_updates", "command_updates", "cvae_updates"}
EFFORT |= {"eval_every", "eval_episodes", "layers", "heads", "width", "hidden"}
EFFORT |= {"lr", "tau", "cosine", "batch", "source_batch", "target_batch", "label_batch"}
# Flags that mean something else in every method: runs with one changed do not share a table.
LETTERS = {"alpha", "beta", "eta", "xi"}

Stages = dict[str, dict[str, float]]  # stage -> seconds and peak memory


@dataclass
class Run:
    """What the report needs of one result.json."""

    path: Path
    method: str
    task: Task
    seed: int
    setting: tuple[str, str]  # kind of data, budget
    final: float  # normalised score at the last checkpoint
    guided: float | None = None  # the same when the critics choose the actions, where measured
    factor: tuple[str, Value] | None = None  # what an ablation varies
    serves: tuple[str, ...] = ()  # qualities of source data that a run without source data serves
    effort: str = ""  # the budget of its own, with --own-budgets
    budget: dict | None = None  # all arguments in EFFORT
    values: dict | None = None  # the value of every factor
    evaluations: list[dict] | tuple = ()
    episodes: frozenset[int] = frozenset()  # of its evaluations
    stages: Stages | None = None
    target_score: float | None = None
    sha256: str = ""  # of the target data
    diagnostics: list[dict] | tuple = ()
    preprocess: str | None = None  # the path of gate and weights
    device: str = ""
    commit: str = ""


def is_number(x) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def as_dict(x) -> dict:
    """Optional parts of a result may be missing or null."""
    return x if isinstance(x, dict) else {}


def rows_of(x, *keys) -> list[dict]:
    """Those items of a list that have a number under every key."""
    items = x if isinstance(x, list) else []
    return [item for item in items if all(is_number(as_dict(item).get(key)) for key in keys)]


def stages_of(raw: dict) -> Stages:
    found = {}
    for name, stage in as_dict(raw.get("stages")).items():
        numbers = {key: x for key, x in as_dict(stage).items() if is_number(x)}
        if "seconds" in numbers:
            found[name] = numbers
    return found


def check(raw: dict) -> None:
    """ValueError says why a result cannot be used."""
    args, method = as_dict(raw.get("args")), raw.get("method")
    if method not in METHODS:
        raise ValueError(f"the method is {method!r}, not one of {', '.join(METHODS)}")
    if args.get("env") not in ROBOTS or args.get("shift") not in SHIFTS:
        raise ValueError(f"no table has env {args.get('env')!r} with shift {args.get('shift')!r}")
    has_pair = all(isinstance(args.get(key), str) for key in ("source", "target"))
    if not isinstance(args.get("seed"), int) or not has_pair:
        raise ValueError("'args' lacks a seed, a source or a target")
    if not is_number(final_score(raw)):
        raise ValueError("it has no final score, or one that is not a number")
    if not isinstance(raw.get("changed"), dict):
        raise ValueError("it does not say which arguments were changed ('changed')")


def final_score(raw: dict, name: str = "score"):
    return as_dict(as_dict(raw.get("summaries")).get("final")).get(name)


def take_factor(method: str, changed: dict) -> tuple[str, Value] | None:
    """Takes the factor of an ablation out of what was changed. Two changes at once are not an
    ablation, but a setting of their own."""
    varied = [name for name in changed if name in FACTORS] if method == OURS else []
    if len(varied) != 1:
        return None
    name, value = varied[0], changed.pop(varied[0])
    is_value = isinstance(value, str | int | float)
    if is_number(value) != is_number(FACTORS[name]) or not is_value:
        raise ValueError(f"{name} is {value!r}")
    return name, value


def budget_of(method: str, preset: str, quick: bool, changed: dict) -> str:
    parts = ["quick"] if quick else []
    if preset != "paper":  # its values count as defaults, see taf_dt.py
        parts.append(f"preset {preset}")
    if changed:
        own = {k: f"{label_of(method)} {k}" for k in LETTERS & changed.keys() if method != OURS}
        words = [f"{own.get(key, key)}={changed[key]}" for key in sorted(changed)]
        parts.append("custom: " + ", ".join(words))
    return ", ".join(parts) or "full"


def parse(path: Path, raw, own_budgets: bool = False) -> Run:
    """What the report needs of one result.json. ValueError says why it cannot be used."""
    raw = as_dict(raw)
    check(raw)
    args, method, changed = raw["args"], raw["method"], raw["changed"]
    rest = {key: value for key, value in changed.items() if key not in HARMLESS}
    preset = rest.pop("preset", args.get("preset") or "paper")
    factor = take_factor(method, rest)
    effort = {k: rest.pop(k) for k in sorted(EFFORT & rest.keys())} if own_budgets else {}
    quick = bool(changed.get("quick", args.get("quick")))
    data = {role: as_dict(as_dict(raw.get("data")).get(role)) for role in ("source", "target")}
    kinds = [str(part["kind"]) for part in data.values() if part.get("kind")]
    evaluations, score = (
        rows_of(raw.get("evaluations"), "step", "score"),
        data["target"].get("score"),
    )
    guided = final_score(raw, "guided_score")
    episodes = {len(e["returns"]) for e in evaluations if isinstance(e.get("returns"), list)}
    commit = str(as_dict(raw.get("versions")).get("commit") or "unknown")
    alone = METHODS[method].family == "cloning" and not data["source"]
    return Run(
        path=path,
        method=method,
        # the name of a file says its quality: medium.hdf5
        task=(args["env"], args["shift"], Path(args["source"]).stem, Path(args["target"]).stem),
        seed=args["seed"],
        setting=(
            " and ".join(dict.fromkeys(kinds)) or "unknown",
            budget_of(method, preset, quick, rest),
        ),
        final=final_score(raw),
        guided=guided if is_number(guided) else None,
        factor=factor,
        serves=SOURCES if alone else (),
        effort=", ".join(f"{k}={v}" for k, v in effort.items()),
        budget={k: args[k] for k in EFFORT & args.keys()},
        values={
            k: args[k] if isinstance(args.get(k), str | int | float) else default
            for k, default in FACTORS.items()
        },
        evaluations=evaluations,
        episodes=frozenset(episodes),
        stages=stages_of(raw),
        target_score=score if is_number(score) else None,
        sha256=str(data["target"].get("sha256") or ""),
        diagnostics=rows_of(raw.get("diagnostics"), "step"),
        preprocess=raw.get("preprocess") if isinstance(raw.get("preprocess"), str) else None,
        device=str(raw.get("device") or "unknown device"),
        commit=re.sub("[0-9a-f]{30}(?=-|$)", "", commit),
    )


def read_runs(root: Path, own_budgets: bool = False) -> tuple[list[Run], list[str]]:
    """All runs, and a line (path and reason) for everything that is left out."""
    runs, problems, seen, first_of = [], [], {}, {}
    for path in sorted(root.rglob("result.json")):
        try:
            run = parse(path, read_result(path), own_budgets)
            # A cell has one budget, whatever the defaults were at the time; with --own-budgets a
            # method has one.
            where = run.setting, run.method, *(() if own_budgets else (run.factor, run.task))
            first = first_of.setdefault(where, run)
            differ = [k for k in EFFORT if run.budget.get(k) != first.budget.get(k)]
            if differ:
                names = ", ".join(sorted(differ))
                raise ValueError(f"its {names} differ from those of {first.path}")
            key = run.setting, run.method, run.factor, run.task, run.seed
            if key in seen:
                # one of the two may have measured more
                seen[key].diagnostics = seen[key].diagnostics or run.diagnostics
                raise ValueError(f"the same run as {seen[key].path}")
        except (UserError, ValueError) as error:
            problems.append(f"{path}: {' '.join(str(error).split())}")
        else:
            seen[key] = run
            runs.append(run)
    return runs, problems


# ------------------------------------------------------------------------------ gates and weights

Histogram = tuple[np.ndarray, np.ndarray]  # counts, edges


@dataclass(frozen=True)
class Archive:
    """What taf_preprocess.py wrote, as histograms."""

    scores: Histogram  # of all fragments
    kept: Histogram  # of those that the gate keeps
    weights: Histogram  # as multiples of the uniform weight
    share: str
    stages: Stages


def read_archive(path: Path) -> Archive:
    found = read_npz(path, "gate", "retained", "d_m", "w", "meta")
    gate, retained, d_m, w = (found[name] for name in ("gate", "retained", "d_m", "w"))
    meta = json.loads(str(found["meta"]))
    known, n = np.isfinite(d_m), int(retained.sum())
    edges = np.histogram_bin_edges(d_m[known], 60)
    return Archive(
        scores=np.histogram(d_m[known], edges),
        kept=np.histogram(d_m[gate & known], edges),
        weights=np.histogram(w[retained] * n, 60),
        share=f"{n:,} of {len(retained):,} transitions retained",
        stages=stages_of(meta),
    )


def read_archives(runs: list[Run], root: Path) -> tuple[dict[str, Archive], list[str]]:
    """Path, as in the results -> the archive, where it still exists; and a line for each damaged
    one. Runs may have been moved together with their archives."""
    archives, problems = {}, []
    for key in sorted({run.preprocess for run in runs if run.preprocess}):
        places = (Path(key), root.parent / key, root / "preprocess" / Path(key).name)
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            continue
        try:
            archives[key] = read_archive(path)
        except (OSError, ValueError, IndexError, TypeError) as error:  # damaged, or not ours
            problems.append(f"{path}: {' '.join(str(error).split())}")
    return archives, problems


# ------------------------------------------------------------------------------------ runs by cell

Cells = dict[tuple[str, tuple | None, Task], list[Run]]  # (method, factor, task) -> runs by seed


def by_cell(runs: list[Run]) -> Cells:
    """A run that learned from the target data alone is in the cells of all sources that it
    serves."""
    cells = defaultdict(dict)
    for run in runs:
        robot, shift, _, target = run.task
        for source in run.serves:
            cells[run.method, None, (robot, shift, source, target)].setdefault(run.seed, run)
    for run in runs:
        cells[run.method, run.factor, run.task][run.seed] = run
    return {key: [found[seed] for seed in sorted(found)] for key, found in cells.items()}


def finals(cells: Cells, method: str, task: Task) -> np.ndarray:
    return np.array([run.final for run in cells.get((method, None, task), ())])


def guided_finals(cells: Cells, method: str, task: Task) -> np.ndarray:
    found = [run.guided for run in cells.get((method, None, task), ())]
    return np.array([score for score in found if score is not None])


def was_run(cells: Cells, method: str, task: Task) -> bool:
    """On this very task, with nothing varied. A run that only serves this source does not count."""
    return any(run.task == task for run in cells.get((method, None, task), ()))


def tasks_of(cells: Cells, method: str, shift: str = "all") -> list[Task]:
    """Where the method itself was run, with nothing varied."""
    found = {t for m, f, t in cells if (m, f) == (method, None) and shift in (t[1], "all")}
    return sorted(task for task in found if was_run(cells, method, task))


def common_tasks(cells: Cells, methods, tasks) -> list[Task]:
    """The tasks on which each of the methods was run: sums over others cannot be compared."""
    return [task for task in tasks if all(was_run(cells, method, task) for method in methods)]
