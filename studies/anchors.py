"""Table and curves of docs/anchors.md, from the runs in results/published/anchors:

python -m studies.anchors
"""

import importlib
import math
from collections import defaultdict
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from dynashift.files import atomic
from experiments.methods import METHODS, label_of
from studies.table import RESULTS, fill, flag, markdown, results

PAGE = RESULTS.parent / "docs" / "anchors.md"
FIGURE = RESULTS / "published" / "anchors.png"
NONE, KINEMATIC = "hopper none, medium", "hopper kinematic, medium to medium"
# What docs/anchors.md gives as published, the first number of each row.
PUBLISHED = {("bc", NONE): 53.5, ("iql", NONE): 66.3, ("dt", NONE): 67.6, ("qt", NONE): 97.0}
PUBLISHED |= {("otdf", KINEMATIC): 65.6}
# Arguments that the table names in its column for the budget, or that change no training.
BUDGET = {"source_size", "updates", "eval_every", "guided", "width", "hidden", "lr", "batch"}
HEAD = ("method", "task", "changed", "budget", "seed", "final", "last three", "best", "guided")
HEAD += ("critics: Q, return, correlation",)


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
    args = raw["args"]
    official = importlib.import_module(f"baselines.{raw['method']}").Args.updates
    parts = [f"{args['updates']:,} of {official:,} updates"]
    if "layers" in args:
        parts += [f"{args['batch']} windows of {args['K']}"]
        parts += [f"{args['layers']} layers of width {args['width']}"]
    else:
        size = args.get("batch") or f"{args['source_batch']} + {args['target_batch']}"
        parts += [f"{size} transitions", f"width {args['hidden']}"]
    parts += [f"rate {args['lr']:g}"] + ([f"tau {args['tau']:g}"] if "tau" in args else [])
    transitions = max(x["transitions"] for x in raw["data"].values())
    return "; ".join([*parts, f"{transitions:,} transitions of data"])


def critics(raw: dict) -> str:
    """What the critics say of the data's actions at the end, and what the data earn after them."""
    found = raw["evaluations"][-1].get("critics")
    if not found or found["return"] is None:
        return ""
    return f"{found['q']:.0f}, {found['return']:.0f}, {found['correlation']:.2f}"


def order(raw: dict) -> tuple:
    args = raw["args"]
    size = args.get("width", args.get("hidden"))
    where = list(METHODS).index(raw["method"]), task(raw), size, args["updates"]
    return *where, variant(raw), args["seed"]


def table(runs: list[dict]) -> str:
    rows = []
    for raw in sorted(runs, key=order):
        found = raw["summaries"]
        best = found["best"]
        guided = found["final"].get("guided_score")
        cells = [label_of(raw["method"]), task(raw), variant(raw), budget(raw)]
        cells += [str(raw["args"]["seed"]), f"{found['final']['score']:.1f}"]
        cells += [f"{found['mean_of_last_three']['score']:.1f}"]
        cells += [f"{best['score']:.1f} after {best['steps'][0]:,}"]
        rows.append([*cells, "" if guided is None else f"{guided:.1f}", critics(raw)])
    return markdown(list(HEAD), rows)


def curve(ax, raw: dict) -> None:
    """The score of a run after so many thousand updates, and crosses for the guided one."""
    evaluations = raw["evaluations"]
    name = variant(raw).replace("`", "") or "default"
    args = raw["args"]
    sizes = f"width {args.get('width', args.get('hidden'))}, seed {args['seed']}"
    steps = [e["step"] / 1000 for e in evaluations]
    (line,) = ax.plot(steps, [e["score"] for e in evaluations], lw=1.2, label=f"{name}, {sizes}")
    guided = [(e["step"] / 1000, e["guided_score"]) for e in evaluations if e.get("guided_score")]
    if guided:
        ax.plot(*zip(*guided, strict=True), "x", color=line.get_color(), label="guided")


def figure(runs: list[dict]) -> Figure:
    """A panel for each method and task: curves, the published score, and the data's own."""
    groups = defaultdict(list)
    for raw in sorted(runs, key=order):
        groups[raw["method"], task(raw)].append(raw)
    columns = max(1, min(4, len(groups)))
    rows = max(1, math.ceil(len(groups) / columns))
    page = Figure(figsize=(3.5 * columns, 3.6 * rows), layout="constrained")
    panels = page.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for ax in panels[len(groups) :]:
        ax.remove()
    for ax, (key, mine) in zip(panels, groups.items(), strict=False):
        ax.set_title(f"{label_of(key[0])}: {key[1]}", fontsize=9)
        ax.axhline(mine[0]["data"]["target"]["score"], color="#888", lw=1, ls=":", label="data")
        if key in PUBLISHED:
            ax.axhline(PUBLISHED[key], color="#555", lw=1, ls="--", label="published")
        for raw in mine:
            curve(ax, raw)
        ax.set_xlabel("thousand updates")
        ax.legend(fontsize=6, frameon=False)
        ax.grid(axis="y", lw=0.3)
    panels[0].set_ylabel("normalised score")
    return page


def filled(page: str) -> str:
    return fill(page, "anchors", table(results("anchors")), "anchors")


def main() -> None:
    with atomic(FIGURE) as temporary:
        figure(results("anchors")).savefig(temporary, dpi=100, format="png")
    with atomic(PAGE) as temporary:
        temporary.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
