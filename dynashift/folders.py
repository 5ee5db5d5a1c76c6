"""The folder of a run: its name, which follows from the arguments, its lock, and signals."""

import contextlib
import gc
import hashlib
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import numpy as np

from dynashift import files
from dynashift.checkpoints import to_json, write_json
from dynashift.errors import InUse, UserError
from dynashift.files import open_lock, read_json, say

try:
    import fcntl
except ImportError:  # Windows: runs are not locked
    fcntl = None

# --------------------------------------------------------------------------------------------- name

LONGEST = 60  # characters of a run folder's name


def run_dir(root, exp: str, task: str, seed: int, args, defaults, ignore=()) -> Path:
    """root/exp/task/seed3, plus the arguments that differ from the defaults.

    An example is seed3-quick-filter_none-no_ot_reward-updates2000. Different arguments always get
    different names: where a name would be too long or ambiguous, 8 hex digits of a hash are added.
    ignore: arguments that are already part of the path or do not change the result (device, ...).
    """
    args = to_json(args)
    defaults = to_json(defaults)
    changed = {k: v for k, v in args.items() if k not in ignore and v != defaults[k]}
    order = sorted(changed, key=lambda name: (name != "quick", name))
    words = [f"seed{seed}", *(_word(name, changed[name], defaults[name]) for name in order)]
    known = {name: default for name, default in defaults.items() if name not in ignore}
    unclear = any(sum(_may_be_of(*item, word) for item in known.items()) != 1 for word in words[1:])
    if unclear or len("-".join(words)) > LONGEST:
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]
        words = [word for word in words if "?" not in word]
        while len("-".join([*words, digest])) > LONGEST:
            words.pop()
        words.append(digest)
    return Path(root, exp, task, "-".join(words))


def _word(name: str, value, default) -> str:
    """An argument and its value in one word without a hyphen; "?" if that is impossible."""
    if isinstance(default, bool):
        return {True: name, False: f"no_{name}"}[value] if isinstance(value, bool) else "?"
    if value is None:
        return f"no_{name}"
    text = isinstance(value, str) and re.fullmatch("[A-Za-z0-9.-]+", value)
    if text and isinstance(default, str | None):
        return f"{name}_{value.replace('-', '+')}"
    number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if number and isinstance(default, int | float | None):
        if isinstance(value, int):
            return f"{name}{value}"
        return name + np.format_float_positional(value, trim="-")
    return "?"


def _may_be_of(name: str, default, word: str) -> bool:
    """Whether `_word` could return this word for an argument with that name and default."""
    if word in (name, f"no_{name}"):
        return True
    text, number = "_[A-Za-z0-9.+]+", "[0-9.]+"
    if isinstance(default, bool):
        return False
    if isinstance(default, int | float):
        values = number
    else:
        values = f"{text}|{number}" if default is None else text
    return re.fullmatch(f"{re.escape(name)}({values})", word) is not None


# ------------------------------------------------------------------------------------------ signals

# Ctrl-C, a request to end, a closed terminal or connection, and a cluster's warning that the time
# is nearly up.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class Stop:
    """A request to end by one of SIGNALS.

    status: the exit status to end with, or 0 without a request. now: nothing would be lost, so a
    signal exits at once; otherwise the loop saves first.
    """

    status = 0
    now = True


@contextlib.contextmanager
def signals(folder: Path | None = None, again: str = "the same command"):
    """Yields a Stop, and treats SIGNALS as requests during the block. A second signal acts at once.

    folder: where the checkpoint is, if there is one; again: the command that continues from it.
    """
    stop = Stop()
    old = {n: signal.getsignal(n) for n in SIGNALS}
    # Leave alone signals that are ignored, as SIGINT is in background jobs and SIGHUP under nohup,
    # or that Python does not handle (None).
    old = {n: handler for n, handler in old.items() if handler not in (signal.SIG_IGN, None)}

    def request(number, frame):
        stop.status = 128 + number
        signal.signal(number, old[number])
        if stop.now:
            sys.exit(stop.status)

    try:
        for number in old:
            signal.signal(number, request)
        yield stop
    except SystemExit:
        if stop.status:
            saved = folder is not None and (folder / "ckpt.pt").exists()
            say(f"saved; {again} continues" if saved else "stopped; the same command starts again")
            gc.freeze()  # saves the interpreter a search through torch's objects when it ends
        raise
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------ session


def is_done(folder: Path) -> bool:
    return (folder / "result.json").exists()


@contextlib.contextmanager
def session(folder: Path, args, ignore=(), resume: bool = True):
    """Own a run folder: lock it, remove leftovers, write args.json, and treat SIGNALS as requests.

    Yields a Stop. With resume=False the result, checkpoints and logs of an earlier run are deleted.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_file = open_lock(folder / ".lock")
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; choose another folder for the runs"
        ) from error
    again = "the same command" if resume else "the same command without --no-resume"
    with lock_file, signals(folder, again) as stop:
        _lock(lock_file, folder)
        # Temporary files are from a process that was killed, because no other one has the folder.
        leftovers = [".*.tmp"]
        if not resume:
            leftovers += ["result.json", "*.pt", "**/events.out.tfevents.*"]
        with writing(folder):
            for pattern in leftovers:
                for file in folder.glob(pattern):
                    file.unlink()
        now = to_json(args)
        if is_done(folder) or any(folder.glob("*.pt")):
            _check_same(folder, now, ignore)
        if not is_done(folder):  # a finished record is left as it is
            write_json(folder / "args.json", now)
        yield stop


def _check_same(folder: Path, now: dict, ignore) -> None:
    """Refuse other values in the same folder, which mean that a default in the code has changed."""
    then = read_json(folder / "args.json")
    common = sorted((now.keys() & then.keys()) - set(ignore))
    if changed := [f"{k}={then[k]} (now {now[k]})" for k in common if then[k] != now[k]]:
        raise UserError(
            f"{folder} was run with {', '.join(changed)}; start it again with --no-resume"
        )


@contextlib.contextmanager
def reading(folder: Path, args, ignore=()):
    """A session for --eval-only, which writes nothing. Yields a Stop.

    The folder may be read-only or in use.
    """
    with signals(folder) as stop:
        if (folder / "ckpt.pt").exists():
            _check_same(folder, to_json(args), ignore)
        yield stop


def _lock(file, folder: Path) -> None:
    """Lock the folder until the process ends, however it does."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise InUse(
            f"{folder} is in use by process {file.read() or '?'}; wait for it or end it"
        ) from None
    except OSError as error:  # some network file systems
        note = f"note: {folder} cannot be locked ({error.strerror}); do not start a run twice"
        print(note, file=sys.stderr)
    with writing(folder / ".lock"):
        os.ftruncate(file.fileno(), 0)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        os.write(file.fileno(), f"{os.getpid()} on {socket.gethostname()}".encode())


@contextlib.contextmanager
def writing(path: Path):
    """Turn an OSError in this block into a one-line error about this path."""
    try:
        yield
    except OSError as error:
        raise files.CannotWrite(error.errno, error.strerror, str(path)) from None
