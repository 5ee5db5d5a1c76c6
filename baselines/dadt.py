"""DADT: a Decision Transformer that also predicts the next state, so that its tokens know the dynamics.

    python baselines/dadt.py --quick --data embedded                  two minutes on a laptop
    python baselines/dadt.py --env hopper --shift morph --seed 1      one task
    python baselines/dadt.py --env hopper --shift morph --eval-only   its policy once more

Paper: Kim et al., "Dynamics-Augmented Decision Transformer for Offline Dynamics Generalization", NeurIPS workshop 2022.
Official code: none was found, and of the paper no more than its abstract: a return-conditioned Transformer with
representation learning by next-state prediction, for unseen dynamics. The TAF-DT paper says of its own version no more
than that its tokens know of the dynamics and nothing is filtered. SO THIS FILE IS OUR READING, in one sentence: the
Decision Transformer of baselines/dt.py, all else equal, plus a linear head at each action token a_t that predicts
s_{t+1}, with weight 1. Differences from official code can therefore not be listed; choices can:

    1  What dt.py says of merging, normalising, returns asked for, padding and evaluation holds here too.
    2  s_{t+1} is the true next state, normalised as the inputs are, also at the window's last step.
    3  The last action token, which dt.py leaves out, is needed here: its next state is predicted.

Shapes: B windows in a batch, K steps in a window, W width, T = 3K tokens (R_1, s_1, a_1, R_2, ..., s_K, a_K).
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

    # next-state prediction
    state_weight: float = 1.0
    """weight of the next-state loss beside the action loss; our choice, 0 is DT"""

    # Decision Transformer; "Gym table" is that paper's table of hyperparameters for OpenAI Gym
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
    next_states: Tensor  # [N, d_s] normalised; true ones, also where an episode ends
    tokens: Tensor  # [N] return-to-go in thousands: this step's reward and all that come after it in the episode
    steps: Tensor  # [N] int, step within the episode
    left: Tensor  # [N] int, steps from here to the episode's end, this one included
    starts_s: Tensor  # [N_s] int, rows where a source window may begin
    starts_t: Tensor  # [N_t] int, the same of the target


class Batch(NamedTuple):
    states: Tensor  # [B, K, d_s]
    actions: Tensor  # [B, K, d_a]
    next_states: Tensor  # [B, K, d_s]
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

    rows, after = torch.arange(len(obs), device=device), [source.next_observations, target.next_observations]
    data = Data(
        tensor(normalise(obs, mu, sd)), tensor(np.concatenate([source.actions, target.actions])),
        tensor(normalise(np.concatenate(after), mu, sd)), tensor(np.concatenate(to_go)), tensor(steps, torch.long),
        tensor(left, torch.long),
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
    states, actions, after = data.states[rows] * wide, data.actions[rows] * wide, data.next_states[rows] * wide
    return Batch(states, actions, after, data.tokens[rows] * valid, data.steps[rows] * valid, valid)


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
        """tokens, steps, valid [B, K], states [B, K, d_s], actions [B, K, d_a] -> actions [B, K, d_a], next states
        [B, K, d_s]; or, if only the last is wanted, [B, 1, d_a], for which the last of `actions` is not looked at"""
        t = self.embed_t(steps)  # [B, K, W]
        c, s, a = self.embed_c(tokens[..., None]) + t, self.embed_s(states) + t, self.embed_a(actions) + t
        T = 3 * steps.shape[1] - only_last
        x = torch.stack([c, s, a], 2).flatten(1, 2)[:, :T]  # [B, T, W]: step by step, not kind by kind
        # A token sees itself and all valid ones before. Padding sees itself too, or its attention would be 0 / 0.
        ones = torch.ones(T, T, dtype=torch.bool, device=x.device)
        mask = ones.tril() & valid.repeat_interleave(3, 1)[:, None, None, :T] | ones.tril().triu()  # [B, 1, T, T]
        x = self.dropout(self.norm_in(x))
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm_out(x)
        if only_last:
            return self.action(x[:, -1:]).tanh(), None
        return self.action(x[:, 1::3]).tanh(), self.next_state(x[:, 2::3])  # read at s_t and at a_t


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
    pi, predicted = nets["policy"](b.tokens, b.states, b.actions, b.steps, b.valid)  # [B, K, d_a], [B, K, d_s]
    losses = {"losses/action": masked_mse(b.actions, pi, b.valid)}
    losses["losses/state"] = masked_mse(b.next_states, predicted, b.valid)
    loss = losses["losses/action"] + args.state_weight * losses["losses/state"]
    nets["adam"].param_groups[0]["lr"] = learning_rate(step, args)
    nets["adam"].zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(nets["policy"].parameters(), args.clip_grad)
    nets["adam"].step()
    return losses | {"losses/policy": loss, "charts/grad_norm": norm}


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
        a, _ = policy(R, S, A, T, valid, only_last=True)  # [N, 1, d_a]
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
    pi, _ = nets["policy"].eval()(b.tokens, b.states, b.actions, b.steps, b.valid)  # [P, K, d_a]
    nets["policy"].train()
    found = {"J_a": (pi[:, t] - pi[:, t - 1]).norm(dim=-1).mean().item()}
    if "Q" in part:
        q = part["Q"](part["s"], pi).mean(0)  # [P, K]
        found |= {"J_Q": (q[:, t] - q[:, t - 1]).abs().mean().item(), "TD": part["TD"]}
    return found


# ---------------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    source, target = load_task(args)
    with runs.open_run("dadt", args, defaults(args), IGNORE, source=source, target=target) as run:
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
