"""BC: behaviour cloning on the target data alone. The control: what is gained by source data is gained over this.

    python baselines/bc.py --quick                                       one minute on a laptop, embedded data
    python baselines/bc.py --env hopper --shift morph --seed 1           one task, as in the tables

Paper: none of its own; Pomerleau, "ALVINN", NeurIPS 1988, is the usual reference. No official code is followed. A plain
network of two layers, the mean squared error of its actions, and states normalised by the target data's mean and
standard deviation, clipped at ten of them.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor, nn

# The package `dynashift` lies in the folder above, from wherever this script is started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dynashift import make_batch, runs
from dynashift.datasets import load
from dynashift.errors import UserError, one_line_errors
from dynashift.scores import normalized_score

# --------------------------------------------------------------------------------------------- arguments

# A small run that ends in a minute on two cores: a smaller network, fewer updates.
QUICK = dict(batch=128, hidden=128, lr=1e-3, updates=20_000, eval_every=5_000, save_every=5_000, log_every=250)


@dataclass(frozen=True)
class Args:
    # the task
    env: Literal["halfcheetah", "hopper", "walker2d", "ant"] = "hopper"
    """robot"""
    shift: Literal["gravity", "kinematic", "morph"] = "morph"
    """how the target's dynamics differ"""
    source: str = "medium"
    """not looked at, for cloning sees the target data alone: only a part of the run folder's name"""
    target: str = "medium"
    """target data: medium, medium-expert, expert, or a path ending in .hdf5"""
    data: Literal["auto", "d4rl", "embedded"] = "auto"
    """published data, generated data, or whichever can be had"""
    data_dir: Path | None = None
    """where the published files lie"""
    source_size: int | None = None
    """not looked at; here because the other scripts have it"""

    # the run
    out: Path = Path("runs")
    """folder of the runs"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one"""
    quick: bool = False
    """a small run of a minute: a smaller network, fewer updates; a flag given beside it wins"""
    seed: int = 1
    """of network and batches; evaluation episodes have their own"""
    resume: bool = True
    """go on from the run folder's checkpoint; --no-resume starts anew"""
    eval_only: bool = False
    """evaluate the run folder's last checkpoint again, and nothing else"""
    torch_deterministic: bool = True
    """refuse operations that would not repeat themselves"""
    log_every: int = 500
    """updates between two log entries"""
    save_every: int = 10_000
    """updates between two checkpoints"""
    eval_every: int = 10_000
    """updates between two evaluations; there are three more at 98, 99 and 100 % of the updates"""
    eval_episodes: int = 10
    """episodes of an evaluation"""

    # behaviour cloning
    updates: int = 100_000
    """updates of the policy"""
    batch: int = 256
    """target transitions in a batch"""
    lr: float = 3e-4
    """learning rate"""
    hidden: int = 256
    """width of the two hidden layers"""


TASK_ARGS = {"env", "shift", "source", "target", "seed", "data", "data_dir"}  # in the run folder's path, or its inputs
RUN_ARGS = {"source_size", "out", "device", "resume", "eval_only", "log_every", "save_every"}  # no effect on the result


def defaults(args: Args) -> Args:
    """What Args would be for this task and --quick if nothing else were given."""
    names = ("env", "shift", "source", "target", "seed", "data", "data_dir", "out", "device", "quick")
    return Args(**{**(QUICK if args.quick else {}), **{name: getattr(args, name) for name in names}})


def check(args: Args) -> None:
    positive = ("updates", "batch", "hidden", "lr", "log_every", "save_every", "eval_every", "eval_episodes")
    for name in positive:
        if not getattr(args, name) > 0:
            raise UserError(f"--{name.replace('_', '-')} must be positive, not {getattr(args, name)}")
    if args.seed < 0 or (args.source_size or 1) < 1:
        raise UserError(f"--seed {args.seed} must not be negative, --source-size {args.source_size} be positive")


# -------------------------------------------------------------------------------------------------- data


class Batch(NamedTuple):
    """B steps, or all N of the data."""

    states: Tensor  # [B, d_s] normalised
    actions: Tensor  # [B, d_a]


def normalise(states: np.ndarray, mu: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Clipped, for under kinematic shift a joint hardly moves in the data, and a policy that moves it would see
    hundreds of standard deviations."""
    return np.clip((states - mu) / (sd + 1e-8), -10, 10).astype(np.float32)


def sample(data: Batch, size: int) -> Batch:
    """Uniformly: drawn and gathered on the device."""
    rows = torch.randint(len(data.states), (size,), device=data.states.device)
    return Batch(*(column[rows] for column in data))


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


def update(nets: dict, data: Batch, args: Args) -> dict:
    """One step. Nothing here waits for the device."""
    b = sample(data, args.batch)
    loss = bc_loss(b.actions, nets["policy"](b.states).tanh())
    nets["adam"].zero_grad()
    loss.backward()
    nets["adam"].step()
    return {"losses/bc": loss}


# --------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(nets: dict, mu: np.ndarray, sd: np.ndarray, args: Args, device) -> dict:
    """Episodes in lockstep in the target's simulator, the same ones at every evaluation."""
    n = args.eval_episodes
    batch = make_batch(args.env, args.shift, n)
    obs, ended = batch.reset(10_000 * args.seed), np.zeros(n, bool)
    returns, lengths = np.zeros(n), np.zeros(n, int)
    while not ended.all():
        s = torch.as_tensor(normalise(obs, mu, sd), device=device)  # [n, d_s]
        obs, reward, terminated, truncated = batch.step(nets["policy"](s).tanh().cpu().numpy())
        returns += reward  # 0 after the end
        lengths += ~ended
        ended = terminated | truncated
    batch.close()
    score = float(normalized_score(args.env, args.shift, returns.mean()))
    return {"returns": returns.tolist(), "lengths": lengths.tolist(), "score": score}


def check_finite(values: dict, step: int, folder: Path) -> None:
    """Divergence ends the run, before it is saved."""
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise UserError(
            f"diverged at update {step}: {', '.join(bad)}; the last good checkpoint is kept in {folder}; "
            f"try a lower --lr, or another --seed"
        )


# ----------------------------------------------------------------------------------------------- training


def train(args: Args) -> dict:
    check(args)
    device = runs.pick_device(args.device)
    args = dataclasses.replace(args, device=str(device))
    target = load(args.env, args.shift, "target", args.target, data=args.data, data_dir=args.data_dir)

    names = [Path(quality).stem.replace(":", "_") for quality in (args.source, args.target)]
    kinds = [] if target.kind == "published" else [target.kind]
    task, ignore = "-".join([args.env, args.shift, *names, *kinds]), TASK_ARGS | RUN_ARGS
    plain = dataclasses.asdict(defaults(args)) | {"quick": False}
    folder = runs.run_dir(args.out, "bc", task, args.seed, args, plain, ignore)
    with runs.session(folder, args, ignore, args.resume or args.eval_only) as stop:
        if not args.eval_only and (result := runs.finished(folder, target)):
            return result
        runs.seed_everything(args.seed, args.torch_deterministic)
        runs.reuse_memory()
        mu, sd = target.observations.mean(0, dtype=np.float64), target.observations.std(0, dtype=np.float64)
        columns = normalise(target.observations, mu, sd), target.actions
        data = Batch(*(torch.as_tensor(column, device=device) for column in columns))
        nets = build(args, data.states.shape[1], data.actions.shape[1], device)
        record = {"done": 0, "evaluations": [], "stages": {}, "sha256": [target.sha256]}
        if saved := runs.load_checkpoint(folder / "ckpt.pt", nets):
            if saved["record"]["sha256"] != record["sha256"]:
                raise UserError(f"{folder} was begun with other data; start it anew with --no-resume")
            record = saved["record"]
        elif args.eval_only:
            raise UserError(f"there is no checkpoint in {folder}; run the same command without --eval-only first")
        if args.eval_only:
            e = evaluate(nets, mu, sd, args, device)
            print(f"normalised score {e['score']:.1f}, returns {np.round(e['returns'], 1).tolist()}")
            return {"score": e["score"], "returns": e["returns"]}
        print(", ".join(f"{key}={value}" for key, value in dataclasses.asdict(args).items()))
        print(f"{folder}: {len(target)} target transitions, score {target.score:.1f}")
        lap, writer = runs.stopwatch(record["stages"], device), runs.open_writer(folder / "bc", record["done"])
        last = [round(args.updates * share) for share in (0.98, 0.99, 1)]
        for step in (bar := runs.progress("bc", record["done"], args.updates)):
            logs = update(nets, data, args)
            save = step % args.save_every == 0 or step == args.updates or bool(stop())
            if save or step % args.log_every == 0:
                host = torch.stack([x.detach() for x in logs.values()]).tolist()  # one transfer
                values = dict(zip(logs, host, strict=True)) | {"charts/learning_rate": args.lr}
                check_finite(values, step, folder)
                runs.log(writer, step, values)
                bar.set_postfix({k[7:]: v for k, v in values.items() if k.startswith("losses/")}, refresh=False)
            if step % args.eval_every == 0 or step in last:
                lap("policy")
                e = evaluate(nets, mu, sd, args, device)
                record["evaluations"].append({"step": step, **e})
                spread = {"eval/return_mean": np.mean(e["returns"]), "eval/return_std": np.std(e["returns"], ddof=1)}
                runs.log(writer, step, spread | {"eval/normalized_score": e["score"]})
                print(f"{step} updates: score {e['score']:.1f} (target data {target.score:.1f})", file=sys.stderr)
                lap("evaluation")
            if save:
                record["done"] = step
                lap("policy")
                writer.flush()
                runs.save_checkpoint(folder / "ckpt.pt", {**nets, "record": record})
                if stop():
                    sys.exit(stop())
        writer.close()
        changed = {k: v for k, v in dataclasses.asdict(args).items() if k not in ignore | {"quick"} and v != plain[k]}
        seen = {"target": target.provenance}
        more = {"method": "bc", "changed": changed, "device": device}
        result = runs.write_result(folder, args, record["evaluations"], record["stages"], seen, **more)
    print(folder / "result.json")
    score = result["summaries"]["final"]["score"]
    print(f"normalised score {score:.1f}, the target data's own mean {target.score:.1f}")
    return result


def main() -> None:
    # Read twice: the values of --quick are the defaults under which the other flags are read.
    train(tyro.cli(Args, default=defaults(tyro.cli(Args))))


if __name__ == "__main__":
    with one_line_errors():
        main()
