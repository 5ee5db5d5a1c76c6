"""How far clones get from states of the data:

    python -m studies.clone runs/bc/*/*      (in the folder in which the runs were started)

For each finished run of baselines/bc.py: the reward per step over 500 steps (0 after a fall), from
the simulator's own reset and from states of the target data at steps 0, 50, 100 and 200 of their
episodes, beside the data's own reward from there on. A clone that fails only from the reset cannot
copy the beginning; one that fails from everywhere cannot copy the gait.
"""

from pathlib import Path

import numpy as np
import torch
import tyro

from baselines import bc
from dynashift import make_batch, runs
from dynashift.datasets import load_target
from dynashift.errors import one_line_errors
from experiments import scripts

LENGTH = 500


def play(policy, mu, sd, batch, obs) -> float:
    """Mean reward per step over LENGTH steps from these observations of the batch."""
    total = 0.0
    for _ in range(LENGTH):
        with torch.no_grad():
            action = policy(torch.as_tensor(bc.normalise(obs, mu, sd))).tanh()
        obs, reward, *_ = batch.step(action.numpy())
        total += reward.mean()
    return total / LENGTH


def begins(target, step: int, n: int) -> np.ndarray:
    """n rows of the data, `step` steps into its episodes or just after. Their episodes go on for
    LENGTH steps, and their velocities are not clipped, so that the simulator's state follows from
    the observation."""
    long = target.starts[target.lengths >= step + LENGTH + 50]
    rows = (long + step + np.arange(50)[:, None]).ravel()
    return rows[np.abs(target.observations[rows]).max(1) < 10][:n]


def line(folder: Path, steps=(0, 50, 100, 200), n: int = 10) -> str:
    stored = scripts.from_json(runs.read_json(folder / "args.json"))
    args = runs.compose(bc.Args, **stored)
    target = load_target(args.task)
    mu = target.observations.mean(0, dtype=np.float64)
    sd = target.observations.std(0, dtype=np.float64)
    policy = bc.mlp(target.observations.shape[1], target.actions.shape[1], args.hidden)
    policy.load_state_dict(runs.read_checkpoint(folder / "ckpt.pt")["parts"]["policy"])
    batch = make_batch(args.task.env, args.task.shift, n, workers=1)
    reset = play(policy, mu, sd, batch, batch.reset(10_000 * args.run.seed))
    cells = [f"{args.task.env} {args.task.shift}", str(args.run.seed), f"{reset:.2f}"]
    for step in steps:
        rows = begins(target, step, n)
        own = np.mean([target.rewards[row : row + LENGTH].mean() for row in rows])
        ours = play(policy, mu, sd, batch, batch.set_observations(target.observations[rows]))
        cells.append(f"{ours:.2f} ({own:.2f})")
    batch.close()
    return f"| {' | '.join(cells)} |"


def main(folders: tyro.conf.Positional[list[Path]]) -> None:
    head = ["task", "seed", "from the reset"]
    head += ["step 0 of the data", "step 50", "step 100", "step 200"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|", flush=True)
    for folder in folders:
        if (folder / "result.json").exists():
            print(line(folder), flush=True)


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
