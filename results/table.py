"""Tables and the figure of results/README.md, from the runs beside it: python results/table.py"""

import itertools
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import report  # noqa: E402
from dynashift.files import atomic  # noqa: E402
from dynashift.results import read_result  # noqa: E402

COLUMNS = {  # heading -> method, whose cell in the paper it stands beside; the control and the ablation have none
    "TAF-DT": "taf_dt",
    "TAF-DT, target only": None,
    "TAF-DT, released": "taf_dt",
    "BC": None,
    "IQL": "iql",
    "IQL, unweighted": "iql",
    "OTDF": "otdf",
    "OTDF, unweighted": "otdf",
    "QT": "qt",
    "DT": "dt",
}


TABLES = ("runs", "unweighted")  # folders of the runs in them
RULES = {"mean of the last three evaluations": "mean_of_last_three", "last checkpoint": "final"}


def cell(values: list[float]) -> str:
    """The scores of all seeds; of more than two their mean and sample standard deviation."""
    if len(values) <= 2:
        return ", ".join(f"{x:.1f}" for x in values)
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} ({len(values)})"


def column(raw: dict) -> str:
    """Unweighted: cloning without regard to the advantage, as earlier official code of IQL and OTDF has it."""
    args, method = raw["args"], raw["method"]
    if method == "taf_dt":
        return "TAF-DT, target only" if args["beta"] == 0 else "TAF-DT" + ", released" * (args["preset"] == "released")
    unweighted = args["beta"] == 0 if method == "iql" else args.get("official_bug", False)
    return report.NAMES[method] + ", unweighted" * unweighted


def scores_by_task(runs: list[dict], rule: str) -> tuple[dict, dict]:
    """(task, column) -> scores in the order of seeds, and task -> the target data's own score."""
    found, own = defaultdict(dict), {}
    for raw in runs:
        args = raw["args"]
        task, seed, name = (args["env"], args["shift"]), args["seed"], column(raw)
        assert Path(args["source"]).stem == Path(args["target"]).stem == "medium"
        assert seed not in found[task, name], f"{name} on {' '.join(task)} has two runs of seed {seed}"
        found[task, name][seed] = raw["summaries"][rule]["score"]
        own[task] = raw["data"]["target"]["score"]
    return {key: [score for _, score in sorted(seeds.items())] for key, seeds in found.items()}, own


def paper_scores(task: tuple) -> dict:
    """Column -> the paper's cell, where it has one."""
    row = dict(zip(report.METHODS, report.MAIN[(*task, "medium", "medium")]["scores"], strict=True))
    return {name: row[method] for name, method in COLUMNS.items() if method}


def scores(runs: list[dict], rule: str) -> str:
    """A row a task, a column a method: the score of every seed, and the paper's cell."""
    found, own = scores_by_task(runs, rule)
    lines = [f"| medium to medium | target data | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for task in sorted(own):
        paper = {name: f" (*{score:.1f}*)" for name, score in paper_scores(task).items()}
        cells = [cell(found.get((task, name), [])) + paper.get(name, "") for name in COLUMNS]
        lines.append(f"| {' '.join(task)} | {own[task]:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(runs: list[dict]) -> Figure:
    """A panel a task, robots across and shifts down: dots are seeds, open diamonds the paper's cells, the line is the
    target data's own score."""
    found, own = scores_by_task(runs, "mean_of_last_three")
    page = Figure(figsize=(12, 9), layout="constrained")
    grid = page.subplots(len(report.SHIFTS), len(report.ROBOTS), sharex=True, sharey=True)
    for panel, (shift, env) in zip(grid.flat, itertools.product(report.SHIFTS, report.ROBOTS), strict=True):
        task = (env, shift)
        panel.set_title(" ".join(task), fontsize=10)
        panel.axhline(own.get(task, np.nan), color="#888", lw=1, ls="--", label="target data")
        for i, name in enumerate(COLUMNS):
            values, ours = found.get((task, name), []), name.startswith("TAF-DT")
            color, label = ("#e5502a", "TAF-DT, one seed") if ours else ("#4c8fe0", "others, one seed")
            panel.plot([i] * len(values), values, "o", color=color, ms=5, alpha=0.8, label=label)
            panel.plot(i, paper_scores(task).get(name, np.nan), "D", mfc="none", mec="#555", ms=6, label="paper")
        panel.set_xticks(range(len(COLUMNS)), [name.removeprefix("TAF-DT, ") for name in COLUMNS], rotation=90)
        panel.tick_params(labelsize=8)
        panel.grid(axis="y", lw=0.3)
    for panel in grid[:, 0]:
        panel.set_ylabel("normalised score")
    grid[0, 0].set_ylim(bottom=min(0, grid[0, 0].get_ylim()[0]))
    legend = dict(zip(*grid[0, 0].get_legend_handles_labels()[::-1], strict=True))  # one of each
    page.legend(legend.values(), legend, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return page


def checks(runs: list[dict]) -> str:
    """What gate, weights, command and episodes of the runs of TAF-DT look like."""
    head = ["task", "TAF-DT", "seed", "k(S, T)", "corr(d, k(S, S))", "clipped", "effective share", "command"]
    head += ["episode length", "best", "minutes"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for raw in runs:
        if raw["method"] != "taf_dt":
            continue
        args, gate, last, summaries = raw["args"], raw["report"], raw["evaluations"][-1], raw["summaries"]
        cells = [f"{args['env']} {args['shift']}", column(raw).removeprefix("TAF-DT, "), str(args["seed"])]
        if "mean_cross_kernel" in gate:
            cells += [f"{gate['mean_cross_kernel']:.4f}", f"{gate['corr_score_self_term']:.2f}"]
            share = gate.get("effective_share") or gate["effective_sample_size"] / gate["retained"]  # older runs
            cells += [f"{gate['clipped']:.1%}", f"{share:.2f}"]
        else:  # target only: nothing to gate
            cells += [""] * 4
        cells += [f"{last['command']:.2f}", f"{sum(last['lengths']) / len(last['lengths']):.0f}"]
        cells += [f"{summaries['best']['score']:.1f}"]
        cells += [f"{sum(stage['seconds'] for stage in raw['stages'].values()) / 60:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def flag(name: str, value) -> str:
    name = name.replace("_", "-")
    return f"`--no-{name}`" if value is False else f"`--{name} {value if isinstance(value, str) else f'{value:g}'}`"


def trials(runs: list[dict], others: list[dict]) -> str:
    """Runs with something changed, each beside the run of the table above that it differs from."""
    rows = []
    for raw in others:
        key = [raw["args"][name] for name in ("env", "shift", "seed")]
        same = [x for x in runs if [x["args"][name] for name in ("env", "shift", "seed")] == key]
        (base,) = (x for x in same if column(x) == column(raw))
        flags = sorted(flag(k, v) for k, v in raw["changed"].items() if base["changed"].get(k) != v)
        pairs = [" / ".join(f"{x['summaries'][rule]['score']:.1f}" for rule in RULES.values()) for x in (raw, base)]
        rows.append((" ".join(key[:2]), column(raw), key[2], len(flags), ", ".join(flags), *pairs))
    lines = ["| task | method | seed | changed | score: last three / final | unchanged |", "|---" * 6 + "|"]
    for task, method, seed, _, *rest in sorted(rows):
        lines.append(f"| {task} | {method} | {seed} | {' | '.join(rest)} |")
    return "\n".join(lines)


def fill(text: str, name: str, table: str, script: str = "table.py") -> str:
    begin, end = f"<!-- {name}: python results/{script} -->\n", f"\n<!-- end of {name} -->"
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end.strip())[1]


def results(*folders: str) -> list[dict]:
    paths = [path for folder in folders for path in sorted((HERE / "published" / folder).rglob("result.json"))]
    return [read_result(path) for path in paths]


def filled(page: str) -> str:
    runs = results(*TABLES)
    tables = {name: scores(runs, rule) for name, rule in RULES.items()}
    tables |= {"trials": trials(runs, results("checks")), "checks": checks(runs)}
    for name, table in tables.items():
        page = fill(page, name, table)
    return page


if __name__ == "__main__":
    with atomic(HERE / "published" / "scores.png") as temporary:
        figure(results(*TABLES)).savefig(temporary, dpi=110, format="png")
    page = HERE / "README.md"
    with atomic(page) as temporary:
        temporary.write_text(filled(page.read_text()))
