"""Figures as SVG, which take their ink color from the page that shows them, light or dark."""

import io
import itertools
import math
import re
import sys
from collections import defaultdict

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.methods import METHODS, OURS, label_of
from experiments.paper import TASKS
from experiments.report.other_tables import methods_run, peak
from experiments.report.parts import Table, task_label
from experiments.report.reading import (
    Archive,
    Cells,
    Run,
    as_dict,
    common_tasks,
    finals,
    is_number,
    tasks_of,
)
from experiments.report.statistics import profile, resample, smooth

COLORS = [method.color for method in METHODS.values()]
BLUE, GREY = METHODS["iql"].color, "#8a8a8a"
INK = "#7b7c7d"  # replaced by the page's own color, see `svg`
STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "svg.hashsalt": "report",
    "text.parse_math": False,  # "$" in the name of a file does not begin a formula
    "svg.fonttype": "none",  # text, not its outlines
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def line_of(method: str) -> dict:
    row = METHODS[method]
    return dict(color=row.color, ls=row.dashes, lw=2.2 if method == OURS else 1.3)


def svg(draw, *size) -> str | None:
    """A figure as `_svg` draws it. If that fails, a line says so and the report goes without it."""
    try:
        return _svg(draw, *size)
    except Exception as error:  # matplotlib raises many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"left out: a figure ({reason})", file=sys.stderr)
        return None


def _svg(draw, rows: int, columns: int, width: float = 3.6, height: float = 2.7) -> str:
    """draw(axes) draws on a grid of panels and returns what the legend shows, name -> artist."""
    with matplotlib.rc_context(STYLE):
        size = (width * columns, height * rows + 0.4)
        fig = Figure(figsize=size, layout="constrained", facecolor="none")
        axes = fig.subplots(rows, columns, squeeze=False)
        entries = draw(axes)
        for ax in (ax for ax in axes.flat if not ax.has_data()):
            ax.set_axis_off()
        if entries:
            # Inches of an entry: a row of them must not leave the figure.
            widest = max(map(len, entries)) * 0.075 + 0.6
            ncols = max(1, min(3 * columns, int(fig.get_figwidth() / widest)))
            fig.legend(entries.values(), entries, loc="outside lower center", ncols=ncols)
        fig.savefig(out := io.StringIO(), format="svg", metadata={"Date": None})
    text = out.getvalue().replace(INK, "currentColor")
    dark = "@media(prefers-color-scheme:dark){svg{color:#ccc}}"
    ink = f"<style>svg{{color:#333}}{dark}</style>"
    return re.sub(r"(<svg\b[^>]*>)", rf"\1{ink}", text[text.index("<svg") :], count=1)


def steps_of(runs: list[Run]):
    """What a figure has on its horizontal axis, as a function of run and update, and its name.
    Methods that had different numbers of updates are shown side by side by the share that is
    done."""

    def updates(run: Run):
        return run.budget.get("updates") or max((e["step"] for e in run.evaluations), default=1)

    if len({updates(run) for run in runs}) > 1:
        name = "share of the method's updates, %"
        return lambda run, step: round(100 * step / updates(run), 6), name
    return lambda run, step: step / 1000, "updates / 1000"


def curves_figure(cells: Cells, shift: str) -> str | None:
    def has_curve(method: str, task) -> bool:
        return any(run.evaluations for run in cells[method, None, task])

    found = {t for m in METHODS for t in tasks_of(cells, m, shift) if has_curve(m, t)}
    tasks = [t for t in TASKS if t in found] + sorted(found - set(TASKS))
    if not tasks:
        return None
    runs = [run for m in METHODS for t in tasks for run in cells.get((m, None, t), ())]
    place, name = steps_of(runs)

    def curve(ax, method: str, runs: list[Run]) -> dict:
        at = defaultdict(list)
        for run in runs:
            for e in run.evaluations:
                at[place(run, e["step"])].append(e["score"])
        if not at:
            return {}
        x, line = sorted(at), line_of(method)
        mean, low, high = ([f(at[s]) for s in x] for f in (np.mean, min, max))
        (artist,) = ax.plot(x, mean, **line, marker="o" if len(x) == 1 else None)
        if low != high:
            ax.fill_between(x, low, high, color=line["color"], alpha=0.15, lw=0)
        entries, score = {label_of(method): artist}, runs[0].target_score
        if score is not None:
            entries["target data"] = ax.axhline(score, color=INK, lw=1, ls=(0, (1, 3)))
        return entries

    def draw(axes):
        entries = {}
        for ax, task in zip(axes.flat, tasks, strict=False):
            for method in METHODS:
                entries |= curve(ax, method, cells.get((method, None, task), ()))
            ax.set(title=task_label(task), xlabel=name, ylabel="normalised score")
        return entries

    columns = min(3, len(tasks))
    return svg(draw, math.ceil(len(tasks) / columns), columns)


JUNCTION_PANELS = {
    "J_a": "jump of the action, J_a",
    "J_Q": "jump of Q, J_Q",
    "TD": "TD error near the junction",
}


def junction_values(runs: list[Run], place) -> dict:
    """(panel, stitched or not) -> step -> one value per seed."""
    at = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for d in run.diagnostics:
            for where, key in itertools.product(("stitched", "unstitched"), JUNCTION_PANELS):
                if is_number(value := as_dict(d.get(where)).get(key)):
                    at[key, where][place(run, d["step"])].append(value)
    return at


def junction_figure(cells: Cells) -> str | None:
    """A row per task; panels: jump of the action, jump of Q, TD error."""
    plain = {(m, task): runs for (m, factor, task), runs in cells.items() if factor is None}
    place, name = steps_of([run for runs in plain.values() for run in runs if run.diagnostics])
    found = defaultdict(dict)  # task -> method -> values
    for (method, task), runs in plain.items():
        if at := junction_values(runs, place):
            found[task][method] = at
    if not found:
        return None

    def draw(axes):
        entries = {}
        for row, (task, methods) in zip(axes, found.items(), strict=True):
            for ax, (key, title) in zip(row, JUNCTION_PANELS.items(), strict=True):
                for (m, at), where in itertools.product(
                    methods.items(), ("stitched", "unstitched")
                ):
                    if points := sorted(at[key, where].items()):
                        x, y = [s for s, _ in points], smooth([np.mean(v) for _, v in points])
                        ls = "-" if where == "stitched" else ":"
                        options = dict(color=METHODS[m].color, ls=ls)
                        (line,) = ax.plot(x, y, **options, marker="o" if len(x) == 1 else None)
                        entries[f"{label_of(m)}, {where}"] = line
                ax.set(title=f"{task_label(task, True)}\n{title}", xlabel=name)
        return entries

    return svg(draw, len(found), 3)


def sweep_figure(table: Table, factor: str) -> str:
    """Score against the value of an ablation's factor."""

    def draw(axes):
        entries, ax = {}, axes[0, 0]
        for i, row in enumerate(table.rows):
            color, points = COLORS[i % len(COLORS)], list(zip(table.values, row.cells, strict=True))
            ours = [(v, c.mean, c.std or 0) for v, c in points if c.mean is not None]
            paper = [(v, c.paper) for v, c in points if c.paper is not None]
            if ours:
                x, y, error = zip(*ours, strict=True)
                entries[row.label] = ax.errorbar(x, y, error, color=color, marker="o", capsize=3)
            if ours and paper:
                x, y = zip(*paper, strict=True)
                (entries["the paper's"],) = ax.plot(x, y, color=color, ls=":", marker="x")
        ax.set(xlabel=factor, ylabel="normalised score")
        return entries

    return svg(draw, 1, 1, 7.2, 4)


def profile_groups(cells: Cells) -> dict[str, list[np.ndarray]]:
    """Scores of each method that was run, an array for each task that all of them have."""
    methods = methods_run(cells)
    common = common_tasks(cells, methods, tasks_of(cells, methods[0]))
    return {m: [finals(cells, m, t) for t in common] for m in methods} if common else {}


def profile_figure(groups: dict[str, list[np.ndarray]]) -> str | None:
    if not groups:
        return None
    scores = np.concatenate([x for g in groups.values() for x in g])
    taus = np.linspace(min(0, scores.min()), max(100, scores.max()), 200)

    def draw(axes):
        entries, ax = {}, axes[0, 0]
        for m, g in groups.items():
            (entries[label_of(m)],) = ax.plot(taus, profile(g, taus), **line_of(m))
            if any(len(x) > 1 for x in g):
                low, high = np.percentile(profile(resample(g, 500), taus), [2.5, 97.5], 0)
                ax.fill_between(taus, low, high, color=METHODS[m].color, alpha=0.12, lw=0)
        ax.set(xlabel="normalised score τ", ylabel="share of runs above τ")
        return entries

    return svg(draw, 1, 1, 7.2, 4)


def gate_figure(runs: list[Run], archives: dict[str, Archive], limit: int = 12) -> str | None:
    """A row per pair of datasets, at most `limit`, so that it does not fill the page."""

    def has_something(archive: Archive) -> bool:
        # With --filter none, as for the target alone, there is neither a score nor a weight.
        return archive.scores[0].any() or np.count_nonzero(archive.weights[0]) > 1

    shown = {key for key, archive in archives.items() if has_something(archive)}
    # OTDF has weights and no gate.
    plain = [run for run in runs if run.method == OURS and run.factor is None]
    tasks = {run.preprocess: run.task for run in plain if run.preprocess in shown}
    chosen = sorted(tasks, key=lambda key: (*tasks[key], key))[:limit]
    if not chosen:
        return None

    def draw(axes):
        for (left, right), key in zip(axes, chosen, strict=True):
            archive = archives[key]
            left.stairs(*archive.scores, fill=True, color=GREY, alpha=0.6, label="dropped")
            left.stairs(*archive.kept, fill=True, color=BLUE, label="retained")
            left.legend(loc="upper right")  # in every panel: the figure may be long
            right.stairs(*archive.weights, fill=True, color=BLUE)
            left.set(xlabel="MMD to the target's fragments, d_m", ylabel="source fragments")
            left.set_title(f"{task_label(tasks[key], True)}\n{archive.share}")
            right.set(
                xlabel="weight, as a multiple of the uniform one", ylabel="retained transitions"
            )

    return svg(draw, len(chosen), 2, 4.6)


def stages_figure(runs: list[Run]) -> str | None:
    costs, devices = defaultdict(lambda: defaultdict(list)), {run.device for run in runs}
    order = list(METHODS)
    for run in sorted(runs, key=lambda r: (order.index(r.method), r.device), reverse=True):
        bar = label_of(run.method) + (f", {run.device}" if len(devices) > 1 else "")
        for name, stage in run.stages.items():
            costs[bar][name].append((stage["seconds"] / 60, peak(stage)))
    if not costs:
        return None
    names = list(dict.fromkeys(name for stages in costs.values() for name in stages))

    def draw(axes):
        entries, (time, memory) = {}, axes[0]
        for bar, stages in costs.items():
            left = 0.0
            for name, values in stages.items():
                minutes = np.mean([seconds for seconds, _ in values])
                color = COLORS[names.index(name) % len(COLORS)]
                entries[name] = time.barh(bar, minutes, left=left, color=color)
                left += minutes
            most = max(p for values in stages.values() for _, p in values)
            memory.barh(bar, most, color=GREY)
        time.set(xlabel="minutes per run, mean")
        memory.set(xlabel="peak memory, MB")
        return entries

    return svg(draw, 1, 2, 4.6, 0.9 + 0.3 * len(costs))
