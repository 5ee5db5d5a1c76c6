"""BC: behaviour cloning on the target data alone. The control: what is gained by source data is gained over this.

    python baselines/bc.py --quick --data embedded                       one minute on a laptop
    python baselines/bc.py --env hopper --shift morph --seed 1           one task, as in the tables
    python baselines/bc.py --source-share 0.5                            half of each batch from the source

Paper: none of its own; Pomerleau, "ALVINN", NeurIPS 1988, is the usual reference. No official code is followed. A plain
network of two layers, the mean squared error of its actions, and states normalised by the target data's mean and
standard deviation, clipped at ten of them. With --source-share, a second control: what source data add without any
correction. It clones both datasets, or with share 1 the source alone; the states are normalised as before.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# The package `dynashift` lies in the folder above, from wherever this script is started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import torch
from torch import Tensor, nn

from dynashift import runs
from dynashift.datasets import Dataset, TaskArgs, load_target, load_task
from dynashift.errors import UserError, one_line_errors
from dynashift.runs import Flat, RunArgs

# --------------------------------------------------------------------------------------------- arguments

# A small run that ends in a minute on two cores: a smaller network, fewer updates.
QUICK = dict(
    batch=128,
    hidden=128,
    lr=1e-3,
    updates=20_000,
    eval_every=5_000,
    save_every=5_000,
    log_every=250,
    source_size=100_000,
)


@dataclass(frozen=True)
class Args:
    task: Flat[TaskArgs] = TaskArgs()
    run: Flat[RunArgs] = RunArgs(save_every=10_000)

    # behaviour cloning
    updates: int = 100_000
    """updates of the policy"""
    batch: int = 256
    """transitions in a batch"""
    source_share: float = 0.0
    """share of each batch that is drawn from the source data: 0 clones the target alone, 1 the source alone"""
    lr: float = 3e-4
    """learning rate"""
    hidden: int = 256
    """width of the two hidden layers"""


def ignore(args: Args) -> set[str]:
    """Arguments that are not part of the run folder's name."""
    uses_source = args.source_share > 0 or args.task.target == "none"
    return runs.IGNORE | (set() if uses_source else {"source_size"})  # which has no effect then


def defaults(args: Args) -> dict:
    """What this task and --quick set where the command line says nothing."""
    return QUICK if args.run.quick else {}


def resolve(args: Args) -> Args:
    """Refuse what cannot be, and name the device."""
    runs.check_args(args, "batch hidden lr")
    if (args.task.source_size or 1) < 1:
        raise UserError(f"--source-size {args.task.source_size} must be positive")
    if not 0 <= args.source_share <= 1:
        raise UserError(f"--source-share is a share of a batch, from 0 to 1, not {args.source_share}")
    if 0 < args.source_share < 1 and not 0 < source_batch(args) < args.batch:
        raise UserError(f"--source-share {args.source_share} of --batch {args.batch} leaves one dataset no transition")
    if args.source_share and args.task.target == "none":
        raise UserError("--source-share is a share beside the target's; leave it out with --target none")
    return runs.replace(args, device=str(runs.pick_device(args.run.device)))


# -------------------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """All N steps of a dataset, on the training device."""

    states: Tensor  # [N, d_s] normalised
    actions: Tensor  # [N, d_a]


class Batch(NamedTuple):
    states: Tensor  # [B, d_s]
    actions: Tensor  # [B, d_a]


def on_device(data: Dataset, mu: np.ndarray, sd: np.ndarray, device) -> Data:
    columns = normalise(data.observations, mu, sd), data.actions
    return Data(*(torch.as_tensor(column, device=device) for column in columns))


def normalise(states: np.ndarray, mu: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Clipped, for under kinematic shift a joint hardly moves in the data, and a policy that moves it would see
    hundreds of standard deviations."""
    return np.clip((states - mu) / (sd + 1e-8), -10, 10).astype(np.float32)


def sample(data: Data, size: int) -> Batch:
    """Uniformly: drawn and gathered on the device."""
    rows = torch.randint(len(data.states), (size,), device=data.states.device)
    return Batch(*(column[rows] for column in data))


def source_batch(args: Args) -> int:
    return round(args.source_share * args.batch)


def sample_both(source: Data | None, target: Data, args: Args) -> Batch:
    """A batch of which --source-share is the source's, first, and the rest the target's."""
    B_s = source_batch(args)
    parts = [sample(data, size) for data, size in ((source, B_s), (target, args.batch - B_s)) if size]
    return Batch(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


# ----------------------------------------------------------------------------------- network, loss, update


def mlp(d_in: int, d_out: int, hidden: int) -> nn.Sequential:
    layers = nn.Linear(d_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, d_out)
    return nn.Sequential(*layers)


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """Network and optimiser: all that a checkpoint holds."""
    policy = mlp(d_s, d_a, args.hidden).to(device)
    adam = torch.optim.Adam(policy.parameters(), lr=args.lr, fused=torch.device(device).type != "meta")
    return {"policy": policy, "adam": adam}


def bc_loss(a: Tensor, pi: Tensor) -> Tensor:
    """Mean over batch and entries of the squared error. a, pi [B, d_a]"""
    assert a.shape == pi.shape, (a.shape, pi.shape)
    return (a - pi).square().mean()


def update(nets: dict, target: Data, args: Args, source: Data | None = None) -> dict:
    """One step. Nothing here waits for the device."""
    b = sample_both(source, target, args)
    loss = bc_loss(b.actions, nets["policy"](b.states).tanh())
    nets["adam"].zero_grad()
    loss.backward()
    nets["adam"].step()
    return {"losses/bc": loss}


# --------------------------------------------------------------------------------------------- evaluation


def evaluate(nets: dict, mu: np.ndarray, sd: np.ndarray, args: Args) -> dict:
    def act(obs, *_):  # [n, d_s] -> [n, d_a]
        return nets["policy"](torch.as_tensor(normalise(obs, mu, sd), device=args.run.device)).tanh().cpu().numpy()

    return runs.play(args, act)


# ----------------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    if args.source_share:
        data = dict(zip(("source", "target"), load_task(args.task), strict=True))
    else:
        data = {"target": load_target(args.task)}
    with runs.open_run("bc", args, runs.plain(Args, defaults, args), ignore(args), **data) as run:
        if run.result:
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        states = data["target"].observations
        mu, sd = states.mean(0, dtype=np.float64), states.std(0, dtype=np.float64)
        batches = {role: on_device(x, mu, sd, args.run.device) for role, x in data.items()}
        nets = build(args, states.shape[1], data["target"].actions.shape[1], args.run.device)
        run.begin(nets)
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets, mu, sd, args))
        for step in run.steps("bc", args.updates):
            run.log(step, update(nets, args=args, **batches) | {"charts/learning_rate": args.lr})
            if run.evaluation_due(step):
                run.evaluated(step, evaluate(nets, mu, sd, args))
        return run.finish()


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
