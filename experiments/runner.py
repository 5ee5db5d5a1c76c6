"""Every run behind the paper's tables and figures, then the report. Started by `bash run_all.sh`.

    bash run_all.sh --quick                              every table at a tiny budget, embedded data
    JOBS=4 bash run_all.sh                               everything, four runs at a time
    bash run_all.sh --table alpha xi --env hopper        a part of it
    bash run_all.sh --list                               one command per line, for any scheduler
    bash run_all.sh --estimate                           how long that takes here, within a minute
    bash run_all.sh --slurm -- --time=1-0 --gres=gpu:1   job arrays; sbatch gets what follows --
    bash run_all.sh --status                             how far it has got

A run is identified by its command line. OUT/.run_all has two files for each: NAME.lock, which is
locked while it runs, and NAME.json, which says how it ended; its output is OUT/logs/NAME.log. A run
that was stopped or killed continues from its checkpoint when the same command is given again.
With Slurm, JOBS runs share one task of the array, and so its card.
"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from dynashift.errors import UserError, one_line_errors
from dynashift.files import check_folder
from experiments import estimate, slurm
from experiments.commands import Command, read_commands
from experiments.grid import QUICK_TASKS, QUICK_UPDATES, Grid, Selection, grid
from experiments.machine import jobs_at_once
from experiments.paper import TASKS
from experiments.pool import run_here
from experiments.state import State


@dataclass(frozen=True)
class Args:
    # what to run, and where
    runs: tyro.conf.OmitArgPrefixes[Selection] = field(default_factory=Selection)
    commands: Path | None = None
    """run the lines of this file instead, as --list prints them"""
    results: Path = Path("results")
    """folder of the report"""

    # what to do instead of running
    list: bool = False
    """print the commands, and their number on stderr"""
    estimate: bool = False
    """measure for at most a minute how many hours they would take here"""
    status: bool = False
    """count what is done, running, failed and waiting"""
    slurm: bool = False
    """submit to Slurm"""
    throttle: int = 100
    """with --slurm: tasks of an array that may run at once"""
    line: int | None = None
    """with --commands: only the n-th JOBS lines of the file, as a task of a Slurm array does"""


def status(commands: list[Command], state: State) -> None:
    """Prints how many commands are done, running, failed and waiting, and the logs of failures."""
    queue, failed, queued = slurm.in_slurm(state), [], 0
    counts = dict.fromkeys(("done", "running", "failed", "waiting"), 0)
    for command in commands:
        name, how, outcome = command.name, "waiting", state.outcome(command.name)
        if queue.get(name) in ("RUNNING", "COMPLETING"):
            how = "running"
        elif state.is_done(command):
            how = "done"
        elif state.is_locked(command):
            how = "running"
        elif name not in queue and outcome and outcome.status == "failed":
            how = "failed"
            failed.append(state.log(name))
        counts[how] += 1
        queued += how == "waiting" and name in queue
    note = f" ({queued} of them in Slurm's queue)" if queued else ""
    print(", ".join(f"{n} {how}" for how, n in counts.items()) + note)
    for log in failed:
        print(f"failed: {log}")


def report(args: Args) -> int:
    words = ["-m", "experiments.report", "--runs", str(args.runs.out), "--out", str(args.results)]
    print(f"+ python {' '.join(words)}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, *words]).returncode


def chosen(args: Args, jobs: int) -> Grid:
    if not args.commands:
        found = grid(args.runs)
    else:
        lines = read_commands(args.commands)
        if args.line:
            lines = lines[(args.line - 1) * jobs : args.line * jobs]
        found = Grid(runs=lines)
    if not found.runs:
        raise UserError("no run fits these filters")
    return found


def say_what_quick_leaves_out() -> None:
    tasks = ", ".join(f"{r} {s} {source} -> {target}" for r, s, source, target in QUICK_TASKS)
    print(
        f"quick: {len(QUICK_TASKS)} of {len(TASKS)} tasks ({tasks}), one row in each ablation,"
        f" one seed, embedded data, small networks and {QUICK_UPDATES} updates; left out is all"
        " that makes the numbers meaningful",
        file=sys.stderr,
    )


def main() -> int:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args, extra = (
        tyro.cli(Args, args=words[:cut], description=__doc__, prog="run_all.sh"),
        words[cut + 1 :],
    )
    if extra and not args.slurm:
        raise UserError("what follows -- goes to sbatch, and needs --slurm")
    jobs = jobs_at_once(one=bool(args.slurm or args.line))
    found, state = chosen(args, jobs), State(args.runs.out)
    if args.list:
        print("\n".join(map(str, found.runs)), flush=True)
    if args.runs.quick and not args.commands:
        say_what_quick_leaves_out()
    if args.list:
        shared = f"{len(found.shared)} shared preprocessings"
        print(f"{len(found.runs)} runs, {shared}; --estimate: how long", file=sys.stderr)
        return 0
    if args.estimate:
        if args.commands:
            raise UserError(
                "--estimate is for the runs of --table and the like, not for --commands"
            )
        return estimate.estimate(found.runs, state, jobs)
    if args.status:
        status(found.runs, state)
        return 0
    check_folder(args.runs.out)
    if not args.commands:  # the report follows
        check_folder(args.results, "--results")
    everything = [*found.shared, *found.runs]
    if args.slurm:
        submission = slurm.Submission(state, jobs, args.throttle, extra)
        slurm.submit(everything, submission, None if args.commands else args.results)
        return 0
    code = run_here(everything, state, jobs)
    if args.line and code > 128:
        slurm.requeue()
    return code if code > 128 or args.commands else report(args) or code


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
