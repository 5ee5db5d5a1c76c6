"""TAF-DT, stages 1 and 2: which source fragments to keep (MMD gate), and how much each of their
transitions counts (OT weights).

    python taf_preprocess.py --env hopper --shift morph --source medium --target medium
    python taf_preprocess.py --env hopper --shift morph --source-size 50000    a quick look
    python taf_preprocess.py --env ant --shift gravity --preset released       the authors' code

Equations are those of "Target-Aligned Fusion for Decision-Sequence Learning under Dynamics Shift",
TPAMI manuscript (taf_tpami.tex), numbered through the appendix. They appear here as printed, in
dense functions that need memory for all pairs; --dense computes with these. By default the same
numbers come from dynashift/fast_mmd.py and dynashift/fast_ot.py, which handle a million
transitions. `# DIFF n` points to row n of docs/differences.md.

    1  z = f_phi(s)                                                normalise, encode
    2  d_i^m: mean MMD of source fragment i to target fragments    squared_mmd, fragment_scores
       I: keep the share xi of smallest d, falls ranked apart      keep_fragments
       G(I): every transition inside a kept fragment               coverage
    3  c_i: cost of row i of one entropic OT plan between the      transition_features,
       retained transitions and the target's                       ground_cost, row_costs
    4  c~_i: c_i scaled to [0, 1];  w_i ~ exp(-eta_w c~_i)         calibrate, gibbs_weights
    5  Delta_m, Delta_w and the surrogate of the bound             dynashift/gate_report.py

N_s, N_t: source and target transitions; n: retained ones; K: fragment length. The result is one
.npz, which later runs find by the content of its inputs, and a figure beside it. Ablations:
--filter mmd, --filter ot, --ot-cost, --no-ot-reward and --xi, one factor each.
"""

import dataclasses
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dynashift import quick_help  # noqa: F401  first: --help then loads nothing slow

# isort: split
import numpy as np
import torch

from dynashift import fast_mmd, fast_ot, gate_files, gate_report, runs
from dynashift.datasets import Dataset, TaskArgs, load_task
from dynashift.errors import UserError, one_line_errors
from dynashift.files import check_folder, only_one, progress_bar
from dynashift.runs import Flat
from dynashift.tasks import find_task

VERSION = 3  # raise it when the same inputs give other numbers, so that no old file is found

# ------------------------------------------------------------------------------------ arguments


@dataclass(frozen=True)
class GateArgs:
    # Which of the two stages to run; none keeps all source data with equal weight (Table
    # tab:data_filter_ablation).
    filter: Literal["both", "mmd", "ot", "none"] = "both"
    xi: float = 0.5  # keep ratio xi, Prop. prop:optimal-gate
    K: int | None = None  # fragment and context length, Eq. (15); default: the task's

    # f_phi of Eq. (15): states normalised by Eq. (43); white over both domains together; or raw.
    encoder: Literal["normalised", "whitened", "raw"] = "normalised"
    state_norm: Literal["target", "per-domain"] = "target"  # whose mu and sigma Eq. (43) uses
    # g of k(x, y) = exp(-g |x - y|^2), Eq. (15). pooled: 1 / median squared distance of source and
    # target states; wide: a tenth of that; median: 1 / median over target states; invdim: 1 / d;
    # or a number.
    mmd_gamma: Literal["wide", "pooled", "median", "invdim"] | float = "wide"
    short_fragments: bool = False  # let shorter fragments begin in an episode's last K - 1 steps
    failures: Literal["apart", "together"] = "apart"  # how fragments that end in one are ranked
    mmd_reduce: Literal["mean", "min"] = "mean"  # how Eq. (16) reduces over target fragments
    mmd_squared: bool = False  # use MMD^2 instead of MMD in Eq. (16)
    mmd_target_stride: int = 1  # use every n-th target fragment in Eq. (16); 1 is exact

    ot_cost: Literal["cosine", "euclidean", "sqeuclidean"] = "cosine"  # Eq. (17), Table tab:ot_dist
    ot_reward: bool = True  # include r in x(u) = [s, a, r, s'], Eq. (17) (Table tab:ot_r_ablation)
    ot_states: Literal["normalised", "raw"] = "normalised"  # s and s' in x(u), Eq. (17)
    ot_reg: float = 0.1  # entropic regulariser of the problem of Eq. (18), on C / max C
    ot_chunk: int | None = None  # solve chunks of that many rows, not one problem (released code)
    ot_support: Literal["retained", "all"] = "retained"  # rows of the OT problem and of Eq. (19)
    ot_tol: float = 1e-5  # accepted L1 error of the plan's marginal on the target
    eta_w: float = 1.0  # inverse temperature eta_w, Eqs. (21) and (38)
    ess: float | None = None  # choose eta_w for this effective share of the weights, e.g. 0.5
    dense: bool = False  # compute with the equations as printed: for small data, and to check


@dataclass(frozen=True)
class Args:
    task: Flat[TaskArgs] = TaskArgs()
    gate: Flat[GateArgs] = GateArgs()
    preset: Literal["paper", "released"] = "paper"  # the paper's text, or the authors' code
    out: Path = Path("runs/preprocess")  # folder of the results
    device: str = "auto"  # cpu, cuda, cuda:1, ...; auto is cuda where there is one


def defaults(args: Args) -> dict:
    """Values that this task and preset have where the command line says nothing."""
    if args.preset == "released":
        from baselines.taf_dt_released import gate_values  # here, because it imports this file

        return gate_values(args.task)
    return {"K": find_task(args.task.env, args.task.shift).K}


def check(gate: GateArgs) -> None:
    """Refuse values that cannot work, before anything is loaded."""
    for name in ("K", "mmd_target_stride", "ot_reg", "ot_tol", "ot_chunk", "mmd_gamma"):
        value = getattr(gate, name)
        chosen = isinstance(value, str) or (name == "ot_chunk" and value is None)
        if not chosen and (value is None or not 0 < value < math.inf):
            raise UserError(f"--{name.replace('_', '-')} must be a positive number, not {value}")
    if not 0 < gate.xi <= 1:
        raise UserError(f"--xi is the share to keep, above 0 and at most 1, not {gate.xi}")
    if not 0 <= gate.eta_w < math.inf:
        raise UserError(f"--eta-w must be a number from 0 up, not {gate.eta_w}")
    if gate.ess is not None and not 0 < gate.ess <= 1:
        raise UserError(f"--ess is a share of G(I), above 0 and at most 1, not {gate.ess}")


# ------------------------------------------------------------------------- states and fragments


def normalise(states, mu, sd, clip: float = 10.0) -> np.ndarray:
    """(s - mu) / sd, clipped to +-clip; where sd is 0, it is 0 if s equals mu and +-clip if not."""
    # Eq. (43) [unlabelled, "State normalization"]: with the target's statistics for both domains
    # DIFF 44: clipped, because a joint hardly moves in the target data of a kinematic shift
    # (sd = 0.003), and source states would lie 400 standard deviations away.
    return np.clip((states - mu) / (sd + 1e-8), -clip, clip).astype(np.float32)


def whiten(source: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """Both domains' states under one linear map, which gives their equal mixture covariance 1."""
    mu = (source.mean(0, dtype=np.float64) + target.mean(0, dtype=np.float64)) / 2
    centred = [states - mu for states in (source, target)]
    C = sum(z.T @ z / len(z) for z in centred) / 2  # [d, d]
    sd = np.sqrt(np.diag(C)) + 1e-8
    # Entries are scaled first, so that the floor of the variances does not depend on their units.
    variances, axes = np.linalg.eigh(C / np.outer(sd, sd))
    W = axes / np.sqrt(np.maximum(variances, 0) + 1e-6) / sd[:, None]  # [d, d]
    return [np.clip(z @ W, -10, 10).astype(np.float32) for z in centred]


def encode(source: np.ndarray, target: np.ndarray, moments: tuple, encoder: str) -> list:
    """z = f_phi(s) of the source's states [N_s, d] and of the target's [N_t, d]"""
    # DIFF 1: the paper's "shared latent encoder" is not described; the released code has none.
    if encoder == "whitened":
        return whiten(source, target)
    if encoder == "raw":
        return [np.asarray(states, np.float32) for states in (source, target)]
    return [normalise(source, *moments[0]), normalise(target, *moments[1])]


def bandwidth(z_s: np.ndarray, z_t: np.ndarray, rule: str | float, limit: int = 5000) -> float:
    """g of k(x, y) = exp(-g |x - y|^2), the inverse of a squared bandwidth, from both domains."""
    if not isinstance(rule, str):
        return float(rule)
    if rule == "invdim":
        return 1 / z_t.shape[1]
    # DIFF 2: the paper only says "RBF kernel". A narrow kernel saturates: between a source and a
    # target fragment it is 0 wherever they are, so that only the fragment's own spread is left
    # in the score. A wide kernel keeps falling with distance.
    domains = [z_t] if rule == "median" else [z_s, z_t]
    # Equally many states of each domain, because the source has 200 times more.
    n = min([limit // len(domains), *map(len, domains)])
    some = [z[np.linspace(0, len(z) - 1, n).astype(int)] for z in domains]
    states = torch.from_numpy(np.concatenate(some)).double()
    median = torch.pdist(states).square_().median().item() if len(states) > 1 else 0.0
    if median == 0:
        raise UserError("half of the states are equal; give --mmd-gamma a number")
    return (0.1 if rule == "wide" else 1.0) / median


def fragment_lengths(lengths: np.ndarray, K: int, short: bool = False) -> np.ndarray:
    """l_i of the fragment that begins at each step, [N_s or N_t]; 0 where none begins."""
    # DIFF 4, 5: one fragment of K states per step, overlapping.
    steps = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    l_i = np.minimum(K, np.repeat(lengths, lengths) - steps)
    # DIFF 6: no fragment is shorter, unless its whole episode is. The biased MMD of Eq. (15)
    # contains k(z, z) = 1 once for each of the l_i states, so a short fragment scores high
    # wherever it lies, and the gate would drop every fall of the source robot.
    return l_i if short else np.where((l_i == K) | (steps == 0), l_i, 0)


def coverage(gate: np.ndarray, l_i: np.ndarray) -> np.ndarray:
    """How many kept fragments contain each transition, [N_s]. G(I) is where that is above 0."""
    # DIFF 7: the paper retains every transition within a kept fragment; released: its first.
    begin = np.flatnonzero(gate)
    change = np.zeros(len(gate) + 1, int)
    change[begin] = 1
    np.subtract.at(change, begin + l_i[begin], 1)
    return np.cumsum(change[:-1])


# ------------------------------------------------------------------------------------- the gate


def squared_mmd(S: np.ndarray, T: np.ndarray, g: float) -> float:
    """MMD^2 of a source fragment's states S [l, d] and a target fragment's T [l', d], biased."""
    from scipy.spatial.distance import cdist  # here, because it takes a while to import

    def mean_kernel(X, Y):
        return np.exp(-g * cdist(X, Y, "sqeuclidean")).mean()

    # Eq. (15) [mmd_dist]
    return max(mean_kernel(S, S) - 2 * mean_kernel(S, T) + mean_kernel(T, T), 0.0)


def fragment_scores(
    source: list[np.ndarray], target: list[np.ndarray], g: float, reduce="mean", square=False
) -> np.ndarray:
    """d_i^m of every source fragment [l_i, d] against all target fragments."""
    scores = []
    for S in progress_bar(source, desc="MMD, dense", unit="fragment"):
        distances = np.array([squared_mmd(S, T, g) for T in target])
        # DIFF 3: the mean of MMD, as in the paper; released: the minimum of MMD^2.
        distances = distances if square else np.sqrt(distances)
        # Eq. (16) [mmd_cost]: expectation over the target's fragments
        scores.append(distances.mean() if reduce == "mean" else distances.min())
    return np.array(scores)


def keep_smallest(d: np.ndarray, n_keep: int) -> np.ndarray:
    """Gate I [N_s]: exactly the n_keep smallest scores, the first of equals. NaN: no fragment."""
    total = np.isfinite(d).sum()
    if not 1 <= n_keep <= total:
        raise UserError(f"cannot keep {n_keep} of {total} fragments; change --xi, or use more data")
    # Eq. (10) [gate-subproblem]: its optimum is a threshold on d (Prop. prop:optimal-gate)
    # DIFF 8: ties are broken by position, so that the number is exact; released: a percentile.
    gate = np.zeros(len(d), bool)
    gate[np.argsort(d, kind="stable")[:n_keep]] = True  # NaN come last
    return gate


def keep_fragments(d: np.ndarray, failed: np.ndarray, xi: float) -> np.ndarray:
    """Gate I [N_s]: the share xi of the fragments that end in a failure, and of all others."""
    # DIFF 77: a falling robot is far from all data of a walking one, whatever the dynamics. With
    # one threshold for all, the gate keeps no fall and the critics never learn what one costs.
    gate = np.zeros(len(d), bool)
    for group in (~failed, failed):
        scores = np.where(group, d, np.nan)
        n_keep = math.floor(xi * np.isfinite(scores).sum() + 1e-6)  # 0.29 * 100 is 28.999...
        gate |= keep_smallest(scores, n_keep) if n_keep else False
    return gate if gate.any() else keep_smallest(d, 0)  # always raises, with advice


def score_and_gate(source: Dataset, target: Dataset, moments: tuple, args: GateArgs, device):
    """Stage 1: scores d^m [N_s], gate I [N_s], and what to report of them."""
    z_s, z_t = encode(source.observations, target.observations, moments, args.encoder)
    l_s = fragment_lengths(source.lengths, args.K, args.short_fragments)
    l_t = fragment_lengths(target.lengths, args.K, args.short_fragments)
    g = bandwidth(z_s, z_t, args.mmd_gamma)
    options = {"reduce": args.mmd_reduce, "square": args.mmd_squared}
    if args.dense:
        fragments = [z_s[i : i + l_s[i]] for i in np.flatnonzero(l_s)]
        used = (l_t > 0) & (target.steps % args.mmd_target_stride == 0)
        others = [z_t[i : i + l_t[i]] for i in np.flatnonzero(used)]
        d_m = np.full(len(source), np.nan, np.float32)
        d_m[l_s > 0] = fragment_scores(fragments, others, g, **options)
        report = {}
    else:
        options |= {"stride": args.mmd_target_stride, "device": device, "bar": "MMD"}
        domains = (z_s, source.lengths, l_s), (z_t, target.lengths, l_t)
        d_m, self_term = fast_mmd.fragment_scores(*domains, args.K, g, **options)
        report = gate_report.nearness(d_m, self_term, z_s, z_t, g, args.K)
    failed = np.zeros(len(source), bool)
    if args.failures == "apart":
        begin = np.flatnonzero(l_s)
        failed[begin] = source.terminals[begin + l_s[begin] - 1]  # at the fragment's last step
    gate = keep_fragments(d_m, failed, args.xi)
    others = gate & ~failed  # none, if every kept fragment ends in a failure
    report |= {"gamma": g, "threshold": float(d_m[others if others.any() else gate].max())}
    if args.encoder != "raw":
        report["clipped"] = float((np.abs(z_s) == 10).mean())
    return d_m, gate, report


# ----------------------------------------------------------------------------------- the weights


def transition_features(data: Dataset, rows, reward: bool = True, moments=None) -> np.ndarray:
    """x(u) = [s, a, r, s'] [n, d], with states normalised by moments (mu, sd) if there are any."""
    # DIFF 75: the paper normalises states "for all TAF-DT experiments"; released: raw ones.
    s, s_next = data.observations[rows], data.next_observations[rows]
    if moments is not None:
        s, s_next = normalise(s, *moments), normalise(s_next, *moments)
    # DIFF 13: with the reward, as the paper and the released code have it; OTDF: without.
    r = [data.rewards[rows, None]] if reward else []
    return np.concatenate([s, data.actions[rows], *r, s_next], 1)


def ground_cost(x: np.ndarray, y: np.ndarray, cost: str = "cosine") -> np.ndarray:
    """C [n, N_t] between transition features x [n, d] and y [N_t, d], in float64."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    if cost == "cosine":
        # Eq. (17) [ot-cos-cost]
        # DIFF 12: eps_C keeps the norms above 1e-8; a zero vector has cost 1 to everything.
        x_norm = np.maximum(np.linalg.norm(x, axis=1), 1e-8)
        y_norm = np.maximum(np.linalg.norm(y, axis=1), 1e-8)
        return np.maximum(1 - (x @ y.T) / np.outer(x_norm, y_norm), 0.0)
    from scipy.spatial.distance import cdist

    return cdist(x, y, cost)


def row_costs(C: np.ndarray, reg: float = 0.1) -> tuple[np.ndarray, dict]:
    """Cost c_i [n] of each row of the entropic plan between uniform weights, by POT's Sinkhorn."""
    import ot  # here, because it takes half as long to import as torch

    # DIFF 11: the regulariser 0.1 on C / max C is the released code's; the paper gives none.
    C_max = max(C.max(), 1e-12)
    p, q = np.full(len(C), 1 / len(C)), np.full(C.shape[1], 1 / C.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # convergence is checked below
        P, log = ot.sinkhorn(p, q, C / C_max, reg, numItermax=10_000, stopThr=1e-9, log=True)
    error = float(np.abs(P.sum(0) - q).sum())
    if not error < 1e-6:
        raise UserError(f"OT did not converge: marginal error {error:.1e}; raise --ot-reg")
    # Eq. (18) [emp-ot-cost]: sum_j pi_ij C_ij / sum_j pi_ij
    return (P * C).sum(1) / P.sum(1), {"marginal_error": error, "iterations": int(log["niter"])}


def chunked_row_costs(x, y, cost: str, reg: float, chunk: int) -> tuple[np.ndarray, dict]:
    """The same from shuffled chunks of rows, each its own problem, and the worst report."""
    # DIFF 9: one problem, as in the paper; released: shuffled chunks of 10,000 rows.
    order = np.random.default_rng(0).permutation(len(x))
    c, worst = np.empty(len(x)), {"marginal_error": 0.0, "iterations": 0}
    for start in progress_bar(range(0, len(x), chunk), desc="OT", unit="chunk"):
        rows = order[start : start + chunk]
        c[rows], found = row_costs(ground_cost(x[rows], y, cost), reg)
        worst = {key: max(value, worst[key]) for key, value in found.items()}
    return c, worst


def calibrate(c: np.ndarray) -> np.ndarray:
    """c~ in [0, 1]; all 0 where every cost is the same."""
    # Eq. (19) [ot-cost-calib-main], Eq. (37) [norm-ot-dev]: by the smallest cost and the range
    return (c - c.min()) / (c.max() - c.min() + 1e-8)


def gibbs_weights(c: np.ndarray, eta_w: float) -> tuple[np.ndarray, np.ndarray]:
    """omega_i in [exp(-eta_w), 1] and w_i = omega_i / sum omega, for calibrated costs c."""
    # Eq. (20) [ot-dist]: feasibility score
    d_w = -c
    # Eq. (38) [exp-weight]
    omega = np.exp(eta_w * d_w)
    # Eq. (21) [ot-weight], Eq. (12) [gibbs-weights]: u_I is uniform
    return omega, omega / omega.sum()


def weigh(source, target, retained: np.ndarray, moments: tuple, args: GateArgs, device):
    """Stage 2: calibrated costs c~ and raw ones c^ [N_s], eta_w, and what to report of them."""
    # DIFF 10, 15: OT and calibration on G(I), as in the paper; released: on all, then gated.
    support = np.flatnonzero(retained) if args.ot_support == "retained" else np.arange(len(source))
    of_source, of_target = moments if args.ot_states == "normalised" else (None, None)
    x = transition_features(source, support, args.ot_reward, of_source)  # [n, d]
    y = transition_features(target, slice(None), args.ot_reward, of_target)  # [N_t, d]
    if args.ot_chunk or args.dense:
        c, report = chunked_row_costs(x, y, args.ot_cost, args.ot_reg, args.ot_chunk or len(x))
    else:
        options = {"device": device, "bar": "OT"}
        c, report = fast_ot.row_costs(x, y, args.ot_cost, args.ot_reg, args.ot_tol, **options)
    c_hat, c_tilde = np.full((2, len(source)), np.nan, np.float32)
    c_hat[support], c_tilde[support] = c, calibrate(c)
    kept = c_tilde[retained].astype(np.float64)
    # DIFF 14: eta_w is a free symbol in the paper; released: 1.
    eta_w = args.eta_w if args.ess is None else gate_report.temperature(kept, args.ess)
    report |= {"eta_w": eta_w, "s_I": float(np.ptp(c) + 1e-8)}
    report |= {f"c_tilde_{p}": float(np.percentile(kept, p)) for p in (5, 50, 95)}
    return c_hat, c_tilde, report


# ---------------------------------------------------------------------------------- all together


def gate_and_weights(source: Dataset, target: Dataset, args: GateArgs, device) -> tuple:
    """Both stages: the arrays of the result, what to report of them, and what each stage cost."""
    stages: dict = {}
    lap = runs.stopwatch(stages, device)
    N_s = len(source)
    states = [data.observations for data in (source, target)]
    own = [(s.mean(0, dtype=np.float64), s.std(0, dtype=np.float64)) for s in states]
    moments = (own[1], own[1]) if args.state_norm == "target" else tuple(own)

    # Eq. (13) [sequential-surrogate-program]: first the gate, then the weights on what it retains
    l_i = fragment_lengths(source.lengths, args.K, args.short_fragments)
    gate, d_m, report = l_i > 0, np.full(N_s, np.nan, np.float32), {}
    if args.filter in ("both", "mmd"):
        d_m, gate, report = score_and_gate(source, target, moments, args, device)
        lap("mmd")
    retained = coverage(gate, l_i) > 0
    # DIFF 48: "MMD only" and "OT only" leave one stage out and change nothing else.
    c_hat = c_tilde = np.full(N_s, np.nan, np.float32)
    omega = np.where(retained, np.float32(1), np.float32(np.nan))
    w = np.where(retained, np.float32(1 / retained.sum()), np.float32(np.nan))
    if args.filter in ("both", "ot"):
        c_hat, c_tilde, found = weigh(source, target, retained, moments, args, device)
        omega = gibbs_weights(c_tilde.astype(np.float64), found["eta_w"])[0].astype(np.float32)
        w_kept = gibbs_weights(c_tilde[retained].astype(np.float64), found["eta_w"])[1]
        w[retained] = w_kept
        s_I = found.pop("s_I")
        terms = gate_report.radii(d_m[gate], c_hat[retained], w_kept, found["eta_w"], s_I)
        # Without a gate there is no Delta_m, nor anything that rests on it.
        report |= found | {key: x for key, x in terms.items() if not math.isnan(x)}
        lap("ot")
    report |= gate_report.retained(gate, retained, w, source.terminals)
    (mu_s, sd_s), (mu, sd) = moments
    arrays = {"d_m": d_m, "gate": gate, "retained": retained, "c_hat": c_hat, "c_tilde": c_tilde}
    arrays |= {"omega": omega, "w": w, "mu": mu, "sd": sd, "mu_source": mu_s, "sd_source": sd_s}
    return arrays, report, stages


def preprocess(task: TaskArgs, gate: GateArgs, source: Dataset, target: Dataset, out: Path, device):
    """Gate and weights of a pair: the result's arrays, `meta` as a dict, and the `path`.

    The same data and flags find the file again. If several processes ask at once, one computes
    and the others wait. A damaged file is computed again.
    """
    path = gate_files.path_of(out, task, gate, VERSION, source, target)
    with only_one(path):
        if found := gate_files.read(path):
            runs.say(f"gate and weights: found in {path}")
            return found
        runs.say(f"gate and weights: {len(source):,} source transitions")
        gate_files.refuse_unusable(gate, source=source, target=target)
        arrays, report, stages = gate_and_weights(source, target, gate, device)
        meta = {"args": runs.flatten(gate) | runs.flatten(task), "report": report, "stages": stages}
        return gate_files.write(path, arrays, meta, source, target)


def for_training(args, source: Dataset, target: Dataset) -> dict:
    """Gate and weights for a training script's arguments, kept in its folder `preprocess`."""
    gate = args.gate if args.beta else dataclasses.replace(args.gate, filter="none")
    check(gate)
    out = args.run.out / "preprocess"
    return preprocess(args.task, gate, source, target, out, args.run.device)


def main() -> None:
    args = runs.read_args(Args, defaults, __doc__)
    check_folder(args.out, filled="*.npz")
    check(args.gate)
    args = runs.replace(args, device=str(runs.pick_device(args.device)))
    with runs.signals():
        source, target = load_task(args.task)
        result = preprocess(args.task, args.gate, source, target, args.out, args.device)
    gate_report.show(result)


if __name__ == "__main__":
    with one_line_errors():
        main()
