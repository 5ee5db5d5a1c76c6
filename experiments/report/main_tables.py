"""The main tables, one per shift, and their summary."""

from dataclasses import dataclass, field

import numpy as np

from experiments.methods import CLONING, METHODS, OURS, label_of
from experiments.paper import PAPER, PAPER_METHODS, ROBOTS, TASKS, Task, paper_scores, paper_std
from experiments.report.parts import Cell, Row, Table, bold_best, cell, footnotes, task_label
from experiments.report.reading import (
    Cells,
    common_tasks,
    finals,
    guided_finals,
    tasks_of,
    was_run,
)

# TAF-DT and the control come first, so that they are side by side.
COLUMNS = [OURS, *CLONING, *(m for m in METHODS if m != OURS and m not in CLONING)]
DATA = "data"  # the column of the target data's own score
GUIDED = ", guided"  # ends the column of a method's scores when its critics choose the actions

CAPTION = (
    "Normalised score at the final checkpoint{episodes}: mean ± sample standard deviation (ddof "
    "1) over seeds, with the number of seeds in brackets; one seed has no ±. A dash means not "
    "run. The highest mean of a row is bold, where at least two methods were run. Sums and wins "
    "(rows with the strictly highest mean) are over those rows that all methods have which were "
    "run on any of them, with their number in brackets. BC (behaviour cloning) learns from the "
    'target data alone: "same runs" marks its score where it was run with another source, which '
    "is in no sum. Target data: the mean score of its episodes."
)
WITH_CRITICS = (
    'A column "guided" has the same policies with the inference of their official code, where the '
    "critics choose among many candidate actions. It counts in no comparison: the highest mean of "
    "a row and the wins are those of the policies alone, in the column before it."
)
THEIRS = (
    "According to the paper, its cells are of five seeds and the final checkpoint. It prints ± "
    "for TAF-DT only, and has no BC. Its sums are over the same rows as ours, or over all rows "
    "where we have none; its wins are over all 36 rows."
)


def total(rows: list[dict], method: str, of: list[dict], compared: bool) -> Cell:
    """Sum over these rows, and over the same rows of the paper, or over all if there are none."""
    paper = [row[method].paper for row in rows or of if row[method].paper is not None]
    means = [row[method].mean for row in rows if row[method].mean is not None] if compared else []
    sums = [sum(means)] if means and len(means) == len(rows) else []
    printed = sum(paper) if paper else None
    return cell(sums, printed, n=len(rows) if sums else None, of=len(of))


def wins(rows: list[dict], method: str, methods, which: str) -> int:
    """Rows in which the method has strictly the highest number of those given."""
    won = 0
    for row in rows:
        numbers = {m: getattr(row[m], which) for m in methods}
        mine = numbers.pop(method)
        won += mine is not None and all(mine > x for x in numbers.values() if x is not None)
    return won


@dataclass
class MainTable:
    """The table of one shift while it is built."""

    cells: Cells
    shift: str
    tasks: list[Task] = field(default_factory=list)
    run: list[str] = field(default_factory=list)  # methods that were run at all
    columns: list[str] = field(default_factory=list)
    by_task: dict[Task, dict[str, Cell]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self):
        self.tasks = [task for task in TASKS if task[1] == self.shift]
        found = {method: tasks_of(self.cells, method, self.shift) for method in COLUMNS}
        self.run = [method for method in COLUMNS if found[method]]
        for method in COLUMNS:
            guided = any(len(guided_finals(self.cells, method, t)) for t in found[method])
            self.columns += [method, method + GUIDED] if guided else [method]
        self.columns.append(DATA)
        own = sorted({task for tasks in found.values() for task in tasks} - set(self.tasks))
        self.by_task = {task: self.row(task) for task in [*self.tasks, *own]}
        self.own_data = own

    def row(self, task: Task) -> dict[str, Cell]:
        printed = paper_scores(task)
        found = {m: cell(finals(self.cells, m, task), printed.get(m)) for m in COLUMNS}
        found |= {m + GUIDED: cell(guided_finals(self.cells, m, task)) for m in COLUMNS}
        found[OURS].paper_std = paper_std(task)
        for method in CLONING:
            if found[method].mean is not None and not was_run(self.cells, method, task):
                found[method].remark, found[method].served = "same runs", True
        runs = [run for m in METHODS for run in self.cells.get((m, None, task), ())]
        scores = [run.target_score for run in runs if run.target_score is not None]
        here = any(was_run(self.cells, m, task) for m in COLUMNS)
        found[DATA] = cell(scores[:1], n=None, served=not here)
        bold_best([found[m] for m in COLUMNS])
        return found

    def compared(self, tasks: list[Task], among: list[str]) -> tuple[list[str], list[Task]]:
        """Methods that were run on any of these tasks, and the tasks on which all of them were."""
        here = [m for m in among if any(was_run(self.cells, m, t) for t in tasks)]
        return here, common_tasks(self.cells, here, tasks) if len(here) > 1 else []

    def add(self, tasks: list[Task]) -> None:
        for task in tasks:
            cells = [self.by_task[task][column] for column in self.columns]
            self.rows.append(Row(task_label(task), cells, " ".join(task)))

    def add_sum(self, tasks: list[Task], key: str, name: str, among: list[str]) -> None:
        here, common = self.compared(tasks, among)
        part, whole = [self.by_task[t] for t in common], [self.by_task[t] for t in tasks]
        without = set(COLUMNS) - set(here)
        sums = {c: total(part, c, whole, c not in without) for c in self.columns}
        bold_best([sums[m] for m in here])
        self.rows.append(Row(name, list(sums.values()), key, is_sum=True))

    def add_wins(self, name: str, among: list[str]) -> None:
        here, common = self.compared(self.tasks, among)
        part, whole = [self.by_task[t] for t in common], [self.by_task[t] for t in self.tasks]
        printed = any(map(paper_scores, self.tasks))
        found = {}
        for m in self.columns:
            won = [wins(part, m, here, "mean")] if m in here and common else []
            paper = (
                wins(whole, m, PAPER_METHODS, "paper") if m in PAPER_METHODS and printed else None
            )
            found[m] = cell(won, paper, n=len(common) if won else None, digits=0)
        bold_best([found[m] for m in here])
        self.rows.append(Row(name, list(found.values()), "wins", is_sum=True))


def column_label(column: str) -> str:
    if column == DATA:
        return "target data"
    method = column.removesuffix(GUIDED)
    return label_of(method) + column.removeprefix(method)


def main_table(cells: Cells, shift: str, episodes: str) -> Table:
    table = MainTable(cells, shift)
    for robot in ROBOTS:
        mine = [task for task in table.tasks if task[0] == robot]
        if mine:
            table.add(mine)
            table.add_sum(mine, robot, f"{robot}, sum", table.run)
    table.add_sum(table.tasks, "all robots", "all robots, sum", table.run)
    table.add_wins("wins", table.run)
    without = [m for m in table.run if m not in CLONING]
    names = " and ".join(map(label_of, CLONING))
    # A clone has one row for three sources, which leaves few rows that all methods have.
    if table.compared(table.tasks, without)[1] != table.compared(table.tasks, table.run)[1]:
        table.add_sum(table.tasks, "all robots", f"all robots, sum without {names}", without)
        table.add_wins(f"wins without {names}", without)
    table.add(table.own_data)
    guided = any(column.endswith(GUIDED) for column in table.columns)
    return footnotes(
        Table(
            name=shift,
            title=f"{shift.capitalize()} shift",
            caption=CAPTION.format(episodes=episodes) + (f" {WITH_CRITICS}" if guided else ""),
            head="task",
            columns=list(map(column_label, table.columns)),
            rows=table.rows,
            column_keys=table.columns,
            about=[THEIRS],
        )
    )


# ---------------------------------------------------------------------------------------- summary


def summary_cells(cells: Cells, shift: str, among, paper: list) -> list[Cell]:
    """Over the tasks that every method has which was run at all: other totals cannot be
    compared."""
    tasks = [task for task in TASKS if task[1] == shift]
    run = [m for m in among if any(was_run(cells, m, t) for t in tasks)]
    common = common_tasks(cells, run, tasks) if run else []
    means = {m: np.array([finals(cells, m, t).mean() for t in common]) for m in run}
    others = [m for m in run if m != OURS] if common and OURS in run else []
    second = max(others, key=lambda m: means[m].sum(), default=None)
    ours, theirs, gain, won = [], [], [], []
    if second:
        ours, theirs = [means[OURS].sum()], [means[second].sum()]
        gain = [100 * (ours[0] / theirs[0] - 1)] if theirs[0] > 0 else []
        won = [(means[OURS] > np.max([means[m] for m in others], 0)).sum()]
    numbers = [ours, (), theirs, gain, won, [len(common)], [len(run)]]
    digits = [1, 1, 1, 1, 0, 0, 0]
    found = [cell(x, y, digits=d, n=None) for x, y, d in zip(numbers, paper, digits, strict=True)]
    found[1].text = label_of(second) if second else ""
    return found


def paper_summary(shift: str) -> list:
    if shift not in PAPER["summary"]:
        return [None] * 7
    paper = PAPER["summary"][shift]
    totals, second = dict(zip(PAPER_METHODS, paper["totals"], strict=True)), paper["runner_up"]
    printed = [totals[OURS], label_of(second), totals[second], paper["improvement"], paper["wins"]]
    return [*printed, 36, len(PAPER_METHODS)]


def summary_table(cells: Cells, shifts) -> Table:
    rows, added = [], [m for m in METHODS if m not in PAPER_METHODS]
    for shift in shifts:
        rows.append(
            Row(shift, summary_cells(cells, shift, PAPER_METHODS, paper_summary(shift)), shift)
        )
        if more := [m for m in added if tasks_of(cells, m, shift)]:
            found = summary_cells(cells, shift, METHODS, [None] * 7)
            names = ", ".join(map(label_of, more))
            rows.append(Row(f"{shift}, with {names}", found, f"{shift} {' '.join(more)}"))
    caption = (
        "Totals of the mean final scores, and strict wins, over the tasks that all methods have "
        "which were run at all; the last two columns say how many. First among the paper's "
        "methods, then with further ones, such as BC."
    )
    columns = ["TAF-DT, total", "best other", "its total", "improvement, %", "wins", "tasks"]
    return footnotes(
        Table(
            name="summary",
            title="Summary",
            caption=caption,
            head="shift",
            columns=[*columns, "methods"],
            rows=rows,
            column_keys=["ours", "second", "total", "gain", "wins", "tasks", "methods"],
        )
    )
