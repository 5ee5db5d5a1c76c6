"""Run commands on this machine, several at a time, each after the one it depends on."""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from dynashift.errors import InUse, UserError
from experiments import machine
from experiments.commands import Command
from experiments.machine import clock
from experiments.state import Outcome, State

POLL = 0.1  # seconds between two checks of the running processes
AGAIN = 5.0  # seconds until a run that another process has started is tried again
TRIES = 3  # attempts at a run that is killed
STOP = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
)  # all of them mean: save, then end

How = Literal["done", "failed", "busy", "killed", "stopped"]


@dataclass(frozen=True)
class Running:
    command: Command
    process: subprocess.Popen
    lock: IO
    slot: int
    since: float  # monotonic
    began: float  # wall clock


def begin(command: Command, state: State, slot: int, jobs: int, lock: IO) -> Running:
    """Start the command. Its process inherits the lock, which thus outlives a killed runner."""
    words, before = list(command.words), state.outcome(command.after)
    if "--diagnostics" in words and words[0] != "taf_dt.py" and before and before.result:
        words += ["--reference", str(Path(before.result).parent)]  # the critics of TAF-DT's run
    log, visible = state.log(command.name), machine.cards()
    # Waiting threads must not keep a core busy that another run could use.
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    env["OMP_NUM_THREADS"] = machine.threads_per_run(jobs)
    if visible:
        env["CUDA_VISIBLE_DEVICES"] = visible[slot % len(visible)]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(f"+ python {shlex.join(words)}\n".encode())
            file.flush()
            # In a session of its own, so that Ctrl-C reaches the runner alone, which then sends
            # SIGTERM to its runs.
            process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=env,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
    except OSError as error:
        raise UserError(
            f"cannot write {log}: {error.strerror}; fix that and give the same command again"
        ) from None
    return Running(command, process, lock, slot, time.monotonic(), time.time())


def result_of(run: Running) -> str | None:
    """The path of the run's result, in the folder whose lock file holds its process id."""
    out = Path(run.command.flags.get("--out", "runs"))
    signed = f"{run.process.pid} on {socket.gethostname()}"
    for lock in out.glob("*/*/*/.lock"):  # method, task, seed
        with contextlib.suppress(OSError):  # a folder that is being deleted
            if lock.stat().st_mtime > run.began - 60 and lock.read_text() == signed:
                return str(lock.parent / "result.json")
    return None


def end(run: Running, state: State, stopping: bool) -> How:
    """How the run ended; writes that down and frees the lock."""
    status, seconds = run.process.returncode, time.monotonic() - run.since
    with run.lock:
        if status and stopping:
            return "stopped"
        if status == InUse.status:
            return "busy"  # another process runs it
        if status < 0 or status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            return "killed"  # not its own fault: it will continue from its checkpoint
        how = "failed" if status else "done"
        result = result_of(run)
        state.record(run.command, Outcome(how, str(run.command), round(seconds, 1), status, result))
        return how


def say(line: str) -> None:
    print(f"\r\033[K{line}" if sys.stderr.isatty() else line, file=sys.stderr)


@dataclass
class Pool:
    commands: list[Command]
    state: State
    jobs: int
    todo: list[Command] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    results: dict[str, Literal["done", "failed"]] = field(default_factory=dict)
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by script
    not_before: dict[str, float] = field(default_factory=dict)  # runs that another process has
    killed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    signals: list[int] = field(default_factory=list)
    passed_on: int = 0
    trouble: str = ""  # why nothing can continue, such as a full disk
    began: float = field(default_factory=time.monotonic)

    def look_up(self) -> None:
        """Sort the commands into those that are done and those that are left."""
        for command in self.commands:
            if not self.state.is_done(command):
                self.todo.append(command)
                continue
            self.results[command.name] = "done"
            seconds = self.state.outcome(command.name).seconds
            if seconds > 20:  # a shorter time means that the run was already done
                self.took[command.words[0]].append(seconds)

    @property
    def stopping(self) -> bool:
        return bool(self.signals or self.trouble)

    def left(self) -> str:
        """Time left, estimated from the mean time of finished runs of the same script."""
        known = [seconds for script in self.took.values() for seconds in script]
        if not known:
            return "?"

        def cost(command: Command) -> float:
            seconds = self.took.get(command.words[0]) or known
            return sum(seconds) / len(seconds)

        now = time.monotonic()
        ahead = sum(map(cost, self.todo))
        ahead += sum(max(0, cost(run.command) - (now - run.since)) for run in self.running)
        return clock(ahead / max(1, min(self.jobs, len(self.todo) + len(self.running))))

    def progress(self) -> str:
        states = list(self.results.values())
        elsewhere = sum(command.name in self.not_before for command in self.todo)
        line = f"{states.count('done')} of {len(self.commands)} done, {len(self.running)} running"
        if "failed" in states:
            line += f", {states.count('failed')} failed"
        if elsewhere:
            line += f", {elsewhere} run by somebody else"
        return f"{line}; {clock(time.monotonic() - self.began)}, about {self.left()} left"

    def start_some(self) -> None:
        pending = {command.name for command in self.todo}
        pending |= {run.command.name for run in self.running}
        for command in list(self.todo):
            if len(self.running) == self.jobs or self.stopping:
                return
            too_early = self.not_before.get(command.name, 0) > time.monotonic()
            if too_early or command.after in pending:
                continue
            try:
                self.start(command)
            except UserError as error:
                self.trouble = str(error)

    def start(self, command: Command) -> None:
        lock = self.state.lock(command)
        if lock is None:  # another runner has it, or its own runner was killed and it goes on
            self.not_before[command.name] = time.monotonic() + AGAIN
            return
        if self.state.is_done(command):  # another runner has finished it in the meantime
            lock.close()
            self.results[command.name] = "done"
        else:
            slot = min(set(range(self.jobs)) - {run.slot for run in self.running})
            self.running.append(begin(command, self.state, slot, self.jobs, lock))
        self.todo.remove(command)
        self.not_before.pop(command.name, None)

    def collect(self) -> None:
        """Record the runs that have ended."""
        for run in [run for run in self.running if run.process.poll() is not None]:
            self.running.remove(run)
            try:
                how = end(run, self.state, self.stopping)
            except UserError as error:
                how, self.trouble = "stopped", str(error)
            self.ended(run, how)

    def ended(self, run: Running, how: How) -> None:
        name, seconds = run.command.name, time.monotonic() - run.since
        self.killed[name] += how == "killed"
        if how == "busy":
            self.todo.append(run.command)
            self.not_before[name] = time.monotonic() + AGAIN
        elif how == "killed" and self.killed[name] < TRIES:
            self.todo.append(run.command)
        elif how != "stopped":
            self.results[name] = "done" if how == "done" else "failed"
            self.took[run.command.words[0]].append(seconds)
        if how == "failed" and shutil.disk_usage(self.state.out).free < 2**16:
            self.trouble = f"the disk of {self.state.out} is full"
            self.trouble += "; make room and give the same command again"
        say(f"{name}: {how} after {clock(seconds)}; {self.progress()}")

    def pass_signals_on(self) -> None:
        """The first two signals ask the runs to save; after the third, nothing waits for them."""
        while self.passed_on < len(self.signals) or (self.trouble and not self.passed_on):
            self.passed_on += 1
            say(f"waiting for {len(self.running)} runs to save; once more stops them at once")
            for run in self.running:
                with contextlib.suppress(ProcessLookupError):
                    number = signal.SIGTERM if self.passed_on < 3 else signal.SIGKILL
                    os.killpg(run.process.pid, number)

    def summary(self) -> int:
        """Prints how everything ended. Returns 0, 1, or 128 + the number of a signal."""
        failed = [name for name, how in self.results.items() if how == "failed"]
        done, left = len(self.results) - len(failed), len(self.commands) - len(self.results)
        say(f"{done} done, {len(failed)} failed, {left} left to do")
        for log in map(self.state.log, failed):
            last = log.read_text(errors="replace").splitlines()[-8:]
            print(f"\n{log}:", *last, sep="\n  ", file=sys.stderr)
        if self.trouble:
            raise UserError(self.trouble)
        if self.signals:
            print("stopped; the same command goes on from here", file=sys.stderr)
            return 128 + self.signals[0]
        return 1 if failed else 0


def run_here(commands: list[Command], state: State, jobs: int) -> int:
    """All commands, `jobs` at a time. Returns 0, 1, or 128 + the number of a signal."""
    pool, shown = Pool(commands, state, jobs), 0.0
    for number in STOP:
        ignored = signal.getsignal(number) == signal.SIG_IGN
        if number != signal.SIGHUP or not ignored:  # nohup ignores it on purpose
            signal.signal(number, lambda number, frame: pool.signals.append(number))
    pool.look_up()
    found = f"{len(commands)} commands, {len(pool.results)} of them done"
    print(f"{found}; {jobs} at a time", file=sys.stderr)
    while pool.running or (pool.todo and not pool.stopping):
        pool.start_some()
        pool.collect()
        pool.pass_signals_on()
        if sys.stderr.isatty() and time.monotonic() > shown + 1:
            shown = time.monotonic()
            print(f"\r\033[K{pool.progress()}", end="", file=sys.stderr, flush=True)
        time.sleep(POLL)
    return pool.summary()
