"""What is known about a command. OUT/.run_all/NAME.json says how it ended, NAME.lock is locked
while it runs, and OUT/logs/NAME.log has its output."""

import contextlib
import errno
import fcntl
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Literal

from dynashift import files
from dynashift.errors import UserError
from dynashift.files import write_json
from experiments.commands import Command

# flock on file systems that have no locks, as some network file systems do
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: Literal["done", "failed"]
    command: str
    seconds: float
    exit: int
    result: str | None  # the path of its result.json; preprocessing has none


def read_json(path: Path) -> dict:
    """What `dynashift.files.write_json` wrote; an empty dict if that is missing or damaged."""
    with contextlib.suppress(UserError):
        return files.read_json(path)
    return {}


@dataclass
class State:
    out: Path  # the folder of the runs
    without_locks: list[str] = field(default_factory=list)  # the reason, once it has been printed

    @property
    def folder(self) -> Path:
        return self.out / ".run_all"

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def outcome(self, name: str | None) -> Outcome | None:
        """None if the command has not ended yet, or if its file is damaged or lacks a key: then the
        command is given once more, and a run that is done says so at once."""
        found = read_json(self.folder / f"{name}.json")
        if not {f.name for f in fields(Outcome)} <= found.keys():
            return None
        outcome = Outcome(**{f.name: found[f.name] for f in fields(Outcome)})
        is_number = isinstance(outcome.seconds, int | float)
        return outcome if is_number and isinstance(outcome.result, str | None) else None

    def record(self, command: Command, outcome: Outcome) -> None:
        write_json(self.folder / f"{command.name}.json", asdict(outcome))

    def is_done(self, command: Command) -> bool:
        """Whether it succeeded and its result still exists; a deleted result is made again."""
        outcome = self.outcome(command.name)
        if outcome is None or outcome.status != "done":
            return False
        return outcome.result is None or Path(outcome.result).exists()

    def is_locked(self, command: Command) -> bool:
        if not (self.folder / f"{command.name}.lock").exists():
            return False
        lock = self.lock(command, fcntl.LOCK_SH)
        if lock is not None:
            lock.close()
        return lock is None

    def lock(self, command: Command, kind: int = fcntl.LOCK_EX) -> IO | None:
        """The command's lock file, locked; None if another process holds it. The system frees the
        lock when all its holders have ended."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / f"{command.name}.lock", "a")  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"cannot write to {self.folder}: {error.strerror}; choose another folder with --out"
            ) from None
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            if not self.without_locks:
                self.without_locks.append(error.strerror)
                print(
                    f"note: {self.folder} has no locks ({error.strerror}); start one runner only",
                    file=sys.stderr,
                )
        return lock
