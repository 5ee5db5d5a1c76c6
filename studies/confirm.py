"""Tables and figure of results/README.md and results/recipe/confirmation.md:

    python -m studies.confirm

Both recipes that were tried, the paper's settings, and four controls, on the 36 tasks whose target
data are published. An entrant takes part in the means once it has every task that the recipe and
cloning have. Runs that were published before are used again where their command is the same: those
of cloning, and those of the search on its six tasks.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from dynashift.errors import one_line_errors
from dynashift.files import atomic
from dynashift.recipe import RECOMMENDED
from experiments.paper import MAIN, PAPER_METHODS, Task, paper_scores
from experiments.report.statistics import beats, interval, resample
from studies import recipe
from studies.table import RESULTS, cell, fill, markdown, results

ENTRANTS = {
    "recommended": "recommended",
    "first": "first recipe",
    "paper": "paper's settings",
    "clone": "the Transformer's own clone",
    "bc": "cloning the target data",
    "long": "cloning for longer",
    "both": "cloning both",
}
# A recipe's runs are told by its choices and the length of its training, both in protocol.md.
RECIPES = {
    "recommended": RECOMMENDED | {"updates": 4000, "cvae_updates": 20_000, "target_batch": 32},
    "first": RECOMMENDED | {"alpha": 3.5, "updates": 1000},
}
CLONES = {(0.0, 128): "bc", (0.0, 256): "long", (0.5, 128): "both"}  # by source share and batch
CONTROL = "bc"
TASKS = tuple(task for task in MAIN if task[2] == "medium")
# The tasks that the recipe was chosen on.
DEVELOPMENT = {(env, shift, "medium", target) for env, shift, target in recipe.TASKS}
SEEDS = (1, 2, 3)
COLORS = {"morph": "#e5502a", "kinematic": "#4c8fe0", "gravity": "#35a853"}
SHORT = {"medium": "M", "medium-expert": "ME", "expert": "E"}

Scores = dict[str, dict[Task, np.ndarray]]  # entrant -> task -> one number per seed


def recipe_of(args: dict) -> str | None:
    """The recipe that these arguments follow, whatever they take of the source."""
    names = [name for name, choices in RECIPES.items() if args.items() >= choices.items()]
    return names[0] if names else None


def entrant(raw: dict) -> str | None:
    """Which of them this run belongs to, if any."""
    args = raw["args"]
    if raw["method"] == "taf_dt":
        if args["beta"] == args["alpha"] == args["eta_reg"] == 0:
            return "clone"
        whole = args["beta"] == 1 / 3 and args["filter"] == "both"
        return (recipe_of(args) or "paper") if whole else None
    known = {"quick", "source_size", "source_share", "batch"}
    if raw["method"] != "bc" or not args["quick"] or set(raw["changed"]) - known:
        return None
    return CLONES.get((args.get("source_share", 0.0), args["batch"]))


def scores(runs: list[dict]) -> Scores:
    """The mean of the last three evaluations of every run, in the order of the seeds."""
    found = defaultdict(lambda: defaultdict(dict))
    for raw in runs:
        args, name = raw["args"], entrant(raw)
        task = args["env"], args["shift"], Path(args["source"]).stem, Path(args["target"]).stem
        if name is None or args["seed"] not in SEEDS:
            continue
        assert task in TASKS, f"{task} is not one of the 36 tasks"
        assert args["seed"] not in found[name][task], f"two runs of {name} on {task}"
        found[name][task][args["seed"]] = raw["summaries"]["mean_of_last_three"]["score"]
    return {
        name: {task: np.array([x[s] for s in sorted(x)]) for task, x in by_task.items()}
        for name, by_task in found.items()
    }


def compared(found: Scores) -> tuple[list[Task], list[str]]:
    """The tasks that the recipe and cloning have, and the entrants that have all of these."""
    by_control, by_recipe = (found.get(name, {}) for name in (CONTROL, "recommended"))
    tasks = [task for task in TASKS if task in by_control and task in by_recipe]
    return tasks, [name for name in ENTRANTS if found.get(name, {}).keys() >= set(tasks)]


def words(mean: float, low: float | None, high: float | None, digits: int = 1) -> str:
    if low is None:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def interval_of(draws: np.ndarray, groups: list) -> tuple[float | None, float | None]:
    """None where a task has a single run: its spread would count as nothing."""
    return interval(draws, groups) if min(map(len, groups)) > 1 else (None, None)


def mean_of(groups: list[np.ndarray]) -> tuple[float, float | None, float | None]:
    """Mean over tasks, and its 95 % interval by stratified bootstrap."""
    draws = np.mean([x.mean(-1) for x in resample(groups)], 0)
    return float(np.mean([x.mean() for x in groups])), *interval_of(draws, groups)


def gain_of(x: list, y: list) -> tuple[float, float | None, float | None]:
    """By how much x is above y, in the mean over tasks."""
    pairs = zip(resample(x), resample(y, seed=1), strict=True)
    draws = np.mean([a.mean(-1) - b.mean(-1) for a, b in pairs], 0)
    gain = np.mean([a.mean() - b.mean() for a, b in zip(x, y, strict=True)])
    return float(gain), *interval_of(draws, x + y)


def improvement(x: list, y: list) -> tuple[float, float | None, float | None]:
    """Probability that a run of x is above a run of y, in the mean over tasks."""
    pairs = zip(resample(x), resample(y, seed=1), strict=True)
    draws = np.mean([beats(a, b) for a, b in pairs], 0)
    mean = float(np.mean([beats(a, b) for a, b in zip(x, y, strict=True)]))
    return mean, *interval_of(draws, x + y)


def means(found: Scores) -> str:
    """A row per entrant, and rows of the paper's own numbers on the same tasks."""
    tasks, entrants = compared(found)
    unseen = [task for task in tasks if task not in DEVELOPMENT]
    qualities = ("medium", "medium-expert", "expert")
    if not tasks:
        return ""

    def groups(name: str, part: list[Task]) -> list[np.ndarray]:
        return [found[name][task] for task in part]

    def parts(score) -> list[str]:
        """Means of a function of the task: over unseen tasks, and by quality of the target."""
        lists = [unseen, *([t for t in tasks if t[3] == quality] for quality in qualities)]
        return [f"{np.mean([score(t) for t in part]):.1f}" if part else "" for part in lists]

    rows = []
    for name in entrants:
        mine, control = groups(name, tasks), groups(CONTROL, tasks)
        runs = sum(len(x) for x in mine)
        row = [ENTRANTS[name], str(runs), words(*mean_of(mine))]
        row += parts(lambda task, by_task=found[name]: by_task[task].mean())
        against = [words(*gain_of(mine, control)), words(*improvement(mine, control), digits=2)]
        rows.append(row + (against if name != CONTROL else ["", ""]))
    for label, score in paper_rows().items():
        mean = f"{np.mean([score(task) for task in tasks]):.1f}"
        rows.append([f"*{label}*", "", f"*{mean}*", *(f"*{x}*" for x in parts(score)), "", ""])
    head = ["", "runs", f"mean of {len(tasks)} tasks", f"of the {len(unseen)} unseen"]
    head += [f"target {quality}" for quality in qualities]
    return markdown([*head, "above cloning", "P(better than cloning)"], rows)


def paper_rows() -> dict:
    """What the paper prints, as functions of the task."""
    return {
        "paper: TAF-DT": lambda task: paper_scores(task)["taf_dt"],
        "paper: OTDF": lambda task: paper_scores(task)["otdf"],
        "paper: best method of each task": lambda task: max(paper_scores(task).values()),
    }


def cells(found: Scores) -> str:
    """A row per task: every entrant, the paper's TAF-DT, and the best of the paper's methods."""
    rows = []
    for task in TASKS:
        env, shift, _, target = task
        mine = [cell(list(found.get(name, {}).get(task, []))) for name in ENTRANTS]
        printed = paper_scores(task)
        best = max(PAPER_METHODS, key=printed.get)
        star = " *" if task in DEVELOPMENT else ""
        theirs = [f"{printed['taf_dt']:.1f}", f"{printed[best]:.1f} ({best})"]
        rows.append([f"{env} {shift} {target}{star}", *mine, *theirs])
    return markdown(["task", *ENTRANTS.values(), "paper: TAF-DT", "paper: best"], rows)


def draw_means(ax, found: Scores) -> None:
    """A bar per entrant with its interval, and bars of the paper's numbers on the same tasks."""
    tasks, entrants = compared(found)
    bars = []
    for name in entrants:
        color = "#e5502a" if name == "recommended" else "#b9b9b9"
        mean = mean_of([found[name][task] for task in tasks])
        bars.append((ENTRANTS[name], color, *mean))
    for label, score in paper_rows().items():
        bars.append((label, "#e6e6e6", np.mean([score(task) for task in tasks]), None, None))
    for y, (_, color, mean, low, high) in enumerate(bars):
        ax.barh(y, mean, color=color)
        ax.text(0.5, y, f"{mean:.1f}", va="center", fontsize=8)
        if low is not None:
            ax.plot([low, high], [y, y], color="#222", lw=1.6)
    ax.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    ax.invert_yaxis()
    some = any(low is not None for *_, low, _ in bars)
    note = "; a line is a 95 % interval, where every task has two runs or more" if some else ""
    ax.set_xlabel(f"mean score over {len(tasks)} tasks{note}", fontsize=8)


def draw_gains(ax, found: Scores) -> None:
    """By how much the recipe is above cloning, task by task; dots are its seeds."""
    ours, control = found.get("recommended", {}), found.get(CONTROL, {})
    gains = {t: ours[t].mean() - control[t].mean() for t in TASKS if t in ours and t in control}
    order = sorted(gains, key=gains.get)
    for x, task in enumerate(order):
        ax.bar(x, gains[task], color=COLORS[task[1]], label=task[1], alpha=0.85)
        dots = ours[task] - control[task].mean()
        ax.plot([x] * len(dots), dots, ".", color="#222", ms=4)
    names = [f"{t[0]} {t[1]} {SHORT[t[3]]}{' *' * (t in DEVELOPMENT)}" for t in order]
    ax.set_xticks(range(len(order)), names, rotation=90, fontsize=8)
    targets = ", ".join(f"{short}: {name}" for name, short in SHORT.items())
    about = f"target data {targets}; *: used for choosing the recipe; a dot is a seed"
    ax.set_xlabel(about, fontsize=8)
    ax.axhline(0, color="#222", lw=0.8)
    ax.set_ylabel("recommended minus cloning", fontsize=8)
    ax.grid(axis="y", lw=0.3)
    handles, labels = ax.get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))  # one of each
    ax.legend(legend.values(), legend, frameon=False, fontsize=8)


def figure(found: Scores) -> Figure:
    page = Figure(figsize=(11, 7), layout="constrained")
    above, below = page.subplots(2, 1, height_ratios=(1, 2))
    draw_means(above, found)
    draw_gains(below, found)
    return page


def all_runs() -> list[dict]:
    medium = [raw for raw in results("runs") if raw["method"] == "bc"]
    searched = [raw for raw in results("recipe/search") if entrant(raw) == "recommended"]
    return medium + searched + results("recipe/confirmation")


PAGES = {"means": RESULTS / "README.md", "cells": RESULTS / "recipe" / "confirmation.md"}


def filled() -> dict[Path, str]:
    """The pages with their tables."""
    found = scores(all_runs())
    tables = {"means": means(found), "cells": cells(found)}
    return {
        page: fill(page.read_text(), name, tables[name], "confirm") for name, page in PAGES.items()
    }


def main() -> None:
    with atomic(RESULTS / "published" / "confirmation.png") as temporary:
        figure(scores(all_runs())).savefig(temporary, dpi=110, format="png")
    for page, text in filled().items():
        with atomic(page) as temporary:
            temporary.write_text(text)


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
