"""The dynamics-shift benchmark: environments, datasets, scores and run records.

The algorithms are in the scripts; what several of them share is here too.
"""

# The order matters: with --help nothing slow is loaded, and MuJoCo cannot be loaded without stdout
# and stderr, which `errors` supplies.
from dynashift import quick_help, errors  # noqa: F401, I001

# isort: split
from dynashift.envs import make, make_batch

__all__ = ["make", "make_batch"]
