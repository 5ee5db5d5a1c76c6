"""The dynamics-shift benchmark: environments, datasets, scores and run records. No algorithm lives here."""

from dynashift.envs import make, make_batch

__all__ = ["make", "make_batch"]
