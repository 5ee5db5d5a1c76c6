"""Reads the columns of an HDF5 or .npz file, if they are in the file itself and fit into memory,
and checks that they are what a robot can have recorded.

HDF5 can point to other files (external links, virtual datasets, external storage) and can declare
numbers that were never written. A checksum of the file covers neither, so both are refused.
"""

import os
import stat
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np

from dynashift.any_env import scale, show_bounds
from dynashift.errors import UserError
from dynashift.files import read_npz
from dynashift.tasks import ANT_PADDING, ROBOTS, Spaces

try:
    import resource
except ImportError:  # Windows
    resource = None

SMALL = 2**26  # bytes; anything up to this size is read without further checks
MOST = 200  # largest plausible compression ratio; trajectories compress by less than ten


def open_hdf5(path: str | Path) -> h5py.File:
    """Open a file for reading, without a lock.

    Some network file systems have no locks, and none are needed: no file is ever written in place.
    """
    return h5py.File(path, "r", locking=False)


def stamp(path: Path) -> tuple:
    """Inode, size and time of a file, which tell whether it has changed.

    A FIFO or a device is refused before it is opened, because reading it may never end.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason})") from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: not a regular file; give the path of an HDF5 file")
    return found.st_ino, found.st_size, found.st_mtime_ns


def inside(parent: h5py.Group, name: str) -> h5py.Dataset | h5py.Group:
    """An item of this file. A UserError is raised unless the file itself holds all its numbers.

    If there is no such item, this is a KeyError.
    """
    path = parent.file.filename
    for part in name.split("/"):
        if not isinstance(parent.get(part, getlink=True), h5py.HardLink):
            raise UserError(f"{path}: {name} is a link; copy what it points to into the file")
        parent = parent[part]
    if isinstance(parent, h5py.Dataset):
        if parent.is_virtual or parent.external:
            raise UserError(
                f"{path}: the numbers of {name} lie in another file; copy them into this one"
            )
        if parent.size and parent.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
            raise UserError(
                f"{path}: {name} is damaged: of its {parent.size:,} numbers some were never "
                "written, or are lost"
            )
    return parent


SUFFIXES = (".hdf5", ".h5", ".npz")  # of files of your own
NEEDED = ("observations", "actions", "rewards")
ENDS = ("terminals", "timeouts", "episode_ids", "episode_ends")  # what may tell where episodes end


def read_episodes(path: Path) -> dict[str, np.ndarray]:
    """The columns of a dataset in D4RL's layout.

    `terminals` are always among them, and `timeouts` if the file tells where episodes end.
    """
    read = read_npz_columns if path.suffix == ".npz" else read_columns
    return mark_ends(path, read(path, NEEDED, (*ENDS, "next_observations")))


def mark_ends(path: Path, raw: dict) -> dict[str, np.ndarray]:
    """Turn `episode_ids` and `episode_ends` into timeouts, where the robot has not failed.

    `episode_ids` has one number for each row. `episode_ends` has a flag for each row, or for each
    episode the number of the row that follows its last one.
    """
    n = len(raw["observations"]) if raw["observations"].ndim else 0
    ids, ends = raw.pop("episode_ids", None), raw.pop("episode_ends", None)
    if not {"terminals", "timeouts"} & raw.keys() and ids is None and ends is None:
        raise UserError(
            f"{path}: has none of {', '.join(ENDS)}, so no end of an episode can be seen"
        )
    end = np.zeros(n, bool)
    if ids is not None:
        if ids.size != n:
            raise UserError(f"{path}: episode_ids has shape {ids.shape}, expected ({n},)")
        end |= np.append((np.diff(ids.reshape(n)) != 0), True)[:n]
    if ends is not None:
        ends = ends.ravel()
        if len(ends) == n and np.isin(ends, (0, 1)).all():
            end |= ends.astype(bool)
        elif len(ends) and (np.diff(ends) > 0).all() and ends[0] > 0 and ends[-1] == n:
            end[ends.astype(int) - 1] = True
        else:
            raise UserError(
                f"{path}: episode_ends must be 0 or 1 for each of {n:,} rows, or increasing row "
                f"numbers up to {n}, each of the row that follows an episode's last one"
            )
    raw.setdefault("terminals", np.zeros(n, bool))
    if ids is not None or ends is not None:
        known = [raw[key].ravel() for key in ("terminals", "timeouts") if key in raw]
        for flags in known:
            if len(flags) == n:  # if not, that is an error of its own
                end |= flags.astype(bool)
        raw["timeouts"] = end & ~known[0].astype(bool) if len(known[0]) == n else end
    return raw


def read_npz_columns(path: Path, needed, optional) -> dict[str, np.ndarray]:
    """These columns of an .npz file, or a UserError. No pickle is loaded."""
    try:
        with zipfile.ZipFile(path) as file:
            declared = sum(item.file_size for item in file.infolist())
        check_size(path, declared, path.stat().st_size)
        arrays = read_npz(path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path}: not a readable .npz file ({str(error).splitlines()[0]})"
        ) from None
    if missing := [key for key in needed if key not in arrays]:
        raise UserError(
            f"{path}: has no {', '.join(missing)}; its arrays need the names of D4RL's layout"
        )
    found = {key: arrays[key] for key in (*needed, *optional) if key in arrays}
    if wrong := [key for key, array in found.items() if array.dtype.kind not in "fiub"]:
        raise UserError(f"{path}: {wrong[0]} is no table of numbers ({found[wrong[0]].dtype})")
    return found


def read_columns(path: Path, needed, optional) -> dict[str, np.ndarray]:
    """These columns as they are in the file, or a UserError."""
    try:
        with open_hdf5(path) as file:
            if missing := [key for key in needed if key not in file]:
                raise UserError(
                    f"{path}: has no {', '.join(missing)}; is it a dataset in D4RL's layout?"
                )
            items = {key: inside(file, key) for key in (*needed, *optional) if key in file}
            for key, item in items.items():
                kind = getattr(item, "dtype", None)
                if kind is None or kind.kind not in "fiub" or item.shape is None:
                    raise UserError(f"{path}: {key} is no table of numbers ({item})")
                if not h5py.h5t.py_create(kind, logical=True).equal(item.id.get_type()):
                    raise UserError(f"{path}: {key} has numbers of an unknown format; damaged?")
            check_size(path, sum(item.nbytes for item in items.values()), path.stat().st_size)
            # HDF5 would read a lost chunk as zeros, so every chunk is read directly first.
            for item in (item for item in items.values() if item.chunks):
                for part in item.iter_chunks():
                    item.id.read_direct_chunk(tuple(cut.start for cut in part))
            return {key: np.asarray(item) for key, item in items.items()}
    except UserError:
        raise
    except MemoryError:
        raise UserError(
            f"{path}: does not fit into memory; use fewer transitions, or a larger machine"
        ) from None
    except Exception as error:  # h5py raises nearly everything on a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path}: not a readable HDF5 file, cut short or damaged ({reason})"
        ) from None


def check_size(path: Path | str, declared: int, stored: int = sys.maxsize) -> None:
    """Refuse more numbers than the file or the machine can hold, before anything is read.

    Loading a dataset takes up to three copies in memory.
    """
    if declared <= SMALL:
        return
    if declared > MOST * stored:
        raise UserError(
            f"{path}: declares {declared / 1e6:,.0f} MB of numbers in a file of "
            f"{stored / 1e6:,.1f} MB; it is damaged or forged"
        )
    if 3 * declared > (left := memory_left()):
        raise UserError(
            f"{path}: needs {3 * declared / 1e9:.1f} GB of memory, and {left / 1e9:.1f} GB are "
            "left; use fewer transitions, or a larger machine"
        )


def memory_left() -> float:
    """Bytes that this process can still allocate within the machine, its cgroup and its limits."""
    left = [float("inf")]
    with suppress(OSError, IndexError, ValueError):
        available = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
        left.append(float(available) * 1024)
    with suppress(OSError, IndexError, ValueError):  # memory.max is "max" if there is no limit
        name = Path("/proc/self/cgroup").read_text().split("0::")[1].split("\n")[0]
        group = Path(f"/sys/fs/cgroup{name}")
        used = (group / "memory.stat").read_text().split()[1]  # without the cache of files
        left.append(float((group / "memory.max").read_text()) - float(used))
    with suppress(OSError, IndexError, ValueError, AttributeError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        size = Path("/proc/self/statm").read_text().split()[0]
        if limit != resource.RLIM_INFINITY:
            left.append(limit - float(size) * resource.getpagesize())
    return min(left)


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
