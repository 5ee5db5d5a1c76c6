"""Make data: train a behaviour policy, and roll out a stored one into a dataset.

    python collect.py train --env hopper --shift morph
    python collect.py rollout --policy POLICY.npz --env hopper --out x.hdf5

`train` (pip install -r requirements-data.txt) runs CrossQ (Bhatt et al., ICLR 2024) from SBX: soft
actor-critic whose critics have batch normalisation and need no target networks. Of all algorithms
that were tried it is the fastest on a CPU core. It ends by storing the policies of each level in
dynashift/policies, from which `dynashift.datasets` generates embedded data.

`rollout` takes an .npz of this project, or a D4RL file, which contains the policy that made it.
"""

from pathlib import Path

from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import tyro

from dynashift.checksums import write_hdf5
from dynashift.datasets import read_hdf5
from dynashift.download import PUBLISHED
from dynashift.errors import UserError, one_line_errors
from dynashift.files import check_folder
from dynashift.policies import load_policy
from dynashift.policies import rollout as roll_out
from experiments.training import Env, Shift, train


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
        workers: processes; all cores by default.
    """
    if steps < 1:
        raise UserError(f"--steps must be at least 1, not {steps}")
    if out.name in PUBLISHED:
        raise UserError(f"{out.name} is the name of a published file; choose another --out")
    if out.exists():
        raise UserError(f"{out} exists already; delete it or choose another --out")
    check_folder(out.parent)
    about = {"env": env, "shift": shift, "seed": seed}
    about |= {"policy": policy.name, "deterministic": deterministic}
    data = roll_out(load_policy(policy, env), env, shift, steps, seed, not deterministic, workers)
    # D4RL's own policy reproduces D4RL's data up to the noise.
    write_hdf5(out, data, "regenerated-d4rl" if policy.suffix == ".hdf5" else "own", about)
    made = read_hdf5(out, env, shift)
    returns, lengths = made.returns[made.complete], made.lengths[made.complete]
    words = [f"{out}: {len(made)} transitions", f"{len(returns)} complete episodes"]
    if len(returns) > 1:
        error = returns.std(ddof=1) / np.sqrt(len(returns))
        words.append(f"return {returns.mean():.0f} +- {error:.0f} (standard error)")
        words.append(f"length {lengths.mean():.0f}")
        words.append(f"normalised score {made.score:.1f}")
    print(", ".join(words))


def main() -> None:
    commands = tyro.extras.SubcommandApp()
    commands.command(train)
    commands.command(rollout)
    with one_line_errors():
        commands.cli(prog="collect.py", description=__doc__)


if __name__ == "__main__":
    main()
