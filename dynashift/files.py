"""Files that are there whole or not at all, locks, and progress bars."""

import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from dynashift.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows: two processes may then do the same work twice, and both rename a whole file
    fcntl = None


@contextmanager
def atomic(path: str | Path):
    """Yields a temporary path in the same folder; what was written there gets its name when the block ends well.

    A kill at any moment leaves the old file or the new one, never a mixture.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
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


def progress_bar(*args, **options) -> tqdm:
    """tqdm on stderr; where that is a log file, a line now and then."""
    return tqdm(*args, file=sys.stderr, mininterval=0.1 if sys.stderr.isatty() else 30, **options)
