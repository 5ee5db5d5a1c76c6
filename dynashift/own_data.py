"""The data of a task of your own: --source and --target are files, or minari:NAME.

With a simulator, its spaces give the sizes of states and actions. With --env logs, the files do,
and some target episodes are held out: only there can the policy be measured.
"""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np

from dynashift.any_env import LOGS, find_spaces, show_bounds
from dynashift.columns import SUFFIXES, read_episodes, stamp
from dynashift.datasets import TaskArgs
from dynashift.episodes import read_hdf5
from dynashift.errors import UserError
from dynashift.files import at_home, say
from dynashift.minari_io import minari_columns, read_minari
from dynashift.tasks import QUALITIES, Spaces
from dynashift.transitions import COLUMNS, Dataset

HELD_OUT = 0.1  # share of the target's episodes that --env logs does not train on


def load_own(task: TaskArgs, one_is_enough: bool = False) -> tuple[Dataset, Dataset]:
    """(source, target), the target without the held-out episodes. See datasets.load_task."""
    if task.target == "none" and not one_is_enough:
        raise UserError("this method needs target data; give --target a file")
    source, target = _load(task, _stamps(task))
    if source.bounds:
        say(f"note: actions lie in {show_bounds(source.bounds)} and are scaled to [-1, 1]")
    if task.env == LOGS:
        target = split(target)[0]
        source = target if task.target == "none" else source
    return source.first(task.source_size or len(source)) if source is not target else source, target


def target_alone(task: TaskArgs) -> TaskArgs:
    """The task of a method that needs no source: if no file is named, the target's is read."""
    return replace(task, source=task.target) if task.source in QUALITIES["source"] else task


def held_out(task: TaskArgs) -> Dataset:
    """The target episodes that --env logs does not train on."""
    task = target_alone(task)
    return split(_load(task, _stamps(task))[1])[1]


def best_return(task: TaskArgs) -> float:
    """The largest return of an episode of the target data."""
    return float(_load(task, _stamps(task))[1].returns.max())


def split(data: Dataset) -> tuple[Dataset, Dataset]:
    """The episodes to train on, and those held out: evenly spaced, at least one."""
    episodes = len(data.starts)
    n = max(1, round(HELD_OUT * episodes))
    held = np.zeros(episodes, bool)
    held[((np.arange(n) + 0.5) * episodes / n).astype(int)] = True
    rows = np.repeat(held, data.lengths)
    parts = ({key: getattr(data, key)[keep] for key in COLUMNS} for keep in (~rows, rows))
    train, rest = (replace(data, **part) for part in parts)
    return train, rest


def _stamps(task: TaskArgs) -> tuple:
    """Values that change when a file does, so that `_load` never returns old data for it."""
    if task.env != LOGS:
        find_spaces(task.env, task.shift)  # an error in --env comes before those in files
    names = [task.source] + ([] if task.target == "none" else [task.target])
    for name in names:
        if not name.endswith(SUFFIXES) and not name.startswith("minari:"):
            raise UserError(
                f"--env {task.env} has no data of its own: --source and --target are files ending "
                f"in {', '.join(SUFFIXES)}, or minari:NAME, not {name!r}"
            )
    return tuple(None if name.startswith("minari:") else stamp(at_home(name)) for name in names)


@functools.lru_cache(maxsize=1)
def _load(task: TaskArgs, stamps: tuple) -> tuple[Dataset, Dataset]:
    """Both datasets with all episodes. With --target none, there is one in both roles."""
    names = [task.source] + ([] if task.target == "none" else [task.target])
    spaces = log_spaces(names) if task.env == LOGS else find_spaces(task.env, task.shift)
    read = [read_own(name, task.env, task.shift, spaces) for name in names]
    target = read[-1]
    if len(target.starts) < 2:
        raise UserError(
            f"{target.path}: the target data are one episode, and at least two are needed; "
            "if there are more, mark their ends with timeouts, episode_ids or episode_ends"
        )
    return read[0], target


def read_own(name: str, env: str, shift: str, spaces: Spaces) -> Dataset:
    if name.startswith("minari:"):
        return read_minari(name.removeprefix("minari:"), env, shift, spaces)
    return read_hdf5(at_home(name), env, shift, Path(name).stem, spaces)


def raw_columns(name: str) -> dict[str, np.ndarray]:
    """The columns of a file as they are."""
    if name.startswith("minari:"):
        return minari_columns(name.removeprefix("minari:"))
    path = at_home(name)
    stamp(path)
    return read_episodes(path)


def log_spaces(names: list[str]) -> Spaces:
    """Sizes of states and actions, and the range of the actions over all files."""
    raws = {name: raw_columns(name) for name in names}
    for name, raw in raws.items():
        actions = raw["actions"]
        if not actions.size:
            raise UserError(f"{name}: holds no transitions")
        if actions.ndim != 2:
            kind = (
                "discrete actions are not supported"
                if actions.dtype.kind in "iub"
                else "one row per step"
            )
            raise UserError(
                f"{name}: actions has shape {actions.shape}, expected (steps, entries); {kind}"
            )
        if raw["observations"].ndim != 2:
            shape = raw["observations"].shape
            raise UserError(f"{name}: observations has shape {shape}, expected (steps, entries)")
    first = raws[names[0]]
    sizes = {"obs_dim": first["observations"].shape[1], "act_dim": first["actions"].shape[1]}
    for name, raw in raws.items():
        for key, size in (("observations", "obs_dim"), ("actions", "act_dim")):
            if raw[key].shape[1] != sizes[size]:
                raise UserError(
                    f"{name}: {key} have {raw[key].shape[1]} entries, not {sizes[size]} as in "
                    f"{names[0]}; both robots must have the same observations and actions"
                )
    # `validate` refuses NaN and names its row.
    actions = [np.where(np.isfinite(raw["actions"]), raw["actions"], 0) for raw in raws.values()]
    low = np.min([a.min(0) for a in actions], 0)
    high = np.max([a.max(0) for a in actions], 0)
    if max(-low.min(), high.max()) <= 1.001:
        return Spaces(**sizes)
    high = np.where(high > low, high, low + 1)  # an entry that never changes
    return Spaces(**sizes, bounds=(low.astype(float).tolist(), high.astype(float).tolist()))
