"""Job arrays on a Slurm cluster. A task of an array is `run_all.sh --commands FILE --line N`.

OUT/.run_all/run_all-DIGEST.txt has the commands of an array, and OUT/.run_all/jobs.json the arrays
by Slurm's job id.
"""

import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from dynashift.errors import UserError
from dynashift.files import write_bytes, write_json
from experiments.commands import Command, digest, read_commands, write_commands
from experiments.state import State, read_json

TASKS_BY_DEFAULT = 1001  # Slurm's own MaxArraySize


@dataclass(frozen=True)
class Array:
    """An array that was submitted: its file of commands, and how many of them a task runs."""

    file: str
    jobs: int

    def part(self, folder: Path, task: int) -> list[Command]:
        commands = read_commands(folder / self.file) if (folder / self.file).exists() else []
        return commands[(task - 1) * self.jobs : task * self.jobs]


def output_of(*words: str, **options) -> str:
    try:
        run = subprocess.run(words, check=True, capture_output=True, text=True, **options)
    except FileNotFoundError:
        raise UserError(
            f"there is no {words[0]} here; --slurm is for a cluster's login node"
        ) from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"{words[0]}: {error.stderr.strip() or error.returncode}") from None
    return run.stdout.strip()


def arrays(state: State) -> dict[str, Array]:
    """Job id -> the array. A damaged entry counts as not submitted."""
    found = {}
    for job, row in read_json(state.folder / "jobs.json").items():
        row = row if isinstance(row, dict) else {}
        if isinstance(row.get("file"), str) and isinstance(row.get("jobs"), int):
            found[job] = Array(row["file"], row["jobs"])
    return found


def in_slurm(state: State) -> dict[str, str]:
    """Name of a command -> state of its task. Slurm is asked only if something was submitted."""
    known, found = arrays(state), {}
    if not known:
        return {}
    # Id of the array, index of the task, state. No names of jobs: users may put anything into them.
    for line in output_of("squeue", "-h", "-r", "--me", "-o", "%F %K %T").splitlines():
        job, task, how = line.split()
        if job in known and task.isdigit():
            found |= {c.name: how for c in known[job].part(state.folder, int(task))}
    return found


def largest_array() -> int:
    """How many tasks an array may have, which is one less than MaxArraySize."""
    lines = output_of("scontrol", "show", "config").splitlines()
    config = {key.strip(): value.strip() for key, _, value in (x.partition("=") for x in lines)}
    size = config.get("MaxArraySize", "")
    return (int(size) if size.isdigit() else TASKS_BY_DEFAULT) - 1


@dataclass
class Submission:
    state: State
    jobs: int  # commands of a task
    throttle: int  # tasks of an array at a time
    extra: list[str]  # options for sbatch

    def sbatch(self, script: list[str], options: list[str]) -> str:
        """Submits; returns the job's id."""
        text = "\n".join(["#!/bin/bash", *script, ""])
        found = output_of("sbatch", "--parsable", *options, *self.extra, input=text)
        return found.split(";")[0]

    def array(self, commands: list[Command], wait: list[str]) -> str:
        """Submits these commands as one array that starts when the jobs in `wait` have ended."""
        text, logs = write_commands(commands), self.state.out / "logs"
        name = f"run_all-{self.jobs}-{digest(text)}"
        file = self.state.folder / f"{name}.txt"
        write_bytes(file, text.encode(errors="surrogateescape"))
        worker = [sys.executable, "-m", "experiments.runner", "--out", str(self.state.out)]
        worker += ["--commands", str(file), "--line"]
        script = [f"export JOBS={self.jobs}", f'exec {shlex.join(worker)} "$SLURM_ARRAY_TASK_ID"']
        tasks = -(-len(commands) // self.jobs)
        options = [f"--job-name={name}", f"--array=1-{tasks}%{self.throttle}", "--requeue"]
        options += ["--signal=B:TERM@300", "--open-mode=append"]
        options += [f"--output={logs}/slurm-%A_%a.log", *after(wait)]
        job = self.sbatch(script, options)
        known = arrays(self.state) | {job: Array(file.name, self.jobs)}
        path = self.state.folder / "jobs.json"
        write_json(path, {number: asdict(array) for number, array in known.items()})
        what = f"job {job}: {len(commands)} commands"
        print(", ".join([what, *wait_text(wait)]), file=sys.stderr)
        return job

    def report(self, results: Path, wait: list[str]) -> None:
        out, logs = self.state.out, self.state.out / "logs"
        words = [sys.executable, "-m", "experiments.report", "--runs", str(out)]
        script = [f"exec {shlex.join([*words, '--out', str(results)])}"]
        options = ["--job-name=report", *after(wait), f"--output={logs}/report.log"]
        print(f"job {self.sbatch(script, options)}: the report, at the end", file=sys.stderr)


def wait_text(wait: list[str]) -> list[str]:
    # Not afterok: where preprocessing failed, the run tries it again and says why it cannot work.
    return [":".join(["afterany", *wait])] if wait else []


def after(wait: list[str]) -> list[str]:
    return [f"--dependency={text}" for text in wait_text(wait)]


def levels(todo: dict[str, Command]) -> dict[tuple[int, bool], list[Command]]:
    """(how many commands come before it, whether another one waits for it) -> commands. In the
    order of submission: what others wait for comes first."""
    needed, found = {command.after for command in todo.values()}, {}

    def depth(command: Command) -> int:
        return 1 + depth(todo[command.after]) if command.after in todo else 0

    for command in todo.values():
        found.setdefault((depth(command), command.name in needed), []).append(command)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], not item[0][1])))


def submit(commands: list[Command], submission: Submission, results: Path | None) -> None:
    """Submits what is neither done nor in the queue, in arrays of at most MaxArraySize tasks.
    results: the folder of a report that follows at the end."""
    state, queued = submission.state, in_slurm(submission.state)
    todo = {c.name: c for c in commands if not state.is_done(c) and c.name not in queued}
    size = largest_array() * submission.jobs
    (state.out / "logs").mkdir(parents=True, exist_ok=True)
    ids = {}
    for (level, wanted), group in levels(todo).items():
        wait, mine = ids.get((level - 1, True), []), ids.setdefault((level, wanted), [])
        for i in range(0, len(group), size):
            mine.append(submission.array(group[i : i + size], wait))
    before = f"{len(queued)} in the queue before"
    print(f"{len(todo)} commands submitted, {before}", file=sys.stderr)
    if ids and results:
        submission.report(results, [job for group in ids.values() for job in group])


def requeue() -> None:
    """Ask for another turn after Slurm's warning, which comes before the time limit and before a
    preemption; not if the job was cancelled."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if job and output_of("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING":
        output_of("scontrol", "requeue", job)
