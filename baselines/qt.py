"""Q-learning Decision Transformer (QT): a Decision Transformer whose actions also please a pair of critics.

    python baselines/qt.py --quick --data embedded                  two minutes on a laptop
    python baselines/qt.py --env hopper --shift morph --seed 1      one task
    python baselines/qt.py --env hopper --shift morph --eval-only   its policy once more

Paper: Hu et al., "Q-value Regularized Transformer for Offline Reinforcement Learning", ICML 2024, arXiv 2405.17098.
Official code: https://github.com/charleshsc/QT. Differences from it:

    1  Two datasets. Half of a batch are windows of the source, half of the target; --merge concat draws from the
       concatenation. States are normalised with the statistics of both together. Settings by task follow the source;
       ant, which the official code does not know, has walker2d's.
    2  The score is that of the Transformer's own action for one return, the expert reference of the target robot's
       score. The official inference, one of 50 candidates drawn by the critics, is reported beside it (`guided_score`
       in result.json, at the last three evaluations or by --guided), with these changes: the critics' own guess of the
       return is scaled as the other returns are, and where 50 is no multiple of the number of returns, no candidate
       has a random one.
    3  The policy after the last update is reported; official: the best of all evaluations. In runs with fewer updates
       than the official ones, target critics and target policy follow faster.
    4  The target policy acts without dropout; official: with it, for it is never set to evaluation.
    5  Padding is 0 after the normalisation and seen by nobody; official: 0 before it. No reward embedding, which the
       official network has and does not use.
    6  Same numbers with less work: both critics in one product, targets by a recursion backwards in time, and no last
       action token, which nothing reads.

Shapes: B windows in a batch, K steps in a window, W width, T = 3K - 1 tokens (R_1, s_1, a_1, R_2, ..., R_K, s_K).
"""

import copy
import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

# The project's folder: so that this file, started from anywhere, finds dynashift.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynashift import make_batch, runs
from dynashift.datasets import Dataset, load_task
from dynashift.envs import TIME_LIMIT
from dynashift.errors import UserError, one_line_errors
from dynashift.scores import REFERENCES, normalized_score

# --------------------------------------------------------------------------------------------- arguments

# The official run.sh, by robot and source data. HalfCheetah medium-expert: ten iterations of 10,000 updates; all others
# are stopped after 101 of 500 iterations of 1,000.
TASKS = {
    ("halfcheetah", "medium"): dict(eta=5.0, clip_grad=15.0, K=5),
    ("halfcheetah", "medium-replay"): dict(eta=5.0, clip_grad=15.0, K=5),
    ("halfcheetah", "medium-expert"): dict(eta=0.4, clip_grad=15.0, updates=100_000, iteration=10_000, period=10),
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
RETURNS = dict(hopper=(3600.0, 1800.0), halfcheetah=(12000.0, 9000.0, 6000.0), walker2d=(5000.0, 4000.0, 2500.0))
RETURNS["ant"] = RETURNS["walker2d"]
QUICK = dict(source_size=100_000, layers=2, heads=2, width=64, hidden=128, batch=64, K=5, updates=3_000)
QUICK |= dict(eval_every=1_500, log_every=100, save_every=1_000, guided="never")


@dataclass(frozen=True)
class Args(runs.TaskArgs):
    # The flags of the task and of the run are those of runs.TaskArgs; here come the others.
    guided: Literal["always", "last", "never"] = "last"
    """evaluate critic-guided actions too, as the official code does: each time, the last three times, or never"""
    diagnostics: bool = False
    """measure jumps at stitch junctions, twenty times during training (TAF-DT paper, Fig. fig:jumps)"""
    reference: Path | None = None
    """with --diagnostics: folder of a finished taf_dt run of this task, whose V, Q and gate all methods share"""

    # Transformer
    merge: Literal["half", "concat"] = "half"
    """half of each batch from the source and half from the target, or all from the two put together"""
    drop_ends: bool = False
    """no window begins in the last K steps of an episode; official for hopper"""
    return_target: float | None = None
    """R_1: the return asked for; unless given, the expert reference of the target robot's score"""
    K: int = 20
    """context length K; 5 for halfcheetah medium and medium-replay"""
    batch: int = 256
    """windows in a batch"""
    layers: int = 4
    """Transformer layers"""
    heads: int = 4
    """attention heads"""
    width: int = 256
    """embedding dimension"""
    dropout: float = 0.1
    """dropout on embeddings, attention and residuals"""
    decay: float = 1e-4
    """L2 penalty on the policy"""
    state_loss: float = 1.0
    """weight of the next-state prediction beside the action loss, in the code's behaviour cloning term"""

    # critics
    eta: float | None = None
    """weight eta of the Q term in the policy's loss, by robot and source data"""
    gamma: float = 0.99
    """discount gamma of the K-step target"""
    tau: float = 0.005
    """target critics take this much of the critics in an update; more in runs shorter than the official one"""
    hidden: int = 256
    """width of the three hidden layers of a critic"""
    ema_decay: float = 0.995
    """the target policy keeps this much of itself in an update; less in runs shorter than the official one"""
    ema_every: int = 5
    """updates between two of the target policy"""
    ema_start: int = 1_000
    """updates before the first of the target policy; fewer in runs shorter than the official one"""
    ema_copy: bool = False
    """the target policy becomes a copy of the policy at ema_start; official: it is the random initial one until then"""

    # optimisation
    lr: float = 3e-4
    """learning rate of policy and critics"""
    clip_grad: float | None = None
    """largest norm of the gradients of policy and of critics, by robot"""
    updates: int = 101_000
    """updates"""
    iteration: int = 1_000
    """updates of one iteration, in which the learning rate is constant"""
    period: int = 500
    """iterations in which the learning rate would fall to 0 along a cosine"""

    # critic-guided inference
    guided_returns: tuple[float, ...] | None = None
    """returns asked for by the candidates; unless given, the official ones of the robot"""
    candidates: int = 50
    """candidate actions in a step"""
    guided_noise: float = 0.1
    """standard deviation of the noise on the candidates' last return-to-go, in thousands"""


IGNORE = runs.IGNORE | {"reference"}  # it has no effect on the policy


def defaults(args: Args) -> Args:
    """What Args would be for this task and --quick if nothing else were given."""
    values = {"return_target": REFERENCES[args.env, args.shift][1], "guided_returns": RETURNS[args.env]}
    values |= TASKS.get((args.env, args.source), TASKS[args.env, "medium"])  # your own file: as medium
    official = values.get("updates", Args.updates)
    values |= QUICK if args.quick else {}
    share = runs.budget_share(args, values, official)
    values |= {"tau": runs.averaging_rate(Args.tau, share), "ema_start": round(share * Args.ema_start)}
    values["ema_decay"] = 1 - runs.averaging_rate(1 - Args.ema_decay, share)
    return Args(**values | runs.task_of(args))


def resolve(args: Args) -> Args:
    """Refuse what cannot be, and name the device."""
    runs.check_args(args, "layers heads")
    if args.batch < 2 or args.width < 1 or args.width % args.heads:
        raise UserError(f"--batch {args.batch} must be at least 2, --width {args.width} a multiple of --heads")
    if not 0 <= args.dropout < 1 or not 0 <= args.gamma < 1 or not args.lr > 0 or not args.clip_grad > 0:
        raise UserError("--dropout and --gamma lie between 0 and 1, --lr and --clip-grad are positive")
    if args.K < 2 or min(args.hidden, args.ema_every, args.iteration, args.period, args.candidates) < 1:
        raise UserError("--K is at least 2; --hidden, --ema-every, --iteration, --period, --candidates at least 1")
    return dataclasses.replace(args, device=str(runs.pick_device(args.device)))


# -------------------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """Source rows, then target rows, all on the training device: N transitions in the order of time."""

    states: Tensor  # [N, d_s] normalised
    actions: Tensor  # [N, d_a]
    rewards: Tensor  # [N]
    terminal: Tensor  # [N] bool, the robot failed
    tokens: Tensor  # [N] return-to-go in thousands: this step's reward and all that come after it in the episode
    steps: Tensor  # [N] int, step within the episode
    left: Tensor  # [N] int, steps from here to the episode's end, this one included
    starts_s: Tensor  # [N_s] int, rows where a source window may begin
    starts_t: Tensor  # [N_t] int, the same of the target


class Batch(NamedTuple):
    states: Tensor  # [B, K, d_s]
    actions: Tensor  # [B, K, d_a]
    rewards: Tensor  # [B, K]
    terminal: Tensor  # [B, K] bool
    tokens: Tensor  # [B, K]
    steps: Tensor  # [B, K] int
    valid: Tensor  # [B, K] bool, false on padding


def merge(source: Dataset, target: Dataset, device) -> tuple[Data, np.ndarray, np.ndarray]:
    """Both datasets, mean and standard deviation of their states."""
    obs = np.concatenate([source.observations, target.observations])
    mu, sd = obs.mean(0, dtype=np.float64), obs.std(0, dtype=np.float64)
    to_go = []
    for d in (source, target):
        for rewards in np.split(d.rewards.astype(np.float64), d.starts[1:]):
            to_go.append(rewards[::-1].cumsum()[::-1] / 1000)
    steps = np.minimum(np.concatenate([source.steps, target.steps]), TIME_LIMIT - 1)
    left = np.concatenate([np.repeat(d.lengths, d.lengths) - d.steps for d in (source, target)])

    def tensor(x, dtype=torch.float32):
        return torch.as_tensor(np.ascontiguousarray(x)).to(device, dtype)

    def both(key):
        return np.concatenate([getattr(source, key), getattr(target, key)])

    rows = torch.arange(len(obs), device=device)
    data = Data(
        tensor(normalise(obs, mu, sd)), tensor(both("actions")), tensor(both("rewards")),
        tensor(both("terminals"), torch.bool), tensor(np.concatenate(to_go)), tensor(steps, torch.long),
        tensor(left, torch.long), rows[: len(source)], rows[len(source) :],
    )  # fmt: skip
    return data, mu, sd


def drop_ends(data: Data, K: int) -> Data:
    """The same, but no window begins in the last K steps of an episode."""
    starts = [rows[data.left[rows] > K] for rows in (data.starts_s, data.starts_t)]
    if not all(map(len, starts)):
        raise UserError(f"no episode of source or target is longer than K = {K}; use --no-drop-ends")
    return data._replace(starts_s=starts[0], starts_t=starts[1])


def normalise(states: np.ndarray, mu: np.ndarray, sd: np.ndarray) -> np.ndarray:
    return ((states - mu) / (sd + 1e-6)).astype(np.float32)


def sample(data: Data, args: Args) -> Batch:
    """Windows, uniformly over their first steps: index arithmetic on the device, nothing of it in Python."""
    half = args.batch // 2
    if args.merge == "half":
        parts = [(data.starts_s, half), (data.starts_t, args.batch - half)]
    else:
        parts = [(torch.cat([data.starts_s, data.starts_t]), args.batch)]
    starts = [rows[torch.randint(len(rows), (size,), device=rows.device)] for rows, size in parts]
    return windows(data, torch.cat(starts), args.K)


def windows(data: Data, starts: Tensor, K: int) -> Batch:
    """The K steps that begin at `starts` [B], padded on the left with zeros where the episode ends before."""
    missing = (K - data.left[starts]).clamp(min=0)  # [B]
    offset = torch.arange(K, device=starts.device) - missing[:, None]  # [B, K], negative on padding
    return gather(data, starts[:, None] + offset.clamp(min=0), offset >= 0)


def gather(data: Data, rows: Tensor, valid: Tensor) -> Batch:
    """rows, valid [B, K]"""
    wide = valid[..., None]
    return Batch(
        data.states[rows] * wide, data.actions[rows] * wide, data.rewards[rows] * valid, data.terminal[rows] & valid,
        data.tokens[rows] * valid, data.steps[rows] * valid, valid,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- networks


class Critics(nn.Module):
    """Q_1 and Q_2: (s, a) -> hidden x 3 -> 1 with Mish, both in one product a layer."""

    def __init__(self, d_in: int, hidden: int):
        super().__init__()
        self.W, self.b = nn.ParameterList(), nn.ParameterList()
        for n_in, n_out in ((d_in, hidden), (hidden, hidden), (hidden, hidden), (hidden, 1)):
            bound = n_in**-0.5  # as nn.Linear begins
            self.W.append(torch.empty(2, n_in, n_out).uniform_(-bound, bound))
            self.b.append(torch.empty(2, 1, n_out).uniform_(-bound, bound))

    def forward(self, s: Tensor, a: Tensor) -> Tensor:
        """[..., d_s], [..., d_a] -> [2, ...]"""
        x = torch.cat([s, a], -1).view(-1, self.W[0].shape[1]).expand(2, -1, -1)  # [2, n, d_in]
        for W, b in zip(self.W[:-1], self.b[:-1], strict=True):
            x = F.mish(torch.baddbmm(b, x, W))
        return torch.baddbmm(self.b[-1], x, self.W[-1]).view(2, *s.shape[:-1])


class Block(nn.Module):
    """A layer of GPT-2: attention and a two-layer network, each on normalised input and added to it."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [B, T, W], mask [B, 1, T, T] -> [B, T, W]"""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)  # [B, T, W] each
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))  # [B, heads, T, W / heads]
        h = F.scaled_dot_product_attention(q, k, v, mask, self.dropout.p if self.training else 0.0)
        x = x + self.dropout(self.out(h.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(self.up(self.norm2(x)).relu()))


class Policy(nn.Module):
    """a_t, given R_1, s_1, a_1, ..., R_t, s_t, and s_{t+1}, given also a_t"""

    def __init__(self, d_s: int, d_a: int, args: Args):
        super().__init__()
        W = args.width
        self.embed_c, self.embed_s, self.embed_a = nn.Linear(1, W), nn.Linear(d_s, W), nn.Linear(d_a, W)
        self.embed_t = nn.Embedding(TIME_LIMIT, W)  # of the step within the episode; there is no other position
        self.norm_in, self.norm_out, self.dropout = nn.LayerNorm(W), nn.LayerNorm(W), nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(W, args.heads, args.dropout) for _ in range(args.layers))
        self.action, self.next_state = nn.Linear(W, d_a), nn.Linear(W, d_s)

    def forward(self, tokens, states, actions, steps, valid, only_last: bool = False) -> tuple[Tensor, Tensor | None]:
        """tokens, steps, valid [B, K], states [B, K, d_s], actions [B, K, d_a] (the last is not looked at)
        -> actions [B, K, d_a] and next states [B, K - 1, d_s]; or, if only the last is wanted, [B, 1, d_a]"""
        t = self.embed_t(steps)  # [B, K, W]
        c, s, a = self.embed_c(tokens[..., None]) + t, self.embed_s(states) + t, self.embed_a(actions) + t
        x = torch.stack([c, s, a], 2).flatten(1, 2)[:, :-1]  # [B, T, W]: step by step, not kind by kind
        T = x.shape[1]
        # A token sees itself and all valid ones before. Padding sees itself too, or its attention would be 0 / 0.
        ones = torch.ones(T, T, dtype=torch.bool, device=x.device)
        mask = ones.tril() & valid.repeat_interleave(3, 1)[:, None, None, :-1] | ones.tril().triu()  # [B, 1, T, T]
        x = self.dropout(self.norm_in(x))
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm_out(x)
        if only_last:
            return self.action(x[:, -1:]).tanh(), None
        return self.action(x[:, 1::3]).tanh(), self.next_state(x[:, 2::3])  # read at s_t and at a_t


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """Networks and optimisers: all that a checkpoint holds."""
    nets = {"policy": Policy(d_s, d_a, args).to(device), "critics": Critics(d_s + d_a, args.hidden).to(device)}
    options = {"lr": args.lr, "fused": torch.device(device).type != "meta"}
    adams = {"adam_policy": torch.optim.Adam(nets["policy"].parameters(), weight_decay=args.decay, **options)}
    adams["adam_critics"] = torch.optim.Adam(nets["critics"].parameters(), **options)
    bars = {f"{name}_bar": copy.deepcopy(net).eval().requires_grad_(False) for name, net in nets.items()}
    return nets | bars | adams


# ------------------------------------------------------------------------------------- losses and update


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """x, valid [B, K]"""
    assert x.shape == valid.shape, (x.shape, valid.shape)  # [B] against [B, 1] would give a [B, B]
    return (x * valid).sum() / valid.sum()


def masked_mse(x: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """Mean squared error over valid steps and entries. x, y [B, K, d], valid [B, K]"""
    assert x.shape == y.shape, (x.shape, y.shape)
    return masked_mean((x - y).square().mean(-1), valid)


def q_target(r: Tensor, terminal: Tensor, q_last: Tensor, gamma: float) -> Tensor:
    """r, terminal [B, K], q_last [B]: the target critics at s_K with the target policy's action -> [B, K]

    y_K = q_last, 0 if the robot failed in that step, whose reward is left out; before, y_t = r_t + gamma y_{t+1}.
    """
    y = [q_last * ~terminal[:, -1]]
    for t in reversed(range(r.shape[1] - 1)):
        assert y[0].shape == r[:, t].shape, (y[0].shape, r.shape)
        y.insert(0, r[:, t] + gamma * y[0])
    return torch.stack(y, 1)


def critic_loss(q: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """q [2, B, K], y, valid [B, K]. The last step, whose target is the critics themselves, does not count."""
    return sum(masked_mean((one - y).square()[:, :-1], valid[:, :-1]) for one in q)


def q_term(q: Tensor, valid: Tensor) -> Tensor:
    """q [2, B, K] of the policy's actions: minus the mean of one critic, chosen at random, in units of the other's."""
    one = torch.randint(2, (1,), device=q.device)
    mine, other = q.index_select(0, one)[0], q.index_select(0, 1 - one)[0]
    return -masked_mean(mine, valid) / masked_mean(other.abs(), valid).detach()


def policy_loss(nets: dict, b: Batch, args: Args) -> tuple[Tensor, dict]:
    pi, s_next = nets["policy"](b.tokens, b.states, b.actions, b.steps, b.valid)  # [B, K, d_a], [B, K - 1, d_s]
    losses = {"action": masked_mse(b.actions, pi, b.valid)}
    losses["state"] = masked_mse(b.states[:, 1:], s_next, b.valid[:, :-1])
    q = nets["critics"](b.states, pi)  # [2, B, K]
    losses |= {"q_term": q_term(q, b.valid), "q_policy": masked_mean(q.amin(0), b.valid)}
    return losses["action"] + args.state_loss * losses["state"] + args.eta * losses["q_term"], losses


def learning_rate(step: int, args: Args) -> float:
    """Of update `step`, counted from 1."""
    return args.lr * 0.5 * (1 + math.cos(math.pi * ((step - 1) // args.iteration) / args.period))


def descend_clipped(optimizer, loss: Tensor, clip: float) -> Tensor:
    """One step down, along gradients of at most this norm; returns their norm before. They are computed for this
    optimiser's parameters alone."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    return norm


@torch.no_grad()
def move(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """slow := (1 - rate) slow + rate fast"""
    torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), rate)


def update(nets: dict, data: Data, args: Args, step: int) -> dict:
    b = sample(data, args)
    for name in ("adam_policy", "adam_critics"):
        nets[name].param_groups[0]["lr"] = learning_rate(step, args)
    with torch.no_grad():
        a_last, _ = nets["policy_bar"](b.tokens, b.states, b.actions, b.steps, b.valid, only_last=True)  # [B, 1, d_a]
        q_last = nets["critics_bar"](b.states[:, -1], a_last[:, 0]).amin(0)  # [B]
        y = q_target(b.rewards, b.terminal, q_last, args.gamma)  # [B, K]
    q = nets["critics"](b.states, b.actions)  # [2, B, K]
    loss = critic_loss(q, y, b.valid)
    logs = {"losses/critic": loss, "charts/q_mean": masked_mean(q.mean(0), b.valid)}
    logs |= {"charts/q_largest": q.abs().amax(), "charts/q_target_mean": masked_mean(y, b.valid)}
    logs["charts/grad_norm_critics"] = descend_clipped(nets["adam_critics"], loss, args.clip_grad)

    loss, terms = policy_loss(nets, b, args)
    logs |= {"losses/policy": loss, "charts/q_policy": terms.pop("q_policy")}
    del terms["q_term"]  # in units of the other critic's size: near -1 wherever Q is positive
    logs |= {f"losses/{name}": term for name, term in terms.items()}
    logs["charts/grad_norm"] = descend_clipped(nets["adam_policy"], loss, args.clip_grad)
    if step == args.ema_start and args.ema_copy:
        move(nets["policy_bar"], nets["policy"], 1.0)
    elif step > args.ema_start and step % args.ema_every == 0:
        move(nets["policy_bar"], nets["policy"], 1 - args.ema_decay)
    move(nets["critics_bar"], nets["critics"], args.tau)
    return logs


# -------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(nets: dict, norm: tuple, args: Args, guided: bool = False) -> dict:
    """Episodes in lockstep in the target's simulator, one forward pass a step for all."""
    policy, n, K = nets["policy"].eval(), args.eval_episodes, args.K
    seed, device = 10_000 * args.seed, policy.action.weight.device
    rng = torch.Generator(device).manual_seed(seed)  # its own, so that evaluating changes nothing in training
    batch = make_batch(args.env, args.shift, n)
    obs, ended = batch.reset(seed), np.zeros(n, bool)
    returns, lengths = np.zeros(n), np.zeros(n, int)
    S = torch.zeros(n, K, obs.shape[1], device=device)  # rolling buffers, zeros on the left: states,
    A = torch.zeros(n, K, batch.act_dim, device=device)  # actions (the last is not yet known),
    R, T = torch.zeros(n, K, device=device), torch.zeros(n, K, dtype=torch.long, device=device)  # to go, steps
    valid = torch.zeros(n, K, dtype=torch.bool, device=device)
    while not ended.all():
        # What is still to be had before this step's reward is known: as in training, where it includes that reward.
        to_go = (args.return_target - returns).astype(np.float32) / 1000
        new = normalise(obs, *norm), to_go, np.minimum(lengths, TIME_LIMIT - 1)
        S, R, T = (
            torch.cat([x[:, 1:], torch.as_tensor(y, device=device)[:, None]], 1)
            for x, y in zip((S, R, T), new, strict=True)
        )
        valid = torch.cat([valid[:, 1:], valid.new_ones(n, 1)], 1)
        if guided:
            a = guided_action(nets, R, S, A, T, valid, args, rng)  # [n, 1, d_a]
        else:
            a, _ = policy(R, S, A, T, valid, only_last=True)
        A = torch.cat([A[:, 1:-1], a, torch.zeros_like(a)], 1)
        obs, reward, terminated, truncated = batch.step(a[:, 0].cpu().numpy())
        returns += reward  # 0 where the episode has ended
        lengths += ~ended
        ended = terminated | truncated
    batch.close()
    policy.train()
    score = float(normalized_score(args.env, args.shift, returns.mean()))
    return dict(returns=returns.tolist(), lengths=lengths.tolist(), score=score)


def guided_action(nets: dict, R, S, A, T, valid, args: Args, rng) -> Tensor:
    """The official inference: candidates ask for several returns, all but the first few with noise on the last token,
    one for what the critics expect; one is drawn by the softmax of the target critics. [n, K, ...] -> [n, 1, d_a]"""
    n, C, m = len(R), args.candidates, len(args.guided_returns)
    # Histories of other returns differ from this one by a constant, for they lose the same rewards.
    other = torch.tensor(args.guided_returns, device=R.device)[torch.arange(C) * m // C] - args.return_target  # [C]
    tokens = R[:, None] + other[:, None] / 1000 * valid[:, None]  # [n, C, K]
    noise = args.guided_noise * torch.randn(n, C, generator=rng, device=R.device)
    tokens[:, m:, -1] += noise[:, m:]
    before = R[:, -2] - R[:, -1]  # [n] the last reward, in thousands
    expected = nets["critics_bar"](S[:, -2], A[:, -2]).amin(0) / 1000 - before
    tokens[:, -1, -1] = torch.where(valid[:, -2], expected, tokens[:, -1, -1])
    S, A, T, valid = (x.repeat_interleave(C, 0) for x in (S, A, T, valid))
    a = nets["policy"](tokens.flatten(0, 1), S, A, T, valid, only_last=True)[0][:, 0]  # [n C, d_a]
    q = nets["critics_bar"](S[:, -1], a).amin(0).view(n, C)
    drawn = torch.multinomial(q.softmax(1), 1, generator=rng)  # [n, 1]
    return a.view(n, C, -1).gather(1, drawn[..., None].expand(-1, -1, a.shape[-1]))


def junctions(args: Args, data: Data, source: Dataset, target: Dataset) -> dict:
    """Windows that change domain in the middle, and as many that do not; with --reference, what its critics need."""
    from taf_dt import reference_pool  # here alone: windows and critics have to be those of the other methods

    return reference_pool(data.states, data.left, args.K, args.reference, source, target)


@torch.no_grad()
def junction_metrics(nets: dict, data: Data, part: dict) -> dict:
    """J_a, J_Q and TD: jump of the policy's action and of its value at the junction, TD error around it. J_Q_own: by
    QT's own critics."""
    rows = part["rows"]  # [P, K]
    b, t = gather(data, rows, torch.ones_like(rows, dtype=torch.bool)), math.ceil(rows.shape[1] / 2)
    pi, _ = nets["policy"].eval()(b.tokens, b.states, b.actions, b.steps, b.valid)  # [P, K, d_a]
    nets["policy"].train()
    own = nets["critics"](b.states, pi).amin(0)  # [P, K]
    found = {"J_a": (pi[:, t] - pi[:, t - 1]).norm(dim=-1).mean().item()}
    found["J_Q_own"] = (own[:, t] - own[:, t - 1]).abs().mean().item()
    if "Q" in part:
        q = part["Q"](part["s"], pi).mean(0)  # [P, K]
        found |= {"J_Q": (q[:, t] - q[:, t - 1]).abs().mean().item(), "TD": part["TD"]}
    return found


# ---------------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    source, target = load_task(args, one_is_enough=True)
    with runs.open_run("qt", args, defaults(args), IGNORE, source=source, target=target) as run:
        if run.result:
            return run.result
        data, *norm = merge(source, target, args.device)
        data = drop_ends(data, args.K) if args.drop_ends else data
        pool = junctions(args, data, source, target) if args.diagnostics else {}
        runs.seed_everything(args.seed, args.torch_deterministic)  # after that: measuring changes no random number
        nets = build(args, data.states.shape[1], data.actions.shape[1], args.device)
        run.begin(nets, diagnostics=[], normaliser=[x.tolist() for x in norm])
        if args.eval_only:
            e = evaluate(nets, norm, args)
            if args.guided != "never":
                e["guided_score"] = evaluate(nets, norm, args, guided=True)["score"]
            return run.only_evaluated(e)
        run.limit, run.remedy = 10 * float(data.rewards.abs().amax()) / (1 - args.gamma), "--lr or --eta"
        for step in run.steps("policy", args.updates, folder="."):
            run.log(step, update(nets, data, args, step) | {"charts/learning_rate": learning_rate(step, args)})
            if pool and step % max(1, args.updates // 20) == 0:
                run.diagnosed(step, {name: junction_metrics(nets, data, part) for name, part in pool.items()})
            if run.evaluation_due(step):
                e = evaluate(nets, norm, args) | {"guided_score": None}
                if args.guided == "always" or (args.guided == "last" and step in run.last):
                    e["guided_score"] = evaluate(nets, norm, args, guided=True)["score"]
                run.evaluated(step, e, guided_score=e["guided_score"])
        return run.finish()


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
