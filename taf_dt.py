"""TAF-DT: a Decision Transformer for a robot with little data, helped by much data of a robot that moves differently.

    python taf_dt.py --quick --data embedded                             five minutes on a laptop
    python taf_dt.py --env hopper --shift morph --alpha 3.5              one task
    python taf_dt.py --env ant --shift gravity --preset released         as the authors' released code
    bash run_all.sh                                                      all tables

Paper: "Target-Aligned Fusion for Decision-Sequence Learning under Dynamics Shift", TPAMI manuscript (taf_tpami.tex).
`# Eq. (n) [label]` names the equation that the next statement implements, numbers counted through the appendix;
`# DIFF n` is row n of the table of differences between the paper's text, the released code and this file.

    1  gate source fragments by MMD, weight what is kept by OT                 taf_preprocess.py
    2  P_mix: 1 - beta target data, beta gated and weighted source data        Data, sample_*
    3  value V and action value Q under P_mix: advantages A = Q - V            update_labels, label
    4  command network C(s): a high expectile of A, given the state            update_command
    5  behaviour model (CVAE) of the target data                               update_cvae
    6  twin critics with a K-step target, Transformer policy on tokens         update_policy
       (A_t, s_t, a_t): imitate, stay near the target's behaviour, and
       prefer actions that the critics prefer
    7  act with C(s_t) in the place of A_t; no critic is needed                evaluate

    paper            here                 paper            here             shapes
    pi_theta         policy               omega(u)         weight           B windows of a batch
    pi_theta'        policy_bar           C_omega          command          K steps of a window
    Q_phi, Q_phi'    critics, critics_bar A~_t             tokens           T = 3K tokens of a window
    V_varphi, Q_psi  V, Q                 P_S^(I,w)        starts, weight   H heads of a network, n attention heads
"""

import contextlib
import copy
import dataclasses
import itertools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import taf_preprocess
from dynashift import make, make_batch, runs
from dynashift.datasets import Dataset, load_task
from dynashift.envs import TIME_LIMIT
from dynashift.errors import UserError, one_line_errors
from dynashift.scores import normalized_score
from taf_preprocess import normalise

# --------------------------------------------------------------------------------------------- arguments

# Values by task. K is given in the paper, "Transformer context length"; for eta_reg it has the set {0.3, ..., 0.6}.
# DIFF 29: paper no choice by task; released 0.4 to 0.9; here the released value, at most 0.6
PAPER = {
    ("morph", "halfcheetah"): dict(K=20, eta_reg=0.4),
    ("morph", "hopper"): dict(K=5, eta_reg=0.4),
    ("morph", "walker2d"): dict(K=5, eta_reg=0.6),
    ("morph", "ant"): dict(K=5, eta_reg=0.6),
    ("kinematic", "halfcheetah"): dict(K=20, eta_reg=0.5),
    ("kinematic", "hopper"): dict(K=5, eta_reg=0.6),
    ("kinematic", "walker2d"): dict(K=5, eta_reg=0.4),
    ("kinematic", "ant"): dict(K=5, eta_reg=0.6),
    ("gravity", "halfcheetah"): dict(K=10, eta_reg=0.6),
    ("gravity", "hopper"): dict(K=20, eta_reg=0.5),
    ("gravity", "walker2d"): dict(K=20, eta_reg=0.6),
    ("gravity", "ant"): dict(K=5, eta_reg=0.4),
}
RETURN_TARGET = dict(hopper=3600, halfcheetah=12000, walker2d=5000, ant=5000)  # DIFF 49: with --token rtg

# The released code's own values: for all tasks, by task where they differ from PAPER, and for 17 pairs of datasets.
RELEASED = dict(
    source_weighting="topk", label_weighting="q-only", label_states="raw", adv_estimator="td", adv_scale=2.0
)
RELEASED |= dict(adv_moments="all", q_head="random", state_loss=1.0, terminal_mode="released", ema_copy=False)
RELEASED |= dict(updates=101_000, reg_positions="last", reg_tokens="all", reward_rescale=True)
RELEASED |= dict(cvae_kl=0.5, cvae_decay=1e-4)
ALL, PLAIN, BETA_83 = dict(reg_positions="all"), dict(reward_rescale=False), dict(beta=83 / 211)
RELEASED_TASK = {
    ("morph", "halfcheetah"): dict(zeta=0.7, **BETA_83),
    ("morph", "hopper"): dict(zeta=0.55, variance=0.05, **ALL, **PLAIN, **BETA_83),
    ("morph", "walker2d"): dict(zeta=0.7, variance=0.0375, **ALL),
    ("morph", "ant"): dict(zeta=0.6, eta_reg=0.7),
    ("kinematic", "halfcheetah"): dict(zeta=0.7),
    ("kinematic", "hopper"): dict(zeta=0.55, eta_reg=0.7),
    ("kinematic", "walker2d"): dict(zeta=0.7, alpha=2.5, variance=0.0375, **ALL, **PLAIN, **BETA_83),
    ("kinematic", "ant"): dict(zeta=0.6, eta_reg=0.7),
    ("gravity", "halfcheetah"): dict(zeta=0.7, alpha=2.0, adv_scale=1.0, cql=0.05, **ALL),
    ("gravity", "hopper"): dict(zeta=0.55),
    ("gravity", "walker2d"): dict(zeta=0.7, variance=0.05, **ALL),
    ("gravity", "ant"): dict(zeta=0.6, **PLAIN, **BETA_83),
}
WALKER = dict(alpha=3.5, eta_reg=0.6, beta=1 / 3, reward_rescale=True)
# DIFF 55: paper one setting, 100,000 updates; released 17 pairs with their own and four early stops; here one setting
RELEASED_PAIR = {
    ("kinematic", "hopper", "medium", "medium"): dict(eta_reg=0.6, variance=0.05, **ALL),
    ("kinematic", "hopper", "medium", "medium-expert"): dict(eta_reg=0.6, variance=0.05, **ALL),
    ("kinematic", "hopper", "medium", "expert"): dict(eta_reg=0.6, variance=0.05, cql=0.01, **ALL),
    ("kinematic", "hopper", "medium-replay", "medium-expert"): dict(eta_reg=0.9, updates=81_000, **ALL),
    ("kinematic", "hopper", "medium-replay", "expert"): dict(eta_reg=0.9, variance=0.05, updates=61_000, **ALL),
    ("kinematic", "hopper", "medium-expert", "medium"): dict(eta_reg=0.9, **ALL),
    ("kinematic", "hopper", "medium-expert", "medium-expert"): dict(eta_reg=0.9, variance=0.05, updates=81_000, **ALL),
    ("kinematic", "hopper", "medium-expert", "expert"): dict(eta_reg=0.6, variance=0.05, updates=81_000, **ALL),
    ("kinematic", "walker2d", "medium", "medium-expert"): dict(cql=0.05, **WALKER),
    ("kinematic", "walker2d", "medium-replay", "medium"): dict(cql=0.05, **WALKER),
    ("kinematic", "walker2d", "medium-replay", "medium-expert"): dict(cql=0.1, **WALKER),
    ("kinematic", "walker2d", "medium-expert", "medium"): dict(cql=0.1, **WALKER),
    ("kinematic", "ant", "medium", "medium"): dict(eta_reg=0.6, variance=0.0375, cql=0.05, **ALL),
    ("kinematic", "ant", "medium", "medium-expert"): dict(eta_reg=0.6, variance=0.0375, cql=0.15, **ALL),
    ("gravity", "hopper", "medium-expert", "medium"): dict(K=5, eta_reg=0.6, cql=0.05, **ALL),
    ("gravity", "hopper", "medium-expert", "medium-expert"): dict(K=5, eta_reg=0.6, variance=0.05, cql=0.1, **ALL),
    ("gravity", "hopper", "medium-expert", "expert"): dict(K=5, eta_reg=0.6, cql=0.1, **ALL),
}
# A small run that ends in minutes on two cores: less data, smaller networks, fewer updates, all of the algorithm.
QUICK = dict(source_size=100_000, layers=2, heads=2, width=64, hidden=128, cvae_hidden=128, M=4, updates=2_500)
QUICK |= dict(label_updates=3_000, command_updates=1_500, cvae_updates=10_000, target_batch=64, label_batch=256)
QUICK |= dict(eval_every=500, save_every=500, log_every=100, guided="never")
QUICK |= dict(zeta=0.55)  # after so few updates the upper tail of A is noise, and 0.98 commands what no data show
QUICK |= dict(lr=1e-3)  # at 3e-4 so few updates do not copy the target data well enough: seed 3 fell to 38 of 48
QUICK |= dict(cosine=True)  # at a constant rate the score swings between 30 and 60 from one evaluation to the next


@dataclass(frozen=True)
class Args(taf_preprocess.Args, runs.TaskArgs):
    # Flags of gate and weights are those of taf_preprocess.py, of task and run those of runs.TaskArgs; here the others.
    out: Path = Path("runs")
    """folder of the runs; gate and weights are kept in its folder preprocess"""
    # DIFF 47: paper 1 to 5; released 123; here 1 to 5
    seed: int = 1
    """of networks, batches and dropout; evaluation episodes have their own (Table tab:morph-shift: seeds 1 to 5)"""
    capture_video: bool = False
    """write one episode of the final policy as video.gif"""
    diagnostics: bool = False
    """measure jumps at stitch junctions, twenty times during training (Fig. fig:jumps)"""
    track: bool = False
    """also log to Weights & Biases (pip install wandb)"""
    compile: bool = False
    """torch.compile the policy's losses; on a CPU it needs a C++ compiler"""
    bf16: bool = False
    """run the Transformer in bfloat16 where that is safe (autocast)"""
    guided: Literal["always", "last", "never"] = "last"
    """evaluate critic-guided actions too, as the released code does: each time, the last three times, or never"""

    # the fused law and its samples
    beta: float = 1 / 3
    """source share beta of P_mix, Eq. (22); 64 and 128 windows in Table tab:hyperparameters; 0 is target only"""
    target_batch: int = 128
    """target windows in a batch, Table tab:hyperparameters; the source windows follow from beta"""
    source_weighting: Literal["loss", "sample", "topk"] = "loss"
    """how windows get the weights of Eq. (21): in the losses, in the draw, or the best of a larger draw (released)"""
    reward_rescale: bool = False
    """multiply source rewards by exp(-c~) and exp(-d~), as the released code does on 85 of 108 tasks"""
    drop_ends: bool = False
    """no window begins in the last K steps of an episode (released code, hopper)"""

    # advantage tokens and command
    token: Literal["advantage", "rtg"] = "advantage"
    """conditioning token, Eq. (25); rtg is the ablation of Table tab:adv_ablation"""
    return_target: float | None = None
    """with --token rtg: the return asked for at the start of an episode"""
    gamma: float = 0.99
    """discount gamma, Table tab:hyperparameters"""
    tau: float = 0.005
    """target update rate eta_exp of Algorithm 1, Table tab:hyperparameters; more in shorter runs"""
    lr: float = 3e-4
    """learning rate of all networks, Table tab:hyperparameters"""
    hidden: int = 256
    """width of the three hidden layers of V, Q, C and the critics, Table tab:hyperparameters"""
    zeta_v: float = 0.5
    """expectile zeta of V, Eq. (23)"""
    # DIFF 25: paper silent; released and here 100,000 updates of V and Q, 50,000 of C, 100,000 of the CVAE
    label_updates: int = 100_000
    """updates of V and Q, Eqs. (23) and (24)"""
    # DIFF 26: paper 64 + 128 transitions; released 64 + 128 windows of K; here as the paper
    label_batch: int = 128
    """target transitions in a batch for V, Q and C; the source transitions follow from beta"""
    label_weighting: Literal["sample", "q-only"] = "sample"
    """source transitions drawn with probability w_i for V, Q, C; or uniformly, with omega_i in Q's loss (released)"""
    label_states: Literal["normalised", "raw"] = "normalised"
    """what V and Q see"""
    adv_estimator: Literal["qv", "td"] = "qv"
    """A = Q(s, a) - V(s), Eq. (39), or r + gamma V(s') - V(s)"""
    adv_moments: Literal["fused", "all"] = "fused"
    """mu_A and sigma_A of Eq. (40) over target and retained source data, or over all"""
    adv_scale: float = 1.0
    """factor on the standardised advantages, Eq. (40)"""
    # DIFF 24: paper 0.98, elsewhere "0.7 to 0.9"; released 0.55, 0.6 or 0.7 by robot; here 0.98
    zeta: float = 0.98
    """expectile zeta of the command network C, Eq. (41); ablation in Table tab:expectile_ablation"""
    command_updates: int = 50_000
    """updates of C"""
    command_decay: float = 5e-4
    """L2 penalty on C"""

    # behaviour regulariser
    eta_reg: float | None = None
    """weight eta_reg of L_reg, Eq. (28); by task, Table tab:hyperparameters"""
    M: int = 10
    """latents M per state in L_reg, Table tab:hyperparameters"""
    variance: float = 0.1
    """variance of the Gaussian in L_reg; Table tab:hyperparameters has sqrt(0.1) for its standard deviation"""
    reg_positions: Literal["all", "last"] = "all"
    """positions of a window that L_reg sees"""
    reg_tokens: Literal["mix", "target", "all"] = "mix"
    """which tokens L_reg counts: those of P_mix, each with its omega; the target's alone; or all alike (released)"""
    cvae_updates: int = 100_000
    """updates of the CVAE"""
    cvae_batch: int = 256
    """target transitions in a batch for the CVAE"""
    cvae_hidden: int = 750
    """width of the CVAE's layers"""
    # DIFF 28: paper silent; released 0.5, which merges modes less than 0.7 apart; here 0.1, for 0.3
    cvae_kl: float = 0.1
    """weight of the CVAE's KL divergence; its loss is the ELBO for actions with noise of variance cvae_kl / 4"""
    cvae_decay: float = 0.0
    """L2 penalty on the CVAE"""

    # Transformer policy and twin critics
    layers: int = 4
    """Transformer layers, Table tab:hyperparameters"""
    heads: int = 4
    """attention heads, Table tab:hyperparameters"""
    width: int = 256
    """embedding dimension, Table tab:hyperparameters"""
    dropout: float = 0.1
    """dropout on embeddings, attention and residuals, Table tab:hyperparameters"""
    time_embedding: bool = True
    """tell the Transformer the step within the episode; few target episodes let it go by the clock, not by the state"""
    updates: int = 100_000
    """updates of policy and critics"""
    decay: float = 1e-4
    """L2 penalty on the policy"""
    # DIFF 39: paper silent; released a cosine that ends after a fifth of its period; here constant, or all of it
    cosine: bool = False
    """let the rates of policy and critics fall to 0 over their updates, as half a cosine"""
    clip_grad: float = 5.0
    """largest norm of the gradients of policy and critics"""
    alpha: float = 3.5
    """critic guidance alpha, Eq. (28); ablation in Table tab:q_ablation"""
    q_head: Literal["min", "random"] = "min"
    """Q_phi of Eq. (28): the smaller of the two critics, or one of them at random"""
    terminal_mode: Literal["exact", "qt", "released"] = "exact"
    """how the K-step target of Eq. (26) ends an episode"""
    ema_decay: float = 0.995
    """the target policy pi_theta' keeps this much of itself in an update; less in shorter runs"""
    ema_every: int = 5
    """updates between two of the target policy"""
    ema_start: int = 1_000
    """updates before the first of the target policy"""
    ema_copy: bool = True
    """the target policy begins as a copy of the policy at ema_start; the released code keeps the random initial one"""
    state_loss: float = 0.0
    """weight of a next-state prediction, which the paper does not have (released: 1)"""
    cql: float = 0.0
    """weight of a conservative penalty on the critics, which the paper does not have (released: up to 0.15)"""
    cql_actions: int = 10
    """random actions in that penalty"""

    # critic-guided actions, which the paper does not have (released)
    candidates: int = 50
    """actions to choose from"""
    guided_noise: float = 0.1
    """standard deviation of the noise on their last command"""


IGNORE = runs.IGNORE | {"capture_video", "track"}  # they have no effect on the result


def defaults(args: Args) -> Args:
    """What Args would be for this task, preset and --quick if nothing else were given."""
    shift = "morph" if args.shift == "none" else args.shift  # the paper has no row without a shift
    task, qualities = (shift, args.env), (Path(args.source).stem, Path(args.target).stem)  # of a file, by its name
    values = PAPER[task] | {"return_target": RETURN_TARGET[args.env]}
    if args.preset == "released":
        values |= taf_preprocess.PRESETS["released"] | RELEASED | {"drop_ends": args.env == "hopper"}
        values |= RELEASED_TASK[task] | RELEASED_PAIR.get(task + qualities, {})
    values |= {"beta": 0.0} if args.target == "none" else {}  # one dataset, which is the target's
    official = values.get("updates", Args.updates)
    values |= QUICK if args.quick else {}
    share = runs.budget_share(args, values, official)
    values |= {"tau": runs.averaging_rate(Args.tau, share), "ema_start": round(share * Args.ema_start)}
    values["ema_decay"] = 1 - runs.averaging_rate(1 - Args.ema_decay, share)
    return Args(**values | {"preset": args.preset} | runs.task_of(args))


def check(args: Args) -> None:
    positive = "target_batch label_batch lr M variance K width heads layers hidden cvae_hidden cvae_batch ema_every "
    positive += "cql_actions candidates clip_grad"
    zero_too = "label_updates command_updates cvae_updates ema_start eta_reg guided_noise state_loss cql decay "
    runs.check_args(args, positive, zero_too + "command_decay cvae_decay cvae_kl")
    for name in ("zeta", "zeta_v"):
        if not 0 < getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is an expectile, between 0 and 1, not {getattr(args, name)}")
    if not 0 <= args.beta < 1:
        raise UserError(f"--beta is the source share of a batch, from 0 to below 1, not {args.beta}")
    if args.beta and args.target == "none":
        raise UserError(f"--beta {args.beta} is a share of source data beside the target's; with --target none it is 0")
    if args.beta and not source_batch(args.target_batch, args.beta):
        raise UserError(f"--beta {args.beta} of a batch with {args.target_batch} target windows is no source window")
    for name in ("gamma", "dropout", "tau", "ema_decay"):
        if not 0 <= getattr(args, name) <= 1 or (getattr(args, name) == 1 and name in ("gamma", "dropout")):
            raise UserError(f"--{name.replace('_', '-')} lies between 0 and 1, and is {getattr(args, name)}")
    if args.K < 2:
        raise UserError(f"--K {args.K} leaves the K-step target of Eq. (26) no step; use at least 2")
    if args.width % args.heads:
        raise UserError(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if args.track:
        import_wandb()


# ------------------------------------------------------------------------------- the fused law P_mix, Eq. (22)


class Data(NamedTuple):
    """Source rows, then target rows, all on the training device: N = N_s + N_t transitions in the order of time."""

    states: Tensor  # [N, d_s] normalised
    actions: Tensor  # [N, d_a]
    rewards: Tensor  # [N]
    next_states: Tensor  # [N, d_s]
    terminal: Tensor  # [N] bool, the robot failed
    done: Tensor  # [N] bool, where the twin critics see an end: `terminal`, or as --terminal-mode has it
    steps: Tensor  # [N] int, step within the episode
    left: Tensor  # [N] int, steps from here to the episode's end, this one included
    weight: Tensor  # [N] omega(u): loss weight of a token
    reg_weight: Tensor  # [N] the same in L_reg: `weight`, or as --reg-tokens has it
    tokens: Tensor  # [N] advantage A~, or return-to-go
    starts_s: Tensor  # [m] int, rows where a source window begins: a window is a kept fragment
    starts_t: Tensor  # [N_t] int, the same of the target
    rank: Tensor  # [m] cumulative probabilities, or scores, by which source windows are drawn
    rows_s: Tensor  # [n] int, the retained support G(I): every transition inside a kept fragment
    rows_t: Tensor  # [N_t] int, the target's transitions
    cdf: Tensor  # [n] cumulative probabilities w_i of rows_s, for V, Q and C
    omega: Tensor  # [n] their omega_i
    seen: Tensor  # [N, d_s] what V and Q see of the states: `states`, or as --label-states has it
    next_seen: Tensor  # [N, d_s] and of the next states


def source_batch(target_batch: int, beta: float) -> int:
    # DIFF 17: paper leaves beta open; its batch sizes 64 and 128 imply 1/3; here the source share follows from beta
    return round(target_batch * beta / (1 - beta))


def fuse(source: Dataset, target: Dataset, pre: dict, args: Args, device) -> Data:
    """Gate and weights (`taf_preprocess.preprocess`) and both datasets, ready to be sampled."""

    def both(key):  # [N, ...]
        return np.concatenate([getattr(source, key), getattr(target, key)])

    def states(key):
        s = normalise(getattr(source, key), pre["mu_source"], pre["sd_source"])
        return np.concatenate([s, normalise(getattr(target, key), pre["mu"], pre["sd"])])

    N_s, K = len(source), args.K
    left = np.concatenate([np.repeat(d.lengths, d.lengths) - d.steps for d in (source, target)])
    rewards, terminal = both("rewards").astype(np.float32), both("terminals")
    # Definition [unlabelled, "sample weight omega(u)"]: 1 on the target, I_i exp(eta_w d_i^w) on the source. A source
    # window is a kept fragment, which lies in G(I) as a whole: each of its tokens has an omega of its own, none is 0.
    omega, cost = (np.nan_to_num(pre[key].astype(np.float64)) for key in ("omega", "c_tilde"))  # [N_s]
    if args.reward_rescale:  # DIFF 38: paper rewards as they are; released as here
        begins = np.maximum.accumulate(np.where(np.isfinite(pre["d_m"]), np.arange(N_s), 0))
        d = np.nan_to_num(pre["d_m"][begins])  # of the last fragment that begins no later; 0 without a gate
        rewards[:N_s] *= np.exp(-cost - (d - d.min()) / (np.ptp(d) + 1e-8))

    # sum of x over the (at most K) steps of the window that begins at each row
    def window_sum(x):  # [N_s] -> [N_s]
        total = np.concatenate([[0.0], np.cumsum(x, dtype=np.float64)])
        begin = np.arange(N_s)
        return total[begin + length] - total[begin]

    # A source window begins where a kept fragment does, a target window everywhere.
    begins = np.concatenate([pre["gate"], np.ones(len(target), bool)])  # [N]
    if args.drop_ends:  # DIFF 53: paper silent; released no hopper window begins in the last K steps
        begins &= left > K
    length = np.minimum(K, left)
    inside = taf_preprocess.retained_support(begins, length)  # [N], G(I), then the target's transitions
    starts, rows = np.flatnonzero(begins[:N_s]), np.flatnonzero(inside[:N_s])
    length = length[:N_s]
    if len(starts) == 0 or not begins[N_s:].any():
        raise UserError("no window may begin anywhere: raise --xi or use more data")
    # DIFF 18: paper "in the draw or, equivalently, in the losses", which differ for windows; here in the losses
    if args.source_weighting == "loss":
        # Weights are divided by their mean over the tokens drawn, so that the source share of the loss is beta.
        weight = omega * (length[starts].sum() / window_sum(omega)[starts].sum())
        rank = np.linspace(0, 1, len(starts) + 1)[1:]
    elif args.source_weighting == "sample":
        weight = np.ones(N_s)
        rank = np.cumsum((window_sum(omega) / length)[starts])
        rank /= rank[-1]
    else:  # DIFF 16: paper no second filter; released the best windows of a larger draw, by their mean OT score
        weight = omega
        rank = (window_sum(-cost) / length)[starts]

    w = pre["w"].astype(np.float64)[rows] if args.label_weighting == "sample" else np.ones(len(rows))
    done = terminal | both("timeouts") if args.terminal_mode == "released" else terminal
    steps = np.minimum(np.concatenate([source.steps, target.steps]), TIME_LIMIT - 1)
    if args.token == "rtg":  # undiscounted return-to-go in thousands
        tail = np.concatenate([_to_go(d.rewards, d.starts) for d in (source, target)]) / 1000
    else:
        tail = np.zeros(len(left))  # until `label` has computed the advantages

    # DIFF 76: paper "every loss is an expectation under P_mix"; released all tokens alike; here as the paper
    reg_weight = {"mix": weight, "target": np.zeros(N_s), "all": np.ones(N_s)}[args.reg_tokens]
    ones = np.ones(len(target))

    def tensor(x, dtype=torch.float32):
        return torch.as_tensor(np.ascontiguousarray(x)).to(device, dtype)

    s, s_next = tensor(states("observations")), tensor(states("next_observations"))
    # DIFF 56: paper normalised states, both losses weighted; released raw, only Q's weighted; here as the paper
    raw = args.label_states == "raw"
    seen = [tensor(both(key)) for key in ("observations", "next_observations")] if raw else [s, s_next]
    return Data(
        s, tensor(both("actions")), tensor(rewards), s_next,
        tensor(terminal, torch.bool), tensor(done, torch.bool), tensor(steps, torch.long), tensor(left, torch.long),
        tensor(np.concatenate([weight, ones])), tensor(np.concatenate([reg_weight, ones])), tensor(tail),
        tensor(starts, torch.long), tensor(N_s + np.flatnonzero(begins[N_s:]), torch.long),
        tensor(rank, torch.float64), tensor(rows, torch.long), tensor(N_s + np.flatnonzero(inside[N_s:]), torch.long),
        tensor(np.cumsum(w) / w.sum(), torch.float64), tensor(omega[rows]), *seen,
    )  # fmt: skip


def _to_go(rewards: np.ndarray, starts: np.ndarray) -> np.ndarray:
    parts = np.split(rewards.astype(np.float64), starts[1:])
    return np.concatenate([part[::-1].cumsum()[::-1] for part in parts])


def draw(cdf: Tensor, size: int) -> Tensor:
    """`size` numbers below len(cdf), drawn with the probabilities whose cumulative sums are cdf."""
    u = torch.rand(size, dtype=torch.float64, device=cdf.device)
    return torch.searchsorted(cdf, u, right=True).clamp_(max=len(cdf) - 1)


def uniform(rows: Tensor, size: int) -> Tensor:
    return rows[torch.randint(len(rows), (size,), device=rows.device)]


def sample_transitions(data: Data, B_s: int, B_t: int, weighted: bool) -> tuple[Tensor, Tensor]:
    """Rows [B_s + B_t] of P_mix, and the weight that their Q loss has, [B_s + B_t]."""
    # Eq. (22) [pmix-def]: target uniformly, source with probability w_i
    i = draw(data.cdf, B_s) if B_s else data.rows_t[:0]
    rows = torch.cat([data.rows_s[i], uniform(data.rows_t, B_t)])
    one = torch.ones(B_t, device=rows.device)
    return rows, torch.cat([one.new_ones(B_s) if weighted else data.omega[i], one])


class Batch(NamedTuple):
    states: Tensor  # [B, K, d_s]
    actions: Tensor  # [B, K, d_a]
    rewards: Tensor  # [B, K]
    done: Tensor  # [B, K] bool
    steps: Tensor  # [B, K] int
    valid: Tensor  # [B, K] bool, false on padding
    weight: Tensor  # [B, K] omega(u), 0 on padding
    reg_weight: Tensor  # [B, K] the same in L_reg
    tokens: Tensor  # [B, K]
    next_states: Tensor  # [B, K, d_s]


def sample_windows(data: Data, B_s: int, B_t: int, K: int, weighting: str) -> Batch:
    """Windows of P_mix: index arithmetic on the device, nothing of it in Python."""
    # Eq. (22) [pmix-def]
    # DIFF 43: paper speaks of stitched windows and does not build any; released and here a window is of one episode
    starts = [uniform(data.starts_t, B_t)]
    if B_s and weighting == "topk":
        drawn = torch.randint(len(data.starts_s), (max(B_t, B_s),), device=data.rank.device)
        starts.insert(0, data.starts_s[drawn[data.rank[drawn].topk(B_s).indices]])
    elif B_s:
        starts.insert(0, data.starts_s[draw(data.rank, B_s)])
    return windows(data, torch.cat(starts), K)


def windows(data: Data, starts: Tensor, K: int) -> Batch:
    """The next K steps of the same episode, padded on the left with zeros where it ends before."""
    length = data.left[starts].clamp(max=K)  # [B]
    position = torch.arange(K, device=starts.device) - (K - length)[:, None]  # [B, K], negative on padding
    valid = position >= 0
    return gather(data, starts[:, None] + position.clamp(min=0), valid)


def gather(data: Data, rows: Tensor, valid: Tensor) -> Batch:
    """rows, valid [B, K]"""
    mask = valid[..., None]
    return Batch(
        data.states[rows] * mask, data.actions[rows] * mask, data.rewards[rows] * valid, data.done[rows] & valid,
        data.steps[rows] * valid, valid, data.weight[rows] * valid, data.reg_weight[rows] * valid,
        data.tokens[rows] * valid, data.next_states[rows] * mask,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- networks


class Heads(nn.Module):
    """H networks of one shape, (d_in) -> hidden x 3 -> 1 with Mish, computed together: one product a layer."""

    # DIFF 37: paper ReLU for the auxiliary networks, silent on the critics; released and here Mish

    def __init__(self, H: int, d_in: int, hidden: int):
        super().__init__()
        sizes = [d_in, hidden, hidden, hidden, 1]
        bound = [(m, n, 1 / math.sqrt(m)) for m, n in itertools.pairwise(sizes)]  # as nn.Linear begins
        self.W = nn.ParameterList(torch.empty(H, m, n).uniform_(-b, b) for m, n, b in bound)
        self.b = nn.ParameterList(torch.empty(H, 1, n).uniform_(-b, b) for _, n, b in bound)

    def forward(self, *inputs: Tensor) -> Tensor:
        x = torch.cat(inputs, -1) if len(inputs) > 1 else inputs[0]  # [..., d_in]
        h = x.reshape(1, -1, x.shape[-1]).expand(len(self.W[0]), -1, -1)  # [H, B, d_in]
        for i, (W, b) in enumerate(zip(self.W, self.b, strict=True)):
            h = torch.baddbmm(b, F.mish(h) if i else h, W)
        return h.reshape(len(h), *x.shape[:-1])  # [H, ...]


class CVAE(nn.Module):
    """The target's behaviour: a ~ decoder(s, z), z ~ N(0, 1)."""

    def __init__(self, d_s: int, d_a: int, hidden: int):
        super().__init__()

        def mlp(d_in, d_out):
            layers = nn.Linear(d_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, d_out)
            return nn.Sequential(*layers)

        self.encoder, self.decoder = mlp(d_s + d_a, 4 * d_a), mlp(d_s + 2 * d_a, d_a)

    def encode(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.encoder(torch.cat([s, a], -1)).chunk(2, -1)
        return mean, log_std.clamp(-4, 15).exp()  # [..., 2 d_a] each

    def decode(self, s: Tensor, z: Tensor) -> Tensor:
        return self.decoder(torch.cat([s, z], -1)).tanh()


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """As F.dropout, from 16 random bits an entry: on a CPU drawing floats would cost more than the network's layers."""
    if not training or p == 0:
        return x
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    keep = bits.view(torch.int16)[: x.numel()].view(x.shape) >= round(p * 2**16) - 2**15
    return x * keep * (1 / (1 - p))


class Block(nn.Module):
    """One layer of the Transformer: attention, then an MLP, each on normalised input and added to it."""

    def __init__(self, width: int, heads: int, p: float):
        super().__init__()
        self.heads, self.p = heads, p
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor, read: slice) -> Tensor:
        """x [B, T, W], mask [B, 1, T, T] -> [B, T', W]: only those tokens that `read` selects."""
        h, W = self.norm1(x), x.shape[-1]
        if read == slice(None):
            q, k, v = self.qkv(h).chunk(3, -1)  # [B, T, W] each
        else:
            x, mask, weight, bias = x[:, read], mask[:, :, read], self.qkv.weight, self.qkv.bias
            q = F.linear(h[:, read], weight[:W], bias[:W])  # [B, T', W]
            k, v = F.linear(h, weight[W:], bias[W:]).chunk(2, -1)
        q, k, v = (u.unflatten(-1, (self.heads, -1)).transpose(1, 2) for u in (q, k, v))  # [B, n, T, W / n]
        h = F.scaled_dot_product_attention(q, k, v, mask, self.p if self.training else 0.0)
        x = x + dropout(self.out(h.transpose(1, 2).flatten(2)), self.p, self.training)
        return x + dropout(self.down(self.up(self.norm2(x)).relu()), self.p, self.training)


class Policy(nn.Module):
    """pi_theta: a causal Transformer over the tokens (c_t, s_t, a_t) of K steps."""

    def __init__(self, d_s: int, d_a: int, args: Args):
        super().__init__()
        W = args.width
        self.embed_c, self.embed_s, self.embed_a = nn.Linear(1, W), nn.Linear(d_s, W), nn.Linear(d_a, W)
        # DIFF 42: paper a buffer T, no more; released a learned embedding of the step; here too, or none by flag
        self.embed_t = nn.Embedding(TIME_LIMIT, W) if args.time_embedding else None
        self.norm_in, self.norm_out, self.p = nn.LayerNorm(W), nn.LayerNorm(W), args.dropout
        self.blocks = nn.ModuleList(Block(W, args.heads, args.dropout) for _ in range(args.layers))
        self.action = nn.Linear(W, d_a)
        self.next_state = nn.Linear(W, d_s) if args.state_loss else None
        # DIFF 73: paper silent; released small weights in the blocks alone, steps N(0, 1); here small ones everywhere
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens, states, actions, steps, valid, only_last=False) -> tuple[Tensor, Tensor | None]:
        """tokens, steps, valid [B, K], states [B, K, d_s], actions [B, K, d_a] (the last of a window is not looked at)
        -> actions [B, K, d_a], or [B, 1, d_a] if only the last is wanted; and predicted next states."""
        t = 0.0 if self.embed_t is None else self.embed_t(steps)  # [B, K, W]
        c, s, a = self.embed_c(tokens[..., None]) + t, self.embed_s(states) + t, self.embed_a(actions) + t
        # Eq. (25) [adv-token-seq]: one sequence (c_1, s_1, a_1, c_2, s_2, a_2, ...)
        # DIFF 41: paper (s, a, A), where A_t would come after the a_t it should command; released and here (A, s, a)
        x = torch.stack([c, s, a], 2).flatten(1, 2)  # [B, 3K, W]
        keys = valid.repeat_interleave(3, 1)  # [B, 3K]
        # Actions are read at the tokens s_t, next states at a_t. No other output of the last layer is computed, and
        # where no next state is wanted, the last token a_K is seen by nobody and left out.
        every_token = self.next_state is not None and not only_last
        if not every_token:
            x, keys = x[:, :-1], keys[:, :-1]
        T = x.shape[1]
        see = torch.ones(T, T, dtype=torch.bool, device=x.device)
        # A padded token sees itself, or its attention would be 0/0; nobody else sees it.
        mask = (see.tril() & keys[:, None, None]) | torch.eye(T, dtype=torch.bool, device=x.device)  # [B, 1, T, T]
        x = dropout(self.norm_in(x), self.p, self.training)
        for block in self.blocks[:-1]:
            x = block(x, mask, slice(None))
        read = slice(None) if every_token else slice(T - 1, None) if only_last else slice(1, None, 3)
        x = self.norm_out(self.blocks[-1](x, mask, read))  # [B, T', W]
        if every_token:
            return self.action(x[:, 1::3]).tanh(), self.next_state(x[:, 2::3])
        return self.action(x).tanh(), None


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """All networks and their optimisers: all that a checkpoint holds."""
    # Algorithm 1 [alg:train], line 1
    nets = {
        "V": Heads(2, d_s, args.hidden),
        "V_bar": Heads(2, d_s, args.hidden),
        "Q": Heads(2, d_s + d_a, args.hidden),
        "command": Heads(1, d_s, args.hidden),
        "cvae": CVAE(d_s, d_a, args.cvae_hidden),
        "policy": Policy(d_s, d_a, args),
        "policy_bar": Policy(d_s, d_a, args).eval(),
        "critics": Heads(2, d_s + d_a, args.hidden),
        "critics_bar": Heads(2, d_s + d_a, args.hidden),
    }
    for name, net in nets.items():
        net.to(device)
        if name.endswith("_bar"):
            net.load_state_dict(nets[name.removesuffix("_bar")].state_dict())
            net.requires_grad_(False)

    def adam(*names, decay=0.0):
        parameters = [p for name in names for p in nets[name].parameters()]
        return torch.optim.Adam(parameters, lr=args.lr, weight_decay=decay, fused=torch.device(device).type != "meta")

    # DIFF 40: paper silent on penalties and clipping; released a penalty on the CVAE too; here as in Args
    nets["adam_labels"] = adam("V", "Q")
    nets["adam_command"] = adam("command", decay=args.command_decay)
    nets["adam_cvae"] = adam("cvae", decay=args.cvae_decay)
    nets["adam_critics"] = adam("critics")
    nets["adam_policy"] = adam("policy", decay=args.decay)
    return nets


def descend(optimizer, loss: Tensor, clip: float = math.inf) -> Tensor:
    """One step down. Gradients are computed for this optimiser's parameters alone."""
    parameters = optimizer.param_groups[0]["params"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    return norm


@torch.no_grad()
def move(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """slow := (1 - rate) slow + rate fast. Algorithm 1, line 10"""
    torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), rate)


# ------------------------------------------------------------------------------------- losses, one an equation


def expectile(u: Tensor, zeta: float) -> Tensor:
    # Definition [unlabelled, "expectile loss rho_zeta"]
    return torch.where(u < 0, 1 - zeta, zeta) * u.square()


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """The mean under P_mix of a batch that was drawn from it up to the weights omega(u)."""
    assert x.shape == weight.shape, (x.shape, weight.shape)  # [B] against [B, 1] would give a [B, B] without a word
    return (x * weight).sum() / weight.sum()


def value_target(r: Tensor, terminal: Tensor, v_next: Tensor, gamma: float) -> Tensor:
    """r, terminal [B], v_next [2, B] -> [B]"""
    assert r.shape == terminal.shape == v_next.shape[1:], (r.shape, terminal.shape, v_next.shape)
    # DIFF 19: paper no target network; released and here a slow copy, the smaller of two heads; failure ends the sum
    return r + gamma * torch.where(terminal, 0.0, v_next.amin(0))


def v_loss(y: Tensor, v: Tensor, zeta_v: float) -> Tensor:
    """y [B], v [2, B]"""
    assert y.shape == v.shape[1:], (y.shape, v.shape)
    # Eq. (23) [V_loss], both heads
    # DIFF 20: paper the same zeta as for the command; released and here 0.5, for V's own bootstrap inflates with more
    return expectile(y - v, zeta_v).mean(1).sum()


def q_loss(y: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """y, weight [B], q [2, B]"""
    # Eq. (24) [Q_loss], both heads
    return sum(weighted_mean(expectile(y - head, 0.5), weight) for head in q)


def advantage(q: Tensor, v: Tensor) -> Tensor:
    """q, v [2, B] -> [B]"""
    assert q.shape == v.shape, (q.shape, v.shape)
    # Eq. (39) [adv]
    # DIFF 78: paper one Q and one V; released and here two heads of each, and their mean
    return q.mean(0) - v.mean(0)


def standardise(A: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    # Eq. (40) [adv-std]
    return (A - mu) / (sigma + 1e-8)


def command_loss(A: Tensor, c: Tensor, zeta: float) -> Tensor:
    """A, c [B]"""
    # Eq. (41) [expectile-loss]
    # Definition [unlabelled, "sample weight omega-bar"]: in the draw of the batch, which is that of P_mix
    assert A.shape == c.shape, (A.shape, c.shape)
    return expectile(A - c, zeta).mean()


def cvae_loss(a: Tensor, a_hat: Tensor, mean: Tensor, std: Tensor, weight: float) -> Tensor:
    # KL(N(mean, std^2) || N(0, 1)), averaged over batch and latents as the squared error is over batch and actions
    kl = 0.5 * (mean.square() + std.square() - 1) - std.log()
    return F.mse_loss(a_hat, a) + weight * kl.mean()


def behaviour_log_density(cvae: CVAE, s: Tensor, a: Tensor, noise: Tensor, variance: float) -> Tensor:
    """log sum_m N(a; decoder(s, z_m), variance), z_m = mean + std noise_m: s [B, d_s], a [B, d_a], noise [M, B, 2 d_a]
    -> [B]"""
    # DIFF 27: paper "a similarity penalty"; released and here, as in OTDF, this density without prior, posterior, 1/M
    mean, std = cvae.encode(s, a)
    a_m = cvae.decode(s.expand(len(noise), *s.shape), mean + std * noise)  # [M, B, d_a]
    log_normal = -0.5 * ((a - a_m).square() / variance + math.log(2 * math.pi * variance))
    return log_normal.sum(-1).logsumexp(0)


def k_step_target(r: Tensor, done: Tensor, q_last: Tensor, gamma: float, mode: str) -> Tensor:
    """r, done [B, K], q_last = min_j Q_phi'_j(s_t, a_hat_t) [B] -> Q_hat [B, K]"""
    K = r.shape[1]
    # Eq. (26) [q_loss], Q_hat: rewards up to t - 1, then the bootstrap at t
    # DIFF 36: paper no ends; released bootstrap times (1 - done), so that the last step is worth 0, and a time limit
    # is an end; here, if the robot failed at t, the reward of t and nothing after
    last = torch.where(done[:, -1], r[:, -1], q_last) if mode == "exact" else q_last * ~done[:, -1]
    x = torch.cat([r[:, :-1], last[:, None]], 1)  # [B, K]
    i = torch.arange(K, device=r.device)
    discount = torch.tril(gamma ** (i[:, None] - i).clamp(min=0))  # [K, K], gamma^(l - i) for l >= i
    return x @ discount


def critic_weight(weight: Tensor, done: Tensor, mode: str) -> Tensor:
    """Which tokens have a target: all but the last, and the last too if the robot failed there. [B, K]"""
    last = weight[:, -1] * done[:, -1] if mode == "exact" else torch.zeros_like(weight[:, -1])
    return torch.cat([weight[:, :-1], last[:, None]], 1)


def critic_loss(q: Tensor, q_hat: Tensor, weight: Tensor) -> Tensor:
    """q [2, B, K], q_hat, weight [B, K]"""
    # Eq. (26) [q_loss], both critics
    return sum(weighted_mean((q_hat - head).square(), weight) for head in q)


def cql_penalty(q: Tensor, q_random: Tensor, weight: Tensor) -> Tensor:
    """Log-sum-exp over random actions [2, n, B, K] against Q of the data's [2, B, K], both heads."""
    # DIFF 52: paper none; released on 19 tasks; here the log-sum-exp of conservative Q-learning
    return sum(weighted_mean(head, weight) for head in q_random.logsumexp(1) - q)


def dt_loss(a: Tensor, pi: Tensor, weight: Tensor) -> Tensor:
    """a, pi [B, K, d_a], weight [B, K]"""
    # Eq. (27) [dt_loss]
    # DIFF 32: paper squared norm; released and here mean over the action's entries, to which alpha = 3.5 belongs
    assert a.shape == pi.shape, (a.shape, pi.shape)
    return weighted_mean((a - pi).square().mean(-1), weight)


def q_term(q: Tensor, weight: Tensor, head: str) -> Tensor:
    """q [2, B, K] of the policy's actions, weight [B, K]"""
    # Eq. (28) [pi_loss], third term
    # DIFF 30: paper no normaliser; released and here by mean |Q|: returns of hundreds would drown the other terms
    # DIFF 31: paper the smaller critic; released one at random, normalised by the other
    one = other = q.amin(0)
    if head == "random":
        flip = torch.randint(2, (1,), device=q.device)
        one, other = q.index_select(0, flip)[0], q.index_select(0, 1 - flip)[0]
    return -weighted_mean(one, weight) / weighted_mean(other.abs(), weight).detach()


def policy_loss(nets: dict, b: Batch, noise: Tensor, args: Args) -> tuple[Tensor, dict]:
    """L_pi and its terms. noise [M, B K or B, 2 d_a] for the latents of L_reg."""
    pi, s_next = nets["policy"](b.tokens, b.states, b.actions, b.steps, b.valid)  # [B, K, d_a]
    losses = {"dt": dt_loss(b.actions, pi, b.weight)}
    q = nets["critics"](b.states, pi)  # [2, B, K]
    losses |= {"q_term": q_term(q, b.weight, args.q_head), "q_policy": weighted_mean(q.amin(0), b.weight)}
    # DIFF 54: paper sd sqrt(0.1), silent on positions; released both by task; here variance 0.1, all positions
    at = slice(None) if args.reg_positions == "all" else slice(-1, None)
    s, a, weight = (x[:, at].flatten(0, 1) for x in (b.states, pi, b.reg_weight))
    log_density = behaviour_log_density(nets["cvae"], s, a, noise, args.variance)  # [B K] or [B]
    # Eq. (28) [pi_loss], second term: L_reg(pi, pi_tar) under P_mix
    losses["reg"] = -weighted_mean(log_density, weight)
    # Eq. (28) [pi_loss]
    total = losses["dt"] + args.eta_reg * losses["reg"] + args.alpha * losses["q_term"]
    if args.state_loss:  # DIFF 33: paper none; released predicts the next state at a_t, with weight 1
        losses["state"] = weighted_mean((b.next_states - s_next).square().mean(-1), b.valid.float())
        total = total + args.state_loss * losses["state"]
    return total, losses


# ------------------------------------------------------------------------------------- one update of each stage


def update_labels(nets: dict, data: Data, args: Args) -> dict:
    """V and Q of the tokens. Algorithm 1, line 5"""
    B_s = source_batch(args.label_batch, args.beta)
    rows, weight = sample_transitions(data, B_s, args.label_batch, args.label_weighting == "sample")
    s = data.seen[rows]  # [B, d_s]
    with torch.no_grad():
        y = value_target(data.rewards[rows], data.terminal[rows], nets["V_bar"](data.next_seen[rows]), args.gamma)
    v, q = nets["V"](s), nets["Q"](s, data.actions[rows])  # [2, B] each
    losses = {"losses/v": v_loss(y, v, args.zeta_v), "losses/q": q_loss(y, q, weight)}
    descend(nets["adam_labels"], losses["losses/v"] + losses["losses/q"])
    move(nets["V_bar"], nets["V"], args.tau)
    return losses | {"charts/v_mean": v.mean(), "charts/v_largest": v.abs().amax()}


@torch.no_grad()
def label(nets: dict, data: Data, args: Args, block: int = 100_000) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens A~ of all rows [N], mu_A and sigma_A. Algorithm 1, line 6"""
    A = []
    for rows in torch.arange(len(data.rewards), device=data.rewards.device).split(block):
        s = data.seen[rows]
        v = nets["V"](s)
        if args.adv_estimator == "qv":
            A.append(advantage(nets["Q"](s, data.actions[rows]), v))
        else:  # DIFF 21: paper Q - V; released this residual, with s' even after a failure
            A.append(data.rewards[rows] + args.gamma * nets["V"](data.next_seen[rows]).mean(0) - v.mean(0))
    A = torch.cat(A)
    fused = torch.cat([data.rows_s, data.rows_t]) if args.beta else data.rows_t
    some = A if args.adv_moments == "all" else A[fused]
    mu, sigma = some.mean(), some.std()
    return args.adv_scale * standardise(A, mu, sigma), mu, sigma  # DIFF 22: paper optional; released times 2


def update_command(nets: dict, data: Data, args: Args) -> dict:
    """C(s). Algorithm 1, line 6"""
    B_s = source_batch(args.label_batch, args.beta)
    # DIFF 23: paper pools both datasets, weighted by omega-bar; released half source, no weights; here P_mix
    rows, _ = sample_transitions(data, B_s, args.label_batch, True)
    c = nets["command"](data.states[rows])[0]  # [B]
    loss = command_loss(data.tokens[rows], c, args.zeta)
    descend(nets["adam_command"], loss)
    return {"losses/command": loss, "charts/command_mean": c.mean()}


def update_cvae(nets: dict, data: Data, args: Args) -> dict:
    """Behaviour of the target data."""
    # DIFF 28: paper silent; released the same loss; here with a smaller weight of the KL divergence
    rows = uniform(data.rows_t, args.cvae_batch)
    s, a = data.states[rows], data.actions[rows]
    mean, std = nets["cvae"].encode(s, a)
    a_hat = nets["cvae"].decode(s, mean + std * torch.randn_like(std))
    loss = cvae_loss(a, a_hat, mean, std, args.cvae_kl)
    descend(nets["adam_cvae"], loss)
    return {"losses/cvae": loss, "charts/reconstruction": F.mse_loss(a_hat, a)}


def learning_rate(args: Args, step: int) -> float:
    return args.lr * (0.5 * (1 + math.cos(math.pi * (step - 1) / args.updates)) if args.cosine else 1.0)


def update_policy(nets: dict, data: Data, args: Args, step: int, loss_of=policy_loss) -> dict:
    """Twin critics and policy. Algorithm 1, lines 8 to 11"""
    for name in ("adam_critics", "adam_policy"):
        nets[name].param_groups[0]["lr"] = learning_rate(args, step)
    B_s, mode = source_batch(args.target_batch, args.beta), args.terminal_mode
    b = sample_windows(data, B_s, args.target_batch, args.K, args.source_weighting)
    autocast = torch.autocast(b.states.device.type, torch.bfloat16) if args.bf16 else contextlib.nullcontext()
    with torch.no_grad():
        with autocast:
            a_hat, _ = nets["policy_bar"](b.tokens, b.states, b.actions, b.steps, b.valid, only_last=True)
        a_hat = a_hat[:, 0].float()  # [B, d_a]
        q_last = nets["critics_bar"](b.states[:, -1], a_hat).amin(0)  # [B]
        q_hat = k_step_target(b.rewards, b.done, q_last, args.gamma, mode)  # [B, K]
    q = nets["critics"](b.states, b.actions)  # [2, B, K]
    loss = critic_loss(q, q_hat, critic_weight(b.weight, b.done, mode))
    logs = {"losses/critic": loss, "charts/q_mean": weighted_mean(q.mean(0), b.weight)}
    logs |= {"charts/q_largest": q.abs().amax(), "charts/q_target_mean": weighted_mean(q_hat, b.weight)}
    if args.cql:
        random = torch.rand(args.cql_actions, *b.actions.shape, device=q.device) * 2 - 1  # [n, B, K, d_a]
        q_random = nets["critics"](b.states.expand(args.cql_actions, *b.states.shape), random)  # [2, n, B, K]
        logs["losses/cql"] = cql_penalty(q, q_random, b.weight)
        loss = loss + args.cql * logs["losses/cql"]
    logs["charts/grad_norm_critics"] = descend(nets["adam_critics"], loss, args.clip_grad)

    rows = b.valid.numel() if args.reg_positions == "all" else len(b.valid)
    noise = torch.randn(args.M, rows, 2 * b.actions.shape[-1], device=b.states.device)
    with autocast:
        loss, terms = loss_of(nets, b, noise, args)
    logs |= {"losses/policy": loss, "charts/q_policy": terms.pop("q_policy")}
    del terms["q_term"]  # in units of its own size: -1 wherever Q is positive
    logs |= {f"losses/{name}": term for name, term in terms.items()}
    logs["charts/grad_norm"] = descend(nets["adam_policy"], loss, args.clip_grad)
    # DIFF 34: paper uses pi_theta' and never updates it; released a slow average of every fifth update, after 1000 in
    # which it is the random initial network; here it is the policy itself when the average begins
    if step == args.ema_start and args.ema_copy:
        move(nets["policy_bar"], nets["policy"], 1.0)
    elif step > args.ema_start and step % args.ema_every == 0:
        move(nets["policy_bar"], nets["policy"], 1 - args.ema_decay)
    move(nets["critics_bar"], nets["critics"], args.tau)
    return logs


# --------------------------------------------------------------------------------------------- evaluation


@torch.inference_mode()
def evaluate(nets: dict, pre: dict, args: Args, seed: int, guided: bool = False) -> dict:
    """Episodes in lockstep in the target's simulator, one forward pass a step for all.

    guided: as the released code does, choose among candidate actions with the critics; the paper has no such thing.
    """
    # Algorithm 2 [alg:infer]
    nets["policy"].eval()
    device, K, n = nets["policy"].action.weight.device, args.K, args.eval_episodes
    batch = make_batch(args.env, args.shift, n, workers=1)  # other processes would wait for torch's threads
    obs, ended = batch.reset(seed), np.zeros(n, bool)
    S = torch.zeros(n, K, obs.shape[1], device=device)  # rolling buffers, zeros on the left: states,
    A = torch.zeros(n, K, batch.act_dim, device=device)  # actions (the last is not yet known, and not looked at),
    C, T = torch.zeros(n, K, device=device), torch.zeros(n, K, dtype=torch.long, device=device)  # commands, steps
    mask = torch.zeros(n, K, dtype=torch.bool, device=device)
    to_go = torch.full((n,), args.return_target / 1000, device=device)
    rng = torch.Generator(device).manual_seed(seed)  # its own, so that evaluating changes nothing in training
    returns, lengths, commands, first = np.zeros(n), np.zeros(n, int), [], []
    while not ended.all():
        s = torch.as_tensor(normalise(obs, pre["mu"], pre["sd"]), device=device)  # [n, d_s]
        c = nets["command"](s)[0] if args.token == "advantage" else to_go  # [n], standardised as the tokens are
        t = torch.as_tensor(np.minimum(lengths, TIME_LIMIT - 1), device=device)
        S, C, T = (torch.cat([x[:, 1:], new[:, None]], 1) for x, new in ((S, s), (C, c), (T, t)))
        mask = torch.cat([mask[:, 1:], mask.new_ones(n, 1)], 1)
        live = torch.as_tensor(np.flatnonzero(~ended), device=device)  # what has ended costs nothing
        history = [x[live] for x in (C, S, A, T, mask)]
        a = torch.zeros_like(A[:, 0])  # [n, d_a]
        if guided:
            a[live] = guided_action(nets, *history, args.candidates, args.guided_noise, rng)
        else:
            a[live] = nets["policy"](*history, only_last=True)[0][:, 0]
        A = torch.cat([A[:, 1:-1], a[:, None], torch.zeros_like(a)[:, None]], 1)
        action = a.cpu().numpy()
        obs, reward, terminated, truncated = batch.step(action)
        to_go = to_go - torch.as_tensor(reward, dtype=torch.float32, device=device) / 1000
        returns += reward
        lengths += ~ended
        commands.append(c.cpu().numpy()[~ended])
        if not ended[0]:
            first.append(action[0])
        ended = terminated | truncated
    batch.close()
    nets["policy"].train()
    score = float(normalized_score(args.env, args.shift, returns.mean()))
    command = float(np.concatenate(commands).mean())
    return dict(returns=returns.tolist(), lengths=lengths.tolist(), score=score, command=command, actions=first)


def guided_action(nets, C, S, A, T, mask, candidates, scale, rng) -> Tensor:
    """Half of the candidates with the first command halved, noise on the last command of all but two, then one drawn by
    the softmax of the target critics. Buffers [n, K, ...] -> [n, d_a]"""
    # DIFF 45: paper "no critics at test time"; released this; here greedy is reported, and this logged beside it
    n, half = len(C), candidates // 2
    C, S, A, T, mask = (x.repeat_interleave(candidates, 0) for x in (C, S, A, T, mask))
    C = C.unflatten(0, (n, candidates)).clone()
    begin = (~mask).sum(1).view(n, candidates)[:, half:, None]  # where the first command stands
    C[:, half:] = C[:, half:].scatter(2, begin, C[:, half:].gather(2, begin) / 2)
    noise = scale * torch.randn(n, candidates, generator=rng, device=C.device)
    noise[:, [0, half]] = 0
    C[:, :, -1] += noise
    a = nets["policy"](C.flatten(0, 1), S, A, T, mask, only_last=True)[0][:, 0]  # [n candidates, d_a]
    q = nets["critics_bar"](S[:, -1], a).amin(0).view(n, candidates)
    chosen = torch.multinomial(q.softmax(1), 1, generator=rng)[:, 0]
    return a.view(n, candidates, -1)[torch.arange(n, device=q.device), chosen]


def junction_pool(data: Data, K: int, size: int = 1024, candidates: int = 256) -> dict:
    """Rows [size, K] of windows that change domain in the middle, half of them from source to target, half back, and
    of as many that do not. Always the same ones: they are a validation set."""
    rng, h = torch.Generator().manual_seed(0), math.ceil(K / 2)
    S, T = (x.cpu()[data.left.cpu()[x.cpu()] > K] for x in (data.starts_s, data.starts_t))
    states, pool = data.states.cpu(), {"stitched": [], "unstitched": []}

    def pick(rows, n):
        return rows[torch.randint(len(rows), n, generator=rng)]

    for one, other in ((S, T), (T, S)) if len(S) and len(T) else ():
        i, j = pick(one, (size // 2,)), pick(other, (size // 2, candidates))
        # the second half begins with that state, of 256, which is nearest to what would have come next
        nearest = (states[j] - states[i + h][:, None]).square().sum(-1).argmin(1)
        j = j[torch.arange(len(j)), nearest]
        steps = torch.arange(K)
        pool["stitched"].append(torch.where(steps < h, i[:, None] + steps, j[:, None] + steps - h))
        pool["unstitched"].append(i[:, None] + steps)
    if not pool["stitched"]:
        raise UserError(f"no episode is longer than K = {K}, so nothing can be stitched; lower --K")
    return {name: torch.cat(rows).to(data.states.device) for name, rows in pool.items()}


def reference_pool(states: Tensor, left: Tensor, K: int, folder: Path | None, source: Dataset, target: Dataset) -> dict:
    """The same for a baseline with these states [N, d_s] and steps left [N]: windows and critics are those of the
    finished run of this script in `folder`. Each pool has rows [P, K] and, unless folder is None, Q, s and TD."""
    device, rows = states.device, torch.arange(len(left), device=states.device)
    view = SimpleNamespace(states=states, left=left, starts_s=rows[: len(source)], starts_t=rows[len(source) :])
    if folder is None:
        return {name: {"rows": rows} for name, rows in junction_pool(view, K).items()}
    try:
        result = runs.read_json(folder / "result.json")
        theirs = result["args"]
        gate = folder.resolve().parents[2] / "preprocess" / Path(result["preprocess"]).name
        saved = torch.load(folder / "ckpt.pt", map_location=device, weights_only=True)["parts"]
        with np.load(gate, allow_pickle=False) as file:
            keep, mu, sd = file["gate"], file["mu"], file["sd"]
        same = saved["record"]["sha256"] == [source.sha256, target.sha256] and len(keep) == len(source)
        same &= theirs["state_norm"] == "target" and theirs["label_states"] == "normalised"
        if not same:
            raise ValueError("that run had other data, or critics on states of another form")
        d_s, d_a = source.observations.shape[1], source.actions.shape[1]
        V, Q = Heads(2, d_s, theirs["hidden"]).to(device), Heads(2, d_s + d_a, theirs["hidden"]).to(device)
        V.load_state_dict(saved["V"])
        Q.load_state_dict(saved["Q"])
    except Exception as error:  # torch and zipfile have many for a file that is damaged or not ours
        reason = str(error).split(";")[0]
        raise UserError(f"--reference {folder}: not the folder of a finished run on these data: {reason}") from None

    def both(key):
        return np.concatenate([getattr(source, key), getattr(target, key)])

    view.states = torch.as_tensor(normalise(both("observations"), mu, sd), device=device)
    view.starts_s = torch.as_tensor(np.flatnonzero(keep), device=device)
    rewards, after, pool = torch.as_tensor(both("rewards"), device=device), both("next_observations"), {}
    for name, rows in junction_pool(view, K).items():
        s, t = view.states[rows], math.ceil(K / 2)  # [P, K, d_s], the first step after the junction
        end = torch.as_tensor(normalise(after[rows[:, -1].cpu()], mu, sd), device=device)
        with torch.no_grad():
            v = V(torch.cat([s, end[:, None]], 1)).mean(0)  # [P, K + 1]
        td = (rewards[rows] + theirs["gamma"] * v[:, 1:] - v[:, :-1]).abs()  # [P, K]
        pool[name] = {"rows": rows, "Q": Q, "s": s, "TD": td[:, max(0, t - 2) : t + 3].mean().item()}
    return pool


@torch.no_grad()
def junction_metrics(nets: dict, data: Data, rows: Tensor, args: Args) -> dict:
    """J_a, J_Q and TD at the middle of windows whose rows [P, K] are given: jumps of the policy's action, of its value,
    and the temporal-difference residual around it."""
    t = math.ceil(rows.shape[1] / 2)  # t* = t: the first step after the junction
    nets["policy"].eval()
    # Definition [unlabelled, "junction metrics J_a, J_Q, TD"]
    b = gather(data, rows, torch.ones_like(rows, dtype=torch.bool))
    pi = nets["policy"](b.tokens, b.states, b.actions, b.steps, b.valid)[0]  # [P, K, d_a]
    nets["policy"].train()
    s = data.seen[rows]  # [P, K, d_s]
    v = nets["V"](torch.cat([s, data.next_seen[rows[:, -1:]]], 1)).mean(0)  # [P, K + 1]
    td = b.rewards + args.gamma * v[:, 1:] - v[:, :-1]  # [P, K], at t* - 1 with s_t* as next state
    q, own = nets["Q"](s, pi).mean(0), nets["critics"](b.states, pi).amin(0)  # [P, K] each
    values = {"J_a": (pi[:, t] - pi[:, t - 1]).norm(dim=-1), "J_Q": (q[:, t] - q[:, t - 1]).abs()}
    values |= {"J_Q_own": (own[:, t] - own[:, t - 1]).abs(), "TD": td[:, max(0, t - 2) : t + 3].abs()}
    return {name: float(x.mean()) for name, x in values.items()}


def video(path: Path, args: Args, seed: int, actions: list) -> None:
    """The first episode of an evaluation again, with a camera."""
    import imageio

    env = make(args.env, args.shift, seed=seed, render_mode="rgb_array", width=320, height=320)
    env.reset(seed=seed)
    frames = []
    for i, action in enumerate(actions):
        if i % 3 == 0:  # a GIF's clock has hundredths of a second
            frames.append(env.render())
        env.step(action)
    env.close()
    imageio.mimsave(path, frames, duration=3000 * env.unwrapped.dt, loop=0)
    print(f"video of {len(actions)} steps: {path}")


# ----------------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    """Algorithm 1 [alg:train], all of it, then the result."""
    check(args)
    pre_args = {f.name: getattr(args, f.name) for f in dataclasses.fields(taf_preprocess.Args)}
    pre_args |= {"out": args.out / "preprocess"} | ({} if args.beta else {"filter": "none"})
    pre_args = taf_preprocess.resolve(taf_preprocess.Args(**pre_args))
    args, device = dataclasses.replace(args, device=pre_args.device), torch.device(pre_args.device)
    source, target = load_task(args, one_is_enough=True)
    plain = dataclasses.replace(defaults(args), preset="paper")
    with runs.open_run("taf_dt", args, plain, IGNORE, source=source, target=target) as run:
        if run.result:
            return run.result
        runs.seed_everything(args.seed, args.torch_deterministic)
        # Algorithm 1, lines 2 to 4
        pre = taf_preprocess.preprocess(pre_args, source, target)
        data = fuse(source, target, pre, args, device)
        nets = build(args, data.states.shape[1], data.actions.shape[1], device)
        run.begin(nets, diagnostics=[])
        if args.eval_only:
            e = evaluate(nets, pre, args, eval_seed(args))
            if args.capture_video:
                video(run.folder / "video.gif", args, eval_seed(args), e["actions"])
            return run.only_evaluated(e)
        report = pre["meta"]["report"]
        print(f"{report['retained']} source transitions retained in {report['fragments']} kept fragments")
        if device.type == "cpu" and not args.quick and not run.record["done"]:
            hours = estimate(nets, data, args) / 3600
            print(f"on this CPU the whole run takes about {hours:.1f} hours; --quick takes minutes", file=sys.stderr)
        if args.track:
            track(args, run.folder)
        run.limit, run.remedy = 10 * float(data.rewards.abs().amax()) / (1 - args.gamma), "--lr or --alpha"
        rate = {"charts/learning_rate": args.lr}

        if args.token == "advantage" or args.diagnostics:  # which measure with V and Q, whatever the tokens are
            for step in run.steps("labels", args.label_updates):
                run.log(step, update_labels(nets, data, args) | rate)
        if args.token == "advantage":
            tokens, mu, sigma = label(nets, data, args)
            run.record |= {"mu_A": mu.item(), "sigma_A": sigma.item()}
            data = data._replace(tokens=tokens)
            spread = np.percentile(tokens[data.rows_t].cpu(), (5, 50, 95))  # to compare the commands with
            spread = dict(zip(("charts/token_5", "charts/token_50", "charts/token_95"), spread, strict=True))
            for step in run.steps("command", args.command_updates):
                run.log(step, update_command(nets, data, args) | rate | spread)
        for step in run.steps("cvae", args.cvae_updates):
            run.log(step, update_cvae(nets, data, args) | rate)

        loss_of = torch.compile(policy_loss) if args.compile else policy_loss
        pool = junction_pool(data, args.K) if args.diagnostics else {}
        for step in run.steps("policy", args.updates):
            logs = update_policy(nets, data, args, step, loss_of)
            run.log(step, logs | {"charts/learning_rate": learning_rate(args, step)})
            if pool and step % max(1, args.updates // 20) == 0:
                run.diagnosed(step, {name: junction_metrics(nets, data, rows, args) for name, rows in pool.items()})
            if run.evaluation_due(step):  # DIFF 46: and so at the "last three checkpoints"
                e = evaluate(nets, pre, args, eval_seed(args)) | {"guided_score": None}
                if args.guided == "always" or (args.guided == "last" and step in run.last):
                    e["guided_score"] = evaluate(nets, pre, args, eval_seed(args), guided=True)["score"]
                del e["actions"]
                run.evaluated(step, e, command_mean=e["command"], guided_score=e["guided_score"])
        result = run.finish(pre)
        if args.capture_video:  # when all else is safe: without a screen it may fail
            actions = evaluate(nets, pre, args, eval_seed(args))["actions"]
            video(run.folder / "video.gif", args, eval_seed(args), actions)
        return result


def eval_seed(args: Args) -> int:
    return 10_000 * args.seed  # evaluation episodes of one seed are the same at every evaluation


def estimate(nets: dict, data: Data, args: Args) -> float:
    """Seconds of all stages, from an update of each on copies."""
    todo = {update_cvae: (args.cvae_updates, ()), update_policy: (args.updates, (1,))}
    if args.token == "advantage":
        todo |= {update_labels: (args.label_updates, ()), update_command: (args.command_updates, ())}
    total = 0.0
    with torch.random.fork_rng():
        twin = copy.deepcopy(nets)
        for update, (count, more) in todo.items():
            update(twin, data, args, *more)
            start = time.perf_counter()
            update(twin, data, args, *more)
            total += count * (time.perf_counter() - start)
    return total


def import_wandb():
    try:
        import wandb
    except ImportError:
        raise UserError("--track needs a further package: pip install wandb") from None
    return wandb


def track(args: Args, folder: Path) -> None:
    config = dataclasses.asdict(args)
    import_wandb().init(project="taf-dt", name=str(folder), config=config, dir=str(folder), sync_tensorboard=True)


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
