"""Tables and the figure of results/notes/first_runs.md: python -m studies.table"""

import itertools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from dynashift.errors import one_line_errors
from dynashift.files import atomic
from dynashift.results import read_result
from experiments.methods import METHODS, OURS, label_of
from experiments.paper import PAPER, ROBOTS, paper_scores

RESULTS = Path(__file__).resolve().parents[1] / "results"
FOLDERS = ("runs", "unweighted")  # of the runs in the main tables
RULES = {"mean of the last three evaluations": "mean_of_last_three", "last checkpoint": "final"}
UNWEIGHTED = "unweighted"  # cloning regardless of the advantage, as in earlier official code


@dataclass(frozen=True)
class Column:
    method: str
    variant: str = ""
    beside_paper: bool = True  # whether it shows the paper's cell of that method

    @property
    def heading(self) -> str:
        label = label_of(self.method)
        return f"{label}, {self.variant}" if self.variant else label


COLUMNS = (
    Column(OURS),
    Column(OURS, "target only", beside_paper=False),
    Column(OURS, "released"),
    Column("bc", beside_paper=False),
    Column("iql"),
    Column("iql", UNWEIGHTED),
    Column("otdf"),
    Column("otdf", UNWEIGHTED),
    Column("qt"),
    Column("dt"),
)


def cell(values: list[float]) -> str:
    """The scores of all seeds; for more than two their mean and sample standard deviation."""
    if len(values) <= 2:
        return ", ".join(f"{x:.1f}" for x in values)
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} ({len(values)})"


def variant(raw: dict) -> str:
    """What distinguishes this run from the method as it is by default."""
    args, method = raw["args"], raw["method"]
    if method == OURS:
        released = "released" if args["preset"] == "released" else ""
        return "target only" if args["beta"] == 0 else released
    if method == "iql" and args["beta"] == 0:
        return UNWEIGHTED
    if not args.get("official_bug", False):
        return ""
    # The flag is another error in every method; with those of IQL and OTDF no advantage matters.
    return UNWEIGHTED if method in ("iql", "otdf") else "official bug"


def heading(raw: dict) -> str:
    return Column(METHODS[raw["method"]].name, variant(raw)).heading


def scores_by_task(runs: list[dict], rule: str) -> tuple[dict, dict]:
    """(task, heading) -> scores in the order of seeds, and task -> the target data's own score."""
    found, own = defaultdict(dict), {}
    for raw in runs:
        args = raw["args"]
        task, seed, name = (args["env"], args["shift"]), args["seed"], heading(raw)
        assert Path(args["source"]).stem == Path(args["target"]).stem == "medium"
        twice = f"{name} on {' '.join(task)} has two runs of seed {seed}"
        assert seed not in found[task, name], twice
        found[task, name][seed] = raw["summaries"][rule]["score"]
        own[task] = raw["data"]["target"]["score"]
    by_seed = {key: [score for _, score in sorted(seeds.items())] for key, seeds in found.items()}
    return by_seed, own


def paper_cells(task: tuple) -> dict[str, float]:
    """Heading -> the paper's cell, where it has one."""
    row = paper_scores((*task, "medium", "medium"))
    return {column.heading: row[column.method] for column in COLUMNS if column.beside_paper}


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def scores(runs: list[dict], rule: str) -> str:
    """A row per task, a column per method: the score of every seed, and the paper's cell."""
    found, own = scores_by_task(runs, rule)
    headings, rows = [column.heading for column in COLUMNS], []
    for task in sorted(own):
        paper = {name: f" (*{score:.1f}*)" for name, score in paper_cells(task).items()}
        cells = [cell(found.get((task, name), [])) + paper.get(name, "") for name in headings]
        rows.append([" ".join(task), f"{own[task]:.1f}", *cells])
    return markdown(["medium to medium", "target data", *headings], rows)


def panel(ax, task: tuple, columns: list[Column], found: dict, own: dict) -> None:
    ax.set_title(" ".join(task), fontsize=10)
    ax.axhline(own.get(task, np.nan), color="#888", lw=1, ls="--", label="target data")
    ours, others = METHODS[OURS].color, METHODS["iql"].color
    for i, column in enumerate(columns):
        values = found.get((task, column.heading), [])
        is_ours = column.method == OURS
        options = dict(color=ours if is_ours else others, ms=5, alpha=0.8)
        label = f"{label_of(OURS)}, one seed" if is_ours else "others, one seed"
        ax.plot([i] * len(values), values, "o", **options, label=label)
        paper = paper_cells(task).get(column.heading, np.nan)
        ax.plot(i, paper, "D", mfc="none", mec="#555", ms=6, label="paper")
    names = [column.heading.removeprefix("TAF-DT, ") for column in columns]
    ax.set_xticks(range(len(columns)), names, rotation=90)
    ax.tick_params(labelsize=8)
    ax.grid(axis="y", lw=0.3)


def figure(runs: list[dict]) -> Figure:
    """A panel per task with a run of any method but cloning, and in it a column per method with a
    run. Dots are seeds, open diamonds the paper's cells, the line is the target data's own score.
    """
    found, own = scores_by_task(runs, "mean_of_last_three")
    cloning = label_of("bc")
    ran = {task for task, name in found if name != cloning}
    tasks = [pair for pair in itertools.product(ROBOTS, PAPER["summary"]) if pair in ran]
    columns = [c for c in COLUMNS if any((task, c.heading) in found for task in tasks)]
    page = Figure(figsize=(14, 4.2), layout="constrained")
    panels = page.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for ax, task in zip(panels, tasks, strict=True):
        panel(ax, task, columns, found, own)
    panels[0].set_ylabel("normalised score")
    panels[0].set_ylim(bottom=min(0, panels[0].get_ylim()[0]))
    handles, labels = panels[0].get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))  # one of each
    options = dict(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    page.legend(legend.values(), legend, **options)
    return page


CHECKS = ("task", "TAF-DT", "seed", "k(S, T)", "corr(d, k(S, S))", "clipped", "effective share")
CHECKS += ("command", "episode length", "best", "minutes")


def gate_cells(gate: dict) -> list[str]:
    if "mean_cross_kernel" not in gate:  # target only: there is nothing to gate
        return [""] * 4
    share = gate.get("effective_share")
    if not share:  # older runs
        share = gate["effective_sample_size"] / gate["retained"]
    numbers = [f"{gate['mean_cross_kernel']:.4f}", f"{gate['corr_score_self_term']:.2f}"]
    return [*numbers, f"{gate['clipped']:.1%}", f"{share:.2f}"]


def checks(runs: list[dict]) -> str:
    """What gate, weights, command and episodes of the runs of TAF-DT look like."""
    rows = []
    for raw in runs:
        if raw["method"] != OURS:
            continue
        args, last = raw["args"], raw["evaluations"][-1]
        minutes = sum(stage["seconds"] for stage in raw["stages"].values()) / 60
        length = sum(last["lengths"]) / len(last["lengths"])
        kind = variant(raw) or label_of(OURS)
        row = [
            f"{args['env']} {args['shift']}",
            kind,
            str(args["seed"]),
            *gate_cells(raw["report"]),
        ]
        row += [f"{last['command']:.2f}", f"{length:.0f}"]
        rows.append([*row, f"{raw['summaries']['best']['score']:.1f}", f"{minutes:.0f}"])
    return markdown(list(CHECKS), rows)


def flag(name: str, value) -> str:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"`--{name}`" if value else f"`--no-{name}`"
    return f"`--{name} {value if isinstance(value, str) else f'{value:g}'}`"


def trials(runs: list[dict], others: list[dict]) -> str:
    """Runs with something changed, each beside the run of the table above that it differs from."""

    def key(raw: dict) -> list:
        return [raw["args"][name] for name in ("env", "shift", "seed")]

    def both(raw: dict) -> str:
        return " / ".join(f"{raw['summaries'][rule]['score']:.1f}" for rule in RULES.values())

    rows = []
    for raw in others:
        (base,) = (x for x in runs if key(x) == key(raw) and heading(x) == heading(raw))
        changed = {k: v for k, v in raw["changed"].items() if base["changed"].get(k) != v}
        flags = sorted(flag(k, v) for k, v in changed.items())
        env, shift, seed = key(raw)
        task, words = f"{env} {shift}", ", ".join(flags)
        rows.append((task, heading(raw), seed, len(flags), words, both(raw), both(base)))
    head = ["task", "method", "seed", "changed", "score: last three / final", "unchanged"]
    cells = [[task, method, str(seed), *rest] for task, method, seed, _, *rest in sorted(rows)]
    return markdown(head, cells)


def fill(text: str, name: str, table: str, script: str = "table") -> str:
    """The page with this table between its two comments."""
    begin, end = f"<!-- {name}: python -m studies.{script} -->\n", f"\n<!-- end of {name} -->"
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end.strip())[1]


def results(*folders: str) -> list[dict]:
    paths = [sorted((RESULTS / "published" / name).rglob("result.json")) for name in folders]
    return [read_result(path) for path in itertools.chain(*paths)]


def filled(page: str) -> str:
    runs = results(*FOLDERS)
    tables = {name: scores(runs, rule) for name, rule in RULES.items()}
    tables |= {"trials": trials(runs, results("checks")), "checks": checks(runs)}
    for name, table in tables.items():
        page = fill(page, name, table)
    return page


def main() -> None:
    with atomic(RESULTS / "published" / "scores.png") as temporary:
        figure(results(*FOLDERS)).savefig(temporary, dpi=110, format="png")
    page = RESULTS / "notes" / "first_runs.md"
    with atomic(page) as temporary:
        temporary.write_text(filled(page.read_text()))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
