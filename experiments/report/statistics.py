"""rliable's definitions (Agarwal et al., NeurIPS 2021), on scores in one array per task with one
number per run."""

import numpy as np


def iqm(x: np.ndarray):
    """Interquartile mean over the last axis: without the lowest and the highest quarter."""
    cut = int(0.25 * x.shape[-1])
    return np.sort(x, -1)[..., cut : x.shape[-1] - cut].mean(-1)


def resample(groups: list, reps: int = 2000, seed: int = 0) -> list:
    """Stratified bootstrap: draws runs with replacement within every task, [reps, runs] for
    each."""
    rng = np.random.default_rng(seed)
    return [g[rng.integers(len(g), size=(reps, len(g)))] for g in groups]


def interval(draws: np.ndarray, groups: list) -> tuple[float | None, float | None]:
    """95 % percentile interval; none if every task has a single run, because then nothing
    varies."""
    if all(len(g) < 2 for g in groups):
        return None, None
    low, high = np.percentile(draws, [2.5, 97.5]).tolist()
    return low, high


def beats(x: np.ndarray, y: np.ndarray):
    """P(X > Y) + P(X = Y) / 2 over all pairs of runs of one task (last axes)."""
    x, y = x[..., :, None], y[..., None, :]
    return ((x > y) + 0.5 * (x == y)).mean((-2, -1))


def profile(groups: list, taus: np.ndarray) -> np.ndarray:
    """Share of runs above tau, averaged over tasks, [..., taus]."""
    return np.mean([(g[..., None] > taus).mean(-2) for g in groups], 0)


def smooth(x, width: int = 5) -> np.ndarray:
    """Moving mean over the last `width` values, over fewer at the beginning."""
    return np.array([np.mean(x[max(0, i + 1 - width) : i + 1]) for i in range(len(x))])
