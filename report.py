"""All result.json files in, one page and all tables and figures out.

    python report.py                                      runs/ -> results/report.html, results/tables, results/figures
    python report.py --runs runs --out results

Ours stands with the paper's cell (dynashift/paper.json). Runs on different data or with different budgets never meet in
one table: the page has a part for every "setting", which is the kind of data and all that was changed from a method's
defaults, except the one factor that an ablation varies. What a ± means stands under every table. Methods that were run
at reduced budgets of their own meet with --own-budgets, which names them.
"""

import base64
import csv
import hashlib
import html
import io
import itertools
import json
import math
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure

from dynashift import tasks
from dynashift.errors import UserError, one_line_errors
from dynashift.files import atomic, read_npz
from dynashift.results import read_result

PAPER = json.loads((Path(__file__).parent / "dynashift" / "paper.json").read_bytes())
MAIN = {tuple(task.split()): row for task, row in PAPER["main"].items()}  # (robot, shift, source, target): its row
NAMES = dict(iql="IQL", dara="DARA", igdf="IGDF", otdf="OTDF", dt="DT", qt="QT", dadt="DADT", taf_dt="TAF-DT", bc="BC")
METHODS, OURS = PAPER["methods"], "taf_dt"  # the eight of the paper
ROBOTS, SOURCES = tuple(tasks.ROBOTS), tasks.QUALITIES["source"]
# The paper's shifts in its order, then those that only the table of tasks has.
SHIFTS = (*PAPER["summary"], *(shift for shift in tasks.SHIFTS if shift not in {"none", *PAPER["summary"]}))
FACTORS = {ablation["factor"]: ablation["default"] for ablation in PAPER["ablations"].values()}
# Changed arguments that are named elsewhere, or only measure more.
HARMLESS = {"quick", "diagnostics", "guided", "save_every", "log_every"}
# How long and how large a run was: what --own-budgets lets differ between methods.
EFFORT = {"source_size", "updates", "label_updates", "command_updates", "cvae_updates", "eval_every", "eval_episodes"}
EFFORT |= {"layers", "heads", "width", "hidden", "lr", "tau", "cosine"}
EFFORT |= {"batch", "source_batch", "target_batch", "label_batch"}
# Flags that mean something else in every method: runs with one changed do not share a table.
LETTERS = {"alpha", "beta", "eta", "xi"}
# Colours that read on white and on black; the dashes are for those who cannot tell them apart.
COLORS = ["#4c8fe0", "#18a497", "#8f9a20", "#b06ad8", "#a5784a", "#cf8f12", "#35a853", "#e5502a", "#8a8a8a"]
DASHES = ["--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 3)), "-", "-"]
LINES = {m: dict(color=c, ls=d, lw=1.3) for m, c, d in zip(NAMES, COLORS, DASHES, strict=True)}
LINES[OURS]["lw"] = 2.2
INK = "#7b7c7d"  # what is drawn in this colour takes that of the page, see `svg`


@dataclass(frozen=True)
class Args:
    runs: Path = Path("runs")
    """folder with the runs; every result.json below it is read"""
    out: Path = Path("results")
    """folder for report.html, tables/ and figures/"""
    own_budgets: bool = False
    """put methods into one table that were run with updates, sizes and rates of their own, one budget a method"""


# ------------------------------------------------------------------------------------------------ reading


def is_number(x) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def as_dict(x) -> dict:
    """Optional parts of a result may be missing or null."""
    return x if isinstance(x, dict) else {}


def rows_of(x, *keys) -> list[dict]:
    """Those items of a list that have a number under every key."""
    return [e for e in (x if isinstance(x, list) else []) if all(is_number(as_dict(e).get(k)) for k in keys)]


def stages_of(raw: dict) -> dict:
    stages = {k: {a: b for a, b in as_dict(s).items() if is_number(b)} for k, s in as_dict(raw.get("stages")).items()}
    return {k: s for k, s in stages.items() if "seconds" in s}


def parse(path: Path, raw, own_budgets: bool = False) -> dict:
    """What the report needs of one result.json. ValueError says why it cannot be used."""
    raw = as_dict(raw)
    args, method, changed = as_dict(raw.get("args")), raw.get("method"), raw.get("changed")
    if method not in NAMES:
        raise ValueError(f"the method is {method!r}, not one of {', '.join(NAMES)}")
    if args.get("env") not in ROBOTS or args.get("shift") not in SHIFTS:
        raise ValueError(f"no table has env {args.get('env')!r} with shift {args.get('shift')!r}")
    if not isinstance(args.get("seed"), int) or not all(isinstance(args.get(k), str) for k in ("source", "target")):
        raise ValueError("'args' lacks a seed, a source or a target")
    final = as_dict(as_dict(raw.get("summaries")).get("final")).get("score")
    if not is_number(final):
        raise ValueError("it has no final score, or one that is not a number")
    if not isinstance(changed, dict):
        raise ValueError("it does not say which arguments were changed ('changed')")
    rest, factor = {k: v for k, v in changed.items() if k not in HARMLESS}, None
    preset, quick = rest.pop("preset", args.get("preset") or "paper"), changed.get("quick", args.get("quick"))
    varied = [k for k in rest if k in FACTORS] if method == OURS else []
    if len(varied) == 1:  # two at once are no ablation, but a setting of their own
        factor = (varied[0], rest.pop(varied[0]))
        if is_number(factor[1]) != is_number(FACTORS[factor[0]]) or not isinstance(factor[1], str | int | float):
            raise ValueError(f"{factor[0]} is {factor[1]!r}")
    effort = {k: rest.pop(k) for k in sorted(EFFORT & set(rest)) if own_budgets}
    budget = ["quick"] * bool(quick) + [f"preset {preset}"] * (
        preset != "paper"
    )  # a preset is no change, see taf_dt.py
    names = {k: f"{NAMES[method]} {k}" if k in LETTERS and method != OURS else k for k in sorted(rest)}
    budget += ["custom: " + ", ".join(f"{name}={rest[k]}" for k, name in names.items())] * bool(rest)
    data = {k: as_dict(as_dict(raw.get("data")).get(k)) for k in ("source", "target")}
    kinds = [str(d["kind"]) for d in data.values() if d.get("kind")]  # bc has no source
    kind = " and ".join(dict.fromkeys(kinds)) or "unknown"
    evaluations, score = rows_of(raw.get("evaluations"), "step", "score"), data["target"].get("score")
    return {
        "path": path,
        "method": method,
        # a file's name says its quality: medium.hdf5
        "task": (args["env"], args["shift"], Path(args["source"]).stem, Path(args["target"]).stem),
        "serves": SOURCES if method == "bc" and not data["source"] else (),  # cloning the target alone
        "seed": args["seed"],
        "setting": (kind, ", ".join(budget) or "full"),
        "effort": ", ".join(f"{k}={v}" for k, v in effort.items()),
        "budget": {k: args[k] for k in EFFORT if k in args},
        "factor": factor,
        "values": {k: args[k] if isinstance(args.get(k), str | int | float) else v for k, v in FACTORS.items()},
        "final": final,
        "evaluations": evaluations,
        "episodes": {len(e["returns"]) for e in evaluations if isinstance(e.get("returns"), list)},
        "stages": stages_of(raw),
        "target_score": score if is_number(score) else None,
        "sha256": str(data["target"].get("sha256") or ""),
        "diagnostics": rows_of(raw.get("diagnostics"), "step"),
        "preprocess": raw.get("preprocess") if isinstance(raw.get("preprocess"), str) else None,
        "device": str(raw.get("device") or "unknown device"),
        "commit": re.sub("[0-9a-f]{30}(?=-|$)", "", str(as_dict(raw.get("versions")).get("commit") or "unknown")),
    }


def read_runs(root: Path, own_budgets: bool = False) -> tuple[list[dict], list[str]]:
    """All runs, and a line (path and reason) for everything that is left out."""
    runs, problems, seen, efforts = [], [], {}, {}
    for path in sorted(root.rglob("result.json")):
        try:
            run = parse(path, read_result(path), own_budgets)
            # One cell, one budget, whatever the defaults were when it was run; with --own-budgets, one method.
            where = (run["setting"], run["method"], *(() if own_budgets else (run["factor"], run["task"])))
            first = efforts.setdefault(where, run)
            differ = [k for k in EFFORT if run["budget"].get(k) != first["budget"].get(k)]
            if differ:
                raise ValueError(f"its {', '.join(sorted(differ))} differ from those of {first['path']}")
            key = tuple(run[k] for k in ("setting", "method", "factor", "task", "seed"))
            if key in seen:
                seen[key]["diagnostics"] = seen[key]["diagnostics"] or run["diagnostics"]  # one may have measured more
                raise ValueError(f"the same run as {seen[key]['path']}")
        except (UserError, ValueError) as error:
            problems.append(f"{path}: {' '.join(str(error).split())}")
        else:
            seen[key] = run
            runs.append(run)
    return runs, problems


def by_cell(runs: list[dict]) -> dict:
    """(method, factor, task) -> runs in the order of their seeds. Cloning the target alone serves every source."""
    cells = defaultdict(dict)
    for run in runs:
        robot, shift, _, target = run["task"]
        for source in run["serves"]:
            cells["bc", None, (robot, shift, source, target)].setdefault(run["seed"], run)
    for run in runs:
        cells[run["method"], run["factor"], run["task"]][run["seed"]] = run
    return {key: [found[seed] for seed in sorted(found)] for key, found in cells.items()}


def finals(cells: dict, method: str, task: tuple) -> np.ndarray:
    return np.array([run["final"] for run in cells.get((method, None, task), ())])


def was_run(cells: dict, method: str, task: tuple) -> bool:
    """On this very task, with nothing varied: a run of bc that serves another source does not count a second time."""
    return any(run["task"] == task for run in cells.get((method, None, task), ()))


def tasks_of(cells: dict, method: str, shift: str = "all") -> list[tuple]:
    """Where the method itself was run, with nothing varied."""
    found = {t for m, f, t in cells if (m, f) == (method, None) and shift in (t[1], "all")}
    return sorted(t for t in found if was_run(cells, method, t))


def common_tasks(cells: dict, methods, tasks) -> list[tuple]:
    """Those of the tasks on which each of the methods was run: sums over others cannot be compared."""
    return [t for t in tasks if all(was_run(cells, m, t) for m in methods)]


# --------------------------------------------------------------------------------------------- statistics
# rliable's definitions (Agarwal et al., NeurIPS 2021) on scores in one array a task, one number a run.


def iqm(x: np.ndarray):
    """Interquartile mean over the last axis: without the lowest and the highest quarter."""
    cut = int(0.25 * x.shape[-1])
    return np.sort(x, -1)[..., cut : x.shape[-1] - cut].mean(-1)


def resample(groups: list, reps: int = 2000, seed: int = 0) -> list:
    """Stratified bootstrap: runs are drawn anew within every task, [reps, runs] for each."""
    rng = np.random.default_rng(seed)
    return [g[rng.integers(len(g), size=(reps, len(g)))] for g in groups]


def interval(draws: np.ndarray, groups: list) -> dict:
    """95 % percentile interval, unless no task has a second run to draw."""
    if all(len(g) < 2 for g in groups):
        return {}
    return dict(zip(("low", "high"), np.percentile(draws, [2.5, 97.5]).tolist(), strict=True))


def beats(x: np.ndarray, y: np.ndarray):
    """P(X > Y) + P(X = Y) / 2 over all pairs of runs of one task (last axes)."""
    x, y = x[..., :, None], y[..., None, :]
    return ((x > y) + 0.5 * (x == y)).mean((-2, -1))


def profile(groups: list, taus: np.ndarray) -> np.ndarray:
    """Share of runs above tau, averaged over tasks, [..., taus]."""
    return np.mean([(g[..., None] > taus).mean(-2) for g in groups], 0)


def smooth(x, width: int = 5) -> np.ndarray:
    """Moving mean over the last `width` values, over fewer at the beginning."""
    return np.array([np.mean(x[max(0, i + 1 - width) : i + 1]) for i in range(len(x))])


# -------------------------------------------------------------------------------------------------- cells


def cell(values=(), paper=None, paper_std=None, **more) -> dict:
    """Mean, sample std (ddof 1) and number of values, and the paper's number; what is in `more` replaces or adds."""
    mean = float(np.mean(values)) if len(values) else None
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": mean, "std": std, "n": len(values) or None, "paper": paper, "paper_std": paper_std} | more


def total(rows: list[dict], method: str, of: list[dict], compared: bool) -> dict:
    """Sum over those rows of a part of the table, and over the same ones of the paper (over all, if there are none)."""
    paper = [row[method]["paper"] for row in rows or of if row[method]["paper"] is not None]
    means = [row[method]["mean"] for row in rows if row[method]["mean"] is not None] if compared else []
    sums = [sum(means)] if means and len(means) == len(rows) else []
    return cell(sums, sum(paper) if paper else None, n=len(rows) if sums else None, of=len(of))


def wins(rows: list[dict], method: str, methods, which: str) -> int:
    """Rows in which the method has strictly the highest number of those given."""
    numbers = [{m: row[m][which] for m in methods if row[m][which] is not None} for row in rows]
    return sum(method in x and all(x[method] > v for m, v in x.items() if m != method) for x in numbers)


def last_three(runs: list[dict], seeds: int, **more) -> dict:
    """Over the last three checkpoints of the lowest seed; or their means, over the lowest `seeds` seeds."""
    scores = [[e["score"] for e in run["evaluations"]][-3:] or [run["final"]] for run in runs[:seeds]]
    if seeds > 1:
        return cell([np.mean(s) for s in scores], **more)
    remark = f"seed {runs[0]['seed']}" if runs and runs[0]["seed"] != 1 else ""
    return cell(scores[0] if scores else (), remark=remark, **more)


def bold_best(cells: list[dict]) -> None:
    means = [c["mean"] for c in cells if c["mean"] is not None]
    for c in cells:
        c["best"] = len(means) > 1 and c["mean"] == max(means)


def label(task: tuple, with_shift: bool = False) -> str:
    robot, shift, *pair = task
    pair = " → ".join(Path(s).stem if s.endswith(".hdf5") else s for s in pair)
    return f"{robot} {shift}: {pair}" if with_shift else f"{robot}: {pair}"


# ------------------------------------------------------------------------------------------------- tables


def make_table(name, title, caption, head, columns, rows, row_keys=None, column_keys=(), theirs=()) -> dict:
    """rows: (label, kind, cells). The paper's inconsistencies are numbered in the order of the cells they touch."""
    notes, texts = defaultdict(list), []
    for note in PAPER["notes"]:
        for key in note["cells"]:
            notes[key].append(note["text"])

    def marks(key):
        texts.extend(text for text in notes[key] if text not in texts)
        return [texts.index(text) + 1 for text in notes[key]]

    row_marks = [[] for _ in rows]
    for i, row in enumerate(row_keys or ()):
        row_marks[i] = marks(f"{name}/{row}")
        for c, column in zip(rows[i][2], column_keys, strict=True):
            c["marks"] = marks(f"{name}/{row}/{column}")
    table = {"name": name, "title": title, "caption": caption, "head": head, "columns": columns, "rows": rows}
    return table | {"row_marks": row_marks, "notes": texts, "about": [*theirs, *notes[name]]}


def without_paper(table: dict) -> dict:
    """The paper's numbers are of the published data: beside others they would suggest a comparison that is none."""
    nothing = {"paper": None, "paper_std": None, "marks": []}
    rows = [(name, kind, [c | nothing for c in cells]) for name, kind, cells in table["rows"]]
    printed = any(c["paper"] is not None for _, _, cells in table["rows"] for c in cells)
    about = ["The paper's numbers are of the published data and not shown here."] * printed
    return table | {"rows": rows, "row_marks": [[] for _ in rows], "notes": [], "about": about}


def main_table(cells: dict, shift: str, episodes: str) -> dict:
    methods = [OURS, "bc", *(m for m in METHODS if m != OURS)]
    columns, run = [*methods, "data"], [m for m in methods if tasks_of(cells, m, shift)]
    found = {t for m in run for t in tasks_of(cells, m, shift)}
    tasks = [t for t in MAIN if t[1] == shift] or sorted(found)  # a shift that the paper has not: what was run
    more = sorted(found - set(tasks))  # with data of one's own

    def row(task):
        printed = dict(zip(METHODS, MAIN[task]["scores"], strict=True)) if task in MAIN else {}
        found = {m: cell(finals(cells, m, task), printed.get(m)) for m in columns}
        found[OURS]["paper_std"] = MAIN[task]["std"] if task in MAIN else None
        if found["bc"]["mean"] is not None and not was_run(cells, "bc", task):
            found["bc"] |= {"remark": "same runs", "served": True}
        runs = [run for m in NAMES for run in cells.get((m, None, task), ())]
        scores, here = [r["target_score"] for r in runs], any(was_run(cells, m, task) for m in methods)
        found["data"] = cell([x for x in scores if x is not None][:1], n=None, served=not here)
        bold_best([found[m] for m in methods])
        return found

    by_task, rows, keys = {t: row(t) for t in [*tasks, *more]}, [], []

    def add(chosen):
        rows.extend((label(t), "", [by_task[t][m] for m in columns]) for t in chosen)
        keys.extend(" ".join(t) for t in chosen)

    def compared(chosen, among):
        """Methods that were run on any of these tasks, and the tasks on which all of them were."""
        here = [m for m in among if any(was_run(cells, m, t) for t in chosen)]
        return here, common_tasks(cells, here, chosen) if len(here) > 1 else []

    def add_sum(chosen, key, name, among):
        here, common = compared(chosen, among)
        part, whole = [by_task[t] for t in common], [by_task[t] for t in chosen]
        sums = {m: total(part, m, whole, m in [*here, "data"]) for m in columns}
        bold_best([sums[m] for m in here])
        rows.append((name, "sum", list(sums.values())))
        keys.append(key)

    def add_wins(name, among):
        here, common = compared(tasks, among)
        part, whole, found = [by_task[t] for t in common], [by_task[t] for t in tasks], []
        for m in columns:
            won = [wins(part, m, here, "mean")] if m in here and common else []
            paper = wins(whole, m, METHODS, "paper") if m in METHODS else None
            found.append(cell(won, paper, n=len(common) if won else None, digits=0))
        bold_best([c for m, c in zip(columns, found, strict=True) if m in here])
        rows.append((name, "sum", found))
        keys.append("wins")

    for robot in ROBOTS:
        add(mine := [t for t in tasks if t[0] == robot])
        add_sum(mine, robot, f"{robot}, sum", run)
    add_sum(tasks, "all robots", "all robots, sum", run)
    add_wins("wins", run)
    without = [m for m in run if m != "bc"]
    if compared(tasks, without)[1] != compared(tasks, run)[1]:  # bc has one row for three sources
        add_sum(tasks, "all robots", "all robots, sum without BC", without)
        add_wins("wins without BC", without)
    add(more)
    caption = (
        f"Normalised score at the final checkpoint{episodes}: mean ± sample standard deviation (ddof 1) over seeds, in "
        "brackets the number of seeds; one seed has no ±. A dash: not run. Bold: highest mean of the row, where at "
        "least two methods were run. Sums and wins (rows with the strictly highest mean) are over the rows that every "
        "method has that was run on any of them; in brackets their number. BC (behaviour cloning) sees the target data "
        'alone: "same runs" marks its score where it was run with another source, and is in no sum. Target data: '
        "mean score of its episodes."
    )
    theirs = (
        "The paper's cells are said to be of five seeds and the final checkpoint; it prints ± for TAF-DT only, and has "
        "no BC. Its sums are given over the same rows as ours, over all where we have none, its wins over all 36 rows."
    )
    heads, title = [*(NAMES[m] for m in methods), "target data"], f"{shift.capitalize()} shift"
    return make_table(shift, title, caption, "task", heads, rows, keys, columns, [theirs])


def summary_table(cells: dict) -> dict:
    """Over the tasks that every method has which was run at all: other totals cannot be compared."""

    def row(shift, among, paper):
        tasks = [t for t in MAIN if t[1] == shift]
        run = [m for m in among if any(was_run(cells, m, t) for t in tasks)]
        common = common_tasks(cells, run, tasks) if run else []
        means = {m: np.array([finals(cells, m, t).mean() for t in common]) for m in run}
        others = [m for m in run if m != OURS] if common and OURS in run else []
        second = max(others, key=lambda m: means[m].sum(), default=None)
        ours = [means[OURS].sum()] if second else []
        theirs = [means[second].sum()] if second else []
        gain = [100 * (ours[0] / theirs[0] - 1)] if second and theirs[0] > 0 else []
        won = [(means[OURS] > np.max([means[m] for m in others], 0)).sum()] if second else []
        numbers = [ours, (), theirs, gain, won, [len(common)], [len(run)]]
        found = [
            cell(x, y, digits=1 if i < 4 else 0, n=None) for i, (x, y) in enumerate(zip(numbers, paper, strict=True))
        ]
        found[1] |= {"text": NAMES.get(second, "")}
        return found

    rows, keys = [], []
    for shift, paper in PAPER["summary"].items():
        printed, second = dict(zip(METHODS, paper["totals"], strict=True)), paper["runner_up"]
        printed = [printed[OURS], NAMES[second], printed[second], paper["improvement"], paper["wins"], 36, 8]
        rows.append((shift, "", row(shift, METHODS, printed)))
        keys.append(shift)
        if tasks_of(cells, "bc", shift):
            rows.append((f"{shift}, with BC", "", row(shift, NAMES, [None] * 7)))
            keys.append(f"{shift} bc")
    columns = ["TAF-DT, total", "best other", "its total", "improvement, %", "wins", "tasks", "methods"]
    caption = (
        "Totals of the mean final scores over those tasks that all the methods have which were run at all (how many, "
        "in the last two columns), and strict wins among them; among the paper's methods, and with BC as a further one."
    )
    column_keys = ["ours", "second", "total", "gain", "wins", "tasks", "methods"]
    return make_table("summary", "Summary", caption, "shift", columns, rows, keys, column_keys)


def ablation_table(cells: dict, name: str) -> dict:
    paper = PAPER["ablations"][name]
    factor, default, seeds = paper["factor"], paper["default"], paper["seeds"]
    found = defaultdict(list)  # (value, task) -> runs; values and tasks that the paper has not, too
    for (m, f, task), runs in cells.items():
        if m == OURS and (f is None or f[0] == factor):
            found[runs[0]["values"][factor] if f is None else f[1], task] += runs
    varied = {t for _, f, t in cells if f and f[0] == factor}
    tasks = [tuple(t.split()) for t in paper["rows"]]
    tasks += sorted(varied - set(tasks))
    values = list(dict.fromkeys(paper["values"] + [v for v, t in found if t in tasks]))
    values = sorted(values) if all(map(is_number, values)) else values
    labels = dict(zip(paper["values"], paper.get("labels", ()), strict=False))
    labels = [labels.get(v, f"{factor} = {v}") for v in values]
    rows = []
    for task in tasks:
        printed = dict(zip(paper["values"], paper["rows"].get(" ".join(task), ()), strict=False))
        row = []
        for v in values:
            mean, std = printed.get(v) or (None, None)
            row.append(last_three(found.get((v, task), []), seeds, paper=mean, paper_std=std))
        bold_best(row)
        rows.append((label(task, True), "", row))
    one = (
        "Mean ± sample standard deviation (ddof 1) over the last three checkpoints of one seed, the lowest that was "
        "run (1 unless named); in brackets the number of checkpoints. This ± says nothing about other seeds."
    )
    many = (
        "Mean over the last three checkpoints of a seed, then mean ± sample standard deviation (ddof 1) over the "
        f"lowest {seeds} seeds; in brackets the number of seeds."
    )
    caption = f"TAF-DT, all else as by default. {many if seeds > 1 else one} "
    caption += f"Runs of the main tables stand under their own value, by default {labels[values.index(default)]}."
    keys = [" ".join(t) for t in tasks], [json.dumps(v).strip('"') for v in values]
    table = make_table(name, paper["title"], caption, "task", labels, rows, *keys)
    return table | {"values": values}


def aggregate_tables(cells: dict) -> list[dict]:
    """What the paper has not: interquartile means, probabilities of improvement, gains."""
    methods = [m for m in NAMES if tasks_of(cells, m)]
    shifts = [s for s in SHIFTS if any(tasks_of(cells, m, s) for m in methods)]
    shifts += ["all"] * (len(shifts) > 1)

    def iqm_cell(m, shift):
        run = [k for k in methods if tasks_of(cells, k, shift)]
        groups = [finals(cells, m, t) for t in common_tasks(cells, run, tasks_of(cells, m, shift))]
        if not groups:
            return cell()
        ends = interval(iqm(np.concatenate(resample(groups), 1)), groups)
        return cell([iqm(np.concatenate(groups))], n=len(groups), **ends)

    def improvement_cell(m, shift):
        tasks = common_tasks(cells, [OURS, m], tasks_of(cells, OURS, shift))
        if not tasks:
            return cell()
        x, y = ([finals(cells, k, t) for t in tasks] for k in (OURS, m))
        draws = np.mean([beats(a, b) for a, b in zip(resample(x), resample(y, seed=1), strict=True)], 0)
        mean = np.mean([beats(a, b) for a, b in zip(x, y, strict=True)])
        return cell([mean], n=len(tasks), digits=2, **interval(draws, x + y))

    def gain_cell(m, shift, over):
        gains = []
        for task in tasks_of(cells, m, shift):
            known = [r["target_score"] for r in cells[m, None, task] if r["target_score"] is not None][:1]
            known = finals(cells, "bc", task) if over == "BC" else known
            gains += [finals(cells, m, task).mean() - np.mean(known)] if len(known) else []
        return cell([np.mean(gains)], n=len(gains)) if gains and NAMES[m] != over else cell()

    ends = (
        "with the 95 % percentile interval of a stratified bootstrap (2,000 draws of runs within tasks; a task with "
        "one seed adds no spread); in brackets the number of tasks."
    )
    text = f"Mean of the middle half of all final scores on the tasks that all methods have that were run, {ends}"
    rows = [(NAMES[m], "", [iqm_cell(m, s) for s in shifts]) for m in methods]
    tables = [make_table("iqm", "Interquartile mean", text, "method", shifts, rows)]
    others = [m for m in methods if m != OURS] if OURS in methods else []
    text = (
        "Probability that a run of TAF-DT scores higher than one of the other method on the same task, ties counted "
        f"half, averaged over the tasks that both have, {ends}"
    )
    rows = [(NAMES[m], "", [improvement_cell(m, s) for s in shifts]) for m in others]
    tables += [make_table("improvement", "Probability that TAF-DT improves", text, "over", shifts, rows)] * bool(rows)
    text = (
        "Mean final score minus the mean score of the target data's own episodes, and minus that of behaviour cloning "
        "on the target data alone (whose runs serve every source), averaged over the tasks for which both are known, "
        "in brackets how many. Rows over different tasks cannot be compared."
    )
    kinds = [(over, s) for over in ("data", "BC") for s in shifts]
    rows = [(NAMES[m], "", [gain_cell(m, s, over) for over, s in kinds]) for m in methods]
    title, columns = "Gain over the target data and over behaviour cloning", [f"over {over}, {s}" for over, s in kinds]
    return [*tables, make_table("gains", title, text, "method", columns, rows)]


def peak(stage: dict) -> float:
    return stage.get("peak_cuda_memory_mb") or stage.get("peak_memory_mb") or 0.0


def times_table(cells: dict, archives: dict) -> dict:
    paper, rows, devices = PAPER["times"], [], set()
    for key, printed in paper["rows"].items():
        columns = [[] for _ in printed]
        for run in cells.get((OURS, None, tuple(key.split())), ()):
            devices.add(run["device"])
            before = {k: s for k, s in run["stages"].items() if k in ("mmd", "ot") or k.startswith("preprocess")}
            after = {k: s for k, s in run["stages"].items() if k not in before}
            before = before or archives.get(run["preprocess"], {}).get("stages", {})
            words = ["", "", "", "command", "vae", ""]
            for i, (column, word) in enumerate(zip(columns, words, strict=True)):
                stages = [s for k, s in (before if i < 2 else after).items() if word in k]
                values = [peak(s) if i in (0, 2) else s["seconds"] for s in stages]
                column += [max(values) if i in (0, 2) else sum(values)] if values else []
        cells_ = [cell(c, p, digits=0) for c, p in zip(columns, printed, strict=True)]
        rows.append((label(tuple(key.split()), True), "", cells_))
    caption = (
        f"TAF-DT on {'; '.join(sorted(devices))}: mean ± sample standard deviation (ddof 1) over seeds, in brackets "
        "their number. Memory: on a GPU the card's, else the process's."
    )
    theirs = [f"The paper's numbers: on {paper['hardware']}."]
    return make_table("times", "Training time", caption, "task", paper["columns"], rows, theirs=theirs)


# ------------------------------------------------------------------------------------------------ formats


def ours_text(c: dict) -> str:
    if c.get("text") or c["mean"] is None:
        return c.get("text") or "—"
    number = f"{{:.{c.get('digits', 1)}f}}".format
    text = number(c["mean"]) + (f" ± {number(c['std'])}" if c["std"] is not None else "")
    text += f" [{number(c['low'])}, {number(c['high'])}]" if "low" in c else ""
    count = [f"{c['n']} of {c['of']}" if c.get("of") else str(c["n"]), c.get("remark")]
    return f"{text} ({', '.join(filter(None, count))})" if c["n"] else text


def paper_text(c: dict) -> str:
    if c["paper"] is None or isinstance(c["paper"], str):
        return f"paper {c['paper']}" if c["paper"] else ""
    number = f"{{:.{c.get('digits', 1)}f}}".format
    return f"paper {number(c['paper'])}" + (f" ± {number(c['paper_std'])}" if c["paper_std"] is not None else "")


def raised(marks, form: str = "<sup>{}</sup>") -> str:
    return form.format(",".join(map(str, marks))) if marks else ""


def markdown_text(text: str) -> str:
    """A name as text: nothing in it is a link, a tag, emphasis or the end of a cell or line."""
    return re.sub(r"([\\`*\[\]<>|~])", r"\\\1", " ".join(text.split()))


def markdown(table: dict) -> str:
    def text(c):
        ours = f"**{ours_text(c)}**" if c.get("best") else ours_text(c)
        return "; ".join(filter(None, [ours, paper_text(c)])) + raised(c.get("marks"))

    lines = [[table["head"], *table["columns"]], ["---"] * (1 + len(table["columns"]))]
    for (name, _, cells), marks in zip(table["rows"], table["row_marks"], strict=True):
        lines.append([markdown_text(name) + raised(marks), *map(text, cells)])
    lines[0] = list(map(markdown_text, lines[0]))
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = [*(f"{i}. {note}" for i, note in enumerate(table["notes"], 1)), *(f"- {note}" for note in table["about"])]
    parts = [
        f"# {table['title']}",
        f"Setting: {markdown_text(table['setting'])}.",
        body,
        table["caption"],
        "\n".join(notes),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def latex(table: dict) -> str:
    signs = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "—": "---"}
    signs |= {"^": "\\textasciicircum{}", "±": "$\\pm$", "→": "$\\to$", "<": "$<$", ">": "$>$"}

    def tex(text):
        return "".join(signs.get(c, c) for c in text)

    def text(c):
        ours = f"\\textbf{{{tex(ours_text(c))}}}" if c.get("best") else tex(ours_text(c))
        marks, paper = raised(c.get("marks"), "$^{{{}}}$"), tex(paper_text(c))
        return f"\\shortstack{{{ours}\\\\{{\\scriptsize {paper}{marks}}}}}" if paper else ours + marks

    lines = [" & ".join(map(tex, [table["head"], *table["columns"]])) + " \\\\ \\hline"]
    for (name, kind, cells), marks in zip(table["rows"], table["row_marks"], strict=True):
        row = [tex(name) + raised(marks, "$^{{{}}}$"), *map(text, cells)]
        lines.append("\\hline " * (kind == "sum") + " & ".join(row) + " \\\\")
    notes = [f"$^{{{i}}}$ {tex(note)}" for i, note in enumerate(table["notes"], 1)] + list(map(tex, table["about"]))
    caption = " ".join([tex(f"{table['title']}. Setting: {table['setting']}. {table['caption']}"), *notes])
    head = f"\\begin{{table*}}\\tiny\\centering\n\\begin{{tabular}}{{l{'r' * len(table['columns'])}}}\n"
    return head + "\n".join(lines) + f"\n\\end{{tabular}}\n\\caption{{{caption}}}\n\\end{{table*}}\n"


def comma_separated(table: dict) -> str:
    """A column for every kind of number that occurs in a column of the table; notes are numbered as in the others."""
    kinds, columns = ("text", "mean", "std", "low", "high", "n", "of", "paper", "paper_std", "marks"), []
    for i, name in enumerate(table["columns"]):
        used = [k for k in kinds if any(cells[i].get(k) not in (None, []) for _, _, cells in table["rows"])]
        used = used if {"text", "mean"} & set(used) else ["mean", *used]  # a column that was not run is there, too
        columns += [(i, k, name if k in ("text", "mean") else f"{name}, {k.replace('_', ' ')}") for k in used]
    writer = csv.writer(out := io.StringIO(), lineterminator="\n")
    writer.writerow([table["head"], *(name for _, _, name in columns), "notes"])
    for (name, _, cells), marks in zip(table["rows"], table["row_marks"], strict=True):
        values = [cells[i].get(k) for i, k, _ in columns]
        values = [" ".join(map(str, v)) if isinstance(v, list) else v for v in values]
        values = [round(v, 4) if isinstance(v, float) else v for v in values]
        writer.writerow([name, *values, " ".join(map(str, marks))])
    return out.getvalue()


def html_table(table: dict) -> str:
    esc = html.escape

    def td(i, c):
        empty = not c.get("text") and c["mean"] is None
        value = c.get("text") or ("" if empty else f"{c['mean']:.6g}")
        ours = re.sub(r"(\([^)]*\)|\[[^]]*\])", r"<small>\1</small>", esc(ours_text(c)))
        ours = f"<b>{ours}</b>" if c.get("best") else ours
        paper = f"<span class=paper>{esc(paper_text(c))}{raised(c.get('marks'))}</span>"
        names = ["empty"] * empty + ["served"] * bool(c.get("served")) + ["unrun"] * (i in hidden)
        return f'<td class="{" ".join(names)}" data-v="{esc(value)}">{ours}{paper}</td>'

    def is_run(c):
        return c.get("text") or (c["mean"] is not None and not c.get("served"))

    columns = range(len(table["columns"]))
    hidden = {i for i in columns if not any(is_run(cells[i]) for _, _, cells in table["rows"])}
    hidden = hidden if len(hidden) < len(columns) else set()
    head = f"<th scope=col><button>{esc(table['head'])}</button></th>"
    for i, c in enumerate(table["columns"]):
        head += f"<th scope=col{' class=unrun' * (i in hidden)}><button>{esc(c)}</button></th>"
    body = []
    for (name, kind, cells), marks in zip(table["rows"], table["row_marks"], strict=True):
        names = [kind] * bool(kind) + ["unrun"] * (not any(map(is_run, cells)))
        first = f'<th scope=row data-v="{esc(name)}">{esc(name)}{raised(marks)}</th>'
        body.append(f'<tr class="{" ".join(names)}">{first}{"".join(map(td, columns, cells))}</tr>\n')
    notes = "".join(f"<li>{esc(note)}</li>" for note in table["notes"])
    return (
        f"<h3>{esc(table['title'])}</h3><div class=box tabindex=0><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f"<p class=caption>{esc(' '.join([table['caption'], *table['about']]))} "
        f"<code>tables/{table['file']}.{{md,csv,tex}}</code></p>" + f"<ol class=notes>{notes}</ol>" * bool(notes)
    )


# ------------------------------------------------------------------------------------------------ figures


def svg(draw, *size) -> str | None:
    """A figure as `_svg` draws it. One that fails is left out with a line, and the rest of the report stays."""
    try:
        return _svg(draw, *size)
    except Exception as error:
        print(f"left out: a figure ({' '.join(f'{type(error).__name__}: {error}'.split())})", file=sys.stderr)
        return None


def _svg(draw, rows: int, columns: int, width: float = 3.6, height: float = 2.7) -> str:
    """draw(axes) on a grid of panels returns what the legend shows, name -> artist. The ink is that of the page that
    shows the figure, light or dark."""
    style = dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], INK)
    style |= {"svg.hashsalt": "report", "font.size": 9, "axes.titlesize": 9, "legend.frameon": False, "axes.grid": True}
    style |= {"axes.axisbelow": True, "grid.alpha": 0.25, "svg.fonttype": "none"}  # text, not its outlines
    style["text.parse_math"] = False  # "$" in the name of a file is no formula
    style |= {"axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False, "grid.color": INK}
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(width * columns, height * rows + 0.4), layout="constrained", facecolor="none")
        axes = fig.subplots(rows, columns, squeeze=False)
        entries = draw(axes)
        for ax in (ax for ax in axes.flat if not ax.has_data()):
            ax.set_axis_off()
        if entries:
            widest = max(map(len, entries)) * 0.075 + 0.6  # inches of an entry: a row of them must not leave the figure
            ncols = max(1, min(3 * columns, int(fig.get_figwidth() / widest)))
            fig.legend(entries.values(), entries, loc="outside lower center", ncols=ncols)
        fig.savefig(out := io.StringIO(), format="svg", metadata={"Date": None})
    text = out.getvalue().replace(INK, "currentColor")
    ink = "<style>svg{color:#333}@media(prefers-color-scheme:dark){svg{color:#ccc}}</style>"
    return re.sub(r"(<svg\b[^>]*>)", rf"\1{ink}", text[text.index("<svg") :], count=1)


def steps_of(runs: list[dict]):
    """What a figure has on its horizontal axis, as a function of run and update, and its name. Methods that were given
    different numbers of updates are shown side by side by the share that they have done."""

    def updates(run):
        return run["budget"].get("updates") or max((e["step"] for e in run["evaluations"]), default=1)

    if len({updates(run) for run in runs}) > 1:
        return lambda run, step: round(100 * step / updates(run), 6), "share of the method's updates, %"
    return lambda run, step: step / 1000, "updates / 1000"


def curves_figure(cells: dict, shift: str):
    found = {t for m in NAMES for t in tasks_of(cells, m, shift) if any(r["evaluations"] for r in cells[m, None, t])}
    tasks = [t for t in MAIN if t in found] + sorted(found - set(MAIN))
    place, name = steps_of([run for m in NAMES for t in tasks for run in cells.get((m, None, t), ())])

    def draw(axes):
        entries = {}
        for ax, task in zip(axes.flat, tasks, strict=False):
            for m in NAMES:
                runs, at = cells.get((m, None, task), ()), defaultdict(list)
                for run in runs:
                    for e in run["evaluations"]:
                        at[place(run, e["step"])].append(e["score"])
                if not at:
                    continue
                x = sorted(at)
                mean, low, high = ([f(at[s]) for s in x] for f in (np.mean, min, max))
                (entries[NAMES[m]],) = ax.plot(x, mean, **LINES[m], marker="o" if len(x) == 1 else None)
                if low != high:
                    ax.fill_between(x, low, high, color=LINES[m]["color"], alpha=0.15, lw=0)
                if runs[0]["target_score"] is not None:
                    entries["target data"] = ax.axhline(runs[0]["target_score"], color=INK, lw=1, ls=(0, (1, 3)))
            ax.set(title=label(task), xlabel=name, ylabel="normalised score")
        return entries

    columns = min(3, len(tasks))
    return svg(draw, math.ceil(len(tasks) / columns), columns) if tasks else None


def junction_figure(cells: dict):
    """Rows: tasks; panels: jump of the action, jump of Q, TD error."""
    found = defaultdict(dict)  # task -> method -> (panel, stitched or not) -> step -> one value a seed
    shown = [run for (_, factor, _), runs in cells.items() for run in runs if factor is None and run["diagnostics"]]
    place, name = steps_of(shown)
    for (m, factor, task), runs in cells.items():
        at = defaultdict(lambda: defaultdict(list))
        for run in runs if factor is None else ():
            for d in run["diagnostics"]:
                for where, key in itertools.product(("stitched", "unstitched"), ("J_a", "J_Q", "TD")):
                    if is_number(value := as_dict(d.get(where)).get(key)):
                        at[key, where][place(run, d["step"])].append(value)
        found[task] |= {m: at} if at else {}
    tasks = [t for t in found if found[t]]

    def draw(axes):
        entries = {}
        titles = {"J_a": "jump of the action, J_a", "J_Q": "jump of Q, J_Q", "TD": "TD error near the junction"}
        for row, task in zip(axes, tasks, strict=True):
            for ax, (key, title) in zip(row, titles.items(), strict=True):
                for m, at in found[task].items():
                    for where, ls in (("stitched", "-"), ("unstitched", ":")):
                        if points := sorted(at[key, where].items()):
                            x, y = [s for s, _ in points], smooth([np.mean(v) for _, v in points])
                            line = ax.plot(x, y, color=LINES[m]["color"], ls=ls, marker="o" if len(x) == 1 else None)
                            entries[f"{NAMES[m]}, {where}"] = line[0]
                ax.set(title=f"{label(task, True)}\n{title}", xlabel=name)
        return entries

    return svg(draw, len(tasks), 3) if tasks else None


def sweep_figure(table: dict, factor: str):
    def draw(axes):
        entries, ax = {}, axes[0, 0]
        for i, (name, _, row) in enumerate(table["rows"]):
            color, points = COLORS[i % len(COLORS)], list(zip(table["values"], row, strict=True))
            ours = [(v, c["mean"], c["std"] or 0) for v, c in points if c["mean"] is not None]
            paper = [(v, c["paper"]) for v, c in points if c["paper"] is not None]
            if ours:
                entries[name] = ax.errorbar(*zip(*ours, strict=True), color=color, marker="o", capsize=3)
            if ours and paper:
                (entries["the paper's"],) = ax.plot(*zip(*paper, strict=True), color=color, ls=":", marker="x")
        ax.set(xlabel=factor, ylabel="normalised score")
        return entries

    return svg(draw, 1, 1, 7.2, 4)


def profile_groups(cells: dict) -> dict:
    """Scores of each method that was run, an array for each task that all of them have."""
    methods = [m for m in NAMES if tasks_of(cells, m)]
    common = common_tasks(cells, methods, tasks_of(cells, methods[0]))
    return {m: [finals(cells, m, t) for t in common] for m in methods} if common else {}


def profile_figure(groups: dict):
    scores = np.concatenate([x for g in groups.values() for x in g])
    taus = np.linspace(min(0, scores.min()), max(100, scores.max()), 200)

    def draw(axes):
        entries, ax = {}, axes[0, 0]
        for m, g in groups.items():
            (entries[NAMES[m]],) = ax.plot(taus, profile(g, taus), **LINES[m])
            if any(len(x) > 1 for x in g):
                low, high = np.percentile(profile(resample(g, 500), taus), [2.5, 97.5], 0)
                ax.fill_between(taus, low, high, color=LINES[m]["color"], alpha=0.12, lw=0)
        ax.set(xlabel="normalised score τ", ylabel="share of runs above τ")
        return entries

    return svg(draw, 1, 1, 7.2, 4)


def read_archives(runs: list[dict], root: Path) -> tuple[dict, list[str]]:
    """What taf_preprocess.py wrote, where it still exists, as histograms."""
    archives, problems = {}, []
    for key in sorted({r["preprocess"] for r in runs if r["preprocess"]}):
        path = next(
            (p for p in (Path(key), root.parent / key, root / "preprocess" / Path(key).name) if p.is_file()), None
        )
        if path is None:
            continue
        try:
            found = read_npz(path, "gate", "retained", "d_m", "w", "meta")
            gate, retained, d_m, w = (found[name] for name in ("gate", "retained", "d_m", "w"))
            meta = json.loads(str(found["meta"]))
            d_m, kept, n = d_m[np.isfinite(d_m)], d_m[gate & np.isfinite(d_m)], int(retained.sum())
            edges = np.histogram_bin_edges(d_m, 60)
            parts = {"kept": np.histogram(kept, edges), "all": np.histogram(d_m, edges)}
            parts |= {"w": np.histogram(w[retained] * n, 60), "stages": stages_of(meta)}
            archives[key] = parts | {"share": f"{n:,} of {len(retained):,} transitions retained"}
        except (OSError, ValueError, IndexError, TypeError) as error:  # damaged, or the file of something else
            problems.append(f"{path}: {' '.join(str(error).split())}")
    return archives, problems


def gate_figure(runs: list[dict], archives: dict, limit: int = 12):
    """A row for every pair of datasets; not more than `limit`, or the page is nothing else."""
    plain = [r for r in runs if r["method"] == OURS and r["factor"] is None]  # OTDF has weights and no gate
    # with --filter none, as for the target alone, there is neither a score nor a weight to show
    shown = {k for k, a in archives.items() if a["all"][0].any() or np.count_nonzero(a["w"][0]) > 1}
    tasks = {r["preprocess"]: r["task"] for r in plain if r["preprocess"] in shown}
    chosen = sorted(tasks, key=lambda key: (*tasks[key], key))[:limit]

    def draw(axes):
        for (left, right), key in zip(axes, chosen, strict=True):
            left.stairs(*archives[key]["all"], fill=True, color="#8a8a8a", alpha=0.6, label="dropped")
            left.stairs(*archives[key]["kept"], fill=True, color=COLORS[0], label="retained")
            left.legend(loc="upper right")  # in every panel: the figure may be long
            right.stairs(*archives[key]["w"], fill=True, color=COLORS[0])
            left.set(xlabel="MMD to the target's fragments, d_m", ylabel="source fragments")
            left.set_title(f"{label(tasks[key], True)}\n{archives[key]['share']}")
            right.set(xlabel="weight, as a multiple of the uniform one", ylabel="retained transitions")

    return svg(draw, len(chosen), 2, 4.6) if chosen else None


def stages_figure(runs: list[dict]):
    costs, devices = defaultdict(lambda: defaultdict(list)), {r["device"] for r in runs}
    for r in sorted(runs, key=lambda r: (list(NAMES).index(r["method"]), r["device"]), reverse=True):
        for name, stage in r["stages"].items():
            bar = NAMES[r["method"]] + f", {r['device']}" * (len(devices) > 1)
            costs[bar][name].append((stage["seconds"] / 60, peak(stage)))
    names = list(dict.fromkeys(name for stages in costs.values() for name in stages))

    def draw(axes):
        entries, (time, memory) = {}, axes[0]
        for bar, stages in costs.items():
            left = 0.0
            for name, values in stages.items():
                minutes, color = np.mean([v for v, _ in values]), COLORS[names.index(name) % len(COLORS)]
                entries[name] = time.barh(bar, minutes, left=left, color=color)
                left += minutes
            memory.barh(bar, max(p for values in stages.values() for _, p in values), color=COLORS[-1])
        time.set(xlabel="minutes a run, mean")
        memory.set(xlabel="peak memory, MB")
        return entries

    return svg(draw, 1, 2, 4.6, 0.9 + 0.3 * len(costs)) if costs else None


# --------------------------------------------------------------------------------------------------- page

CSS = """
:root{color-scheme:light dark;--ink:#1d1f21;--soft:#666b70;--page:#fff;--line:#d5d8db;--band:#f4f5f6;--accent:#0b63c5}
@media(prefers-color-scheme:dark){:root{
--ink:#e4e6e8;--soft:#9aa0a6;--page:#15171a;--line:#3a3e43;--band:#1f2226;--accent:#7db5ff}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1240px;padding:1rem;color:var(--ink);background:var(--page)}
body{font:16px/1.5 system-ui,sans-serif}h1{font-size:1.6rem;margin:.5rem 0}h3{font-size:1.05rem;margin:2rem 0 .5rem}
h2{font-size:1.3rem;margin:2.5rem 0 .5rem;border-bottom:2px solid var(--line)}a{color:var(--accent)}
code{font-size:.9em;overflow-wrap:anywhere}.box{overflow-x:auto;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;font-size:13px;line-height:1.35;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.3rem .4rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line);vertical-align:top}
tr>:first-child{text-align:left;font-weight:500;position:sticky;left:0;background:var(--page)}
thead th,tr.sum>*{background:var(--band)!important}tr.sum th{font-weight:600}thead th{vertical-align:bottom}
tr>:first-child{border-right:1px solid var(--line)}
th[scope=row]{min-width:8.5rem}th{white-space:normal!important}button{all:unset;cursor:pointer;font-weight:600}
button:focus-visible,.box:focus-visible{outline:2px solid var(--accent)}
button::after{content:" ↕";color:var(--soft);font-weight:400}[aria-sort=descending] button::after{content:" ↓"}
[aria-sort=ascending] button::after{content:" ↑"}body:not(:has(#show:checked)) .unrun{display:none}
.paper{display:block;color:var(--soft);font-size:12px;font-weight:400}small{color:var(--soft);font-weight:400}
td.served{font-style:italic;color:var(--soft)}td.served small{display:block}
td.empty{color:var(--soft);background:repeating-linear-gradient(135deg,transparent 0 6px,var(--band) 6px 9px)}
.caption,.notes,figcaption,.none{color:var(--soft);font-size:14px;max-width:80ch}
.notes{padding-left:1.5rem;max-width:none;columns:2 24rem;column-gap:3rem}
sup{font-size:10px;line-height:0;font-weight:400;color:var(--accent);margin-left:2px}
figure{margin:0}figcaption{margin-top:.4rem}figure .box{padding:.3rem;width:fit-content;max-width:100%}
img{display:block;max-width:100%;min-width:calc(.75*var(--w));height:auto}
@media(max-width:600px){body{padding:.6rem;font-size:15px}}
"""

JS = """
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], original = [...body.rows];
  heads.forEach((th, i) => th.firstChild.addEventListener("click", () => {
    const next = {descending: "ascending", ascending: "none"}[th.getAttribute("aria-sort")] || "descending";
    heads.forEach(h => h.removeAttribute("aria-sort"));
    th.setAttribute("aria-sort", next);
    const sums = original.filter(r => r.classList.contains("sum"));
    const rows = original.filter(r => !sums.includes(r));
    rows.sort((a, b) => {  // empty cells last, whatever the direction
      const [x, y] = [a, b].map(r => r.cells[i].dataset.v);
      if (x === "" || y === "") return (x === "") - (y === "");
      return (next === "ascending" ? 1 : -1) * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
    });
    body.append(...(next === "none" ? original : [...rows, ...sums]));
  }));
}
"""


def html_figure(figure: dict) -> str:
    width, title = re.search(r'width="([\d.]+)pt"', figure["svg"])[1], html.escape(figure["title"])
    data = base64.b64encode(figure["svg"].encode()).decode()
    return (
        f'<h3>{title}</h3><figure><div class=box tabindex=0><img alt="{title}" style="--w:{width}pt" '
        f'src="data:image/svg+xml;base64,{data}"></div><figcaption>{html.escape(figure["caption"])} '
        f"<code>figures/{figure['file']}.svg</code></figcaption></figure>"
    )


# data beside which the paper's numbers may stand: its own, or the source rolled out anew from the policies that made it
PUBLISHED = ("published", "regenerated-d4rl and published")


def build(runs: list[dict], archives: dict) -> list[dict]:
    """The parts of one setting in the order of the page: tables, figures, and what was not run."""
    cells, parts, published = by_cell(runs), [], runs[0]["setting"][0] in PUBLISHED
    episodes = sorted(set().union(*(r["episodes"] for r in runs)))
    episodes = f", {' or '.join(map(str, episodes))} episodes a run" if episodes else ""

    def figure(name, title, caption, drawn):
        parts.extend([{"name": name, "title": title, "caption": caption, "svg": drawn}] if drawn else [])

    def add(*tables):
        parts.extend(tables if published else map(without_paper, tables))

    def missing(name, title):
        parts.append({"name": name, "title": title})

    for shift in SHIFTS:
        if any(tasks_of(cells, m, shift) for m in NAMES):
            add(main_table(cells, shift, episodes))
            text = "Mean over seeds of every evaluation; the band is from the lowest seed to the highest."
            figure(f"curves-{shift}", f"Learning curves, {shift} shift", text, curves_figure(cells, shift))
        else:
            missing(shift, f"{shift.capitalize()} shift")
    if any(factor is None for _, factor, _ in cells):
        add(summary_table(cells), *aggregate_tables(cells))
        groups = profile_groups(cells)
        text = "For every score τ the share of runs that end above it, averaged over the tasks that all these methods "
        text += f"have (number of tasks: {len(next(iter(groups.values()), ()))}); 95 % bootstrap bands."
        figure("profiles", "Performance profiles", text, profile_figure(groups) if groups else None)
    for name, ablation in PAPER["ablations"].items():
        factor = ablation["factor"]
        if not any(f and f[0] == factor for _, f, _ in cells):
            missing(name, ablation["title"])
            continue
        add(ablation_table(cells, name))
        if factor in ("alpha", "xi", "zeta"):
            text = "Means of the table above; error bars are its ±."
            figure(f"sweep-{factor}", f"Score against {factor}", text, sweep_figure(parts[-1], factor))
    text = "Mean over seeds, then moving mean over 5 checkpoints; stitched sequences, and unstitched ones to compare. "
    text += " ".join(note["text"] for note in PAPER["notes"] if "junction" in note["cells"])
    figure("junction", title := "Stitch-junction diagnostics", text, drawn := junction_figure(cells))
    if not drawn:
        missing("junction", title)
    text = (
        "Left: source fragments by MMD score, those that the gate drops in grey, those that it retains in blue. Right: "
    )
    text += "weights of what is retained. A row for every pair of data, at most 12."
    figure("gate", "Gate and weights", text, gate_figure(runs, archives))
    if any((OURS, None, tuple(key.split())) in cells for key in PAPER["times"]["rows"]):
        add(times_table(cells, archives))
    else:
        missing("times", "Training time")
    text = "Mean minutes of a run by stage, and the largest peak memory of any run."
    figure("stages", "Time and memory per stage", text, stages_figure(runs))
    return parts


def settings_of(runs: list[dict], archives: dict) -> list[dict]:
    """A part of the page for every kind of data and budget; full budgets on published data first."""
    groups, settings = defaultdict(list), []
    for run in runs:
        groups[run["setting"]].append(run)
    for kind, budget in [s for s, mine in groups.items() if all(r["method"] == "bc" for r in mine)]:
        # it sees no source data: its runs stand beside all that have the same target data
        hosts = [s for s in groups if s[0].endswith(f" and {kind}") and s[1].split(",")[0] == budget]
        for host in hosts:
            groups[host] += groups[kind, budget]
        if hosts:
            del groups[kind, budget]
    for (kind, budget), mine in sorted(groups.items(), key=lambda g: (g[0][0] != "published", g[0][1] != "full", g[0])):
        short = budget if budget in ("full", "quick") else f"custom-{hashlib.sha256(budget.encode()).hexdigest()[:8]}"
        slug, name = f"{re.sub('[^a-z0-9]+', '-', kind.lower())}-{short}", f"{kind} data, budget: {budget}"
        flags = {"published": ["--data", "d4rl"], "embedded": ["--data", "embedded"]}.get(kind)
        if flags and budget != "full":  # other budgets are nothing that run_all.sh can be asked for
            flags = [*flags, "--quick"] if budget.startswith("quick") else None
        devices, commits = ("; ".join(sorted({r[k] for r in mine})) for k in ("device", "commit"))
        files = defaultdict(set)
        for run in mine:
            files[run["task"]] |= {run["sha256"]} - {""}
        mixed = ", ".join(label(task, True) for task in files if len(files[task]) > 1)
        about = f"Runs: {len(mine)}, on {devices}; code version {commits}."
        efforts = {NAMES[r["method"]]: r["effort"] for r in mine if r["effort"]}
        about += "".join(f" {method}: {effort}." for method, effort in sorted(efforts.items()))
        about += f" Beware: of these tasks the runs saw different target files: {mixed}." if mixed else ""
        parts = [part | {"file": f"{part['name']}-{slug}", "setting": name} for part in build(mine, archives)]
        settings.append(
            {"slug": slug, "name": name[0].upper() + name[1:], "about": about, "flags": flags, "parts": parts}
        )
    return settings


def page(settings: list[dict], problems: list[str]) -> str:
    esc, body, links = html.escape, [], []
    for s in settings:
        links.append(f"<li><a href=#{s['slug']}>{esc(s['name'])}</a></li>")
        body.append(f"<section><h2 id={s['slug']}>{esc(s['name'])}</h2><p class=caption>{esc(s['about'])}</p>")
        for part in s["parts"]:
            words = ["bash", "run_all.sh", "--table", part["name"].replace("_", "-"), *(s["flags"] or ())]
            command = f" <code>{' '.join(words)}</code>" if s["flags"] else ""
            nothing = f"<p class=none><b>{esc(part['title'])}</b>: not run.{command}</p>"
            body.append(html_figure(part) if "svg" in part else html_table(part) if "rows" in part else nothing)
        body.append("</section>")
    if problems:
        links.append("<li><a href=#left-out>Left out</a></li>")
        lines = "".join(f"<li><code>{esc(p)}</code></li>" for p in problems)
        body.append(f"<section><h2 id=left-out>Left out</h2><ul>{lines}</ul></section>")
    return (
        '<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>TAF-DT: results</title><style>{CSS}</style></head><body><h1>TAF-DT: results</h1><p>Ours, with the "
        "paper's number in the cell where the data are the same. Every kind of data and every budget has a section of "
        f"its own. Click the head of a column to sort by it.</p><ul>{''.join(links)}</ul>"
        "<label><input type=checkbox id=show> show rows and columns that were not run</label>"
        f"{''.join(body)}<script>{JS}</script></body></html>\n"
    )


def write(path: Path, text: str) -> None:
    try:
        with atomic(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")  # paths may hold anything
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); make room, or choose another --out") from None


def main(args: Args) -> Path:
    runs, problems = read_runs(args.runs, args.own_budgets)
    archives, more = read_archives(runs, args.runs)
    for line in (problems := problems + more):
        print(f"left out: {line}", file=sys.stderr)
    if not runs:
        raise UserError(f"no usable result.json under {args.runs}; run something first (bash run_all.sh --quick)")
    settings = settings_of(runs, archives)
    for part in (part for s in settings for part in s["parts"]):
        if "svg" in part:
            write(args.out / "figures" / f"{part['file']}.svg", part["svg"])
        for suffix, form in (("md", markdown), ("csv", comma_separated), ("tex", latex)) if "rows" in part else ():
            write(args.out / "tables" / f"{part['file']}.{suffix}", form(part))
    write(args.out / "report.html", page(settings, problems))  # last: what it names is there
    print(f"{len(runs)} runs, {len(settings)} settings, {len(problems)} files left out: {args.out / 'report.html'}")
    return args.out / "report.html"


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
