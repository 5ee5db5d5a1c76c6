"""Q-learning Decision Transformer (QT): a Decision Transformer guided by a pair of critics.

    python baselines/qt.py --quick --data embedded                  three minutes on a laptop
    python baselines/qt.py --env hopper --shift morph --seed 1      one task
    python baselines/qt.py --env hopper --shift morph --eval-only   evaluate its policy again

Paper: Hu et al., "Q-value Regularized Transformer for Offline Reinforcement Learning", ICML 2024,
arXiv 2405.17098. Official code: https://github.com/charleshsc/QT. Differences from it:

    1  There are two datasets. Half of the windows of a batch come from the source and half from the
       target; --merge concat draws from both put together. States are normalised with the
       statistics of both together. Settings by task follow the source data; ant, which the official
       code does not know, has walker2d's.
    2  The score is that of the Transformer's own action for one return, the expert reference of the
       target robot's score. The official inference draws one of 50 candidates by their critics'
       values. It is reported as well: `guided_score` in result.json, at the last three evaluations
       or as --guided says. Two things differ in it: the critics' own guess of the return is scaled
       like the other returns, and no candidate gets a random return where 50 is not a multiple of
       the number of returns.
    3  The policy after the last update is reported; the official code reports the best of all
       evaluations. In a run with fewer updates than the official one, the target policy starts to
       follow earlier. A slow copy remembers at most a fiftieth of the run, unless its rate would
       exceed 0.05: target critics follow faster below 10,000 updates, and the target policy, which
       moves every fifth update, below 50,000. `critics` in result.json says whether the critics
       know the data's returns by then.
    4  The target policy acts without dropout. The official one acts with dropout, because it is
       never put into evaluation mode.
    5  Padding is 0 after the normalisation and masked; officially it is 0 before it. There is no
       reward embedding, which the official network has and does not use.
    6  Both critics are computed in one batched product, targets by a recursion backwards in time,
       and the last action token, which nothing reads, is left out. The numbers are the same.

Shapes: B windows in a batch, K steps in a window, W embedding width, T = 3K - 1 tokens (R_1, s_1,
a_1, R_2, ..., R_K, s_K).
"""

import copy
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

# The project's packages are one folder up, wherever this script is started from.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dynashift import quick_help  # noqa: F401  first, because --help must not load anything slow

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynashift import runs
from dynashift.any_env import time_limit
from dynashift.datasets import Dataset, TaskArgs, load_task, returns_to_ask
from dynashift.errors import UserError, one_line_errors
from dynashift.faster import Adam
from dynashift.runs import Flat, NotNegative, Positive, RunArgs, Share

# ------------------------------------------------------------------------------------ arguments

# The official run.sh, by robot and source data. HalfCheetah medium-expert has ten iterations of
# 10,000 updates; all others are stopped after 101 of 500 iterations of 1,000.
TASKS = {
    ("halfcheetah", "medium"): dict(eta=5.0, clip_grad=15.0, K=5),
    ("halfcheetah", "medium-replay"): dict(eta=5.0, clip_grad=15.0, K=5),
    ("halfcheetah", "medium-expert"): dict(
        eta=0.4, clip_grad=15.0, updates=100_000, iteration=10_000, period=10
    ),
    ("hopper", "medium"): dict(eta=1.0, clip_grad=9.0, drop_ends=True),
    ("hopper", "medium-replay"): dict(eta=3.0, clip_grad=9.0, drop_ends=True),
    ("hopper", "medium-expert"): dict(eta=1.0, clip_grad=9.0, drop_ends=True),
    ("walker2d", "medium"): dict(eta=2.0, clip_grad=5.0),
    ("walker2d", "medium-replay"): dict(eta=2.0, clip_grad=5.0),
    ("walker2d", "medium-expert"): dict(eta=2.0, clip_grad=5.0),
    ("ant", "medium"): dict(eta=2.0, clip_grad=5.0),
    ("ant", "medium-replay"): dict(eta=2.0, clip_grad=5.0),
    ("ant", "medium-expert"): dict(eta=2.0, clip_grad=5.0),
}
OTHER = TASKS["walker2d", "medium"]  # for robots of your own
RETURNS = {  # that the candidates of the official inference ask for
    "halfcheetah": (12000.0, 9000.0, 6000.0),
    "hopper": (3600.0, 1800.0),
    "walker2d": (5000.0, 4000.0, 2500.0),
    "ant": (5000.0, 4000.0, 2500.0),
}
# A small run of three minutes on two cores: less data, smaller networks, fewer updates.
QUICK = dict(
    source_size=100_000,
    K=5,
    layers=2,
    heads=2,
    width=64,
    hidden=128,
    batch=64,
    updates=3_000,
    eval_every=1_500,
    log_every=100,
    save_every=1_000,
)


@dataclass(frozen=True)
class Args:
    task: Flat[TaskArgs] = TaskArgs()
    run: Flat[RunArgs] = RunArgs()

    guided: Literal["always", "last", "never"] = "last"
    """also evaluate critic-guided actions, as officially: each time, the last three times, never"""
    diagnostics: bool = False
    """measure jumps at stitch junctions twenty times during training (TAF-DT, Fig. fig:jumps)"""
    reference: Path | None = None
    """with --diagnostics: folder of a finished taf_dt run of this task, for its V, Q and gate"""

    # --- Transformer ---
    merge: Literal["half", "concat"] = "half"
    """draw half of each batch from either dataset, or all of it from both put together"""
    drop_ends: bool = False
    """let no window begin in the last K steps of an episode, as officially for hopper"""
    return_target: float | None = None
    """R_1, the return to ask for; default: the expert reference of the target robot's score"""
    K: Positive[int] = 20
    """context length K; 5 for halfcheetah medium and medium-replay"""
    batch: Positive[int] = 256
    """windows in a batch"""
    layers: Positive[int] = 4
    """Transformer layers"""
    heads: Positive[int] = 4
    """attention heads"""
    width: Positive[int] = 256
    """embedding dimension"""
    dropout: Share = 0.1
    """dropout on embeddings, attention and residuals"""
    decay: NotNegative[float] = 1e-4
    """L2 penalty on the policy"""
    state_loss: NotNegative[float] = 1.0
    """weight of the next-state prediction in the behaviour cloning term"""

    # --- critics ---
    eta: NotNegative[float] | None = None
    """weight eta of the Q term in the policy's loss; default: by robot and source data"""
    gamma: Share = 0.99
    """discount gamma of the K-step target"""
    tau: Share = 0.005
    """target critics take this share of the critics per update; more in shorter runs"""
    hidden: Positive[int] = 256
    """width of the three hidden layers of a critic"""
    ema_decay: Share = 0.995
    """share of itself that the target policy keeps per update; less in shorter runs"""
    ema_every: Positive[int] = 5
    """update the target policy every N updates"""
    ema_start: NotNegative[int] = 1_000
    """update at which the target policy starts to follow; earlier in shorter runs"""
    ema_copy: bool = False
    """copy the policy at ema_start; officially the target policy is the random one until then"""

    # --- optimisation ---
    lr: Positive[float] = 3e-4
    """learning rate of policy and critics"""
    clip_grad: Positive[float] | None = None
    """largest norm of the gradients of policy and critics; default: by robot"""
    updates: Positive[int] = 101_000
    """updates of policy and critics"""
    iteration: Positive[int] = 1_000
    """updates of one iteration, in which the learning rate is constant"""
    period: Positive[int] = 500
    """iterations after which the learning rate would reach 0 along a cosine"""

    # --- critic-guided inference ---
    guided_returns: tuple[float, ...] | None = None
    """returns that the candidates ask for; default: the official ones of the robot"""
    candidates: Positive[int] = 50
    """candidate actions per step"""
    guided_noise: NotNegative[float] = 0.1
    """standard deviation of the noise on the candidates' last return-to-go, in thousands"""


IGNORE = runs.IGNORE | {"reference"}  # it has no effect on the policy


def defaults(args: Args) -> dict:
    """Values for this task and --quick where the command line gives none."""
    env = args.task.env
    asked = returns_to_ask(args.task)[0]
    values = {"return_target": asked, "guided_returns": RETURNS.get(env, (asked,))}
    of_robot = TASKS.get((env, "medium"), OTHER)  # other names: as medium
    # The name of a file says which data it has: data/hopper/medium-replay.hdf5.
    values |= TASKS.get((env, Path(args.task.source).stem), of_robot)
    official_updates = values.get("updates", Args.updates)
    if args.run.quick:
        values |= QUICK
    return runs.short_run_rates(args, values, official_updates)


def resolve(args: Args) -> Args:
    """Validate the arguments and choose the device."""
    runs.check_args(args)
    runs.note_guidance("eta", args.eta)
    if args.batch < 2 or args.width % args.heads:
        raise UserError(
            f"--batch {args.batch} must be at least 2, --width {args.width} a multiple of --heads"
        )
    if args.K < 2:
        raise UserError(f"--K {args.K} must be at least 2")
    return runs.replace(args, device=str(runs.pick_device(args.run.device)))


# ----------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """All N transitions in temporal order on the training device, the source's first."""

    states: Tensor  # [N, d_s] normalised
    actions: Tensor  # [N, d_a]
    rewards: Tensor  # [N]
    terminal: Tensor  # [N] bool, the robot has failed
    tokens: Tensor  # [N] return-to-go in thousands, this step's reward included
    steps: Tensor  # [N] int, step within the episode
    left: Tensor  # [N] int, steps to the episode's end, this one included
    starts_s: Tensor  # [N_s] int, rows at which a source window may begin
    starts_t: Tensor  # [N_t] int, rows at which a target window may begin


class Batch(NamedTuple):
    states: Tensor  # [B, K, d_s]
    actions: Tensor  # [B, K, d_a]
    rewards: Tensor  # [B, K]
    terminal: Tensor  # [B, K] bool
    tokens: Tensor  # [B, K]
    steps: Tensor  # [B, K] int
    valid: Tensor  # [B, K] bool, false on padding


def merge(source: Dataset, target: Dataset, device) -> tuple[Data, np.ndarray, np.ndarray]:
    """Both datasets, and the mean and standard deviation of their states."""

    def both(key: str) -> np.ndarray:
        return np.concatenate([getattr(source, key), getattr(target, key)])

    def tensor(array: np.ndarray, dtype=torch.float32) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array)).to(device, dtype)

    states = both("observations")
    mu = states.mean(0, dtype=np.float64)
    sd = states.std(0, dtype=np.float64)
    to_go = []
    left = []
    for data in (source, target):
        for rewards in np.split(data.rewards.astype(np.float64), data.starts[1:]):
            to_go.append(rewards[::-1].cumsum()[::-1] / 1000)
        left.append(np.repeat(data.lengths, data.lengths) - data.steps)
    rows = torch.arange(len(states), device=device)
    merged = Data(
        states=tensor(normalise(states, mu, sd)),
        actions=tensor(both("actions")),
        rewards=tensor(both("rewards")),
        terminal=tensor(both("terminals"), torch.bool),
        tokens=tensor(np.concatenate(to_go)),
        steps=tensor(np.minimum(both("steps"), time_limit(target) - 1), torch.long),
        left=tensor(np.concatenate(left), torch.long),
        starts_s=rows[: len(source)],
        starts_t=rows[len(source) :],
    )
    return merged, mu, sd


def drop_ends(data: Data, K: int) -> Data:
    """The same data, but no window begins in the last K steps of an episode."""
    starts_s = data.starts_s[data.left[data.starts_s] > K]
    starts_t = data.starts_t[data.left[data.starts_t] > K]
    if not len(starts_s) or not len(starts_t):
        raise UserError(
            f"no episode of source or target is longer than K = {K}; use --no-drop-ends"
        )
    return data._replace(starts_s=starts_s, starts_t=starts_t)


def normalise(states: np.ndarray, mu: np.ndarray, sd: np.ndarray) -> np.ndarray:
    return ((states - mu) / (sd + 1e-6)).astype(np.float32)


def sample_windows(data: Data, args: Args) -> Batch:
    """Draw windows uniformly over their first steps, with index arithmetic on the device."""
    if args.merge == "half":
        half = args.batch // 2
        parts = [(data.starts_s, half), (data.starts_t, args.batch - half)]
    else:
        parts = [(torch.cat([data.starts_s, data.starts_t]), args.batch)]
    starts = [rows[torch.randint(len(rows), (size,), device=rows.device)] for rows, size in parts]
    return windows(data, torch.cat(starts), args.K)


def windows(data: Data, starts: Tensor, K: int) -> Batch:
    """The K steps from each of `starts` [B], padded on the left where the episode is too short."""
    missing = (K - data.left[starts]).clamp(min=0)  # [B]
    offset = torch.arange(K, device=starts.device) - missing[:, None]  # [B, K], negative on padding
    rows = starts[:, None] + offset.clamp(min=0)
    return gather(data, rows, valid=offset >= 0)


def gather(data: Data, rows: Tensor, valid: Tensor) -> Batch:
    """The batch of these rows [B, K], with zeros where they are not valid."""
    valid_wide = valid[..., None]  # [B, K, 1]
    return Batch(
        states=data.states[rows] * valid_wide,
        actions=data.actions[rows] * valid_wide,
        rewards=data.rewards[rows] * valid,
        terminal=data.terminal[rows] & valid,
        tokens=data.tokens[rows] * valid,
        steps=data.steps[rows] * valid,
        valid=valid,
    )


# ------------------------------------------------------------------------------------- networks


class Critics(nn.Module):
    """Two networks (s, a) -> hidden x 3 -> 1 with Mish, one batched product per layer."""

    def __init__(self, d_in: int, hidden: int):
        super().__init__()
        self.W = nn.ParameterList()
        self.b = nn.ParameterList()
        for n_in, n_out in ((d_in, hidden), (hidden, hidden), (hidden, hidden), (hidden, 1)):
            bound = n_in**-0.5  # the same initial distribution as nn.Linear
            self.W.append(torch.empty(2, n_in, n_out).uniform_(-bound, bound))
            self.b.append(torch.empty(2, 1, n_out).uniform_(-bound, bound))

    def forward(self, s: Tensor, a: Tensor) -> Tensor:
        """[..., d_s], [..., d_a] -> [2, ...]"""
        x = torch.cat([s, a], -1).view(-1, self.W[0].shape[1]).expand(2, -1, -1)  # [2, n, d_in]
        for W, b in zip(self.W[:-1], self.b[:-1], strict=True):
            x = F.mish(torch.baddbmm(b, x, W))
        return torch.baddbmm(self.b[-1], x, self.W[-1]).view(2, *s.shape[:-1])


class Block(nn.Module):
    """A GPT-2 layer: attention, then an MLP, each on normalised input and with a residual."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [B, T, W], mask [B, 1, T, T] -> [B, T, W]"""
        B, T, W = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)  # [B, T, W] each
        q = q.view(B, T, self.heads, W // self.heads).transpose(1, 2)  # [B, heads, T, W / heads]
        k = k.view(B, T, self.heads, W // self.heads).transpose(1, 2)  # [B, heads, T, W / heads]
        v = v.view(B, T, self.heads, W // self.heads).transpose(1, 2)  # [B, heads, T, W / heads]
        dropout = self.dropout.p if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, mask, dropout)  # [B, heads, T, W / heads]
        h = h.transpose(1, 2).flatten(2)  # [B, T, W]
        x = x + self.dropout(self.out(h))
        h = self.down(self.up(self.norm2(x)).relu())
        return x + self.dropout(h)


class Policy(nn.Module):
    """Predicts a_t from R_1, s_1, a_1, ..., R_t, s_t, and s_{t+1} from these and a_t."""

    def __init__(self, d_s: int, d_a: int, args: Args):
        super().__init__()
        W = args.width
        self.embed_c = nn.Linear(1, W)
        self.embed_s = nn.Linear(d_s, W)
        self.embed_a = nn.Linear(d_a, W)
        self.embed_t = nn.Embedding(time_limit(args.task), W)  # the step, the only position
        self.norm_in = nn.LayerNorm(W)
        self.norm_out = nn.LayerNorm(W)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(W, args.heads, args.dropout) for _ in range(args.layers))
        self.action = nn.Linear(W, d_a)
        self.next_state = nn.Linear(W, d_s)

    def forward(
        self, tokens, states, actions, steps, valid, only_last: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Predicted actions [B, K, d_a], next states [B, K - 1, d_s]; with only_last [B, 1, d_a].

        tokens, steps, valid [B, K]; states [B, K, d_s]; actions [B, K, d_a], the last one unused
        """
        t = self.embed_t(steps)  # [B, K, W]
        c = self.embed_c(tokens[..., None]) + t  # [B, K, W]
        s = self.embed_s(states) + t  # [B, K, W]
        a = self.embed_a(actions) + t  # [B, K, W]
        # The tokens are interleaved step by step, and the last action is dropped.
        x = torch.stack([c, s, a], 2).flatten(1, 2)[:, :-1]  # [B, T, W]
        T = x.shape[1]
        # A token attends to itself and to all earlier valid ones. So does padding to itself,
        # because a softmax over nothing would be NaN.
        ones = torch.ones(T, T, dtype=torch.bool, device=x.device)
        causal = ones.tril()  # [T, T]
        itself = causal.triu()  # [T, T]
        seen = valid.repeat_interleave(3, 1)[:, None, None, :T]  # [B, 1, 1, T]
        mask = causal & seen | itself  # [B, 1, T, T]
        x = self.dropout(self.norm_in(x))
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm_out(x)
        if only_last:
            return self.action(x[:, -1:]).tanh(), None
        actions = self.action(x[:, 1::3]).tanh()  # [B, K, d_a], read at the tokens s_t
        next_states = self.next_state(x[:, 2::3])  # [B, K - 1, d_s], read at the tokens a_t
        return actions, next_states


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """Networks and optimizers, which is everything a checkpoint holds."""
    policy = Policy(d_s, d_a, args).to(device)
    critics = Critics(d_s + d_a, args.hidden).to(device)
    fused = torch.device(device).type != "meta"
    return {
        "policy": policy,
        "critics": critics,
        "policy_bar": copy.deepcopy(policy).eval().requires_grad_(False),
        "critics_bar": copy.deepcopy(critics).eval().requires_grad_(False),
        "adam_policy": Adam(policy.parameters(), args.lr, weight_decay=args.decay, fused=fused),
        "adam_critics": Adam(critics.parameters(), args.lr, fused=fused),
    }


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


# ---------------------------------------------------------------------------- losses and update


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """The mean of x over valid steps. x, valid [B, K]"""
    # [B] times [B, 1] would silently broadcast to [B, B]
    assert x.shape == valid.shape, (x.shape, valid.shape)
    return (x * valid).sum() / valid.sum()


def masked_mse(x: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """Mean squared error over valid steps and all entries. x, y [B, K, d]; valid [B, K]"""
    assert x.shape == y.shape, (x.shape, y.shape)
    return masked_mean((x - y).square().mean(-1), valid)


def k_step_target(r: Tensor, terminal: Tensor, q_last: Tensor, gamma: float) -> Tensor:
    """The K-step target [B, K], built backwards in time: y_t = r_t + gamma y_{t+1}.

    r, terminal [B, K]; q_last [B] is the target critics' value of the target policy's action at
    s_K. y_K = q_last, or 0 if the robot fails in that step, whose reward is left out.
    """
    y = [q_last * ~terminal[:, -1]]
    for t in reversed(range(r.shape[1] - 1)):
        assert y[0].shape == r[:, t].shape, (y[0].shape, r.shape)
        y.insert(0, r[:, t] + gamma * y[0])
    return torch.stack(y, 1)


def critic_loss(q: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """q [2, B, K]; y, valid [B, K]. The last step is left out: its target is the critics' own."""
    return sum(masked_mean((one - y).square()[:, :-1], valid[:, :-1]) for one in q)


def q_term(q: Tensor, valid: Tensor) -> Tensor:
    """Minus the mean of one critic, chosen at random, in units of the other's mean size.

    q [2, B, K] are the values of the policy's actions.
    """
    i = torch.randint(2, (1,), device=q.device)
    one = q.index_select(0, i)[0]
    other = q.index_select(0, 1 - i)[0]
    return -masked_mean(one, valid) / masked_mean(other.abs(), valid).detach()


def qt_loss(nets: dict, batch: Batch, args: Args) -> tuple[Tensor, dict]:
    """The policy's loss, and what to log."""
    pi, next_states = nets["policy"](
        batch.tokens, batch.states, batch.actions, batch.steps, batch.valid
    )  # [B, K, d_a], [B, K - 1, d_s]
    loss_action = masked_mse(batch.actions, pi, batch.valid)
    loss_state = masked_mse(batch.states[:, 1:], next_states, batch.valid[:, :-1])
    q = nets["critics"](batch.states, pi)  # [2, B, K]
    loss = loss_action + args.state_loss * loss_state + args.eta * q_term(q, batch.valid)
    # The Q term itself is not logged: in units of its own size it is near -1 wherever Q > 0.
    logs = {
        "losses/policy": loss,
        "losses/action": loss_action,
        "losses/state": loss_state,
        "charts/q_policy": masked_mean(q.amin(0), batch.valid),
    }
    return loss, logs


def learning_rate(step: int, args: Args) -> float:
    """Of update `step`, counted from 1."""
    iterations = (step - 1) // args.iteration
    return args.lr * 0.5 * (1 + math.cos(math.pi * iterations / args.period))


def update_critics(nets: dict, batch: Batch, args: Args) -> dict:
    with torch.no_grad():
        a_last, _ = nets["policy_bar"](
            batch.tokens, batch.states, batch.actions, batch.steps, batch.valid, only_last=True
        )  # [B, 1, d_a]
        q_last = nets["critics_bar"](batch.states[:, -1], a_last[:, 0]).amin(0)  # [B]
        y = k_step_target(batch.rewards, batch.terminal, q_last, args.gamma)  # [B, K]
    q = nets["critics"](batch.states, batch.actions)  # [2, B, K]
    loss = critic_loss(q, y, batch.valid)
    grad_norm = gradient_step(nets["adam_critics"], loss, args.clip_grad)
    return {
        "losses/critic": loss,
        "charts/q_mean": masked_mean(q.mean(0), batch.valid),
        "charts/q_largest": q.abs().amax(),
        "charts/q_target_mean": masked_mean(y, batch.valid),
        "charts/grad_norm_critics": grad_norm,
    }


def update(nets: dict, data: Data, args: Args, step: int) -> dict:
    """One update of critics and policy, then of their averages."""
    batch = sample_windows(data, args)
    for name in ("adam_policy", "adam_critics"):
        nets[name].param_groups[0]["lr"] = learning_rate(step, args)
    logs = update_critics(nets, batch, args)
    loss, policy_logs = qt_loss(nets, batch, args)
    logs |= policy_logs
    logs["charts/grad_norm"] = gradient_step(nets["adam_policy"], loss, args.clip_grad)

    if step == args.ema_start and args.ema_copy:
        polyak_update(nets["policy_bar"], nets["policy"], 1.0)
    elif step > args.ema_start and step % args.ema_every == 0:
        polyak_update(nets["policy_bar"], nets["policy"], 1 - args.ema_decay)
    polyak_update(nets["critics_bar"], nets["critics"], args.tau)
    return logs


# ----------------------------------------------------------------------------------- evaluation


def append(history: Tensor, newest) -> Tensor:
    """A history [n, K, ...] without its oldest step and with the newest one, [n, ...]."""
    newest = torch.as_tensor(newest, device=history.device)
    return torch.cat([history[:, 1:], newest[:, None]], 1)


@torch.no_grad()
def rollout(nets: dict, norm: tuple, args: Args, guided: bool) -> dict:
    """Run all episodes in lockstep, with one forward pass per step for all of them."""
    policy = nets["policy"].eval()
    device = policy.action.weight.device
    N = args.run.eval_episodes
    K = args.K
    seed = 10_000 * args.run.seed
    # A generator of its own, so that evaluating does not change any random number of the training.
    rng = torch.Generator(device).manual_seed(seed)
    judge = runs.value_of(nets["critics"], lambda obs: normalise(obs, *norm), device)
    simulators = runs.simulators(args, N, judge=judge)
    obs = simulators.reset(seed)
    returns = np.zeros(N)
    lengths = np.zeros(N, int)
    ended = np.zeros(N, bool)
    tokens = torch.zeros(N, K, device=device)
    states = torch.zeros(N, K, obs.shape[1], device=device)
    actions = torch.zeros(N, K, simulators.act_dim, device=device)  # the last one is not yet known
    steps = torch.zeros(N, K, dtype=torch.long, device=device)
    valid = torch.zeros(N, K, dtype=torch.bool, device=device)
    while not ended.all():
        # As in training, the return-to-go includes the reward of the step about to be taken.
        tokens = append(tokens, (args.return_target - returns).astype(np.float32) / 1000)
        states = append(states, normalise(obs, *norm))
        steps = append(steps, np.minimum(lengths, time_limit(args.task) - 1))
        valid = append(valid, np.ones(N, bool))
        if guided:
            a = guided_action(nets, tokens, states, actions, steps, valid, args, rng)  # [N, 1, d_a]
        else:
            a, _ = policy(tokens, states, actions, steps, valid, only_last=True)  # [N, 1, d_a]
        actions = torch.cat([actions[:, 1:-1], a, torch.zeros_like(a)], 1)
        obs, reward, terminated, truncated = simulators.step(a[:, 0].cpu().numpy())
        returns += reward  # 0 once an episode has ended
        lengths += ~ended
        ended = terminated | truncated
    simulators.close()
    policy.train()
    return runs.scored(args, simulators, returns, lengths)


def evaluate(nets: dict, norm: tuple, args: Args, guided: bool) -> dict:
    """Episodes of the policy alone, and with `guided` the score of those that the critics guide."""
    found = rollout(nets, norm, args, guided=False)
    found["guided_score"] = None
    if guided:
        found["guided_score"] = rollout(nets, norm, args, guided=True)["score"]
    return found


def guided_action(nets: dict, tokens, states, actions, steps, valid, args: Args, rng) -> Tensor:
    """The official inference: one of many candidates, drawn by the target critics' softmax.

    The candidates ask for several returns. All but the first few have noise on their last token,
    and one asks for what the critics expect. Histories [n, K, ...] -> action [n, 1, d_a]
    """
    n = len(tokens)
    C = args.candidates
    m = len(args.guided_returns)
    # Asking for another return shifts all tokens by a constant, because the rewards are the same.
    returns = torch.tensor(args.guided_returns, device=tokens.device)[torch.arange(C) * m // C]
    shift = (returns - args.return_target) / 1000  # [C]
    last_reward = tokens[:, -2] - tokens[:, -1]  # [n], in thousands
    tokens = tokens[:, None] + shift[:, None] * valid[:, None]  # [n, C, K]
    noise = args.guided_noise * torch.randn(n, C, generator=rng, device=tokens.device)
    tokens[:, m:, -1] += noise[:, m:]
    q_before = nets["critics_bar"](states[:, -2], actions[:, -2]).amin(0)  # [n]
    expected = q_before / 1000 - last_reward
    tokens[:, -1, -1] = torch.where(valid[:, -2], expected, tokens[:, -1, -1])

    states = states.repeat_interleave(C, 0)  # [n C, K, d_s]
    actions = actions.repeat_interleave(C, 0)
    steps = steps.repeat_interleave(C, 0)
    valid = valid.repeat_interleave(C, 0)
    a, _ = nets["policy"](tokens.flatten(0, 1), states, actions, steps, valid, only_last=True)
    a = a[:, 0]  # [n C, d_a]
    q = nets["critics_bar"](states[:, -1], a).amin(0).view(n, C)
    drawn = torch.multinomial(q.softmax(1), 1, generator=rng)  # [n, 1]
    return a.view(n, C, -1).gather(1, drawn[..., None].expand(-1, -1, a.shape[-1]))


def discounted_returns(data: Data, rows: Tensor, gamma: float) -> Tensor:
    """What the data earn from each of these rows [n] to the end of its episode, [n]."""
    left = data.left[rows]  # [n]
    k = torch.arange(int(left.max()), device=rows.device)
    inside = k < left[:, None]  # [n, largest left]
    later = (rows[:, None] + k).clamp(max=len(data.rewards) - 1)
    return (data.rewards[later] * inside * gamma**k).sum(1)


@torch.no_grad()
def check_critics(nets: dict, data: Data, gamma: float, n: int = 1_000) -> dict:
    """Do the critics know the data's returns? Means of both, and their correlation.

    Scores of a run in which they do not are no evidence about QT. n rows of either dataset are
    compared, spread evenly. Near a time limit the data do not show what would have followed.
    """
    parts = [x[torch.linspace(0, len(x) - 1, n).long()] for x in (data.starts_s, data.starts_t)]
    rows = torch.cat(parts)
    left = data.left[rows]
    rows = rows[data.terminal[rows + left - 1] | (gamma**left < 0.05)]
    if len(rows) < 2:
        return {"q": None, "return": None, "correlation": None}
    q = nets["critics"](data.states[rows], data.actions[rows]).mean(0)
    earned = discounted_returns(data, rows, gamma)
    correlation = torch.corrcoef(torch.stack([q, earned]))[0, 1]
    return {"q": q.mean().item(), "return": earned.mean().item(), "correlation": correlation.item()}


def junctions(args: Args, data: Data, source: Dataset, target: Dataset) -> dict:
    """Windows that change domain in the middle, and as many that do not.

    With --reference they come with the critics of that run, which all methods share.
    """
    from studies.junctions import reference_pool  # only here, because training does not need it

    return reference_pool(data.states, data.left, args.K, args.reference, source, target)


@torch.no_grad()
def junction_metrics(nets: dict, data: Data, part: dict) -> dict:
    """Jump of the action (J_a) and of its value (J_Q) at the junction, TD error around it.

    J_Q_own is J_Q by QT's own critics.
    """
    rows = part["rows"]  # [P, K]
    t = math.ceil(rows.shape[1] / 2)  # the first step after the junction
    batch = gather(data, rows, torch.ones_like(rows, dtype=torch.bool))
    nets["policy"].eval()
    pi, _ = nets["policy"](
        batch.tokens, batch.states, batch.actions, batch.steps, batch.valid
    )  # [P, K, d_a]
    nets["policy"].train()
    found = {"J_a": (pi[:, t] - pi[:, t - 1]).norm(dim=-1).mean().item()}
    q_own = nets["critics"](batch.states, pi).amin(0)  # [P, K]
    found["J_Q_own"] = (q_own[:, t] - q_own[:, t - 1]).abs().mean().item()
    if "Q" in part:
        q = part["Q"](part["s"], pi).mean(0)  # [P, K]
        found["J_Q"] = (q[:, t] - q[:, t - 1]).abs().mean().item()
        found["TD"] = part["TD"]
    return found


# ------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    source, target = load_task(args.task, one_is_enough=True)
    plain = runs.plain(Args, defaults, args)
    with runs.open_run("qt", args, plain, IGNORE, source=source, target=target) as run:
        if run.result:
            return run.result
        data, *norm = merge(source, target, args.run.device)
        if args.drop_ends:
            data = drop_ends(data, args.K)
        pool = junctions(args, data, source, target) if args.diagnostics else {}
        # Seeding comes after that, so that measuring does not change any random number.
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        nets = build(args, data.states.shape[1], data.actions.shape[1], args.run.device)
        run.begin(nets, diagnostics=[], normaliser=[x.tolist() for x in norm])
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets, norm, args, args.guided != "never"))
        run.limit = 10 * float(data.rewards.abs().amax()) / (1 - args.gamma)
        run.remedy = "--lr or --eta"
        for step in run.steps("policy", args.updates, folder="."):
            logs = update(nets, data, args, step)
            logs["charts/learning_rate"] = learning_rate(step, args)
            run.log(step, logs)
            if pool and step % max(1, args.updates // 20) == 0:
                found = {name: junction_metrics(nets, data, part) for name, part in pool.items()}
                run.diagnosed(step, found)
            if run.evaluation_due(step):
                last = args.guided == "last" and step in run.last
                found = evaluate(nets, norm, args, last or args.guided == "always")
                found["critics"] = check_critics(nets, data, args.gamma)
                run.evaluated(step, found, guided_score=found["guided_score"])
        return run.finish()


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
