"""What the gate's score and the OT weights measure, on twelve pairs of datasets:

    python -m studies.gate --sources data --targets data/target

Sources are SOURCES/ROBOT/medium.hdf5, of which the first transitions are taken; targets are the
published medium files.

The first table is about the kernel. For each rule of --mmd-gamma it has the correlation of the
score d_m with the fragment's own self term k(S, S), which is 1 where the kernel has saturated, and
the rank correlation of d_m with two distances, both averaged over the fragment: that from its
states to their nearest target states, and that to the average target state. The last two rules are
the default with the minimum instead of the mean in Eq. (16), and with --encoder whitened; there
the distances too are those of whitened states. Two more numbers of that rule are in brackets: the
rank correlations with the distances of normalised states.

The second table is about what is retained: the share of the source transitions; the share of those
in which the robot fails, with one threshold for all fragments, and with failures ranked apart; the
effective share of the weights at eta_w = 1; eta_w for an effective share of a half; and the rank
correlation of the OT costs of raw and of normalised features.
"""

import sys
from pathlib import Path

import numpy as np
import tyro
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr

import taf_preprocess as taf
from dynashift import fast_mmd, fast_ot, gate_report
from dynashift.datasets import Dataset, load_pair
from dynashift.errors import one_line_errors
from dynashift.tasks import ROBOTS, find_task

SHIFTS = ("gravity", "kinematic", "morph")
RULES = {  # of the kernel, by the encoder
    "normalised": ("median", "pooled", "wide", "invdim", "wide, minimum"),
    "whitened": ("wide, whitened",),
}


def normalised(source: Dataset, target: Dataset) -> tuple:
    """Mean and spread of the target's states, and both domains' states normalised with them."""
    mu, sd = (
        target.observations.mean(0, dtype=np.float64),
        target.observations.std(0, dtype=np.float64),
    )
    return (mu, sd), *(taf.normalise(data.observations, mu, sd) for data in (source, target))


def scores(z_s, z_t, source: Dataset, target: Dataset, K: int, g: float, reduce: str = "mean"):
    """Scores d_m and self terms of all source fragments."""
    pairs = ((z_s, source), (z_t, target))
    domains = [(z, data.lengths, taf.fragment_lengths(data.lengths, K)) for z, data in pairs]
    return fast_mmd.fragment_scores(*domains, K, g, reduce)


def over_fragments(x: np.ndarray, begin: np.ndarray, K: int) -> np.ndarray:
    """Mean of x [N] over the K steps from each of `begin`."""
    return x[begin[:, None] + np.arange(K)].mean(1)


def distances(z_s, z_t, begin: np.ndarray, K: int) -> list[np.ndarray]:
    """From the fragments' states to their nearest target states, and to all of them on average."""
    rows = np.unique(begin[:, None] + np.arange(K))
    nearest, mean = np.full(len(z_s), np.nan), np.full(len(z_s), np.nan)
    for some in np.array_split(rows, 20):
        distance = cdist(z_s[some], z_t)  # [n, N_t]
        nearest[some], mean[some] = distance.min(1), distance.mean(1)
    return [over_fragments(x, begin, K) for x in (nearest, mean)]


def kernels(source: Dataset, target: Dataset, K: int) -> dict[str, list[float]]:
    """For each rule: correlation of d_m with the self term, rank correlations with the nearest and
    with the mean distance."""
    l_i = taf.fragment_lengths(source.lengths, K)
    begin = np.random.default_rng(0).permutation(np.flatnonzero(l_i == K))[:2000]
    states = source.observations, target.observations
    found, yardsticks = {}, []
    for encoder, rules in RULES.items():
        z_s, z_t = taf.encode(*states, (normalised(source, target)[0],) * 2, encoder)
        yardsticks = distances(z_s, z_t, begin, K) + yardsticks
        for name in rules:
            rule, _, form = name.partition(", ")
            reduce = "min" if form == "minimum" else "mean"
            g = taf.bandwidth(z_s, z_t, rule)
            d, own = scores(z_s, z_t, source, target, K, g, reduce)
            ranks = [float(spearmanr(d[begin], x)[0]) for x in yardsticks]
            found[name] = [float(np.corrcoef(d[begin], own[begin])[0, 1]), *ranks]
    return found


def cell(own: float, near: float, mean: float, *others: float) -> str:
    text = f"{own:.2f} / {near:.2f} / {mean:.2f}"
    return f"{text} ({' / '.join(f'{x:.2f}' for x in others)})" if others else text


def retained(source: Dataset, target: Dataset, K: int) -> list[float]:
    """The second table's numbers for one pair."""
    moments, z_s, z_t = normalised(source, target)
    d, _ = scores(z_s, z_t, source, target, K, taf.bandwidth(z_s, z_t, "wide"))
    l_i = taf.fragment_lengths(source.lengths, K)
    last = np.minimum(np.arange(len(source)) + l_i - 1, len(source) - 1)
    apart = source.terminals[last] & (l_i > 0)
    shares = []
    for failed in (np.zeros(len(d), bool), apart):
        inside = taf.coverage(taf.keep_fragments(d, failed, 0.5), l_i) > 0
        shares.append(inside[source.terminals].mean() if source.terminals.any() else np.nan)
    rows, costs = np.flatnonzero(inside), []
    for used in (moments, None):
        x = taf.transition_features(source, rows, True, used)
        y = taf.transition_features(target, slice(None), True, used)
        costs.append(taf.calibrate(fast_ot.row_costs(x, y)[0]))
    share = gate_report.effective_share(taf.gibbs_weights(costs[0], 1.0)[1])
    return [
        inside.mean(),
        *shares,
        share,
        gate_report.temperature(costs[0], 0.5),
        float(spearmanr(*costs)[0]),
    ]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def main(sources: Path, targets: Path, size: int = 50_000) -> None:
    kernel_rows, retained_rows = [], []
    for env in ROBOTS:
        for shift in SHIFTS:
            file = str(sources / env / "medium.hdf5")
            source, target = load_pair(
                env, shift, file, "medium", data="d4rl", data_dir=targets, source_size=size
            )
            K = find_task(env, shift).K
            found = kernels(source, target, K)
            cells = [cell(*numbers) for numbers in found.values()]
            kernel_rows.append([f"{env} {shift}", str(K), *cells])
            numbers = ["" if np.isnan(x) else f"{x:.2f}" for x in retained(source, target, K)]
            retained_rows.append([f"{env} {shift}", *numbers])
            print(
                " ".join(kernel_rows[-1]),
                "|",
                " ".join(retained_rows[-1][1:]),
                file=sys.stderr,
                flush=True,
            )
    print(table(["medium to medium", "K", *found], kernel_rows), end="\n\n")
    head = ["medium to medium", "retained", "failures, one threshold", "failures, apart"]
    print(
        table(
            [*head, "effective share at eta_w = 1", "eta_w for 0.5", "costs, raw and normalised"],
            retained_rows,
        )
    )


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
