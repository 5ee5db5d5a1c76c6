"""Sections of the page: one for every kind of data and every budget, with its tables and
figures."""

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace

from experiments.grid import ABLATIONS, QUICK_EPISODES, QUICK_UPDATES, TIMES
from experiments.methods import CLONING, METHODS, OURS, label_of
from experiments.paper import PAPER, SHIFTS
from experiments.report import figures
from experiments.report.main_tables import main_table, summary_table
from experiments.report.other_tables import (
    ablation_table,
    gains_table,
    improvement_table,
    iqm_table,
    times_table,
)
from experiments.report.parts import FigurePart, NotRun, Part, Table, task_label, without_paper
from experiments.report.reading import (
    Archive,
    Cells,
    Run,
    budget_of,
    by_cell,
    is_number,
    tasks_of,
)

# The paper's numbers are shown beside runs on its own data, and beside runs whose source data were
# generated again by the policies that made them.
PUBLISHED = ("published", "regenerated-d4rl and published")
# The budget of run_all.sh --quick.
RUN_ALL_QUICK = budget_of(
    OURS, "paper", True, {"updates": QUICK_UPDATES, "eval_episodes": QUICK_EPISODES}
)


@dataclass
class Setting:
    slug: str
    name: str
    about: str
    flags: list[str] | None  # with which run_all.sh runs this setting, if it can
    parts: list[Part]


@dataclass
class Section:
    """The parts of one setting, in the order of the page, while they are collected."""

    runs: list[Run]
    archives: dict[str, Archive]
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self):
        self.cells: Cells = by_cell(self.runs)
        self.published = self.runs[0].setting[0] in PUBLISHED

    def table(self, table: Table | None) -> None:
        if table:
            self.parts.append(table if self.published else without_paper(table))

    def figure(self, name: str, title: str, caption: str, drawn: str | None) -> None:
        if drawn:
            self.parts.append(FigurePart(name, title, caption, svg=drawn))

    def not_run(self, name: str, title: str) -> None:
        self.parts.append(NotRun(name, title))

    def main(self, shift: str) -> None:
        if not any(tasks_of(self.cells, method, shift) for method in METHODS):
            self.not_run(shift, f"{shift.capitalize()} shift")
            return
        episodes = sorted(set().union(*(run.episodes for run in self.runs)))
        text = f", {' or '.join(map(str, episodes))} episodes per run" if episodes else ""
        self.table(main_table(self.cells, shift, text))
        caption = "Mean over seeds at every evaluation; the band is from the lowest to the highest."
        drawn = figures.curves_figure(self.cells, shift)
        self.figure(f"curves-{shift}", f"Learning curves, {shift} shift", caption, drawn)

    def aggregates(self) -> None:
        if not any(factor is None for _, factor, _ in self.cells):
            return
        self.table(summary_table(self.cells, SHIFTS))
        self.table(iqm_table(self.cells))
        self.table(improvement_table(self.cells))
        self.table(gains_table(self.cells))
        groups = figures.profile_groups(self.cells)
        tasks = len(next(iter(groups.values()), ()))
        text = (
            "For every score τ the share of runs that end above it, averaged over the tasks that "
            f"all these methods have (number of tasks: {tasks}), with 95 % bootstrap bands."
        )
        self.figure("profiles", "Performance profiles", text, figures.profile_figure(groups))

    def ablation(self, name: str) -> None:
        ablation = ABLATIONS[name]
        factor = ablation.factor
        if not any(varied and varied[0] == factor for _, varied, _ in self.cells):
            self.not_run(name, ablation.title)
            return
        self.table(ablation_table(self.cells, name))
        if all(map(is_number, ablation.values)):
            text = "Means of the table above; error bars are its ±."
            drawn = figures.sweep_figure(self.parts[-1], factor)
            self.figure(f"sweep-{factor}", f"Score against {factor}", text, drawn)

    def junction(self) -> None:
        title, drawn = "Stitch-junction diagnostics", figures.junction_figure(self.cells)
        if not drawn:
            self.not_run("junction", title)
            return
        notes = [note["text"] for note in PAPER["notes"] if "junction" in note["cells"]]
        text = (
            "Mean over seeds, then moving mean over 5 checkpoints, of stitched sequences, and of "
            "unstitched ones for comparison."
        )
        self.figure("junction", title, " ".join([text, *notes]), drawn)

    def costs(self) -> None:
        text = (
            "Left: source fragments by MMD score; grey are those that the gate drops, blue those "
            "that it retains. Right: weights of what is retained. There is a row for every pair "
            "of datasets, at most 12."
        )
        drawn = figures.gate_figure(self.runs, self.archives)
        self.figure("gate", "Gate and weights", text, drawn)
        if any((OURS, None, task) in self.cells for task in TIMES):
            self.table(times_table(self.cells, self.archives))
        else:
            self.not_run("times", "Training time")
        text = "Mean minutes of a run by stage, and the largest peak memory of any run."
        drawn = figures.stages_figure(self.runs)
        self.figure("stages", "Time and memory per stage", text, drawn)


def build(runs: list[Run], archives: dict[str, Archive]) -> list[Part]:
    """The parts of one setting in the order of the page: tables, figures, and what was not run."""
    section = Section(runs, archives)
    for shift in SHIFTS:
        section.main(shift)
    section.aggregates()
    for name in ABLATIONS:
        section.ablation(name)
    section.junction()
    section.costs()
    return section.parts


def grouped(runs: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs by setting. Runs that saw no source data join all that have the same target data."""
    groups = defaultdict(list)
    for run in runs:
        groups[run.setting].append(run)
    alone = [s for s, mine in groups.items() if all(run.method in CLONING for run in mine)]
    for kind, budget in alone:
        hosts = [s for s in groups if s[0].endswith(f" and {kind}")]
        hosts = [s for s in hosts if s[1].split(",")[0] == budget]
        for host in hosts:
            groups[host] += groups[kind, budget]
        if hosts:
            del groups[kind, budget]
    return groups


def flags_of(kind: str, budget: str) -> list[str] | None:
    """With which run_all.sh runs this setting; None for budgets that it does not know."""
    flags = {"published": ["--data", "d4rl"], "embedded": ["--data", "embedded"]}.get(kind)
    if flags is None or budget == "full":
        return flags
    return [*flags, "--quick"] if budget in ("quick", RUN_ALL_QUICK) else None


def about(runs: list[Run]) -> str:
    devices = "; ".join(sorted({run.device for run in runs}))
    commits = "; ".join(sorted({run.commit for run in runs}))
    text = f"Runs: {len(runs)}, on {devices}; code version {commits}."
    efforts = {label_of(run.method): run.effort for run in runs if run.effort}
    text += "".join(f" {method}: {effort}." for method, effort in sorted(efforts.items()))
    files = defaultdict(set)
    for run in runs:
        files[run.task] |= {run.sha256} - {""}
    mixed = ", ".join(task_label(task, True) for task in files if len(files[task]) > 1)
    if mixed:
        text += f" Beware: on these tasks the runs saw different target files: {mixed}."
    return text


def settings_of(runs: list[Run], archives: dict[str, Archive]) -> list[Setting]:
    """A section of the page for every kind of data and budget; full budgets on published data are
    first."""

    def order(item):
        (kind, budget), _ = item
        return kind != "published", budget != "full", (kind, budget)

    settings = []
    for (kind, budget), mine in sorted(grouped(runs).items(), key=order):
        short = budget
        if budget not in ("full", "quick"):
            short = f"custom-{hashlib.sha256(budget.encode()).hexdigest()[:8]}"
        slug, name = (
            f"{re.sub('[^a-z0-9]+', '-', kind.lower())}-{short}",
            f"{kind} data, budget: {budget}",
        )
        parts = [replace(p, file=f"{p.name}-{slug}", setting=name) for p in build(mine, archives)]
        title = name[0].upper() + name[1:]
        settings.append(Setting(slug, title, about(mine), flags_of(kind, budget), parts))
    return settings
