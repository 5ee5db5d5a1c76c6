"""Eq. (18) of taf_preprocess.py for a million source transitions, without storing the plan.

Given the target's potential G, any row of the entropic plan is one line, so only the M numbers of
G have to converge. A pass over all n rows is expensive and Sinkhorn needs tens of them. Therefore
G first converges on a few thousand random rows that are kept in memory, the anchors. A full pass
then shows by which factor each target point gets too much, and the anchors' problem is solved
again with its target marginal corrected by that factor. Both problems have nearly the same
curvature, so each full pass gains one to two digits where a Sinkhorn step gains a fraction of one.
What counts in the end is the marginal error of the full problem, and its fixed point is that of
Sinkhorn. The tests compare the result with `taf_preprocess.row_costs`.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from dynashift.errors import UserError
from dynashift.fast_mmd import in_blocks


class Ground(NamedTuple):
    """Ground cost to the M target points: C_ij = a_i - <X_i, Y_j>, or the root of that."""

    cost: str
    center: torch.Tensor  # float64 [d]
    Y: torch.Tensor  # [M, d + 1]


def embed(x: torch.Tensor, cost: str, center) -> tuple[torch.Tensor, torch.Tensor]:
    """X = [x', 1] [n, d + 1] and a [n] in float64, such that C_ij = a_i + a_j - <x'_i, x'_j>.

    Every cost is half a squared distance. Around a common center nothing is lost to cancellation
    where distances are small against norms; 1 - cos in single precision would lose it.
    """
    x = x.double()
    if cost == "cosine":  # 1 - cos = |x - y|^2 / 2 for unit vectors
        x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-8)
        missing = (1 - x.square().sum(1)) / 2  # 0, or 1/2 for a zero vector, whose cost is 1
    else:
        x = x * math.sqrt(2)
        missing = 0.0
    x = x - center
    return torch.cat([x, x.new_ones(len(x), 1)], 1), x.square().sum(1) / 2 + missing


def ground(y: torch.Tensor, cost: str, dtype) -> Ground:
    center = embed(y, cost, 0.0)[0][:, :-1].mean(0)
    Y, b = embed(y, cost, center)
    Y[:, -1] = -b
    return Ground(cost, center, Y.to(dtype))


def embed_blocks(blocks, to: Ground, device) -> tuple[torch.Tensor, torch.Tensor]:
    """`embed` for many rows, with little memory for the intermediate float64."""
    X, a = [], []
    for block in blocks:
        X_block, a_block = embed(block.to(device), to.cost, to.center)
        X.append(X_block.to(to.Y))
        a.append(a_block)
    return torch.cat(X), torch.cat(a)


def cost_block(to: Ground, X: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """C [B, M]"""
    C = torch.addmm(a.to(X)[:, None], X, to.Y.T, alpha=-1)
    return C.clamp_(min=1e-14).sqrt_() if to.cost == "euclidean" else C.clamp_(min=0)


def tilt(to: Ground, G: torch.Tensor, s: float) -> torch.Tensor:
    """The right side of the exponents G_j - s C_ij = <X_i, R_j> - s a_i: R [d + 1, M]."""
    R = s * to.Y.T.double()
    R[-1] += G
    return (G if to.cost == "euclidean" else R).to(to.Y)


def plan_block(to: Ground, X, a, R: torch.Tensor, s: float, stable: bool = True):
    """Rows of the plan up to a factor each, 2^(G_j - s C_ij) [B, M], their sums and costs [B].

    s = log2(e) / regulariser. stable: subtract each row's largest exponent (log domain), which
    float32 needs where s C spans more than its exponents do.
    """
    root = to.cost == "euclidean"
    C = cost_block(to, X, a) if root else None
    P = torch.add(R, C, alpha=-s) if root else X @ R
    if stable:
        P -= P.amax(1, keepdim=True)
    r = P.exp2_().sum(1).double()
    if root:
        return P, r, torch.linalg.vecdot(P, C) / r
    # sum_j pi_ij C_ij as <X_i, sum_j pi_ij Y_j> needs no second block of size [B, M].
    return P, r, a - (X * (P @ to.Y)).sum(1, dtype=torch.float64) / r


def row_costs(
    x: np.ndarray,
    y: np.ndarray,
    cost: str = "cosine",
    reg: float = 0.1,
    tol: float = 1e-5,
    anchors: int = 10_000,
    max_passes: int = 100,
    device="cpu",
    dtype=torch.float32,
    bar: str | None = None,
) -> tuple[np.ndarray, dict]:
    """Row costs c [n] of the entropic plan between uniform laws on x [n, d] and y [M, d], and a
    report of how it was found."""
    x = torch.from_numpy(np.ascontiguousarray(x))
    y = torch.from_numpy(np.ascontiguousarray(y)).to(device)
    n, M = len(x), len(y)
    B = max(16, 2**19 // M) if torch.device(device).type == "cpu" else 4096
    to = ground(y, cost, dtype)
    X, a = embed_blocks(x.split(2**16), to, device)  # [n, d + 1], [n]

    def largest(rows):
        return cost_block(to, X[rows], a[rows]).amax()

    note = bar and f"{bar}, largest cost"
    C_max = max(part.item() for _, part in in_blocks(largest, n, B, device, note))
    s = math.log2(math.e) / (reg * max(C_max, 1e-12))
    # The potential ranges no wider than the costs, so no exponent is larger than this; float32
    # has 2^+-126.
    inner_products = 0.0 if cost == "euclidean" else (a.max() - to.Y[:, -1].min()).item()
    stable = s * (inner_products + 2 * C_max) > 100

    b = torch.full((M,), 1 / M, dtype=torch.float64, device=device)
    G = torch.zeros_like(b)
    correction, error, inner, stalled = None, 0.05, 0, 0
    order = torch.from_numpy(np.random.default_rng(0).permutation(n)).to(device)
    for passes in range(1, max_passes + 1):
        picked = order[:anchors].sort().values
        goal = max(0.02 * error, tol / 4)
        G, steps = match(to, X[picked], a[picked], G, b, correction, s, goal, stable)
        inner += steps
        note = bar and f"{bar}, full pass {passes}"
        column, c = full_pass(to, X, a, G, s, stable, B, note)
        last = error
        error = (column - b).abs().sum().item()
        if error <= tol:
            report = {"passes": passes, "inner_iterations": inner, "marginal_error": error}
            return c.cpu().numpy(), report | {"C_max": C_max, "log_domain": stable}
        correction = b / column.clamp_min(1e-38)  # a factor keeps the marginal positive
        if error > last / 2 and anchors < n and 2 * anchors * M <= 2**28:
            anchors *= 2  # they represent the whole poorly; up to 1 GB of them
        elif error > 0.9 * last:
            stalled += 1
        if stalled == 5:
            break
    raise UserError(
        f"OT did not converge: marginal error {error:.1e} after {passes} passes, wanted {tol:.0e}; "
        "raise --ot-tol, or --ot-reg"
    )


def full_pass(to: Ground, X, a, G, s, stable, B, label):
    """Marginal on the target [M] and row costs [n] of the plan with potential G."""
    R = tilt(to, G, s)
    column = torch.zeros_like(G)
    c = torch.empty_like(a)

    def one(rows):
        P, r, costs = plan_block(to, X[rows], a[rows], R, s, stable)
        return (1 / r).to(P) @ P, costs  # [M], [B]

    for rows, (mass, costs) in in_blocks(one, len(X), B, X.device, label):
        column += mass / len(X)  # float64 over the blocks
        c[rows] = costs
    return column, c


def match(to: Ground, X, a, G, b, correction, s, tol, stable, max_iterations: int = 2000):
    """Sinkhorn on rows that fit into memory: change the potential G until the plan's marginal on
    the target is b or, with a correction, what it was at first times that. Returns G and the
    number of iterations."""
    at, goal, iterations, best, since = None, b, 0, math.inf, 0
    while True:
        if at is None or (G - at).abs().max() > 40:  # float32 can scale the plan from near by
            P, r, _ = plan_block(to, X, a, tilt(to, G, s), s, stable)
            P /= r.to(P)[:, None]
            at = G
        v = torch.exp2(G - at)
        column = v * ((1 / (P @ v.to(P))) @ P) / len(P)  # [M]
        if iterations == 0 and correction is not None:
            goal = column * correction / (column @ correction)
        error = (column - goal).abs().sum().item()
        # Rounding in float32 may keep the error above tol forever, so stop after 50 steps without
        # progress.
        best, since = (error, 0) if error < 0.95 * best else (best, since + 1)
        if error <= tol or since == 50 or iterations == max_iterations:
            return G, iterations
        G = G + torch.log2(goal / column.clamp_min(1e-38))
        iterations += 1
