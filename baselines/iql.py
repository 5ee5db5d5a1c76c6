"""IQL: implicit Q-learning on source and target data put together, without any correction for the change of dynamics.

    python baselines/iql.py --quick --data embedded                      two minutes on a laptop
    python baselines/iql.py --env hopper --shift morph --seed 1          one task, as in the tables
    python baselines/iql.py --source-batch 0                             target data alone

Paper: Kostrikov, Nair, Levine, "Offline Reinforcement Learning with Implicit Q-Learning", ICLR 2022 (Eqs. 5 to 7).
Code followed: ODRL, github.com/OffDynamicsRL/off-dynamics-rl, whose numbers these are. Differences from it:

    1  V, Q and the policy step together, each at the weights before the update; ODRL's Q sees V after its step
    2  the policy has no output for a standard deviation, which ODRL's has and never uses
    3  no transition crosses the end of an episode; ODRL pairs the target's time-outs with the next episode's beginning
    4  both critics are one batched product, and one fused Adam serves all networks: the same numbers, faster
    5  ant's observation has the 27 numbers that are ever not zero
    6  the advantages weigh each transition's own error; in an earlier ODRL (commit 0dddcc48) they weigh the mean
       error of the batch, which is cloning without regard to the advantage. The other scripts have such errors behind
       --official-bug; this one is --beta 0, but for a common factor, and needs no flag of its own

The authors' own code, github.com/ikostrikov/implicit_q_learning, scales rewards (--scale-rewards) and fits a Gaussian
policy by its likelihood, of which it evaluates the mean (temperature 0). CORL's, github.com/tinkoff-ai/CORL, normalises
states (--normalise-states). ODRL does neither, and neither is the default here.
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
from torch import Tensor, nn

from dynashift import runs
from dynashift.datasets import Dataset, TaskArgs, load_task
from dynashift.errors import UserError, one_line_errors
from dynashift.runs import Flat, RunArgs

# --------------------------------------------------------------------------------------------- arguments

# A small run that ends in two minutes on two cores: less data, smaller networks, fewer updates.
QUICK = dict(
    source_size=100_000,
    source_batch=64,
    target_batch=64,
    hidden=128,
    lr=1e-3,
    updates=20_000,
    eval_every=5_000,
    save_every=5_000,
    log_every=250,
)


@dataclass(frozen=True)
class Args:
    task: Flat[TaskArgs] = TaskArgs()
    run: Flat[RunArgs] = RunArgs(log_every=1_000, save_every=20_000)

    # IQL
    updates: int = 1_000_000
    """updates of all networks"""
    source_batch: int = 128
    """source transitions in a batch; 0 is target only"""
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
    runs.check_args(args, "target_batch hidden lr", "source_batch")
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
    nets |= {"Q_bar": Heads(2, d_s + d_a, args.hidden), "policy": mlp(d_s, d_a, args.hidden)}
    nets["Q_bar"].load_state_dict(nets["Q"].state_dict())
    nets["Q_bar"].requires_grad_(False)
    for net in nets.values():
        net.to(device)
    values, policy = [*nets["V"].parameters(), *nets["Q"].parameters()], [*nets["policy"].parameters()]
    groups = [{"params": values}, {"params": policy}]  # the second one's rate falls
    nets["adam"] = torch.optim.Adam(groups, lr=args.lr, fused=torch.device(device).type != "meta")
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


def q_loss(q: Tensor, r: Tensor, terminal: Tensor, v_next: Tensor, gamma: float) -> Tensor:
    """Eq. (6), both critics. q [2, B], the others [B]"""
    assert q.shape[1:] == r.shape == terminal.shape == v_next.shape, (q.shape, r.shape, terminal.shape, v_next.shape)
    y = r + gamma * torch.where(terminal, 0.0, v_next)
    return (y - q).square().mean(1).sum()


def policy_loss(advantage: Tensor, a: Tensor, pi: Tensor, beta: float, max_weight: float) -> Tensor:
    """Eq. (7) for a Gaussian of constant variance: a weighted squared error. advantage [B], a, pi [B, d_a]"""
    weight, error = (beta * advantage).exp().clamp(max=max_weight), (a - pi).square().mean(1)
    assert weight.shape == error.shape, (weight.shape, error.shape)  # [B, 1] against [B] would give a [B, B]
    return (weight * error).mean()


def iql_losses(nets: dict, b: Batch, args: Args) -> tuple[Tensor, dict]:
    """The sum, of which each network has its own term, and the terms."""
    with torch.no_grad():
        q_bar, v_next = nets["Q_bar"](b.states, b.actions).amin(0), nets["V"](b.next_states)[0]  # [B] each
    v, q = nets["V"](b.states)[0], nets["Q"](b.states, b.actions)  # [B], [2, B]
    pi = nets["policy"](b.states).tanh()  # [B, d_a]
    losses = {
        "losses/v": v_loss(q_bar, v, args.expectile),
        "losses/q": q_loss(q, b.rewards, b.terminal, v_next, args.gamma),
        "losses/policy": policy_loss(q_bar - v.detach(), b.actions, pi, args.beta, args.max_weight),
    }
    charts = {"charts/q_mean": q.mean(), "charts/q_largest": q.abs().amax(), "charts/v_mean": v.mean()}
    return sum(losses.values()), losses | charts


def learning_rate(step: int, args: Args) -> float:
    """Of the policy at update `step`, counted from 1."""
    return args.lr * (0.5 * (1 + math.cos(math.pi * (step - 1) / args.updates)) if args.cosine else 1.0)


def update(nets: dict, data: Data, N_s: int, args: Args, step: int) -> dict:
    """One step of V, Q and policy. Nothing here waits for the device."""
    total, logs = iql_losses(nets, sample(data, N_s, args.source_batch, args.target_batch), args)
    nets["adam"].param_groups[1]["lr"] = learning_rate(step, args)
    descend(nets["adam"], total)
    move(nets["Q_bar"], nets["Q"], args.tau)
    return logs


# --------------------------------------------------------------------------------------------- evaluation


def evaluate(nets: dict, norm: tuple, args: Args) -> dict:
    def act(obs, *_):  # [n, d_s] -> [n, d_a]
        return nets["policy"](torch.as_tensor(normalise(obs, *norm), device=args.run.device)).tanh().cpu().numpy()

    return runs.play(args, act)


# ----------------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    source, target = load_task(args.task, one_is_enough=True)
    with runs.open_run("iql", args, runs.plain(Args, defaults, args), source=source, target=target) as run:
        if run.result:
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        norm, data = state_moments(source, target, args), on_device(source, target, args)
        nets = build(args, data.states.shape[1], data.actions.shape[1], args.run.device)
        run.begin(nets)
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets, norm, args))
        run.limit = 10 * float(data.rewards.abs().amax()) / (1 - args.gamma)
        for step in run.steps("iql", args.updates):
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
