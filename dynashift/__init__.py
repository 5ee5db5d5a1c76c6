"""The dynamics-shift benchmark: environments, datasets, scores and run records. No algorithm lives here."""

from dynashift import errors  # noqa: F401  first: without stdout and stderr, MuJoCo cannot be loaded

# isort: split
from dynashift.envs import make, make_batch

__all__ = ["make", "make_batch"]
