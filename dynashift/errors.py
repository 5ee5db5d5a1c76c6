"""Errors that a user can cause end in one line that names the cause and the remedy."""

import sys
from contextlib import contextmanager


class UserError(Exception):
    """Something the user can mend; the message says what and how."""


@contextmanager
def one_line_errors():
    """Around a script's main: a UserError becomes one line on stderr and exit status 1, Ctrl-C status 130."""
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
