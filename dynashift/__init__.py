"""The dynamics-shift benchmark: environments, datasets, scores and run records. No algorithm lives here."""

__all__ = ["make", "make_batch"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dynashift import envs  # when it is needed: MuJoCo takes a while to load

    return getattr(envs, name)
