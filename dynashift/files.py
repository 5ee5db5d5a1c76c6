"""One writer and one reader for each kind of file, paths made from names, locks, progress bars.

Every file that a script leaves behind is written by `atomic`, so it is complete or does not exist.
Files are checked when they are read back: JSON records hold a hash of their content, and .npz files
and checkpoints are zips with checksums.
"""

import errno
import glob
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

from dynashift.errors import UserError

try:
    import fcntl
except ImportError:
    # Windows has no such locks. There two processes may do the same work twice, which is harmless
    # because each renames a complete file.
    fcntl = None


class CannotWrite(UserError, OSError):
    """An OSError that says which file it is about, and what to do."""

    def __str__(self) -> str:
        full = self.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room and give the same command again" if full else "choose another folder"
        return f"cannot write {self.filename}: {self.strerror}; {remedy}"


def check_folder(folder: str | Path, flag: str = "--out", filled: str | None = None) -> None:
    """Refuse a folder that cannot be written to, before anything is computed. Creates nothing.

    filled: a pattern. A folder with a file that matches it may be read-only, because perhaps
    nothing needs to be written.
    """
    folder = at_home(folder)
    if filled and any(folder.glob(filled)):
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; choose another {flag}"
        ) from None


@contextmanager
def atomic(path: str | Path):
    """Yields a temporary path in the same folder, which is renamed to `path` if the block succeeds.

    A kill or a power failure at any moment leaves either the old file or the new one, complete.
    """
    path = Path(path)
    temporary = None
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
        _sync_folder(path.parent)
    except OSError as error:
        raise CannotWrite(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        if temporary:
            with suppress(OSError):  # the disk may have become read-only
                temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Force a rename to the disk; fsync of the file covers its content only."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_bytes(path: str | Path, data: bytes) -> None:
    """The last step of every writer.

    Libraries write to memory first, because on a full disk they raise all kinds of exceptions.
    """
    with atomic(path) as temporary:
        temporary.write_bytes(data)


def write_npz(path: str | Path, **arrays) -> None:
    np.savez(buffer := io.BytesIO(), **arrays)
    write_bytes(path, buffer.getvalue())


def write_json(path: str | Path, record: dict) -> None:
    """Write a dict of JSON's types, with the hash of its content under "sha256"."""
    record = json.loads(json.dumps(record, allow_nan=False))
    sealed = record | {"sha256": _hash_of(record)}
    write_bytes(path, (json.dumps(sealed, indent=1) + "\n").encode())


def read_json(path: str | Path) -> dict:
    """Read what `write_json` wrote. A record whose content does not match its hash is refused."""
    try:
        record = json.loads(Path(path).read_bytes())
        if not isinstance(record, dict) or "sha256" not in record:
            raise ValueError("it has no sha256 of its content")
        if record.pop("sha256") != _hash_of(record):
            reason = "its content was changed or damaged: it does not have the sha256 that it names"
            raise ValueError(reason)
    except (OSError, ValueError, RecursionError) as error:
        remedy = "delete it, or start again with --no-resume"
        raise UserError(f"cannot read {path} ({error}); {remedy}") from error
    return record


def _hash_of(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_zip(path: str | Path) -> io.BytesIO:
    """The bytes of a zip (an .npz or a checkpoint), with all checksums verified.

    Neither NumPy nor torch verifies them.
    """
    buffer = io.BytesIO(Path(path).read_bytes())
    with zipfile.ZipFile(buffer) as file:
        if broken := file.testzip():
            raise ValueError(f"{broken} is damaged")
    buffer.seek(0)
    return buffer


def read_npz(path: str | Path, *names: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, which must include these names.

    A ValueError says why a file cannot be read.
    """
    try:
        with np.load(read_zip(path), allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile and NumPy have many for a damaged file
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return arrays


def slug(name: str) -> str:
    """A name as one part of a path: only letters, digits and . _ + -, not hidden, at most 100 long.

    Every name that a user or a file can choose goes through here before it becomes part of a path.
    """
    plain = re.sub("[^A-Za-z0-9._+-]", "_", str(name)).lstrip(".") or "_"
    if len(plain) <= 100:
        return plain
    digest = hashlib.sha256(str(name).encode(errors="surrogateescape")).hexdigest()
    return f"{plain[:91]}-{digest[:8]}"


def at_home(path: str | Path) -> Path:
    """A path with ~ replaced by the home folder.

    It is an error if there is none, as for a user without an entry in a container.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        reason = "there is no home folder; set HOME, or name another folder"
        raise UserError(f"{path}: {reason}") from None


def open_lock(path: Path):
    """A lock file, open for reading and writing. A symbolic link is refused and its target kept."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    return open(handle, "r+", errors="replace")


@contextmanager
def only_one(path: Path):
    """Processes that make the same file take turns. The system drops the lock with its process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        if not path.exists():
            reason = f"cannot be written to ({error.strerror}); choose another folder"
            raise UserError(f"{path.parent}: {reason}") from None
        # The folder was filled and then made read-only, so nothing needs to be written.
        lock = nullcontext()
    with lock as opened:
        try:
            if fcntl is not None and opened is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # A killed process may have left temporary files.
                for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
                    leftover.unlink(missing_ok=True)
        except OSError as error:  # some network file systems
            note = f"has no locks ({error.strerror}); start one process at a time"
            print(f"note: {path.parent} {note}", file=sys.stderr)
        yield


def progress_bar(*args, seconds: float = 30, **options) -> tqdm:
    """tqdm on stderr, at most 80 columns wide; in a log file, one line every `seconds`."""
    if sys.stderr.isatty():
        columns = min(80, shutil.get_terminal_size().columns)
        return tqdm(*args, file=sys.stderr, ncols=columns, **options)

    def write(text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr)

    lines = SimpleNamespace(write=write, flush=sys.stderr.flush)
    progress = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt}"
    options["bar_format"] = progress + " [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    return tqdm(*args, file=lines, mininterval=seconds, maxinterval=seconds, **options)


def say(line: str) -> None:
    """Print a line immediately, above any open bar."""
    if sys.stdout.isatty():
        # A signal may have come before tqdm knew the bar that it had drawn.
        line = f"\033[2K\r{line}"
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
