"""OTDF: implicit Q-learning on source data selected by optimal transport, and near target actions.

    python baselines/otdf.py --quick --data embedded                     three minutes on a laptop
    python baselines/otdf.py --env hopper --shift morph --seed 1         one task, as in the tables
    python baselines/otdf.py --official-bug                              with the official bug

Paper: Lyu et al., "Cross-Domain Offline Policy Adaptation with Optimal Transport and Dataset
Constraint", ICLR 2025. Official code: github.com/dmksjfl/OTDF. Differences from it:

    1  It multiplies the policy's errors [B] by weights [B, 1], which broadcasts to [B, B]. The mean
       of that is mean weight times mean error, so the advantages have no effect: that is
       --official-bug. Here the shapes agree.
    2  It solves transport for consecutive chunks of 10,000 source rows, with features in half
       precision and at most 100 iterations; the last chunk has another scale. Here it is one
       problem over all rows, solved by taf_preprocess.py (cosine cost of (s, a, s'), no gate) and
       kept for all seeds.
    3  Its regulariser is 0.05 times the mean of C / max C of each chunk. Here that mean is taken
       once, over 2,000 source rows and all target rows, and rounded to two digits.
    4  V, Q and the policy are updated together, each from the weights before the update. In the
       official code, Q already sees the updated V.
    5  No transition crosses the end of an episode. The official loader pairs the last state before
       a time limit with the first state of the next episode.
    6  Both critics are computed in one batched product, and one fused Adam optimizer serves V, Q
       and policy. The numbers are the same, the updates are faster.
    7  The observation of ant has only the 27 entries that are not always zero.

The weight of the behaviour term (--reg-weight), 0.1 for kinematic shifts and 0.5 otherwise, is that
of the official run script. It rests on one example per shift, all of halfcheetah with medium data,
because the script has no others.

The code of IQL's authors scales rewards (--scale-rewards). CORL, github.com/tinkoff-ai/CORL,
normalises states (--normalise-states) and scales rewards as well on hopper-medium, so its score
there belongs to both flags together. OTDF's code does neither, and neither is the default here.
Transport costs always use the states as they are.

OTDF's own part is `transport_costs`, `source_weights`, `cvae_loss`, `behaviour_log_density`,
`policy_loss` and `update`. The rest is IQL (Kostrikov et al., whose equation numbers these are), as
in iql.py.
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
import torch.nn.functional as F
from torch import Tensor, nn

import taf_preprocess
from dynashift import runs
from dynashift.datasets import Dataset, TaskArgs, load_task
from dynashift.errors import UserError, one_line_errors
from dynashift.faster import Adam
from dynashift.runs import Expectile, Flat, NotNegative, Positive, RunArgs, Share
from dynashift.tasks import find_task
from taf_preprocess import GateArgs

# ------------------------------------------------------------------------------------ arguments

# The official run script uses 0.5 in its examples of morph and gravity shifts.
REG_WEIGHT = {"kinematic": 0.1}
OTHER_REG_WEIGHT = 0.5
# A small run of three minutes on two cores: less data, smaller networks, fewer updates.
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

    # --- OTDF ---
    keep: float = 0.8
    """share xi of a source batch that is kept: the rows with the lowest transport costs"""
    ot_reg: Positive[float] = 0.05
    """entropic regulariser of the transport problem, in units of the mean of C / max C"""
    ot_tol: Positive[float] = 1e-4
    """accepted L1 error of the plan's marginal on the target"""
    reg_weight: NotNegative[float] | None = None
    """weight beta of the behaviour term in the policy's loss; 0.1 for kinematic shifts, else 0.5"""
    M: Positive[int] = 10
    """latents M per state in the behaviour term"""
    variance: Positive[float] = 0.1
    """variance of the Gaussian in the behaviour term"""
    cvae_updates: NotNegative[int] = 10_000
    """updates of the CVAE before anything else"""
    cvae_batch: Positive[int] = 128
    """target transitions in a batch for the CVAE"""
    cvae_hidden: Positive[int] = 750
    """width of the CVAE's layers"""
    cvae_lr: Positive[float] = 1e-3
    """learning rate of the CVAE"""
    cvae_kl: NotNegative[float] = 0.5
    """weight of the CVAE's KL divergence"""
    official_bug: bool = False
    """the official policy loss, in which the advantages are only a common factor"""

    # --- IQL ---
    updates: Positive[int] = 1_000_000
    """updates of V, Q and policy"""
    source_batch: Positive[int] = 128
    """source transitions in a batch, before the selection"""
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
    """learning rate of V, Q and policy"""
    cosine: bool = True
    """decay the policy's learning rate to 0 over the run, as half a cosine"""
    hidden: Positive[int] = 256
    """width of the two hidden layers of V, Q and policy"""
    scale_rewards: bool = False
    """scale rewards by 1000 / (largest - smallest return), as IQL's authors do"""
    normalise_states: bool = False
    """give states mean 0 and standard deviation 1 over both datasets, as CORL does"""


def defaults(args: Args) -> dict:
    """Values for this task and --quick where the command line gives none."""
    values = dict(QUICK) if args.run.quick else {}
    values["reg_weight"] = REG_WEIGHT.get(args.task.shift, OTHER_REG_WEIGHT)
    return runs.short_run_rates(args, values, Args.updates)


def resolve(args: Args) -> Args:
    """Validate the arguments and choose the device."""
    runs.check_args(args)
    if not 0 < args.keep <= 1 or int(args.keep * args.source_batch) < 1:
        raise UserError(
            f"--keep {args.keep} is the share of a source batch to keep: at most 1, at least a row"
        )
    return runs.replace(args, device=str(runs.pick_device(args.run.device)))


# ----------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """All N transitions on the training device, first the source's, then the target's."""

    states: Tensor  # [N, d_s]
    actions: Tensor  # [N, d_a]
    rewards: Tensor  # [N]
    next_states: Tensor  # [N, d_s]
    terminal: Tensor  # [N] bool, the robot has failed and nothing follows
    cost: Tensor  # [N] transport cost of a source transition, 0 for a target transition
    N_s: int  # source transitions


class Batch(NamedTuple):
    """B of these transitions, again the source's first."""

    states: Tensor  # [B, d_s]
    actions: Tensor  # [B, d_a]
    rewards: Tensor  # [B]
    next_states: Tensor  # [B, d_s]
    terminal: Tensor  # [B] bool
    cost: Tensor  # [B]


def mean_scaled_cost(x: np.ndarray, y: np.ndarray) -> float:
    """The mean of C / max C for the cosine cost C between all rows of x [n, d] and y [m, d]."""
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-8)
    y = y / np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-8)
    C = 1 - x @ y.T
    return float(C.mean() / max(C.max(), 1e-12))


def transport_costs(source: Dataset, target: Dataset, args: Args) -> dict:
    """The result of `taf_preprocess.preprocess` without a gate: c_hat [N_s] is each row's cost."""
    every = -(-len(source) // 2_000)  # about 2,000 source rows are enough for the mean
    x = taf_preprocess.transition_features(source, slice(None, None, every), reward=False)
    y = taf_preprocess.transition_features(target, slice(None), reward=False)
    reg = args.ot_reg * mean_scaled_cost(x, y)
    gate = GateArgs(
        filter="ot",
        K=find_task(args.task.env, args.task.shift).K,
        ot_reward=False,
        ot_states="raw",
        ot_reg=float(f"{reg:.2g}"),  # rounded, because it is part of the file's name
        ot_tol=args.ot_tol,
    )
    out = args.run.out / "preprocess"
    return taf_preprocess.preprocess(args.task, gate, source, target, out, args.run.device)


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


def on_device(source: Dataset, target: Dataset, norm: tuple, args: Args, cost: np.ndarray) -> Data:
    cost = np.concatenate([cost, np.zeros(len(target))]).astype(np.float32)

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
        cost=tensor(cost),
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


class CVAE(nn.Module):
    """The target's behaviour: a = decoder(s, z) with z ~ N(0, 1)."""

    def __init__(self, d_s: int, d_a: int, hidden: int):
        super().__init__()
        d_z = 2 * d_a
        self.encoder = mlp(d_s + d_a, 2 * d_z, hidden)
        self.decoder = mlp(d_s + d_z, d_a, hidden)

    def encode(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [..., d_z] of the latent's posterior."""
        mean, log_std = self.encoder(torch.cat([s, a], -1)).chunk(2, -1)
        return mean, log_std.clamp(-4, 15).exp()

    def decode(self, s: Tensor, z: Tensor) -> Tensor:
        return self.decoder(torch.cat([s, z], -1)).tanh()


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """All networks and their optimizers, which is everything a checkpoint holds."""
    nets = {
        "V": EnsembleMLP(1, d_s, args.hidden),
        "Q": EnsembleMLP(2, d_s + d_a, args.hidden),
        "Q_bar": EnsembleMLP(2, d_s + d_a, args.hidden),
        "policy": mlp(d_s, 2 * d_a, args.hidden),  # mean and log standard deviation
        "cvae": CVAE(d_s, d_a, args.cvae_hidden),
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
    nets["adam_cvae"] = Adam(nets["cvae"].parameters(), lr=args.cvae_lr, fused=fused)
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


def q_loss(
    q: Tensor, r: Tensor, terminal: Tensor, v_next: Tensor, gamma: float, weight: Tensor
) -> Tensor:
    """Eq. (6) with a weight per transition, summed over both critics. q [2, B]; the others [B]"""
    assert q.shape[1:] == r.shape == terminal.shape == v_next.shape
    y = r + gamma * torch.where(terminal, 0.0, v_next)
    error = (y - q).square()  # [2, B]
    # [B, 1] times [2, B] would silently broadcast to another shape
    assert weight.shape == error.shape[1:], (weight.shape, error.shape)
    return (weight * error).mean(1).sum()


def policy_loss(
    advantage: Tensor, a: Tensor, pi: Tensor, beta: float, max_weight: float, official_bug: bool
) -> Tensor:
    """Eq. (7) for a Gaussian of constant variance. advantage [B]; a, pi [B, d_a]"""
    weight = (beta * advantage).exp().clamp(max=max_weight)
    error = (a - pi).square().sum(1)
    # [B, 1] times [B] would silently broadcast to [B, B]
    assert weight.shape == error.shape, (weight.shape, error.shape)
    if official_bug:
        # [B, B], as in the official code: its mean is mean weight times mean error
        return (weight[:, None] * error).mean()
    return (weight * error).mean()


def source_weights(cost: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The `keep` rows of a source batch with the lowest transport costs [B], and their weights.

    A weight is exp(d), where d is minus the cost, scaled to [-1, 0] within the batch.
    """
    low = cost.amin()
    high = cost.amax()
    d = (low - cost) / (high - low).clamp_min(1e-12)
    d, rows = d.topk(keep)
    return rows, d.exp()


def cvae_loss(a: Tensor, a_hat: Tensor, mean: Tensor, std: Tensor, weight: float) -> Tensor:
    # KL(N(mean, std^2) || N(0, 1)), averaged over batch and latents, as the squared error is
    # averaged over batch and action entries
    kl = 0.5 * (mean.square() + std.square() - 1) - std.log()
    return F.mse_loss(a_hat, a) + weight * kl.mean()


def behaviour_log_density(
    cvae: CVAE, s: Tensor, a: Tensor, noise: Tensor, variance: float
) -> Tensor:
    """log sum_m N(a; decoder(s, z_m), variance) with z_m = mean + std noise_m.

    s [B, d_s], a [B, d_a], noise [M, B, d_z] -> [B]. Like the official code, this leaves out the
    prior, the posterior and 1/M.
    """
    mean, std = cvae.encode(s, a)
    z = mean + std * noise  # [M, B, d_z]
    a_m = cvae.decode(s.expand(len(noise), *s.shape), z)  # [M, B, d_a]
    log_normal = -0.5 * ((a - a_m).square() / variance + math.log(2 * math.pi * variance))
    return log_normal.sum(-1).logsumexp(0)


def otdf_losses(nets: dict, batch: Batch, args: Args, weight: Tensor) -> tuple[Tensor, dict]:
    """The sum of all losses, in which each network has terms of its own, and what to log.

    weight [B] is that of each transition in Q's loss.
    """
    with torch.no_grad():
        q_bar = nets["Q_bar"](batch.states, batch.actions).amin(0)  # [B]
        v_next = nets["V"](batch.next_states)[0]  # [B]
    v = nets["V"](batch.states)[0]  # [B]
    q = nets["Q"](batch.states, batch.actions)  # [2, B]
    mean, log_std = nets["policy"](batch.states).chunk(2, 1)  # [B, d_a] each
    pi = mean.tanh()
    advantage = q_bar - v.detach()
    loss_v = v_loss(q_bar, v, args.expectile)
    loss_q = q_loss(q, batch.rewards, batch.terminal, v_next, args.gamma, weight)
    loss_policy = policy_loss(
        advantage, batch.actions, pi, args.beta, args.max_weight, args.official_bug
    )

    # The behaviour term asks how likely an action drawn from the policy is in the target data.
    std = log_std.clamp(-20, 2).exp()
    a = (mean + std * torch.randn_like(mean)).tanh()  # [B, d_a]
    noise = torch.randn(args.M, len(mean), 2 * mean.shape[1], device=mean.device)  # [M, B, d_z]
    log_density = behaviour_log_density(nets["cvae"], batch.states, a, noise, args.variance)  # [B]
    loss_reg = -log_density.mean()
    logs = {
        "losses/v": loss_v,
        "losses/q": loss_q,
        "losses/policy": loss_policy,
        "losses/reg": loss_reg,
        "charts/q_mean": q.mean(),
        "charts/q_largest": q.abs().amax(),
        "charts/v_mean": v.mean(),
    }
    return loss_v + loss_q + loss_policy + args.reg_weight * loss_reg, logs


def learning_rate(step: int, args: Args) -> float:
    """Of the policy at update `step`, counted from 1."""
    if not args.cosine:
        return args.lr
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - 1) / args.updates))


def update_behaviour(nets: dict, data: Data, args: Args) -> dict:
    """One update of the target's behaviour model."""
    batch = sample(data, 0, args.cvae_batch)
    mean, std = nets["cvae"].encode(batch.states, batch.actions)
    z = mean + std * torch.randn_like(std)
    a_hat = nets["cvae"].decode(batch.states, z)
    loss = cvae_loss(batch.actions, a_hat, mean, std, args.cvae_kl)
    gradient_step(nets["adam_cvae"], loss)
    return {"losses/cvae": loss, "charts/reconstruction": F.mse_loss(a_hat, batch.actions)}


def update(nets: dict, data: Data, args: Args, step: int) -> dict:
    """One update of V, Q and policy on the best of a source batch and on a target batch."""
    B_s = args.source_batch
    batch = sample(data, B_s, args.target_batch)
    best, source_weight = source_weights(batch.cost[:B_s], int(args.keep * B_s))
    target_rows = torch.arange(B_s, len(batch.rewards), device=best.device)
    rows = torch.cat([best, target_rows])
    batch = Batch(*(column[rows] for column in batch))
    weight = torch.cat([source_weight, source_weight.new_ones(args.target_batch)])  # [B]
    loss, logs = otdf_losses(nets, batch, args, weight)
    nets["adam"].param_groups[1]["lr"] = learning_rate(step, args)
    logs["charts/grad_norm"] = gradient_step(nets["adam"], loss)
    polyak_update(nets["Q_bar"], nets["Q"], args.tau)
    return logs | {"charts/weight_mean": source_weight.mean()}


# ----------------------------------------------------------------------------------- evaluation


def evaluate(nets: dict, norm: tuple, args: Args) -> dict:
    def act(obs: np.ndarray, *_) -> np.ndarray:  # [n, d_s] -> [n, d_a]
        states = torch.as_tensor(normalise(obs, *norm), device=args.run.device)
        mean, _ = nets["policy"](states).chunk(2, 1)
        return mean.tanh().cpu().numpy()

    judge = runs.value_of(nets["Q"], lambda obs: normalise(obs, *norm), args.run.device)
    return runs.play(args, act, judge=judge)


# ------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    source, target = load_task(args.task)
    plain = runs.plain(Args, defaults, args)
    with runs.open_run("otdf", args, plain, source=source, target=target) as run:
        if run.result:
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        norm = state_moments(source, target, args)
        d_s = target.observations.shape[1]
        d_a = target.actions.shape[1]
        nets = build(args, d_s, d_a, args.run.device)
        run.begin(nets)
        if args.run.eval_only:  # for which no costs are needed
            return run.only_evaluated(evaluate(nets, norm, args))
        # This changes no random state, so it may come after run.begin.
        pre = transport_costs(source, target, args)
        data = on_device(source, target, norm, args, pre["c_hat"])
        run.limit = 10 * float(data.rewards.abs().amax()) / (1 - args.gamma)
        for step in run.steps("cvae", args.cvae_updates):
            run.log(step, update_behaviour(nets, data, args))
        for step in run.steps("otdf", args.updates):
            logs = update(nets, data, args, step)
            logs["charts/learning_rate"] = learning_rate(step, args)
            run.log(step, logs)
            if run.evaluation_due(step):
                run.evaluated(step, evaluate(nets, norm, args))
        return run.finish(pre)


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
