"""Make data: roll a stored policy out into a dataset.

    python collect.py rollout --policy POLICY.npz --env hopper --shift morph --steps 5000 --out mine.hdf5
    python taf_dt.py --env hopper --shift morph --target mine.hdf5

A policy is an .npz of this project, or a D4RL file, which holds the policy that made it.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from dynashift.datasets import read_hdf5, write_hdf5
from dynashift.errors import UserError, one_line_errors
from dynashift.policies import load_policy
from dynashift.policies import rollout as roll_out

Env = Literal["halfcheetah", "hopper", "walker2d", "ant"]
Shift = Literal["none", "gravity", "kinematic", "morph"]


def rollout(
    policy: Path,
    env: Env,
    out: Path,
    shift: Shift = "none",
    steps: int = 5000,
    seed: int = 0,
    deterministic: bool = False,
    workers: int | None = None,
) -> None:
    """Roll out a stored policy into a file in D4RL's HDF5 layout.

    Args:
        policy: an .npz of this project, or a D4RL file with metadata/policy.
        env: robot.
        out: HDF5 file to write.
        shift: dynamics to roll out in.
        steps: transitions.
        seed: the same seed gives the same data, whatever the number of workers.
        deterministic: take the mean action instead of a sampled one.
        workers: processes; all cores unless told.
    """
    if steps < 1:
        raise UserError(f"--steps must be at least 1, not {steps}")
    if out.exists():
        raise UserError(f"{out} exists already; delete it or choose another --out")
    data = roll_out(load_policy(policy, env), env, shift, steps, seed, not deterministic, workers)
    about = {"env": env, "shift": shift, "seed": seed, "policy": policy.name, "deterministic": deterministic}
    write_hdf5(out, data, "own", about)
    made = read_hdf5(out, env, shift)
    returns, lengths = made.returns[made.complete], made.lengths[made.complete]
    print(f"{out}: {len(made)} transitions, {len(returns)} complete episodes", end="")
    if len(returns) > 1:
        error = returns.std(ddof=1) / np.sqrt(len(returns))
        print(f", return {returns.mean():.0f} +- {error:.0f} (standard error), ", end="")
        print(f"length {lengths.mean():.0f}, normalised score {made.score:.1f}", end="")
    print()


if __name__ == "__main__":
    commands = tyro.extras.SubcommandApp()
    commands.command(rollout)
    with one_line_errors():
        commands.cli()
