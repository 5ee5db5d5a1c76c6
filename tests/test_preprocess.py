"""The gate and the weights against brute force, against POT, and against the paper's propositions;
the fast forms of MMD and OT against the equations as printed."""

import dataclasses
import functools
import io
import itertools
import json
import math
import re
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

import taf_preprocess as taf
from dynashift import fast_mmd, fast_ot, gate_files, gate_report, runs
from dynashift.checksums import write_hdf5
from dynashift.datasets import Dataset, load_task
from dynashift.errors import UserError

ROOT = Path(__file__).parents[1]
QUICK = settings(max_examples=25, deadline=None)


def toy(lengths=(7, 12, 3, 20), seed=0, shift=0.0, d=11, a=3, **columns) -> Dataset:
    """Random walks: the states of an episode are similar, as in real data."""
    rng, n = np.random.default_rng(seed), sum(lengths)
    timeouts = np.zeros(n, bool)
    timeouts[np.cumsum(lengths) - 1] = True
    walk = np.concatenate([rng.normal(size=(1, d)) + rng.normal(0, 0.3, (k, d)).cumsum(0) for k in lengths]) + shift
    data = dict(observations=walk, next_observations=walk + 0.1, actions=rng.normal(size=(n, a)))
    data |= dict(rewards=rng.normal(size=n))
    data = {key: np.asarray(value, np.float32) for key, value in (data | columns).items()}
    sha = f"{seed} {shift} {lengths} {sorted(columns)}"
    return Dataset("hopper", "morph", "toy", "own", "toy", sha, terminals=~timeouts & False, timeouts=timeouts, **data)


def fragments(lengths, K, short=False, stride=1) -> list[range]:
    """The steps of every fragment, by the definition: K of one episode; all of an episode that has fewer; and if
    short ones are wanted, what is left at the end."""
    ends = np.cumsum(lengths)
    return [
        range(i, min(i + K, end))
        for end, n in zip(ends, lengths, strict=True)
        for i in range(end - n, end, stride)
        if short or i + K <= end or i == end - n
    ]


def brute_mmd(z_s, lengths_s, z_t, lengths_t, K, gamma, reduce="mean", squared=False, short=False, stride=1):
    """Eqs. (15) and (16), literally, in float64; NaN where no fragment begins."""

    def mean_kernel(x, y):
        return np.exp(-gamma * ((x[:, None] - y) ** 2).sum(-1)).mean()

    target = [z_t[list(f)].astype(float) for f in fragments(lengths_t, K, short, stride)]
    self_t = [mean_kernel(t, t) for t in target]
    scores = np.full(len(z_s), np.nan)
    for f in fragments(lengths_s, K, short):
        s = z_s[list(f)].astype(float)
        self_s = mean_kernel(s, s)
        mmd = [max(self_s + k - 2 * mean_kernel(s, t), 0) for t, k in zip(target, self_t, strict=True)]
        mmd = mmd if squared else np.sqrt(mmd)
        scores[f.start] = np.mean(mmd) if reduce == "mean" else np.min(mmd)
    return scores


def mean_and_sd(states):
    return states.mean(0, dtype=np.float64), states.std(0, dtype=np.float64)


def fast_scores(z_s, len_s, z_t, len_t, K, gamma, reduce="mean", square=False, short=False, stride=1, **options):
    """Scores and self terms by dynashift/fast_mmd.py."""
    source = (z_s, np.asarray(len_s), taf.fragment_lengths(np.asarray(len_s), K, short))
    target = (z_t, np.asarray(len_t), taf.fragment_lengths(np.asarray(len_t), K, short))
    return fast_mmd.fragment_scores(source, target, K, gamma, reduce, square, stride, **options)


@pytest.fixture(autouse=True)
def draw(monkeypatch):
    """Drawing takes longer than everything else here; a test that needs it calls this."""
    with monkeypatch.context() as patch:
        patch.setattr(gate_report, "draw", lambda *_: None)
        yield patch.undo


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(np.array)


@QUICK
@given(
    lengths, lengths, st.integers(1, 9), st.floats(0.01, 3), st.sampled_from(["mean", "min"]), st.booleans(),
    st.booleans(), st.integers(1, 3), st.integers(0, 99),
)  # fmt: skip
def test_mmd_is_the_double_loop(lengths_s, lengths_t, K, gamma, reduce, squared, short, stride, seed):
    rng = np.random.default_rng(seed)
    K = min(K, max(lengths_s), max(lengths_t))
    z_s, z_t = (rng.normal(size=(n.sum(), 3)).astype("f") for n in (lengths_s, lengths_t))
    options = K, gamma, reduce, squared, short, stride
    brute = brute_mmd(z_s, lengths_s, z_t, lengths_t, *options)
    for dtype, atol in ((torch.float32, 2e-5 if squared or reduce == "mean" else 1e-4), (torch.float64, 1e-7)):
        d, _ = fast_scores(z_s, lengths_s, z_t, lengths_t, *options, dtype=dtype)
        np.testing.assert_allclose(d, brute, rtol=1e-5, atol=atol)


@QUICK
@given(
    lengths, lengths, st.integers(1, 9), st.floats(0.1, 3), st.sampled_from(["mean", "min"]), st.booleans(),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_fast_mmd_is_the_dense_one(lengths_s, lengths_t, K, gamma, reduce, square, short, seed):
    """On episodes of unequal length, in single and in double precision; and the dense one is the double loop."""
    K = min(K, max(lengths_s), max(lengths_t))
    source, target = toy(tuple(lengths_s), seed), toy(tuple(lengths_t), seed + 100)
    z_s, z_t = source.observations, target.observations
    parts = [[z[f.start : f.stop] for f in fragments(n, K, short)] for z, n in ((z_s, lengths_s), (z_t, lengths_t))]
    dense = taf.fragment_scores(*parts, gamma, reduce, square)
    begins = taf.fragment_lengths(lengths_s, K, short) > 0
    for dtype, atol in ((torch.float32, 1e-4), (torch.float64, 1e-7)):
        fast, _ = fast_scores(z_s, lengths_s, z_t, lengths_t, K, gamma, reduce, square, short, dtype=dtype)
        assert (np.isfinite(fast) == begins).all()
        np.testing.assert_allclose(fast[begins], dense, rtol=1e-5, atol=atol)
    brute = brute_mmd(z_s, lengths_s, z_t, lengths_t, K, gamma, reduce, square, short)
    np.testing.assert_allclose(dense, brute[begins], rtol=1e-9, atol=1e-9)


def test_mmd_of_two_fragments_by_hand():
    """Points 0 and 1 against the point 1, k(0, 1) = 1/e: (2 + 2/e) / 4 - 2 (1 + 1/e) / 2 + 1."""
    S, T = np.array([[0.0], [1.0]]), np.array([[1.0]])
    assert taf.squared_mmd(S, T, 1.0) == pytest.approx(0.5 - 0.5 / np.e)
    assert taf.squared_mmd(S, S, 1.0) == 0


@pytest.mark.parametrize("K", [1, 2, 5, 20])
def test_mmd_over_many_blocks(K):
    """More states than one block, far from the origin, with the clipping's extremes: 1e-5 in single precision."""
    source, target = toy((300, 2, 299, 31), 1), toy((400, 25, 190), 2, shift=0.5)
    mu, sd = mean_and_sd(target.observations)
    z_s, z_t = (taf.normalise(data.observations, mu, sd) for data in (source, target))
    z_s[::50] = np.sign(z_s[::50]) * 10
    gamma = taf.bandwidth(z_s, z_t, "median")
    one, two = (
        fast_scores(z_s, source.lengths, z_t, target.lengths, K, gamma, dtype=dtype)[0]
        for dtype in (torch.float32, torch.float64)
    )
    np.testing.assert_allclose(one, two, rtol=1e-5)
    some = np.r_[0:3, 297:304, 625:632]  # beginnings, ends, and the short episode
    parts = [z_t[:400], z_t[400:425], z_t[425:]]
    cut = np.concatenate([part[:40] for part in parts])  # a smaller target, because the loop is slow
    brute = brute_mmd(z_s, source.lengths, cut, [40, 25, 40], K, gamma, stride=5)[some]
    ours = fast_scores(z_s, source.lengths, cut, np.array([40, 25, 40]), K, gamma, stride=5)[0][some]
    np.testing.assert_allclose(ours, brute, rtol=1e-5)


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 1))
@QUICK
def test_window_sums(K, extra, dim):
    x = torch.rand(K + extra, K + extra, dtype=torch.float64)
    np.testing.assert_allclose(fast_mmd.window_sums(x, K, dim), x.unfold(dim, K, 1).sum(-1), rtol=1e-12)


def test_bandwidth_rules():
    z_t = np.array([[0.0], [1.0], [3.0]], "f")  # squared distances 1, 4, 9
    z_s = np.array([[10.0], [11.0], [13.0]], "f")
    assert taf.bandwidth(z_s, z_t, "median") == pytest.approx(1 / 4)
    together = np.median([(x - y) ** 2 for x, y in itertools.combinations([0, 1, 3, 10, 11, 13], 2)])
    assert taf.bandwidth(z_s, z_t, "pooled") == pytest.approx(1 / together)
    assert taf.bandwidth(z_s, z_t, "wide") == pytest.approx(0.1 / together)
    assert taf.bandwidth(z_s, z_t, "invdim") == 1
    assert taf.bandwidth(z_s, z_t, 0.3) == 0.3


@given(st.integers(1, 6), st.integers(2, 30), st.integers(0, 99))
@QUICK
def test_whitened_states_have_unit_covariance_whatever_their_units(d, n, seed):
    """Both domains together, in equal shares, whatever their sizes; and no linear change of the states matters."""
    rng = np.random.default_rng(seed)
    source, target = rng.normal(size=(40 * n, d)), rng.normal(0.5, 1.0, (20 + n, d))
    z = taf.encode(source, target, None, "whitened")
    mean = sum(x.mean(0, dtype=float) for x in z) / 2
    second = sum(x.T.astype(float) @ x / len(x) for x in z) / 2
    np.testing.assert_allclose(mean, 0, atol=1e-5)
    np.testing.assert_allclose(second, np.eye(d), atol=1e-3)
    turn, units, shift = np.linalg.qr(rng.normal(size=(d, d)))[0], 10.0 ** rng.uniform(-3, 3, d), rng.normal(size=d)
    changed = taf.encode(*(states @ turn * units + shift for states in (source, target)), None, "whitened")
    distances = [np.linalg.norm(a[:20, None] - b[None], axis=-1) for a, b in (z, changed)]
    np.testing.assert_allclose(*distances, rtol=0.02, atol=1e-3)


def test_whitening_leaves_out_entries_that_never_change():
    source, target = toy(seed=1).observations.copy(), toy(seed=2).observations.copy()
    source[:, 3] = target[:, 3] = 7
    z_s, z_t = taf.encode(source, target, None, "whitened")
    others = taf.encode(np.delete(source, 3, 1), np.delete(target, 3, 1), None, "whitened")
    distances = [np.linalg.norm(a[:, None] - b[None], axis=-1) for a, b in ((z_s, z_t), others)]
    np.testing.assert_allclose(*distances, rtol=1e-4)


def test_both_domains_count_equally_in_the_pooled_bandwidth():
    """However much larger the source is, half of the states are the target's."""
    rng = np.random.default_rng(0)
    z_t, z_s = rng.normal(size=(500, 3)).astype("f"), rng.normal(4, 1, size=(20_000, 3)).astype("f")
    small, large = (taf.bandwidth(z, z_t, "pooled") for z in (z_s[:500], z_s))
    assert large == pytest.approx(small, rel=0.05)


def test_a_wide_kernel_follows_nearness_where_a_narrow_one_saturates():
    """Source fragments at all distances from the target, some still and some moving: under the narrow kernel the score
    is the fragment's own spread, under the default one it is the distance."""
    rng = np.random.default_rng(0)
    n, K = 60, 4
    distance, spread = rng.uniform(3, 12, n), rng.uniform(0.1, 2, n)
    z_s = rng.normal(size=(n, K, 3)) * spread[:, None, None]
    z_s[..., 0] += distance[:, None]
    z_s, z_t = z_s.reshape(-1, 3).astype("f"), rng.normal(0, 0.3, size=(200, 3)).astype("f")
    found = {}
    for rule in ("median", "wide"):
        gamma = taf.bandwidth(z_s, z_t, rule)
        d, own = fast_scores(z_s, np.full(n, K), z_t, np.array([200]), K, gamma)
        found[rule] = gate_report.nearness(d, own, z_s, z_t, gamma, K)
    assert found["median"]["corr_score_self_term"] > 0.95
    assert found["median"]["rank_corr_score_distance"] < 0.5
    assert found["wide"]["corr_score_self_term"] < 0.5
    assert found["wide"]["rank_corr_score_distance"] > 0.95


# ------------------------------------------------------------------------------- fragments and their support


@QUICK
@given(lengths, st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_coverage_counts_kept_fragments(lengths, K, short, seed):
    all_of_them = fragments(lengths, K, short)
    l_i = taf.fragment_lengths(lengths, K, short)
    assert {f.start: len(f) for f in all_of_them} == {i: n for i, n in enumerate(l_i) if n}
    gate = (l_i > 0) & (np.random.default_rng(seed).random(len(l_i)) < 0.3)
    union = {i for f in all_of_them if gate[f.start] for i in f}
    count = [sum(i in f for f in all_of_them if gate[f.start]) for i in range(len(l_i))]
    assert taf.coverage(gate, l_i).tolist() == count
    assert {i for i, n in enumerate(count) if n} == union
    assert taf.coverage(l_i > 0, l_i).all()  # every transition lies in some fragment


@QUICK
@given(st.integers(1, 60), st.floats(0.1, 1), st.integers(0, 99))
def test_failures_have_a_threshold_of_their_own(n, xi, seed):
    rng = np.random.default_rng(seed)
    d, failed = rng.random(n), rng.random(n) < 0.3
    d[rng.random(n) < 0.2] = np.nan
    groups = [np.sort(d[group & np.isfinite(d)]) for group in (~failed, failed)]
    keep = [int(np.floor(xi * len(group) + 1e-6)) for group in groups]
    if sum(keep) == 0:
        with pytest.raises(UserError, match="cannot keep 0"):
            taf.keep_fragments(d, failed, xi)
        return
    gate = taf.keep_fragments(d, failed, xi)
    for group, scores, k in zip((~failed, failed), groups, keep, strict=True):
        np.testing.assert_array_equal(np.sort(d[gate & group]), scores[:k])


def test_every_fragment_may_end_in_a_failure():
    """The source robot always falls after K steps, so there is no other fragment that could set a threshold."""
    source, target = toy((4, 4, 4, 4)), toy(seed=1)
    source = dataclasses.replace(source, terminals=source.timeouts, timeouts=~source.timeouts & False)
    moments = mean_and_sd(target.observations)
    d, gate, report = taf.score_and_gate(source, target, (moments, moments), settings_of(K=4).gate, "cpu")
    assert gate.sum() == 2
    assert report["threshold"] == d[gate].max()
    assert d[gate].max() <= np.nanmin(np.where(gate, np.nan, d))


def test_fragments_that_end_in_a_failure_are_ranked_among_themselves():
    """By hand, from the definition: episodes 0, 2 and 3 end in a failure, and of each group four tenths are kept."""
    source, target = toy((7, 12, 9, 20, 6)), toy((9, 15), 5, shift=0.3)
    failing = np.isin(np.cumsum(source.lengths) - 1, np.cumsum(source.lengths)[[0, 2, 3]] - 1)
    terminals = source.timeouts.copy()
    terminals[source.timeouts] = failing
    source = dataclasses.replace(source, terminals=terminals, timeouts=source.timeouts & ~terminals)
    moments = mean_and_sd(target.observations)
    d, gate, _ = taf.score_and_gate(source, target, (moments, moments), settings_of(K=4, xi=0.4).gate, "cpu")
    starts = [f.start for f in fragments(source.lengths, 4)]
    falls = {f.start for f in fragments(source.lengths, 4) if terminals[f.stop - 1]}
    assert len(falls) == 3
    kept = set()
    for group in (falls, set(starts) - falls):
        kept |= set(sorted(group, key=lambda i: d[i])[: math.floor(0.4 * len(group))])
    assert set(np.flatnonzero(gate)) == kept
    assert len(kept & falls) == 1
    together = taf.score_and_gate(
        source, target, (moments, moments), settings_of(K=4, xi=0.4, failures="together").gate, "cpu"
    )
    assert set(np.flatnonzero(together[1])) == set(sorted(starts, key=lambda i: d[i])[: math.floor(0.4 * len(starts))])


def test_falls_of_the_source_robot_are_retained(real_data, tmp_path):
    """Hopper under half the gravity, with seven falls in 5,000 steps, is the source: ranked with all other fragments
    hardly a fall is kept; ranked apart, about the same share as of all transitions."""
    file, shares = str(real_data / "target" / "hopper_gravity_0.5_medium.hdf5"), {}
    task = dict(env="hopper", shift="morph", source=file, target="medium", data="d4rl", data_dir=real_data / "target")
    for failures in ("together", "apart"):
        args = runs.compose(taf.Args, **task, K=5, failures=failures, filter="mmd", mmd_target_stride=5)
        source, target = load_task(args.task)
        result = taf.preprocess(args.task, args.gate, source, target, tmp_path, "cpu")
        retained = result["retained"]
        shares[failures] = retained[source.terminals].mean() / retained.mean()
    assert shares["together"] < 0.3
    assert 0.6 < shares["apart"] < 1.4


# ----------------------------------------------------------------------------------- the paper's propositions

scores = st.lists(st.floats(0, 2, width=16), min_size=1, max_size=9).map(np.array)


@QUICK
@given(scores, st.data())
def test_gate_is_optimal_among_all_subsets(d, data):
    """Proposition "Optimal threshold gate"."""
    n_keep = data.draw(st.integers(1, len(d)))
    gate = taf.keep_smallest(d, n_keep)
    assert gate.sum() == n_keep
    assert d[gate].max() == min(max(subset) for subset in itertools.combinations(d, n_keep))
    assert sorted(d[gate]) == sorted(d)[:n_keep]


def test_gate_takes_the_first_of_equals():
    assert taf.keep_smallest(np.array([1, 0, 1, 1, 2.0]), 3).tolist() == [True, True, True, False, False]


def objective(w, c, lambda_w, tau):
    return lambda_w * (w @ c) + tau * (w @ torch.log(w * len(w)))


@QUICK
@given(scores, st.floats(0.1, 8))
def test_gibbs_weights_minimise_the_objective(c, eta_w):
    """Proposition "Optimal entropic reweighting", with lambda_w / tau_ent = eta_w, against a numerical minimiser."""
    omega, w = taf.gibbs_weights(c, eta_w)
    assert w.sum() == pytest.approx(1)
    np.testing.assert_allclose(w, omega / omega.sum())
    free, cost = torch.zeros(len(c), dtype=torch.float64, requires_grad=True), torch.from_numpy(c)
    solver = torch.optim.LBFGS(
        [free], max_iter=500, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        solver.zero_grad()
        loss = objective(free.softmax(0), cost, eta_w, 1.0)
        loss.backward()
        return loss

    solver.step(closure)
    np.testing.assert_allclose(w, free.detach().softmax(0).numpy(), atol=1e-5)


@QUICK
@given(scores, st.floats(0, 0.5), st.floats(0.1, 4), st.floats(0.1, 4), st.integers(0, 99), st.data())
def test_population_to_empirical_bounds(d, eps, lambda_w, tau, seed, data):
    """Eqs. (34) [empirical-gate-bound] and (35) [empirical-weight-bound] on perturbed scores."""
    rng, n_keep = np.random.default_rng(seed), data.draw(st.integers(1, len(d)))
    noisy = d + rng.uniform(-eps, eps, len(d))
    assert d[taf.keep_smallest(noisy, n_keep)].max() <= d[taf.keep_smallest(d, n_keep)].max() + 2 * eps + 1e-12
    c, F = torch.from_numpy(d), lambda w: objective(torch.from_numpy(w), c, lambda_w, tau).item()
    best, w = (taf.gibbs_weights(costs, lambda_w / tau)[1] for costs in (d, noisy))
    assert F(best) <= F(w) + 1e-12
    assert F(w) <= F(best) + 2 * lambda_w * eps + 1e-12


@QUICK
@given(st.lists(st.floats(0, 1), min_size=3, max_size=40).map(np.array), st.floats(0.1, 1))
def test_the_temperature_gives_the_effective_share_that_is_asked_for(c, share):
    cheapest = (c < c.min() + 1e-6).sum()
    if share < 1 and cheapest < len(c) and share * len(c) <= cheapest:
        with pytest.raises(UserError, match="raise --ess"):
            gate_report.temperature(c, share)
        return
    eta_w = gate_report.temperature(c, share)
    w = np.exp(-eta_w * c)
    found = w.sum() ** 2 / (w**2).sum() / len(c)
    assert found == pytest.approx(1 if cheapest == len(c) else share, abs=1e-6)


def test_calibration():
    c = taf.calibrate(np.array([2.0, 3.0, 6.0]))
    np.testing.assert_allclose(c, [0, 0.25, 1], atol=1e-8)
    assert (taf.calibrate(np.full(4, 0.3)) == 0).all()  # equal costs: equal weights
    np.testing.assert_allclose(taf.gibbs_weights(c, 2.0)[0], np.exp(-2 * c))
    assert taf.gibbs_weights(c, 0.0)[1] == pytest.approx([1 / 3] * 3)


# ------------------------------------------------------------------------------------------ optimal transport


def clouds(n=300, M=80, d=6, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)) + 1, rng.normal(size=(M, d)) * 0.7 + [1.5, *[0.5] * (d - 1)]
    return x.astype("f"), y.astype("f")


def cost_matrix(x, y, cost):
    x, y = x.astype(float), y.astype(float)
    if cost == "cosine":
        return 1 - x @ y.T / (np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1) + 1e-8)
    return ot.dist(x, y, metric=cost)


def pot(x, y, cost, reg, stop=1e-12):
    C = cost_matrix(x, y, cost)
    P = ot.sinkhorn(ot.unif(len(x)), ot.unif(len(y)), C / C.max(), reg, numItermax=20_000, stopThr=stop)
    P /= P.sum(1, keepdims=True)
    return P, (P * C).sum(1)


@pytest.mark.parametrize(("dtype", "tol", "rtol"), [(torch.float32, 1e-6, 1e-5), (torch.float64, 1e-11, 1e-7)])
@pytest.mark.parametrize("cost", ["cosine", "euclidean", "sqeuclidean"])
@pytest.mark.parametrize("reg", [0.1, 0.02])
def test_streaming_agrees_with_pot(cost, reg, dtype, tol, rtol, monkeypatch):
    """Plan rows, costs and weights, whatever the anchors; 0.1 in the scaling form, 0.02 in the log domain."""
    x, y = clouds()
    P, c_pot = pot(x, y, cost, reg)
    potentials, full_pass = [], fast_ot.full_pass
    monkeypatch.setattr(fast_ot, "full_pass", lambda *a: potentials.append(a[3]) or full_pass(*a))
    for anchors in (80, 1000):
        c, info = fast_ot.row_costs(x, y, cost, reg, tol, anchors, dtype=dtype)
        assert info["log_domain"] == (reg < 0.1)
        assert info["marginal_error"] <= tol
        np.testing.assert_allclose(c, c_pot, rtol=rtol)
        for ours, theirs in zip(*(taf.gibbs_weights(taf.calibrate(v), 1.0) for v in (c, c_pot)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=rtol)
        to = fast_ot.ground(torch.from_numpy(y), cost, dtype)
        X, a = fast_ot.embed(torch.from_numpy(x), cost, to.center)
        s = np.log2(np.e) / reg / info["C_max"]
        rows, r, _ = fast_ot.plan_block(to, X.to(dtype), a, fast_ot.tilt(to, potentials[-1], s), s)
        rows = rows.double() / r.double()[:, None]
        np.testing.assert_allclose(rows, P, rtol=rtol, atol=rtol * P.max())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("reward", [True, False])
@pytest.mark.parametrize("cost", ["cosine", "euclidean", "sqeuclidean"])
def test_fast_ot_is_the_dense_one(cost, reward, seed):
    """On transitions of episodes of unequal length, in single precision; both against another formula of the cost."""
    source, target = toy((70, 3, 41, 150), seed), toy((60, 9, 33), seed + 10, shift=0.5)
    moments = mean_and_sd(target.observations)
    x = taf.transition_features(source, slice(None), reward, moments)
    y = taf.transition_features(target, slice(None), reward, moments)
    assert x.shape == (264, 2 * 11 + 3 + reward)
    C = taf.ground_cost(x, y, cost)
    np.testing.assert_allclose(C, cost_matrix(x, y, cost), rtol=1e-6, atol=1e-9)
    dense, report = taf.row_costs(C)
    assert report["marginal_error"] < 1e-6
    np.testing.assert_allclose(dense, pot(x, y, cost, 0.1)[1], rtol=1e-6)
    fast, _ = fast_ot.row_costs(x, y, cost, tol=1e-6)
    np.testing.assert_allclose(fast, dense, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "rtol", "rtol_cost"), [(torch.float64, 1e-13, 1e-13), (torch.float32, 1e-5, 5e-6)])
def test_scaling_and_log_domain_are_the_same_plan(dtype, rtol, rtol_cost):
    """The same but for rounding: over 300 potentials costs differ by up to 2.0e-6 in float32, by 3.6e-15 in float64."""
    x, y = clouds()
    to = fast_ot.ground(torch.from_numpy(y), "cosine", dtype)
    X, a = fast_ot.embed(torch.from_numpy(x), "cosine", to.center)
    G = torch.rand(len(y), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    R = fast_ot.tilt(to, G, 10.0)
    (P, r, c), (P_log, r_log, c_log) = (
        fast_ot.plan_block(to, X.to(dtype), a, R, 10.0, stable) for stable in (False, True)
    )
    np.testing.assert_allclose(P / r[:, None], P_log / r_log[:, None], rtol=rtol)
    np.testing.assert_allclose(c, c_log, rtol=rtol_cost)


def test_small_regulariser_does_not_overflow():
    """1000 bits of exponent: float32's scaling form would be all zeros and infinities."""
    x, y = clouds(60, 40)
    c, info = fast_ot.row_costs(x, y, "sqeuclidean", 0.003, 1e-4)
    assert info["log_domain"]
    np.testing.assert_allclose(c, pot(x, y, "sqeuclidean", 0.003)[1], rtol=0.02)


def test_close_clouds_keep_their_digits():
    """Costs of 1e-5 beside norms of 1: 1 - cos in float32 would have two digits."""
    x, y = clouds()
    x, y = (np.array([[5, -3, 2, 1, 0, 4]], "f") + 0.03 * v for v in (x, y))
    c_pot = pot(x, y, "cosine", 0.1)[1]
    assert c_pot.mean() < 1e-4
    np.testing.assert_allclose(fast_ot.row_costs(x, y)[0], c_pot, rtol=1e-5)


def test_row_costs_majorise_w1():
    """Eq. (8): against the exact distance, for uniform weights, and for Gibbs weights to the law their rows lead to."""
    x, y = clouds(120, 80)
    for cost in ("cosine", "euclidean"):
        C, u = cost_matrix(x, y, cost), ot.unif(len(x))
        c, _ = fast_ot.row_costs(x, y, cost)
        P, _ = pot(x, y, cost, 0.1)
        _, w = taf.gibbs_weights(taf.calibrate(c), 3.0)
        terms = gate_report.radii(np.ones(len(x)), c, w, 3.0, np.ptp(c))
        assert ot.emd2(u, ot.unif(len(y)), C) <= terms["delta_w_plan"] <= C.mean()
        law = w @ P
        assert ot.emd2(w, law / law.sum(), C) <= terms["delta_w_bound"]
        assert terms["delta_w_bound"] < terms["delta_w_plan"]


def test_surrogate_is_least_at_the_weights():
    rng = np.random.default_rng(0)
    d, c = rng.uniform(size=30), rng.uniform(1, 3, size=30)
    _, w = taf.gibbs_weights(taf.calibrate(c), 2.0)
    best = gate_report.radii(d, c, w, 2.0, np.ptp(c) + 1e-8)
    assert best["delta_m"] == d.max()
    assert best["surrogate"] == pytest.approx(d.max() + w @ c + (np.ptp(c) + 1e-8) / 2 * (w @ np.log(30 * w)))
    for _ in range(20):
        other = w * rng.uniform(0.9, 1.1, 30)
        assert gate_report.radii(d, c, other / other.sum(), 2.0, np.ptp(c) + 1e-8)["surrogate"] > best["surrogate"]


def test_chunks_are_pots_problems():
    """One chunk of all rows is the one problem; of two chunks, each is its own, and rows come back in order."""
    x, y = clouds()
    whole, _ = taf.chunked_row_costs(x, y, "cosine", 0.1, chunk=300)
    np.testing.assert_allclose(whole, pot(x, y, "cosine", 0.1)[1], rtol=1e-6)
    c, found = taf.chunked_row_costs(x, y, "cosine", 0.1, chunk=200)
    rows = np.random.default_rng(0).permutation(300)[200:]
    np.testing.assert_allclose(c[rows], pot(x[rows], y, "cosine", 0.1)[1], rtol=1e-6)
    assert found["marginal_error"] < 1e-6


def test_not_converging_is_an_error():
    x, y = clouds()
    with pytest.raises(UserError, match=r"did not converge.*--ot-reg"):
        fast_ot.row_costs(x, y, anchors=50, max_passes=1)
    with pytest.raises(UserError, match="did not converge"):
        taf.row_costs(taf.ground_cost(x, y), reg=1e-4)


def test_equal_points_cost_nothing():
    same = np.ones((20, 3), "f")
    for c, _ in (fast_ot.row_costs(same, same[:5]), taf.row_costs(taf.ground_cost(same, same[:5]))):
        np.testing.assert_allclose(c, 0, atol=1e-12)
        np.testing.assert_allclose(taf.gibbs_weights(taf.calibrate(c), 1.0)[1], 1 / 20, rtol=1e-3)


def test_zero_vectors_have_cost_one():
    x, y = clouds(50, 30)
    x[7] = 0
    for solve in (fast_ot.row_costs, lambda x, y: taf.row_costs(taf.ground_cost(x, y))):
        c, _ = solve(x, y)
        assert np.isfinite(c).all()
        assert c[7] == pytest.approx(1, abs=1e-6)
        c, _ = solve(x, np.zeros_like(y))
        np.testing.assert_allclose(c, 1, atol=1e-6)


# ------------------------------------------------------------------------------------------------- the script


def settings_of(preset="paper", **changes) -> taf.Args:
    """As the command line has them: the values of task and preset, then these."""
    task = {key: changes[key] for key in ("env", "shift", "source", "target") if key in changes}
    args = runs.plain(taf.Args, taf.defaults, runs.compose(taf.Args, preset=preset, **task))
    return runs.replace(args, **changes)


def run(tmp_path, source=None, target=None, preset="paper", name="medium", **changes):
    args = runs.replace(settings_of(preset, **changes), source=name)
    taf.check(args.gate)
    pair = source or toy(), target or toy((9, 15), 5, shift=0.3)
    return taf.preprocess(args.task, args.gate, *pair, tmp_path, str(runs.pick_device(args.device)))


def test_result_file(tmp_path, draw):
    draw()
    result = run(tmp_path, K=4, xi=0.3)
    source, target = toy(), toy((9, 15), 5, shift=0.3)
    with np.load(result["path"], allow_pickle=False) as file:
        assert set(file.files) >= {"d_m", "gate", "retained", "c_hat", "c_tilde", "omega", "w", "mu", "sd", "meta"}
        meta, gate, retained, w = json.loads(str(file["meta"])), file["gate"], file["retained"], file["w"]
        assert [file[k].dtype for k in ("d_m", "c_hat", "c_tilde", "omega", "w")] == [np.float32] * 5
        np.testing.assert_allclose(file["mu"], target.observations.mean(0), rtol=1e-5)
        assert gate.sum() == 9  # floor(0.3 * 31): (7 - 3) + (12 - 3) + 1 + (20 - 3) fragments
        assert np.isnan(w[~retained]).all()
        assert w[retained].sum() == pytest.approx(1, abs=1e-5)
        mu, sd = mean_and_sd(target.observations)
        z = [taf.normalise(data.observations, mu, sd) for data in (source, target)]
        d = brute_mmd(z[0], source.lengths, z[1], target.lengths, 4, meta["report"]["gamma"])
        np.testing.assert_allclose(file["d_m"], d, rtol=1e-5)
        kept = [f for f in fragments(source.lengths, 4) if d[f.start] <= np.sort(d)[8]]
        rows = sorted({i for f in kept for i in f})
        assert rows == np.flatnonzero(retained).tolist()
        x = [
            np.concatenate([z_, data.actions, data.rewards[:, None], taf.normalise(data.next_observations, mu, sd)], 1)
            for z_, data in zip(z, (source, target), strict=True)
        ]
        c = pot(x[0][rows], x[1], "cosine", 0.1)[1]
        np.testing.assert_allclose(file["c_hat"][rows], c, rtol=1e-5)
        eta_w = meta["report"]["eta_w"]
        np.testing.assert_allclose(w[rows], taf.gibbs_weights(taf.calibrate(c), eta_w)[1], rtol=1e-4)
        assert eta_w == 1
        np.testing.assert_allclose(file["omega"][rows], np.exp(-eta_w * taf.calibrate(c)), rtol=1e-4)
    assert meta["args"]["K"] == 4
    assert meta["report"]["delta_m"] == pytest.approx(np.sort(d)[8], rel=1e-5)
    assert meta["source"]["sha256"] == source.sha256
    assert result["path"].with_suffix(".png").stat().st_size > 10_000


def test_a_figure_that_cannot_be_drawn_is_a_note(tmp_path, draw, monkeypatch, capsys):
    draw()
    monkeypatch.setattr(gate_report, "_draw_states", None)
    result = run(tmp_path)
    assert "note: no figure" in capsys.readouterr().err
    assert result["path"].exists()
    assert not result["path"].with_suffix(".png").exists()


DENSE = [dict(), dict(mmd_reduce="min"), dict(mmd_squared=True), dict(mmd_reduce="min", mmd_squared=True)]
DENSE += [dict(ot_cost="euclidean"), dict(ot_cost="sqeuclidean"), dict(ot_reward=False), dict(short_fragments=True)]
DENSE += [dict(mmd_target_stride=3), dict(filter="mmd"), dict(filter="ot"), dict(preset="released")]


@pytest.mark.parametrize("change", DENSE, ids=str)
def test_dense_gives_the_same_gate_and_weights(tmp_path, change):
    """The equations as printed, for the whole script and not only for its parts."""
    source, target = toy((30, 4, 55, 2, 41)), toy((25, 3, 18), 5, shift=0.3)
    fast, dense = (run(tmp_path, source, target, K=5, dense=dense, **change) for dense in (False, True))
    assert fast["path"] != dense["path"]
    for name in ("gate", "retained"):
        np.testing.assert_array_equal(dense[name], fast[name])
    for name in ("d_m", "c_hat", "omega", "w"):
        np.testing.assert_allclose(dense[name], fast[name], rtol=1e-5, atol=1e-7, err_msg=name)
    reports = [result["meta"]["report"] for result in (fast, dense)]
    for name in {"threshold", "delta_m", "surrogate", "effective_share"} & reports[1].keys():
        assert reports[1][name] == pytest.approx(reports[0][name], rel=1e-5)


def test_dense_uses_none_of_the_fast_forms(tmp_path, monkeypatch):
    for module, name in ((fast_mmd, "fragment_scores"), (fast_ot, "row_costs")):
        monkeypatch.setattr(module, name, None)
    assert np.isfinite(run(tmp_path, dense=True)["w"]).any()
    with pytest.raises(TypeError):
        run(tmp_path)


def test_found_again_and_computed_again(tmp_path, monkeypatch, capsys):
    first = run(tmp_path)
    data = first["path"].read_bytes()
    computed = []
    compute = taf.gate_and_weights
    monkeypatch.setattr(taf, "gate_and_weights", lambda *a: computed.append(1) or compute(*a))
    assert run(tmp_path)["path"] == first["path"]
    assert not computed
    for other in (dict(xi=0.4), dict(source=toy(seed=8)), dict(ot_reward=False)):
        assert run(tmp_path, **other)["path"] != first["path"]
    assert len(computed) == 3
    with monkeypatch.context() as patch:  # other code has another file
        patch.setattr(taf, "VERSION", taf.VERSION + 1)
        assert run(tmp_path)["path"] != first["path"]
    computed.clear()
    middle = bytearray(data)
    middle[len(data) // 2] ^= 255
    for broken in (data[: len(data) // 2], b"", bytes(middle), b"PK nonsense"):
        first["path"].write_bytes(broken)
        again = run(tmp_path)
        assert "computed again" in capsys.readouterr().err
        np.testing.assert_array_equal(again["w"], first["w"])
        with np.load(first["path"], allow_pickle=False) as file:
            np.testing.assert_array_equal(file["w"], first["w"])
    assert not list(tmp_path.glob("*.tmp"))


def test_every_damage_means_computed_again(tmp_path, capsys):
    """Bits of the zip's and the arrays' headers, a missing array, arrays that are there under another name."""
    result = run(tmp_path)
    path, good = result["path"], result["path"].read_bytes()
    with zipfile.ZipFile(path) as file:
        heads = [info.header_offset for info in file.infolist()]
    headers = [i for head in heads for i in range(head, head + 180)] + list(range(good.rindex(b"PK\1\2"), len(good)))
    rng = np.random.default_rng(0)
    for i in [*rng.choice(headers, 150), *rng.integers(0, len(good), 50)]:
        damaged = bytearray(good)
        damaged[i] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        found = gate_files.read(path)
        if found is None:  # otherwise the bit belongs to a date or something else that does not matter
            assert "computed again" in capsys.readouterr().err
            continue
        assert found["meta"] == result["meta"]
        same = (np.array_equal(found[key], result[key], equal_nan=True) for key in gate_files.ARRAYS if key != "meta")
        assert all(same)
    for left_out in gate_files.ARRAYS:
        with np.load(io.BytesIO(good)) as file:
            np.savez(path, **{key: file[key] for key in file.files if key != left_out})
        assert gate_files.read(path) is None
        assert f"it lacks {left_out}" in capsys.readouterr().err


@pytest.mark.parametrize("spread", [0, 1e-7, 1e-6])
def test_weights_that_are_all_but_equal_are_drawn_as_such(spread):
    """As with --eta-w 1e-6: no bins lie between neighbouring numbers of float32."""
    ax = Figure().subplots()
    w = (1 + spread * np.linspace(-1, 1, 1000)).astype(np.float32)
    gate_report._histogram(ax, [w], "Weights", "w")
    assert [text.get_text() for text in ax.texts] == ["all equal: 1"]
    gate_report._histogram(ax, [1 + 100 * (w - 1) + np.linspace(0, 1e-3, 1000)], "Weights", "w")
    assert len(ax.patches) == 80


def test_a_figure_that_fails_is_a_note_and_a_name_is_no_formula(tmp_path, capsys, draw, monkeypatch):
    draw()
    result = run(tmp_path / "a", name="a$b_{$.hdf5")
    assert result["path"].with_suffix(".png").stat().st_size > 10_000
    result = run(tmp_path / "b", eta_w=1e-6)
    np.testing.assert_allclose(result["w"][result["retained"]] * result["retained"].sum(), 1, rtol=1e-5)
    assert result["path"].with_suffix(".png").stat().st_size > 10_000
    monkeypatch.setattr(gate_report, "_draw", lambda *_: 1 / 0)
    capsys.readouterr()
    path = run(tmp_path / "c")["path"]
    assert "note: no figure" in capsys.readouterr().err
    assert gate_files.read(path)["meta"]["report"]["retained"] > 0


def test_two_at_once_compute_once(tmp_path, monkeypatch):
    computed, compute, results = [], taf.gate_and_weights, []
    monkeypatch.setattr(taf, "gate_and_weights", lambda *a: computed.append(1) or compute(*a))
    threads = [threading.Thread(target=lambda: results.append(run(tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(computed) == 1
    assert len(results) == 3


def test_ablations_change_one_factor(tmp_path):
    full = run(tmp_path)
    mmd, only_ot = run(tmp_path, filter="mmd"), run(tmp_path, filter="ot")
    np.testing.assert_array_equal(mmd["gate"], full["gate"])
    assert (mmd["omega"][mmd["retained"]] == 1).all()
    assert np.ptp(mmd["w"][mmd["retained"]]) == 0
    assert only_ot["retained"].all()
    assert np.isnan(only_ot["d_m"]).all()
    assert np.ptp(only_ot["w"]) > 0
    assert only_ot["w"].sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(run(tmp_path, xi=1.0)["w"], only_ot["w"])
    for change in (dict(ot_cost="euclidean"), dict(ot_cost="sqeuclidean"), dict(ot_reward=False), dict(eta_w=5.0),
                   dict(ess=0.5), dict(ot_states="raw")):  # fmt: skip
        other = run(tmp_path, **change)
        np.testing.assert_array_equal(other["gate"], full["gate"])
        assert np.nanmax(np.abs(other["w"] - full["w"])) > 0
    assert (run(tmp_path, xi=0.25)["gate"] <= full["gate"]).all()
    assert (run(tmp_path, xi=0.25)["retained"] <= full["retained"]).all()


def test_released_preset(tmp_path):
    """Minimum of MMD^2 on raw states, gamma = 1/d, OT by chunks on all source data."""
    source, target = toy(), toy((9, 15), 5, shift=0.3)
    result = run(tmp_path, preset="released")
    d = brute_mmd(
        source.observations, source.lengths, target.observations, target.lengths, 5, 1 / 11, "min", True, True
    )
    np.testing.assert_allclose(result["d_m"], d, rtol=1e-4, atol=1e-6)
    raw = [
        np.concatenate([data.observations, data.actions, data.rewards[:, None], data.next_observations], 1)
        for data in (source, target)
    ]
    c = pot(*raw, "cosine", 0.1)[1]
    np.testing.assert_allclose(result["c_hat"], c, rtol=1e-5)
    assert result["gate"].sum() == 21
    np.testing.assert_allclose(result["omega"], np.exp(-taf.calibrate(c)), rtol=1e-4)
    assert result["w"][result["retained"]].sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(result["mu_source"], source.observations.mean(0), rtol=1e-4)
    assert settings_of("released", env="ant").gate.mmd_gamma == 1 / 111
    assert settings_of("released", shift="gravity", source="medium-expert").gate.K == 5
    assert settings_of(shift="gravity", source="medium-expert").gate.K == 20


def test_every_argument_is_read():
    code = (ROOT / "taf_preprocess.py").read_text() + (ROOT / "dynashift" / "datasets.py").read_text()
    names = runs.flatten(taf.Args())
    assert [name for name in names if not re.search(rf"\b(args|gate|task|self)\.{name}\b", code)] == []


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(xi=0.0), "--xi"),
        (dict(xi=1.1), "--xi"),
        (dict(xi=-0.5), "--xi"),
        (dict(xi=float("nan")), "--xi"),
        (dict(xi=0.001), "cannot keep 0 of 31"),
        (dict(K=21), "every source episode is shorter than K = 21"),
        (dict(K=16), "every target episode is shorter than K = 16"),
        (dict(K=0), "--K"),
        (dict(K=None), "--K"),
        (dict(mmd_gamma=-1.0), "--mmd-gamma"),
        (dict(ot_reg=0.0), "--ot-reg"),
        (dict(eta_w=-1.0), "--eta-w"),
        (dict(ess=0.0), "--ess"),
        (dict(ess=1.5), "--ess"),
        (dict(ess=1e-6), "raise --ess"),
        (dict(mmd_target_stride=0), "--mmd-target-stride"),
        (dict(device="nonsense"), "--device"),
    ],
)
def test_bad_arguments(tmp_path, changes, message):
    changes = {"K": 4} | changes
    with pytest.raises(UserError, match=message):
        run(tmp_path, **changes)
    assert not list(tmp_path.glob("*.npz"))


def test_folder_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["taf_preprocess.py", "--out", str(tmp_path / "file" / "out")])
    with pytest.raises(UserError, match="choose another --out"):
        taf.main()


def test_more_to_keep_than_there_is():
    with pytest.raises(UserError, match="cannot keep 4 of 3"):
        taf.keep_smallest(np.zeros(3), 4)


@pytest.mark.parametrize("column", ["observations", "actions", "rewards", "next_observations"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values(tmp_path, column, value):
    bad = toy()
    getattr(bad, column)[3] = value
    with pytest.raises(UserError, match=f"source data hold NaN or infinite {column}"):
        run(tmp_path, source=bad)


def test_constant_state_dimension(tmp_path):
    """Defined: 0 where a source state agrees with the constant, the clipping's +-10 where it does not."""
    source, target = toy(), toy((9, 15), 5)
    target.observations[:, 2] = 1.25
    source.observations[::2, 2], source.observations[1::2, 2] = 1.25, 1.5
    z = taf.normalise(source.observations, *mean_and_sd(target.observations))
    assert set(z[:, 2]) == {0, 10}
    assert np.isfinite(run(tmp_path, source=source, target=target, short_fragments=True)["d_m"]).all()


def test_constant_states(tmp_path):
    source, target = toy(), toy((9, 15), 5)
    source.observations[:] = target.observations[:] = 1
    with pytest.raises(UserError, match="--mmd-gamma"):
        run(tmp_path, source=source, target=target)


def test_zero_transitions(tmp_path):
    source = toy()
    for column in ("observations", "actions", "rewards", "next_observations"):
        getattr(source, column)[:7] = 0
    result = run(tmp_path, source=source, filter="ot", ot_states="raw")
    np.testing.assert_allclose(result["c_hat"][:7], 1, atol=1e-5)


# ------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def command(in_this_process):
    return functools.partial(in_this_process, taf)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, data in (("source", toy((60, 40, 30))), ("target", toy((30, 25), 5, shift=0.3))):
        columns = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")
        data = dataclasses.replace(data, actions=np.tanh(data.actions))
        write_hdf5(folder / f"{name}.hdf5", {key: getattr(data, key) for key in columns}, "own", {})
    return ["--source", folder / "source.hdf5", "--target", folder / "target.hdf5"]


def test_command_line(tmp_path, files, command):
    flags = [*files, "--out", tmp_path, "--preset", "released", "--mmd-reduce", "mean", "--no-mmd-squared"]
    flags += ["--source-size", 100, "--mmd-gamma", 0.2]
    done = command(*flags)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.npz")
    for text in (path.name, "of 100 source", "threshold", "effective", "computed in mmd", " MB"):
        assert text in done.stdout
    for text in ("MMD: 100%", "OT: 100%"):
        assert text in done.stderr
    with np.load(path, allow_pickle=False) as file:
        meta = json.loads(str(file["meta"]))
    wanted = dict(mmd_reduce="mean", mmd_squared=False, mmd_gamma=0.2, ot_support="all", K=5, source_size=100)
    wanted["ot_chunk"] = 10_000
    assert wanted.items() <= meta["args"].items()
    assert "100%" not in command(*flags).stderr  # it is found


@pytest.mark.parametrize("flags", [["--xi", 2], ["--K", 61]])
def test_command_line_errors_are_one_line(tmp_path, files, flags, command):
    done = command(*files, "--out", tmp_path, *flags)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line and not line.startswith("==>")]
    assert line.startswith("error: ")


def test_real_data(real_data, tmp_path, command):
    """Published target states as both domains: every score and weight finite, and the thresholds where they were."""
    source, target = (real_data / "target" / f"hopper_{kind}_medium.hdf5" for kind in ("gravity_0.5", "morph"))
    done = command("--source", source, "--target", target, "--out", tmp_path, "--mmd-target-stride", 5)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.npz")
    with np.load(path) as file:
        gate, d_m, w, retained = file["gate"], file["d_m"], file["w"], file["retained"]
        scored = np.isfinite(d_m)
        assert 0.49 < gate.sum() / scored.sum() <= 0.5
        assert 0.97 < scored.mean() < 1  # an episode's last K - 1 steps begin no fragment
        assert (d_m[scored] < np.sqrt(2)).all()
        assert np.isfinite(w[retained]).all()
        assert (retained >= gate).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_gives_the_same(tmp_path):
    cpu, gpu = (run(tmp_path / device, device=device) for device in ("cpu", "cuda"))
    for key in ("d_m", "retained", "c_hat", "w"):
        np.testing.assert_allclose(gpu[key], cpu[key], rtol=1e-5)
