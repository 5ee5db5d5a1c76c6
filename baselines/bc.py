"""BC: behaviour cloning on the target data alone, the control that source data have to beat.

    python baselines/bc.py --quick --data embedded                   one minute on a laptop
    python baselines/bc.py --env hopper --shift morph --seed 1       one task, as in the tables
    python baselines/bc.py --source-share 0.5                        half of each batch source data

Paper: none of its own; the usual reference is Pomerleau, "ALVINN", NeurIPS 1988. No official code
is followed. The policy is an MLP with two hidden layers, trained with the mean squared error of its
actions. States are normalised by the mean and standard deviation of what is cloned, and clipped at
ten standard deviations.

--source-share makes it a second control: what do source data add without any correction? It clones
both datasets, or with share 1 the source alone. The target's moments alone, which taf_dt.py uses,
would not do: under a kinematic shift the target hardly moves one joint, and the clip would change
most source states.
"""

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
from torch import Tensor, nn

from dynashift import runs
from dynashift.datasets import Dataset, TaskArgs, load_target, load_task
from dynashift.errors import UserError, one_line_errors
from dynashift.faster import Adam
from dynashift.runs import Flat, Positive, RunArgs

# ------------------------------------------------------------------------------------ arguments

# A small run of a minute on two cores: a smaller network, fewer updates.
QUICK = dict(
    source_size=100_000,  # where source data are used
    batch=128,
    hidden=128,
    lr=1e-3,
    updates=20_000,
    eval_every=5_000,
    save_every=5_000,
    log_every=250,
)


@dataclass(frozen=True)
class Args:
    task: Flat[TaskArgs] = TaskArgs()
    run: Flat[RunArgs] = RunArgs(save_every=10_000)

    # --- behaviour cloning ---
    updates: Positive[int] = 100_000
    """updates of the policy"""
    batch: Positive[int] = 256
    """transitions in a batch"""
    source_share: float = 0.0
    """share of each batch from the source data: 0 clones the target alone, 1 the source alone"""
    lr: Positive[float] = 3e-4
    """learning rate"""
    hidden: Positive[int] = 256
    """width of the two hidden layers"""


def ignore(args: Args) -> set[str]:
    """Arguments that are not part of the run folder's name."""
    uses_source = args.source_share > 0 or args.task.target == "none"
    # Without source data, their size has no effect.
    return runs.IGNORE if uses_source else runs.IGNORE | {"source_size"}


def defaults(args: Args) -> dict:
    """Values for this task and --quick where the command line gives none."""
    return QUICK if args.run.quick else {}


def resolve(args: Args) -> Args:
    """Validate the arguments and choose the device."""
    runs.check_args(args)
    if not 0 <= args.source_share <= 1:
        raise UserError(
            f"--source-share is a share of a batch, from 0 to 1, not {args.source_share}"
        )
    if 0 < args.source_share < 1 and not 0 < source_count(args) < args.batch:
        raise UserError(
            f"--source-share {args.source_share} of --batch {args.batch} "
            "leaves one dataset no transition"
        )
    if args.source_share and args.task.target == "none":
        raise UserError("--source-share needs target data as well; leave it out with --target none")
    return runs.replace(args, device=str(runs.pick_device(args.run.device)))


# ----------------------------------------------------------------------------------------- data


class Data(NamedTuple):
    """All N transitions of one dataset on the training device."""

    states: Tensor  # [N, d_s] normalised
    actions: Tensor  # [N, d_a]


class Batch(NamedTuple):
    states: Tensor  # [B, d_s]
    actions: Tensor  # [B, d_a]


def on_device(data: Dataset, norm: tuple, device) -> Data:
    states = normalise(data.observations, *norm)
    return Data(
        states=torch.as_tensor(states, device=device),
        actions=torch.as_tensor(data.actions, device=device),
    )


def state_moments(data: dict[str, Dataset], share: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [d_s] of the states in a batch, `share` of which are source."""
    shares = {"source": share, "target": 1 - share}
    mean = {role: x.observations.mean(0, dtype=np.float64) for role, x in data.items()}
    variance = {role: x.observations.var(0, dtype=np.float64) for role, x in data.items()}
    mu = sum(shares[role] * mean[role] for role in data)
    var = sum(shares[role] * (variance[role] + (mean[role] - mu) ** 2) for role in data)
    return mu, np.sqrt(var)


def normalise(states: np.ndarray, mu: np.ndarray, sd: np.ndarray) -> np.ndarray:
    # Under kinematic shift a joint hardly moves in the data. Without clipping, a policy that moves
    # it would see states hundreds of standard deviations away.
    return np.clip((states - mu) / (sd + 1e-8), -10, 10).astype(np.float32)


def sample(data: Data, size: int) -> Batch:
    """Draw transitions uniformly, on the device."""
    rows = torch.randint(len(data.states), (size,), device=data.states.device)
    return Batch(*(column[rows] for column in data))


def source_count(args: Args) -> int:
    """Source transitions in a batch."""
    return round(args.source_share * args.batch)


def sample_both(data: dict[str, Data], args: Args) -> Batch:
    """A batch with --source-share of its transitions from the source, then those of the target."""
    B_s = source_count(args)
    sizes = {"source": B_s, "target": args.batch - B_s}
    parts = [sample(data[role], size) for role, size in sizes.items() if size]
    return Batch(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


# ----------------------------------------------------------------------- network, loss, update


def mlp(d_in: int, d_out: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(d_in, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, d_out),
    )


def build(args: Args, d_s: int, d_a: int, device) -> dict:
    """The network and its optimizer, which is everything a checkpoint holds."""
    policy = mlp(d_s, d_a, args.hidden).to(device)
    fused = torch.device(device).type != "meta"
    adam = Adam(policy.parameters(), lr=args.lr, fused=fused)
    return {"policy": policy, "adam": adam}


def bc_loss(a: Tensor, pi: Tensor) -> Tensor:
    """Squared error, averaged over the batch and the entries of an action. a, pi [B, d_a]"""
    assert a.shape == pi.shape, (a.shape, pi.shape)
    return (a - pi).square().mean()


def update(nets: dict, data: dict[str, Data], args: Args, step: int) -> dict:
    """One update of the policy. Nothing here waits for the device."""
    batch = sample_both(data, args)
    pi = nets["policy"](batch.states).tanh()  # [B, d_a]
    loss = bc_loss(batch.actions, pi)
    nets["adam"].zero_grad()
    loss.backward()
    nets["adam"].step()
    return {"losses/bc": loss}


# ----------------------------------------------------------------------------------- evaluation


def evaluate(nets: dict, norm: tuple, args: Args) -> dict:
    def act(obs: np.ndarray, *_) -> np.ndarray:  # [n, d_s] -> [n, d_a]
        states = torch.as_tensor(normalise(obs, *norm), device=args.run.device)
        return nets["policy"](states).tanh().cpu().numpy()

    return runs.play(args, act)


# ------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    args = resolve(args)
    if args.source_share:
        source, target = load_task(args.task)
        data = {"source": source, "target": target}
    else:
        target = load_target(args.task)
        data = {"target": target}
    with runs.open_run("bc", args, runs.plain(Args, defaults, args), ignore(args), **data) as run:
        if run.result:
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        norm = state_moments(data, args.source_share)
        rows = {role: on_device(x, norm, args.run.device) for role, x in data.items()}
        d_s = target.observations.shape[1]
        d_a = target.actions.shape[1]
        nets = build(args, d_s, d_a, args.run.device)
        run.begin(nets)
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets, norm, args))
        for step in run.steps("bc", args.updates):
            logs = update(nets, rows, args, step)
            logs["charts/learning_rate"] = args.lr
            run.log(step, logs)
            if run.evaluation_due(step):
                run.evaluated(step, evaluate(nets, norm, args))
        return run.finish()


def main() -> None:
    train(runs.read_args(Args, defaults, __doc__))


if __name__ == "__main__":
    with one_line_errors():
        main()
