"""Eqs. (15) and (16) of taf_preprocess.py for a million source fragments, in minutes.

All pairs of a few hundred source and target states at a time: one matrix product, one exponential,
and sums over K x K windows, which are the cross terms of all pairs of fragments. The result is
that of `taf_preprocess.fragment_scores`, which the tests compare it with.
"""

import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from dynashift.files import progress_bar

EMPTY = 1e9  # |x|^2 of an empty place: its kernel values are exactly 0


def in_blocks(f, n: int, rows: int, device, label: str | None):
    """f(slice) for slices of `rows` out of n, in order, with a progress bar if it has a label.

    On a CPU there is one thread per core, each with its own block. Torch's own threads would meet
    after every operation, which costs more than the operation while the block fits into a core's
    cache, as it should. A GPU gets one block at a time.
    """
    slices = [slice(i, min(i + rows, n)) for i in range(0, n, rows)]
    workers = torch.get_num_threads() if torch.device(device).type == "cpu" else 1
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    ahead = 4 * workers  # few, because even after Ctrl-C Python waits for all that were started
    try:
        started = deque(pool.submit(f, part) for part in slices[:ahead])
        bar = progress_bar(slices, desc=label, unit="block", disable=label is None)
        for i, part in enumerate(bar):
            yield part, started.popleft().result()
            started.extend(pool.submit(f, later) for later in slices[i + ahead : i + ahead + 1])
    finally:
        pool.shutdown(cancel_futures=True)


def pad_episodes(lengths: np.ndarray, K: int, multiple: int = 1) -> tuple[np.ndarray, int]:
    """The place of every state when each episode is followed by at least K - 1 empty places, and
    the number of places. K consecutive places then never reach into the next episode."""
    padded = -(-(lengths + K - 1) // multiple) * multiple
    shift = np.cumsum(padded) - padded - (np.cumsum(lengths) - lengths)
    return np.arange(lengths.sum()) + np.repeat(shift, lengths), int(padded.sum())


def window_sums(x: torch.Tensor, K: int, dim: int) -> torch.Tensor:
    """Sums of K consecutive entries by doubling: log2 K additions of positive numbers, without
    the cancellation of a difference of cumulative sums."""
    sums, width = x, 1
    for bit in bin(K)[3:]:
        size = sums.shape[dim] - width
        sums = sums.narrow(dim, 0, size) + sums.narrow(dim, width, size)
        width *= 2
        if bit == "1":
            size = sums.shape[dim] - 1
            sums = sums.narrow(dim, 0, size).add_(x.narrow(dim, width, size))
            width += 1
    return sums


class Domain(NamedTuple):
    """One domain's states by place; P places.

    -g |x - y|^2 is one product: left(x) . right(y) = [2 g x, -g |x|^2, 1] . [y, 1, -g |y|^2].
    """

    left: torch.Tensor  # [P, d + 2]
    right: torch.Tensor  # [P, d + 2]
    count: torch.Tensor  # [P] length l_i of the fragment that begins there, 1 where none does
    self_term: torch.Tensor  # [P] mean k(S_i, S_i)
    at: torch.Tensor  # [N] places of the states


def place_states(z, lengths, l_i, K, g, center, multiple, device, dtype, label) -> Domain:
    places, size = pad_episodes(lengths, K, multiple)
    at = torch.from_numpy(places).to(device)
    x = torch.from_numpy(z - center).to(device)  # float64: rounded once, below
    left, right = torch.zeros(2, size, z.shape[1] + 2, dtype=dtype, device=device)
    left[:, -2:] = torch.tensor([-EMPTY, 1.0], dtype=dtype, device=device)
    right[:, -2:] = torch.tensor([1.0, -EMPTY], dtype=dtype, device=device)
    norm = -g * x.square().sum(1, keepdim=True)
    one = x.new_ones(len(x), 1)
    left[at] = torch.cat([2 * g * x, norm, one], 1).to(dtype)
    right[at] = torch.cat([x, one, norm], 1).to(dtype)
    count = torch.ones(size, dtype=dtype, device=device)
    count[at] = torch.from_numpy(np.maximum(l_i, 1)).to(device, dtype)

    def self_terms(rows):
        inside = torch.arange(rows.start, rows.stop, device=device).clamp_(max=size - K)
        inside = inside[:, None] + torch.arange(K, device=device)  # [B, K]
        return (left[inside] @ right[inside].mT).exp2_().sum((1, 2)) / count[rows].square()

    parts = [terms for _, terms in in_blocks(self_terms, size, 2048, device, label)]
    return Domain(left, right, count, torch.cat(parts), at)


def target_terms(target: Domain, l_t: np.ndarray, K: int, stride: int) -> tuple:
    """What the target contributes to the scores: right side [d + 2, M'], and for every n-th place
    the self term, 1 / (K l_j), and the weight in the mean."""
    right = target.right.T.contiguous()
    real = torch.zeros(right.shape[1], dtype=torch.bool, device=right.device)
    real[target.at[torch.from_numpy(l_t > 0).to(right.device)]] = True
    # Where no target fragment begins, MMD^2 is above all others: never the minimum, and without
    # weight in the mean.
    self_t = torch.where(real, target.self_term, 4.0)[::stride]
    count_t = torch.where(real, target.count, torch.inf)[::stride]
    weight = real[::stride].to(right.dtype) / real[::stride].sum()
    return right, self_t, 1 / (K * count_t), weight


def fragment_scores(
    source: tuple,
    target: tuple,
    K: int,
    gamma: float,
    reduce: str = "mean",
    square: bool = False,
    stride: int = 1,
    device="cpu",
    dtype=torch.float32,
    bar: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores d^m [N] of all source fragments and their self terms mean k(S_i, S_i) [N].

    A domain is its states [N, d], its episodes' lengths, and the length l_i [N] of the fragment
    that begins at each state, 0 where none does; the score is NaN there. stride: use every n-th
    target fragment.
    """
    (z_s, len_s, l_s), (z_t, len_t, l_t) = source, target
    g = gamma / math.log(2)  # powers of 2 are faster than exponentials
    center = z_t.mean(0, dtype=np.float64)
    note = bar and f"{bar}, self terms"
    source = place_states(z_s, len_s, l_s, K, g, center, 1, device, dtype, note)
    target = place_states(z_t, len_t, l_t, K, g, center, stride, device, dtype, note)
    right, self_t, inverse_t, weight = target_terms(target, l_t, K, stride)
    on_cpu = torch.device(device).type == "cpu"
    B, W = (512, 512) if on_cpu else (8192, 2048)  # a core's cache, or a GPU's memory
    W = -(-W // stride) * stride

    def scores(rows: slice) -> torch.Tensor:
        start = 0.0 if reduce == "mean" else torch.inf
        total = torch.full((rows.stop - rows.start,), start, dtype=torch.float64, device=device)
        block = source.left[rows.start : rows.stop + K - 1]
        short = (source.count[rows] < K).nonzero()[:, 0]  # few: corrected one by one
        ratio = K / source.count[rows][short, None]
        for first in range(0, right.shape[1] - K + 1, W):
            last = min(first + W, right.shape[1] - K + 1)
            cols = slice(first // stride, -(-last // stride))
            kernel = (block @ right[:, first : last + K - 1]).exp2_()  # [B + K - 1, W + K - 1]
            cross = window_sums(window_sums(kernel, K, 0), K, 1)[:, ::stride]  # [B, W / stride]
            cross[short] *= ratio
            mmd = torch.addcmul(self_t[cols], cross, inverse_t[cols], value=-2)
            mmd.add_(source.self_term[rows, None])
            mmd.clamp_(min=1e-14)  # not 0, on which some vector square roots are slow
            mmd = mmd if square else mmd.sqrt_()
            if reduce == "mean":
                total = total + mmd @ weight[cols]
            else:
                total = torch.minimum(total, mmd.amin(1))
        return total

    # No fragment begins in the last K - 1 places, which are empty.
    places = len(source.left) - K + 1
    d = torch.cat([part for _, part in in_blocks(scores, places, B, device, bar)])

    def by_state(x):
        return np.where(l_s > 0, x[source.at].float().cpu().numpy(), np.float32(np.nan))

    return by_state(d), by_state(source.self_term)
