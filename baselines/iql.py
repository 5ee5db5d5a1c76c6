"""IQL: implicit Q-learning on source and target data together, with no correction for the shift.

    python baselines/iql.py --quick --data embedded                      two minutes on a laptop
    python baselines/iql.py --env hopper --shift morph --seed 1          one task, as in the tables
    python baselines/iql.py --source-batch 0                             target data alone
    python baselines/iql.py --official-bug                               with an earlier ODRL's bug

Paper: Kostrikov, Nair, Levine, "Offline Reinforcement Learning with Implicit Q-Learning", ICLR 2022
(equation numbers below are that paper's). Code followed: ODRL,
github.com/OffDynamicsRL/off-dynamics-rl, whose hyperparameters these are. Differences from it:

    1  V, Q and the policy are updated together, each from the weights before the update. In ODRL,
       Q already sees the updated V.
    2  The policy has no output for a standard deviation. ODRL's has one and never uses it.
    3  No transition crosses the end of an episode. ODRL pairs the last state before a time limit
       with the first state of the next target episode.
    4  Both critics are computed in one batched product, and one fused Adam optimizer serves all
       networks. The numbers are the same, the updates are faster.
    5  The observation of ant has only the 27 entries that are not always zero.

An earlier ODRL (commit 0dddcc48) multiplies the mean error of the batch by the weights, so that the
advantages have no effect: that is --official-bug, and up to a common factor --beta 0. Here, as in
ODRL since, each transition's error is weighted by its own advantage.

The code of IQL's authors, github.com/ikostrikov/implicit_q_learning, scales rewards
(--scale-rewards) and fits a Gaussian policy by maximum likelihood, whose mean it evaluates. CORL,
github.com/tinkoff-ai/CORL, normalises states (--normalise-states) and scales rewards as well on
hopper-medium, so its 67.5 there belongs to both flags together. ODRL does neither, and neither is
the default here: of the four variants, the default is the nearest to the paper's 66 on unshifted
hopper (52, with scaled rewards 51, with normalised states 43, with both 35; means of three seeds,
20,000 updates, docs/anchors.md). On hopper under a kinematic shift both flags together are much
better (59, the default 17), so try them before saying that IQL fails.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# The project's packages are one folder up, wherever this script is started from.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dynashift import quick_help  # noqa: F401  first, because --help must not load anything slow

# isort: split
import numpy as np
import torch
from torch import Tensor, nn

from dynashift import runs
from dynashift.datasets import Dataset, TaskArgs, load_task
from dynashift.errors import UserError, one_line_errors
from dynashift.faster import Adam
from dynashift.runs import Expectile, Flat, NotNegative, Positive, RunArgs, Share

# ------------------------------------------------------------------------------------ arguments

# A small run of two minutes on two cores: less data, smaller networks, fewer updates.
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

    # --- IQL ---
    updates: Positive[int] = 1_000_000
    """updates of all networks"""
    source_batch: NotNegative[int] = 128
    """source transitions in a batch; 0 trains on the target data alone"""
    target_batch: Positive[int] = 128
    """target transitions in a batch"""
    gamma: Share = 0.99
    """discount gamma, Eq. (6)"""
    expectile: Expectile = 0.7
    """expectile tau of V, Eq. (5)"""
    beta: NotNegative[float] = 3.0
    """inverse temperature beta of the policy, Eq. (7)"""
    max_weight: Positive[float] = 100.0
    """upper limit of the weight exp(beta A) of a transition, Eq. (7)"""
    tau: Share = 0.005
    """target critics take this share of the critics per update; more in shorter runs"""
    lr: Positive[float] = 3e-4
    """learning rate of all networks"""
    cosine: bool = True
    """decay the policy's learning rate to 0 over the run, as half a cosine"""
    hidden: Positive[int] = 256
    """width of the two hidden layers of all networks"""
    scale_rewards: bool = False
    """scale rewards by 1000 / (largest - smallest return), as IQL's authors do"""
    normalise_states: bool = False
    """give states mean 0 and standard deviation 1 over both datasets, as CORL does"""
    official_bug: bool = False
    """the policy loss of ODRL's commit 0dddcc48, in which advantages are only a common factor"""


def defaults(args: Args) -> dict:
    """Values for this task and --quick where the command line gives none."""
    values = dict(QUICK) if args.run.quick else {}
    return runs.short_run_rates(args, values, Args.updates)


def resolve(args: Args) -> Args:
    """Validate the arguments and choose the device."""
    runs.check_args(args)
    return runs.replace(args, device=str(runs.pick_device(args.run.device)))


# ----------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """All N transitions on the training device, first the source's, then the target's."""

    states: Tensor  # [N, d_s]
    actions: Tensor  # [N, d_a]
    rewards: Tensor  # [N]
    next_states: Tensor  # [N, d_s]
    terminal: Tensor  # [N] bool, the robot has failed and nothing follows
    N_s: int  # source transitions


class Batch(NamedTuple):
    """B of these transitions, again the source's first."""

    states: Tensor  # [B, d_s]
    actions: Tensor  # [B, d_a]
    rewards: Tensor  # [B]
    next_states: Tensor  # [B, d_s]
    terminal: Tensor  # [B] bool


def normalise(states: np.ndarray, mu: np.ndarray, sd: np.ndarray) -> np.ndarray:
    return ((states - mu) / sd).astype(np.float32)


def state_moments(source: Dataset, target: Dataset, args: Args) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [d_s] for normalising: 0 and 1 without --normalise-states."""
    if not args.normalise_states:
        d_s = target.observations.shape[1]
        return np.zeros(d_s), np.ones(d_s)
    states = np.concatenate([source.observations, target.observations])
    mu = states.mean(0, dtype=np.float64)
    sd = states.std(0, dtype=np.float64)
    return mu, sd + 1e-3  # CORL's constant


def reward_scale(source: Dataset, target: Dataset, args: Args) -> float:
    """One factor for both datasets, so that their rewards stay comparable."""
    if not args.scale_rewards:
        return 1.0
    returns = np.concatenate([source.returns, target.returns])
    if returns.max() == returns.min():
        raise UserError("--scale-rewards divides by the range of returns, which is 0; leave it out")
    return 1000 / float(returns.max() - returns.min())


def on_device(source: Dataset, target: Dataset, norm: tuple, args: Args) -> Data:
    def both(key: str) -> np.ndarray:
        return np.concatenate([getattr(source, key), getattr(target, key)])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=args.run.device)

    return Data(
        states=tensor(normalise(both("observations"), *norm)),
        actions=tensor(both("actions")),
        rewards=tensor(reward_scale(source, target, args) * both("rewards")),
        next_states=tensor(normalise(both("next_observations"), *norm)),
        terminal=tensor(both("terminals")),
        N_s=len(source),
    )


def sample(data: Data, B_s: int, B_t: int) -> Batch:
    """Draw B_s source and B_t target transitions uniformly, on the device."""
    *columns, N_s = data
    device = data.rewards.device
    source_rows = torch.randint(N_s, (B_s,), device=device)
    target_rows = torch.randint(N_s, len(data.rewards), (B_t,), device=device)
    rows = torch.cat([source_rows, target_rows])
    return Batch(*(column[rows] for column in columns))


# ------------------------------------------------------------------------------------- networks


class EnsembleMLP(nn.Module):
    """`size` networks d_in -> hidden -> hidden -> 1 with ReLU, one batched product per layer."""

    def __init__(self, size: int, d_in: int, hidden: int):
        super().__init__()
        layers = list(itertools.pairwise([d_in, hidden, hidden, 1]))
        # The same initial distribution as nn.Linear: uniform within 1 / sqrt(n_in).
        bounds = [1 / math.sqrt(n_in) for n_in, _ in layers]
        self.W = nn.ParameterList(
            torch.empty(size, n_in, n_out).uniform_(-bound, bound)
            for (n_in, n_out), bound in zip(layers, bounds, strict=True)
        )
        self.b = nn.ParameterList(
            torch.empty(size, 1, n_out).uniform_(-bound, bound)
            for (_, n_out), bound in zip(layers, bounds, strict=True)
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        """Inputs [B, ...], which are concatenated -> [size, B]."""
        x = torch.cat(inputs, -1).expand(len(self.W[0]), -1, -1)  # [size, B, d_in]
        for i, (W, b) in enumerate(zip(self.W, self.b, strict=True)):
            x = torch.baddbmm(b, x.relu() if i else x, W)
        return x[..., 0]


def mlp(d_in: int, d_out: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(d_in, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, d_out),
    )


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """All networks and their optimizer, which is everything a checkpoint holds."""
    nets = {
        "V": EnsembleMLP(1, d_s, args.hidden),
        "Q": EnsembleMLP(2, d_s + d_a, args.hidden),
        "Q_bar": EnsembleMLP(2, d_s + d_a, args.hidden),
        "policy": mlp(d_s, d_a, args.hidden),
    }
    nets["Q_bar"].load_state_dict(nets["Q"].state_dict())
    nets["Q_bar"].requires_grad_(False)
    for net in nets.values():
        net.to(device)
    values = [*nets["V"].parameters(), *nets["Q"].parameters()]
    policy = [*nets["policy"].parameters()]
    groups = [{"params": values}, {"params": policy}]  # only the policy's learning rate decays
    fused = torch.device(device).type != "meta"
    nets["adam"] = Adam(groups, lr=args.lr, fused=fused)
    return nets


def gradient_step(optimizer, loss: Tensor, clip: float = math.inf) -> Tensor:
    """Minimise the loss in this optimizer's parameters alone; returns the gradient's norm."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    return norm


@torch.no_grad()
def polyak_update(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """slow <- (1 - rate) slow + rate fast"""
    torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), rate)


# ----------------------------------------------------------- losses, one function per equation


def v_loss(q_bar: Tensor, v: Tensor, expectile: float) -> Tensor:
    """Eq. (5) with the smaller target critic. q_bar, v [B]"""
    assert q_bar.shape == v.shape, (q_bar.shape, v.shape)
    u = q_bar - v
    return (torch.where(u < 0, 1 - expectile, expectile) * u.square()).mean()


def q_loss(q: Tensor, r: Tensor, terminal: Tensor, v_next: Tensor, gamma: float) -> Tensor:
    """Eq. (6), summed over both critics. q [2, B]; r, terminal, v_next [B]"""
    assert q.shape[1:] == r.shape == terminal.shape == v_next.shape
    y = r + gamma * torch.where(terminal, 0.0, v_next)
    return (y - q).square().mean(1).sum()


def policy_loss(
    advantage: Tensor, a: Tensor, pi: Tensor, beta: float, max_weight: float, official_bug: bool
) -> Tensor:
    """Eq. (7) for a Gaussian of constant variance. advantage [B]; a, pi [B, d_a]"""
    weight = (beta * advantage).exp().clamp(max=max_weight)
    error = (a - pi).square().mean(1)
    # [B, 1] times [B] would silently broadcast to [B, B]
    assert weight.shape == error.shape, (weight.shape, error.shape)
    if official_bug:
        return weight.mean() * error.mean()
    return (weight * error).mean()


def weight_charts(advantage: Tensor, args: Args) -> dict:
    """Mean weight of each domain's transitions in Eq. (7), and their effective share.

    n transitions of weight w count like (sum w)^2 / sum w^2 equal ones, and the effective share is
    this number divided by n. advantage [B], the source's first
    """
    log_weight = (args.beta * advantage).clamp(max=math.log(args.max_weight))
    B_s = args.source_batch
    charts = {}
    for domain, x in (("source", log_weight[:B_s]), ("target", log_weight[B_s:])):
        if len(x):  # there are no source transitions with --source-batch 0
            w = (x - x.amax()).exp()  # relative to the largest, because all may be tiny
            charts[f"charts/weight_{domain}"] = x.exp().mean()
            charts[f"charts/effective_{domain}"] = w.mean().square() / w.square().mean()
    return charts


def iql_losses(nets: dict, batch: Batch, args: Args) -> tuple[Tensor, dict]:
    """The sum of all losses, in which each network has a term of its own, and what to log."""
    with torch.no_grad():
        q_bar = nets["Q_bar"](batch.states, batch.actions).amin(0)  # [B]
        v_next = nets["V"](batch.next_states)[0]  # [B]
    v = nets["V"](batch.states)[0]  # [B]
    q = nets["Q"](batch.states, batch.actions)  # [2, B]
    pi = nets["policy"](batch.states).tanh()  # [B, d_a]
    advantage = q_bar - v.detach()
    loss_policy = policy_loss(
        advantage, batch.actions, pi, args.beta, args.max_weight, args.official_bug
    )
    losses = {
        "losses/v": v_loss(q_bar, v, args.expectile),
        "losses/q": q_loss(q, batch.rewards, batch.terminal, v_next, args.gamma),
        "losses/policy": loss_policy,
    }
    charts = {
        "charts/q_mean": q.mean(),
        "charts/q_largest": q.abs().amax(),
        "charts/v_mean": v.mean(),
    }
    return sum(losses.values()), losses | charts | weight_charts(advantage, args)


def learning_rate(step: int, args: Args) -> float:
    """Of the policy at update `step`, counted from 1."""
    if not args.cosine:
        return args.lr
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - 1) / args.updates))


def update(nets: dict, data: Data, args: Args, step: int) -> dict:
    """One update of V, Q and policy. Nothing here waits for the device."""
    batch = sample(data, args.source_batch, args.target_batch)
    loss, logs = iql_losses(nets, batch, args)
    nets["adam"].param_groups[1]["lr"] = learning_rate(step, args)
    logs["charts/grad_norm"] = gradient_step(nets["adam"], loss)
    polyak_update(nets["Q_bar"], nets["Q"], args.tau)
    return logs


# ----------------------------------------------------------------------------------- evaluation


def evaluate(nets: dict, norm: tuple, args: Args) -> dict:
    def act(obs: np.ndarray, *_) -> np.ndarray:  # [n, d_s] -> [n, d_a]
        states = torch.as_tensor(normalise(obs, *norm), device=args.run.device)
        return nets["policy"](states).tanh().cpu().numpy()

    judge = runs.value_of(nets["Q"], lambda obs: normalise(obs, *norm), args.run.device)
    return runs.play(args, act, judge=judge)


# ------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    source, target = load_task(args.task, one_is_enough=True)
    plain = runs.plain(Args, defaults, args)
    with runs.open_run("iql", args, plain, source=source, target=target) as run:
        if run.result:
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        norm = state_moments(source, target, args)
        data = on_device(source, target, norm, args)
        nets = build(args, data.states.shape[1], data.actions.shape[1], args.run.device)
        run.begin(nets)
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets, norm, args))
        run.limit = 10 * float(data.rewards.abs().amax()) / (1 - args.gamma)
        for step in run.steps("iql", args.updates):
            logs = update(nets, data, args, step)
            logs["charts/learning_rate"] = learning_rate(step, args)
            run.log(step, logs)
            if run.evaluation_due(step):
                run.evaluated(step, evaluate(nets, norm, args))
        return run.finish()


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
