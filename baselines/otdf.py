"""OTDF: implicit Q-learning on source data chosen by optimal transport, with a policy held near the target's behaviour.

    python baselines/otdf.py --quick --data embedded                     three minutes on a laptop
    python baselines/otdf.py --env hopper --shift morph --seed 1         one task, as in the tables
    python baselines/otdf.py --official-bug                              with the error of the official code

Paper: Lyu et al., "Cross-Domain Offline Policy Adaptation with Optimal Transport and Dataset Constraint", ICLR 2025.
Official code: github.com/dmksjfl/OTDF. Differences from it:

    1  it multiplies the policy's errors [B] by weights [B, 1] to a [B, B], whose mean is mean weight times mean error:
       cloning without regard to the advantage. Here the shapes agree; --official-bug is the official form
    2  it solves transport for consecutive chunks of 10,000 source rows, with half-precision features and at most 100
       iterations, the last chunk on another scale. Here it is one problem for all rows, solved by taf_preprocess.py
       (costs of (s, a, s'), cosine, no gate) and kept for all seeds
    3  its regulariser is 0.05 times the mean of C / max C, for each chunk; here that mean is taken once, over 2,000
       source rows and all target rows, and rounded to two digits
    4  V, Q and the policy step together, each at the weights before the update; the official Q sees V after its step
    5  no transition crosses the end of an episode; the official loader pairs time-outs with the next one's beginning
    6  both critics are one batched product, and one fused Adam serves V, Q and policy: the same numbers, faster
    7  ant's observation has the 27 numbers that are ever not zero
    8  the weight of the behaviour term, 0.1 for kinematic shifts and 0.5 for the others, rests on one example for each
       shift, all of halfcheetah with medium data: the official run script has no more (--reg-weight)

The code of IQL's authors scales rewards (--scale-rewards) and CORL's, github.com/tinkoff-ai/CORL, normalises states
(--normalise-states); OTDF's does neither, and neither is the default here. Transport costs are of states as they are.

OTDF's part: `transport_costs`, `source_weights`, `cvae_loss`, `behaviour_log_density`, `policy_loss`, `update`. All
else is IQL (Kostrikov et al., Eqs. 5 to 7), as in iql.py.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# The package `dynashift` and taf_preprocess.py lie in the folder above, from wherever this script is started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import taf_preprocess
from dynashift import runs
from dynashift.datasets import Dataset, TaskArgs, load_task
from dynashift.errors import UserError, one_line_errors
from dynashift.runs import Flat, RunArgs
from dynashift.tasks import find_task
from taf_preprocess import GateArgs

# --------------------------------------------------------------------------------------------- arguments

# Weight of the behaviour term by shift: the official run script's examples have 0.5 for morph and gravity shifts.
REG_WEIGHT = {"kinematic": 0.1}
OTHER_REG_WEIGHT = 0.5
# A small run that ends in three minutes on two cores: less data, smaller networks, fewer updates.
QUICK = dict(
    source_size=100_000,
    source_batch=64,
    target_batch=64,
    hidden=128,
    lr=1e-3,
    updates=15_000,
    cvae_hidden=64,
    cvae_updates=3_000,
    eval_every=5_000,
    save_every=5_000,
    log_every=250,
)


@dataclass(frozen=True)
class Args:
    task: Flat[TaskArgs] = TaskArgs()
    run: Flat[RunArgs] = RunArgs(log_every=1_000, save_every=20_000)

    # OTDF
    keep: float = 0.8
    """share xi of a source batch that is kept: the smallest transport costs"""
    ot_reg: float = 0.05
    """entropic regulariser of the transport problem, times the mean of C / max C"""
    ot_tol: float = 1e-4
    """accepted L1 error of the plan's marginal on the target"""
    reg_weight: float | None = None
    """weight beta of the behaviour term in the policy's loss; unless given, 0.1 for kinematic shifts, else 0.5"""
    M: int = 10
    """latents M for each state in the behaviour term"""
    variance: float = 0.1
    """variance of the Gaussian in the behaviour term"""
    cvae_updates: int = 10_000
    """updates of the CVAE, before all else"""
    cvae_batch: int = 128
    """target transitions in a batch for the CVAE"""
    cvae_hidden: int = 750
    """width of the CVAE's layers"""
    cvae_lr: float = 1e-3
    """learning rate of the CVAE"""
    cvae_kl: float = 0.5
    """weight of the CVAE's KL divergence"""
    official_bug: bool = False
    """the official code's policy loss, in which the advantages have no effect but a common factor"""

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
    """learning rate lambda of V, Q and policy"""
    cosine: bool = True
    """let the policy's rate fall to 0 over the run, as half a cosine"""
    hidden: int = 256
    """width of the two hidden layers of V, Q and policy"""
    scale_rewards: bool = False
    """rewards times 1000 / (largest - smallest return of an episode), as in the code of IQL's authors"""
    normalise_states: bool = False
    """states with mean 0 and standard deviation 1 over both datasets, as in CORL's code"""


def defaults(args: Args) -> dict:
    """What this task and --quick set where the command line says nothing."""
    values = {"reg_weight": REG_WEIGHT.get(args.task.shift, OTHER_REG_WEIGHT)} | (QUICK if args.run.quick else {})
    values["tau"] = runs.averaging_rate(Args.tau, runs.budget_share(args, values, Args.updates))
    return values


def resolve(args: Args) -> Args:
    """Refuse what cannot be, and name the device."""
    if args.reg_weight is None:
        args = runs.replace(args, reg_weight=REG_WEIGHT.get(args.task.shift, OTHER_REG_WEIGHT))
    positive = "source_batch target_batch hidden lr ot_reg ot_tol M variance cvae_batch cvae_hidden cvae_lr"
    runs.check_args(args, positive, "reg_weight cvae_updates")
    if not 0 < args.keep <= 1 or int(args.keep * args.source_batch) < 1:
        raise UserError(
            f"--keep is the share of source transitions to keep, at most 1 and not too small, not {args.keep}"
        )
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
    cost: Tensor  # [N] transport cost of a source transition, 0 for a target transition


class Batch(NamedTuple):
    """B of them, in the same order."""

    states: Tensor  # [B, d_s]
    actions: Tensor  # [B, d_a]
    rewards: Tensor  # [B]
    next_states: Tensor  # [B, d_s]
    terminal: Tensor  # [B] bool
    cost: Tensor  # [B] as there


def mean_scaled_cost(x: np.ndarray, y: np.ndarray) -> float:
    """The mean of C / max C for the cosine cost C between all rows of x [n, d] and y [m, d]."""
    x, y = (z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-8) for z in (x, y))
    C = 1 - x @ y.T
    return float(C.mean() / max(C.max(), 1e-12))


def transport_costs(source: Dataset, target: Dataset, args: Args) -> dict:
    """What `taf_preprocess.preprocess` finds without gate and rewards: c_hat [N_s] is the cost of each row."""
    some = slice(None, None, -(-len(source) // 2_000))
    x = taf_preprocess.transition_features(source, some, reward=False)
    y = taf_preprocess.transition_features(target, slice(None), reward=False)
    reg = float(f"{args.ot_reg * mean_scaled_cost(x, y):.2g}")  # rounded, because it is part of the file's name
    K = find_task(args.task.env, args.task.shift).K
    gate = GateArgs(filter="ot", K=K, ot_reward=False, ot_states="raw", ot_reg=reg, ot_tol=args.ot_tol)
    out = args.run.out / "preprocess"
    return taf_preprocess.preprocess(args.task, gate, source, target, out, args.run.device)


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


def on_device(source: Dataset, target: Dataset, cost: np.ndarray, args: Args) -> Data:
    keys = ("observations", "actions", "rewards", "next_observations", "terminals")
    s, a, r, s_next, terminal = (np.concatenate([getattr(source, key), getattr(target, key)]) for key in keys)
    norm, scale = state_moments(source, target, args), reward_scale(source, target, args)
    cost = np.concatenate([cost, np.zeros(len(target))]).astype(np.float32)
    columns = normalise(s, *norm), a, scale * r, normalise(s_next, *norm), terminal, cost
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


class CVAE(nn.Module):
    """The target's behaviour: a ~ decoder(s, z), z ~ N(0, 1)."""

    def __init__(self, d_s: int, d_a: int, hidden: int):
        super().__init__()
        self.encoder, self.decoder = mlp(d_s + d_a, 4 * d_a, hidden), mlp(d_s + 2 * d_a, d_a, hidden)

    def encode(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.encoder(torch.cat([s, a], -1)).chunk(2, -1)
        return mean, log_std.clamp(-4, 15).exp()  # [..., 2 d_a] each

    def decode(self, s: Tensor, z: Tensor) -> Tensor:
        return self.decoder(torch.cat([s, z], -1)).tanh()


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """All networks and their optimiser: all that a checkpoint holds."""
    nets = {"V": Heads(1, d_s, args.hidden), "Q": Heads(2, d_s + d_a, args.hidden)}
    nets |= {"Q_bar": Heads(2, d_s + d_a, args.hidden), "policy": mlp(d_s, 2 * d_a, args.hidden)}  # mean, log-std
    nets["cvae"] = CVAE(d_s, d_a, args.cvae_hidden)
    nets["Q_bar"].load_state_dict(nets["Q"].state_dict())
    nets["Q_bar"].requires_grad_(False)
    for net in nets.values():
        net.to(device)
    values, policy = [*nets["V"].parameters(), *nets["Q"].parameters()], [*nets["policy"].parameters()]
    groups = [{"params": values}, {"params": policy}]  # the second one's rate falls
    fused = torch.device(device).type != "meta"
    nets["adam"] = torch.optim.Adam(groups, lr=args.lr, fused=fused)
    nets["adam_cvae"] = torch.optim.Adam(nets["cvae"].parameters(), lr=args.cvae_lr, fused=fused)
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


def policy_loss(advantage: Tensor, a: Tensor, pi: Tensor, beta: float, max_weight: float, official_bug: bool) -> Tensor:
    """Eq. (7) for a Gaussian of constant variance: a weighted squared error. advantage [B], a, pi [B, d_a]"""
    weight, error = (beta * advantage).exp().clamp(max=max_weight), (a - pi).square().sum(1)
    assert weight.shape == error.shape, (weight.shape, error.shape)
    if official_bug:
        return (weight[:, None] * error).mean()  # a [B, B]: mean weight times mean error
    return (weight * error).mean()


def source_weights(cost: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Of a source batch with transport costs [B]: the rows [keep] that cost least, and their weights exp(d), where d is
    minus the cost, scaled to [-1, 0] within the batch."""
    low, high = cost.amin(), cost.amax()
    d, rows = ((low - cost) / (high - low).clamp_min(1e-12)).topk(keep)
    return rows, d.exp()


def cvae_loss(a: Tensor, a_hat: Tensor, mean: Tensor, std: Tensor, weight: float) -> Tensor:
    # KL(N(mean, std^2) || N(0, 1)), averaged over batch and latents as the squared error is over batch and actions
    kl = 0.5 * (mean.square() + std.square() - 1) - std.log()
    return F.mse_loss(a_hat, a) + weight * kl.mean()


def behaviour_log_density(cvae: CVAE, s: Tensor, a: Tensor, noise: Tensor, variance: float) -> Tensor:
    """log sum_m N(a; decoder(s, z_m), variance), z_m = mean + std noise_m: s [B, d_s], a [B, d_a], noise [M, B, 2 d_a]
    -> [B]. As in the official code without prior, posterior and 1/M."""
    mean, std = cvae.encode(s, a)
    a_m = cvae.decode(s.expand(len(noise), *s.shape), mean + std * noise)  # [M, B, d_a]
    log_normal = -0.5 * ((a - a_m).square() / variance + math.log(2 * math.pi * variance))
    return log_normal.sum(-1).logsumexp(0)


def otdf_losses(nets: dict, b: Batch, weight: Tensor, args: Args) -> tuple[Tensor, dict]:
    """The sum, of which each network has its own terms, and the terms. weight [B] of the transitions in Q's loss"""
    with torch.no_grad():
        q_bar, v_next = nets["Q_bar"](b.states, b.actions).amin(0), nets["V"](b.next_states)[0]  # [B] each
    v, q = nets["V"](b.states)[0], nets["Q"](b.states, b.actions)  # [B], [2, B]
    mean, log_std = nets["policy"](b.states).chunk(2, 1)  # [B, d_a] each
    advantage, pi = q_bar - v.detach(), mean.tanh()
    losses = {
        "losses/v": v_loss(q_bar, v, args.expectile),
        "losses/q": q_loss(q, b.rewards, b.terminal, v_next, weight, args.gamma),
        "losses/policy": policy_loss(advantage, b.actions, pi, args.beta, args.max_weight, args.official_bug),
    }
    drawn = (mean + log_std.clamp(-20, 2).exp() * torch.randn_like(mean)).tanh()
    noise = torch.randn(args.M, len(mean), 2 * mean.shape[1], device=mean.device)
    losses["losses/reg"] = -behaviour_log_density(nets["cvae"], b.states, drawn, noise, args.variance).mean()
    total = losses["losses/v"] + losses["losses/q"] + losses["losses/policy"] + args.reg_weight * losses["losses/reg"]
    charts = {"charts/q_mean": q.mean(), "charts/q_largest": q.abs().amax(), "charts/v_mean": v.mean()}
    return total, losses | charts


def learning_rate(step: int, args: Args) -> float:
    """Of the policy at update `step`, counted from 1."""
    return args.lr * (0.5 * (1 + math.cos(math.pi * (step - 1) / args.updates)) if args.cosine else 1.0)


def update_cvae(nets: dict, data: Data, N_s: int, args: Args, step: int) -> dict:
    """One step of the target's behaviour model."""
    b = sample(data, N_s, 0, args.cvae_batch)
    mean, std = nets["cvae"].encode(b.states, b.actions)
    a_hat = nets["cvae"].decode(b.states, mean + std * torch.randn_like(std))
    loss = cvae_loss(b.actions, a_hat, mean, std, args.cvae_kl)
    descend(nets["adam_cvae"], loss)
    return {"losses/cvae": loss, "charts/reconstruction": F.mse_loss(a_hat, b.actions)}


def update(nets: dict, data: Data, N_s: int, args: Args, step: int) -> dict:
    """One step of V, Q and policy on the best of a source batch and on a target batch; nothing waits for the device."""
    B_s = args.source_batch
    b = sample(data, N_s, B_s, args.target_batch)
    best, weight = source_weights(b.cost[:B_s], int(args.keep * B_s))
    rows = torch.cat([best, torch.arange(B_s, len(b.rewards), device=best.device)])
    total, logs = otdf_losses(
        nets, Batch(*(column[rows] for column in b)), torch.cat([weight, weight.new_ones(args.target_batch)]), args
    )
    nets["adam"].param_groups[1]["lr"] = learning_rate(step, args)
    descend(nets["adam"], total)
    move(nets["Q_bar"], nets["Q"], args.tau)
    return logs | {"charts/weight_mean": weight.mean()}


# --------------------------------------------------------------------------------------------- evaluation


def evaluate(nets: dict, norm: tuple, args: Args) -> dict:
    def act(obs, *_):  # [n, d_s] -> [n, d_a]
        mean, _ = nets["policy"](torch.as_tensor(normalise(obs, *norm), device=args.run.device)).chunk(2, 1)
        return mean.tanh().cpu().numpy()

    return runs.play(args, act)


# ----------------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    source, target = load_task(args.task)
    with runs.open_run("otdf", args, runs.plain(Args, defaults, args), source=source, target=target) as run:
        if run.result:
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        pre = transport_costs(source, target, args)
        norm, data = state_moments(source, target, args), on_device(source, target, pre["c_hat"], args)
        nets = build(args, data.states.shape[1], data.actions.shape[1], args.run.device)
        run.begin(nets)
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets, norm, args))
        run.limit = 10 * float(data.rewards.abs().amax()) / (1 - args.gamma)
        for step in run.steps("cvae", args.cvae_updates):
            run.log(step, update_cvae(nets, data, len(source), args, step))
        for step in run.steps("otdf", args.updates):
            logs = update(nets, data, len(source), args, step)
            run.log(step, logs | {"charts/learning_rate": learning_rate(step, args)})
            if run.evaluation_due(step):
                run.evaluated(step, evaluate(nets, norm, args))
        return run.finish(pre)


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
