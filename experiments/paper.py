"""The numbers that the paper prints (paper.json), and the tasks that its tables are about."""

import itertools
import json
from pathlib import Path

from dynashift import tasks

PAPER = json.loads((Path(__file__).parent / "paper.json").read_bytes())
PAPER_METHODS = tuple(PAPER["methods"])  # in the order of the printed scores

Task = tuple[str, str, str, str]  # robot, shift, quality of the source data, of the target data


def as_task(text: str) -> Task:
    robot, shift, source, target = text.split()
    return robot, shift, source, target


MAIN = {as_task(task): row for task, row in PAPER["main"].items()}
ROBOTS = tuple(tasks.ROBOTS)
SOURCES = tuple(dict.fromkeys(task[2] for task in MAIN))
TARGETS = tuple(dict.fromkeys(task[3] for task in MAIN))
QUALITIES = tuple(itertools.product(SOURCES, TARGETS))


def all_shifts() -> tuple[str, ...]:
    """The paper's shifts in its order, then those that were added to the benchmark since."""
    known = [shift for shift in tasks.SHIFTS if shift != "none"]
    return tuple(dict.fromkeys([*PAPER["summary"], *known]))


def all_tasks() -> tuple[Task, ...]:
    """The paper's tasks, and every pair of qualities for a shift that the paper does not have."""
    new = [shift for shift in all_shifts() if shift not in PAPER["summary"]]
    robots = [(robot, s) for s in new for robot in ROBOTS if robot in tasks.SHIFTS[s]]
    return (*MAIN, *((*r, *q) for r, q in itertools.product(robots, QUALITIES)))


SHIFTS = all_shifts()
TASKS = all_tasks()


def paper_scores(task: Task) -> dict[str, float]:
    """Method -> the score that the paper prints for this task; empty if it has no such row."""
    return dict(zip(PAPER_METHODS, MAIN[task]["scores"], strict=True)) if task in MAIN else {}


def paper_std(task: Task) -> float | None:
    """The paper prints a ± for TAF-DT only."""
    return MAIN[task]["std"] if task in MAIN else None
