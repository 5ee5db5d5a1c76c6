"""Datasets: the published files, generated ones, and your own, all in one form.

    data = load("hopper", "morph", role="target", quality="medium")     one dataset
    source, target = load_pair("hopper", "morph", "medium", "medium")   what a training script wants
    python -m dynashift.datasets                                        lists every dataset it can see

A transition never crosses the end of an episode. What was read (path, sha256, kind) travels with the arrays, so that
every result can say it.
"""

import hashlib
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from dynashift.columns import check_size, open_hdf5, read_columns, stamp
from dynashift.envs import make_batch
from dynashift.errors import UserError, one_line_errors
from dynashift.files import at_home, atomic, only_one, progress_bar
from dynashift.scores import normalized_score
from dynashift.tasks import ANT_PADDING, QUALITIES, ROBOTS, SHIFTS, TIME_LIMIT, Env, Shift, find_task

PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())  # file name: bytes, sha256
# What collect.py rolled out from D4RL's own medium policies, on two kinds of machine: the sources of results/published.
REGENERATED = {
    "093f4db1fd4a7b268e3af34dee1b8ac2eb93c2a47a3d3594ec7edb4ef386ff60",
    "09bcf5992930cf69616e785b9b7bc8de6d8db87d254f6ccd592be2f8d453098c",
    "10b20a5e253b72217e9f3df5c79e857f1d2a1b28dddad280639cc04ce92ef680",
    "4cf3cbe4bc42b864b93f981f5509496ae7eb8cab3284e1215e70dd24019ff13d",
    "a57db38f9b7ab37967b0f2e9561d41cd6c7286884387067c9ceaf4ef63d67432",
    "b026288cd942da65fecfc3be6d47b75701a251930cf0c7eaaaae062e52645337",
    "b164992f3dae6ca064e166ea701d768bf3a4e0d2f9652df544ec95d5b040f1de",
    "b2b35de0239e1375d09f22b076239ff9c8e1928ae4aa310fb013beb6a2e540b2",
}
MIRRORS = {  # tried in this order; what arrives is checked against PUBLISHED
    "source": (
        "http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2/",
        "https://huggingface.co/datasets/imone/D4RL/resolve/main/",
    ),
    "target": (
        "https://raw.githubusercontent.com/buaawgj/TAF-DT/18e93a979f2c1a0cb30531cbca40e0e331fb4f46/data/target_dataset/",
        "https://cdn.jsdelivr.net/gh/buaawgj/TAF-DT@18e93a979f2c1a0cb30531cbca40e0e331fb4f46/data/target_dataset/",
    ),
}
# Transitions of a generated dataset when nothing less is asked for: those of the published files.
SOURCE_SIZE = {"medium": 1_000_000, "medium-expert": 2_000_000}
TARGET_SIZE = 5_000
COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")


@dataclass(frozen=True)
class Dataset:
    env: str
    shift: str
    quality: str
    kind: str  # "published", "embedded" (by the project's policies), "regenerated-d4rl" (by D4RL's), "own", "minari"
    path: str
    sha256: str
    observations: np.ndarray  # float32 [N, obs_dim]
    actions: np.ndarray  # float32 [N, act_dim]
    rewards: np.ndarray  # float32 [N]
    next_observations: np.ndarray  # float32 [N, obs_dim]
    terminals: np.ndarray  # bool [N], the robot failed: nothing follows
    timeouts: np.ndarray  # bool [N], the episode ends here for any other reason

    def __len__(self) -> int:
        return len(self.rewards)

    @cached_property
    def starts(self) -> np.ndarray:
        """Index of each episode's first transition, [episodes]."""
        return np.flatnonzero(np.roll(self.terminals | self.timeouts, 1))

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(np.append(self.starts, len(self)))

    @cached_property
    def steps(self) -> np.ndarray:
        """Step within its episode, 0.., of every transition, [N]."""
        return np.arange(len(self)) - np.repeat(self.starts, self.lengths)

    @cached_property
    def left(self) -> np.ndarray:
        """Steps from every transition to the end of its episode, itself included, [N]."""
        return np.repeat(self.lengths, self.lengths) - self.steps

    @cached_property
    def to_go(self) -> np.ndarray:
        """Undiscounted return from every transition to the end of its episode, float32 [N]."""
        episodes = np.split(self.rewards.astype(np.float64), self.starts[1:])
        return np.concatenate([e[::-1].cumsum()[::-1] for e in episodes]).astype(np.float32)

    @cached_property
    def returns(self) -> np.ndarray:
        return np.add.reduceat(self.rewards.astype(np.float64), self.starts)

    @cached_property
    def complete(self) -> np.ndarray:
        """Episodes that ended by themselves, not by the end of the file, [episodes]. The published medium-expert files
        have lost the last one or two rows of some episodes that ran into the time limit."""
        return self.terminals[self.starts + self.lengths - 1] | (self.lengths >= TIME_LIMIT - 2)

    @cached_property
    def score(self) -> float:
        """Mean normalised score of the complete episodes (of all, if none is)."""
        returns = self.returns[self.complete] if self.complete.any() else self.returns
        return float(normalized_score(self.env, self.shift, returns.mean()))

    def first(self, size: int) -> "Dataset":
        """The first `size` transitions; the last episode may be cut."""
        if size >= len(self):
            return self
        columns = {key: getattr(self, key)[:size] for key in COLUMNS}
        columns["timeouts"] = columns["timeouts"].copy()
        columns["timeouts"][-1] = not columns["terminals"][-1]
        return replace(self, **columns)

    @property
    def provenance(self) -> dict:
        """What a result has to say of its data."""
        keys = ("env", "shift", "quality", "kind", "path", "sha256")
        return {**{key: getattr(self, key) for key in keys}, "transitions": len(self), "score": round(self.score, 2)}


# ------------------------------------------------------------------------------------------------- reading


def read_hdf5(path: str | Path, env: str, shift: str = "none", quality: str = "") -> Dataset:
    """Any HDF5 file in D4RL's layout: a published one, a generated one, or your own.

    Its kind follows from its hash. What the file says of itself is not believed: anybody can write that.
    """
    path = Path(path)
    before = stamp(path)
    kind, sha256 = _identify(path)
    if kind == "generated":
        kind = "regenerated-d4rl" if sha256 in REGENERATED else "own"
    raw = _read_arrays(path, env)
    if stamp(path) != before:
        raise UserError(f"{path}: changed while it was read; wait until it is complete")
    return Dataset(env, shift, quality, kind, str(path), sha256, **_segment(path, env, shift, raw))


def _identify(path: Path) -> tuple[str, str]:
    """(kind, sha256) of a file. A published or generated file whose content is not what it was is refused here, before
    anything is read from it."""
    stamp(path)
    try:
        with path.open("rb") as file:
            head = file.read(512)
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if head.startswith(MAGIC):
                file.seek(USERBLOCK)
                body = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if head.lstrip()[:1] == b"<":
        raise UserError(f"{path}: a web page, not HDF5 (an error page saved by a download?); delete it and try again")
    if path.name in PUBLISHED:
        if sha256 not in (PUBLISHED[path.name]["sha256"], PUBLISHED[path.name].get("superseded_sha256")):
            raise UserError(
                f"{path}: not the published file of that name (its sha256 begins {sha256[:12]}, should begin "
                f"{PUBLISHED[path.name]['sha256'][:12]}); delete it to fetch it again, or rename it if it is your own"
            )
        return "published", sha256
    if any(sha256 == known["sha256"] for known in PUBLISHED.values()):  # under another name
        return "published", sha256
    if head.startswith(MAGIC):
        if head[len(MAGIC) :][:64].decode("latin1") != body:
            raise UserError(f"{path}: damaged since it was generated (sha256 differs); delete it, it will be made anew")
        return "generated", sha256
    return "own", sha256


def _read_arrays(path: Path, env: str) -> dict[str, np.ndarray]:
    """The columns of an HDF5 file, or a UserError."""
    needed = ("observations", "actions", "rewards", "terminals")
    return _validate(path, env, read_columns(path, needed, ("timeouts", "next_observations")))


def _validate(path: Path | str, env: str, raw: dict) -> dict[str, np.ndarray]:
    """float32 and bool columns of the right shapes; `path` is for the message."""
    robot = ROBOTS[env]
    n = len(raw["observations"]) if raw["observations"].ndim else 0
    if n == 0:
        raise UserError(f"{path}: holds no transitions")
    for key, array in raw.items():
        width = {"actions": (robot.act_dim,)}.get(key, (robot.obs_dim, robot.obs_dim + ANT_PADDING * (env == "ant")))
        if key in ("rewards", "terminals", "timeouts"):
            if array.shape not in ((n,), (n, 1)):
                raise UserError(f"{path}: {key} has shape {array.shape}, expected ({n},) as there are {n} observations")
            array = array.reshape(n)
        elif array.ndim != 2 or len(array) != n or array.shape[1] not in width:
            wanted = " or ".join(f"({n}, {w})" for w in dict.fromkeys(width))
            raise UserError(f"{path}: {key} has shape {array.shape}, expected {wanted} for {env}")
        if not np.isfinite(array).all():
            raise UserError(f"{path}: {key} holds NaN or infinite values, first in row {_first_bad_row(array)}")
        if key == "actions" and (largest := np.abs(array).max()) > 1.001:  # where the policies end in tanh
            outside = int((np.abs(array) > 1.001).any(1).sum())
            raise UserError(
                f"{path}: {outside:,} of {n:,} actions leave [-1, 1], the range of {env}'s motors (up to "
                f"{largest:.4g}); scale them, or drop those rows"
            )
        if key in ("terminals", "timeouts"):
            if not np.isin(array, (0, 1)).all():
                raise UserError(f"{path}: {key} holds values other than 0 and 1")
            raw[key] = array.astype(bool)
        else:  # ant's contact forces (always zero in D4RL) are cut off
            array = array[:, : robot.obs_dim] if key.endswith("observations") else array
            with np.errstate(over="ignore"):
                raw[key] = np.ascontiguousarray(array, np.float32)
            if not np.isfinite(raw[key]).all():
                raise UserError(f"{path}: {key} holds values too large for float32")
    return raw


def _first_bad_row(array: np.ndarray) -> int:
    return int(np.argmin(np.isfinite(array.reshape(len(array), -1)).all(1)))


def _segment(path: Path, env: str, shift: str, raw: dict) -> dict[str, np.ndarray]:
    """Find the episodes and give every transition its true next observation, or drop it."""
    # DIFF 57: paper 5,000 transitions each; released cuts every 1000 steps; here true ends and repaired next states
    obs, terminals, n = raw["observations"], raw["terminals"], len(raw["terminals"])
    next_obs = raw.get("next_observations")
    if "timeouts" in raw:
        end = terminals | raw["timeouts"]
    else:  # the target files: a gap between next_observations and the next row shows where an episode ended
        if next_obs is None:
            raise UserError(f"{path}: has neither timeouts nor next_observations, so no end of an episode can be seen")
        end = terminals | np.append((next_obs[:-1] != obs[1:]).any(1), True)
        length = 0
        for i in range(n):  # ... but in medium-expert files no gap is visible at the time limit
            length += 1
            end[i] |= length == TIME_LIMIT
            length *= not end[i]
    end[-1] = True
    if next_obs is None:  # D4RL's upload of 2021: the next row, where there is one in the episode
        next_obs, unknown = np.roll(obs, -1, 0), end
    else:
        # In the target's medium-expert files the last next observation of an episode is the *next* episode's first
        # state, there or in the file that the part was cut from. Where that shows once, no failure can be trusted.
        unknown = end & np.append((next_obs[:-1] == obs[1:]).all(1), False)
        if unknown.any():
            unknown |= terminals
    keep = np.ones(n, bool)
    rows = np.flatnonzero(unknown)
    if len(rows):
        known = _from_parents(path, env, obs[rows], raw["actions"][rows])
        known = (
            known
            if known is not None
            else _from_simulator(env, shift, obs[rows], raw["actions"][rows], terminals[rows])
        )
        next_obs[rows] = known
        keep[rows] = np.isfinite(known).all(1)
    last_kept = end | np.append(end[1:] & ~keep[1:], False)  # dropping its last row, an episode ends one row earlier
    columns = {
        "observations": obs,
        "actions": raw["actions"],
        "rewards": raw["rewards"],
        "next_observations": next_obs,
        "terminals": terminals,
        "timeouts": last_kept & ~terminals,
    }
    dropped = f"{n - keep.sum():,} of {n:,} transitions end an episode with an unknown next observation"
    if 2 * keep.sum() < n:
        raise UserError(f"{path}: {dropped}; mend the timeouts, or add next_observations")
    if n - keep.sum() > 0.01 * n:
        print(f"note: {path}: {dropped} and are dropped", file=sys.stderr)
    return {key: array[keep] for key, array in columns.items()}


def _from_parents(path: Path, env: str, obs: np.ndarray, actions: np.ndarray) -> np.ndarray | None:
    """A published medium-expert file is cut from the medium and the expert file, which have the true next states."""
    if not path.name.endswith("_medium_expert.hdf5") or path.name not in PUBLISHED:
        return None
    parents = [path.with_name(path.name.replace("_medium_expert", quality)) for quality in ("_medium", "_expert")]
    if not all(parent.exists() for parent in parents):
        return None
    found = np.full(obs.shape, np.nan, np.float32)
    for parent in parents:
        _identify(parent)
        raw = _read_arrays(parent, env)
        for i in range(len(obs)):
            match = (raw["observations"] == obs[i]).all(1) & (raw["actions"] == actions[i]).all(1)
            if match.any():
                found[i] = raw["next_observations"][match.argmax()]
    return found


def _from_simulator(env, shift, obs, actions, terminals) -> np.ndarray:
    """The next state of transitions that ended in failure, by one step of the (exact) simulator; NaN for the others:
    they ended by the clock, nothing was learnt there, and they are dropped. Failures must stay."""
    found = np.full(obs.shape, np.nan, np.float32)
    rows = np.flatnonzero(terminals)
    if len(rows):
        n = min(len(rows), 64)
        batch = make_batch(env, shift, n, workers=1)
        for i in range(0, len(rows), n):
            part = np.resize(rows[i : i + n], n)  # the last one filled up by repeats
            batch.set_observations(obs[part], allow_clipped=True)
            found[part] = batch.step(actions[part])[0]
    return found


# ------------------------------------------------------------------------------------------------- writing

USERBLOCK = 512  # HDF5 leaves room for a foreign header: ours is a checksum of everything behind it
MAGIC = b"dynashift dataset sha256 "


def write_hdf5(path: str | Path, data: dict[str, np.ndarray], kind: str, about: dict) -> None:
    """D4RL's layout, `about` as attributes; complete and verifiable under its name, or not there at all."""
    memory = {"driver": "core", "backing_store": False, "userblock_size": USERBLOCK}
    with h5py.File("in memory", "w", **memory) as file:
        for key, value in data.items():
            file.create_dataset(key, data=value, track_times=False)  # no dates: equal data, equal bytes
        for key, value in {"kind": kind, **about}.items():
            file.attrs[key] = value
        file.flush()
        body = file.id.get_file_image()
    head = MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n"
    with atomic(path) as temporary, temporary.open("wb") as file:
        file.write(head.ljust(USERBLOCK, b"\0"))
        file.write(body)


# ------------------------------------------------------------------------------------------------- finding


def file_name(env: str, shift: str, role: str, quality: str) -> str:
    """The published name: hopper_medium_replay-v2.hdf5, hopper_gravity_0.5_medium.hdf5, ..."""
    quality = quality.replace("-", "_")
    if role == "source":
        return f"{env}_{quality}-v2.hdf5"
    return f"{env}_{'gravity_0.5' if shift == 'gravity' else shift}_{quality}.hdf5"


def _roots(data_dir: str | Path | None) -> list[Path]:
    roots = [data_dir, os.environ.get("DYNASHIFT_DATA"), "~/.d4rl/datasets"]
    found = []
    for root in filter(None, roots):
        with suppress(UserError):  # without a home folder there is nothing in it
            found.append(at_home(root))
    if not found:
        raise UserError("there is no home folder for the data; set DYNASHIFT_DATA or HOME, or give --data-dir")
    return found


def _cache() -> Path:
    """Where generated data are kept."""
    try:
        return at_home(os.environ.get("DYNASHIFT_DATA") or "~/.cache/dynashift")
    except UserError:
        raise UserError("there is no home folder for generated data; set DYNASHIFT_DATA or HOME") from None


def find(name: str, data_dir: str | Path | None = None) -> Path | None:
    """A file of this name in --data-dir, $DYNASHIFT_DATA or ~/.d4rl/datasets, or one folder below."""
    for root in _roots(data_dir):
        for path in (root / name, *sorted(root.glob(f"*/{name}"))):
            if path.is_file():
                return path
    return None


def download(name: str, role: str, folder: Path, mirrors=None, attempts: int = 2) -> Path:
    """Fetch a published file: mirror by mirror, a broken transfer resumed, sha256 checked, renamed when complete."""
    target, partial, wanted = folder / name, folder / f".{name}.part", PUBLISHED[name]
    problems = []
    with only_one(target):
        if target.exists():  # another process was faster
            return target
        for url in [mirror + name for mirror in mirrors or MIRRORS[role] for _ in range(attempts)]:
            try:
                _fetch(url, partial, wanted["bytes"])
            except (OSError, EOFError, http.client.HTTPException) as error:  # URLError is an OSError
                problems.append(f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}")
                continue
            with partial.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 in (wanted["sha256"], wanted.get("superseded_sha256")):
                os.replace(partial, target)
                return target
            partial.unlink()
            problems.append(f"{url}: wrong content, sha256 {sha256[:12]}... instead of {wanted['sha256'][:12]}...")
    raise Unavailable(
        f"could not download {name} ({wanted['bytes'] / 1e6:.0f} MB): {'; '.join(dict.fromkeys(problems))}; "
        f"put the file into {folder} by hand, or use --data embedded"
    )


def _fetch(url: str, partial: Path, size: int) -> None:
    """Append to `partial` what it lacks of url."""
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"User-Agent": "dynashift"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # our part is longer than the file, so it is no part of it
            partial.unlink()
        raise
    with response:
        have = have if response.status == 206 else 0  # 200: the server sends everything from the start
        total = have + (size - have if response.length is None else response.length)
        bar = progress_bar(total=total, initial=have, unit="B", unit_scale=True, desc=partial.name.strip("."))
        with bar, partial.open("ab" if have else "wb") as file:
            while block := response.read(1 << 20):
                file.write(block)
                bar.update(len(block))
            have = file.tell()
    if have < total:
        raise EOFError(f"connection cut after {have} of {total} bytes")


# ------------------------------------------------------------------------------------------------- loading


def load(env, shift, role, quality, data="auto", data_dir=None, source_size=None, seed=0) -> Dataset:
    """One dataset.

    role     "source" (the unshifted robot) or "target" (the shifted one)
    quality  medium, medium-replay, medium-expert or expert; or your own file in D4RL's layout: its path, ending in
             .hdf5; or minari:NAME
    data     "d4rl": the published file, downloaded if it is not there; "embedded": generated from the project's own
             policies; "auto": published if it is there or can be had, else embedded, and a line says which
    """
    quality = str(quality)
    _check(env, shift, role, quality, data)
    if source_size is not None and source_size < 1:
        raise UserError(f"source_size is at least 1, not {source_size}")
    domain = "none" if role == "source" else shift
    size = source_size if role == "source" else None
    if role == "target" and shift == "none":
        seed += 1000  # the same policies make the source data: their episodes are not to be the target's too
    if quality.startswith("minari:"):
        dataset = read_minari(quality.removeprefix("minari:"), env, domain)
    elif quality.endswith(".hdf5"):
        dataset = read_hdf5(at_home(quality), env, domain, Path(quality).stem)
    elif data == "embedded":
        dataset = embedded(env, domain, role, quality, size, seed)
    else:
        try:
            path, kind, reason = _published(env, shift, role, quality, data_dir), "published", "real data, as published"
        except Unavailable as error:
            if data == "d4rl":
                raise
            path, kind, reason = None, "embedded", _because(error)
        if data == "auto":
            _announce(role, kind, reason)
        dataset = read_hdf5(path, env, domain, quality) if path else embedded(env, domain, role, quality, size, seed)
    return dataset.first(size) if size else dataset


def load_pair(env, shift, source, target, data="auto", data_dir=None, source_size=None, seed=0):
    """(source, target) of one task. With data="auto" both are published or both embedded, never one of each."""
    options = {"data_dir": data_dir, "source_size": source_size, "seed": seed}
    wanted = {"source": str(source), "target": str(target)}
    for role, quality in wanted.items():
        _check(env, shift, role, quality, data)
    # Your own files first: what is wrong with them shows before anything is downloaded or generated.
    own = [role for role, quality in wanted.items() if quality not in QUALITIES[role]]
    pair = {role: load(env, shift, role, wanted[role], data, **options) for role in own}
    if data == "auto":
        data, reason = _whichever(env, shift, wanted, data_dir)
        kind = "embedded" if data == "embedded" else "published"
        for role in wanted:
            _announce(role, *((pair[role].kind, "your own") if role in own else (kind, reason)))
    for role in ("target", "source"):  # the smaller one first
        if role not in own:
            pair[role] = load(env, shift, role, wanted[role], data, **options)
    return pair["source"], pair["target"]


def _whichever(env: str, shift: str, wanted: dict, data_dir) -> tuple[str, str]:
    """What "auto" means for a pair: published if all that is named so can be had, else embedded; and why."""
    try:
        for role, quality in wanted.items():
            if quality in QUALITIES[role]:
                _published(env, shift, role, quality, data_dir)
    except Unavailable as error:
        return "embedded", _because(error)
    return "d4rl", "real data, as published"


@dataclass(frozen=True)
class TaskArgs:
    """Flags of the task, the same in all scripts: the robot, how it changes, and the data."""

    env: Env = "hopper"
    """robot"""
    shift: Shift = "morph"
    """how the target's dynamics differ; none: not at all, for checks against published scores"""
    source: str = "medium"
    """source data D_src: medium, medium-replay, medium-expert, a path ending in .hdf5, or minari:NAME"""
    target: str = "medium"
    """target data D_tar: medium, medium-expert, expert, a path ending in .hdf5, none (--shift none), or minari:NAME"""
    data: Literal["auto", "d4rl", "embedded"] = "auto"
    """published data, generated data, or whichever can be had"""
    data_dir: Path | None = None
    """where the published files lie"""
    source_size: int | None = None
    """use the first N source transitions only"""


def load_task(task: TaskArgs, one_is_enough: bool = False) -> tuple[Dataset, Dataset]:
    """(source, target) of a task.

    With `--shift none --target none` there is one dataset, and it is returned in both roles: whatever share of a batch
    a script draws from either, all of it comes from that dataset. one_is_enough: the method makes sense like that.
    """
    if task.target == "none":
        if task.shift != "none":
            raise UserError(
                "--target none is a check on the source data alone, which are the unshifted robot's; add --shift none, "
                f"or give --target a dataset of the robot with {task.shift} shift"
            )
        if not one_is_enough:
            raise UserError("this method needs target data; give --target a dataset of the same robot")
        only = load(task.env, task.shift, "source", task.source, task.data, task.data_dir, task.source_size)
        return only, only
    return load_pair(task.env, task.shift, task.source, task.target, task.data, task.data_dir, task.source_size)


def load_target(task: TaskArgs) -> Dataset:
    """The target data alone, of the kind that load_task would choose: a control must see what the others see."""
    if task.target == "none":
        return load_task(task, one_is_enough=True)[1]
    _check(task.env, task.shift, "target", task.target, task.data)  # before anything is downloaded
    own, data, options = task.target not in QUALITIES["target"], task.data, {"data_dir": task.data_dir}
    if own:
        target = load(task.env, task.shift, "target", task.target, data, **options)
    if data == "auto":
        wanted = {"source": task.source, "target": task.target}
        data, reason = _whichever(task.env, task.shift, wanted, task.data_dir)
        kind = "embedded" if data == "embedded" else "published"
        _announce("target", *((target.kind, "your own") if own else (kind, reason)))
    return target if own else load(task.env, task.shift, "target", task.target, data, **options)


class Unavailable(UserError):
    """A published file is neither here nor to be had."""


def _because(error: Unavailable) -> str:
    """One line, without the addresses that were tried."""
    what, last_cause = str(error).split(": ")[0], str(error).split("; put")[0].split(": ")[-1]
    return f"generated by this project's own policies, because it {what}: {last_cause}"


def _announce(role: str, kind: str, reason: str) -> None:
    print(f"==> {role.upper()} DATA: {kind.upper()} ({reason})", file=sys.stderr, flush=True)


def _check(env: str, shift: str, role: str, quality: str, data: str) -> None:
    find_task(env, shift)
    if role not in QUALITIES:
        raise UserError(f'role is "source" or "target", not "{role}"')
    if role == "target" and shift == "none" and quality in QUALITIES[role] and data != "embedded":
        raise UserError(
            "no target data of the unshifted robot are published; use --target none for the source data alone, "
            "--target FILE.hdf5, or --data embedded"
        )
    if quality not in QUALITIES[role] and not quality.endswith(".hdf5") and not quality.startswith("minari:"):
        raise UserError(f"{role} data are {', '.join(QUALITIES[role])}, or FILE.hdf5, or minari:NAME; not {quality!r}")
    if data not in ("auto", "d4rl", "embedded"):
        raise UserError(f'data is "auto", "d4rl" or "embedded", not "{data}"')


def _published(env: str, shift: str, role: str, quality: str, data_dir=None) -> Path:
    """Path of a published file, fetched if need be."""
    name = file_name(env, shift, role, quality)
    path = find(name, data_dir)
    if path is None:
        folder = _roots(data_dir)[0]
        if name not in PUBLISHED:
            raise Unavailable(
                f"could not find {name}: no data of this shift are published; put the file into {folder}, "
                "or use --data embedded"
            )
        if role == "target" and quality == "medium-expert":  # its damaged rows are mended from these two
            for parent in ("medium", "expert"):
                download(file_name(env, shift, role, parent), role, folder)
        path = download(name, role, folder)
    return path


# ------------------------------------------------------------------------------------------------ generating


def embedded(env: str, shift: str, role: str, quality: str, size: int | None = None, seed: int = 0) -> Dataset:
    """Data made by the project's own behaviour policies, generated on first use and kept in $DYNASHIFT_DATA or
    ~/.cache/dynashift. Equal arguments give equal bytes on one machine."""
    from dynashift import policies

    if size is None:
        size = TARGET_SIZE if role == "target" else SOURCE_SIZE.get(quality) or ROBOTS[env].replay_size
    files = policies.for_quality(env, shift, quality)
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]
    path = _cache() / f"embedded_{env}_{shift}_{quality}_{size}_seed{seed}_{digest}.hdf5"
    about = {"env": env, "shift": shift, "quality": quality, "seed": seed, "policies": [file.stem for file in files]}
    with only_one(path):
        found = _cached(path, about, size)
        if found is None:
            print(f"generating {size:,} transitions by the project's own policies: {path}", file=sys.stderr, flush=True)
            shares = np.diff(np.arange(len(files) + 1) * size // len(files))
            parts = [
                policies.rollout(policies.load_policy(file, env), env, shift, share, seed=seed + k)
                for k, (file, share) in enumerate(zip(files, shares, strict=True))
                if share
            ]
            data = {key: np.concatenate([part[key] for part in parts]) for key in COLUMNS}
            del parts
            write_hdf5(path, data, "embedded", about)
    return found or _cached(path, about, size)


def _cached(path: Path, about: dict, size: int) -> Dataset | None:
    """The generated file of this name, if it is there and is what the name promises: whole, and made with `about`."""
    if not path.exists():
        return None
    try:
        if _identify(path)[0] != "generated":
            raise UserError("its header is damaged, or it is another file")
        with open_hdf5(path) as file:
            found = {key: list(x) if isinstance(x := file.attrs.get(key), np.ndarray) else x for key in about}
        if found != about:
            raise UserError(f"it was made with {found}")
        dataset = read_hdf5(path, about["env"], about["shift"], about["quality"])
        if len(dataset) != size:
            raise UserError(f"it has {len(dataset):,} transitions")
    except (UserError, OSError) as error:
        print(f"note: {path} is not what its name promises and is made again ({error})", file=sys.stderr)
        return None
    return replace(dataset, kind="embedded")


# ---------------------------------------------------------------------------------------------------- Minari


def _import_minari():
    try:
        import minari
    except ImportError:
        raise UserError('Minari is not installed; pip install "minari[hdf5,hf]"') from None
    return minari


def read_minari(name: str, env: str, shift: str = "none") -> Dataset:
    """A Minari dataset (local, else downloaded by Minari) with the observations of this robot."""
    minari = _import_minari()
    try:
        stored = minari.load_dataset(name, download=True)
        width = 2 * ROBOTS[env].obs_dim + ROBOTS[env].act_dim + 3
        check_size(f"Minari dataset {name}", 8 * width * int(stored.total_steps))
        episodes = list(stored.iterate_episodes())
    except UserError:
        raise
    except Exception as error:  # Minari has no error class of its own
        raise UserError(f"Minari dataset {name}: {str(error).splitlines()[0]}") from None
    if not episodes or isinstance(episodes[0].observations, dict):
        raise UserError(f"Minari dataset {name}: has no episodes of plain observations for {env}")
    raw = {
        "observations": [e.observations[:-1] for e in episodes],
        "next_observations": [e.observations[1:] for e in episodes],
        "actions": [e.actions for e in episodes],
        "rewards": [e.rewards for e in episodes],
        "terminals": [e.terminations for e in episodes],
        "timeouts": [np.arange(len(e.rewards)) == len(e.rewards) - 1 for e in episodes],
    }
    raw = {key: np.concatenate(parts) for key, parts in raw.items()}
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in raw.values())).hexdigest()
    columns = _segment(Path(name), env, shift, _validate(f"Minari dataset {name}", env, raw))
    return Dataset(env, shift, name, "minari", name, digest, **columns)


def write_minari(dataset: Dataset, name: str) -> None:
    """Export as a local Minari dataset, for example "hopper/morph-medium-v0"."""
    minari = _import_minari()
    from dynashift.envs import env_id

    episodes = []
    for k, (start, length) in enumerate(zip(dataset.starts, dataset.lengths, strict=True)):
        rows = slice(start, start + length)
        episodes.append(
            minari.data_collector.EpisodeBuffer(
                id=k,
                observations=np.concatenate([dataset.observations[rows], dataset.next_observations[rows][-1:]]),
                actions=dataset.actions[rows],
                rewards=dataset.rewards[rows].astype(np.float64),
                terminations=dataset.terminals[rows],
                truncations=dataset.timeouts[rows],
                infos={},
            )
        )
    about = {"algorithm_name": dataset.kind, "author": "dynashift"}
    try:
        minari.create_dataset_from_buffers(name, episodes, env=env_id(dataset.env, dataset.shift), **about)
    except ValueError as error:  # a malformed name, or one that exists
        raise UserError(f"Minari dataset {name}: {str(error).splitlines()[0]}") from None


# --------------------------------------------------------------------------------------------------- listing


def task_of(path: str | Path) -> tuple[str, str, str] | None:
    """(env, shift, quality) by the name of a published or generated file; None if it tells nothing."""
    words = Path(path).name.removesuffix(".hdf5").removeprefix("embedded_").replace("gravity_0.5", "gravity").split("_")
    env, shift = words[0], words[1] if len(words) > 1 else ""
    if env not in ROBOTS:
        return None
    if env in SHIFTS.get(shift, ()):
        return (
            env,
            shift,
            "-".join(word for word in words[2:] if word in ("medium", "expert", "medium-expert", "medium-replay")),
        )
    return env, "none", "-".join(words[1:]).split("-v2")[0]


def listing(data_dir: Path | None = None) -> str:
    """Every dataset that can be seen in data_dir, $DYNASHIFT_DATA, ~/.d4rl/datasets and ~/.cache/dynashift.

    Args:
        data_dir: a further folder to look in.
    """
    folders = [*_roots(data_dir), _cache()]
    paths = dict.fromkeys(
        path for folder in folders for path in sorted([*folder.glob("*.hdf5"), *folder.glob("*/*.hdf5")])
    )
    lines = [f"{'file':58} {'rows':>8} {'episodes':>8} {'return':>7} {'min':>7} {'max':>7} {'score':>6}  sha256"]
    for path in progress_bar(paths, unit="file", leave=False, disable=len(paths) < 5):
        try:
            if task_of(path) is None:
                raise UserError(f"{path}: not a name like hopper_medium-v2.hdf5 or hopper_morph_medium.hdf5")
            data = read_hdf5(path, *task_of(path))
        except UserError as error:
            lines.append(f"{path.name:58} {str(error).removeprefix(f'{path}: ')}")
            continue
        returns = data.returns[data.complete] if data.complete.any() else data.returns
        row = f"{len(data):8} {len(data.starts):8} {returns.mean():7.0f} {returns.min():7.0f} {returns.max():7.0f}"
        status = {"published": "as published", "generated": "as generated"}.get(_identify(path)[0], "unknown file")
        lines.append(f"{path.name:58} {row} {data.score:6.1f}  {data.sha256[:12]} {status}")
    if not paths:
        lines.append(f"(none in {', '.join(map(str, folders))})")
    return "\n".join(lines)


if __name__ == "__main__":
    import tyro

    with one_line_errors():
        print(tyro.cli(listing))
