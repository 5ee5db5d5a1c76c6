"""Table of results/precision.md, scores in fp32 and in bfloat16: python -m studies.precision

The first recipe (results/recipe/protocol.md) on two tasks with three seeds. The runs in fp32 are
those of the search.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
import tyro

from dynashift.errors import one_line_errors
from dynashift.files import atomic
from studies import recipe
from studies.table import RESULTS, cell, fill, markdown, results

TASKS = [task for task in recipe.TASKS if task[1] == "kinematic"]
SETTING = "`--lr 0.002`"  # the first recipe, as the search names it


def scores(runs: list[dict]) -> dict:
    """(task, precision) -> {seed: mean of the last three evaluations}"""
    found = defaultdict(dict)
    for raw in runs:
        args = raw["args"]
        task = args["env"], args["shift"], Path(args["target"]).stem
        if task not in TASKS or raw["method"] != "taf_dt" or recipe.setting(raw) != SETTING:
            continue
        key = task, raw["precision"]
        assert args["seed"] not in found[key], f"two runs of {key}, seed {args['seed']}"
        found[key][args["seed"]] = raw["summaries"]["mean_of_last_three"]["score"]
    return dict(found)


def table(found: dict) -> str:
    rows = []
    for task in TASKS:
        by = {name: found.get((task, name), {}) for name in ("fp32", "bf16")}
        seeds = sorted(by["fp32"].keys() & by["bf16"].keys())
        values = {name: [by[name][seed] for seed in seeds] for name in by}
        change = f"{np.mean(values['bf16']) - np.mean(values['fp32']):+.1f}" if seeds else ""
        rows.append([" ".join(task), *map(cell, values.values()), change])
    return markdown(["task", "fp32", "bf16", "change of the mean"], rows)


def all_runs() -> list[dict]:
    return results("recipe/search", "precision")


def filled(page: str) -> str:
    return fill(page, "precision", table(scores(all_runs())), "precision")


def main() -> None:
    page = RESULTS / "precision.md"
    with atomic(page) as temporary:
        temporary.write_text(filled(page.read_text()))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
