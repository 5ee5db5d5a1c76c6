"""Files that are there whole or not at all, locks, and progress bars."""

import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from dynashift.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows: two processes may then do the same work twice, and both rename a whole file
    fcntl = None


class CannotWrite(UserError, OSError):
    """An OSError that says which file it is about."""

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}"


def check_folder(folder: str | Path, flag: str = "--out") -> None:
    """Refuse a folder in which nothing can be written, before anything is computed for it. Nothing is created."""
    folder = Path(folder).expanduser()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another {flag}") from None


@contextmanager
def atomic(path: str | Path):
    """Yields a temporary path in the same folder; what was written there gets its name when the block ends well.

    A kill at any moment leaves the old file or the new one, never a mixture.
    """
    path, temporary = Path(path), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise CannotWrite(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)


@contextmanager
def only_one(path: Path):
    """Processes that want to make the same file do so one after the other. The lock vanishes with its process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(f".{path.name}.lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be written to ({error.strerror}); choose another folder") from None
    with lock:
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems
            print(f"note: {path.parent} has no locks ({error.strerror}); start one process at a time", file=sys.stderr)
        yield


def progress_bar(*args, seconds: float = 30, **options) -> tqdm:
    """tqdm on stderr, at most 80 columns wide; where stderr is a log file, a line every so many seconds."""
    if sys.stderr.isatty():
        return tqdm(*args, file=sys.stderr, ncols=min(80, shutil.get_terminal_size().columns), **options)
    lines = SimpleNamespace(write=lambda text: text.strip() and print(text.strip(), file=sys.stderr))
    lines.flush = sys.stderr.flush
    layout = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    return tqdm(*args, file=lines, bar_format=layout, mininterval=seconds, maxinterval=seconds, **options)


def say(line: str) -> None:
    """Print a line at once, above any bar that is open."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
