"""Tables of results/recipe/search.md, from the runs of the search: python -m studies.recipe

A setting is what its runs change in the base of the search (results/recipe/protocol.md). Its score
is the mean over the six development tasks, and settings are compared on the seeds they share.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
import tyro

from dynashift.errors import one_line_errors
from dynashift.files import atomic
from studies.law import BUDGET
from studies.table import RESULTS, fill, flag, markdown, results

TASKS = {
    ("hopper", "kinematic", "medium"): "hopper kinematic M",
    ("walker2d", "gravity", "medium"): "walker2d gravity M",
    ("halfcheetah", "gravity", "medium"): "halfcheetah gravity M",
    ("ant", "kinematic", "medium"): "ant kinematic M",
    ("hopper", "morph", "medium-expert"): "hopper morph ME",
    ("walker2d", "morph", "expert"): "walker2d morph E",
}
SEEDS = (1, 2, 3)
# How the base of the search differs from --quick; evaluations change nothing.
BASE = BUDGET | {"eval_every": 5_000}


# By the share of the source and the size of a batch.
CLONING = {(0.0, 128): "*cloning the target*", (0.0, 256): "*cloning the target for longer*"}
CLONING |= {(0.5, 128): "*cloning both*", (1.0, 128): "*cloning the source*"}


def setting(raw: dict) -> str:
    """The flags that a run adds to the base, or takes back, whatever --quick was at that time."""
    if raw["method"] == "bc":
        return CLONING[raw["args"].get("source_share", 0.0), raw["args"]["batch"]]
    other = {k: raw["args"][k] for k, v in BASE.items() if raw["args"].get(k, v) != v}
    added = {k: v for k, v in raw["changed"].items() if k not in (*BASE, "precision")}
    return ", ".join(sorted(flag(k, v) for k, v in (other | added).items())) or "base"


def scores(runs: list[dict]) -> dict[str, dict]:
    """setting -> {(task, seed): mean of the last three evaluations}"""
    found = defaultdict(dict)
    for raw in runs:
        args = raw["args"]
        task = args["env"], args["shift"], Path(args["target"]).stem
        key = task, args["seed"]
        assert task in TASKS, f"{task} is not one of the development tasks"
        assert key not in found[setting(raw)], f"two runs of {setting(raw)} on {key}"
        found[setting(raw)][key] = raw["summaries"]["mean_of_last_three"]["score"]
    return dict(found)


def seeds_of(by_run: dict) -> list[int]:
    """The seeds that this setting has on all six tasks."""
    seeds = {seed for _, seed in by_run}
    return sorted(seed for seed in seeds if all((task, seed) in by_run for task in TASKS))


def mean(by_run: dict, seeds: list[int]) -> float:
    return float(np.mean([by_run[task, seed] for task in TASKS for seed in seeds]))


def table(found: dict[str, dict], seeds: list[int]) -> str:
    """Mean scores over these seeds: complete settings first, the best of them on top.

    A setting without a run of every task and seed has no mean, and cannot be chosen.
    """
    rows = []
    for name, by_run in found.items():
        whole = set(seeds) <= set(seeds_of(by_run))
        cells = [[by_run[task, s] for s in seeds if (task, s) in by_run] for task in TASKS]
        shown = [f"{np.mean(x):.1f}" if len(x) == len(seeds) else "" for x in cells]
        if any(shown):
            score = mean(by_run, seeds) if whole else -np.inf
            rows.append((score, [name, f"{score:.1f}" if whole else "", *shown]))
    rows.sort(key=lambda row: -row[0])
    return markdown(["setting", "mean", *TASKS.values()], [row for _, row in rows])


def is_control(raw: dict) -> bool:
    """Cloning on a development task, which is run for the confirmation and for earlier tables."""
    args = raw["args"]
    known = (args["env"], args["shift"], Path(args["target"]).stem) in TASKS
    return raw["method"] == "bc" and known and args["seed"] in SEEDS


def all_runs() -> list[dict]:
    controls = [raw for raw in results("runs", "recipe/confirmation") if is_control(raw)]
    return results("recipe/search") + controls


def filled(page: str) -> str:
    found = scores(all_runs())
    for name, seeds in (("one seed", [1]), ("two seeds", [1, 2]), ("three seeds", [*SEEDS])):
        page = fill(page, name, table(found, seeds), "recipe")
    return page


def main() -> None:
    page = RESULTS / "recipe" / "search.md"
    with atomic(page) as temporary:
        temporary.write_text(filled(page.read_text()))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
