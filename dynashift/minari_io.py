"""Datasets from and to Minari (minari.farama.org)."""

import hashlib
from pathlib import Path

import numpy as np

from dynashift.columns import check_size, validate
from dynashift.envs import env_id
from dynashift.episodes import segment
from dynashift.errors import UserError
from dynashift.tasks import Spaces
from dynashift.transitions import Dataset


def _import_minari():
    try:
        import minari
    except ImportError:
        raise UserError('Minari is not installed; pip install "minari[hdf5,hf]"') from None
    return minari


def minari_columns(name: str) -> dict[str, np.ndarray]:
    """The columns of a Minari dataset (local, else downloaded by Minari)."""
    minari = _import_minari()
    try:
        stored = minari.load_dataset(name, download=True)
        shapes = [
            getattr(x, "shape", None) for x in (stored.observation_space, stored.action_space)
        ]
        d_s, d_a = (int(np.prod(shape or 1)) for shape in shapes)
        check_size(f"Minari dataset {name}", 8 * (2 * d_s + d_a + 3) * int(stored.total_steps))
        episodes = list(stored.iterate_episodes())
    except UserError:
        raise
    except Exception as error:  # Minari has no error class of its own
        raise UserError(f"Minari dataset {name}: {str(error).splitlines()[0]}") from None
    if not episodes or isinstance(episodes[0].observations, dict):
        raise UserError(f"Minari dataset {name}: has no episodes of plain observations")
    raw = {
        "observations": [e.observations[:-1] for e in episodes],
        "next_observations": [e.observations[1:] for e in episodes],
        "actions": [e.actions for e in episodes],
        "rewards": [e.rewards for e in episodes],
        "terminals": [e.terminations for e in episodes],
        "timeouts": [np.arange(len(e.rewards)) == len(e.rewards) - 1 for e in episodes],
    }
    return {key: np.concatenate(parts) for key, parts in raw.items()}


def read_minari(name: str, env: str, shift: str = "none", spaces: Spaces | None = None) -> Dataset:
    """A Minari dataset with the observations of this robot. spaces: as in `datasets.read_hdf5`."""
    raw = minari_columns(name)
    content = b"".join(np.ascontiguousarray(array).tobytes() for array in raw.values())
    digest = hashlib.sha256(content).hexdigest()
    raw = validate(f"Minari dataset {name}", env, raw, spaces)
    columns = segment(Path(name), env, shift, raw, spaces) | {"bounds": spaces and spaces.bounds}
    return Dataset(env, shift, name, "minari", name, digest, **columns)


def write_minari(dataset: Dataset, name: str) -> None:
    """Export as a local Minari dataset, for example "hopper/morph-medium-v0"."""
    minari = _import_minari()
    episodes = []
    for k, (start, length) in enumerate(zip(dataset.starts, dataset.lengths, strict=True)):
        rows = slice(start, start + length)
        last = dataset.next_observations[rows][-1:]
        episodes.append(
            minari.data_collector.EpisodeBuffer(
                id=k,
                observations=np.concatenate([dataset.observations[rows], last]),
                actions=dataset.actions[rows],
                rewards=dataset.rewards[rows].astype(np.float64),
                terminations=dataset.terminals[rows],
                truncations=dataset.timeouts[rows],
                infos={},
            )
        )
    about = {"algorithm_name": dataset.kind, "author": "dynashift"}
    about["env"] = env_id(dataset.env, dataset.shift)
    try:
        minari.create_dataset_from_buffers(name, episodes, **about)
    except ValueError as error:  # a malformed name, or one that exists
        raise UserError(f"Minari dataset {name}: {str(error).splitlines()[0]}") from None
