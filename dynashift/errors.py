"""Errors that a user can cause end in one line that names the cause and the remedy."""

import os
import sys
from contextlib import contextmanager


class UserError(Exception):
    """Something the user can mend; the message says what and how."""


class InUse(UserError):
    """Another process has this folder. The status tells a runner that trying again later helps."""

    status = 75  # EX_TEMPFAIL of sysexits.h


@contextmanager
def one_line_errors():
    """Around a script's main: a UserError becomes one line on stderr and exit status 1, Ctrl-C status 130.

    A reader that closes its pipe early, such as `head`, ends the script quietly.
    """
    try:
        yield
    except InUse as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(InUse.status)
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)  # as a shell reports a program that SIGPIPE ended
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream.flush()
            except BrokenPipeError:  # the interpreter flushes once more when it ends, and would complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
