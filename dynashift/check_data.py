"""Will these files work?  python -m dynashift.datasets check OLD.hdf5 NEW.hdf5 [--env Pendulum-v1]

Prints a table of what the files hold and, in plain words, all that is wrong or doubtful, and draws
a figure.
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import tyro
from scipy.spatial.distance import cdist

from dynashift.any_env import LOGS, K, find_spaces, is_own, own_shift, show_bounds
from dynashift.errors import UserError
from dynashift.files import atomic, check_folder
from dynashift.own_data import log_spaces, read_own
from dynashift.transitions import Dataset

SAMPLE = 2000  # states of each file that are compared
COLORS = ("#1f77b4", "#d62728")  # source, target


class Findings(NamedTuple):
    wrong: list[str]  # prevents training
    doubtful: list[str]  # does not, but deserves a look


def main(
    files: tyro.conf.Positional[tuple[str, ...]],
    env: str = LOGS,
    env_kwargs: str = "{}",
    figure: Path = Path("check.png"),
) -> int:
    """Check one file, or a source and a target; the exit status is 1 if they will not work.

    Args:
        files: source and target, or one file: .hdf5, .h5, .npz, or minari:NAME
        env: the Gymnasium id of the files' environment, or one of the four robots
        env_kwargs: arguments of the Gymnasium id in JSON
        figure: where to draw ranges, returns and states
    """
    if not 1 <= len(files) <= 2:
        raise UserError(f"give one file, or a source and a target, not {len(files)}")
    check_folder(figure.parent, "--figure")
    shift = own_shift(env, env_kwargs, None) if is_own(env) else "none"
    datasets, found = read_all(list(files), env, shift)
    print(table(datasets))
    if len(datasets) == 2 and not found.wrong:
        compare(*datasets, found)
    for word, lines in (("wrong", found.wrong), ("look at", found.doubtful)):
        for line in lines:
            print(f"{word + ':':9}{line}")
    if datasets:
        draw(figure, datasets)
        print(f"figure:  {figure}")
    what = "this pair" if len(files) == 2 else "this file"
    print(f"{what} will {'not work' if found.wrong else 'work'} with --env {env}")
    return int(bool(found.wrong))


def read_all(names: list[str], env: str, shift: str) -> tuple[list[Dataset], Findings]:
    """Every file that can be read, and what is wrong with each of them."""
    datasets, found = [], Findings([], [])
    spaces = None
    if env != LOGS:
        spaces = find_spaces(env, shift)
    else:
        try:
            spaces = log_spaces(names)
        except UserError as error:
            found.wrong.append(str(error))
    for name in names:
        try:
            data = read_own(name, env, shift, spaces or log_spaces([name]))
        except UserError as error:
            if str(error) not in found.wrong:
                found.wrong.append(str(error))
            continue
        datasets.append(data)
        look_at(data, found, is_target=name is names[-1])
    if spaces and spaces.bounds:
        text = show_bounds(spaces.bounds)
        found.doubtful.append(f"actions lie in {text} and will be scaled to [-1, 1]")
        used = max((np.abs(data.actions).max() for data in datasets), default=1.0)
        if used < 0.6:
            found.doubtful.append(f"actions use {used:.0%} of that range; are they scaled already?")
    return datasets, found


def look_at(data: Dataset, found: Findings, is_target: bool) -> None:
    """Add what is found in one file."""
    name = Path(data.path).name
    episodes = len(data.starts)
    if is_target and episodes < 2:
        found.wrong.append(f"{name}: one episode; at least two are needed (are their ends marked?)")
    elif is_target and episodes < 10:
        found.doubtful.append(f"{name}: only {episodes} episodes")
    if data.lengths.max() < K:
        found.wrong.append(f"{name}: every episode is shorter than K = {K} steps")
    if np.ptp(data.rewards) == 0:
        found.doubtful.append(
            f"{name}: all rewards are {data.rewards[0]:g}; there is nothing to prefer"
        )
    if not data.terminals.any():
        found.doubtful.append(
            f"{name}: no failure is marked (terminals); right if episodes only time out"
        )
    if 1 < len(values := np.unique(data.actions)) < 10 < len(data):
        found.doubtful.append(
            f"{name}: actions take only {len(values)} values; discrete actions are not supported"
        )
    for what, array in (("observation", data.observations), ("action", data.actions)):
        if still := np.flatnonzero(np.ptp(array, axis=0) == 0).tolist():
            found.doubtful.append(f"{name}: {what} entries {still} never change")


def compare(source: Dataset, target: Dataset, found: Findings) -> None:
    """Add what is found by comparing both files."""
    if source.sha256 == target.sha256:
        found.doubtful.append("source and target are the same file")
    if len(source) < len(target):
        found.doubtful.append("the source has fewer transitions than the target; are they swapped?")
    share = overlap(source, target)
    print(f"{share:.0%} of the source states are as near to target states as those to one another")
    if share < 0.1:
        found.doubtful.append("source and target hardly overlap; the gate may find nothing useful")


def overlap(source: Dataset, target: Dataset) -> float:
    """The share of source states that are near to a target state.

    Near is the distance within which 95 % of the target states have another one, not counting those
    of their own episode. States are in units of the target's standard deviations.
    """
    mu, sd = target.observations.mean(0), target.observations.std(0) + 1e-8
    rng = np.random.default_rng(0)
    rows = [rng.permutation(len(data))[:SAMPLE] for data in (source, target)]
    z_s, z_t = (
        np.clip((data.observations[i] - mu) / sd, -10, 10)
        for data, i in zip((source, target), rows, strict=True)
    )
    episode = np.repeat(np.arange(len(target.starts)), target.lengths)[rows[1]]
    among = cdist(z_t, z_t)
    among[episode[:, None] == episode] = np.inf
    usual = np.quantile(among.min(1), 0.95)
    return float((cdist(z_s, z_t).min(1) <= usual).mean())


def table(datasets: list[Dataset]) -> str:
    lines = [
        f"{'file':24} {'rows':>9} {'episodes':>8} {'steps':>11} {'failures':>8} {'return':>9} "
        f"{'from':>9} {'to':>9} {'states':>6} {'actions':>7}"
    ]
    for data in datasets:
        steps = f"{data.lengths.min()} to {data.lengths.max()}"
        lines.append(
            f"{Path(data.path).name[:24]:24} {len(data):9,} {len(data.starts):8,} {steps:>11} "
            f"{data.terminals.sum():8,} {data.returns.mean():9.1f} {data.returns.min():9.1f} "
            f"{data.returns.max():9.1f} {data.observations.shape[1]:6} {data.actions.shape[1]:7}"
        )
    return "\n".join(lines)


def draw(path: Path, datasets: list[Dataset]) -> None:
    """Ranges of states and actions, returns, and states on the target's principal axes."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    names = ("source", "target") if len(datasets) == 2 else (Path(datasets[0].path).name,)
    mu, sd = datasets[-1].observations.mean(0), datasets[-1].observations.std(0) + 1e-8
    z = [np.clip((data.observations - mu) / sd, -10, 10) for data in datasets]
    principal = np.linalg.svd(z[-1][:50_000], full_matrices=False)[2][:2]
    rng = np.random.default_rng(0)
    for k, (data, name) in enumerate(zip(datasets, names, strict=True)):
        color = COLORS[k] if len(datasets) == 2 else COLORS[1]
        for ax, values in ((axes[0, 0], z[k]), (axes[0, 1], data.actions)):
            low, middle, high = np.quantile(values, (0.01, 0.5, 0.99), axis=0)
            at = np.arange(values.shape[1]) + 0.2 * k
            ax.errorbar(at, middle, (middle - low, high - middle), fmt="o", c=color, label=name)
            ax.set_xlim(-0.5, values.shape[1] - 0.3)
        axes[1, 0].hist(data.returns, 30, density=True, color=color, alpha=0.6, label=name)
        if principal.shape[0] == 2:
            u = z[k][rng.permutation(len(data))[:SAMPLE]] @ principal.T
            axes[1, 1].scatter(*u.T, s=4, c=color, alpha=0.5, lw=0, label=name)
    titles = "States: 1 to 99 %, target's units", "Actions: 1 to 99 %", "Returns", "States"
    labels = "entry", "entry", "return of an episode", "principal axes of the target's states"
    for ax, title, label in zip(axes.flat, titles, labels, strict=True):
        ax.set(title=title, xlabel=label)
        if ax.has_data():
            ax.legend()
        if label == "entry":
            ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    with atomic(path) as temporary:
        fig.savefig(temporary, format="png", dpi=110)
    plt.close(fig)
