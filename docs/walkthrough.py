"""Follows one source transition through all of TAF-DT: python docs/walkthrough.py

Writes docs/walkthrough.md. Every number is computed twice: by the project's functions, and by hand
in NumPy from the equation that is named beside it. If the two differ by more than rounding, the
script fails.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dynashift import quick_help  # noqa: E402, F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402

import taf_dt as taf  # noqa: E402
import taf_preprocess as pre_  # noqa: E402
from dynashift import fast_ot, make, runs  # noqa: E402
from dynashift.datasets import load_pair  # noqa: E402
from dynashift.files import check_folder  # noqa: E402


@dataclass(frozen=True)
class Args:
    source_size: int = 20_000
    """source transitions; the target has all of its own"""
    updates: int = 300
    """updates of each stage"""
    width: int = 64
    """width of the Transformer and of all other networks"""
    out: Path = ROOT / "docs" / "walkthrough.md"
    """file to write"""


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


# -------------------------------------------------------------------------------- by hand, in NumPy


def array(x) -> np.ndarray:
    return x.detach().double().numpy()


def mish(x):
    return x * np.tanh(np.logaddexp(0, x))


def heads(net, *inputs):
    """H networks (d_in) -> hidden x 3 -> 1 on one input: [H]"""
    x, out = np.concatenate(inputs), []
    for k in range(len(net.W[0])):
        h = x
        for i, (W, b) in enumerate(zip(net.W, net.b, strict=True)):
            h = (mish(h) if i else h) @ array(W[k]) + array(b[k, 0])
        out.append(h[0])
    return np.array(out)


def linear(layer, x):
    return x @ array(layer.weight).T + array(layer.bias)


def layer_norm(layer, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer.eps)
    return x * array(layer.weight) + array(layer.bias)


def transformer(net, tokens, states, actions, steps, n_heads):
    """Actions [K, d_a] and the embedded tokens [3K, W] of one window without padding."""
    t = array(net.embed_t.weight)[steps]
    parts = (
        linear(net.embed_c, tokens[:, None]) + t,
        linear(net.embed_s, states) + t,
        linear(net.embed_a, actions) + t,
    )
    embedded = np.stack(parts, 1).reshape(-1, t.shape[1])  # (c_1, s_1, a_1, c_2, ...)
    x = layer_norm(net.norm_in, embedded)
    T, W = x.shape
    for block in net.blocks:
        h = layer_norm(block.norm1, x)
        q, (k, v) = linear(block.query, h), np.split(linear(block.key_value, h), 2, 1)
        q, k, v = (u.reshape(T, n_heads, -1).swapaxes(0, 1) for u in (q, k, v))
        score = q @ k.swapaxes(1, 2) / np.sqrt(W // n_heads)
        score[:, ~np.tri(T, dtype=bool)] = -np.inf
        p = np.exp(score - score.max(-1, keepdims=True))
        h = (p / p.sum(-1, keepdims=True)) @ v
        x = x + linear(block.out, h.swapaxes(0, 1).reshape(T, W))
        x = x + linear(block.down, np.maximum(linear(block.up, layer_norm(block.norm2, x)), 0))
    return np.tanh(linear(net.action, layer_norm(net.norm_out, x)[1::3])), embedded


def kernel(x, y, gamma):
    return np.exp(-gamma * ((x[:, None] - y) ** 2).sum(-1))


def mmd(x, y, gamma):
    within = kernel(x, x, gamma).mean() + kernel(y, y, gamma).mean()
    return np.sqrt(max(within - 2 * kernel(x, y, gamma).mean(), 0))


def fragments(lengths, K):
    """First row and length of every fragment."""
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        for t in range(max(1, length - K + 1)):
            yield start + t, min(K, length)


def behaviour(cvae, s, a, z, variance):
    """log sum_m N(a; decoder(s, z_m), variance), for latents z [M, 2 d_a] of the prior"""
    x = np.concatenate([np.tile(s, (len(z), 1)), z], 1)
    first, _, second, _, last = cvae.decoder
    a_m = np.tanh(linear(last, np.maximum(linear(second, np.maximum(linear(first, x), 0)), 0)))
    log = -0.5 * ((a - a_m) ** 2 / variance + np.log(2 * np.pi * variance)).sum(1)
    return log.max() + np.log(np.exp(log - log.max()).sum())


def solve(x, y, tol: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Row costs of the plan, the potential on the target in the solver's last pass, and max C."""
    potentials, full_pass = [], fast_ot.full_pass

    def watched(to, X, a, G, *rest):
        potentials.append(G.numpy())
        return full_pass(to, X, a, G, *rest)

    with mock.patch.object(fast_ot, "full_pass", watched):
        c, report = fast_ot.row_costs(x, y, tol=tol)
    return c, potentials[-1], report["C_max"]


# ----------------------------------------------------------------------------------------- the walk


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
        "What concerns all rows at once is the project's in both: the threshold, the smallest and",
        "largest cost, the plan's potential, and the mean and spread of A.",
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
    gamma = 0.1 / np.sort(pairs)[(len(pairs) - 1) // 2]  # of an even number, the lower one
    what = "gamma of the kernel: 0.1 / median squared distance of source and target states"
    page.number(what, "(15)", report["gamma"], gamma)
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
    what = "token weight: omega over its mean in all windows"
    page.number(what, "(22)", walk.data.weight[i].item(), walk.weights[i])


def the_advantage(walk: Walk) -> None:
    page, args, i = walk.page, walk.args, walk.i
    said = f"After {walk.updates} updates of V and Q on the fused data."
    page.say("## Values and advantage", "", said)
    d_s, d_a = walk.data.states.shape[1], walk.data.actions.shape[1]
    walk.nets = nets = taf.build(args, d_s, d_a, torch.device("cpu"))
    for _ in range(walk.updates):
        taf.update_values(nets, walk.data, args)
    walk.data, walk.moments = taf.relabel(nets, walk.data, args)
    data, mu_A, sigma_A = walk.data, walk.moments["mu_A"], walk.moments["sigma_A"]
    s = array(data.states[i])
    v, q = heads(nets["V"], s), heads(nets["Q"], s, walk.source.actions[i].astype(float))
    with torch.no_grad():
        V = nets["V"](data.states[[i]])[:, 0]
        Q = nets["Q"](data.states[[i]], data.actions[[i]])[:, 0]
        v_next = nets["V_bar"](data.next_states[[i]])
        y = taf.value_target(data.rewards[[i]], data.terminal[[i]], v_next, args.gamma)
    page.number("V, both heads", "(23)", V, v)
    page.number("Q, both heads", "(24)", Q, q)
    after = walk.hat(walk.source.next_observations[i])
    y_by_hand = walk.source.rewards[i] + args.gamma * heads(nets["V_bar"], after).min()
    page.number("their common target r + gamma V(s')", "(23)", y[0], y_by_hand)
    by_hand = 0.5 * ((y_by_hand - v) ** 2).sum()
    loss = taf.v_loss(y, V[:, None], 0.5)
    page.number("loss of V at this transition, zeta = 0.5", "(23)", loss, by_hand)
    by_hand = 0.5 * ((y_by_hand - q) ** 2).sum()
    page.number("loss of Q at this transition", "(24)", taf.q_loss(y, Q[:, None]), by_hand)
    token, by_hand = data.tokens[i], q.mean() - v.mean()
    page.number("A = Q - V", "(39)", token.item() * (sigma_A + 1e-8) + mu_A, by_hand)
    page.number("A~, standardised", "(40)", token, (by_hand - mu_A) / (sigma_A + 1e-8))

    for _ in range(walk.updates):
        taf.update_command(nets, data, args)
    with torch.no_grad():
        command = nets["command"](data.states[[i]])[0]
    by_hand = heads(nets["command"], s)[0]
    page.number("command C(s)", "(41)", command[0], by_hand)
    u = token.item() - by_hand
    loss = taf.command_loss(data.tokens[[i]], command, args.zeta)
    page.number("loss of C at this transition", "(41)", loss, abs(args.zeta - (u < 0)) * u**2)


def train_policy(walk: Walk) -> None:
    nets, data, args = walk.nets, walk.data, walk.args
    for _ in range(walk.updates):
        taf.update_behaviour(nets, data, args)
    for step in range(1, walk.updates + 1):
        batch = taf.sample_windows(data, args)
        taf.update_critics(nets, batch, args)
        taf.update_policy(nets, batch, args)
        taf.update_target_policy(nets, args, step)
    for net in ("policy", "policy_bar"):
        nets[net].eval()  # without dropout, the numbers are the same every time


def the_window(walk: Walk) -> None:
    page, nets, i, K = walk.page, walk.nets, walk.i, walk.K
    page.say(
        "## The window",
        "",
        f"The {K} steps from here on, after {walk.updates} updates of the behaviour model",
        "and of the policy and critics.",
    )
    train_policy(walk)
    b = taf.windows(walk.data, torch.tensor([i]), K)
    S, A, C, T = (array(x[0]) for x in (b.states, b.actions, b.tokens, b.steps))
    by_hand = [
        heads(nets["Q"], S[k], A[k]).mean() - heads(nets["V"], S[k]).mean() for k in range(K)
    ]
    by_hand = (np.array(by_hand) - walk.moments["mu_A"]) / (walk.moments["sigma_A"] + 1e-8)
    page.number("advantages A~ of its steps", "(25), (39), (40)", b.tokens[0], by_hand)
    page.number("steps", "(25)", b.steps[0], walk.source.steps[i : i + K])
    page.number("token weights", "(22)", b.weight[0], walk.weights[i : i + K])
    seen = {}
    hook = nets["policy"].norm_in.register_forward_pre_hook(lambda _, x: seen.update(x=x[0]))
    with torch.no_grad():
        pi = nets["policy"](b)
    hook.remove()
    out, embedded = transformer(nets["policy"], C, S, A, T.astype(int), walk.args.heads)
    for k, name in enumerate(("A~_1", "s_1", "a_1")):
        what = f"embedded token {name}, first entries"
        page.number(what, "(25)", seen["x"][0, k, :4], embedded[k, :4])
    page.number("policy's action at this step", "(27)", pi[0, 0], out[0])
    the_losses(walk, b, pi, out)


def the_losses(walk: Walk, b: taf.Batch, pi: torch.Tensor, out: np.ndarray) -> None:
    """b: the window; pi [1, K, d_a] and out [K, d_a]: the policy's actions, the latter by hand."""
    page, nets, args, K = walk.page, walk.nets, walk.args, walk.K
    S, A, C, T, R = (array(x[0]) for x in (b.states, b.actions, b.tokens, b.steps, b.rewards))
    with torch.no_grad():
        a_last = nets["policy_bar"](b, only_last=True)[:, 0]
        q_last = nets["critics_bar"](b.states[:, -1], a_last).amin(0)
        q_hat = taf.k_step_target(b.rewards, b.terminal, q_last, args.gamma)
        weight = taf.critic_weight(b.weight, b.terminal)
        critic = taf.critic_loss(nets["critics"](b.states, b.actions), q_hat, weight)
        guidance = taf.q_term(nets["critics"](b.states, pi), b.weight)
        noise = torch.randn(args.M, K, 2 * A.shape[1])
        total, logs = taf.policy_loss(nets, b, noise, args)

    bar = transformer(nets["policy_bar"], C, S, A, T.astype(int), args.heads)[0][-1]
    boot = heads(nets["critics_bar"], S[-1], bar).min()
    page.number("bootstrap: smaller target critic at the last step", "(26)", q_last[0], boot)
    powers = args.gamma ** np.arange(K)
    hand_q = [powers[: K - 1 - k] @ R[k : K - 1] + powers[K - 1 - k] * boot for k in range(K)]
    page.number("Q_hat of all steps (the last is the bootstrap itself)", "(26)", q_hat[0], hand_q)
    both = np.array([heads(nets["critics"], S[k], A[k]) for k in range(K)])  # [K, 2]
    W = walk.weights[walk.i : walk.i + K]
    share = W[:-1] / W[:-1].sum()
    by_hand = share @ ((np.array(hand_q)[:-1, None] - both[:-1]) ** 2).sum(1)
    page.number("loss of both critics", "(26)", critic, by_hand)
    share = W / W.sum()
    dt = share @ ((A - out) ** 2).mean(1)
    page.number("imitation loss", "(27)", logs["losses/dt"], dt)
    least = np.array([heads(nets["critics"], S[k], out[k]).min() for k in range(K)])
    q_term = -(share @ least) / (share @ np.abs(least))
    page.number("Q term", "(28)", guidance, q_term)
    reg = -share @ [
        behaviour(nets["cvae"], S[k], out[k], array(noise[:, k]), args.variance) for k in range(K)
    ]
    page.number("L_reg", "(28)", logs["losses/reg"], reg)
    page.number("loss of the policy", "(28)", total, dt + args.eta_reg * reg + args.alpha * q_term)


def the_action(walk: Walk) -> None:
    page, nets, args = walk.page, walk.nets, walk.args
    page.say(
        "## The action",
        "",
        "The target robot is at the start of an episode.",
        "The window has one step, and the command replaces the advantage.",
    )
    env = make("hopper", "morph", seed=0)
    first = env.reset(seed=0)[0]
    env.close()
    start = walk.hat(first)
    c_1 = heads(nets["command"], start)[0]
    agent = taf.Agent(nets, walk.pre, args, 1)
    action = agent.act(first[None], np.zeros(1), np.ones(1, bool))[0]
    page.number("command C(s_1)", "(41), Algorithm 2", agent.context.tokens[0, -1], c_1)
    window = np.array([c_1]), start[None], np.zeros((1, len(action))), np.array([0])
    by_hand = transformer(nets["policy"], *window, args.heads)[0]
    page.number("action a_1", "Algorithm 2", action, by_hand[0])
    page.say(
        "Largest difference between the two columns, relative to the larger of 1 and the number: "
        f"{page.worst:.1e}."
    )


def walk(size: int, updates: int, width: int, target_size: int = 5000) -> Page:
    walk = Walk(size, updates, width, target_size)
    for part in (the_transition, the_gate, the_weight, the_advantage, the_window, the_action):
        part(walk)
    return walk.page


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    check_folder(args.out.parent)
    page = walk(args.source_size, args.updates, args.width)
    args.out.write_text(page.text.rstrip() + "\n")
    print(f"{args.out}: largest difference {page.worst:.1e}")
