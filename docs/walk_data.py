"""The first half of docs/walkthrough.py: the data, the gate and the weights."""

import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from by_hand import fragments, mmd

import taf_dt as taf
import taf_preprocess as pre_
from dynashift import fast_ot, runs
from dynashift.datasets import load_pair


class Page:
    """Prose, and tables of numbers that were computed twice."""

    def __init__(self):
        self.text, self.open, self.worst = "", False, 0.0

    def say(self, *lines):
        self.text += "\n" * self.open + "\n".join(lines) + "\n\n"
        self.open = False

    def number(self, what, equation, project, hand, tolerance=2e-4):
        project, hand = np.asarray(project, np.float64), np.asarray(hand, np.float64)
        assert project.shape == hand.shape, (what, project.shape, hand.shape)
        error = np.abs(project - hand).max() / max(1.0, np.abs(hand).max())
        assert error <= tolerance, f"{what}: {project} is not {hand}"
        self.worst = max(self.worst, error)
        if not self.open:
            self.text += "| what | equation | project | by hand |\n|---|---|---|---|\n"
            self.open = True
        self.text += f"| {what} | {equation} | {show(project)} | {show(hand)} |\n"


def show(x) -> str:
    x = np.atleast_1d(x)
    return ", ".join(f"{v:.5g}" for v in x.ravel()[:6]) + (", ..." if x.size > 6 else "")


class Walk:
    """Data, gate and page; then, as the walk goes on, weights, networks and labelled data."""

    def __init__(self, size: int, updates: int, width: int, target_size: int):
        torch.manual_seed(1)
        torch.set_num_threads(1)
        task = ("hopper", "morph", "medium", "medium", "embedded")
        options = dict(zip(("env", "shift", "source", "target", "data"), task, strict=True))
        options |= dict(source_size=size, K=5, eta_reg=0.4, return_target=3600, device="cpu")
        options |= dict(layers=2, heads=2, width=width, hidden=width, cvae_hidden=width, M=4)
        options |= dict(label_batch=128, target_batch=32, ema_start=0)
        self.args = args = runs.compose(taf.Args, **options)
        self.page = Page()
        self.updates = updates
        self.K = K = args.gate.K
        self.source, target = load_pair(*task, source_size=size)
        self.target = target = target.first(target_size)
        with tempfile.TemporaryDirectory() as folder:
            pre = pre_.preprocess(args.task, args.gate, self.source, target, Path(folder), "cpu")
        self.pre = pre
        self.mu = target.observations.mean(0, dtype=np.float64)
        self.sd = target.observations.std(0, dtype=np.float64)
        # A transition of medium cost, at the start of a kept fragment that does not end in a
        # failure.
        candidates = np.flatnonzero(pre["gate"] & (self.source.left > K))
        self.i = int(candidates[np.argsort(pre["c_hat"][candidates])[len(candidates) // 2]])

    def hat(self, x):
        return np.clip((x - self.mu) / (self.sd + 1e-8), -10, 10)


def solve(x, y, tol: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Row costs of the plan, the potential on the target in the solver's last pass, and max C."""
    potentials, full_pass = [], fast_ot.full_pass

    def watched(to, X, a, G, *rest):
        potentials.append(G.numpy())
        return full_pass(to, X, a, G, *rest)

    with mock.patch.object(fast_ot, "full_pass", watched):
        c, report = fast_ot.row_costs(x, y, tol=tol)
    return c, potentials[-1], report["C_max"]


def the_transition(walk: Walk) -> None:
    source, i = walk.source, walk.i
    walk.page.say(
        "# One transition, from the data to the action",
        "",
        "Hopper, morph shift, medium to medium, generated data:",
        f"{len(source):,} source and {len(walk.target):,} target transitions, K = {walk.K}.",
        f"Each stage has {walk.updates} updates on networks of width {walk.args.width},",
        "which is enough to have numbers, but not to have a good policy.",
        "`python docs/walkthrough.py` makes this page.",
        "The column *project* shows what the project's functions return,",
        "and *by hand* the same number computed from the equation in NumPy.",
        "Quantities computed over the whole dataset (the threshold, the smallest and largest",
        "cost, the plan's potential, and the mean and spread of A) are taken from the project in",
        "both columns.",
        "Numbers differ a little between machines. Equations: [equations.md](equations.md).",
        "",
        "## The transition",
    )
    s, a, after = source.observations[i], source.actions[i], source.next_observations[i]
    walk.page.say(
        f"Row {i} of the source, step {source.steps[i]} of its episode: "
        f"s = ({show(s)}), a = ({show(a)}), r = {source.rewards[i]:.5g},",
        f"s' = ({show(after)}).",
    )


def the_gate(walk: Walk) -> None:
    page, source, target, pre, i, K = (
        getattr(walk, name) for name in ("page", "source", "target", "pre", "i", "K")
    )
    hat, left, report, gate = walk.hat, source.left, pre["meta"]["report"], pre["gate"]
    page.say(
        "## The gate",
        "",
        f"Its fragment: the {K} states from here on, normalised with the target's statistics.",
    )
    s = source.observations[i]
    page.number("normalised s", "(43)", pre_.normalise(s, pre["mu"], pre["sd"]), hat(s))
    z, z_t = hat(source.observations[i : i + K]), hat(target.observations)
    n = min(2500, len(source), len(target))
    some = [np.linspace(0, len(data) - 1, n).astype(int) for data in (source, target)]
    both = np.concatenate([hat(source.observations[some[0]]), z_t[some[1]]])
    pairs = np.concatenate([((both[k + 1 :] - both[k]) ** 2).sum(1) for k in range(len(both) - 1)])
    g = 0.1 / np.sort(pairs)[(len(pairs) - 1) // 2]  # of an even number, the lower one
    what = "g of the kernel: 0.1 / median squared distance of source and target states"
    page.number(what, "(15)", report["gamma"], g)
    d = []
    for start, length in fragments(target.lengths, K):
        d.append(mmd(z, z_t[start : start + length], report["gamma"]))
    page.number("d_m: mean MMD to the target's fragments", "(15), (16)", pre["d_m"][i], np.mean(d))
    begins = np.flatnonzero((left >= K) | (source.steps == 0))
    fails = source.terminals[begins + np.minimum(K, left[begins]) - 1]
    walks = np.sort(pre["d_m"][begins[~fails]])
    keep = int(walk.args.gate.xi * len(walks))
    what = f"threshold: the {keep:,}-th smallest score of the {len(walks):,} fragments"
    what += " that do not end in a failure"
    page.number(what, "(10)", report["threshold"], walks[keep - 1])
    page.number("gate I", "(10)", gate[i], pre["d_m"][i] <= walks[keep - 1])
    inside = {t for b in np.flatnonzero(gate) for t in range(b, b + min(K, left[b]))}
    page.number("transitions in kept fragments, G(I)", "(13)", report["retained"], len(inside))


def features(walk: Walk, data) -> np.ndarray:
    states, after = walk.hat(data.observations), walk.hat(data.next_observations)
    columns = [states, data.actions, data.rewards[:, None], after]
    return np.concatenate(columns, 1).astype(np.float32)


def the_weight(walk: Walk) -> None:
    page, source, pre, i, K = (getattr(walk, name) for name in ("page", "source", "pre", "i", "K"))
    options = walk.args.gate
    page.say(
        "## The weight",
        "",
        "The features x(u) = [s, a, r, s'], with normalised states, are compared with the target's",
        "transitions. The plan is that of the whole problem.",
    )
    rows = np.flatnonzero(pre["retained"])
    x, y = features(walk, source)[rows], features(walk, walk.target)
    c, potential, C_max = solve(x, y, options.ot_tol)
    me = int(np.searchsorted(rows, i))
    unit = lambda v: v / np.linalg.norm(v, axis=-1, keepdims=True)  # noqa: E731
    C = 1 - unit(x[me].astype(float)) @ unit(y.astype(float)).T  # [M]
    row = pre_.ground_cost(x[me : me + 1], y)[0]
    page.number("cost row C_i1, C_i2, C_i3", "(17)", row[:3], C[:3])
    # The plan's row from its potential: gamma_ij ~ exp(g_j - C_ij / (0.1 max C)), with G in units
    # of log 2.
    log = potential * np.log(2) - C / (options.ot_reg * C_max)
    pi = np.exp(log - log.max())
    pi /= pi.sum()
    page.number("c_hat: mean cost of its row of the plan", "(18)", pre["c_hat"][i], pi @ C)
    tilde = (c - c.min()) / (c.max() - c.min() + 1e-8)
    page.number("c~: on [0, 1]", "(19), (37)", pre["c_tilde"][i], tilde[me])
    omega = np.exp(-options.eta_w * tilde)
    page.number("omega", "(20), (38)", pre["omega"][i], omega[me])
    what = "w, as a multiple of 1/n"
    page.number(what, "(12), (21)", pre["w"][i] * len(rows), omega[me] / omega.mean())
    walk.data = taf.fuse(source, walk.target, pre, walk.args, torch.device("cpu"))
    weights = np.zeros(len(source))
    weights[rows] = omega
    begins = np.flatnonzero(pre["gate"])
    drawn = np.concatenate([weights[b : b + min(K, source.left[b])] for b in begins])
    walk.weights = weights / drawn.mean()
    what = "loss weight of this step: omega over its mean in all windows"
    page.number(what, "(22)", walk.data.weight[i].item(), walk.weights[i])
