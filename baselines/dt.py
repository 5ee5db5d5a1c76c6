"""Decision Transformer (DT): a causal Transformer that is told the return to reach, on source and target data together.

    python baselines/dt.py --quick --data embedded                  two minutes on a laptop
    python baselines/dt.py --env hopper --shift morph --seed 1      one task
    python baselines/dt.py --env hopper --shift morph --eval-only   its policy once more

Paper: Chen et al., "Decision Transformer: Reinforcement Learning via Sequence Modeling", 2021, arXiv 2106.01345.
Official code: https://github.com/kzl/decision-transformer, folder gym. Differences from it:

    1  Two datasets. Half of a batch are windows of the source, half of the target; --merge concat draws from the
       concatenation. States are normalised with the statistics of both together, in training and evaluation.
    2  The return asked for is the target robot's expert reference, by which scores are normalised. The official one,
       which can be above all that the target robot reaches, is evaluated beside it (`second_score`); no best of two.
    3  The policy after the last update is reported, over 10 episodes; official: 100 episodes, every iteration printed.
    4  Padding is 0 everywhere and seen by nobody; official: -10 for actions in training, 0 in evaluation.
    5  Seeded, and resumable to the bit.
    6  The last action token, which no state token sees, is left out: the same numbers with less work.

Shapes: B windows in a batch, K steps in a window, W width, T = 3K - 1 tokens (R_1, s_1, a_1, R_2, ..., R_K, s_K).
"""

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

OFFICIAL_RETURN = dict(hopper=3600, halfcheetah=12000, walker2d=5000, ant=5000)  # ant: of the TAF-DT release
QUICK = dict(source_size=100_000, layers=2, width=64, warmup=300, lr=1e-3, updates=4_000, eval_every=2_000)
QUICK |= dict(K=10, log_every=100, save_every=1_000)


@dataclass(frozen=True)
class Args(runs.TaskArgs):
    # The flags of the task and of the run are those of runs.TaskArgs; here come the others.
    diagnostics: bool = False
    """measure jumps at stitch junctions, twenty times during training (TAF-DT paper, Fig. fig:jumps)"""
    reference: Path | None = None
    """with --diagnostics: folder of a finished taf_dt run of this task, whose V, Q and gate all methods share"""

    # Decision Transformer; "Gym table" is the paper's table of hyperparameters for OpenAI Gym
    merge: Literal["half", "concat"] = "half"
    """half of each batch from the source and half from the target, or all from the two put together"""
    return_target: float | None = None
    """R_1: the return asked for; unless given, the expert reference of the target robot's score"""
    second_target: float | None = None
    """another R_1, logged as second_score; unless given, the official code's first one"""
    K: int = 20
    """context length K, Gym table"""
    batch: int = 64
    """windows in a batch, Gym table"""
    layers: int = 3
    """Transformer layers, Gym table"""
    heads: int = 1
    """attention heads, Gym table"""
    width: int = 128
    """embedding dimension, Gym table"""
    dropout: float = 0.1
    """dropout on embeddings, attention and residuals, Gym table"""
    lr: float = 1e-4
    """learning rate, Gym table"""
    warmup: int = 10_000
    """updates in which the learning rate grows linearly from 0, official code"""
    decay: float = 1e-4
    """AdamW's weight decay, Gym table"""
    clip_grad: float = 0.25
    """largest norm of the gradient, Gym table"""
    updates: int = 100_000
    """updates: the official code's 10 iterations of 10^4"""


IGNORE = runs.IGNORE | {"reference"}  # it has no effect on the policy


def defaults(args: Args) -> Args:
    """What Args would be for this task and --quick if nothing else were given."""
    values = {"return_target": REFERENCES[args.env, args.shift][1], "second_target": OFFICIAL_RETURN[args.env]}
    values |= QUICK if args.quick else {}
    return Args(**values | runs.task_of(args))


def resolve(args: Args) -> Args:
    """Refuse what cannot be, and name the device."""
    runs.check_args(args, "K layers heads")
    if args.batch < 2 or args.width < 1 or args.width % args.heads:
        raise UserError(f"--batch {args.batch} must be at least 2, --width {args.width} a multiple of --heads")
    if not 0 <= args.dropout < 1 or not args.lr > 0 or not args.clip_grad > 0:
        raise UserError("--dropout lies between 0 and 1, --lr and --clip-grad are positive")
    if args.diagnostics and args.K < 2:
        raise UserError("--diagnostics needs K of at least 2")
    return dataclasses.replace(args, device=str(runs.pick_device(args.device)))


# -------------------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """Source rows, then target rows, all on the training device: N transitions in the order of time."""

    states: Tensor  # [N, d_s] normalised
    actions: Tensor  # [N, d_a]
    tokens: Tensor  # [N] return-to-go in thousands: this step's reward and all that come after it in the episode
    steps: Tensor  # [N] int, step within the episode
    left: Tensor  # [N] int, steps from here to the episode's end, this one included
    starts_s: Tensor  # [N_s] int, rows where a source window may begin
    starts_t: Tensor  # [N_t] int, the same of the target


class Batch(NamedTuple):
    states: Tensor  # [B, K, d_s]
    actions: Tensor  # [B, K, d_a]
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

    rows = torch.arange(len(obs), device=device)
    data = Data(
        tensor(normalise(obs, mu, sd)), tensor(np.concatenate([source.actions, target.actions])),
        tensor(np.concatenate(to_go)), tensor(steps, torch.long), tensor(left, torch.long),
        rows[: len(source)], rows[len(source) :],
    )  # fmt: skip
    return data, mu, sd


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
    states, actions = data.states[rows] * wide, data.actions[rows] * wide
    return Batch(states, actions, data.tokens[rows] * valid, data.steps[rows] * valid, valid)


# ----------------------------------------------------------------------------------------------- network


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
    """pi(a_t | R_1, s_1, a_1, ..., R_t, s_t)"""

    def __init__(self, d_s: int, d_a: int, args: Args):
        super().__init__()
        W = args.width
        self.embed_c, self.embed_s, self.embed_a = nn.Linear(1, W), nn.Linear(d_s, W), nn.Linear(d_a, W)
        self.embed_t = nn.Embedding(TIME_LIMIT, W)  # of the step within the episode; there is no other position
        self.norm_in, self.norm_out, self.dropout = nn.LayerNorm(W), nn.LayerNorm(W), nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(W, args.heads, args.dropout) for _ in range(args.layers))
        self.action = nn.Linear(W, d_a)

    def forward(self, tokens, states, actions, steps, valid, only_last: bool = False) -> Tensor:
        """tokens, steps, valid [B, K], states [B, K, d_s], actions [B, K, d_a] (the last is not looked at)
        -> actions [B, K, d_a], or [B, 1, d_a] if only the last is wanted"""
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
        x = x[:, -1:] if only_last else x[:, 1::3]  # [B, 1 or K, W], the tokens s_t
        return self.action(self.norm_out(x)).tanh()


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """Network and optimiser: all that a checkpoint holds."""
    policy = Policy(d_s, d_a, args).to(device)
    fused = torch.device(device).type != "meta"
    adam = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.decay, fused=fused)
    return {"policy": policy, "adam": adam}


# -------------------------------------------------------------------------------------- loss and update


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """x, valid [B, K]"""
    assert x.shape == valid.shape, (x.shape, valid.shape)  # [B] against [B, 1] would give a [B, B]
    return (x * valid).sum() / valid.sum()


def masked_mse(x: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """Mean squared error over valid steps and entries. x, y [B, K, d], valid [B, K]"""
    assert x.shape == y.shape, (x.shape, y.shape)
    return masked_mean((x - y).square().mean(-1), valid)


def learning_rate(step: int, args: Args) -> float:
    """Of update `step`, counted from 1."""
    return args.lr * min(1.0, step / max(1, args.warmup))


def update(nets: dict, data: Data, args: Args, step: int) -> dict:
    b = sample(data, args)
    pi = nets["policy"](b.tokens, b.states, b.actions, b.steps, b.valid)  # [B, K, d_a]
    loss = masked_mse(b.actions, pi, b.valid)
    nets["adam"].param_groups[0]["lr"] = learning_rate(step, args)
    nets["adam"].zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(nets["policy"].parameters(), args.clip_grad)
    nets["adam"].step()
    return {"losses/action": loss, "charts/grad_norm": norm}


# -------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(nets: dict, norm: tuple, args: Args, targets: list[float]) -> list[dict]:
    """Episodes in lockstep in the target's simulator, the same ones for every return asked for."""
    policy, n, K = nets["policy"].eval(), args.eval_episodes, args.K
    first, N, device = 10_000 * args.seed, n * len(targets), policy.action.weight.device
    batch = make_batch(args.env, args.shift, N)
    obs, ended = batch.reset([first + i % n for i in range(N)]), np.zeros(N, bool)
    asked, returns, lengths = np.repeat(targets, n), np.zeros(N), np.zeros(N, int)
    S = torch.zeros(N, K, obs.shape[1], device=device)  # rolling buffers, zeros on the left: states,
    A = torch.zeros(N, K, batch.act_dim, device=device)  # actions (the last is not yet known),
    R, T = torch.zeros(N, K, device=device), torch.zeros(N, K, dtype=torch.long, device=device)  # to go, steps
    valid = torch.zeros(N, K, dtype=torch.bool, device=device)
    while not ended.all():
        # What is still to be had before this step's reward is known: as in training, where it includes that reward.
        new = normalise(obs, *norm), (asked - returns).astype(np.float32) / 1000, np.minimum(lengths, TIME_LIMIT - 1)
        S, R, T = (
            torch.cat([x[:, 1:], torch.as_tensor(y, device=device)[:, None]], 1)
            for x, y in zip((S, R, T), new, strict=True)
        )
        valid = torch.cat([valid[:, 1:], valid.new_ones(N, 1)], 1)
        a = policy(R, S, A, T, valid, only_last=True)  # [N, 1, d_a]
        A = torch.cat([A[:, 1:-1], a, torch.zeros_like(a)], 1) if K > 1 else A
        obs, reward, terminated, truncated = batch.step(a[:, 0].cpu().numpy())
        returns += reward  # 0 where the episode has ended
        lengths += ~ended
        ended = terminated | truncated
    batch.close()
    policy.train()
    parts = [(returns[i : i + n], lengths[i : i + n]) for i in range(0, N, n)]
    return [
        dict(returns=r.tolist(), lengths=k.tolist(), score=float(normalized_score(args.env, args.shift, r.mean())))
        for r, k in parts
    ]


def junctions(args: Args, data: Data, source: Dataset, target: Dataset) -> dict:
    """Windows that change domain in the middle, and as many that do not; with --reference, what its critics need."""
    from taf_dt import reference_pool  # here alone: windows and critics have to be those of the other methods

    return reference_pool(data.states, data.left, args.K, args.reference, source, target)


@torch.no_grad()
def junction_metrics(nets: dict, data: Data, part: dict) -> dict:
    """J_a, J_Q and TD: jump of the policy's action and of its value at the junction, TD error around it."""
    rows = part["rows"]  # [P, K]
    b, t = gather(data, rows, torch.ones_like(rows, dtype=torch.bool)), math.ceil(rows.shape[1] / 2)
    pi = nets["policy"].eval()(b.tokens, b.states, b.actions, b.steps, b.valid)  # [P, K, d_a]
    nets["policy"].train()
    found = {"J_a": (pi[:, t] - pi[:, t - 1]).norm(dim=-1).mean().item()}
    if "Q" in part:
        q = part["Q"](part["s"], pi).mean(0)  # [P, K]
        found |= {"J_Q": (q[:, t] - q[:, t - 1]).abs().mean().item(), "TD": part["TD"]}
    return found


# ---------------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    source, target = load_task(args, one_is_enough=True)
    with runs.open_run("dt", args, defaults(args), IGNORE, source=source, target=target) as run:
        if run.result:
            return run.result
        data, *norm = merge(source, target, args.device)
        pool = junctions(args, data, source, target) if args.diagnostics else {}
        runs.seed_everything(args.seed, args.torch_deterministic)  # after that: measuring changes no random number
        nets = build(args, data.states.shape[1], data.actions.shape[1], args.device)
        run.begin(nets, diagnostics=[], normaliser=[x.tolist() for x in norm])
        if args.eval_only:
            return run.only_evaluated(evaluate(nets, norm, args, [args.return_target])[0])
        for step in run.steps("policy", args.updates, folder="."):
            run.log(step, update(nets, data, args, step) | {"charts/learning_rate": learning_rate(step, args)})
            if pool and step % max(1, args.updates // 20) == 0:
                run.diagnosed(step, {name: junction_metrics(nets, data, part) for name, part in pool.items()})
            if run.evaluation_due(step):
                e, second = evaluate(nets, norm, args, [args.return_target, args.second_target])
                run.evaluated(step, e | {"second_score": second["score"]}, second_score=second["score"])
        return run.finish()


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
