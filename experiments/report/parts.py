"""What the page is made of: tables with their cells, figures, and lines that say what was not
run."""

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from experiments.paper import PAPER


@dataclass
class Cell:
    mean: float | None = None
    std: float | None = None  # sample standard deviation
    n: int | None = None  # what the mean is over
    paper: float | str | None = None
    paper_std: float | None = None
    of: int | None = None  # of how many rows the n are
    low: float | None = None  # interval
    high: float | None = None
    digits: int = 1
    text: str | None = None  # instead of a number
    remark: str = ""
    best: bool = False
    served: bool = False  # by a run on another task: shown, but in no sum
    marks: list[int] = field(default_factory=list)  # footnotes

    @property
    def is_empty(self) -> bool:
        return not self.text and self.mean is None

    @property
    def is_run(self) -> bool:
        return bool(self.text) or (self.mean is not None and not self.served)


def cell(values=(), paper=None, paper_std=None, **more) -> Cell:
    """Mean, sample std (ddof 1) and number of values, and the paper's number. What is in `more`
    replaces or adds."""
    return Cell(
        **{
            "mean": float(np.mean(values)) if len(values) else None,
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "n": len(values) or None,
            "paper": paper,
            "paper_std": paper_std,
        }
        | more
    )


def bold_best(cells: list[Cell]) -> None:
    means = [c.mean for c in cells if c.mean is not None]
    for c in cells:
        c.best = len(means) > 1 and c.mean == max(means)


@dataclass
class Row:
    label: str
    cells: list[Cell]
    key: str = ""  # by which the paper's inconsistencies name it
    is_sum: bool = False
    marks: list[int] = field(default_factory=list)

    @property
    def is_run(self) -> bool:
        return any(c.is_run for c in self.cells)


@dataclass
class Part:
    """file and setting are filled in when it is known in which section of the page it is."""

    name: str
    title: str
    caption: str = ""
    file: str = ""
    setting: str = ""


@dataclass
class Table(Part):
    head: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    column_keys: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # numbered, at the cells
    about: list[str] = field(default_factory=list)  # about the whole table
    values: list = field(default_factory=list)  # of an ablation's columns


@dataclass
class FigurePart(Part):
    svg: str = ""


@dataclass
class NotRun(Part):
    pass


def footnotes(table: Table) -> Table:
    """Number the paper's inconsistencies in the order of the cells that they touch."""
    notes, texts = defaultdict(list), []
    for note in PAPER["notes"]:
        for key in note["cells"]:
            notes[key].append(note["text"])

    def marks(key: str) -> list[int]:
        texts.extend(text for text in notes[key] if text not in texts)
        return [texts.index(text) + 1 for text in notes[key]]

    for row in table.rows:
        if not row.key:
            continue
        row.marks = marks(f"{table.name}/{row.key}")
        for c, column in zip(row.cells, table.column_keys, strict=True):
            c.marks = marks(f"{table.name}/{row.key}/{column}")
    return replace(table, notes=texts, about=[*table.about, *notes[table.name]])


def without_paper(table: Table) -> Table:
    """Remove the paper's numbers, which are for the published data: beside scores on other data
    they would suggest a comparison that does not hold."""
    printed = any(c.paper is not None for row in table.rows for c in row.cells)
    about = (
        ["The paper's numbers are for the published data and not shown here."] if printed else []
    )
    rows = []
    for row in table.rows:
        cells = [replace(c, paper=None, paper_std=None, marks=[]) for c in row.cells]
        rows.append(replace(row, cells=cells, marks=[]))
    return replace(table, rows=rows, notes=[], about=about)


def task_label(task, with_shift: bool = False) -> str:
    robot, shift, source, target = task
    pair = f"{source.removesuffix('.hdf5')} → {target.removesuffix('.hdf5')}"
    return f"{robot} {shift}: {pair}" if with_shift else f"{robot}: {pair}"
