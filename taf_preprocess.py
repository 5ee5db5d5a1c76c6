"""TAF-DT, stages 1 and 2: which source fragments may be stitched (MMD gate) and how much each counts (OT weights).

    python taf_preprocess.py --env hopper --shift morph --source medium --target medium
    python taf_preprocess.py --env hopper --shift morph --source-size 50000           a quick look
    python taf_preprocess.py --env ant --shift gravity --preset released              as the authors' released code

Equation numbers and labels: "Target-Aligned Fusion for Decision-Sequence Learning under Dynamics Shift", TPAMI
manuscript (taf_tpami.tex), numbered equations counted through the appendix. `DIFF n` is row n of the table of
differences between the paper's text, the released code and this file.

    1  z = f_phi(s)                                       `normalise`, `encode`
    2  d_i^m: mean MMD of source fragment i to the target's fragments; keep the floor(xi N) smallest
       G(I): every transition inside a kept fragment is retained
    3  one entropic OT problem between the retained transitions and the target's; c_i: cost of row i of its plan
    4  c~_i: c_i on [0, 1];  w_i proportional to omega_i = exp(-eta_w c~_i)
    5  Delta_m, Delta_w and the surrogate: the data terms of the bound

N, M: source and target transitions; n: retained ones; K: fragment length; d: numbers in a state or transition feature.
The result is one .npz, found again by the content of its inputs, and a figure beside it. Ablations: --filter mmd is
"MMD only", --filter ot is "OT only", --ot-cost, --no-ot-reward, --xi; each changes one factor.
"""

import dataclasses
import hashlib
import json
import math
import sys
import time
import warnings
import zipfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import matplotlib
import numpy as np
import ot
import torch

from dynashift.datasets import DataArgs, Dataset, load_task
from dynashift.envs import ANT_PADDING, ROBOTS
from dynashift.errors import UserError, one_line_errors
from dynashift.files import atomic, check_folder, only_one, progress_bar
from dynashift.runs import pick_device, read_args, signals, stopwatch, versions

VERSION = 3  # of the numbers: raise it when the same inputs give other ones, and old files are not found any more

# --------------------------------------------------------------------------------------------- arguments

# Context and fragment length K, by task: paper, "Transformer context length".
PAPER_K = {"morph": dict(halfcheetah=20, hopper=5, walker2d=5, ant=5)}
PAPER_K["kinematic"] = PAPER_K["morph"]
PAPER_K["none"] = PAPER_K["morph"]  # not in the paper
PAPER_K["gravity"] = dict(halfcheetah=10, hopper=20, walker2d=20, ant=5)

# What `--preset` sets; a flag given beside it wins.
PRESETS = {"paper": {}, "released": dict(encoder="raw", state_norm="per-domain", mmd_gamma="invdim", mmd_reduce="min")}
PRESETS["released"] |= dict(mmd_squared=True, short_fragments=True, failures="together")
PRESETS["released"] |= dict(ot_states="raw", ot_support="all", ot_chunk=10_000)


@dataclass(frozen=True)
class Args(DataArgs):
    # Flags of the data are those of all scripts, datasets.DataArgs; here come the others.
    preset: Literal["paper", "released"] = "paper"
    """the paper's text, or those values in which the authors' released code differs from it"""

    # the run
    out: Path = Path("runs/preprocess")
    """folder of the results"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one"""

    # gate and weights
    filter: Literal["both", "mmd", "ot", "none"] = "both"
    """gate and weights, one without the other, or all source data alike; ablation, Table tab:data_filter_ablation"""
    xi: float = 0.5
    """keep ratio xi, Prop. prop:optimal-gate; 50 % in Table tab:hyperparameters"""
    K: int | None = None
    """fragment length l_i, Eq. (15); unless given, the task's context length K of Table tab:hyperparameters"""
    encoder: Literal["normalised", "raw"] = "normalised"
    """f_phi of Eq. (15): the identity on normalised and clipped states, or on raw ones"""
    state_norm: Literal["target", "per-domain"] = "target"
    """statistics mu, sigma of Eq. (43): the target's for both, or each domain's own"""
    mmd_gamma: Literal["wide", "pooled", "median", "invdim"] | float = "wide"
    """gamma of k(x, y) = exp(-gamma |x - y|^2), Eq. (15). pooled: 1 / median squared distance of source and target
    states together; wide: a tenth of that; median: 1 / median over target states alone; invdim: 1 / d; or a number"""
    short_fragments: bool = False
    """let fragments also begin in the last K - 1 steps of an episode, where they are shorter (released code)"""
    failures: Literal["apart", "together"] = "apart"
    """fragments that end in a failure: keep the share xi of them as of all others, or rank them with the others"""
    mmd_reduce: Literal["mean", "min"] = "mean"
    """how Eq. (16) reduces over target fragments"""
    mmd_squared: bool = False
    """MMD^2 instead of MMD in Eq. (16)"""
    mmd_target_stride: int = 1
    """use every n-th target fragment of an episode in Eq. (16); 1 is exact"""
    ot_cost: Literal["cosine", "euclidean", "sqeuclidean"] = "cosine"
    """ground cost C, Eq. (17); ablation in Table tab:ot_dist"""
    ot_reward: bool = True
    """r in x(u) = [s, a, r, s'], Eq. (17); --no-ot-reward is the ablation of Table tab:ot_r_ablation"""
    ot_states: Literal["normalised", "raw"] = "normalised"
    """s and s' in x(u), Eq. (17): normalised as everywhere else, or as they were recorded (released code, OTDF)"""
    ot_reg: float = 0.1
    """entropic regulariser of the reference problem of Eq. (18), on C / max C"""
    ot_chunk: int | None = None
    """solve shuffled chunks of that many rows with POT instead of one problem"""
    ot_support: Literal["retained", "all"] = "retained"
    """the rows of the OT problem and of the calibration, Eq. (19): those that the gate retains, or all"""
    ot_tol: float = 1e-5
    """accepted L1 error of the plan's marginal on the target; float32 may end near 1e-6"""
    eta_w: float = 1.0
    """inverse temperature eta_w, Eqs. (21) and (38); not in the paper's tables; the released code's value"""
    ess: float | None = None
    """instead of --eta-w: choose eta_w so that the weights' effective sample size is this share of G(I), e.g. 0.5"""


def with_preset(preset: str, **changes) -> Args:
    return Args(**{"preset": preset, **PRESETS[preset], **changes})


def defaults(args: Args) -> Args:
    """What Args would be for this task and preset if nothing else were given."""
    K = PAPER_K[args.shift][args.env]
    if args.preset == "released" and (args.shift, args.env) == ("gravity", "hopper"):
        K = 5 if Path(args.source).stem == "medium-expert" else K  # three pairs have files of their own there
    return with_preset(args.preset, K=K)


def resolve(args: Args) -> Args:
    """Fill in what depends on the task, and refuse what cannot be."""
    check_folder(args.out)
    if not 0 < args.xi <= 1:
        raise UserError(f"--xi is the share of fragments to keep, above 0 and at most 1, not {args.xi}")
    positive = {"--K": args.K, "--mmd-target-stride": args.mmd_target_stride, "--ot-chunk": args.ot_chunk}
    positive |= {"--source-size": args.source_size, "--ot-reg": args.ot_reg, "--ot-tol": args.ot_tol}
    positive |= {} if isinstance(args.mmd_gamma, str) else {"--mmd-gamma": args.mmd_gamma}
    for flag, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag} must be a positive number, not {value}")
    if not 0 <= args.eta_w < math.inf:
        raise UserError(f"--eta-w must be a number from 0 up, not {args.eta_w}")
    if args.ess is not None and not 0 < args.ess <= 1:
        raise UserError(f"--ess is a share of the retained transitions, above 0 and at most 1, not {args.ess}")
    K, gamma = args.K or defaults(args).K, args.mmd_gamma
    if args.preset == "released" and gamma == "invdim" and args.env == "ant":
        # DIFF 51: paper silent; released 111 numbers, 84 zero; here 27
        gamma = 1 / (ROBOTS[args.env].obs_dim + ANT_PADDING)
    return dataclasses.replace(args, K=K, mmd_gamma=gamma, device=str(pick_device(args.device)))


# ------------------------------------------------------------------------------------- blocks and progress


def in_blocks(f, n: int, rows: int, device, label: str | None):
    """f(slice) for slices of `rows` out of n, in order, with a bar if it has a label.

    On a CPU one thread a core, each with its own block: torch's own threads meet after every operation, which costs
    more than the operation when the block fits into a core's cache, as it should. A GPU gets one block at a time.
    """
    slices = [slice(i, min(i + rows, n)) for i in range(0, n, rows)]
    workers = torch.get_num_threads() if torch.device(device).type == "cpu" else 1
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    ahead = 4 * workers  # few: Python ends after all that were begun, also after Ctrl-C
    try:
        begun = deque(pool.submit(f, rows) for rows in slices[:ahead])
        for i, rows in enumerate(progress_bar(slices, desc=label, unit="block", disable=label is None)):
            yield rows, begun.popleft().result()
            begun.extend(pool.submit(f, rows) for rows in slices[i + ahead : i + ahead + 1])
    finally:
        pool.shutdown(cancel_futures=True)


# ----------------------------------------------------------------------------------- states and fragments


def statistics(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return states.mean(0, dtype=np.float64), states.std(0, dtype=np.float64)


def normalise(states, mu, sd, clip: float = 10.0) -> np.ndarray:
    """In a dimension where the data of mu and sd are constant, a state is 0 where it agrees and +-clip where not."""
    # Eq. (43) [unlabelled, "State normalization"]: with the target's statistics for both domains
    # DIFF 44: paper no clipping; released per-domain statistics; here clipped, as under kinematic shift a joint hardly
    # moves in the target (sd = 0.003) and source states would lie 400 sd away
    return np.clip((states - mu) / (sd + 1e-8), -clip, clip).astype(np.float32)


def encode(states, mu, sd, encoder: str) -> np.ndarray:
    """z = f_phi(s) [N, d]. A trained encoder would stand here: any function of the states alone, same for both."""
    # DIFF 1: paper "shared latent encoder", nothing said of it; released none, raw states; here the normalised states
    return normalise(states, mu, sd) if encoder == "normalised" else np.asarray(states, np.float32)


def bandwidth(z_s: np.ndarray, z_t: np.ndarray, rule, limit: int = 5000) -> float:
    """gamma of k(x, y) = exp(-gamma |x - y|^2), from source and target states."""
    if not isinstance(rule, str):
        return float(rule)
    if rule == "invdim":
        return 1 / z_t.shape[1]
    # DIFF 2: paper "RBF kernel"; released 1 / d on raw states; here a tenth of 1 / median of both domains' states.
    # A narrow kernel saturates: it is 0 between a source and a target fragment wherever they are, and the score is
    # left with the fragment's own spread. A wide one goes on to fall with distance.
    domains = [z_t] if rule == "median" else [z_s, z_t]
    # As many states of each domain, because the source has 200 times more; 5,000 in all have 12 million pairs.
    n = min([limit // len(domains), *map(len, domains)])
    some = [z[np.linspace(0, len(z) - 1, n).astype(int)] for z in domains]
    states = torch.from_numpy(np.concatenate(some)).double()
    median = torch.pdist(states).square_().median().item() if len(states) > 1 else 0.0
    if median == 0:
        raise UserError("half of the states are equal, so no bandwidth follows from them; give --mmd-gamma a number")
    return (0.1 if rule == "wide" else 1.0) / median


def pad_episodes(lengths: np.ndarray, K: int, multiple: int = 1) -> tuple[np.ndarray, int]:
    """Place of every state when each episode is followed by at least K - 1 empty places, and the number of places.

    With that, K consecutive places never reach into the next episode, and a fragment at an episode's end is short.
    """
    padded = -(-(lengths + K - 1) // multiple) * multiple
    shift = np.cumsum(padded) - padded - (np.cumsum(lengths) - lengths)
    return np.arange(lengths.sum()) + np.repeat(shift, lengths), int(padded.sum())


def fragment_lengths(lengths: np.ndarray, K: int, short: bool = False) -> np.ndarray:
    """l_i of the fragment that begins at each step, [N]; 0 where none begins."""
    # DIFF 4, 5: paper silent on overlap, K or K + 1 states; released and here one fragment of K states per step
    steps = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    l_i = np.minimum(K, np.repeat(lengths, lengths) - steps)
    # DIFF 6: paper silent on ends; released shorter fragments with their true count; here none, unless the whole
    # episode is shorter than K. The biased MMD of Eq. (15) contains k(z, z) = 1 once for each of the l_i states, so a
    # short fragment scores high wherever it lies, and the gate would drop every fall of the source robot.
    return l_i if short else np.where((l_i == K) | (steps == 0), l_i, 0)


def retained_support(gate: np.ndarray, l_i: np.ndarray) -> np.ndarray:
    """G(I) [N]: the transitions inside kept fragments, which begin where `gate` is true and have l_i steps."""
    # DIFF 7: paper "u a transition within that fragment"; released: what begins a kept fragment; here as the paper
    begin = np.flatnonzero(gate)
    change = np.zeros(len(gate) + 1, int)
    change[begin] = 1
    np.subtract.at(change, begin + l_i[begin], 1)
    return np.cumsum(change[:-1]) > 0


# --------------------------------------------------------------------------------------------- MMD scores


def window_sums(x: torch.Tensor, K: int, dim: int) -> torch.Tensor:
    """Sums of K consecutive entries by doubling: log2 K additions of positive numbers, no cancellation as in a
    difference of cumulative sums."""
    w, width = x, 1
    for bit in bin(K)[3:]:
        size = w.shape[dim] - width
        w = w.narrow(dim, 0, size) + w.narrow(dim, width, size)
        width *= 2
        if bit == "1":
            size = w.shape[dim] - 1
            w = w.narrow(dim, 0, size).add_(x.narrow(dim, width, size))
            width += 1
    return w


def padded_states(z, lengths, l_i, K, g, center, multiple, device, dtype, label):
    """One domain for `mmd_scores`, by place (see `pad_episodes`; P places):

    left, right  [P, d + 2]: -g |x - y|^2 is ONE product, left(x) . right(y) = [2 g x, -g |x|^2, 1] . [y, 1, -g |y|^2].
                 An empty place has |x|^2 huge: its kernel values are exactly 0, it adds nothing to any sum
    count        [P], l_i of the fragment that begins there, 1 where none does
    self_term    [P], mean k(S_i, S_i)
    at           [N], the places of the states
    """
    places, size = pad_episodes(lengths, K, multiple)
    at, x = torch.from_numpy(places).to(device), torch.from_numpy(z - center).to(device)  # float64: rounded once, below
    left, right = torch.zeros(2, size, z.shape[1] + 2, dtype=dtype, device=device)
    left[:, -2:], right[:, -2:] = torch.tensor([[[-1e9, 1.0]], [[1.0, -1e9]]], dtype=dtype, device=device)
    norm, one = -g * x.square().sum(1, keepdim=True), x.new_ones(len(x), 1)
    left[at] = torch.cat([2 * g * x, norm, one], 1).to(dtype)
    right[at] = torch.cat([x, one, norm], 1).to(dtype)
    count = torch.ones(size, dtype=dtype, device=device)
    count[at] = torch.from_numpy(np.maximum(l_i, 1)).to(device, dtype)

    def self_terms(rows):
        inside = torch.arange(rows.start, rows.stop, device=device).clamp_(max=size - K)
        inside = inside[:, None] + torch.arange(K, device=device)  # [B, K]
        return (left[inside] @ right[inside].mT).exp2_().sum((1, 2)) / count[rows].square()

    self_term = torch.cat([terms for _, terms in in_blocks(self_terms, size, 2048, device, label)])
    return left, right, count, self_term, at


def mmd_scores(
    z_s, len_s, z_t, len_t, K, gamma, reduce="mean", square=False, short=False, stride=1,
    device="cpu", dtype=torch.float32, bar=None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """d^m [N] of every source fragment, and its self term mean k(S_i, S_i) [N]; NaN where no fragment begins.

    From states z_s [N, d], z_t [M, d] and episode lengths. All pairs of a few hundred source and target states at a
    time: one matrix product, one exponential, sums over K x K windows, which are the cross terms of all fragments.
    """
    for name, longest in (("source", max(len_s)), ("target", max(len_t))):
        if longest < K:
            raise UserError(f"K = {K} is longer than every {name} episode (the longest has {longest}); lower --K")
    g, center, note = gamma / math.log(2), z_t.mean(0, dtype=np.float64), bar and f"{bar}, self terms"
    l_s, l_t = (fragment_lengths(lengths, K, short) for lengths in (len_s, len_t))
    left, _, count_s, self_s, at_s = padded_states(z_s, len_s, l_s, K, g, center, 1, device, dtype, note)
    _, right, count_t, self_t, at_t = padded_states(z_t, len_t, l_t, K, g, center, stride, device, dtype, note)
    right = right.T.contiguous()  # [d + 2, M']
    real = torch.zeros(right.shape[1], dtype=torch.bool, device=device)
    real[at_t[torch.from_numpy(l_t > 0).to(device)]] = True
    self_t[~real], count_t[~real] = 4.0, torch.inf  # MMD^2 above all others: never the minimum, no weight in the mean
    self_t, count_t, real = self_t[::stride], count_t[::stride], real[::stride]
    weight, inverse_t = real.to(dtype) / real.sum(), 1 / (K * count_t)
    B, W = (512, 512) if torch.device(device).type == "cpu" else (8192, 2048)  # a core's cache; a GPU's memory
    W = -(-W // stride) * stride

    def scores(rows: slice) -> torch.Tensor:
        total = torch.full((rows.stop - rows.start,), 0.0 if reduce == "mean" else torch.inf, device=device).double()
        source = left[rows.start : rows.stop + K - 1]
        short = (count_s[rows] < K).nonzero()[:, 0]  # few: corrected, not divided by with all the others
        ratio = K / count_s[rows][short, None]
        for start in range(0, right.shape[1] - K + 1, W):
            stop = min(start + W, right.shape[1] - K + 1)
            cols = slice(start // stride, -(-stop // stride))
            kernel = (source @ right[:, start : stop + K - 1]).exp2_()  # [B + K - 1, W + K - 1]
            cross = window_sums(window_sums(kernel, K, 0), K, 1)[:, ::stride]  # [B, W / stride]
            # Eq. (15) [mmd_dist]: biased MMD^2 with true counts
            cross[short] *= ratio
            mmd = torch.addcmul(self_t[cols], cross, inverse_t[cols], value=-2)
            # DIFF 3: paper mean of MMD; released minimum of MMD^2; here as the paper, the other by flags
            mmd = mmd.add_(self_s[rows, None]).clamp_(min=1e-14)  # not 0, on which some vector square roots are slow
            mmd = mmd if square else mmd.sqrt_()
            # Eq. (16) [mmd_cost]: expectation over the target's fragments
            total = total + mmd @ weight[cols] if reduce == "mean" else torch.minimum(total, mmd.amin(1))
        return total

    # No fragment begins in the last K - 1 places, which are empty.
    d = torch.cat([part for _, part in in_blocks(scores, len(left) - K + 1, B, device, bar)])
    return tuple(np.where(l_s > 0, x[at_s].float().cpu().numpy(), np.float32(np.nan)) for x in (d, self_s))


def nearness(d_m, self_term, z_s, z_t, gamma: float, K: int, size: int = 1000) -> dict:
    """Does the score follow nearness? On `size` random source fragments; None where a correlation is undefined.

    A correlation with the fragment's own self term near 1 says that the kernel has saturated: the gate then ranks
    fragments by how little they move. A good gate's score follows the distance to the nearest target states.
    """
    begin = np.flatnonzero(np.isfinite(d_m))
    begin = begin[np.random.default_rng(0).integers(len(begin), size=size)]
    inside = np.minimum(begin[:, None] + np.arange(K), len(z_s) - 1)  # [size, K]
    distance = torch.cdist(torch.from_numpy(z_s[inside]), torch.from_numpy(z_t))  # [size, K, M]
    nearest = distance.amin(2).mean(1).numpy()  # [size], mean over the fragment of the distance to the nearest state
    ranks = [np.argsort(np.argsort(x)) for x in (d_m[begin], nearest)]

    def correlation(x, y):
        return float(np.corrcoef(x, y)[0, 1]) if np.std(x) and np.std(y) else None

    return {
        "mean_cross_kernel": distance[:, 0].square().mul_(-gamma).exp_().mean().item(),
        "corr_score_self_term": correlation(d_m[begin], self_term[begin]),
        "rank_corr_score_distance": correlation(*ranks),
    }


def keep_mask(d: np.ndarray, n_keep: int) -> np.ndarray:
    """Gate I [N]: exactly the n_keep smallest scores; among equal ones, the first. Where there is none (NaN), false."""
    N = np.isfinite(d).sum()
    if not 1 <= n_keep <= N:
        raise UserError(f"cannot keep {n_keep} of {N} source fragments; change --xi, or use more source data")
    # Eq. (10) [gate-subproblem]: its optimum is a threshold on d (Prop. prop:optimal-gate)
    # DIFF 8: paper arbitrary on ties; released a percentile, so not the exact number; here the number, stable sort
    gate = np.zeros(len(d), bool)
    gate[np.argsort(d, kind="stable")[:n_keep]] = True  # NaN come last
    return gate


def keep_fragments(d: np.ndarray, failed: np.ndarray, xi: float) -> np.ndarray:
    """Gate I [N] for scores d: the share xi of all fragments, and of those that end in a failure (`failed`)."""
    # DIFF 77: paper and released one threshold for all; here a failure has one of its own. The state of a robot that
    # falls is far from all data of a robot that walks, whatever the dynamics: of one ranking, the gate keeps no fall,
    # and V, Q and the critics never learn what a fall costs.
    gate = np.zeros(len(d), bool)
    for group in (~failed, failed):
        scores = np.where(group, d, np.nan)
        n_keep = math.floor(xi * np.isfinite(scores).sum() + 1e-6)  # the 1e-6 for 0.29 * 100 = 28.999...
        if n_keep or group is not failed:
            gate |= keep_mask(scores, n_keep)
    return gate


# ------------------------------------------------------------------------------------- optimal transport


def features(data: Dataset, rows, reward: bool = True, moments: tuple | None = None) -> np.ndarray:
    """x(u) = [s, a, r, s'] [n, d]; states normalised with `moments` mu and sd, or raw without them."""
    # DIFF 75: paper normalised states "for all TAF-DT experiments"; released raw; here as the paper
    s, s_next = data.observations[rows], data.next_observations[rows]
    if moments:
        s, s_next = normalise(s, *moments), normalise(s_next, *moments)
    # DIFF 13: paper with r; released with r, OTDF without; here with r
    r = [data.rewards[rows, None]] if reward else []
    return np.concatenate([s, data.actions[rows], *r, s_next], 1)


class Ground(NamedTuple):
    """Ground cost to the M target points: C_ij = a_i - <X_i, Y_j>, or the root of that (Euclidean)."""

    cost: str
    center: torch.Tensor  # float64 [d]
    Y: torch.Tensor  # [M, d + 1]


def embed(x: torch.Tensor, cost: str, center) -> tuple[torch.Tensor, torch.Tensor]:
    """X = [x', 1] [n, d + 1] and a [n] in float64, such that C_ij = a_i + a_j - <x'_i, x'_j>.

    Every cost is half a squared distance. About a common center that loses nothing to cancellation when the
    distances are small against the norms; 1 - cos in single precision would.
    """
    x = x.double()
    if cost == "cosine":
        # Eq. (17) [ot-cos-cost]: 1 - cos = |x - y|^2 / 2 for unit vectors; a zero vector has cost 1 to everything
        # DIFF 12: paper eps_C in the denominator, no value; here max(|x|, 1e-8), apart only below float32's precision
        x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-8)
        missing = (1 - x.square().sum(1)) / 2  # of the unit length: 0, or 1/2 for a zero vector
    else:
        x, missing = x * math.sqrt(2), 0.0
    x = x - center
    return torch.cat([x, x.new_ones(len(x), 1)], 1), x.square().sum(1) / 2 + missing


def ground(y: torch.Tensor, cost: str, dtype) -> Ground:
    center = embed(y, cost, 0.0)[0][:, :-1].mean(0)
    Y, b = embed(y, cost, center)
    Y[:, -1] = -b
    return Ground(cost, center, Y.to(dtype))


def cost_block(to: Ground, X: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """C [B, M]."""
    C = torch.addmm(a.to(X)[:, None], X, to.Y.T, alpha=-1)
    return C.clamp_(min=1e-14).sqrt_() if to.cost == "euclidean" else C.clamp_(min=0)


def tilt(to: Ground, G: torch.Tensor, s: float) -> torch.Tensor:
    """The right side of the exponents G_j - s C_ij = <X_i, R_j> - s a_i, for all rows: R [d + 1, M]."""
    R = s * to.Y.T.double()
    R[-1] += G
    return (G if to.cost == "euclidean" else R).to(to.Y)


def plan_block(to: Ground, X: torch.Tensor, a: torch.Tensor, R: torch.Tensor, s: float, stable: bool = True):
    """Rows of the plan up to a factor each, gamma_ij ~ 2^(G_j - s C_ij) [B, M], their sums and their costs [B].

    G is the target potential and s = log2(e) / regulariser; a_i falls out. stable: each row's largest exponent is
    taken off (log domain), which float32 needs when s C spans more than its exponents do.
    """
    root = to.cost == "euclidean"
    C = cost_block(to, X, a) if root else None
    P = torch.add(R, C, alpha=-s) if root else X @ R
    if stable:
        P -= P.amax(1, keepdim=True)
    r = P.exp2_().sum(1).double()
    # Eq. (18) [emp-ot-cost]: sum_j pi_ij C_ij; as <X_i, sum_j pi_ij Y_j> it needs no second block of size [B, M]
    return P, r, torch.linalg.vecdot(P, C) / r if root else a - (X * (P @ to.Y)).sum(1, dtype=torch.float64) / r


def ot_costs(
    x, y, cost="cosine", reg=0.1, tol=1e-5, anchors=10_000, max_passes=100, device="cpu", dtype=torch.float32, bar=None
) -> tuple[np.ndarray, dict]:
    """Row costs c [n] of the entropic plan between uniform laws on x [n, d] and y [M, d], and how it was found.

    The plan is never stored: given the target potential G, any row of it is one line, so only G (M numbers) has to
    converge. A pass over all n rows is dear and Sinkhorn needs tens of them. So G is first brought to convergence on
    `anchors` random rows kept in memory; a full pass then shows by which factor each target point gets too much, and
    the anchors' problem is solved again with its target marginal corrected by that factor. Both problems have nearly
    the same curvature, so each full pass wins one to two digits where a Sinkhorn step wins a fraction of one. What
    counts in the end is the marginal error of the full problem, and the fixed point is that of Sinkhorn.
    """
    x, y = torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(np.ascontiguousarray(y)).to(device)
    (n, M), B = (len(x), len(y)), max(16, 2**19 // len(y)) if torch.device(device).type == "cpu" else 4096
    to = ground(y, cost, dtype)
    parts = [embed(block.to(device), cost, to.center) for block in x.split(2**16)]
    X, a = torch.cat([X.to(dtype) for X, _ in parts]), torch.cat([a for _, a in parts])  # [n, d], [n]
    del parts
    largest = lambda rows: cost_block(to, X[rows], a[rows]).amax()  # noqa: E731
    C_max = max(part.item() for _, part in in_blocks(largest, n, B, device, bar and f"{bar}, largest cost"))
    s = math.log2(math.e) / (reg * max(C_max, 1e-12))  # all points equal: rounding is no cost
    # No exponent is larger than this, for the potential ranges no wider than the costs; float32 has 2^+-126.
    inner_products = 0.0 if cost == "euclidean" else (a.max() - to.Y[:, -1].min()).item()
    stable = s * (inner_products + 2 * C_max) > 100
    b = torch.full((M,), 1 / M, dtype=torch.float64, device=device)
    G, correction, error, inner, stalled = torch.zeros_like(b), None, 0.05, 0, 0
    order = torch.from_numpy(np.random.default_rng(0).permutation(n)).to(device)
    for passes in range(1, max_passes + 1):
        picked = order[:anchors].sort().values
        G, steps = match(to, X[picked], a[picked], G, b, correction, s, max(0.02 * error, tol / 4), stable)
        inner += steps
        column, c = full_pass(to, X, a, G, s, stable, B, bar and f"{bar}, full pass {passes}")
        error, last = (column - b).abs().sum().item(), error
        if error <= tol:
            found = dict(passes=passes, inner_iterations=inner, marginal_error=error, C_max=C_max, log_domain=stable)
            return c.cpu().numpy(), found | {"potential": G.cpu().numpy()}
        correction = b / column.clamp_min(1e-38)  # a factor, not a difference: the corrected marginal stays positive
        if error > last / 2 and anchors < n and 2 * anchors * M <= 2**28:  # they stand badly for all: more, up to 1 GB
            anchors *= 2
        elif error > 0.9 * last:
            stalled += 1
        if stalled == 5:
            break
    raise UserError(
        f"OT did not converge: marginal error {error:.1e} after {passes} passes, wanted {tol:.0e}; "
        "raise --ot-tol, or --ot-reg"
    )


def full_pass(to: Ground, X, a, G, s, stable, B, label):
    """Marginal on the target [M] and row costs [n] of the plan that the potential G stands for."""
    R = tilt(to, G, s)
    column, c = torch.zeros_like(G), torch.empty_like(a)

    def one(rows):
        P, r, costs = plan_block(to, X[rows], a[rows], R, s, stable)
        return (1 / r).to(P) @ P, costs  # [M], [B]

    for rows, (mass, costs) in in_blocks(one, len(X), B, X.device, label):
        column += mass / len(X)  # in float64, over the blocks
        c[rows] = costs
    return column, c


def match(to: Ground, X, a, G, b, correction, s, tol, stable, max_iterations: int = 2000):
    """Sinkhorn on rows that fit: change the potential G until the plan's marginal on the target is b; or, where there
    is a correction, what it was at first times that. Returns G and the number of iterations."""
    at, goal, iterations, best, since = None, b, 0, math.inf, 0
    while True:
        if at is None or (G - at).abs().max() > 40:  # the plan P at a potential near enough to scale from in float32
            P, r, _ = plan_block(to, X, a, tilt(to, G, s), s, stable)
            P /= r.to(P)[:, None]
            at = G
        v = torch.exp2(G - at)
        column = v * ((1 / (P @ v.to(P))) @ P) / len(P)  # [M]
        if iterations == 0 and correction is not None:
            goal = column * correction / (column @ correction)
        error = (column - goal).abs().sum().item()
        # Rounding in float32 may keep the error above tol for ever: fifty steps that win nothing are enough.
        best, since = (error, 0) if error < 0.95 * best else (best, since + 1)
        if error <= tol or since == 50 or iterations == max_iterations:
            return G, iterations
        G = G + torch.log2(goal / column.clamp_min(1e-38))
        iterations += 1


def ot_costs_chunked(x, y, cost="cosine", reg=0.1, chunk=10_000, device="cpu", bar=None, seed=0):
    """The same from shuffled chunks of rows, each its own problem, by POT in float64: the released code's form."""
    # DIFF 9: paper one problem; released shuffled chunks of 10,000 rows; here one problem, chunks by flag
    # DIFF 11: paper no regulariser; released 0.1 on C / max C, error 1e-9; here 0.1 on C / max C
    order, y = np.random.default_rng(seed).permutation(len(x)), torch.from_numpy(y).to(device)
    to, c, worst = ground(y, cost, torch.float64), np.empty(len(x)), {"marginal_error": 0.0, "iterations": 0}
    for start in progress_bar(range(0, len(x), chunk), desc=bar, unit="chunk", disable=bar is None):
        rows = order[start : start + chunk]
        C = cost_block(to, *embed(torch.from_numpy(x[rows]).to(device), cost, to.center))  # [chunk, M], float64
        C_max = C.max().clamp_min(1e-12)
        C /= C_max  # in place, here and below: 10,000 rows of it are 400 MB, and POT needs three more
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it would warn of is looked at below
            p, q = C.new_full((len(C),), 1 / len(C)), C.new_full((len(y),), 1 / len(y))
            P, log = ot.sinkhorn(p, q, C, reg, numItermax=10_000, stopThr=1e-9, log=True)
        error = (P.sum(0) - q).abs().sum().item()
        if not error < 1e-6:
            raise UserError(f"OT did not converge in a chunk: marginal error {error:.1e}; raise --ot-reg")
        r = P.sum(1)
        c[rows] = (C_max * P.mul_(C).sum(1) / r).cpu().numpy()
        del C, P
        now = {"marginal_error": error, "iterations": log["niter"]}
        worst = {key: max(value, worst[key]) for key, value in now.items()}
    return c, worst


# ------------------------------------------------------------------------------------------- the weights


def calibrate(c: np.ndarray) -> np.ndarray:
    """c~ in [0, 1]; all 0 where every cost is the same."""
    # Eq. (19) [ot-cost-calib-main], Eq. (37) [norm-ot-dev]: by the smallest cost and the range
    return (c - c.min()) / (c.max() - c.min() + 1e-8)


def gibbs_weights(c: np.ndarray, eta_w: float) -> tuple[np.ndarray, np.ndarray]:
    """omega_i in [exp(-eta_w), 1] and w_i = omega_i / sum omega, for calibrated costs and a uniform u_I."""
    # Eq. (20) [ot-dist]: feasibility score
    d_w = -c
    # Eq. (38) [exp-weight]
    omega = np.exp(eta_w * d_w)
    # Eq. (21) [ot-weight], Eq. (12) [gibbs-weights]
    return omega, omega / omega.sum()


def effective_share(w: np.ndarray) -> float:
    """Effective sample size of weights w over their number: 1 for equal weights, 1 / n for a single one."""
    return float(w.sum() ** 2 / (w @ w) / len(w))


def temperature(c: np.ndarray, share: float) -> float:
    """eta_w at which the Gibbs weights of calibrated costs c have this effective share, which falls as eta_w grows."""
    # DIFF 14: paper eta_w is a free symbol; released 1, at which the weights are nearly equal; here 1, or by --ess
    cheapest = (c < c.min() + 1e-6).sum()
    if share == 1 or cheapest == len(c):
        return 0.0
    if share * len(c) <= cheapest:  # even if all weight were on the cheapest transitions, their share would be larger
        raise UserError(f"no weights of these costs have an effective share of {share}; raise --ess or give --eta-w")
    from scipy.optimize import brentq  # here, because it takes a while to import

    def excess(eta_w):
        return effective_share(gibbs_weights(c, eta_w)[1]) - share

    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high))


def radii(d: np.ndarray, c: np.ndarray, w: np.ndarray, eta_w: float, s_I: float) -> dict:
    """The data terms of the bound: scores d, costs c^ and weights w of the retained transitions, range s_I of Eq. (19).

    The rows of the reference plan have the target's law as their mean under uniform weights, so delta_w_plan bounds
    W1(uniform source, target). Under other weights their mean is another law: delta_w_bound bounds W1 to that one.
    """
    # Definition [def:radii]: Delta_m is the largest score that is kept; Delta_w is bounded by the plan's cost
    # Eq. (7) [samplewise-cost-def]: cost of the reference plan, whose rows weigh 1/n each
    delta_w_plan = c.mean()
    # Eq. (8) [samplewise-majorizer], Eq. (14) [variational-risk-bound]: the bound's data terms are this and delta_m
    delta_m, delta_w_bound = d.max(), w @ c
    # Eq. (11) [weight-subproblem]: w is its optimum for lambda_w = 1 and this tau_ent, in the costs' own units
    tau_ent, KL = s_I / eta_w if eta_w else 0.0, w @ np.log(np.maximum(w * len(w), 1e-300))
    # Eq. (9) [variational-surrogate]: the bound's constants are not known, so lambda_m = lambda_w = 1
    J = delta_m + delta_w_bound + tau_ent * KL
    values = dict(delta_m=delta_m, delta_w_plan=delta_w_plan, delta_w_bound=delta_w_bound, KL=KL, surrogate=J)
    return {key: float(value) for key, value in values.items()}


# ------------------------------------------------------------------------------------------ all together


def preprocess(args: Args, source: Dataset, target: Dataset) -> dict:
    """Gate and weights of a pair: the arrays of the result, `meta` as a dict, and the `path` they are kept at.

    The same data and flags find the file again. Of several processes that ask at once, one computes and the others
    wait; a file that was cut short is made anew.
    """
    args = resolve(args)
    keys = {f.name for f in dataclasses.fields(args)}
    keys -= {"preset", "source", "target", "data", "data_dir", "source_size", "out", "device"}  # not in the numbers
    asked = {key: getattr(args, key) for key in sorted(keys)} | {"version": VERSION}
    asked["inputs"] = [[data.sha256, len(data)] for data in (source, target)]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    name = "-".join([args.env, args.shift, Path(args.source).stem, Path(args.target).stem, digest])
    path = args.out / f"{name.replace('/', '_').replace(':', '_')}.npz"
    with only_one(path):
        return _read(path) or _compute(args, source, target, path)


def _read(path: Path) -> dict | None:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:  # a zip: every part has a checksum
            arrays = {key: file[key] for key in file.files}
        return arrays | {"meta": json.loads(str(arrays["meta"])), "path": path}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        print(f"note: {path} is damaged ({error}) and is made anew", file=sys.stderr)
        return None


def _compute(args: Args, source: Dataset, target: Dataset, path: Path) -> dict:
    stages: dict = {}
    lap, N = stopwatch(stages, args.device), len(source)
    for name, data in (("source", source), ("target", target)):
        for column in ("observations", "actions", "rewards", "next_observations"):
            if not np.isfinite(getattr(data, column)).all():
                raise UserError(f"the {name} data hold NaN or infinite {column}; mend or drop those rows")
    # Eq. (13) [sequential-surrogate-program]: first the gate, then the weights on what it retains
    mu, sd = statistics(target.observations)
    mu_s, sd_s = (mu, sd) if args.state_norm == "target" else statistics(source.observations)
    nan = np.full(N, np.nan, np.float32)
    l_i = fragment_lengths(source.lengths, args.K, args.short_fragments)
    gate, d_m, report = l_i > 0, nan, {}
    if args.filter in ("both", "mmd"):
        z_s = encode(source.observations, mu_s, sd_s, args.encoder)  # [N, d]
        z_t = encode(target.observations, mu, sd, args.encoder)  # [M, d]
        gamma = bandwidth(z_s, z_t, args.mmd_gamma)
        d_m, self_term = mmd_scores(
            z_s, source.lengths, z_t, target.lengths, args.K, gamma, args.mmd_reduce, args.mmd_squared,
            args.short_fragments, args.mmd_target_stride, args.device, bar="MMD",
        )  # fmt: skip
        failed = np.zeros(N, bool)
        if args.failures == "apart":
            failed[gate] = source.terminals[(np.arange(N) + l_i - 1)[gate]]
        gate = keep_fragments(d_m, failed, args.xi)
        report = {
            "gamma": gamma,
            "threshold": float(d_m[gate & ~failed].max()),
            "clipped": float((np.abs(z_s) == 10).mean()) if args.encoder == "normalised" else 0.0,
            **nearness(d_m, self_term, z_s, z_t, gamma, args.K),
        }
        lap("mmd")
    retained = retained_support(gate, l_i)
    n = int(retained.sum())
    c_hat, c_tilde, omega, w = nan.copy(), nan.copy(), np.where(retained, np.float32(1), np.float32(np.nan)), nan.copy()
    w[retained] = 1 / n
    # DIFF 48: paper does not define "MMD only" and "OT only"; here one stage left out, all else equal
    if args.filter in ("both", "ot"):
        # DIFF 10, 15: paper OT and calibration on the retained support; released on all source data, then the gate
        support = np.flatnonzero(retained) if args.ot_support == "retained" else np.arange(N)
        moments = [(mu_s, sd_s), (mu, sd)] if args.ot_states == "normalised" else [None, None]
        x = features(source, support, args.ot_reward, moments[0])  # [n, d]
        y = features(target, slice(None), args.ot_reward, moments[1])  # [M, d]
        if args.ot_chunk:
            c, found = ot_costs_chunked(x, y, args.ot_cost, args.ot_reg, args.ot_chunk, args.device, "OT")
        else:
            c, found = ot_costs(x, y, args.ot_cost, args.ot_reg, args.ot_tol, device=args.device, bar="OT")
            found.pop("potential")
        inside = retained[support]  # which rows of the OT problem are retained
        tilde = calibrate(c)
        eta_w = args.eta_w if args.ess is None else temperature(tilde[inside], args.ess)
        c_hat[support], c_tilde[support] = c, tilde
        omega[support], _ = gibbs_weights(tilde, eta_w)
        _, w[retained] = gibbs_weights(tilde[inside], eta_w)
        # without a gate there is no Delta_m, and nothing is said that rests on it
        terms = radii(d_m[gate], c[inside], w[retained].astype(np.float64), eta_w, np.ptp(c) + 1e-8)
        report |= found | {key: value for key, value in terms.items() if not math.isnan(value)}
        report |= {"eta_w": eta_w} | {f"c_tilde_{p}": float(np.percentile(tilde[inside], p)) for p in (5, 50, 95)}
        lap("ot")
    falls = source.terminals
    report |= {"fragments": int(gate.sum()), "retained": n, "retained_share": n / N}
    report["retained_share_of_failures"] = float(retained[falls].mean()) if falls.any() else None
    report["effective_share"] = effective_share(w[retained].astype(np.float64))
    arrays = {"d_m": d_m, "gate": gate, "retained": retained}
    arrays |= {"c_hat": c_hat, "c_tilde": c_tilde, "omega": omega, "w": w}
    arrays |= {"mu": mu, "sd": sd, "mu_source": mu_s, "sd_source": sd_s}
    figure(path.with_suffix(".png"), args, arrays, report, source, target)
    meta = {"args": dataclasses.asdict(args), "source": source.provenance, "target": target.provenance}
    meta |= {"report": report, "stages": stages, "versions": versions()}
    text = json.dumps(meta, default=str)
    with atomic(path) as temporary, temporary.open("wb") as file:  # last: where this file is, all is done
        np.savez(file, meta=np.array(text), **arrays)
    return arrays | {"meta": json.loads(text), "path": path}


# ------------------------------------------------------------------------------------------------- figure


def figure(path: Path, args: Args, arrays: dict, report: dict, source: Dataset, target: Dataset) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    gate, retained, n = arrays["gate"], arrays["retained"], report["retained"]
    colors = ("#1f77b4", "#b0b0b0", "#d62728")
    fig, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    pair = f"{args.env}, {args.shift}: {Path(args.source).stem} to {Path(args.target).stem}"
    fig.suptitle(f"{pair}; {n:,} of {len(gate):,} source transitions retained")

    def histogram(ax, parts, **labels):
        ax.set(**labels)
        if np.isfinite(parts[0]).all():
            ax.hist(parts, 80, color=colors[: len(parts)], stacked=True, label=("retained", "dropped")[: len(parts)])
        else:
            ax.text(0.5, 0.5, "not computed", ha="center", va="center", transform=ax.transAxes)

    d_m, what = arrays["d_m"], f"{args.mmd_reduce} MMD{'²' * args.mmd_squared} to the target's fragments, d_m"
    title = f"Gate: fragments of K = {args.K} states, xi = {args.xi}"
    histogram(
        axes[0, 0], [d_m[gate], d_m[~gate & np.isfinite(d_m)]], title=title, xlabel=what, ylabel="source fragments"
    )
    if args.filter in ("both", "mmd"):
        axes[0, 0].axvline(report["threshold"], color="k", ls="--", label=f"threshold {report['threshold']:.4g}")
        axes[0, 0].legend()
    title, label = f"OT cost ({args.ot_cost})", {"ylabel": "retained transitions"}
    histogram(axes[0, 1], [arrays["c_tilde"][retained]], title=title, xlabel="calibrated cost, c~", **label)
    title = f"Weights: eta_w = {report.get('eta_w', 0):.3g}, effective share {report['effective_share']:.1%}"
    histogram(
        axes[1, 0], [arrays["w"][retained] * n], title=title, xlabel="w, as a multiple of the uniform weight", **label
    )

    # On the principal axes of the target's normalised states; a few thousand points of each, or one sees only ink.
    rng, z_t = np.random.default_rng(0), normalise(target.observations, arrays["mu"], arrays["sd"])
    _, spread, principal = np.linalg.svd(z_t - z_t.mean(0), full_matrices=False)
    z_s = [rng.permutation(np.flatnonzero(rows))[:4000] for rows in (retained, ~retained)]
    z_s = [normalise(source.observations[rows], arrays["mu_source"], arrays["sd_source"]) for rows in z_s]
    clouds = [*z_s, rng.permutation(z_t)[:2000]]
    for k, label in ((1, "source, dropped"), (0, "source, retained"), (2, "target")):
        u = (clouds[k] - z_t.mean(0)) @ principal[:2].T  # [points, 2]
        axes[1, 1].scatter(*u.T, s=3, c=colors[k], label=label, alpha=0.5, lw=0)
    axes[1, 1].legend(markerscale=4)
    share = spread**2 / max((spread**2).sum(), 1e-12)
    x, y = (f"principal axis {i + 1} of the target's states ({share[i]:.0%})" for i in range(2))
    axes[1, 1].set(title="Normalised states (random samples)", xlabel=x, ylabel=y)
    with atomic(path) as temporary:
        plt.savefig(temporary, format="png", dpi=110)
    plt.close(fig)


def main() -> None:
    args, start = read_args(Args, defaults, __doc__), time.perf_counter()
    resolve(args)  # refuse nonsense before anything is downloaded
    with signals():
        result = preprocess(args, *load_task(args))
    meta, report = result["meta"], result["meta"]["report"]
    print("arguments ", ", ".join(f"{key}={value}" for key, value in meta["args"].items()))
    print(f"written to {result['path']} and {result['path'].with_suffix('.png').name}")
    n, N = report["retained"], len(result["gate"])
    print(f"retained   {n:,} of {N:,} source transitions, against {meta['target']['transitions']:,} of the target")
    for key, value in report.items():
        print(f"  {key:24} {value:.6g}" if isinstance(value, float) else f"  {key:24} {value}")
    memory = max((stage["peak_memory_mb"] for stage in meta["stages"].values()), default=0.0)
    took = ", ".join(f"{name} {stage['seconds']:.0f} s" for name, stage in meta["stages"].items())
    print(f"computed in {took or 'no time'}, peak memory {memory:.0f} MB; now {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    with one_line_errors():
        main()
