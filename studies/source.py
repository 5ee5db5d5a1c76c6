"""Table and figure of results/recipe/source.md, what the source data do: python -m studies.source

The first recipe (results/recipe/protocol.md) on twelve tasks with one seed: as it is, without
source data, without the gate, and without the weights. Robots, shifts and qualities of the target
data form a Latin square, so that each quality meets each shift, and no robot has one alone.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from dynashift.errors import one_line_errors
from dynashift.files import atomic
from dynashift.tasks import QUALITIES
from experiments.paper import PAPER, ROBOTS
from studies.confirm import COLORS, SHORT, recipe_of
from studies.table import RESULTS, fill, markdown, results

SHIFTS = tuple(PAPER["summary"])
TARGETS = QUALITIES["target"]
TASKS = [
    (robot, shift, TARGETS[(i + j) % len(TARGETS)])
    for i, robot in enumerate(ROBOTS)
    for j, shift in enumerate(SHIFTS)
]
FORMS = ("as it is", "no source", "no gate", "no weights")
# What the gate's file says of a pair before anything is trained.
SIGNS = {"delta_m": "radius of the gate", "delta_w_plan": "mean transport cost"}
MARKERS = dict(zip(ROBOTS, "so^D", strict=True))
# Where a quality's letters are beside the marker: each elsewhere, because tasks lie close together.
OFFSETS = dict(zip(TARGETS, ((-3, 6), (-6, -13), (6, -3)), strict=True))


def form(raw: dict) -> str | None:
    """Which of the four this run is, if any."""
    args = raw["args"]
    if raw["method"] != "taf_dt" or recipe_of(args) != "first" or args["seed"] != 1:
        return None
    if args["beta"] == 0:
        return "no source"
    return {"both": "as it is", "ot": "no gate", "mmd": "no weights"}.get(args["filter"])


def scores(runs: list[dict]) -> tuple[dict, dict]:
    """task -> form -> score, and task -> what its gate says."""
    found, signs = defaultdict(dict), {}
    for raw in runs:
        args, name = raw["args"], form(raw)
        task = args["env"], args["shift"], Path(args["target"]).stem
        if name is None or task not in TASKS:
            continue
        assert name not in found[task], f"two runs of {name} on {task}"
        found[task][name] = raw["summaries"]["mean_of_last_three"]["score"]
        if name == "as it is":
            signs[task] = {sign: raw["report"][sign] for sign in SIGNS}
    return dict(found), signs


def gains(found: dict) -> dict:
    """By how much the source data raise the score, on the tasks that have both runs."""
    pairs = {task: (by.get("as it is"), by.get("no source")) for task, by in found.items()}
    return {task: a - b for task, (a, b) in pairs.items() if a is not None and b is not None}


def correlations(found: dict, signs: dict) -> dict[str, tuple[float, float]]:
    """sign -> its rank correlation with the gain, and the p-value of that."""
    gain = gains(found)
    if len(gain) < 3:
        return {}
    return {
        sign: tuple(spearmanr([signs[task][sign] for task in gain], list(gain.values())))
        for sign in SIGNS
    }


def table(found: dict, signs: dict) -> str:
    rows = []
    for task in TASKS:
        by = found.get(task, {})
        numbers = [f"{by[name]:.1f}" if name in by else "" for name in FORMS]
        numbers += [f"{signs[task][sign]:.3f}" if task in signs else "" for sign in SIGNS]
        rows.append([" ".join(task), *numbers])
    run = [name for name in FORMS if any(name in by for by in found.values())]
    whole = [task for task in TASKS if set(run) <= found.get(task, {}).keys()] if run else []
    means = [
        f"{np.mean([found[task][name] for task in whole]):.1f}" if whole and name in run else ""
        for name in FORMS
    ]
    rank = [
        f"rank correlation {r:.2f} (p = {p:.2f})" for r, p in correlations(found, signs).values()
    ]
    rows.append([f"mean of {len(whole)} tasks", *means, *(rank or [""] * len(SIGNS))])
    return markdown(["task", *FORMS, *SIGNS.values()], rows)


def figure(found: dict, signs: dict) -> Figure:
    """What the source adds against each sign; a task's color is its shift, its form the robot."""
    page = Figure(figsize=(9, 3.8), layout="constrained")
    panels = page.subplots(1, len(SIGNS), sharey=True)
    for panel, (sign, label) in zip(panels, SIGNS.items(), strict=True):
        for task, gain in gains(found).items():
            x = signs[task][sign]
            panel.plot(x, gain, MARKERS[task[0]], color=COLORS[task[1]])
            place = dict(xytext=OFFSETS[task[2]], textcoords="offset points")
            panel.annotate(SHORT[task[2]], (x, gain), **place, size=7)
        panel.axhline(0, color="#222", lw=0.8)
        panel.set_xlabel(label, fontsize=9)
        panel.grid(lw=0.3)
        panel.margins(0.18)
    panels[0].set_ylabel("score with source minus without", fontsize=9)
    for shift, color in COLORS.items():
        panels[0].plot([], [], "o", color=color, label=shift)
    for robot, marker in MARKERS.items():
        panels[1].plot([], [], marker, color="#888", label=robot)
    for panel in panels:
        panel.legend(frameon=False, fontsize=8)
    letters = ", ".join(f"{SHORT[name]}: {name}" for name in TARGETS)
    page.supxlabel(f"target data {letters}", fontsize=8)
    return page


def filled(page: str) -> str:
    return fill(page, "source", table(*scores(all_runs())), "source")


def all_runs() -> list[dict]:
    return results("recipe/confirmation", "recipe/source")


def main() -> None:
    with atomic(RESULTS / "published" / "source.png") as temporary:
        figure(*scores(all_runs())).savefig(temporary, dpi=110, format="png")
    page = RESULTS / "recipe" / "source.md"
    with atomic(page) as temporary:
        temporary.write_text(filled(page.read_text()))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
