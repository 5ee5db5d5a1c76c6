"""Datasets: the published files, generated ones, and your own, all in one form.

    data = load("hopper", "morph", role="target", quality="medium")     one dataset
    source, target = load_pair("hopper", "morph", "medium", "medium")   what a training script needs
    python -m dynashift.datasets                                        lists every dataset it finds
    python -m dynashift.datasets check OLD.hdf5 NEW.hdf5                do your own two files work?

A transition never crosses the end of an episode. The arrays come with the path, sha256 and kind of
the file that they were read from, so that every result can name its data.
"""

import hashlib
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import h5py
import numpy as np
import tyro

from dynashift import download, quick_help
from dynashift.any_env import LOGS, is_own, own_shift, scale, show_bounds
from dynashift.columns import SUFFIXES, read_episodes, stamp
from dynashift.envs import make_batch
from dynashift.errors import UserError, one_line_errors
from dynashift.files import at_home, atomic, progress_bar
from dynashift.scores import normalized_score
from dynashift.tasks import (
    ANT_PADDING,
    OWN,
    QUALITIES,
    ROBOTS,
    SHIFTS,
    TIME_LIMIT,
    Spaces,
    find_task,
)

# Source data that collect.py rolled out from D4RL's own medium policies, on three kinds of machine.
# The results in results/published were trained on them.
REGENERATED = {
    "093f4db1fd4a7b268e3af34dee1b8ac2eb93c2a47a3d3594ec7edb4ef386ff60",
    "09bcf5992930cf69616e785b9b7bc8de6d8db87d254f6ccd592be2f8d453098c",
    "10b20a5e253b72217e9f3df5c79e857f1d2a1b28dddad280639cc04ce92ef680",
    "4cf3cbe4bc42b864b93f981f5509496ae7eb8cab3284e1215e70dd24019ff13d",
    "a4cdfae562db55c26e0cfedc9709f045da08897b877ae9c65688857d6f6f2509",
    "a57db38f9b7ab37967b0f2e9561d41cd6c7286884387067c9ceaf4ef63d67432",
    "b026288cd942da65fecfc3be6d47b75701a251930cf0c7eaaaae062e52645337",
    "b164992f3dae6ca064e166ea701d768bf3a4e0d2f9652df544ec95d5b040f1de",
    "b2b35de0239e1375d09f22b076239ff9c8e1928ae4aa310fb013beb6a2e540b2",
}
COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")


@dataclass(frozen=True)
class Dataset:
    env: str
    shift: str
    quality: str
    # "published", "embedded" (made by the project's policies), "regenerated-d4rl" (made by D4RL's
    # policies), "own" or "minari"
    kind: str
    path: str
    sha256: str
    observations: np.ndarray  # float32 [N, obs_dim]
    actions: np.ndarray  # float32 [N, act_dim]
    rewards: np.ndarray  # float32 [N]
    next_observations: np.ndarray  # float32 [N, obs_dim]
    terminals: np.ndarray  # bool [N], the robot failed: nothing follows
    timeouts: np.ndarray  # bool [N], the episode ends here for any other reason
    bounds: tuple | None = None  # of the actions in the file, if they were scaled to [-1, 1]

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
        """Which episodes are not cut off by the end of the file, [episodes].

        In the published medium-expert files, some episodes that reached the time limit lack their
        last one or two rows. They count as complete.
        """
        if (self.env, self.shift) in OWN:  # such a file says itself where episodes end
            return np.ones(len(self.starts), bool)
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
        """What a result records about its data."""
        keys = ("env", "shift", "quality", "kind", "path", "sha256")
        named = {key: getattr(self, key) for key in keys}
        named |= {"transitions": len(self), "score": round(self.score, 2)}
        return named | ({"bounds": self.bounds} if self.bounds else {})


def join(source: Dataset, target: Dataset, time_limit: int) -> dict[str, np.ndarray]:
    """Columns [N, ...] of the source and then the target, as sequence models need them."""

    def both(column: str) -> np.ndarray:
        return np.concatenate([getattr(source, column), getattr(target, column)])

    return {
        "actions": both("actions"),
        "rewards": both("rewards"),
        "terminal": both("terminals"),
        "steps": np.minimum(both("steps"), time_limit - 1),
        "left": both("left"),
        "tokens": both("to_go") / np.float32(1000),  # returns-to-go in thousands
    }


# ------------------------------------------------------------------------------------------ reading


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


def identify(path: Path) -> tuple[str, str]:
    """(kind, sha256) of a file.

    A published or generated file whose content has changed is refused here, before anything is read
    from it.
    """
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
        raise UserError(
            f"{path}: a web page, not HDF5 (an error page saved by a download?); "
            "delete it and try again"
        )
    if published := download.PUBLISHED.get(path.name):
        if sha256 not in (published["sha256"], published.get("superseded_sha256")):
            raise UserError(
                f"{path}: not the published file of that name (its sha256 begins {sha256[:12]}, "
                f"should begin {published['sha256'][:12]}); delete it to fetch it again, or rename "
                "it if it is your own"
            )
        return "published", sha256
    # A published file may also be stored under another name.
    if any(sha256 == known["sha256"] for known in download.PUBLISHED.values()):
        return "published", sha256
    if head.startswith(MAGIC):
        if head[len(MAGIC) :][:64].decode("latin1") != body:
            raise UserError(
                f"{path}: damaged since it was generated (sha256 differs); "
                "delete it and generate it again"
            )
        return "generated", sha256
    return "own", sha256


def validate(
    path: Path | str, env: str, raw: dict, spaces: Spaces | None = None
) -> dict[str, np.ndarray]:
    """float32 and bool columns of the right shapes, with actions scaled to [-1, 1].

    path: for the messages.
    """
    robot = spaces or ROBOTS[env]
    n = len(raw["observations"]) if raw["observations"].ndim else 0
    if n == 0:
        raise UserError(f"{path}: holds no transitions")
    widths = {"actions": (robot.act_dim,)}
    obs_widths = (robot.obs_dim, robot.obs_dim + ANT_PADDING * (env == "ant"))
    for key, array in raw.items():
        width = widths.get(key, obs_widths)
        if key in ("rewards", "terminals", "timeouts"):
            if array.shape not in ((n,), (n, 1)):
                raise UserError(
                    f"{path}: {key} has shape {array.shape}, expected ({n},) "
                    f"as there are {n} observations"
                )
            array = array.reshape(n)
        elif array.ndim != 2 or len(array) != n or array.shape[1] not in width:
            wanted = " or ".join(f"({n}, {w})" for w in dict.fromkeys(width))
            raise UserError(f"{path}: {key} has shape {array.shape}, expected {wanted} for {env}")
        if not np.isfinite(array).all():
            raise UserError(
                f"{path}: {key} holds NaN or infinite values, first in row {_first_bad_row(array)}"
            )
        if key == "actions":
            # The policies end in tanh, so they could never imitate actions outside of [-1, 1].
            largest, array = np.abs(array).max(), scale(array, robot.bounds)
            if outside := int((np.abs(array) > 1.001).any(1).sum()):
                bounds = show_bounds(robot.bounds or ([-1], [1]))
                raise UserError(
                    f"{path}: {outside:,} of {n:,} actions leave {bounds}, the range of {env}'s "
                    f"motors (up to {largest:.4g}); scale them, or drop those rows"
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
    if "timeouts" in raw:
        end = terminals | raw["timeouts"]
    else:
        # Target files have no timeouts. A gap between next_observations and the next row shows
        # where an episode ended.
        if next_obs is None:
            raise UserError(
                f"{path}: has neither timeouts nor next_observations, "
                "so no end of an episode can be seen; "
                "add timeouts, episode_ids or episode_ends"
            )
        end = terminals | np.append((next_obs[:-1] != obs[1:]).any(1), True)
        length = 0
        for i in range(n):  # ... but in medium-expert files no gap is visible at the time limit
            length += 1
            end[i] |= length == (spaces.time_limit if spaces else TIME_LIMIT)
            length *= not end[i]
    end[-1] = True
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


# ------------------------------------------------------------------------------------------ writing

USERBLOCK = 512  # HDF5 leaves room for a foreign header: ours is a checksum of the rest of the file
MAGIC = b"dynashift dataset sha256 "


def write_hdf5(path: str | Path, data: dict[str, np.ndarray], kind: str, about: dict) -> None:
    """Write a file in D4RL's layout, with `about` as attributes, atomically and with a checksum."""
    memory = {"driver": "core", "backing_store": False, "userblock_size": USERBLOCK}
    with h5py.File("in memory", "w", **memory) as file:
        for key, value in data.items():
            # Without dates, equal data give equal bytes.
            file.create_dataset(key, data=value, track_times=False)
        for key, value in {"kind": kind, **about}.items():
            file.attrs[key] = value
        file.flush()
        body = file.id.get_file_image()
    head = MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n"
    with atomic(path) as temporary, temporary.open("wb") as file:
        file.write(head.ljust(USERBLOCK, b"\0"))
        file.write(body)


# ------------------------------------------------------------------------------------------ loading


def load(
    env, shift, role, quality, data="auto", data_dir=None, source_size=None, seed=0
) -> Dataset:
    """One dataset.

    role     "source" (the unshifted robot) or "target" (the shifted one)
    quality  medium, medium-replay, medium-expert or expert; or the path, ending in .hdf5, .h5 or
             .npz, of your own file in D4RL's layout; or minari:NAME
    data     "d4rl": the published file, downloaded if necessary; "embedded": generated by the
             project's own policies; "auto": published if it can be found or downloaded, otherwise
             embedded, and a printed line says which
    """
    quality = str(quality)
    _check(env, shift, role, quality, data)
    if source_size is not None and source_size < 1:
        raise UserError(f"source_size is at least 1, not {source_size}")
    domain = "none" if role == "source" else shift
    size = source_size if role == "source" else None
    if role == "target" and shift == "none":
        # The same policies generate the source data, so the target needs episodes of its own.
        seed += 1000
    # Imported here because both modules import this one.
    from dynashift import minari_io, policies

    if quality.startswith("minari:"):
        dataset = minari_io.read_minari(quality.removeprefix("minari:"), env, domain)
    elif quality.endswith(SUFFIXES):
        dataset = read_hdf5(at_home(quality), env, domain, Path(quality).stem)
    else:
        if data == "auto":
            data, reason = _whichever(env, shift, {role: quality}, data_dir)
            _announce(role, "embedded" if data == "embedded" else "published", reason)
        if data == "embedded":
            dataset = policies.embedded(env, domain, role, quality, size, seed)
        else:
            path = download.published(env, shift, role, quality, data_dir)
            dataset = read_hdf5(path, env, domain, quality)
    return dataset.first(size) if size else dataset


def load_pair(env, shift, source, target, data="auto", data_dir=None, source_size=None, seed=0):
    """(source, target) of one task; with data="auto", either both published or both embedded."""
    options = {"data_dir": data_dir, "source_size": source_size, "seed": seed}
    wanted = {"source": str(source), "target": str(target)}
    for role, quality in wanted.items():
        _check(env, shift, role, quality, data)
    # Your own files come first: an error in one shows before anything is downloaded or generated.
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
    """What "auto" means for a pair, and why: "d4rl" if every published file it names is available,
    otherwise "embedded"."""
    try:
        for role, quality in wanted.items():
            if quality in QUALITIES[role]:
                download.published(env, shift, role, quality, data_dir)
    except download.Unavailable as error:
        return "embedded", _because(error.reason)
    return "d4rl", "real data, as published"


ENV_CHOICES = "{" + ",".join([*ROBOTS, "ID", LOGS]) + "}"


@dataclass(frozen=True)
class TaskArgs:
    """Flags of the task, the same in all scripts: the robot, how it changes, and the data."""

    env: Annotated[str, tyro.conf.arg(metavar=ENV_CHOICES)] = "hopper"
    """robot; a Gymnasium id, such as Pendulum-v1 or my_module:MyRobot-v0; or logs: no simulator"""
    shift: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(SHIFTS) + "}")] = "morph"
    """how the target's dynamics differ; none: not at all, for checks against published scores"""
    source: str = "medium"
    """source data D_src: medium, medium-replay, medium-expert, a .hdf5 or .npz file, minari:NAME"""
    target: str = "medium"
    """target data D_tar: medium, medium-expert, expert, a file, minari:NAME, none (--shift none)"""
    env_kwargs: str = "{}"
    """arguments of a Gymnasium id in JSON, such as '{"gravity": -5}'"""
    score_range: Annotated[tuple[float, float] | None, tyro.conf.arg(metavar="LOW HIGH")] = None
    """returns that score 0 and 100, for an ID or logs; default: the score is the mean return"""
    data: Literal["auto", "d4rl", "embedded"] = "auto"
    """published data, generated data, or published if available and generated otherwise"""
    data_dir: Path | None = None
    """folder with the published files"""
    source_size: int | None = None
    """use the first N source transitions only"""

    def __post_init__(self):
        if is_own(self.env):
            shift = own_shift(self.env, self.env_kwargs, self.score_range)
            object.__setattr__(self, "shift", shift)
        elif self.env_kwargs != "{}" or self.score_range:
            raise UserError(
                f"--env-kwargs and --score-range are for a Gymnasium id or logs, not {self.env}"
            )


def returns_to_ask(task: TaskArgs) -> tuple[float | None, float | None]:
    """What a return-conditioned policy asks for: the expert's return, and the official code's.

    For a task of your own both are HIGH of --score-range or, without it, the return of the best
    episode in the target data.
    """
    row = find_task(task.env, task.shift)
    if not is_own(task.env):
        return row.expert, ROBOTS[task.env].return_target
    if row.normalised or quick_help.WANTED:
        return (row.expert, row.expert) if row.normalised else (None, None)
    from dynashift.own_data import best_return

    return (best_return(task),) * 2


def load_task(task: TaskArgs, one_is_enough: bool = False) -> tuple[Dataset, Dataset]:
    """(source, target) of a task.

    With `--shift none --target none` there is only one dataset, which is returned in both roles.
    However a script splits its batches between source and target, all of it comes from there.
    one_is_enough: the method makes sense with a single dataset.
    """
    options = (task.data, task.data_dir, task.source_size)
    if is_own(task.env):
        from dynashift.own_data import load_own

        return load_own(task, one_is_enough)
    if task.target == "none":
        if task.shift != "none":
            raise UserError(
                "--target none is a check on the source data alone, which are the unshifted "
                f"robot's; add --shift none, or give --target a dataset of the robot with "
                f"{task.shift} shift"
            )
        if not one_is_enough:
            raise UserError(
                "this method needs target data; give --target a dataset of the same robot"
            )
        only = load(task.env, task.shift, "source", task.source, *options)
        return only, only
    return load_pair(task.env, task.shift, task.source, task.target, *options)


def load_target(task: TaskArgs) -> Dataset:
    """The target data alone, of the kind that `load_task` would choose.

    A control experiment has to be trained on the same target data as the methods beside it.
    """
    if is_own(task.env):
        from dynashift.own_data import load_own, target_alone

        return load_own(target_alone(task), one_is_enough=True)[1]
    if task.target == "none":
        return load_task(task, one_is_enough=True)[1]
    _check(task.env, task.shift, "target", task.target, task.data)  # before anything is downloaded
    data = task.data
    own = None
    if task.target not in QUALITIES["target"]:
        own = load(task.env, task.shift, "target", task.target, data, task.data_dir)
    if data == "auto":
        wanted = {"source": task.source, "target": task.target}
        data, reason = _whichever(task.env, task.shift, wanted, task.data_dir)
        kind = "embedded" if data == "embedded" else "published"
        _announce("target", *((own.kind, "your own") if own else (kind, reason)))
    if own is not None:
        return own
    return load(task.env, task.shift, "target", task.target, data, task.data_dir)


def _because(reason: str) -> str:
    return f"generated by this project's own policies, because it {reason}"


def _announce(role: str, kind: str, reason: str) -> None:
    print(f"==> {role.upper()} DATA: {kind.upper()} ({reason})", file=sys.stderr, flush=True)


def _check(env: str, shift: str, role: str, quality: str, data: str) -> None:
    if env not in SHIFTS.get(shift, ()):
        raise UserError(
            f"there is no {env}-{shift}; robots: {', '.join(ROBOTS)}; shifts: {', '.join(SHIFTS)}"
        )
    if role not in QUALITIES:
        raise UserError(f'role is "source" or "target", not "{role}"')
    if role == "target" and shift == "none" and quality in QUALITIES[role] and data != "embedded":
        raise UserError(
            "no target data of the unshifted robot are published; use --target none for the source "
            "data alone, --target FILE.hdf5, or --data embedded"
        )
    own = quality.endswith(SUFFIXES) or quality.startswith("minari:")
    if quality not in QUALITIES[role] and not own:
        known = ", ".join(QUALITIES[role])
        raise UserError(
            f"{role} data are {known}, or FILE.hdf5, FILE.npz or minari:NAME; not {quality!r}"
        )
    if data not in ("auto", "d4rl", "embedded"):
        raise UserError(f'data is "auto", "d4rl" or "embedded", not "{data}"')


# ------------------------------------------------------------------------------------------ listing


def listing(data_dir: Path | None = None) -> str:
    """All datasets in data_dir, $DYNASHIFT_DATA, ~/.d4rl/datasets and ~/.cache/dynashift.

    Args:
        data_dir: a further folder to look in.
    """
    folders = [*download.data_folders(data_dir), download.cache_folder()]
    found = [sorted([*folder.glob("*.hdf5"), *folder.glob("*/*.hdf5")]) for folder in folders]
    paths = dict.fromkeys(path for part in found for path in part)
    head = f"{'rows':>8} {'episodes':>8} {'return':>7} {'min':>7} {'max':>7} {'score':>6}"
    lines = [f"{'file':58} {head}  sha256"]
    for path in progress_bar(paths, unit="file", leave=False, disable=len(paths) < 5):
        try:
            if download.task_of(path) is None:
                raise UserError(
                    f"{path}: not a name like hopper_medium-v2.hdf5 or hopper_morph_medium.hdf5"
                )
            data = read_hdf5(path, *download.task_of(path))
        except UserError as error:
            lines.append(f"{path.name:58} {str(error).removeprefix(f'{path}: ')}")
            continue
        returns = data.returns[data.complete] if data.complete.any() else data.returns
        row = f"{len(data):8} {len(data.starts):8}"
        row += f" {returns.mean():7.0f} {returns.min():7.0f} {returns.max():7.0f}"
        states = {"published": "as published", "generated": "as generated"}
        status = states.get(identify(path)[0], "unknown file")
        lines.append(f"{path.name:58} {row} {data.score:6.1f}  {data.sha256[:12]} {status}")
    if not paths:
        lines.append(f"(none in {', '.join(map(str, folders))})")
    return "\n".join(lines)


if __name__ == "__main__":
    with one_line_errors():
        if sys.argv[1:2] == ["check"]:
            from dynashift import check_data

            sys.exit(tyro.cli(check_data.main, args=sys.argv[2:], prog="datasets check"))
        print(tyro.cli(listing))
