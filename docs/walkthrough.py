"""Follows one source transition through all of TAF-DT: python docs/walkthrough.py

Writes docs/walkthrough.md. Every number is computed twice: by the project's functions, and by hand
in NumPy from the equation that is named beside it. If the two differ by more than rounding, the
script fails.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dynashift import quick_help  # noqa: E402, F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402
from by_hand import array, behaviour, heads, transformer  # noqa: E402
from walk_data import Page, Walk, the_gate, the_transition, the_weight  # noqa: E402

import taf_dt as taf  # noqa: E402
from dynashift import make  # noqa: E402
from dynashift.errors import one_line_errors  # noqa: E402
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
    loss = taf.value_loss(y, V[:, None], 0.5)
    page.number("loss of V at this transition, zeta = 0.5", "(23)", loss, by_hand)
    by_hand = 0.5 * ((y_by_hand - q) ** 2).sum()
    loss = taf.action_value_loss(y, Q[:, None])
    page.number("loss of Q at this transition", "(24)", loss, by_hand)
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
    page.number("loss weights of its steps", "(22)", b.weight[0], walk.weights[i : i + K])
    seen = {}
    hook = nets["policy"].norm_in.register_forward_pre_hook(lambda _, x: seen.update(x=x[0]))
    with torch.no_grad():
        pi = nets["policy"](b)
    hook.remove()
    out, embedded = transformer(nets["policy"], C, S, A, T.astype(int), walk.args.heads)
    for k, name in enumerate(("A~_1", "s_1", "a_1")):
        what = f"embedding of {name}, first entries"
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
        guidance = taf.q_term(nets["critics"](b.states, pi).amin(0), b.weight)
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


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    check_folder(args.out.parent)
    page = walk(args.source_size, args.updates, args.width)
    args.out.write_text(page.text.rstrip() + "\n")
    print(f"{args.out}: largest difference {page.worst:.1e}")


if __name__ == "__main__":
    with one_line_errors():
        main()
