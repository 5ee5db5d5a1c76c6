"""What one wants to see of a gate and its weights: numbers, their printing, and a figure."""

import sys
from pathlib import Path

import numpy as np
import torch

from dynashift.errors import UserError
from dynashift.files import atomic

COLORS = ("#1f77b4", "#b0b0b0", "#d62728")  # retained, dropped, target


def nearness(d_m, self_term, z_s, z_t, g: float, K: int, size: int = 1000) -> dict:
    """Does the score follow nearness? On `size` random source fragments; None where undefined.

    A correlation with the fragment's own self term near 1 says that the kernel is saturated: the
    gate then ranks fragments by how little they move. A good gate's score follows the distance to
    the nearest target states.
    """
    begin = np.flatnonzero(np.isfinite(d_m))
    begin = begin[np.random.default_rng(0).integers(len(begin), size=size)]
    inside = np.minimum(begin[:, None] + np.arange(K), len(z_s) - 1)  # [size, K]
    states = torch.from_numpy(z_s[inside.ravel()])  # as one matrix, which is seven times as fast
    distance = torch.cdist(states, torch.from_numpy(z_t)).view(size, K, -1)  # [size, K, M]
    nearest = distance.amin(2).mean(1).numpy()  # [size], mean over the fragment's states
    ranks = [np.argsort(np.argsort(x)) for x in (d_m[begin], nearest)]

    def correlation(x, y):
        return float(np.corrcoef(x, y)[0, 1]) if np.std(x) and np.std(y) else None

    return {
        "mean_cross_kernel": distance[:, 0].square().mul_(-g).exp_().mean().item(),
        "corr_score_self_term": correlation(d_m[begin], self_term[begin]),
        "rank_corr_score_distance": correlation(*ranks),
    }


def effective_share(w: np.ndarray) -> float:
    """Effective sample size over sample size: 1 for equal weights, 1 / n for a single one."""
    return float(w.sum() ** 2 / (w @ w) / len(w))


def temperature(c: np.ndarray, share: float) -> float:
    """eta_w at which the Gibbs weights exp(-eta_w c) of calibrated costs have this share."""
    cheapest = (c < c.min() + 1e-6).sum()
    if share == 1 or cheapest == len(c):
        return 0.0
    if share * len(c) <= cheapest:  # the share that is left when all others weigh nothing
        raise UserError(f"no weights have the effective share {share}; raise --ess")
    from scipy.optimize import brentq  # here, because it takes a while to import

    def excess(eta_w):
        return effective_share(np.exp(-eta_w * c)) - share

    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high))


def retained(gate: np.ndarray, retained: np.ndarray, w: np.ndarray, terminals: np.ndarray) -> dict:
    """How much the gate keeps of the source data and of its failures; how even the weights are."""
    of_failures = float(retained[terminals].mean()) if terminals.any() else None
    return {
        "fragments": int(gate.sum()),
        "retained": int(retained.sum()),
        "retained_share": float(retained.mean()),
        "retained_share_of_failures": of_failures,
        "effective_share": effective_share(w[retained].astype(np.float64)),
    }


def show(result: dict) -> None:
    """Print what the file of `taf_preprocess.preprocess` holds."""
    meta, report = result["meta"], result["meta"]["report"]
    print(f"written to {result['path']}, its figure beside it")
    n, N, M = report["retained"], len(result["gate"]), meta["target"]["transitions"]
    print(f"retained   {n:,} of {N:,} source transitions, against {M:,} of the target")
    for key, value in report.items():
        print(f"  {key:26} {value:.6g}" if isinstance(value, float) else f"  {key:26} {value}")
    took = ", ".join(f"{name} {stage['seconds']:.0f} s" for name, stage in meta["stages"].items())
    memory = max((stage["peak_memory_mb"] for stage in meta["stages"].values()), default=0.0)
    print(f"computed in {took or 'no time'}, {memory:.0f} MB")


def draw(path: Path, meta: dict, arrays: dict, source, target) -> None:
    """The figure beside the result. One that cannot be drawn is a note, not an error."""
    try:
        _draw(path, meta, arrays, source, target)
    except Exception as error:  # matplotlib has many, and the numbers are already safe
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"note: no figure {path.name} ({reason})", file=sys.stderr)


def _draw(path: Path, meta: dict, arrays: dict, source, target) -> None:
    from matplotlib.figure import Figure  # here, because it takes a while to import; no pyplot

    args, report = meta["args"], meta["report"]
    fig = Figure(figsize=(11, 8), layout="constrained")
    axes = fig.subplots(2, 2)
    names = [Path(args[role]).stem for role in ("source", "target")]
    pair = f"{args['env']}, {args['shift']}: {' to '.join(names)}"
    kept = f"{report['retained']:,} of {len(arrays['gate']):,} source transitions retained"
    fig.suptitle(f"{pair}; {kept}".replace("$", r"\$"))
    _draw_gate(axes[0, 0], args, report, arrays)
    c_tilde = arrays["c_tilde"][arrays["retained"]]
    _histogram(axes[0, 1], [c_tilde], f"OT cost ({args['ot_cost']})", "calibrated cost, c~")
    w = arrays["w"][arrays["retained"]] * report["retained"]
    share = f"effective share {report['effective_share']:.1%}"
    title = f"Weights: eta_w = {report.get('eta_w', 0):.3g}, {share}"
    _histogram(axes[1, 0], [w], title, "w, as a multiple of the uniform weight")
    _draw_states(axes[1, 1], arrays, source, target)
    with atomic(path) as temporary:
        fig.savefig(temporary, format="png", dpi=110)


def _histogram(ax, parts: list, title: str, xlabel: str, ylabel="retained transitions") -> None:
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if not np.isfinite(parts[0]).all():
        ax.text(0.5, 0.5, "not computed", ha="center", va="center", transform=ax.transAxes)
    elif np.ptp(every := np.concatenate(parts)) <= 1e-5 * np.abs(every).max():  # too close to tell
        value = f"all equal: {parts[0][0]:.4g}"
        ax.text(0.5, 0.5, value, ha="center", va="center", transform=ax.transAxes)
    else:
        labels = ("retained", "dropped")[: len(parts)]
        ax.hist(parts, 80, color=COLORS[: len(parts)], stacked=True, label=labels)


def _draw_gate(ax, args: dict, report: dict, arrays: dict) -> None:
    gate, d_m = arrays["gate"], arrays["d_m"]
    what = f"{args['mmd_reduce']} MMD{'²' * args['mmd_squared']} to the target's fragments, d_m"
    title = f"Gate: fragments of K = {args['K']} states, xi = {args['xi']}"
    _histogram(ax, [d_m[gate], d_m[~gate & np.isfinite(d_m)]], title, what, "source fragments")
    if "threshold" in report:
        label = f"threshold {report['threshold']:.4g}"
        ax.axvline(report["threshold"], color="k", ls="--", label=label)
        ax.legend()


def _draw_states(ax, arrays: dict, source, target) -> None:
    """Normalised states on the principal axes of the target's, a few thousand of each kind."""

    def normalised(data, rows, mu, sd):
        return np.clip((data.observations[rows] - mu) / (sd + 1e-8), -10, 10)

    rng, retained = np.random.default_rng(0), arrays["retained"]
    z_t = normalised(target, slice(None), arrays["mu"], arrays["sd"])
    _, spread, principal = np.linalg.svd(z_t - z_t.mean(0), full_matrices=False)
    clouds = []
    for rows, label, color in ((~retained, "dropped", 1), (retained, "retained", 0)):
        some = rng.permutation(np.flatnonzero(rows))[:4000]
        z_s = normalised(source, some, arrays["mu_source"], arrays["sd_source"])
        clouds.append((z_s, f"source, {label}", COLORS[color]))
    clouds.append((rng.permutation(z_t)[:2000], "target", COLORS[2]))
    for z, label, color in clouds:
        u = (z - z_t.mean(0)) @ principal[:2].T  # [points, 2]
        ax.scatter(*u.T, s=3, c=color, label=label, alpha=0.5, lw=0)
    ax.legend(markerscale=4)
    share = spread**2 / max((spread**2).sum(), 1e-12)
    x, y = (f"principal axis {i + 1} of the target's states ({share[i]:.0%})" for i in range(2))
    ax.set(title="Normalised states (random samples)", xlabel=x, ylabel=y)


def radii(d: np.ndarray, c: np.ndarray, w: np.ndarray, eta_w: float, s_I: float) -> dict:
    """The data terms of the bound, from scores d, costs c^ and weights w of what is retained.

    The reference plan's rows average to the target's distribution under uniform weights, so
    delta_w_plan bounds W1(uniform source, target). Under other weights they average to another
    distribution, and delta_w_bound bounds W1 to that one. s_I is the range of Eq. (19).
    """
    # Definition [def:radii]: Delta_m is the largest kept score; the plan's cost bounds Delta_w
    # Eq. (7) [samplewise-cost-def]: cost of the reference plan, whose rows weigh 1/n each
    delta_w_plan = c.mean()
    # Eq. (8) [samplewise-majorizer], Eq. (14) [variational-risk-bound]: this and delta_m
    delta_m, delta_w_bound = d.max(), w @ c
    # Eq. (11) [weight-subproblem]: w is its optimum for lambda_w = 1 and this tau_ent
    tau_ent = s_I / eta_w if eta_w else 0.0
    KL = w @ np.log(np.maximum(w * len(w), 1e-300))
    # Eq. (9) [variational-surrogate], with lambda_m = lambda_w = 1
    J = delta_m + delta_w_bound + tau_ent * KL
    values = {"delta_m": delta_m, "delta_w_plan": delta_w_plan, "delta_w_bound": delta_w_bound}
    return {key: float(x) for key, x in {**values, "KL": KL, "surrogate": J}.items()}
