"""One writer, one reader for each kind of file, names as paths, locks, and progress bars.

Every file that a script leaves behind is written by `atomic`: it is there whole or not at all. What is read back is
checked first: JSON records hold a hash of their content, .npz files and checkpoints are zips with checksums.
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
except (
    ImportError
):  # not on Windows: two processes may then do the same work twice, and both rename a whole file
    fcntl = None


class CannotWrite(UserError, OSError):
    """An OSError that says which file it is about, and what to do."""

    def __str__(self) -> str:
        full = self.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room and give the same command again" if full else "choose another folder"
        return f"cannot write {self.filename}: {self.strerror}; {remedy}"


def check_folder(folder: str | Path, flag: str = "--out", filled: str | None = None) -> None:
    """Refuse a folder in which nothing can be written, before anything is computed for it. Nothing is created.

    filled: a pattern. Where a file fits it, the folder may be read-only: perhaps nothing needs to be written.
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
    """Yields a temporary path in the same folder; what was written there gets its name when the block ends well.

    A kill or a power failure at any moment leaves the old file or the new one, never a mixture.
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
    """The rename is on the disk, too, and not only the file's content."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def write_bytes(path: str | Path, data: bytes) -> None:
    """What every writer ends in. Libraries write to memory first: on a full disk they raise whatever they like."""
    with atomic(path) as temporary:
        temporary.write_bytes(data)


def write_npz(path: str | Path, **arrays) -> None:
    np.savez(buffer := io.BytesIO(), **arrays)
    write_bytes(path, buffer.getvalue())


def write_json(path: str | Path, record: dict) -> None:
    """A dict of JSON's types, and under "sha256" the hash of all the rest."""
    record = json.loads(json.dumps(record, allow_nan=False))
    sealed = record | {"sha256": _hash_of(record)}
    write_bytes(path, (json.dumps(sealed, indent=1) + "\n").encode())


def read_json(path: str | Path) -> dict:
    """What `write_json` wrote, without its hash. A record whose content has another hash is refused."""
    try:
        record = json.loads(Path(path).read_bytes())
        if not isinstance(record, dict) or "sha256" not in record:
            raise ValueError("it has no sha256 of its content")
        if record.pop("sha256") != _hash_of(record):
            raise ValueError(
                "its content was changed or damaged: it does not have the sha256 that it names"
            )
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"cannot read {path} ({error}); delete it, or start again with --no-resume"
        ) from error
    return record


def _hash_of(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_zip(path: str | Path) -> io.BytesIO:
    """The bytes of a zip (an .npz, a checkpoint) after all its checksums were compared: neither NumPy nor torch do."""
    buffer = io.BytesIO(Path(path).read_bytes())
    with zipfile.ZipFile(buffer) as file:
        if broken := file.testzip():
            raise ValueError(f"{broken} is damaged")
    buffer.seek(0)
    return buffer


def read_npz(path: str | Path, *names: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, those of these names among them. ValueError says why it cannot be read."""
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
    """A name as one part of a path: letters, digits and . _ + - only, neither hidden nor longer than 100 characters.

    Every name that a user or a file can choose goes through here before it becomes part of a path.
    """
    plain = re.sub("[^A-Za-z0-9._+-]", "_", str(name)).lstrip(".") or "_"
    if len(plain) <= 100:
        return plain
    return (
        plain[:91]
        + "-"
        + hashlib.sha256(str(name).encode(errors="surrogateescape")).hexdigest()[:8]
    )


def at_home(path: str | Path) -> Path:
    """A path whose ~ is the home folder. Where there is none, a container's user without an entry, that is an error."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: there is no home folder; set HOME, or name another folder"
        ) from None


def open_lock(path: Path):
    """A lock file, open for reading and writing. A symbolic link is refused: its target is not ours to change."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    return open(handle, "r+", errors="replace")


@contextmanager
def only_one(path: Path):
    """Processes that want to make the same file do so one after the other. The lock vanishes with its process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        if not path.exists():
            raise UserError(
                f"{path.parent}: cannot be written to ({error.strerror}); choose another folder"
            ) from None
        lock = (
            nullcontext()
        )  # a folder that was filled and then made read-only: nothing needs to be written
    with lock as opened:
        try:
            if fcntl is not None and opened is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for leftover in path.parent.glob(
                    f".{glob.escape(path.name)}.*.tmp"
                ):  # of a killed process
                    leftover.unlink(missing_ok=True)
        except OSError as error:  # some network file systems
            print(
                f"note: {path.parent} has no locks ({error.strerror}); start one process at a time",
                file=sys.stderr,
            )
        yield


def progress_bar(*args, seconds: float = 30, **options) -> tqdm:
    """tqdm on stderr, at most 80 columns wide; where stderr is a log file, a line every so many seconds."""
    if sys.stderr.isatty():
        return tqdm(
            *args, file=sys.stderr, ncols=min(80, shutil.get_terminal_size().columns), **options
        )
    lines = SimpleNamespace(
        write=lambda text: text.strip() and print(text.strip(), file=sys.stderr)
    )
    lines.flush = sys.stderr.flush
    layout = (
        "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
    )
    return tqdm(
        *args, file=lines, bar_format=layout, mininterval=seconds, maxinterval=seconds, **options
    )


def say(line: str) -> None:
    """Print a line at once, above any bar that is open."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
