"""IGDF: implicit Q-learning on the target data and on that part of the source data which looks like the target's.

    python baselines/igdf.py --quick --data embedded                     three minutes on a laptop
    python baselines/igdf.py --env hopper --shift morph --seed 1         one task, as in the tables
    python baselines/igdf.py --official-bug                              with the error of the authors' code

Paper: Wen et al., "Contrastive Representation for Data Filtering in Cross-Domain Offline Reinforcement Learning",
ICML 2024; its code: github.com/BattleWen/IGDF. Code followed: ODRL, github.com/OffDynamicsRL/off-dynamics-rl, whose
numbers these are, being those for 5,000 target transitions. Differences from it:

    1  ODRL defines the contrastive training of the encoders and never calls it, so that random ones filter the data:
       that is --encoder-updates 0. The authors' code multiplies weights [B, 1] and errors [B] to a [B, B], which gives
       every transition the mean weight: that is --official-bug. Here the encoders are trained and the shapes agree
    2  the 127 source states among which a target state has to be found are encoded once a batch, not once a row of it
    3  V, Q and the policy step together, each at the weights before the update; ODRL's Q sees V after its step
    4  the policy has no output for a standard deviation, which ODRL's has and never uses
    5  no transition crosses the end of an episode; ODRL pairs the target's time-outs with the next episode's beginning
    6  both critics are one batched product, and one fused Adam serves V, Q and policy: the same numbers, faster
    7  ant's observation has the 27 numbers that are ever not zero

The authors normalise states by the moments of both datasets (--normalise-states) and advise to keep less of the source
on halfcheetah and hopper, xi 0.25 (--xi), and 0.75 on walker2d. ODRL has 0.75 everywhere and leaves states as they are,
and so does this file. The code of IQL's authors scales rewards (--scale-rewards), which neither of the two does.

IGDF's part: `contrastive_loss`, `score`, `update_encoders`, `update`. All else is IQL (Kostrikov et al., Eqs. 5 to 7),
as in iql.py.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# The package `dynashift` lies in the folder above, from wherever this script is started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynashift import runs
from dynashift.datasets import Dataset, TaskArgs, load_task
from dynashift.errors import UserError, one_line_errors
from dynashift.runs import Flat, RunArgs

# --------------------------------------------------------------------------------------------- arguments

# A small run that ends in three minutes on two cores: less data, smaller networks, fewer updates.
QUICK = dict(
    source_size=100_000,
    source_batch=64,
    target_batch=64,
    hidden=128,
    lr=1e-3,
    updates=15_000,
    encoder_updates=3_000,
    eval_every=5_000,
    save_every=5_000,
    log_every=250,
)


@dataclass(frozen=True)
class Args:
    task: Flat[TaskArgs] = TaskArgs()
    run: Flat[RunArgs] = RunArgs(log_every=1_000, save_every=20_000)

    # IGDF
    encoder_updates: int = 7_000
    """updates of the encoders phi(s, a) and psi(s'), before all else; 0 is ODRL, which does not train them"""
    encoder_dim: int = 64
    """dimension of their outputs"""
    xi: float = 0.75
    """data selection ratio xi: the share of a source batch that is kept"""
    alpha: float = 1.0
    """importance coefficient alpha: a source transition weighs exp(alpha h) in Q's loss"""
    official_bug: bool = False
    """one weight for all transitions in Q's loss, as in the authors' code"""

    # IQL
    updates: int = 1_000_000
    """updates of all networks"""
    source_batch: int = 128
    """source transitions in a batch, before the selection"""
    target_batch: int = 128
    """target transitions in a batch"""
    gamma: float = 0.99
    """discount gamma, Eq. (6)"""
    expectile: float = 0.7
    """expectile tau, Eq. (5)"""
    beta: float = 3.0
    """inverse temperature beta, Eq. (7)"""
    max_weight: float = 100.0
    """largest weight exp(beta A) of a transition, Eq. (7)"""
    tau: float = 0.005
    """rate alpha at which the target critics follow the critics, Algorithm 1; more in shorter runs"""
    lr: float = 3e-4
    """learning rate lambda of all networks"""
    cosine: bool = True
    """let the policy's rate fall to 0 over the run, as half a cosine"""
    hidden: int = 256
    """width of the two hidden layers of all networks"""
    scale_rewards: bool = False
    """rewards times 1000 / (largest - smallest return of an episode), as in the code of IQL's authors"""
    normalise_states: bool = False
    """states with mean 0 and standard deviation 1 over both datasets, as in CORL's code"""


def defaults(args: Args) -> dict:
    """What this task and --quick set where the command line says nothing."""
    values = dict(QUICK) if args.run.quick else {}
    values["tau"] = runs.averaging_rate(Args.tau, runs.budget_share(args, values, Args.updates))
    return values


def resolve(args: Args) -> Args:
    """Refuse what cannot be, and name the device."""
    runs.check_args(args, "source_batch target_batch hidden lr encoder_dim", "encoder_updates")
    if not 0 < args.xi <= 1 or int(args.xi * args.source_batch) < 1:
        raise UserError(f"--xi is the share of source transitions to keep, at most 1 and not too small, not {args.xi}")
    if not 0 < args.expectile < 1 or not 0 <= args.gamma < 1:
        raise UserError(f"--expectile {args.expectile} and --gamma {args.gamma} lie between 0 and 1")
    return runs.replace(args, device=str(runs.pick_device(args.run.device)))


# -------------------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """All N transitions, on the training device: those of the source first, then those of the target."""

    states: Tensor  # [N, d_s]
    actions: Tensor  # [N, d_a]
    rewards: Tensor  # [N]
    next_states: Tensor  # [N, d_s]
    terminal: Tensor  # [N] bool, the robot failed: nothing follows


class Batch(NamedTuple):
    """B of them, in the same order."""

    states: Tensor  # [B, d_s]
    actions: Tensor  # [B, d_a]
    rewards: Tensor  # [B]
    next_states: Tensor  # [B, d_s]
    terminal: Tensor  # [B] bool


def normalise(states: np.ndarray, mu: np.ndarray, sd: np.ndarray) -> np.ndarray:
    return ((states - mu) / sd).astype(np.float32)


def state_moments(source: Dataset, target: Dataset, args: Args) -> tuple[np.ndarray, np.ndarray]:
    """mu and sd [d_s] by which states are normalised: 0 and 1 unless --normalise-states is given."""
    states = np.concatenate([source.observations, target.observations])
    if not args.normalise_states:
        return np.zeros(states.shape[1]), np.ones(states.shape[1])
    return states.mean(0, dtype=np.float64), states.std(0, dtype=np.float64) + 1e-3  # which is CORL's number


def reward_scale(source: Dataset, target: Dataset, args: Args) -> float:
    """One factor for the rewards of both, so that they remain comparable: 1 unless --scale-rewards is given."""
    returns = np.concatenate([source.returns, target.returns])
    if args.scale_rewards and returns.max() == returns.min():
        raise UserError("all episodes have the same return, by which --scale-rewards cannot divide; leave it out")
    return 1000 / float(returns.max() - returns.min()) if args.scale_rewards else 1.0


def on_device(source: Dataset, target: Dataset, args: Args) -> Data:
    keys = ("observations", "actions", "rewards", "next_observations", "terminals")
    s, a, r, s_next, terminal = (np.concatenate([getattr(source, key), getattr(target, key)]) for key in keys)
    norm, scale = state_moments(source, target, args), reward_scale(source, target, args)
    columns = normalise(s, *norm), a, scale * r, normalise(s_next, *norm), terminal
    return Data(*(torch.as_tensor(column, device=args.run.device) for column in columns))


def sample(data: Data, N_s: int, B_s: int, B_t: int) -> Batch:
    """B_s of the first N_s transitions and B_t of the others, uniformly: drawn and gathered on the device."""
    device, N = data.rewards.device, len(data.rewards)
    rows = torch.cat([torch.randint(N_s, (B_s,), device=device), torch.randint(N_s, N, (B_t,), device=device)])
    return Batch(*(column[rows] for column in data))


# ---------------------------------------------------------------------------------------------- networks


class Heads(nn.Module):
    """H networks of one shape, (d_in) -> hidden x 2 -> 1 with ReLU, computed together: one product a layer."""

    def __init__(self, H: int, d_in: int, hidden: int):
        super().__init__()
        sizes = [(m, n, 1 / math.sqrt(m)) for m, n in itertools.pairwise([d_in, hidden, hidden, 1])]
        self.W = nn.ParameterList(torch.empty(H, m, n).uniform_(-b, b) for m, n, b in sizes)  # as nn.Linear begins
        self.b = nn.ParameterList(torch.empty(H, 1, n).uniform_(-b, b) for _, n, b in sizes)

    def forward(self, *inputs: Tensor) -> Tensor:
        h = torch.cat(inputs, -1).expand(len(self.W[0]), -1, -1)  # [H, B, d_in]
        for i, (W, b) in enumerate(zip(self.W, self.b, strict=True)):
            h = torch.baddbmm(b, h.relu() if i else h, W)
        return h[..., 0]  # [H, B]


def mlp(d_in: int, d_out: int, hidden: int) -> nn.Sequential:
    layers = nn.Linear(d_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, d_out)
    return nn.Sequential(*layers)


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """All networks and their optimiser: all that a checkpoint holds."""
    nets = {"V": Heads(1, d_s, args.hidden), "Q": Heads(2, d_s + d_a, args.hidden)}
    nets |= {"phi": mlp(d_s + d_a, args.encoder_dim, args.hidden), "psi": mlp(d_s, args.encoder_dim, args.hidden)}
    nets |= {"Q_bar": Heads(2, d_s + d_a, args.hidden), "policy": mlp(d_s, d_a, args.hidden)}
    nets["Q_bar"].load_state_dict(nets["Q"].state_dict())
    nets["Q_bar"].requires_grad_(False)
    for net in nets.values():
        net.to(device)
    values, policy = [*nets["V"].parameters(), *nets["Q"].parameters()], [*nets["policy"].parameters()]
    groups = [{"params": values}, {"params": policy}]  # the second one's rate falls
    encoders, fused = [*nets["phi"].parameters(), *nets["psi"].parameters()], torch.device(device).type != "meta"
    nets["adam"] = torch.optim.Adam(groups, lr=args.lr, fused=fused)
    nets["adam_encoders"] = torch.optim.Adam(encoders, lr=args.lr, fused=fused)
    return nets


def descend(optimizer, loss: Tensor) -> None:
    """One step down. Gradients are computed for this optimiser's parameters alone."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()


@torch.no_grad()
def move(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """slow := (1 - rate) slow + rate fast"""
    torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), rate)


# ------------------------------------------------------------------------------------- losses, one an equation


def v_loss(q_bar: Tensor, v: Tensor, expectile: float) -> Tensor:
    """Eq. (5), of the smaller target critic. q_bar, v [B]"""
    assert q_bar.shape == v.shape, (q_bar.shape, v.shape)
    u = q_bar - v
    return (torch.where(u < 0, 1 - expectile, expectile) * u.square()).mean()


def q_loss(q: Tensor, r: Tensor, terminal: Tensor, v_next: Tensor, weight: Tensor, gamma: float) -> Tensor:
    """Eq. (6), both critics, with a weight for each transition. q [2, B], the others [B]"""
    assert q.shape[1:] == r.shape == terminal.shape == v_next.shape, (q.shape, r.shape, terminal.shape, v_next.shape)
    y = r + gamma * torch.where(terminal, 0.0, v_next)
    error = (y - q).square()  # [2, B]
    assert weight.shape == error.shape[1:], (weight.shape, error.shape)  # [B, 1] against [B] would give a [B, B]
    return (weight * error).mean(1).sum()


def policy_loss(advantage: Tensor, a: Tensor, pi: Tensor, beta: float, max_weight: float) -> Tensor:
    """Eq. (7) for a Gaussian of constant variance: a weighted squared error. advantage [B], a, pi [B, d_a]"""
    weight, error = (beta * advantage).exp().clamp(max=max_weight), (a - pi).square().mean(1)
    assert weight.shape == error.shape, (weight.shape, error.shape)  # [B, 1] against [B] would give a [B, B]
    return (weight * error).mean()


def iql_losses(nets: dict, b: Batch, weight: Tensor, args: Args) -> tuple[Tensor, dict]:
    """The sum, of which each network has its own term, and the terms. weight [B] of the transitions in Q's loss"""
    with torch.no_grad():
        q_bar, v_next = nets["Q_bar"](b.states, b.actions).amin(0), nets["V"](b.next_states)[0]  # [B] each
    v, q = nets["V"](b.states)[0], nets["Q"](b.states, b.actions)  # [B], [2, B]
    pi = nets["policy"](b.states).tanh()  # [B, d_a]
    losses = {
        "losses/v": v_loss(q_bar, v, args.expectile),
        "losses/q": q_loss(q, b.rewards, b.terminal, v_next, weight, args.gamma),
        "losses/policy": policy_loss(q_bar - v.detach(), b.actions, pi, args.beta, args.max_weight),
    }
    charts = {"charts/q_mean": q.mean(), "charts/q_largest": q.abs().amax(), "charts/v_mean": v.mean()}
    return sum(losses.values()), losses | charts


def contrastive_loss(phi: Tensor, psi: Tensor, psi_other: Tensor) -> Tensor:
    """Which of n + 1 states followed (s, a) in the target: its own, or one of n of the source? Binary cross-entropy on
    inner products. phi, psi [B, d] of target transitions, psi_other [n, d]"""
    assert phi.shape == psi.shape, (phi.shape, psi.shape)
    logits = torch.cat([(phi * psi).sum(1, keepdim=True), phi @ psi_other.T], 1)  # [B, 1 + n]
    first = torch.zeros_like(logits)
    first[:, 0] = 1
    return F.binary_cross_entropy_with_logits(logits, first)


def score(nets: dict, s: Tensor, a: Tensor, s_next: Tensor) -> Tensor:
    """h [B], the cosine of phi(s, a) and psi(s'): how well s' fits the target's dynamics"""
    return F.cosine_similarity(nets["phi"](torch.cat([s, a], 1)), nets["psi"](s_next), dim=1)


def learning_rate(step: int, args: Args) -> float:
    """Of the policy at update `step`, counted from 1."""
    return args.lr * (0.5 * (1 + math.cos(math.pi * (step - 1) / args.updates)) if args.cosine else 1.0)


def update_encoders(nets: dict, data: Data, N_s: int, args: Args, step: int) -> dict:
    """One step of phi and psi, with as many states to choose from as there are target transitions."""
    n = args.target_batch - 1
    b = sample(data, N_s, n, args.target_batch)
    phi = nets["phi"](torch.cat([b.states[n:], b.actions[n:]], 1))
    psi = nets["psi"](b.next_states)
    loss = contrastive_loss(phi, psi[n:], psi[:n])
    descend(nets["adam_encoders"], loss)
    return {"losses/contrastive": loss}


def update(nets: dict, data: Data, N_s: int, args: Args, step: int) -> dict:
    """One step of V, Q and policy on the best of a source batch and on a target batch; nothing waits for the device."""
    B_s = args.source_batch
    b = sample(data, N_s, B_s, args.target_batch)
    with torch.no_grad():
        h = score(nets, b.states[:B_s], b.actions[:B_s], b.next_states[:B_s])  # [B_s]
    h, best = h.topk(int(args.xi * B_s))
    rows = torch.cat([best, torch.arange(B_s, len(b.rewards), device=best.device)])
    b = Batch(*(column[rows] for column in b))
    weight = torch.cat([(args.alpha * h).exp(), h.new_ones(args.target_batch)])  # [B]
    if args.official_bug:
        weight = weight.mean().expand(len(weight))  # the mean over a [B, B] of all weights times all errors
    total, logs = iql_losses(nets, b, weight, args)
    nets["adam"].param_groups[1]["lr"] = learning_rate(step, args)
    descend(nets["adam"], total)
    move(nets["Q_bar"], nets["Q"], args.tau)
    return logs | {"charts/score_mean": h.mean(), "charts/score_lowest_kept": h.amin()}


# --------------------------------------------------------------------------------------------- evaluation


def evaluate(nets: dict, norm: tuple, args: Args) -> dict:
    def act(obs, *_):  # [n, d_s] -> [n, d_a]
        return nets["policy"](torch.as_tensor(normalise(obs, *norm), device=args.run.device)).tanh().cpu().numpy()

    return runs.play(args, act)


# ----------------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    source, target = load_task(args.task)
    with runs.open_run("igdf", args, runs.plain(Args, defaults, args), source=source, target=target) as run:
        if run.result:
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        norm, data = state_moments(source, target, args), on_device(source, target, args)
        nets = build(args, data.states.shape[1], data.actions.shape[1], args.run.device)
        run.begin(nets)
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets, norm, args))
        run.limit = 10 * float(data.rewards.abs().amax()) / (1 - args.gamma)
        for step in run.steps("encoders", args.encoder_updates):
            run.log(step, update_encoders(nets, data, len(source), args, step))
        for step in run.steps("igdf", args.updates):
            logs = update(nets, data, len(source), args, step)
            run.log(step, logs | {"charts/learning_rate": learning_rate(step, args)})
            if run.evaluation_due(step):
                run.evaluated(step, evaluate(nets, norm, args))
        return run.finish()


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
