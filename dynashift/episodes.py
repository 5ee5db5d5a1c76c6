"""From a file's columns to a dataset: where episodes end, and what follows every transition."""

import sys
from pathlib import Path

import numpy as np

from dynashift import download
from dynashift.any_env import is_own
from dynashift.checksums import REGENERATED, identify
from dynashift.columns import read_episodes, stamp, validate
from dynashift.envs import make_batch
from dynashift.errors import UserError
from dynashift.tasks import TIME_LIMIT, Spaces
from dynashift.transitions import Dataset


def read_hdf5(
    path: str | Path, env: str, shift: str = "none", quality: str = "", spaces: Spaces | None = None
) -> Dataset:
    """Any HDF5 or .npz file in D4RL's layout: a published one, a generated one, or your own.

    Its kind follows from its hash. The file's own attributes are ignored: anyone can set them.
    spaces: of the robot, if it is not one of the four.
    """
    path = Path(path)
    before = stamp(path)
    kind, sha256 = identify(path)
    if kind == "generated":
        kind = "regenerated-d4rl" if sha256 in REGENERATED else "own"
    raw = validate(path, env, read_episodes(path), spaces)
    if stamp(path) != before:
        raise UserError(f"{path}: changed while it was read; wait until it is complete")
    columns = segment(path, env, shift, raw, spaces) | {"bounds": spaces and spaces.bounds}
    return Dataset(env, shift, quality, kind, str(path), sha256, **columns)


def segment(
    path: Path, env: str, shift: str, raw: dict, spaces: Spaces | None = None
) -> dict[str, np.ndarray]:
    """Find the episodes and give every transition its true next observation, or drop it."""
    # DIFF 57: The paper says 5,000 transitions each, and the released code cuts an episode every
    # 1000 steps. Here episodes end where they really did, and wrong next states are repaired.
    obs = raw["observations"]
    terminals = raw["terminals"]
    n = len(terminals)
    next_obs = raw.get("next_observations")
    end = episode_ends(path, raw, spaces.time_limit if spaces else TIME_LIMIT)
    if next_obs is None:  # D4RL's upload of 2021: the next row, where there is one in the episode
        next_obs = np.roll(obs, -1, 0)
        unknown = end
    else:
        # In the target's medium-expert files, the last next observation of an episode is the first
        # state of the *next* episode, either in this file or in the one that this part was cut
        # from. If a file does this even once, the next state of no failure can be trusted.
        unknown = end & np.append((next_obs[:-1] == obs[1:]).all(1), False)
        if unknown.any():
            unknown |= terminals
    keep = np.ones(n, bool)
    rows = np.flatnonzero(unknown)
    if len(rows):
        actions = raw["actions"][rows]
        known = _from_parents(path, env, obs[rows], actions)
        if known is None:
            known = _from_simulator(env, shift, obs[rows], actions, terminals[rows])
        next_obs[rows] = known
        keep[rows] = np.isfinite(known).all(1)
    # An episode whose last row is dropped ends one row earlier.
    last_kept = end | np.append(end[1:] & ~keep[1:], False)
    columns = {
        "observations": obs,
        "actions": raw["actions"],
        "rewards": raw["rewards"],
        "next_observations": next_obs,
        "terminals": terminals,
        "timeouts": last_kept & ~terminals,
    }
    dropped = (
        f"{n - keep.sum():,} of {n:,} transitions end an episode with an unknown next observation"
    )
    if 2 * keep.sum() < n:
        raise UserError(f"{path}: {dropped}; correct the timeouts, or add next_observations")
    if n - keep.sum() > 0.01 * n:
        print(f"note: {path}: {dropped} and are dropped", file=sys.stderr)
    return {key: array[keep] for key, array in columns.items()}


def episode_ends(path: Path, raw: dict, time_limit: int) -> np.ndarray:
    """Whether an episode ends at each row, [N]."""
    if "timeouts" in raw:
        end = raw["terminals"] | raw["timeouts"]
    else:
        # Target files have no timeouts. A gap between next_observations and the next row shows
        # where an episode ended.
        if "next_observations" not in raw:
            raise UserError(
                f"{path}: has neither timeouts nor next_observations, "
                "so no end of an episode can be seen; "
                "add timeouts, episode_ids or episode_ends"
            )
        gap = (raw["next_observations"][:-1] != raw["observations"][1:]).any(1)
        end = raw["terminals"] | np.append(gap, True)
        length = 0
        for i in range(len(end)):  # but in medium-expert files no gap shows at the time limit
            length += 1
            end[i] |= length == time_limit
            length *= not end[i]
    end[-1] = True
    return end


def _from_parents(path: Path, env: str, obs: np.ndarray, actions: np.ndarray) -> np.ndarray | None:
    """True next states for a published medium-expert file, which was cut from two other files.

    They are in the medium and the expert file. Returns None if these are not at hand.
    """
    if not path.name.endswith("_medium_expert.hdf5") or path.name not in download.PUBLISHED:
        return None
    stem = path.name.removesuffix("_medium_expert.hdf5")
    parents = [path.with_name(f"{stem}_{quality}.hdf5") for quality in ("medium", "expert")]
    if not all(parent.exists() for parent in parents):
        return None
    found = np.full(obs.shape, np.nan, np.float32)
    for parent in parents:
        identify(parent)
        raw = validate(parent, env, read_episodes(parent))
        for i in range(len(obs)):
            match = (raw["observations"] == obs[i]).all(1) & (raw["actions"] == actions[i]).all(1)
            if match.any():
                found[i] = raw["next_observations"][match.argmax()]
    return found


def _from_simulator(env, shift, obs, actions, terminals) -> np.ndarray:
    """Next states by one step of the simulator, which is exact; NaN unless the robot failed.

    The other transitions ended at the time limit. Nothing is lost by dropping them, whereas
    failures must stay in the data.
    """
    found = np.full(obs.shape, np.nan, np.float32)
    rows = np.flatnonzero(terminals)
    if is_own(env):
        # No simulator can be set to these states. No value follows a failure, so the last state
        # stands in for the next one.
        found[rows] = obs[rows]
    elif len(rows):
        n = min(len(rows), 64)
        batch = make_batch(env, shift, n, workers=1)
        for i in range(0, len(rows), n):
            part = np.resize(rows[i : i + n], n)  # the last one filled up by repeats
            batch.set_observations(obs[part], allow_clipped=True)
            found[part] = batch.step(actions[part])[0]
    return found
