"""Whether a state tells which policy acted, in target data of two policies:

    python -m studies.modes data/target/*_medium_expert.hdf5

Such a file holds two episodes of the medium policy and then three of the expert one. A behaviour
model needs its latents only where both act in the same states. Every third episode is held out,
from the second on: one of each policy. All columns are of held-out steps, means over seeds 1 to
--seeds:

    right    share of steps whose policy a classifier of the state names correctly
    error    squared error of a regression of the action on the state, over the actions' variance
    told     the same for a regression that is told the policy as well
"""

from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from baselines import bc
from dynashift.datasets import read_hdf5
from dynashift.download import task_of
from dynashift.errors import UserError, one_line_errors
from dynashift.files import progress_bar
from dynashift.optimise import gradient_step
from studies.behaviour import split

MEDIUM_EPISODES = 2


def fitted(x: Tensor, y: Tensor, loss, updates: int, seed: int) -> nn.Module:
    """A small network from x [N, d] to y [N, k]."""
    torch.manual_seed(seed)
    net = bc.mlp(x.shape[1], y.shape[1], 128)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in progress_bar(range(updates), desc=f"seed {seed}", unit="update"):
        rows = torch.randint(len(x), (256,))
        gradient_step(adam, loss(net(x[rows]), y[rows]))
    return net


def measure(s: Tensor, a: Tensor, expert: Tensor, held: Tensor, updates: int, seed: int) -> list:
    """The three columns. s [N, d_s], a [N, d_a]; expert and held [N]: who acted, and the split."""
    label = expert.float()[:, None]
    told = torch.cat([s, label], 1)
    judge = fitted(s[~held], label[~held], F.binary_cross_entropy_with_logits, updates, seed)
    numbers = []
    for x in (s, told):
        net = fitted(x[~held], a[~held], F.mse_loss, updates, seed)
        with torch.no_grad():
            error = (net(x[held]) - a[held]).square().mean() / a[held].var(0).mean()
        numbers.append(float(error))
    with torch.no_grad():
        right = ((judge(s[held]) > 0) == expert[held, None]).float().mean()
    return [float(right), *numbers]


def main(
    files: tyro.conf.Positional[tuple[Path, ...]], updates: int = 2_000, seeds: int = 3
) -> None:
    """
    Args:
        files: target data of two policies, with the task in the name.
        updates: of each network.
        seeds: networks of each kind.
    """
    print("| file | right | error | told |")
    print("|---|---|---|---|", flush=True)
    for path in files:
        env, shift, _ = task_of(path) or ("", "", "")
        if not shift or "medium_expert" not in path.stem:
            raise UserError(f"{path}: not target data of two policies, by its name")
        target = read_hdf5(path, env, shift)
        s, a, held = split(target)
        episode = torch.arange(len(target.lengths))
        expert = (episode >= MEDIUM_EPISODES).repeat_interleave(torch.as_tensor(target.lengths))
        found = [measure(s, a, expert, held, updates, seed) for seed in range(1, seeds + 1)]
        cells = [f"{x:.3f}" for x in torch.tensor(found).mean(0).tolist()]
        print(f"| {' | '.join([path.stem, *cells])} |", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
