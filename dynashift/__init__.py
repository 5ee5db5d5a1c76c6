"""The dynamics-shift benchmark: environments, datasets, scores and run records. No algorithm lives here."""

from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
from dynashift.envs import make, make_batch

__all__ = ["make", "make_batch"]
