"""TAF-DT as the authors' released code has it, where that differs from the paper's text.

    python baselines/taf_dt_released.py --quick --data embedded         minutes on a laptop
    python baselines/taf_dt_released.py --env hopper --shift morph      one task, full size
    python baselines/taf_dt_released.py --env ant --shift gravity --eval-only

Code: https://github.com/buaawgj/TAF-DT, April 2026. Its paper is that of taf_dt.py, which has the
parts that both share: networks (the Transformer, too, is that one, with its fast attention and
dropout), windows, the K-step target, Algorithm 2. This file has the rest, in the same order.
`# DIFF n` points to row n of docs/differences.md; rows 17, 36 and 74 name what is not followed.
What differs from taf_dt.py:

    gate and weights   raw states, the nearest target fragment, OT on all source data
                       (gate_values)
    every batch        of 128 source windows the 64 or 83 cheapest, and 128 of the target
    rewards            those of the source are scaled down with their costs on 85 of 108 tasks
    V and Q            raw states, windows of K steps, an end at time limits too
    tokens             residuals of V with unscaled rewards, standardised, times 2
    losses             sums over weighted steps by their count, not over the sum of their weights
    critics            a conservative penalty on 19 tasks; no reward at the end of an episode
    policy             predicts next states too; one critic at random; L_reg with encoded latents
    acting             the target critics choose among 50 candidates (guided_score; score is greedy)
    settings           by task, and by pair of datasets for 17 pairs

Shapes: B windows in a batch, K steps in a window, N transitions, M latents per state.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

# The project's folder, so that this file finds dynashift and taf_dt wherever it is started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dynashift import quick_help  # noqa: F401  first: --help then loads nothing slow

# isort: split
import numpy as np
import torch
from torch import Tensor, nn

import taf_dt
import taf_preprocess
from dynashift import runs, stages
from dynashift.any_env import time_limit
from dynashift.behaviour import behaviour_log_density
from dynashift.datasets import Dataset, TaskArgs, load_task, returns_to_ask
from dynashift.errors import UserError, one_line_errors
from dynashift.optimise import gradient_step
from dynashift.runs import Expectile, Flat, NotNegative, Positive, RunArgs, Share
from dynashift.tasks import ANT_PADDING, ROBOTS, find_task
from dynashift.transitions import join
from dynashift.windows import uniform, window_rows
from taf_dt import Batch, expectile, polyak_update, source_batch
from taf_preprocess import GateArgs, normalise

# ------------------------------------------------------------------------------------ arguments


@dataclass(frozen=True)
class Args:
    """Defaults are the values that most of the released configuration files have."""

    task: Flat[TaskArgs] = TaskArgs()
    run: Flat[RunArgs] = RunArgs()
    gate: Flat[GateArgs] = GateArgs()

    # --- the fused law and its samples ---
    beta: Share = 1 / 3  # source share of a batch after the OT filter; 0: target data alone
    target_batch: Positive[int] = 128  # target windows per batch, and source windows drawn
    reward_rescale: bool = True  # multiply source rewards by exp(-c~) and exp(-d~)
    drop_ends: bool = False  # no window begins in an episode's last K + 1 steps (hopper)

    # --- advantage tokens and command network ---
    token: Literal["advantage", "rtg"] = "advantage"  # rtg: returns-to-go instead
    return_target: float | None = None  # with --token rtg: the return to ask for
    gamma: Share = 0.99  # discount
    tau: Share = 0.005  # rate of the target critics; larger in shorter runs
    lr: Positive[float] = 3e-4  # learning rate of all networks
    hidden: Positive[int] = 256  # width of the three hidden layers of V, Q, C and the critics
    zeta_v: Expectile = 0.5  # expectile of V
    label_updates: NotNegative[int] = 100_000  # updates of V and Q
    adv_scale: NotNegative[float] = 2.0  # factor on the standardised advantages
    zeta: Expectile = 0.7  # expectile of the command network
    command_updates: NotNegative[int] = 50_000  # updates of the command network
    command_decay: NotNegative[float] = 5e-4  # L2 penalty on the command network

    # --- behaviour model and regulariser ---
    eta_reg: NotNegative[float] | None = None  # weight of L_reg; default: the task's
    M: Positive[int] = 10  # latents per state in L_reg
    variance: Positive[float] = 0.1  # variance of the Gaussian around each decoded action in L_reg
    reg_positions: Literal["all", "last"] = "last"  # steps of a window that L_reg sees
    cvae_updates: NotNegative[int] = 100_000  # updates of the behaviour model
    cvae_hidden: Positive[int] = 750  # width of the behaviour model's layers
    cvae_kl: NotNegative[float] = 0.5  # weight of the behaviour model's KL divergence
    cvae_decay: NotNegative[float] = 1e-4  # L2 penalty on the behaviour model

    # --- Transformer policy and twin critics ---
    layers: Positive[int] = 4  # Transformer layers
    heads: Positive[int] = 4  # attention heads
    width: Positive[int] = 256  # embedding dimension
    dropout: Share = 0.1  # dropout on embeddings, attention and residual branches
    updates: Positive[int] = 101_000  # updates of policy and critics
    decay: NotNegative[float] = 1e-4  # L2 penalty on the policy
    iteration: Positive[int] = 1_000  # updates after which the learning rate falls by one step
    period: Positive[int] = 500  # steps in which the rate would fall to 0 along half a cosine
    clip_grad: Positive[float] = 5.0  # largest norm of the gradients of policy and critics
    alpha: NotNegative[float] = 3.5  # critic guidance
    state_loss: NotNegative[float] = 1.0  # weight of the next-state prediction
    cql: NotNegative[float] = 0.0  # weight of the conservative penalty on the critics
    cql_actions: Positive[int] = 10  # random actions in that penalty
    ema_decay: Share = 0.995  # what the target policy keeps of itself; less in shorter runs
    ema_every: Positive[int] = 5  # update the target policy every N updates
    ema_start: NotNegative[int] = 1_000  # updates before the first one of the target policy

    # --- critic-guided actions ---
    # Evaluate guided actions too: each time, at the last three evaluations, or never.
    guided: Literal["always", "last", "never"] = "last"
    candidates: Positive[int] = 50  # actions to choose from
    guided_noise: NotNegative[float] = 0.1  # standard deviation of the noise on their last command

    time_embedding = True  # no flag: taf_dt.Policy asks for it


# By task, then by pair of datasets: what differs from Args. K is that of taf_dt.py, but for three
# pairs.
# DIFF 24, 29, 54: the expectile, eta_reg, and variance and positions of L_reg differ by task.
ALL = {"reg_positions": "all"}
UNSCALED = {"reward_rescale": False}
KEEP_83 = {"beta": 83 / 211}  # of 128 windows; otherwise 64
BY_TASK = {
    ("morph", "halfcheetah"): {"zeta": 0.7, "eta_reg": 0.4, **KEEP_83},
    ("morph", "hopper"): {
        "zeta": 0.55, "eta_reg": 0.4, "variance": 0.05, **ALL, **UNSCALED, **KEEP_83,
    },
    ("morph", "walker2d"): {"zeta": 0.7, "eta_reg": 0.6, "variance": 0.0375, **ALL},
    ("morph", "ant"): {"zeta": 0.6, "eta_reg": 0.7},
    ("kinematic", "halfcheetah"): {"zeta": 0.7, "eta_reg": 0.5},
    ("kinematic", "hopper"): {"zeta": 0.55, "eta_reg": 0.7},
    ("kinematic", "walker2d"): {
        "zeta": 0.7, "eta_reg": 0.4, "variance": 0.0375, "alpha": 2.5, **ALL, **UNSCALED, **KEEP_83,
    },
    ("kinematic", "ant"): {"zeta": 0.6, "eta_reg": 0.7},
    ("gravity", "halfcheetah"): {
        "zeta": 0.7, "eta_reg": 0.6, "alpha": 2.0, "adv_scale": 1.0, "cql": 0.05, **ALL,
    },
    ("gravity", "hopper"): {"zeta": 0.55, "eta_reg": 0.5},
    ("gravity", "walker2d"): {"zeta": 0.7, "eta_reg": 0.6, "variance": 0.05, **ALL},
    ("gravity", "ant"): {"zeta": 0.6, "eta_reg": 0.4, **UNSCALED, **KEEP_83},
}  # fmt: skip
# DIFF 55: 17 pairs of datasets have settings of their own, and four of them stop early.
WALKER = {"alpha": 3.5, "eta_reg": 0.6, "beta": 1 / 3, "reward_rescale": True}
SMALL = {"variance": 0.05}
BY_PAIR = {
    ("kinematic", "hopper", "medium", "medium"): {"eta_reg": 0.6, **SMALL, **ALL},
    ("kinematic", "hopper", "medium", "medium-expert"): {"eta_reg": 0.6, **SMALL, **ALL},
    ("kinematic", "hopper", "medium", "expert"): {"eta_reg": 0.6, "cql": 0.01, **SMALL, **ALL},
    ("kinematic", "hopper", "medium-replay", "medium-expert"): {
        "eta_reg": 0.9, "updates": 81_000, **ALL,
    },
    ("kinematic", "hopper", "medium-replay", "expert"): {
        "eta_reg": 0.9, "updates": 61_000, **SMALL, **ALL,
    },
    ("kinematic", "hopper", "medium-expert", "medium"): {"eta_reg": 0.9, **ALL},
    ("kinematic", "hopper", "medium-expert", "medium-expert"): {
        "eta_reg": 0.9, "updates": 81_000, **SMALL, **ALL,
    },
    ("kinematic", "hopper", "medium-expert", "expert"): {
        "eta_reg": 0.6, "updates": 81_000, **SMALL, **ALL,
    },
    ("kinematic", "walker2d", "medium", "medium-expert"): {"cql": 0.05, **WALKER},
    ("kinematic", "walker2d", "medium-replay", "medium"): {"cql": 0.05, **WALKER},
    ("kinematic", "walker2d", "medium-replay", "medium-expert"): {"cql": 0.1, **WALKER},
    ("kinematic", "walker2d", "medium-expert", "medium"): {"cql": 0.1, **WALKER},
    ("kinematic", "ant", "medium", "medium"): {
        "eta_reg": 0.6, "cql": 0.05, "variance": 0.0375, **ALL,
    },
    ("kinematic", "ant", "medium", "medium-expert"): {
        "eta_reg": 0.6, "cql": 0.15, "variance": 0.0375, **ALL,
    },
    ("gravity", "hopper", "medium-expert", "medium"): {"K": 5, "eta_reg": 0.6, "cql": 0.05, **ALL},
    ("gravity", "hopper", "medium-expert", "medium-expert"): {
        "K": 5, "eta_reg": 0.6, "cql": 0.1, **SMALL, **ALL,
    },
    ("gravity", "hopper", "medium-expert", "expert"): {"K": 5, "eta_reg": 0.6, "cql": 0.1, **ALL},
}  # fmt: skip

# The small run of taf_dt.py. The learning rate falls to 0 here too.
OTHERS = ("cosine", "time_embedding", "dropout")  # flags of taf_dt.py alone; dropout as released
QUICK = {name: value for name, value in taf_dt.QUICK.items() if name not in OTHERS}
QUICK.update({"iteration": 10, "period": 100, "lr": 1e-3})


GATE = {  # gate and weights; a flag given beside them wins
    "encoder": "raw",
    "state_norm": "per-domain",
    "mmd_gamma": "invdim",
    "mmd_reduce": "min",
    "mmd_squared": True,
    "short_fragments": True,
    "failures": "together",
    "ot_states": "raw",
    "ot_support": "all",
    "ot_chunk": 10_000,
}


def gate_values(task: TaskArgs) -> dict:
    """The values of gate and weights for this task."""
    values = GATE | {"K": find_task(task.env, task.shift).K}
    if task.env == "ant":
        # DIFF 51: d counts 111 numbers there, 84 of them zero; the data here have 27.
        values["mmd_gamma"] = 1 / (ROBOTS[task.env].obs_dim + ANT_PADDING)
    if (task.shift, task.env, Path(task.source).stem) == ("gravity", "hopper", "medium-expert"):
        values["K"] = 5  # three pairs have settings of their own
    return values


def defaults(args: Args) -> dict:
    """Values that this task and --quick have where the command line says nothing."""
    env, shift = args.task.env, args.task.shift
    task = (shift if (shift, env) in BY_TASK else "morph", env)  # it has no other shift
    pair = (*task, Path(args.task.source).stem, Path(args.task.target).stem)
    values = gate_values(args.task) | {"return_target": returns_to_ask(args.task)[1]}
    values.update(BY_TASK.get(task, {"eta_reg": find_task(env, shift).eta_reg}))
    values.update(BY_PAIR.get(pair, {}))
    values["drop_ends"] = env == "hopper"
    values["eval_every"] = 1_000  # (j) after every iteration
    if args.task.target == "none":  # there is one dataset, and it plays the target
        values["beta"] = 0.0
    official = values.get("updates", Args.updates)
    if args.run.quick:
        values.update(QUICK)
    return runs.short_run_rates(args, values, official)


def check(args: Args) -> None:
    """Refuse values that cannot work, before anything is loaded."""
    runs.check_args(args)
    if args.beta and not 1 <= source_batch(args.target_batch, args.beta) <= args.target_batch:
        raise UserError(
            f"--beta {args.beta}: of {args.target_batch} source windows drawn, at least one and at "
            "most all must be kept; choose a share up to 1/2 that is at least one window"
        )
    stages.check(args, source_batch(args.target_batch, args.beta))


# ------------------------------------------------------------------------------- the fused law


class Data(NamedTuple):
    """The N_s source transitions, then the N_t target transitions: N rows in order of time."""

    states: Tensor  # [N, d_s] normalised
    raw_states: Tensor  # [N, d_s]
    actions: Tensor  # [N, d_a]
    rewards: Tensor  # [N] those of the source scaled down where the task has that
    raw_rewards: Tensor  # [N]
    terminal: Tensor  # [N] bool: the episode ends here, by a failure or otherwise
    after: Tensor  # [N] int: the row that follows in the file
    steps: Tensor  # [N] int: step within the episode
    left: Tensor  # [N] int: steps to the episode's end, this one included
    weight: Tensor  # [N] loss weight exp(-c~) of a step
    reg_weight: Tensor  # [N] the same in L_reg, where all steps count the same
    tokens: Tensor  # [N] return-to-go in thousands, or standardised advantage
    source_starts: Tensor  # [m] int: rows where a source window may begin
    source_scores: Tensor  # [m] mean OT score -c~ of each of these windows
    target_starts: Tensor  # [n] int: rows where a target window may begin
    target_rows: Tensor  # [N_t] int


def fuse(source: Dataset, target: Dataset, pre: dict, args: Args, device) -> Data:
    """Both datasets with the gate and weights of `taf_preprocess.preprocess`, on the device."""
    N_s, N_t, K = len(source), len(target), args.gate.K
    columns = join(source, target, time_limit(args.task))  # actions, rewards, terminal, ...
    # DIFF 44: each domain has its own statistics. (j) Nothing is clipped.
    s_source = normalise(source.observations, pre["mu_source"], pre["sd_source"], math.inf)
    s_target = normalise(target.observations, pre["mu"], pre["sd"], math.inf)

    # DIFF 38: source rewards shrink with both costs, the calibrated OT cost and the MMD score. A
    # row where no fragment begins has the score of the fragment that begins before it.
    c = np.nan_to_num(pre["c_tilde"].astype(np.float64))  # [N_s], 0 without OT
    begin = np.maximum.accumulate(np.where(np.isfinite(pre["d_m"]), np.arange(N_s), 0))
    d = np.nan_to_num(pre["d_m"][begin].astype(np.float64))  # [N_s], 0 without a gate
    scale = np.exp(-c - (d - d.min()) / (np.ptp(d) + 1e-8))
    columns["raw_rewards"] = columns["rewards"].astype(np.float32)
    columns["rewards"] = columns["raw_rewards"].copy()
    if args.reward_rescale:
        columns["rewards"][:N_s] *= scale

    # DIFF 7: the gate decides where a source window begins, and the rest of it counts in any case.
    left = columns["left"]
    begins = np.concatenate([pre["gate"], np.ones(N_t, bool)])
    if args.drop_ends:
        # DIFF 53: no hopper window begins in the last K + 1 steps of an episode.
        # (e) So only an episode's last two steps are in no window, of V, Q, C and the CVAE too.
        begins &= left > K + 1
    source_starts, target_starts = np.flatnonzero(begins[:N_s]), np.flatnonzero(begins[N_s:])
    if not len(source_starts) or not len(target_starts):
        raise UserError("no window may begin anywhere; raise --xi, lower --K, or use more data")
    total = np.concatenate([[0.0], np.cumsum(-c)])
    length = np.minimum(K, left[source_starts])
    scores = (total[source_starts + length] - total[source_starts]) / length
    columns |= {
        "states": np.concatenate([s_source, s_target]),
        "raw_states": np.concatenate([source.observations, target.observations]),
        # DIFF 36: a time limit ends an episode as a failure does, (c) for V and Q too.
        "terminal": columns["terminal"] | np.concatenate([source.timeouts, target.timeouts]),
        "after": np.concatenate([np.minimum(np.arange(N) + 1, N - 1) for N in (N_s, N_t)]),
        # DIFF 18: the weights are in the losses, as they are and not divided by their mean.
        "weight": np.concatenate([np.nan_to_num(pre["omega"]), np.ones(N_t)]).astype(np.float32),
        # DIFF 76: L_reg gives all steps the same weight.
        "reg_weight": np.ones(N_s + N_t, np.float32),
        "source_starts": source_starts,
        "source_scores": scores,
        "target_starts": N_s + target_starts,
        "target_rows": N_s + np.arange(N_t),
    }
    columns["after"][N_s:] += N_s
    return Data(**{name: torch.as_tensor(x, device=device) for name, x in columns.items()})


def sample_starts(data: Data, args: Args) -> Tensor:
    """First rows [B_s + B_t] of a batch's windows, source windows first."""
    # DIFF 16, 17: of as many source windows as target windows, a batch keeps the 64 or 83 with the
    # best mean OT score. With weights as they are, the source's share of the loss is below beta.
    B_s = source_batch(args.target_batch, args.beta)
    from_source = data.source_starts[:0]
    if B_s:
        m = len(data.source_starts)
        drawn = torch.randint(m, (args.target_batch,), device=data.left.device)
        best = data.source_scores[drawn].topk(B_s).indices
        from_source = data.source_starts[drawn[best]]
    return torch.cat([from_source, uniform(data.target_starts, args.target_batch)])


def sample_windows(data: Data, args: Args) -> Batch:
    return taf_dt.windows(data, sample_starts(data, args), args.gate.K)


# ------------------------------------------------------------------------------------- networks


class Policy(taf_dt.Policy):
    """The Transformer of taf_dt.py with a second head, which predicts the next state."""

    def __init__(self, d_s: int, d_a: int, args: Args):
        super().__init__(d_s, d_a, args)
        self.next_state = nn.Linear(args.width, d_s)
        # DIFF 73: embeddings and heads begin as torch has it, the blocks with small weights.
        for layer in (self.embed_c, self.embed_s, self.embed_a, self.embed_t, self.action):
            layer.reset_parameters()

    def predict(self, b: Batch) -> tuple[Tensor, Tensor]:
        """Actions [B, K, d_a], read at s_t, and next states [B, K - 1, d_s], read at a_t."""
        h = self.hidden(b, slice(None))  # [B, 3K - 1, W]
        return self.action(h[:, 1::3]).tanh(), self.next_state(h[:, 2::3])


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    nets = taf_dt.build(args, d_s, d_a, device, Policy)
    nets["policy_bar"].train()  # DIFF 74: the target policy acts with dropout.
    return nets


# --------------------------------------------------------------------------------------- losses


def padded_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over all steps [B, K], where padding counts as zeros."""
    assert x.shape == valid.shape, (x.shape, valid.shape)  # [B] and [B, 1] would broadcast
    return (x * valid).mean()


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """The mean of x over valid steps. x, valid [B, K]"""
    # [B] times [B, 1] would silently broadcast to [B, B]
    assert x.shape == valid.shape, (x.shape, valid.shape)
    return (x * valid).sum() / valid.sum()


def k_step_target(r: Tensor, terminal: Tensor, q_last: Tensor, gamma: float) -> Tensor:
    """r, terminal [B, K], q_last = min_j Q_phi'_j(s_t, a_hat_t) [B] -> Q_hat [B, K]"""
    # DIFF 36: an end only removes the bootstrap. The reward at t never counts.
    return taf_dt.k_step_target(r, torch.zeros_like(terminal), q_last * ~terminal[:, -1], gamma)


def critic_loss(q: Tensor, q_hat: Tensor, weight: Tensor, valid: Tensor) -> Tensor:
    """q [2, B, K], q_hat, weight, valid [B, K]. The last step of a window has no target."""
    error = (q_hat - q).square().sum(0)  # [B, K]
    # (b) A weighted loss is divided by the number of steps, not by the sum of their weights.
    return masked_mean((weight * error)[:, :-1], valid[:, :-1])


def cql_penalty(q: Tensor, q_pi: Tensor, q_random: Tensor, weight: Tensor, valid: Tensor) -> Tensor:
    """Q [2, B, K] of the data's and of the target policy's actions, [2, n, B, K] of random ones."""
    # DIFF 52: conservative Q-learning, on 19 tasks
    # (f) The smaller head, at all steps of a window but the last
    some = torch.cat([q_pi[:, None], q_random], 1).amin(0)  # [1 + n, B, K]
    gap = some.logsumexp(0) - q.amin(0)  # [B, K]
    return masked_mean((weight * gap)[:, :-1], valid[:, :-1])


def q_term(q: Tensor, valid: Tensor) -> Tensor:
    """q [2, B, K] of the policy's actions, valid [B, K]"""
    # DIFF 30, 31: one critic at random, divided by the size of the other. (g) No weights.
    one = torch.randint(2, (1,), device=q.device)
    mine, other = q.index_select(0, one)[0], q.index_select(0, 1 - one)[0]  # [B, K]
    return -masked_mean(mine, valid) / masked_mean(other.abs(), valid).detach()


def policy_loss(nets: dict, b: Batch, noise: Tensor, args: Args) -> tuple[Tensor, dict]:
    """L_pi and what to log of it. noise [M, B K or B, 2 d_a] for the latents of L_reg."""
    pi, next_states = nets["policy"].predict(b)  # [B, K, d_a], [B, K - 1, d_s]
    q = nets["critics"](b.states, pi)  # [2, B, K]
    imitation = masked_mean(b.weight * (b.actions - pi).square().mean(-1), b.valid)  # (b)
    guidance = q_term(q, b.valid)
    # DIFF 33, 74: predict the next state too, with the weight of the state predicted.
    error = (b.states[:, 1:] - next_states).square().mean(-1)  # [B, K - 1]
    state = masked_mean(b.weight[:, 1:] * error, b.valid[:, :-1])
    # DIFF 54: L_reg sees all steps of a window, or the last alone.
    # DIFF 27: its latents are encoded from the policy's own action.
    at = slice(None) if args.reg_positions == "all" else slice(-1, None)
    s, a = b.states[:, at].flatten(0, 1), pi[:, at].flatten(0, 1)  # [B K or B, ...]
    cvae = nets["cvae"]
    density = behaviour_log_density(cvae, s, a, noise, args.variance, "posterior")
    reg = -taf_dt.weighted_mean(density, b.reg_weight[:, at].flatten())
    loss = imitation + args.state_loss * state + args.eta_reg * reg + args.alpha * guidance
    logs = {"losses/policy": loss, "losses/dt": imitation, "losses/reg": reg, "losses/state": state}
    return loss, logs | {"charts/q_policy": masked_mean(q.amin(0), b.valid)}


# -------------------------------------------------------------------------------------- updates


def update_values(nets: dict, data: Data, args: Args) -> dict:
    """One step of the auxiliary critics V and Q, on windows that have passed the OT filter."""
    # DIFF 26, 56, 74: windows of K steps that have passed the OT filter, raw states, and weights
    # in Q's loss alone.
    rows, valid = window_rows(data.left, sample_starts(data, args), args.gate.K)  # [B, K]
    s = data.raw_states[rows]  # [B, K, d_s]
    with torch.no_grad():
        v_next = nets["V_bar"](data.raw_states[data.after[rows]])  # [2, B, K]
        # (c) Nothing follows a time limit either.
        y = taf_dt.value_target(data.rewards[rows], data.terminal[rows], v_next, args.gamma)
    v = nets["V"](s)  # [2, B, K]
    q = nets["Q"](s, data.actions[rows])  # [2, B, K]
    loss_v = padded_mean(expectile(y - v, args.zeta_v).sum(0), valid)
    loss_q = padded_mean(data.weight[rows] * (y - q).square().sum(0), valid)
    gradient_step(nets["adam_values"], loss_v + loss_q)
    polyak_update(nets["V_bar"], nets["V"], args.tau)
    logs = {"losses/v": loss_v, "losses/q": loss_q, "charts/v_mean": v.mean()}
    return logs | {"charts/v_largest": v.abs().amax()}


@torch.no_grad()
def relabel(nets: dict, data: Data, args: Args) -> tuple[Data, dict]:
    """Advantage tokens for every row, and the moments by which they are standardised."""
    A = []
    for rows in torch.arange(len(data.rewards), device=data.rewards.device).split(100_000):
        # DIFF 21: the residual of V, also at the end of an episode, where the state that follows
        # is the first of the next one. (a) Rewards are not scaled, though V learned scaled ones.
        v = nets["V"](data.raw_states[rows]).mean(0)  # [block]
        v_next = nets["V"](data.raw_states[data.after[rows]]).mean(0)
        A.append(data.raw_rewards[rows] + args.gamma * v_next - v)
    A = torch.cat(A)  # [N]
    # DIFF 22: standardised with the moments of all data, gated or not, then doubled.
    used = A if args.beta else A[data.target_rows]
    mu, sigma = used.mean(), used.std(correction=0)
    tokens = args.adv_scale * (A - mu) / sigma
    return data._replace(tokens=tokens), {"mu_A": mu.item(), "sigma_A": sigma.item()}


def update_command(nets: dict, data: Data, args: Args) -> dict:
    """One step of the command network C(s)."""
    # DIFF 23: no weights, and (d) half of the windows are the source's, without the OT filter.
    B_s = args.target_batch if args.beta else 0
    starts = uniform(data.source_starts, B_s), uniform(data.target_starts, args.target_batch)
    b = taf_dt.windows(data, torch.cat(starts), args.gate.K)
    c = nets["command"](b.states)[0]  # [B, K]
    loss = padded_mean(expectile(b.tokens - c, args.zeta), b.valid)
    gradient_step(nets["adam_command"], loss)
    return {"losses/command": loss, "charts/command_mean": masked_mean(c, b.valid)}


def update_behaviour(nets: dict, data: Data, args: Args) -> dict:
    """One step of the behaviour model, on target data alone."""
    # DIFF 28, 40: a larger weight of the KL, and a penalty. (i) It sees 128 windows of K steps.
    starts = uniform(data.target_starts, args.target_batch)
    b = taf_dt.windows(data, starts, args.gate.K)
    mean, std = nets["cvae"].encode(b.states, b.actions)  # [B, K, 2 d_a]
    a_hat = nets["cvae"].decode(b.states, mean + std * torch.randn_like(std))
    error = padded_mean((a_hat - b.actions).square().mean(-1), b.valid)
    kl = (0.5 * (mean.square() + std.square() - 1) - std.log()).mean(-1)  # [B, K]
    loss = error + args.cvae_kl * padded_mean(kl, b.valid)
    gradient_step(nets["adam_cvae"], loss)
    return {"losses/cvae": loss, "charts/reconstruction": error}


def update_critics(nets: dict, b: Batch, args: Args) -> dict:
    """One step of both critics towards the K-step target, with a conservative penalty."""
    with torch.no_grad():
        pi_bar = nets["policy_bar"](b)  # [B, K, d_a]
        q_last = nets["critics_bar"](b.states[:, -1], pi_bar[:, -1]).amin(0)  # [B]
        q_hat = k_step_target(b.rewards, b.terminal, q_last, args.gamma)  # [B, K]
    q = nets["critics"](b.states, b.actions)  # [2, B, K]
    loss = critic_loss(q, q_hat, b.weight, b.valid)
    logs = {"losses/critic": loss}
    if args.cql:
        n = args.cql_actions
        a_random = 2 * torch.rand(n, *b.actions.shape, device=q.device) - 1  # [n, B, K, d_a]
        q_random = nets["critics"](b.states.expand(n, *b.states.shape), a_random)  # [2, n, B, K]
        q_pi = nets["critics"](b.states, pi_bar)  # [2, B, K]
        penalty = cql_penalty(q, q_pi, q_random, b.weight, b.valid)
        loss = loss + args.cql * penalty
        logs["losses/cql"] = penalty
    logs["charts/grad_norm_critics"] = gradient_step(nets["adam_critics"], loss, args.clip_grad)
    polyak_update(nets["critics_bar"], nets["critics"], args.tau)
    logs["charts/q_mean"] = masked_mean(q.mean(0), b.valid)
    logs["charts/q_target_mean"] = masked_mean(q_hat, b.valid)
    return logs | {"charts/q_largest": q.abs().amax()}


def update_policy(nets: dict, b: Batch, args: Args) -> dict:
    """One step of the Transformer."""
    rows = b.valid.numel() if args.reg_positions == "all" else len(b.valid)
    noise = torch.randn(args.M, rows, 2 * b.actions.shape[-1], device=b.states.device)
    loss, logs = policy_loss(nets, b, noise, args)
    return logs | {"charts/grad_norm": gradient_step(nets["adam_policy"], loss, args.clip_grad)}


def update_target_policy(nets: dict, args: Args, step: int) -> None:
    # DIFF 34: until its first update the target policy is the random initial network.
    # (j) Updates are counted from 0, so it follows at 1006, 1011, ...
    if step - 1 > args.ema_start and (step - 1) % args.ema_every == 0:
        polyak_update(nets["policy_bar"], nets["policy"], 1 - args.ema_decay)


def set_learning_rate(nets: dict, args: Args, step: int) -> float:
    # DIFF 39: a cosine in steps of 1,000 updates, which ends after a fifth of its period.
    share = (step - 1) // args.iteration / args.period
    rate = args.lr * 0.5 * (1 + math.cos(math.pi * share))
    for name in ("adam_critics", "adam_policy"):
        nets[name].param_groups[0]["lr"] = rate
    return rate


# ---------------------------------------------------------------------- acting and evaluation


class Agent(taf_dt.Agent):
    """The greedy policy."""

    clip = math.inf  # (j)


class GuidedAgent(Agent):
    """The released code's way of acting, in which the critics choose among candidates."""

    def reset(self) -> None:
        super().reset()
        # Its own generator: an evaluation changes no random number of the training.
        self.rng = torch.Generator(self.to_go.device).manual_seed(10_000 * self.args.run.seed)

    def choose(self, context: Batch) -> Tensor:
        return guided_action(self.nets, context, self.args, self.rng)  # [n, d_a]


def guided_action(nets: dict, context: Batch, args: Args, rng: torch.Generator) -> Tensor:
    """One of many candidate actions, drawn by the softmax of the target critics. [n, d_a]"""
    # DIFF 45: the paper has "no critics at test time".
    n, m = len(context.tokens), args.candidates
    b = Batch(*(x.repeat_interleave(m, 0) for x in context[:5]))  # [n m, K, ...]
    tokens = b.tokens.unflatten(0, (n, m))  # [n, m, K]
    # (h) Half of the candidates see the episode's first command halved, for as long as the context
    # holds it. All but candidates 0 and 1 have noise on the last command.
    first = context.valid & (context.steps == 0)  # [n, K]
    halved = torch.where(first[:, None], tokens / 2, tokens)
    tokens = torch.cat([tokens[:, : m // 2], halved[:, m // 2 :]], 1)
    noise = args.guided_noise * torch.randn(n, m, generator=rng, device=tokens.device)
    noise[:, :2] = 0
    tokens[:, :, -1] += noise
    a = nets["policy"](b._replace(tokens=tokens.flatten(0, 1)), only_last=True)[:, 0]  # [n m, d_a]
    q = nets["critics_bar"](b.states[:, -1], a).amin(0).view(n, m)
    chosen = torch.multinomial(q.softmax(1), 1, generator=rng)[:, 0]  # [n]
    return a.view(n, m, -1)[torch.arange(n, device=a.device), chosen]


def evaluate(nets: dict, pre: dict, args: Args, guided: bool) -> dict:
    """Greedy episodes in the target's simulator, and the score of guided ones or None."""
    n = args.run.eval_episodes
    found = taf_dt.evaluate(Agent(nets, pre, args, n), args)
    found["guided_score"] = None
    if guided:
        found["guided_score"] = taf_dt.evaluate(GuidedAgent(nets, pre, args, n), args)["score"]
    return found


# ------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    """All stages from data to result."""
    check(args)
    args = runs.replace(args, device=str(runs.pick_device(args.run.device)))
    device = torch.device(args.run.device)
    source, target = load_task(args.task, one_is_enough=True)
    plain = runs.plain(Args, defaults, args)
    with runs.open_run("taf_dt_released", args, plain, source=source, target=target) as run:
        if run.result:
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        pre = taf_preprocess.for_training(args, source, target)
        data = fuse(source, target, pre, args, device)
        nets = build(args, data.states.shape[1], data.actions.shape[1], device)
        run.begin(nets)
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets, pre, args, args.guided != "never"))
        stages.limit_values(run, data.raw_rewards, args.gamma)
        # DIFF 46: the last three evaluations are 1,000 updates apart, as all others are.
        run.last = [args.updates - i * args.run.eval_every for i in (2, 1, 0)]
        rate = {"charts/learning_rate": args.lr}

        if args.token == "advantage":
            for step in run.steps("values", args.label_updates):
                run.log(step, update_values(nets, data, args) | rate)
            data, moments = relabel(nets, data, args)
            run.record |= moments
            span = stages.token_range(data)
            beside = rate | {f"charts/{name}": x for name, x in span.items()}
            for step in run.steps("command", args.command_updates):
                run.log(step, update_command(nets, data, args) | beside)

        for step in run.steps("cvae", args.cvae_updates):
            run.log(step, update_behaviour(nets, data, args) | rate)
        nets["cvae"].requires_grad_(False)

        for step in run.steps("policy", args.updates):
            rate = {"charts/learning_rate": set_learning_rate(nets, args, step)}
            batch = sample_windows(data, args)
            logs = update_critics(nets, batch, args) | update_policy(nets, batch, args)
            update_target_policy(nets, args, step)
            run.log(step, logs | rate)
            if run.evaluation_due(step):
                last = args.guided == "last" and step in run.last
                found = evaluate(nets, pre, args, last or args.guided == "always")
                run.evaluated(step, found, guided_score=found["guided_score"])
        return run.finish(pre)


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
