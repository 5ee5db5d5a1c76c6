"""The published files: their names, the folders they may be in, and the mirrors they come from."""

import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from dynashift.errors import UserError
from dynashift.files import at_home, only_one, progress_bar
from dynashift.tasks import ROBOTS, SHIFTS

# Size and sha256 of every published file, by its name.
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())
COMMIT = "18e93a979f2c1a0cb30531cbca40e0e331fb4f46"  # of the authors' repository
MIRRORS = {  # tried in this order; every download is checked against PUBLISHED
    "source": (
        "http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2/",
        "https://huggingface.co/datasets/imone/D4RL/resolve/main/",
    ),
    "target": (
        f"https://raw.githubusercontent.com/buaawgj/TAF-DT/{COMMIT}/data/target_dataset/",
        f"https://cdn.jsdelivr.net/gh/buaawgj/TAF-DT@{COMMIT}/data/target_dataset/",
    ),
}


class Unavailable(UserError):
    """A published file is neither here nor on any mirror.

    reason: what was tried and why it failed, in one line without the addresses.
    """

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


# -------------------------------------------------------------------------------- names and folders


def file_name(env: str, shift: str, role: str, quality: str) -> str:
    """The published name: hopper_medium_replay-v2.hdf5, hopper_gravity_0.5_medium.hdf5, ..."""
    quality = quality.replace("-", "_")
    if role == "source":
        return f"{env}_{quality}-v2.hdf5"
    return f"{env}_{'gravity_0.5' if shift == 'gravity' else shift}_{quality}.hdf5"


def task_of(path: str | Path) -> tuple[str, str, str] | None:
    """(env, shift, quality) by the name of a published or generated file; None for other names."""
    name = Path(path).name.removesuffix(".hdf5").removeprefix("embedded_")
    env, *words = name.replace("gravity_0.5", "gravity").split("_")
    if env not in ROBOTS:
        return None
    shift = words[0] if words else ""
    if env not in SHIFTS.get(shift, ()):
        return env, "none", "-".join(words).split("-v2")[0]
    qualities = ("medium", "expert", "medium-expert", "medium-replay")
    return env, shift, "-".join(word for word in words[1:] if word in qualities)


def data_folders(data_dir: str | Path | None) -> list[Path]:
    """Folders in which published files are looked for; downloads go into the first."""
    found = []
    for folder in (data_dir, os.environ.get("DYNASHIFT_DATA"), "~/.d4rl/datasets"):
        with suppress(UserError):  # without a home folder there is nothing in it
            found += [at_home(folder)] if folder else []
    if not found:
        raise UserError(
            "there is no home folder for the data; set DYNASHIFT_DATA or HOME, or give --data-dir"
        )
    return found


def cache_folder() -> Path:
    """Where generated data are kept."""
    try:
        return at_home(os.environ.get("DYNASHIFT_DATA") or "~/.cache/dynashift")
    except UserError:
        raise UserError(
            "there is no home folder for generated data; set DYNASHIFT_DATA or HOME"
        ) from None


def find(name: str, data_dir: str | Path | None = None) -> Path | None:
    """A file of this name in --data-dir, $DYNASHIFT_DATA or ~/.d4rl/datasets, or in a subfolder."""
    for root in data_folders(data_dir):
        for path in (root / name, *sorted(root.glob(f"*/{name}"))):
            if path.is_file():
                return path
    return None


# ----------------------------------------------------------------------------------------- fetching


def published(env: str, shift: str, role: str, quality: str, data_dir=None) -> Path:
    """The path of a published file, which is downloaded if necessary."""
    name = file_name(env, shift, role, quality)
    path = find(name, data_dir)
    if path is not None:
        return path
    folder = data_folders(data_dir)[0]
    if name not in PUBLISHED:
        reason = f"could not find {name}: no data of this shift are published"
        raise Unavailable(f"{reason}; put the file into {folder}, or use --data embedded", reason)
    if role == "target" and quality == "medium-expert":
        # Its damaged rows are repaired from these two files.
        for parent in ("medium", "expert"):
            fetch(file_name(env, shift, role, parent), role, folder)
    return fetch(name, role, folder)


def fetch(name: str, role: str, folder: Path, mirrors=None, attempts: int = 2) -> Path:
    """Download a published file, mirror by mirror.

    A broken transfer is resumed. The file gets its name once it is complete and its sha256 checked.
    """
    target = folder / name
    partial = folder / f".{name}.part"
    wanted = PUBLISHED[name]
    problems = []  # (address, what went wrong there)
    with only_one(target):
        if target.exists():  # another process was faster
            return target
        for url in [mirror + name for mirror in mirrors or MIRRORS[role] for _ in range(attempts)]:
            try:
                _complete(url, partial, wanted["bytes"])
            except (OSError, EOFError, http.client.HTTPException) as error:
                # URLError, which is an OSError, has a reason.
                reason = getattr(error, "reason", None) or error or type(error).__name__
                problems.append((url, reason))
                continue
            with partial.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 in (wanted["sha256"], wanted.get("superseded_sha256")):
                os.replace(partial, target)
                return target
            partial.unlink()
            wrong = f"wrong content, sha256 {sha256[:12]}... instead of {wanted['sha256'][:12]}..."
            problems.append((url, wrong))
    what = f"could not download {name} ({wanted['bytes'] / 1e6:.0f} MB)"
    causes = "; ".join(dict.fromkeys(f"{url}: {problem}" for url, problem in problems))
    remedy = f"put the file into {folder} by hand, or use --data embedded"
    raise Unavailable(f"{what}: {causes}; {remedy}", f"{what}: {problems[-1][1]}")


def _complete(url: str, partial: Path, size: int) -> None:
    """Append to `partial` the rest of the file at this address."""
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"User-Agent": "dynashift"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # `partial` is longer than the file, so it is not a part of it
            partial.unlink()
        raise
    with response:
        if response.status != 206:  # the server sends everything from the start
            have = 0
        total = have + (size - have if response.length is None else response.length)
        name = partial.name.strip(".")
        bar = progress_bar(total=total, initial=have, unit="B", unit_scale=True, desc=name)
        with bar, partial.open("ab" if have else "wb") as file:
            while block := response.read(1 << 20):
                file.write(block)
                bar.update(len(block))
            have = file.tell()
    if have < total:
        raise EOFError(f"connection cut after {have} of {total} bytes")
