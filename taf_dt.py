"""TAF-DT: a Decision Transformer for a robot with little data, with the help of another's data.

    python taf_dt.py --quick --data embedded                   two minutes on a laptop
    python taf_dt.py --env hopper --shift morph --alpha 3.5    one task, full size
    bash run_all.sh                                            all tables

Paper: "Target-Aligned Fusion for Decision-Sequence Learning under Dynamics Shift" (taf_tpami.tex).
`# Eq. (n) [label]` marks the statement that implements an equation, and `# DIFF n` a row of
docs/differences.md, where this file, the paper's text and the authors' code ("released: x", see
baselines/taf_dt_released.py) differ. New here? Start at `train`, at the end.

Algorithm 1 [alg:train]                                                      here
     1  initialise all networks                                              build
     2  gate source fragments by MMD                                         taf_preprocess.py
     3  weight the transitions of what is kept by OT                         taf_preprocess.py
     4  P_mix: target data fused with gated, weighted source data            fuse, sample_mix
     5  value V and action value Q under P_mix                               update_values
     6  advantage tokens A = Q - V; C(s) predicts a near-best one for s      relabel, update_command
        (a model of the target's behaviour: dynashift/behaviour.py)          update_behaviour
     7  for each gradient step:                                              train_policy
     8      sample windows of K steps from P_mix                             sample_windows
     9      fit the twin critics to a K-step target                          update_critics
    10      move their slow copies (the policy's: update_target_policy)      update_critics
    11      update the Transformer: imitate the data, stay close to the      update_policy
            target's behaviour, and prefer what the critics prefer

Algorithm 2 [alg:infer]: act with C(s_t) in place of the token A_t           Agent

    paper             here                   paper        here             shapes
    pi_theta          policy                 omega(u)     weight           B  windows in a batch
    pi_theta'         policy_bar             C_omega      command          K  steps in a window
    Q_phi, Q_phi'     critics, critics_bar   A~_t         tokens           N  transitions
    V_varphi, Q_psi   V, Q                   G(I)         source_rows      M  latents per state
    eta_exp           tau                    pi_tar       cvae

V and Q only label the data with advantages; the twin critics guide the policy. A token is what the
policy is asked for: an advantage, or a return with --token rtg. A fragment (of the gate), a window
(in training) and a context (in acting) are all K consecutive steps of an episode.
"""

import copy
import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dynashift import quick_help  # noqa: F401  first: --help then loads nothing slow

# isort: split
import numpy as np
import torch
from torch import Tensor, nn

import taf_preprocess
from dynashift import export, runs, stages
from dynashift.any_env import time_limit
from dynashift.behaviour import CVAE, behaviour_log_density, update_behaviour
from dynashift.datasets import Dataset, TaskArgs, load_task
from dynashift.errors import one_line_errors
from dynashift.fast_attention import attention
from dynashift.fast_dropout import dropout
from dynashift.fast_mish import mish
from dynashift.faster import Adam, low_precision, prepare, settle_precision
from dynashift.offline import judge_of
from dynashift.optimise import gradient_step, polyak_update
from dynashift.recipe import RECOMMENDED, SHORT_RUNS
from dynashift.runs import Expectile, Flat, NotNegative, Positive, RunArgs, Share
from dynashift.stages import ToolArgs, run_stage, set_learning_rate, token_range
from dynashift.transitions import join
from dynashift.windows import gather, uniform, window_rows
from taf_preprocess import GateArgs, normalise

# ------------------------------------------------------------------------------------ arguments


@dataclass(frozen=True)
class Args:
    # Defaults are those of the paper's Table tab:hyperparameters.
    # DIFF 20, 24, 25, 26, 28, 39, 47, 54, 55: where that table is silent or contradicts itself.

    task: Flat[TaskArgs] = TaskArgs()
    run: Flat[RunArgs] = RunArgs()
    gate: Flat[GateArgs] = GateArgs()
    tools: Flat[ToolArgs] = ToolArgs()
    # See dynashift/recipe.py; by default the paper's, and with --quick most of the recommended
    preset: Literal["paper", "recommended"] | None = None

    # --- the fused distribution and its samples ---
    beta: Share = 1 / 3  # source share beta of P_mix, Eq. (22); 0 trains on the target data alone
    target_batch: Positive[int] = 128  # target windows per batch; beta gives the source's number

    # --- advantage tokens and command network ---
    token: Literal["advantage", "rtg"] = "advantage"  # of Eq. (25); rtg: Table tab:adv_ablation
    return_target: float | None = None  # return asked for with --token rtg; default: the task's
    gamma: Share = 0.99  # discount gamma
    tau: Share = 0.005  # rate eta_exp of the slow copies of V and critics; larger in shorter runs
    lr: Positive[float] = 3e-4  # learning rate of all networks
    hidden: Positive[int] = 256  # width of the three hidden layers of V, Q, C and the critics
    zeta_v: Expectile = 0.5  # expectile zeta of V, Eq. (23)
    label_updates: NotNegative[int] = 100_000  # updates of V and Q, Eqs. (23) and (24)
    label_batch: Positive[int] = 128  # target transitions per batch for V, Q and C
    zeta: Expectile = 0.98  # expectile zeta of C, Eq. (41); Table tab:expectile_ablation
    command_updates: NotNegative[int] = 50_000  # updates of the command network
    command_decay: NotNegative[float] = 5e-4  # L2 penalty on the command network

    # --- behaviour model and regulariser ---
    eta_reg: NotNegative[float] | None = None  # weight of L_reg, Eq. (28); default: the task's
    M: Positive[int] = 10  # latents M per state in L_reg
    variance: Positive[float] = 0.1  # variance of the Gaussian around each decoded action in L_reg
    reg_tokens: Literal["mix", "target", "all"] = "mix"  # L_reg's steps: P_mix, target, all alike
    reg_latents: Literal["prior", "posterior"] = "prior"  # where L_reg's latents come from
    cvae_updates: NotNegative[int] = 100_000  # updates of the behaviour model
    cvae_batch: Positive[int] = 256  # target transitions per batch for the behaviour model
    cvae_hidden: Positive[int] = 750  # width of the behaviour model's layers
    cvae_kl: NotNegative[float] = 0.1  # weight of the behaviour model's KL divergence
    cvae_decay: NotNegative[float] = 0.0  # L2 penalty on the behaviour model

    # --- Transformer policy and twin critics ---
    layers: Positive[int] = 4  # Transformer layers
    heads: Positive[int] = 4  # attention heads
    width: Positive[int] = 256  # embedding dimension
    dropout: Share = 0.1  # dropout on embeddings, attention and residual branches
    time_embedding: bool = True  # tell the Transformer the step within the episode
    updates: Positive[int] = 100_000  # updates of policy and critics
    decay: NotNegative[float] = 1e-4  # L2 penalty on the policy
    cosine: bool = False  # let the learning rate of each stage fall to 0 along half a cosine
    clip_grad: Positive[float] = 5.0  # largest norm of the gradients of policy and critics
    alpha: NotNegative[float] = 3.5  # critic guidance alpha, Eq. (28); 0: off, Table tab:q_ablation
    ema_decay: Share = 0.995  # what the policy's slow copy keeps of itself; less in shorter runs
    ema_every: Positive[int] = 5  # move the policy's slow copy every N updates
    ema_start: NotNegative[int] = 1_000  # update at which it begins to follow; less in shorter runs


QUICK = {  # every stage, in less than two minutes on two cores
    "source_size": 100_000, "target_batch": 64, "M": 4,
    "layers": 2, "heads": 2, "width": 64, "hidden": 128, "cvae_hidden": 128,
    "label_updates": 2_000, "command_updates": 1_000, "cvae_updates": 6_000, "updates": 1_000,
    "eval_every": 1_000, "save_every": 500, "log_every": 100,
    "lr": 2e-3,  # at 1e-3, so few updates score 50 instead of 62 (hopper morph, --data embedded)
}  # fmt: skip


def defaults(args: Args) -> dict:
    """Values that the task, --quick and --preset have where the command line says nothing."""
    values = stages.task_defaults(args.task) | (QUICK if args.run.quick else {})
    if args.preset == "recommended":
        values.update(RECOMMENDED)
    elif args.preset is None and args.run.quick:
        values.update(SHORT_RUNS)
    return runs.short_run_rates(args, values, Args.updates)


def check(args: Args) -> None:
    """Refuse values that cannot work, before anything is loaded."""
    runs.check_args(args)
    taf_preprocess.check(args.gate)
    export.check(args.tools.export)
    stages.check(args, source_batch(min(args.target_batch, args.label_batch), args.beta))


# ----------------------------------------------------------- the fused distribution, Eq. (22)


class Data(NamedTuple):
    """The N_s source transitions, then the N_t target transitions, episode after episode."""

    states: Tensor  # [N, d_s] normalised
    actions: Tensor  # [N, d_a]
    rewards: Tensor  # [N]
    next_states: Tensor  # [N, d_s] normalised
    terminal: Tensor  # [N] bool: the robot failed here
    steps: Tensor  # [N] int: step within the episode
    left: Tensor  # [N] int: steps to the episode's end, this one included
    weight: Tensor  # [N] omega(u) in the loss; the source's has mean 1 over its windows' steps
    reg_weight: Tensor  # [N] the same in L_reg; see --reg-tokens
    tokens: Tensor  # [N] return-to-go in thousands, or standardised advantage A~
    source_rows: Tensor  # [n] int: the retained support G(I)
    source_cdf: Tensor  # [n] cumulative sums of its probabilities w_i
    source_starts: Tensor  # [m] int: rows where a kept fragment begins
    target_rows: Tensor  # [N_t] int


def source_batch(target_batch: int, beta: float) -> int:
    # DIFF 17: the paper leaves beta open; its batches of 64 and 128 windows imply 1/3.
    return round(target_batch * beta / (1 - beta))


def fuse(source: Dataset, target: Dataset, pre: dict, args: Args, device) -> Data:
    """Both datasets with the gate and weights of `taf_preprocess.preprocess`, on the device.

    pre: gate, retained [N_s] bool; omega, w [N_s]; mu, sd, mu_source, sd_source [d_s].
    """
    columns = join(source, target, time_limit(args.task))  # also rewards, steps, left, tokens (RTG)
    for name, column in (("states", "observations"), ("next_states", "next_observations")):
        s_source = normalise(getattr(source, column), pre["mu_source"], pre["sd_source"])
        s_target = normalise(getattr(target, column), pre["mu"], pre["sd"])
        columns[name] = np.concatenate([s_source, s_target])  # [N, d_s]
    # A source window is a kept fragment, so each of its steps lies in G(I) and has its own omega.
    # DIFF 53: target windows also begin in an episode's last K - 1 steps; released, Hopper: none.
    columns["source_starts"] = np.flatnonzero(pre["gate"])  # [m]
    columns["source_rows"] = np.flatnonzero(pre["retained"])  # [n], G(I)
    columns["target_rows"] = len(source) + np.arange(len(target))  # [N_t]
    w = pre["w"][columns["source_rows"]].astype(np.float64)  # [n]
    columns["source_cdf"] = np.cumsum(w) / w.sum()
    # Definition [unlabelled, "sample weight omega(u)"]: 1 on the target, I_i exp(eta_w d_i^w) on
    # the source, divided by its mean over the steps drawn, so that beta is the source's share.
    # DIFF 16, 18: transitions are drawn by w; windows uniformly, with weights in the loss, because
    # their steps differ in weight. Unlike in the released code, none is dropped for it.
    # DIFF 38: rewards stay as they are; released: source rewards shrink with the scores.
    omega = np.nan_to_num(pre["omega"].astype(np.float64))  # [N_s]
    times = taf_preprocess.coverage(pre["gate"], np.minimum(args.gate.K, source.left))  # [N_s]
    weight = omega * times.sum() / (times @ omega)  # times: source windows that contain a step
    # DIFF 76: L_reg is an expectation under P_mix like every other loss; released: all alike.
    reg_weight = {"mix": weight, "target": 0 * omega, "all": np.ones(len(source))}[args.reg_tokens]
    for name, of_source in (("weight", weight), ("reg_weight", reg_weight)):
        columns[name] = np.concatenate([of_source, np.ones(len(target))]).astype(np.float32)  # [N]
    return Data(**{name: torch.as_tensor(x, device=device) for name, x in columns.items()})


def sample_mix(source: Tensor, cdf: Tensor | None, target: Tensor, B_s: int, B_t: int) -> Tensor:
    """Rows [B_s + B_t] of a batch: source rows by their cdf (None: uniformly), then target rows."""
    # Eq. (22) [pmix-def]: P_mix = (1 - beta) P_T + beta P_S. The mixture is stratified: every
    # batch has exactly its share beta = B_s / (B_s + B_t) of source data.
    if cdf is None:
        from_source = uniform(source, B_s) if B_s else source[:0]
    else:
        u = torch.rand(B_s, dtype=torch.float64, device=cdf.device)
        drawn = torch.searchsorted(cdf, u, right=True).clamp_(max=len(cdf) - 1)
        from_source = source[drawn]
    return torch.cat([from_source, uniform(target, B_t)])


def sample_transitions(data: Data, args: Args) -> Tensor:
    """Rows [B] for V, Q and C: the source's with probability w_i."""
    B_s = source_batch(args.label_batch, args.beta)
    return sample_mix(data.source_rows, data.source_cdf, data.target_rows, B_s, args.label_batch)


class Batch(NamedTuple):
    """B windows of K steps. The first five fields are what the policy sees."""

    tokens: Tensor  # [B, K]
    states: Tensor  # [B, K, d_s]
    actions: Tensor  # [B, K, d_a]
    steps: Tensor  # [B, K] int
    valid: Tensor  # [B, K] bool, false on padding
    rewards: Tensor | None = None  # [B, K]
    terminal: Tensor | None = None  # [B, K] bool
    weight: Tensor | None = None  # [B, K] omega(u), 0 on padding
    reg_weight: Tensor | None = None  # [B, K]


def sample_windows(data: Data, args: Args) -> Batch:
    """Algorithm 1, line 8: windows that begin at rows of P_mix."""
    # DIFF 43: a window lies within one episode. The paper speaks of stitched windows and does
    # not say how they are built.
    B_s = source_batch(args.target_batch, args.beta)
    starts = sample_mix(data.source_starts, None, data.target_rows, B_s, args.target_batch)
    return windows(data, starts, args.gate.K)


def windows(data: Data, starts: Tensor, K: int) -> Batch:
    """K steps from each start [B]. One cut short by the episode's end moves right, behind zeros."""
    return Batch(**gather(data, Batch._fields, *window_rows(data.left, starts, K)))  # [B, K, ...]


# ------------------------------------------------------------------------------------- networks


class TwinMLP(nn.Module):
    """Two networks (d_in) -> hidden x 3 -> 1 of one shape, computed in one product per layer.

    V, Q and the twin critics are pairs; the command network is single. (No attention heads here.)
    """

    # DIFF 37: Mish, as in the released code; the paper names no activation for these.
    def __init__(self, d_in: int, hidden: int, heads: int = 2):
        super().__init__()
        shapes = list(itertools.pairwise([d_in, hidden, hidden, hidden, 1]))
        self.W = nn.ParameterList(torch.empty(heads, m, n) for m, n in shapes)
        self.b = nn.ParameterList(torch.empty(heads, 1, n) for _, n in shapes)
        for i, (m, _) in enumerate(shapes):
            for parameter in (self.W[i], self.b[i]):
                nn.init.uniform_(parameter, -1 / math.sqrt(m), 1 / math.sqrt(m))  # as nn.Linear

    def forward(self, *inputs: Tensor) -> Tensor:
        x = torch.cat(inputs, -1)  # [..., d_in]
        h = x.reshape(1, -1, x.shape[-1]).expand(len(self.W[0]), -1, -1)  # [heads, B, d_in]
        for i, (W, b) in enumerate(zip(self.W, self.b, strict=True)):
            if i > 0:
                h = mish(h)
            h = torch.baddbmm(b, h, W)
        return h.reshape(len(h), *x.shape[:-1])  # [heads, ...]


class Block(nn.Module):
    """One Transformer layer: attention and an MLP, each on normalised input, each a residual."""

    def __init__(self, width: int, heads: int, p: float):
        super().__init__()
        self.heads, self.p = heads, p
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor, read: slice) -> Tensor:
        """x [B, T, W], mask [B, 1, T, T] -> [B, T', W], only at positions that `read` selects."""

        def split(u):  # [B, T, W] -> [B, heads, T, W / heads]
            return u.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        h = self.norm1(x)
        q = self.query(h[:, read])  # [B, T', W]
        k, v = self.key_value(h).chunk(2, -1)  # [B, T, W] each: all positions are looked at
        p = self.p if self.training else 0.0
        h = attention(split(q), split(k), split(v), mask[:, :, read], p)
        x = x[:, read] + dropout(self.out(h.transpose(1, 2).flatten(2)), p)
        return x + dropout(self.down(self.up(self.norm2(x)).relu_()), p)


class Policy(nn.Module):
    """pi_theta: a causal Transformer over the sequence of (A_t, s_t, a_t) for K steps."""

    def __init__(self, d_s: int, d_a: int, args: Args):
        super().__init__()
        W = args.width
        self.p = args.dropout
        self.embed_c = nn.Linear(1, W)
        self.embed_s = nn.Linear(d_s, W)
        self.embed_a = nn.Linear(d_a, W)
        # DIFF 42: a learned embedding of the step, as in the released code, unless switched off.
        self.embed_t = nn.Embedding(time_limit(args.task), W) if args.time_embedding else None
        self.norm_in = nn.LayerNorm(W)
        self.norm_out = nn.LayerNorm(W)
        self.blocks = nn.ModuleList(Block(W, args.heads, self.p) for _ in range(args.layers))
        self.action = nn.Linear(W, d_a)
        # DIFF 73: small initial weights everywhere; released: in the blocks alone.
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02 if parameter.ndim > 1 else 0.0)

    def forward(self, b: Batch, only_last: bool = False) -> Tensor:
        """Actions [B, K, d_a] for the first five fields of b, or [B, 1, d_a] at the last step."""
        # Actions are read at the positions of s_t, so the last layer computes nothing else.
        read = slice(-1, None) if only_last else slice(1, None, 3)
        return self.action(self.hidden(b, read)).tanh()

    def hidden(self, b: Batch, read: slice) -> Tensor:
        """The Transformer's output [B, T', W] at the positions that `read` selects."""
        t = 0.0 if self.embed_t is None else self.embed_t(b.steps)  # [B, K, W]
        c = self.embed_c(b.tokens[..., None]) + t  # [B, K, W], as s and a
        s = self.embed_s(b.states) + t
        a = self.embed_a(b.actions) + t
        # Eq. (25) [adv-token-seq]: one sequence (A_1, s_1, a_1, A_2, s_2, a_2, ...)
        # DIFF 41: A_t comes before a_t, as in the released code. In the paper's order (s, a, A)
        # it would come too late to command the action.
        x = torch.stack([c, s, a], 2).flatten(1, 2)  # [B, 3K, W]
        x = x[:, :-1]  # a_K comes after everything that is read
        T = x.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        keys = b.valid.repeat_interleave(3, 1)[:, None, None, :-1]  # [B, 1, 1, T]
        # Only padding attends to padding, and only to itself: a row without any entry gives 0/0.
        seen = (causal & keys) | torch.eye(T, dtype=torch.bool, device=x.device)  # [B, 1, T, T]
        mask = torch.where(seen, 0.0, -math.inf)  # added to the scores of attention
        x = dropout(self.norm_in(x), self.p if self.training else 0.0)
        for block in self.blocks[:-1]:
            x = block(x, mask, read=slice(None))
        return self.norm_out(self.blocks[-1](x, mask, read))


def build(args: Args, d_s: int, d_a: int, device, policy_class=Policy) -> dict:
    """Algorithm 1, line 1: every network and optimiser, which is all that a checkpoint holds."""
    # Algorithm 1 [alg:train]
    nets = {
        "V": TwinMLP(d_s, args.hidden),
        "Q": TwinMLP(d_s + d_a, args.hidden),
        "command": TwinMLP(d_s, args.hidden, heads=1),
        "cvae": CVAE(d_s, d_a, args.cvae_hidden),
        "policy": policy_class(d_s, d_a, args),
        "critics": TwinMLP(d_s + d_a, args.hidden),
    }
    for name in ("V", "policy", "critics"):
        nets[f"{name}_bar"] = copy.deepcopy(nets[name]).requires_grad_(False).eval()
    for net in nets.values():
        net.to(device)

    def adam(*names, decay=0.0):
        parameters = [p for name in names for p in nets[name].parameters()]
        fused = torch.device(device).type != "meta"
        return Adam(parameters, lr=args.lr, weight_decay=decay, fused=fused)

    # DIFF 40: L2 penalties and clipping are the released code's, except that the CVAE has none.
    nets["adam_values"] = adam("V", "Q")
    nets["adam_command"] = adam("command", decay=args.command_decay)
    nets["adam_cvae"] = adam("cvae", decay=args.cvae_decay)
    nets["adam_critics"] = adam("critics")
    nets["adam_policy"] = adam("policy", decay=args.decay)
    return nets


# ------------------------------------------------------------ losses, one function per equation


def expectile(u: Tensor, zeta: float) -> Tensor:
    # Definition [unlabelled, "expectile loss rho_zeta"]
    return torch.where(u < 0, 1 - zeta, zeta) * u.square()


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """Mean under P_mix of a batch whose steps count omega(u) each."""
    assert x.shape == weight.shape, (x.shape, weight.shape)  # [B] and [B, 1] would broadcast
    return (x * weight).sum() / weight.sum()


def value_target(r: Tensor, terminal: Tensor, v_next: Tensor, gamma: float) -> Tensor:
    """y = r + gamma V(s'): r, terminal [B], v_next [2, B] -> [B]"""
    assert r.shape == terminal.shape == v_next.shape[1:], (r.shape, terminal.shape, v_next.shape)
    # DIFF 19: V(s') comes from a slow copy and is the smaller of two heads, as in the released
    # code; the paper has one V and no copy. Nothing follows a failure.
    return r + gamma * torch.where(terminal, 0.0, v_next.amin(0))


def value_loss(y: Tensor, v: Tensor, zeta_v: float) -> Tensor:
    """y [B], v [2, B]"""
    assert y.shape == v.shape[1:], (y.shape, v.shape)
    # Eq. (23) [V_loss], for both heads
    return expectile(y - v, zeta_v).mean(1).sum()


def action_value_loss(y: Tensor, q: Tensor) -> Tensor:
    """y [B], q [2, B]"""
    assert y.shape == q.shape[1:], (y.shape, q.shape)
    # Eq. (24) [Q_loss], for both heads
    return expectile(y - q, 0.5).mean(1).sum()


def advantage(q: Tensor, v: Tensor) -> Tensor:
    """q, v [2, B] -> [B]"""
    assert q.shape == v.shape, (q.shape, v.shape)
    # Eq. (39) [adv]
    # DIFF 78: the paper has one Q and one V; with two heads of each, take their means.
    return q.mean(0) - v.mean(0)


def standardise(A: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    # Eq. (40) [adv-std]
    return (A - mu) / (sigma + 1e-8)


def command_loss(A: Tensor, c: Tensor, zeta: float) -> Tensor:
    """A, c [B]"""
    assert A.shape == c.shape, (A.shape, c.shape)
    # Eq. (41) [expectile-loss]
    # Definition [unlabelled, "sample weight omega-bar"]: no factor here; rows are drawn from P_mix
    return expectile(A - c, zeta).mean()


def k_step_target(r: Tensor, terminal: Tensor, q_last: Tensor, gamma: float) -> Tensor:
    """r, terminal [B, K], q_last = min_j Q_phi'_j(s_t, a_hat_t) [B] -> Q_hat [B, K]"""
    K = r.shape[1]
    # Eq. (26) [q_loss], Q_hat, with t the window's last step: rewards up to t - 1, then bootstrap,
    #   Q_hat_i = r_i + gamma r_{i+1} + ... + gamma^{t-i} Q_phi'(s_t, a_hat_t).
    # DIFF 36: the paper does not mention ends of episodes. If the robot fails at t, nothing
    # follows, and the target ends with r_t. Released: r_t is left out, also at time limits.
    last = torch.where(terminal[:, -1], r[:, -1], q_last)
    x = torch.cat([r[:, :-1], last[:, None]], 1)  # [B, K]
    i = torch.arange(K, device=r.device)
    # discount[l, i] is gamma^(l - i) where l >= i, and 0 elsewhere.
    discount = torch.tril(gamma ** (i[:, None] - i).clamp(min=0))  # [K, K]
    return x @ discount


def critic_weight(weight: Tensor, terminal: Tensor) -> Tensor:
    """Every step but the last has a target; the last has one if the robot failed there. [B, K]"""
    last = weight[:, -1] * terminal[:, -1]
    return torch.cat([weight[:, :-1], last[:, None]], 1)


def critic_loss(q: Tensor, q_hat: Tensor, weight: Tensor) -> Tensor:
    """q [2, B, K], q_hat, weight [B, K]"""
    # Eq. (26) [q_loss], for both critics
    # DIFF 52: no conservative penalty; released: on 19 of 108 tasks.
    return sum(weighted_mean((q_hat - head).square(), weight) for head in q)


def dt_loss(a: Tensor, pi: Tensor, weight: Tensor) -> Tensor:
    """a, pi [B, K, d_a], weight [B, K]"""
    assert a.shape == pi.shape, (a.shape, pi.shape)
    # Eq. (27) [dt_loss]
    # DIFF 32: the mean over an action's entries, not their sum: alpha = 3.5 belongs to the mean.
    return weighted_mean((a - pi).square().mean(-1), weight)


def q_term(q: Tensor, weight: Tensor) -> Tensor:
    """q of the policy's actions, weight [B, K]"""
    # Eq. (28) [pi_loss], third term
    # DIFF 30: divided by the mean of |Q|, as in the released code; returns of hundreds would drown
    # the other two terms.
    return -weighted_mean(q, weight) / weighted_mean(q.abs(), weight).detach()


def policy_loss(nets: dict, b: Batch, noise: Tensor, args: Args) -> tuple[Tensor, dict]:
    """L_pi and what to log of it. noise [M, B K, 2 d_a]: a latent of the CVAE has 2 d_a entries."""
    pi = nets["policy"](b).to(b.actions.dtype)  # [B, K, d_a]
    # DIFF 31: Q is the smaller of both critics; released: one of them, at random.
    with low_precision("fp32", pi.device):  # a value needs more digits than an action
        q = nets["critics"](b.states, pi).amin(0)  # [B, K]
    imitation = dt_loss(b.actions, pi, b.weight)
    guidance = q_term(q, b.weight)
    # Eq. (28) [pi_loss], second term: L_reg(pi_theta, pi_tar) under P_mix
    s, a = b.states.flatten(0, 1), pi.flatten(0, 1)  # [B K, ...]
    log_density = behaviour_log_density(nets["cvae"], s, a, noise, args.variance, args.reg_latents)
    reg = -weighted_mean(log_density, b.reg_weight.flatten())
    # Eq. (28) [pi_loss]
    # DIFF 33: no further term; released: also a prediction of the next state.
    loss = imitation + args.eta_reg * reg + args.alpha * guidance
    logs = {"losses/policy": loss, "losses/dt": imitation, "losses/reg": reg}
    return loss, logs | {"charts/q_policy": weighted_mean(q, b.weight)}


# ------------------------------------------------------------------------------ updates


def update_values(nets: dict, data: Data, args: Args) -> dict:
    """Algorithm 1, line 5: one step of the auxiliary critics V and Q."""
    # DIFF 56: normalised states, and weights in both losses (by the draw), as in the paper.
    rows = sample_transitions(data, args)  # [B]
    s = data.states[rows]  # [B, d_s]
    with torch.no_grad():
        v_next = nets["V_bar"](data.next_states[rows])  # [2, B]
        y = value_target(data.rewards[rows], data.terminal[rows], v_next, args.gamma)  # [B]
    v = nets["V"](s)  # [2, B]
    q = nets["Q"](s, data.actions[rows])  # [2, B]
    loss_v = value_loss(y, v, args.zeta_v)
    loss_q = action_value_loss(y, q)
    gradient_step(nets["adam_values"], loss_v + loss_q)
    polyak_update(nets["V_bar"], nets["V"], args.tau)
    logs = {"losses/v": loss_v, "losses/q": loss_q, "charts/v_mean": v.mean()}
    return logs | {"charts/v_largest": v.abs().amax()}


@torch.no_grad()
def relabel(nets: dict, data: Data, args: Args) -> tuple[Data, dict]:
    """Algorithm 1, line 6: advantage tokens of G(I) and the target, and their mu_A and sigma_A."""
    used = torch.cat([data.source_rows, data.target_rows]) if args.beta else data.target_rows  # [n]
    A = []
    for rows in used.split(100_000):
        q = nets["Q"](data.states[rows], data.actions[rows])  # [2, block]
        # DIFF 21: the advantage is Q - V, as in the paper; released: the residual of V.
        A.append(advantage(q, nets["V"](data.states[rows])))
    A = torch.cat(A)  # [n]
    # DIFF 22: standardised with the moments of the target data and G(I), pooled without weights.
    mu, sigma = A.mean(), A.std()
    # No other row is ever drawn. Its token is 0, which stands for the mean advantage.
    tokens = torch.zeros_like(data.rewards).index_copy(0, used, standardise(A, mu, sigma))  # [N]
    return data._replace(tokens=tokens), {"mu_A": mu.item(), "sigma_A": sigma.item()}


def update_command(nets: dict, data: Data, args: Args) -> dict:
    """Algorithm 1, line 6: one step of the command network C(s)."""
    # DIFF 23: batches of P_mix; the paper pools both datasets with the weights omega-bar.
    rows = sample_transitions(data, args)
    c = nets["command"](data.states[rows])[0]  # [B]
    loss = command_loss(data.tokens[rows], c, args.zeta)
    gradient_step(nets["adam_command"], loss)
    return {"losses/command": loss, "charts/command_mean": c.mean()}


def update_critics(nets: dict, b: Batch, args: Args) -> dict:
    """Algorithm 1, lines 9 and 10: fit both critics to the K-step target, move their copies."""
    with torch.no_grad():
        with low_precision(args.tools.precision, b.states.device):
            a_hat = nets["policy_bar"](b, only_last=True)[:, 0]  # [B, d_a]
        q_last = nets["critics_bar"](b.states[:, -1], a_hat.float()).amin(0)  # [B]
        q_hat = k_step_target(b.rewards, b.terminal, q_last, args.gamma)  # [B, K]
    q = nets["critics"](b.states, b.actions)  # [2, B, K]
    loss = critic_loss(q, q_hat, critic_weight(b.weight, b.terminal))
    norm = gradient_step(nets["adam_critics"], loss, args.clip_grad)
    polyak_update(nets["critics_bar"], nets["critics"], args.tau)
    logs = {"losses/critic": loss, "charts/grad_norm_critics": norm}
    logs["charts/q_mean"] = weighted_mean(q.mean(0), b.weight)
    logs["charts/q_target_mean"] = weighted_mean(q_hat, b.weight)
    return logs | {"charts/q_largest": q.abs().amax()}


def update_policy(nets: dict, b: Batch, args: Args) -> dict:
    """Algorithm 1, line 11: one step of the Transformer; its optimiser leaves the critics alone."""
    noise = torch.randn(args.M, b.valid.numel(), 2 * b.actions.shape[-1], device=b.states.device)
    with low_precision(args.tools.precision, b.states.device):
        loss, logs = policy_loss(nets, b, noise, args)
    return logs | {"charts/grad_norm": gradient_step(nets["adam_policy"], loss, args.clip_grad)}


def update_actor_critic(nets: dict, data: Data, args: Args) -> dict:
    """Algorithm 1, lines 8 to 11."""
    b = sample_windows(data, args)
    return update_critics(nets, b, args) | update_policy(nets, b, args)


def update_target_policy(nets: dict, args: Args, step: int) -> None:
    # DIFF 34: the paper never updates pi_theta'. As in the released code it is the random initial
    # policy until ema_start, then a slow average (here from that update's policy, not the random).
    if step == max(1, args.ema_start):
        polyak_update(nets["policy_bar"], nets["policy"], 1.0)
    elif step > args.ema_start and step % args.ema_every == 0:
        polyak_update(nets["policy_bar"], nets["policy"], 1 - args.ema_decay)


# ---------------------------------------------------------------------- acting and evaluation


@dataclass
class Agent:
    """Algorithm 2 [alg:infer]: the policy with its rolling context, for n robots at once."""

    nets: dict
    pre: dict  # mu and sd [d_s] of the target's states
    args: Args
    n: int
    record: dict = field(default_factory=dict)  # of the run, which has the range of the tokens
    clip = 10.0  # of normalised states, as in training

    def __post_init__(self):
        self.reset()

    def reset(self) -> None:
        """Lines 2 and 3: nothing has been seen yet, and K steps of zeros stand for that."""
        policy = self.nets["policy"]
        zeros = torch.zeros(self.n, self.args.gate.K, device=policy.action.weight.device)
        states = zeros[..., None].repeat(1, 1, policy.embed_s.in_features)
        actions = zeros[..., None].repeat(1, 1, policy.embed_a.in_features)
        self.context = Batch(zeros, states, actions, steps=zeros.long(), valid=zeros.bool())
        self.to_go = torch.full_like(zeros[:, 0], self.args.return_target / 1000)
        self.t = 0

    @torch.inference_mode()
    def act(self, observations: np.ndarray, rewards, alive) -> np.ndarray:
        """observations [n, d_s], rewards [n] of the last step -> actions [n, d_a], 0 where dead."""
        s = self.normalised(observations)  # [n, d_s]
        self.to_go = self.to_go - torch.as_tensor(rewards).to(self.to_go) / 1000
        # Lines 5 to 7: C was trained on standardised tokens, so its output needs no scaling.
        c = self.nets["command"](s)[0] if self.args.token == "advantage" else self.to_go  # [n]
        t = torch.full((self.n,), min(self.t, time_limit(self.args.task) - 1), device=c.device)
        self.t += 1
        # Lines 8 to 11: this step enters the context, with a zero for its action, still unknown.
        a = torch.zeros_like(self.context.actions[:, 0])  # [n, d_a]
        new = (c, s, a, t, torch.ones_like(c).bool())
        pairs = zip(self.context[:5], new, strict=True)
        self.context = Batch(*(torch.cat([old[:, 1:], x[:, None]], 1) for old, x in pairs))
        # Lines 12 to 15: act, and remember the action.
        rows = torch.as_tensor(np.flatnonzero(np.broadcast_to(alive, self.n)), device=c.device)
        a[rows] = self.choose(Batch(*(x[rows] for x in self.context[:5])))
        self.context.actions[:, -1] = a
        return a.cpu().numpy()

    def normalised(self, observations: np.ndarray) -> Tensor:
        s = normalise(observations, self.pre["mu"], self.pre["sd"], self.clip)
        return torch.as_tensor(s, device=self.to_go.device)  # [n, d_s]

    def choose(self, context: Batch) -> Tensor:
        # DIFF 45: one action and no critic, as in the paper; released: the critics' choice of 50.
        return self.nets["policy"](context, only_last=True)[:, 0]  # [n, d_a]


def evaluate(agent: Agent, args: Args) -> dict:
    """Episodes in the target's simulator; the same ones at every evaluation."""
    agent.nets["policy"].eval()
    agent.reset()
    found = runs.play(args, agent.act, judge=judge_of(agent))
    agent.nets["policy"].train()
    return found


load_agent = functools.partial(export.load_agent, Args, build, Agent)  # (folder, n=1, device="cpu")


# ------------------------------------------------------------------------------------- training


def train_policy(run, nets: dict, data: Data, agent: Agent, args: Args) -> None:
    """Algorithm 1, lines 7 to 11."""
    args = settle_precision(run, update_actor_critic, nets, data, args)
    update = prepare(run, "policy", update_actor_critic, nets, data, args)
    diagnose = stages.diagnostics(run, nets, data, args)
    for step in run.steps("policy", args.updates):
        rate = set_learning_rate(nets, ("critics", "policy"), args, step, args.updates)
        logs = update(nets, data, args)
        update_target_policy(nets, args, step)
        run.log(step, logs | {"charts/learning_rate": rate})
        diagnose(step)
        if run.evaluation_due(step):  # DIFF 46: the last three are at 98, 99 and 100 %.
            run.evaluated(step, evaluate(agent, args))


def train(args: Args) -> dict:
    """Algorithm 1 [alg:train] from data to result."""
    check(args)
    args = runs.replace(args, device=str(runs.pick_device(args.run.device)))
    source, target = load_task(args.task, one_is_enough=True)
    plain = runs.plain(Args, defaults, args)
    with (
        runs.open_run("taf_dt", args, plain, source=source, target=target) as run,
        export.at_the_end(args.tools.export, run.folder, load_agent),
    ):
        if run.result:
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)

        # Lines 2 to 4: gate, weights, and the fused distribution
        pre = taf_preprocess.for_training(args, source, target)
        data = fuse(source, target, pre, args, args.run.device)

        # Line 1: networks, or the state of an interrupted run
        nets = build(args, data.states.shape[1], data.actions.shape[1], args.run.device)
        stages.begin(run, nets, pre, data, target, args)
        agent = Agent(nets, pre, args, args.run.eval_episodes, run.record)
        if args.run.eval_only:
            return run.only_evaluated(evaluate(agent, args))

        # Line 5: auxiliary critics. The diagnostics use them, whatever the tokens are.
        if args.token == "advantage" or args.tools.diagnostics:
            run_stage(run, "values", args.label_updates, update_values, nets, data, args)

        # Line 6: advantage tokens and the command network
        if args.token == "advantage":
            data, moments = relabel(nets, data, args)
            span = token_range(data)
            run.record |= moments | span
            run_stage(run, "command", args.command_updates, update_command, nets, data, args, span)

        # For L_reg in line 11: the behaviour model, which does not change afterwards
        run_stage(run, "cvae", args.cvae_updates, update_behaviour, nets, data, args)
        nets["cvae"].requires_grad_(False)

        train_policy(run, nets, data, agent, args)
        return run.finish(pre, film=Agent(nets, pre, args, 1))


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__, released="baselines/taf_dt_released.py"))


if __name__ == "__main__":
    with one_line_errors():
        main()
