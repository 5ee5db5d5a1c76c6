"""Table and curves of docs/anchors.md, from the runs in results/published/anchors:

python -m studies.anchors
"""

import importlib
import itertools
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from dynashift.errors import one_line_errors
from dynashift.files import atomic
from experiments.methods import METHODS, OURS, label_of
from studies.table import RESULTS, fill, flag, markdown, results

PAGE = RESULTS.parent / "docs" / "anchors.md"
FIGURE = RESULTS / "published" / "anchors.png"
NONE, KINEMATIC = "hopper none, medium", "hopper kinematic, medium to medium"
# What docs/anchors.md gives as published, the first number of each row; with ours beside it.
PUBLISHED = {("bc", NONE): 53.5, ("iql", NONE): 66.3, ("dt", NONE): 67.6, ("qt", NONE): 97.0}
PUBLISHED |= {("otdf", KINEMATIC): 65.6}
# Arguments that the table names in its column for the budget, or that change no training.
BUDGET = {"source_size", "updates", "eval_every", "guided", "width", "hidden", "lr", "batch"}
HEAD = ("method", "task", "changed", "budget", "runs", "last three", "final", "best")
HEAD += ("guided", "best guided", "critics: Q, return, correlation")
RULES = ("mean_of_last_three", "final", "best")


def task(raw: dict) -> str:
    args = raw["args"]
    data = Path(args["source"]).stem
    if args["target"] != "none":
        data += f" to {Path(args['target']).stem}"
    return f"{args['env']} {args['shift']}, {data}"


def variant(raw: dict) -> str:
    """The flags in which a run differs from the method as it is by default."""
    changed = {name: x for name, x in raw["changed"].items() if name not in BUDGET}
    words = [f"`--{name.replace('_', '-')}`" for name, x in changed.items() if x is True]
    return ", ".join(words + [flag(name, x) for name, x in changed.items() if x is not True])


def budget(raw: dict) -> str:
    args, method = raw["args"], raw["method"]
    script = method if method == OURS else f"baselines.{method}"
    official = importlib.import_module(script).Args.updates
    parts = [f"{args['updates']:,} of {official:,} updates"]
    if "layers" in args:
        windows = args.get("batch") or args["target_batch"]
        parts += [f"{windows} windows of {args['K']}"]
        parts += [f"{args['layers']} layers of width {args['width']}"]
    else:
        size = args.get("batch") or f"{args['source_batch']} + {args['target_batch']}"
        parts += [f"{size} transitions", f"width {args['hidden']}"]
    parts += [f"rate {args['lr']:g}"] + ([f"tau {args['tau']:g}"] if "tau" in args else [])
    transitions = max(x["transitions"] for x in raw["data"].values())
    return "; ".join([*parts, f"{transitions:,} transitions of data"])


def mean(numbers: list[float | None], digits: int = 1) -> str:
    """Mean and standard deviation over seeds; nothing if a run has no such number."""
    if None in numbers:
        return ""
    spread = f" ± {np.std(numbers, ddof=1):.{digits}f}" if len(numbers) > 1 else ""
    return f"{np.mean(numbers):.{digits}f}{spread}"


def critics(runs: list[dict]) -> str:
    """What the critics say of the data's actions at the end, and what the data earn after them."""
    found = [raw["evaluations"][-1].get("critics") for raw in runs]
    if not all(x and x["return"] is not None for x in found):
        return ""
    columns = (("q", 0), ("return", 0), ("correlation", 2))
    return ", ".join(mean([x[name] for x in found], digits) for name, digits in columns)


def order(raw: dict) -> tuple:
    args = raw["args"]
    size = args.get("width", args.get("hidden"))
    where = list(METHODS).index(raw["method"]), task(raw), size, args["updates"]
    return *where, variant(raw), budget(raw), args["seed"]


def groups(runs: list[dict]) -> list[list[dict]]:
    """Runs that differ in the seed alone."""
    ordered = sorted(runs, key=order)
    return [list(group) for _, group in itertools.groupby(ordered, key=lambda raw: order(raw)[:-1])]


def table(runs: list[dict]) -> str:
    rows = []
    for group in groups(runs):
        raw, found = group[0], [raw["summaries"] for raw in group]
        cells = [label_of(raw["method"]), task(raw), variant(raw), budget(raw), str(len(group))]
        cells += [mean([x[rule]["score"] for x in found]) for rule in RULES]
        cells += [mean([x["final"].get("guided_score") for x in found])]
        cells += [mean([x.get("best_guided", {}).get("guided_score") for x in found])]
        rows.append([*cells, critics(group)])
    return markdown(list(HEAD), rows)


def ours(runs: list[dict]) -> dict[str, tuple[str, str]]:
    """Label of a method -> its score on its anchor, as it is by default, and the number of runs.
    Of several budgets, the one with most updates."""
    found = {}
    for group in groups(runs):
        raw = group[0]
        if (raw["method"], task(raw)) in PUBLISHED and not variant(raw):
            score = mean([x["summaries"]["mean_of_last_three"]["score"] for x in group])
            words = f"{score} after {raw['args']['updates']:,} updates"
            found[label_of(raw["method"])] = words, str(len(group))
    return found


def with_ours(page: str, runs: list[dict]) -> str:
    """The page, with our scores and numbers of runs in the table of anchors."""
    before, table, after = re.split(r"(?s)(\| method \| anchor task.*?\n)(?=\n)", page, maxsplit=1)
    head, _, *rows = [[x.strip() for x in row[1:-1].split("|")] for row in table.splitlines()]
    found, place = ours(runs), head.index("ours")
    for row in rows:
        if row[0] in found:
            row[place : place + 2] = found[row[0]]
    return before + markdown(head, rows) + "\n" + after


def curve(ax, raw: dict, **style) -> None:
    """The score of a run after so many thousand updates, and crosses for the guided one."""
    evaluations = raw["evaluations"]
    ax.plot([e["step"] / 1000 for e in evaluations], [e["score"] for e in evaluations], **style)
    guided = [e for e in evaluations if e.get("guided_score") is not None]
    if guided:
        style["label"] = style["label"] and f"{style['label']}, guided by the critics"
        points = [e["step"] / 1000 for e in guided], [e["guided_score"] for e in guided]
        ax.plot(*points, "x", **style)


def names(runs: list[list[dict]]) -> list[str]:
    """What tells these groups of runs apart: flags, parts of the budget."""
    flags = [(variant(group[0]) or "default").replace("`", "") for group in runs]
    parts = [
        [words, *budget(group[0]).split("; ")] for words, group in zip(flags, runs, strict=True)
    ]
    columns = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    return [", ".join(words) for words in zip(*columns, strict=True)] or flags


def figure(runs: list[dict]) -> Figure:
    """A panel for each method and task: curves, the published score, and the data's own."""
    by_panel = defaultdict(list)
    for raw in sorted(runs, key=order):
        by_panel[raw["method"], task(raw)].append(raw)
    columns = max(1, min(4, len(by_panel)))
    rows = max(1, math.ceil(len(by_panel) / columns))
    page = Figure(figsize=(3.5 * columns, 3.6 * rows), layout="constrained")
    panels = page.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for ax in panels[len(by_panel) :]:
        ax.remove()
    for ax, (key, mine) in zip(panels, by_panel.items(), strict=False):
        ax.set_title(f"{label_of(key[0])}: {key[1]}", fontsize=9)
        ax.axhline(mine[0]["data"]["target"]["score"], color="#888", lw=1, ls=":", label="data")
        if key in PUBLISHED:
            ax.axhline(PUBLISHED[key], color="#555", lw=1, ls="--", label="published")
        same = groups(mine)
        for i, (group, name) in enumerate(zip(same, names(same), strict=True)):
            for raw in group:  # seeds have one colour and one label
                curve(ax, raw, lw=1, color=f"C{i}", label=name if raw is group[0] else None)
        ax.set_xlabel("thousand updates")
        ax.legend(fontsize=6, frameon=False)
        ax.grid(axis="y", lw=0.3)
    panels[0].set_ylabel("normalised score")
    return page


def filled(page: str) -> str:
    runs = results("anchors")
    return with_ours(fill(page, "anchors", table(runs), "anchors"), runs)


def main() -> None:
    with atomic(FIGURE) as temporary:
        figure(results("anchors")).savefig(temporary, dpi=100, format="png")
    with atomic(PAGE) as temporary:
        temporary.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
