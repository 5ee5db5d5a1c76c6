"""Which commands make which table.

A new ablation is one row of `ABLATIONS`: `run_all.sh --table NAME` then runs it, and the report
has its table.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from experiments.commands import Command
from experiments.methods import CLONING, METHODS, OURS
from experiments.paper import PAPER, PAPER_METHODS, ROBOTS, SHIFTS, TASKS, Task, as_task

Value = str | bool | int | float


@dataclass(frozen=True)
class Ablation:
    """TAF-DT with one argument varied and all others at their defaults."""

    name: str
    title: str
    factor: str  # the argument, as it is called in result.json
    default: Value
    values: tuple[Value, ...]
    labels: tuple[str, ...] = ()  # of the values; "factor = value" unless given
    tasks: tuple[Task, ...] = ()  # those of the paper's table of this name unless given
    seeds: int = 1
    changes_gate: bool = False  # then every value has gate and weights of its own
    quick_default: Value | None = None  # where --quick of taf_dt.py changes the default

    @property
    def rows(self) -> tuple[Task, ...]:
        return self.tasks or tuple(map(as_task, PAPER["ablations"][self.name]["rows"]))

    def label(self, value: Value) -> str:
        labels = dict(zip(self.values, self.labels, strict=False))
        return labels.get(value, f"{self.factor} = {value}")

    def paper(self, task: Task) -> dict:
        """Value -> the paper's mean and standard deviation for this task, where it prints them."""
        printed = PAPER["ablations"].get(self.name, {"values": (), "rows": {}})
        return dict(zip(printed["values"], printed["rows"].get(" ".join(task), ()), strict=False))


FILTER_LABELS = ("MMD gate and OT weights", "OT only", "MMD only")
# fmt: off
ABLATIONS = {ablation.name: ablation for ablation in (
    Ablation("filtering", "Filtering", "filter", "both", ("both", "ot", "mmd"), FILTER_LABELS,
             changes_gate=True),
    Ablation("advantage", "Advantage token", "token", "advantage", ("advantage", "rtg"),
             ("advantage", "return-to-go")),
    Ablation("alpha", "Weight of the Q term, alpha", "alpha", 3.5, (0.0, 1.0, 3.5, 5.0)),
    Ablation("expectile", "Expectile, zeta", "zeta", 0.98, (0.5, 0.55, 0.7, 0.98),
             quick_default=0.55),
    Ablation("ot_reward", "Reward in the OT features", "ot_reward", True, (True, False),
             ("with reward", "without reward"), seeds=3, changes_gate=True),
    Ablation("ot_cost", "OT ground cost", "ot_cost", "cosine",
             ("cosine", "euclidean", "sqeuclidean"), changes_gate=True),
    Ablation("xi", "Keep ratio of the MMD gate, xi", "xi", 0.5, (0.1, 0.3, 0.5, 0.6, 0.8),
             changes_gate=True),
)}
# fmt: on
TIMES = tuple(map(as_task, PAPER["times"]["rows"]))
# Tasks of the junction figure: their runs for the main tables measure it along the way.
JUNCTION = tuple(
    (robot, shift, "medium", "medium")
    for robot, shift in (
        ("hopper", "kinematic"),
        ("walker2d", "morph"),
        ("ant", "gravity"),
        ("halfcheetah", "kinematic"),
    )
)
# TAF-DT first: the junction figure needs its critics for the other methods.
ORDER = [*reversed(PAPER_METHODS), *(name for name in METHODS if name not in PAPER_METHODS)]


def as_flag(name: str) -> str:
    return name.replace("_", "-")


TABLES = [*SHIFTS, "summary", *map(as_flag, ABLATIONS), "times", "junction"]

# --quick: three tasks that occur in all tables, one seed, the same few updates for every method.
QUICK_TASKS = tuple(
    (robot, shift, "medium", "medium")
    for robot, shift in (("halfcheetah", "morph"), ("hopper", "kinematic"), ("ant", "gravity"))
)
# taf_preprocess.py has no --quick, so it needs the value that --quick has in the scripts.
QUICK_SIZE = 100_000
QUICK_UPDATES = 400
QUICK_EPISODES = 2
# All methods get the same flags, otherwise the report would take each for a setting of its own.
QUICK = ("--quick", "--updates", str(QUICK_UPDATES), "--eval-episodes", str(QUICK_EPISODES))


@dataclass(frozen=True)
class Selection:
    """Flags that choose runs, and those that all their commands share."""

    table: tuple[Literal[tuple(TABLES)], ...] = ()
    """only what these tables need"""
    method: tuple[Literal[tuple(ORDER)], ...] = ()
    """only these methods"""
    env: tuple[Literal[ROBOTS], ...] = ()
    """only these robots"""
    shift: tuple[Literal[SHIFTS], ...] = ()
    """only these shifts"""
    seeds: tuple[int, ...] = ()
    """seeds, 1 to 5 by default; an ablation of one seed takes the first"""
    quick: bool = False
    """every table at a tiny budget: one seed, few tasks, few updates, embedded data"""
    data: Literal["auto", "d4rl", "embedded"] | None = None
    """published data, generated data, or whichever is available; auto, with --quick embedded"""
    data_dir: Path | None = None
    """folder of the published files"""
    out: Path = Path("runs")
    """folder of the runs"""
    device: str = "auto"
    """cpu, cuda, ...; auto is cuda where there is one"""


@dataclass(frozen=True)
class Cell:
    """One run of a table. An empty factor means the method with its defaults."""

    method: str
    task: Task
    seed: int
    factor: str = ""
    value: Value | None = None

    @property
    def diagnostics(self) -> bool:
        """Whether the junction figure needs this run."""
        return not self.factor and METHODS[self.method].junctions and self.task in JUNCTION


def seeds_of(selection: Selection) -> list[int]:
    default = [1] if selection.quick else [1, 2, 3, 4, 5]
    return list(dict.fromkeys(selection.seeds)) or default


def main_cells(shifts, selection: Selection) -> list[Cell]:
    """Every method on the tasks of these shifts."""
    tasks = [t for t in (QUICK_TASKS if selection.quick else TASKS) if t[1] in shifts]
    found = []
    for method in ORDER:
        for robot, shift, source, target in tasks:
            source = "medium" if method in CLONING else source  # one run serves every source
            task = (robot, shift, source, target)
            found += [Cell(method, task, seed) for seed in seeds_of(selection)]
    return found


def ablation_cells(ablation: Ablation, selection: Selection) -> list[Cell]:
    tasks, default = ablation.rows, ablation.default
    if selection.quick:
        tasks = tuple(t for t in tasks if t in QUICK_TASKS)[:1] or tasks[:1]
        default = default if ablation.quick_default is None else ablation.quick_default
    found = []
    for task in tasks:
        for value in ablation.values:
            varied = () if value == default else (ablation.factor, value)
            seeds = seeds_of(selection)[: ablation.seeds]
            found += [Cell(OURS, task, seed, *varied) for seed in seeds]
    return found


def table_cells(table: str, selection: Selection) -> list[Cell]:
    if table == "summary":
        return main_cells(SHIFTS, selection)
    if table in SHIFTS:
        return main_cells((table,), selection)
    if table == "junction":
        tasks, methods = JUNCTION, [name for name in ORDER if METHODS[name].junctions]
    elif table == "times":
        tasks, methods = TIMES, [OURS]
    else:
        return ablation_cells(ABLATIONS[table.replace("-", "_")], selection)
    tasks = [task for task in tasks if not selection.quick or task in QUICK_TASKS]
    seeds = seeds_of(selection)
    return [Cell(method, task, seed) for method in methods for task in tasks for seed in seeds]


def cells(selection: Selection) -> list[Cell]:
    """Every run that the tables need, once; all tables with one seed before the next seed."""
    tables = selection.table or TABLES
    found = dict.fromkeys(cell for table in tables for cell in table_cells(table, selection))

    def is_chosen(cell: Cell) -> bool:
        robot, shift, _, _ = cell.task
        pairs = (
            (cell.method, selection.method),
            (robot, selection.env),
            (shift, selection.shift),
        )
        return all(not chosen or name in chosen for name, chosen in pairs)

    seeds = seeds_of(selection)
    return sorted(filter(is_chosen, found), key=lambda cell: seeds.index(cell.seed))


def flags(factor: str, value: Value) -> list[str]:
    if isinstance(value, bool):
        return [f"--{as_flag(factor)}" if value else f"--no-{as_flag(factor)}"]
    return [f"--{as_flag(factor)}", str(value)]


def shared_flags(selection: Selection) -> list[str]:
    words = ["--data", selection.data or ("embedded" if selection.quick else "auto")]
    if selection.data_dir:
        words += ["--data-dir", str(selection.data_dir)]
    if selection.device != "auto":
        words += ["--device", selection.device]
    return words


def task_flags(task: Task) -> list[str]:
    names = ("--env", "--shift", "--source", "--target")
    return [word for pair in zip(names, task, strict=True) for word in pair]


def preprocess_command(cell: Cell, selection: Selection) -> Command:
    """Gate and weights of a run of TAF-DT."""
    words = ["taf_preprocess.py", *task_flags(cell.task), *shared_flags(selection)]
    words += ["--out", str(selection.out / "preprocess")]
    if selection.quick:
        words += ["--source-size", str(QUICK_SIZE)]
    if any(a.changes_gate and a.factor == cell.factor for a in ABLATIONS.values()):
        words += flags(cell.factor, cell.value)
    return Command(tuple(words))


def run_command(cell: Cell, selection: Selection) -> Command:
    words = [METHODS[cell.method].script, *task_flags(cell.task), "--seed", str(cell.seed)]
    words += shared_flags(selection)
    if selection.out != Path("runs"):
        words += ["--out", str(selection.out)]
    if cell.factor:
        words += flags(cell.factor, cell.value)
    if cell.diagnostics:
        words += ["--diagnostics"]
    if selection.quick:
        words += QUICK
    return Command(tuple(words))


@dataclass
class Grid:
    """Commands of the preprocessing that several runs share, and of the runs."""

    shared: list[Command] = field(default_factory=list)
    runs: list[Command] = field(default_factory=list)


def grid(selection: Selection) -> Grid:
    before, references, runs = {}, {}, []
    for cell in cells(selection):
        command, after = run_command(cell, selection), None
        if cell.method == OURS:
            preprocess = preprocess_command(cell, selection)
            after = before.setdefault(preprocess.name, preprocess).name
        elif cell.diagnostics:
            after = references.get(cell.task)  # whose critics it borrows
        runs.append(replace(command, after=after))
        if cell.method == OURS and cell.diagnostics:
            references.setdefault(cell.task, command.name)
    wanted = Counter(command.after for command in runs)
    once = {name for name in before if wanted[name] < 2}  # then the run itself can do it
    runs = [replace(c, after=None) if c.after in once else c for c in runs]
    return Grid([c for name, c in before.items() if name not in once], runs)
