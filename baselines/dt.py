"""Decision Transformer (DT): a causal Transformer conditioned on the return to reach.

    python baselines/dt.py --quick --data embedded                  two minutes on a laptop
    python baselines/dt.py --env hopper --shift morph --seed 1      one task
    python baselines/dt.py --env hopper --shift morph --eval-only   evaluate its policy again

Paper: Chen et al., "Decision Transformer: Reinforcement Learning via Sequence Modeling", 2021,
arXiv 2106.01345. Official code: https://github.com/kzl/decision-transformer, folder gym.
Differences from it:

    1  There are two datasets. Half of the windows of a batch come from the source and half from the
       target; --merge concat draws from both put together. States are normalised with the
       statistics of both together, in training and evaluation.
    2  The return to ask for is the target robot's expert reference, by which scores are normalised.
       The official return can be more than the target robot is able to reach; it is evaluated as
       well (`second_score`), but the better of the two is not chosen.
    3  The policy after the last update is reported, over 10 episodes. The official code runs 100
       episodes and prints every iteration.
    4  Padding is 0 everywhere and masked. The official code pads actions with -10 in training and 0
       in evaluation.
    5  Runs are seeded and resume bit for bit.
    6  The last action token, which no state token attends to, is left out. The numbers are the
       same, with less work.

Shapes: B windows in a batch, K steps in a window, W embedding width, T = 3K - 1 tokens (R_1, s_1,
a_1, R_2, ..., R_K, s_K).
"""

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

# A small run of two minutes on two cores: less data, a smaller network, fewer updates.
QUICK = dict(
    source_size=100_000,
    K=10,
    layers=2,
    width=64,
    warmup=300,
    lr=1e-3,
    updates=4_000,
    eval_every=2_000,
    log_every=100,
    save_every=1_000,
)


@dataclass(frozen=True)
class Args:
    task: Flat[TaskArgs] = TaskArgs()
    run: Flat[RunArgs] = RunArgs()

    diagnostics: bool = False
    """measure jumps at stitch junctions twenty times during training (TAF-DT, Fig. fig:jumps)"""
    reference: Path | None = None
    """with --diagnostics: folder of a finished taf_dt run of this task, for its V, Q and gate"""

    # --- Decision Transformer; "Gym table" lists the paper's hyperparameters for OpenAI Gym ---
    merge: Literal["half", "concat"] = "half"
    """draw half of each batch from either dataset, or all of it from both put together"""
    return_target: float | None = None
    """R_1, the return to ask for; default: the expert reference of the target robot's score"""
    second_target: float | None = None
    """another R_1, logged as second_score; default: the official code's first one"""
    K: Positive[int] = 20
    """context length K, Gym table"""
    batch: Positive[int] = 64
    """windows in a batch, Gym table"""
    layers: Positive[int] = 3
    """Transformer layers, Gym table"""
    heads: Positive[int] = 1
    """attention heads, Gym table"""
    width: Positive[int] = 128
    """embedding dimension, Gym table"""
    dropout: Share = 0.1
    """dropout on embeddings, attention and residuals, Gym table"""
    lr: Positive[float] = 1e-4
    """learning rate, Gym table"""
    warmup: NotNegative[int] = 10_000
    """updates over which the learning rate grows linearly from 0, official code"""
    decay: NotNegative[float] = 1e-4
    """AdamW's weight decay, Gym table"""
    clip_grad: Positive[float] = 0.25
    """largest norm of the gradient, Gym table"""
    updates: Positive[int] = 100_000
    """updates of the policy: the official code's 10 iterations of 10^4"""


IGNORE = runs.IGNORE | {"reference"}  # it has no effect on the policy


def defaults(args: Args) -> dict:
    """Values for this task and --quick where the command line gives none."""
    first, second = returns_to_ask(args.task)
    values = {"return_target": first, "second_target": second}
    return values | (QUICK if args.run.quick else {})


def resolve(args: Args) -> Args:
    """Validate the arguments and choose the device."""
    runs.check_args(args)
    if args.batch < 2 or args.width % args.heads:
        raise UserError(
            f"--batch {args.batch} must be at least 2, --width {args.width} a multiple of --heads"
        )
    if args.diagnostics and args.K < 2:
        raise UserError("--diagnostics needs --K of at least 2")
    return runs.replace(args, device=str(runs.pick_device(args.run.device)))


# ----------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """All N transitions in temporal order on the training device, the source's first."""

    states: Tensor  # [N, d_s] normalised
    actions: Tensor  # [N, d_a]
    tokens: Tensor  # [N] return-to-go in thousands, this step's reward included
    steps: Tensor  # [N] int, step within the episode
    left: Tensor  # [N] int, steps to the episode's end, this one included
    starts_s: Tensor  # [N_s] int, rows at which a source window may begin
    starts_t: Tensor  # [N_t] int, rows at which a target window may begin


class Batch(NamedTuple):
    states: Tensor  # [B, K, d_s]
    actions: Tensor  # [B, K, d_a]
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
        tokens=tensor(np.concatenate(to_go)),
        steps=tensor(np.minimum(both("steps"), time_limit(target) - 1), torch.long),
        left=tensor(np.concatenate(left), torch.long),
        starts_s=rows[: len(source)],
        starts_t=rows[len(source) :],
    )
    return merged, mu, sd


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
        tokens=data.tokens[rows] * valid,
        steps=data.steps[rows] * valid,
        valid=valid,
    )


# ------------------------------------------------------------------------------------- networks


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
    """pi(a_t | R_1, s_1, a_1, ..., R_t, s_t)"""

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

    def forward(self, tokens, states, actions, steps, valid, only_last: bool = False) -> Tensor:
        """Predicted actions [B, K, d_a], or [B, 1, d_a] with only_last.

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
        x = x[:, -1:] if only_last else x[:, 1::3]  # [B, 1 or K, W], the tokens s_t
        return self.action(self.norm_out(x)).tanh()


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """The network and its optimizer, which is everything a checkpoint holds."""
    policy = Policy(d_s, d_a, args).to(device)
    fused = torch.device(device).type != "meta"
    options = {"weight_decay": args.decay, "decoupled_weight_decay": True}  # which is AdamW
    adam = Adam(policy.parameters(), lr=args.lr, fused=fused, **options)
    return {"policy": policy, "adam": adam}


# ------------------------------------------------------------------------------ loss and update


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """The mean of x over valid steps. x, valid [B, K]"""
    # [B] times [B, 1] would silently broadcast to [B, B]
    assert x.shape == valid.shape, (x.shape, valid.shape)
    return (x * valid).sum() / valid.sum()


def masked_mse(x: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """Mean squared error over valid steps and all entries. x, y [B, K, d]; valid [B, K]"""
    assert x.shape == y.shape, (x.shape, y.shape)
    return masked_mean((x - y).square().mean(-1), valid)


def learning_rate(step: int, args: Args) -> float:
    """Of update `step`, counted from 1."""
    return args.lr * min(1.0, step / max(1, args.warmup))


def update(nets: dict, data: Data, args: Args, step: int) -> dict:
    """One update of the policy. Nothing here waits for the device."""
    batch = sample_windows(data, args)
    pi = nets["policy"](
        batch.tokens, batch.states, batch.actions, batch.steps, batch.valid
    )  # [B, K, d_a]
    loss = masked_mse(batch.actions, pi, batch.valid)
    nets["adam"].param_groups[0]["lr"] = learning_rate(step, args)
    nets["adam"].zero_grad(set_to_none=True)
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(nets["policy"].parameters(), args.clip_grad)
    nets["adam"].step()
    return {"losses/action": loss, "charts/grad_norm": grad_norm}


# ----------------------------------------------------------------------------------- evaluation


def append(history: Tensor, newest) -> Tensor:
    """A history [n, K, ...] without its oldest step and with the newest one, [n, ...]."""
    newest = torch.as_tensor(newest, device=history.device)
    return torch.cat([history[:, 1:], newest[:, None]], 1)


@torch.no_grad()
def evaluate(nets: dict, norm: tuple, args: Args) -> dict:
    """Run the same episodes for both returns to ask for, all in lockstep."""
    policy = nets["policy"].eval()
    device = policy.action.weight.device
    n = args.run.eval_episodes
    N = 2 * n
    K = args.K
    simulators = runs.simulators(args, N)
    obs = simulators.reset([10_000 * args.run.seed + i % n for i in range(N)])
    asked = np.repeat([args.return_target, args.second_target], n)
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
        tokens = append(tokens, (asked - returns).astype(np.float32) / 1000)
        states = append(states, normalise(obs, *norm))
        steps = append(steps, np.minimum(lengths, time_limit(args.task) - 1))
        valid = append(valid, np.ones(N, bool))
        a = policy(tokens, states, actions, steps, valid, only_last=True)  # [N, 1, d_a]
        if K > 1:
            actions = torch.cat([actions[:, 1:-1], a, torch.zeros_like(a)], 1)
        obs, reward, terminated, truncated = simulators.step(a[:, 0].cpu().numpy())
        returns += reward  # 0 once an episode has ended
        lengths += ~ended
        ended = terminated | truncated
    simulators.close()
    policy.train()
    parts = (slice(n), slice(n, N))  # one for each return asked for
    first, second = (runs.scored(args, simulators, returns[i], lengths[i], i) for i in parts)
    return first | {"second_score": second["score"]}


def junctions(args: Args, data: Data, source: Dataset, target: Dataset) -> dict:
    """Windows that change domain in the middle, and as many that do not.

    With --reference they come with the critics of that run, which all methods share.
    """
    from studies.junctions import reference_pool  # only here, because training does not need it

    return reference_pool(data.states, data.left, args.K, args.reference, source, target)


@torch.no_grad()
def junction_metrics(nets: dict, data: Data, part: dict) -> dict:
    """Jump of the action (J_a) and of its value (J_Q) at the junction, TD error around it."""
    rows = part["rows"]  # [P, K]
    t = math.ceil(rows.shape[1] / 2)  # the first step after the junction
    batch = gather(data, rows, torch.ones_like(rows, dtype=torch.bool))
    nets["policy"].eval()
    pi = nets["policy"](
        batch.tokens, batch.states, batch.actions, batch.steps, batch.valid
    )  # [P, K, d_a]
    nets["policy"].train()
    found = {"J_a": (pi[:, t] - pi[:, t - 1]).norm(dim=-1).mean().item()}
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
    with runs.open_run("dt", args, plain, IGNORE, source=source, target=target) as run:
        if run.result:
            return run.result
        data, *norm = merge(source, target, args.run.device)
        pool = junctions(args, data, source, target) if args.diagnostics else {}
        # Seeding comes after that, so that measuring does not change any random number.
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        nets = build(args, data.states.shape[1], data.actions.shape[1], args.run.device)
        run.begin(nets, diagnostics=[], normaliser=[x.tolist() for x in norm])
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets, norm, args))
        for step in run.steps("policy", args.updates, folder="."):
            logs = update(nets, data, args, step)
            logs["charts/learning_rate"] = learning_rate(step, args)
            run.log(step, logs)
            if pool and step % max(1, args.updates // 20) == 0:
                found = {name: junction_metrics(nets, data, part) for name, part in pool.items()}
                run.diagnosed(step, found)
            if run.evaluation_due(step):
                found = evaluate(nets, norm, args)
                run.evaluated(step, found, second_score=found["second_score"])
        return run.finish()


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
