"""Errors that a user can cause end in one line that names the cause and the remedy."""

import errno
import os
import re
import sys
from contextlib import contextmanager, suppress

from dynashift import quick_help

# A standard stream may have been closed before the start. Then the next file that is opened would
# get its number, and with it what is printed to the stream.
for _name in ("stdin", "stdout", "stderr"):
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, "r" if _name == "stdin" else "w"))  # noqa: SIM115
        # MuJoCo starts a process when it is loaded, which needs the streams too.
        os.set_inheritable(getattr(sys, _name).fileno(), True)


class UserError(Exception):
    """Something the user can correct; the message says what and how."""


class NotFinite(UserError, ValueError):
    """An action that is NaN or infinite: the policy's in a script, the caller's elsewhere."""


class Patient:
    """stderr for notes and progress bars. If its reader goes away, training continues."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name):
        return getattr(self.stream, name)


FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk, or of a user's share of it


class InUse(UserError):
    """Another process uses this folder. The exit status tells a runner to try again later."""

    status = 75  # EX_TEMPFAIL of sysexits.h


def is_out_of_memory(error: BaseException) -> bool:
    """NumPy, torch, MuJoCo, the system and its loader of libraries each have their own error."""
    words = "allocate memory|(not enough|out of) memory|failed to map segment"
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def out_of_memory(error: BaseException) -> str:
    reason = (str(error) or "MemoryError").splitlines()[0]
    remedy = "use a smaller --source-size, batch or network, or a larger machine"
    return f"error: out of memory ({reason}); {remedy}"


def report_uncaught(kind, error, trace) -> None:
    """What ends a script while its modules are imported, before `one_line_errors` is entered."""
    if is_out_of_memory(error):
        print(out_of_memory(error), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def check_address_space() -> None:
    """Refuse too little memory: torch and MuJoCo abort while they load, without an exception."""
    with suppress(ImportError):  # Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if 0 <= limit < 10**9:  # below 0: no limit
            found = f"out of memory (limited to {limit / 1e9:.1f} GB)"
            sys.exit(f"error: {found}; allow at least 1 GB (ulimit -v)")


if quick_help.is_ours():
    sys.excepthook = report_uncaught
    if not quick_help.WANTED:
        check_address_space()


@contextmanager
def one_line_errors():
    """Wraps a script's main: a UserError becomes one line on stderr and exit status 1, Ctrl-C 130.

    If a reader such as `head` closes stdout early, the script ends quietly. If stderr is closed,
    the script continues.
    """
    sys.stderr = Patient(sys.stderr)
    with suppress(AttributeError):  # stdout may have been replaced, by a notebook for example
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: a path may hold any bytes
    try:
        yield
        with suppress(BrokenPipeError):  # all has been done; nobody wants to read it
            sys.stdout.flush()
    except InUse as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(InUse.status)
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("stopped; the same command starts again", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)  # as a shell reports a program that SIGPIPE ended
    except Exception as error:
        if is_out_of_memory(error):
            sys.exit(out_of_memory(error))
        if not isinstance(error, OSError) or error.errno not in FULL or error.filename:
            raise
        # Our files have names, and errors of their own; what has none is a stream.
        sys.exit(f"error: the output cannot be written ({error.strerror}); free some space there")
    finally:
        sys.stderr = sys.stderr.stream
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                # The interpreter flushes once more when it ends, and would report an error.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
