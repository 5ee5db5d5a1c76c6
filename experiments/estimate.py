"""How long the runs would take on this machine, measured within a minute."""

import contextlib
import importlib
import io
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynashift.errors import UserError
from dynashift.files import write_json
from experiments import scripts
from experiments.commands import Command
from experiments.machine import clock, threads_per_run
from experiments.methods import METHODS
from experiments.pool import STOP
from experiments.state import State, read_json

LIMIT = 45  # seconds for all measurements; to start and to end takes a few more
GRACE = 5  # seconds in which a measurement has to notice that the time is up
SHARE = 4  # large sequence models are measured with a quarter of their batch
ROWS = 2000  # source transitions of a measurement; gate and weights are timed with MORE as well
MORE = 20_000
TARGET = 5000  # target transitions
STARTUP = 10.0  # seconds to start a run and to load its data
BASIS = f"""
This rests on a few updates of every stage and one short evaluation for each script and context
length, on random data with hopper's shapes, multiplied by the number of updates and evaluations of
a run. Large sequence models were measured with 1/{SHARE} of their batch, gate and weights with
{ROWS:,} and {MORE:,} source transitions, and scaled up. Downloads and the generation of data are
not included. Other work on this machine during the measurement makes the numbers larger."""

# Seconds of one update of each stage, of an evaluation, of preprocessing for a source transition.
Rates = dict[str, float]


def random_data(path: Path, rows: int) -> None:
    """A file in D4RL's layout: episodes of random numbers."""
    import h5py
    import numpy as np

    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(rows, 11)).astype(np.float32)
        file["actions"] = rng.uniform(-1, 1, (rows, 3)).astype(np.float32)
        file["rewards"] = rng.uniform(size=rows).astype(np.float32)
        file["terminals"] = np.zeros(rows, bool)
        file["timeouts"] = np.arange(rows) % 200 == 199


def small_run(values: dict, folder: Path, large: bool) -> dict:
    """Arguments of the run that is measured."""
    files = {role: str(folder / f"{role}.hdf5") for role in ("source", "target")}
    # With quick, taf_dt.py makes no estimate of its own; the values of --quick are not used.
    small = dict(env="hopper", quick=True, out=folder) | files
    small["torch_deterministic"] = False
    for name in ("batch", "target_batch"):
        if large and name in values:
            small[name] = max(1, values[name] // SHARE)
    off = {"diagnostics": False, "guided": "never"}
    return small | {name: value for name, value in off.items() if name in values}


def updates_field(stage: str) -> str:
    """The argument with a stage's number of updates: cvae -> cvae_updates."""
    return "label_updates" if stage == "values" else f"{stage}_updates"


def rates_of(module, values: dict, folder: Path) -> Rates:
    """Seconds of one update of each stage, of one evaluation of 1000 steps, and of the
    preprocessing of one source transition."""
    runs = importlib.import_module("dynashift.runs")  # here, because it imports torch
    large = "K" in values and not values["quick"]  # updates of a second or more
    scaled = large and bool({"batch", "target_batch"} & values.keys())
    folder.mkdir()
    random_data(folder / "source.hdf5", MORE)
    random_data(folder / "target.hdf5", TARGET)
    small = small_run(values, folder, large)
    counts = {name: 8 for name in values if name.endswith("updates")}
    if large:
        counts["updates"] = 3
    found = []
    # The first run warms up. The others differ in their updates and their source transitions.
    for seed, (rows, more) in enumerate(((ROWS // 2, 0), (ROWS, 0), (MORE, 1))):
        updates = {name: 1 + more * count for name, count in counts.items()}
        changed = values | small | updates | {"seed": seed, "source_size": rows}
        result = module.train(runs.compose(module.Args, **changed))
        found.append({name: stage["seconds"] for name, stage in result["stages"].items()})
    _, earlier, stages = found
    rates = {}
    for stage, seconds in stages.items():
        difference = max(seconds - earlier[stage], 0.1 * seconds)
        if stage.startswith("preprocess"):  # it has no updates: the cost of one source transition
            rates[stage] = difference / (MORE - ROWS)
        elif updates_field(stage) in counts:
            rates[stage] = difference / counts[updates_field(stage)]
        else:
            rates[stage] = difference * (SHARE if scaled else 1) / counts["updates"]
    # Good policies reach the time limit.
    lengths = result["evaluations"][-1].get("lengths", [1000])
    rates["evaluation"] = stages["evaluation"] * 1000 / max(lengths)
    return rates


class TimeIsUp(BaseException):
    """Not an Exception, so that no script takes it for a failure of its own and goes on."""


@dataclass
class Measurement:
    measured: dict[str, Rates]  # by script, context length and machine
    folder: Path
    is_over: bool = False  # the time for measurements
    is_busy: bool = False  # with something that may be given up
    read: dict[tuple[str, ...], Any] = field(default_factory=dict)  # arguments by their words

    def seconds_of(self, words: tuple[str, ...]) -> tuple[float, float] | None:
        """Seconds of a run, and of its preprocessing; None if they are not known and there is no
        time left to measure them."""
        self.is_busy = True
        try:
            values = self.values_of(words)
            return values and self.seconds_with(words[0], values)
        except TimeIsUp:
            return None
        finally:
            self.is_busy = False

    def end(self, number, frame) -> None:
        """Handles the signal of the timer."""
        self.is_over = True
        if self.is_busy:
            raise TimeIsUp

    def values_of(self, words: tuple[str, ...]) -> dict | None:
        """All arguments of a run by name; None if there is no time left to read them."""
        # Reading a command line takes a tenth of a second, so it is done once for all tasks.
        runs = importlib.import_module("dynashift.runs")
        module, rest = scripts.module_of(words[0]), without(words, ("--env", "--shift"))
        if rest not in self.read:
            if self.is_over:
                return None
            self.read[rest] = scripts.read_args(module, rest[1:])
        args, flags = self.read[rest], dict(itertools.pairwise(words))
        before = runs.flatten(runs.plain(module.Args, module.defaults, args))
        given = {name: x for name, x in runs.flatten(args).items() if x != before[name]}
        task = runs.replace(args, env=flags["--env"], shift=flags["--shift"])
        return runs.flatten(runs.plain(module.Args, module.defaults, task)) | given

    def seconds_with(self, script: str, values: dict) -> tuple[float, float] | None:
        name, threads = Path(script).stem, os.environ["OMP_NUM_THREADS"]
        key = f"{name}, K {values.get('K')}, quick {values['quick']}, {values['device']}"
        key += f", {threads} threads"
        if key not in self.measured:
            if self.is_over:
                return None
            print(f"measuring {key}", file=sys.stderr)
            folder = self.folder / str(len(self.measured))
            silent = io.StringIO()
            with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
                self.measured[key] = rates_of(scripts.module_of(script), values, folder)
        return total_of(self.measured[key], values)


def total_of(rates: Rates, values: dict) -> tuple[float, float]:
    """Seconds of a run with these arguments, and of its preprocessing."""
    run, preprocessing = STARTUP, 0.0
    for stage, seconds in rates.items():
        if stage.startswith("preprocess"):
            preprocessing += seconds * (values["source_size"] or 1_000_000)
        elif stage == "evaluation":
            run += seconds * (values["updates"] // values["eval_every"] + 3)
        else:
            run += seconds * values.get(updates_field(stage), values["updates"])
    return run, preprocessing


def cost(words: tuple[str, ...]) -> bool:
    """What is cheap to measure comes first, so that more is known when the time is up."""
    families = {method.script: method.family for method in METHODS.values()}
    return families[words[0]] == "sequence" and "--quick" not in words


def without(words: tuple[str, ...], flags: tuple[str, ...]) -> tuple[str, ...]:
    """The words without these flags and their values."""
    pairs = itertools.pairwise(("", *words))
    return tuple(word for before, word in pairs if word not in flags and before not in flags)


def print_total(hours: dict[str, list[float]], unknown: Counter, jobs: int) -> None:
    for name, times in hours.items():
        mean = clock(3600 * sum(times) / len(times))
        print(f"{name:8} {len(times):5} runs, each {mean} on average")
    total = sum(map(sum, hours.values())) / jobs
    print(f"about {total:,.1f} hours here with JOBS={jobs}.{BASIS}")
    if unknown:
        names = ", ".join(f"{n} runs of {name}" for name, n in unknown.items())
        print(f"Not in the sum, because a minute was too short to measure them: {names}.")
        print("The same command goes on with them.")


def measure(commands: list[Command], state: State, jobs: int, folder: Path) -> None:
    """In a process of its own, which the caller ends at a signal, or if it takes too long."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)  # the caller gets and handles them
    path = state.folder / "measured.json"
    measurement, known = Measurement(read_json(path), folder), {}
    signal.signal(signal.SIGALRM, measurement.end)
    # Again every second, because the exception is lost where an object is being deleted.
    signal.setitimer(signal.ITIMER_REAL, LIMIT, 1)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
    os.environ["OMP_NUM_THREADS"] = threads_per_run(jobs)
    run_record = importlib.import_module("dynashift.run_record")
    gate_report = importlib.import_module("dynashift.gate_report")
    run_record.save_checkpoint = gate_report.draw = lambda *_: None  # nothing of these runs is kept
    hours, unknown, preprocessed = defaultdict(list), Counter(), set()
    labels = {method.script: method.name for method in METHODS.values()}
    for words in sorted((command.words for command in commands), key=cost):
        short = without(words, ("--seed", "--source", "--target", "--data", "--data-dir"))
        if short not in known:
            before = len(measurement.measured)
            known[short] = measurement.seconds_of(short)
            if len(measurement.measured) > before:
                write_json(path, measurement.measured)
        name = labels[words[0]]
        if known[short] is None:
            unknown[name] += 1
            continue
        seconds, preprocessing = known[short]
        pair = words[: words.index("--seed")]  # all seeds share gate, weights and transport costs
        if pair not in preprocessed:
            seconds += preprocessing
            preprocessed.add(pair)
        hours[name].append(seconds / 3600)
    if not hours:
        found = f"nothing could be measured within {LIMIT} s"
        print(f"{found}; give the same command again when this machine is less busy")
        return
    print_total(hours, unknown, jobs)
    print(f"What was measured: {path}")


def estimate(commands: list[Command], state: State, jobs: int) -> int:
    """Measure in a process that can be ended at once; the scripts would wait for a checkpoint."""
    path = state.folder / "measured.json"
    write_json(path, read_json(path))  # fails now if it cannot be written
    for number in STOP:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=measure, args=(commands, state, jobs, Path(folder)))
        process.start()
        try:
            process.join(LIMIT + GRACE)
        finally:
            late = process.is_alive()
            process.kill()
            process.join()
    if late:
        raise UserError(
            f"no answer after {LIMIT + GRACE} s; the same command goes on with what is left"
        )
    return process.exitcode
