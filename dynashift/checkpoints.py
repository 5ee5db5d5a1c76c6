"""Checkpoints, JSON files, and the versions that are recorded with them."""

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import math
import os
import platform
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from dynashift import files
from dynashift.arguments import flatten
from dynashift.errors import UserError


def to_json(x):
    """x in JSON's types.

    NaN and infinity, which JSON lacks, become null, so that one bad number does not lose a result.
    """
    if dataclasses.is_dataclass(x):
        x = flatten(x)
    if isinstance(x, np.ndarray | np.generic | torch.Tensor):
        x = x.tolist()
    if isinstance(x, dict):
        return {k: to_json(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [to_json(v) for v in x]
    if isinstance(x, Path):
        return x.as_posix()
    return None if isinstance(x, float) and not math.isfinite(x) else x


def write_json(path, x) -> None:
    """Write a record with its hash.

    It may contain NumPy numbers and arrays, tensors, paths and dataclasses. NaN and infinity become
    null.
    """
    files.write_json(path, to_json(x))


@functools.cache  # once, because the commit is that of the code when it was started
def versions() -> dict:
    found = {"python": platform.python_version(), "commit": None}
    for package in ("torch", "numpy", "mujoco", "gymnasium"):
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    root = Path(__file__).resolve().parents[1]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # Without the ceiling, git would look for a repository further up, around an installed copy.
    options = {"cwd": root, "env": {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}}
    options |= {"capture_output": True, "text": True, "timeout": 10, "check": True}
    # There may be no git, no repository, or no commit yet.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found["commit"] = subprocess.run(command, **options).stdout.strip()
    return found


def _state(part):
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if isinstance(part, torch.Generator):
        return part.get_state()
    return to_json(part.bit_generator.state) if isinstance(part, np.random.Generator) else part


def _restore(part, state) -> None:
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    elif isinstance(part, torch.Generator):
        part.set_state(state)
    else:
        part.bit_generator.state = state


def _global_states() -> dict:
    """Of Python and NumPy. Their 600 numbers each are tensors, which are read faster than lists."""
    version, numbers, gauss = random.getstate()
    state = to_json(np.random.get_state(legacy=False))  # noqa: NPY002
    state["state"]["key"] = torch.tensor(state["state"]["key"])
    return {"python": (version, torch.tensor(numbers), gauss), "numpy": state}


def _restore_global_states(saved: dict) -> None:
    version, numbers, gauss = saved["python"]  # in older files the numbers are lists
    random.setstate((version, tuple(torch.as_tensor(numbers).tolist()), gauss))
    state = saved["numpy"]
    key = np.asarray(state["state"]["key"], np.uint32)
    np.random.set_state({**state, "state": {**state["state"], "key": key}})  # noqa: NPY002


def _readable(x) -> bool:
    """Whether torch.load reads this without running code from the file."""
    if type(x) in (dict, collections.OrderedDict):
        return all(map(_readable, x)) and all(map(_readable, x.values()))
    if type(x) in (list, tuple):
        return all(map(_readable, x))
    return type(x) in (type(None), bool, int, float, str) or isinstance(x, torch.Tensor)


def save_checkpoint(path, parts: dict) -> None:
    """Write a checkpoint atomically, with the library versions and all global random states.

    parts: modules, optimizers, schedulers, generators of NumPy or torch, and plain data, i.e.
    dicts, lists and tuples of tensors, numbers and strings.
    """
    saved = {
        "parts": {name: _state(part) for name, part in parts.items()},
        **_global_states(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "versions": versions(),
    }
    if not _readable(saved):  # it is better to fail now than when the run is resumed
        reason = "a part holds more than tensors, numbers and strings"
        raise TypeError(f"{path} would be unreadable: {reason}")
    torch.save(saved, buffer := io.BytesIO())
    files.write_bytes(path, buffer.getvalue())


def read_checkpoint(path, device="cpu") -> dict:
    """Everything that `save_checkpoint` wrote. A damaged file can raise almost any exception."""
    return torch.load(files.read_zip(path), map_location=device, weights_only=True)


def load_checkpoint(path, parts: dict) -> dict | None:
    """Restore modules, optimizers, schedulers, generators and the global random states.

    Returns all saved parts by name, or None if there is no such file. Plain tensors are on the CPU.
    """
    path = Path(path)
    if not path.exists():
        return None
    try:
        # Load to the CPU, whatever the device: load_state_dict moves weights to theirs, but would
        # leave Adam's step counts on a GPU.
        saved = read_checkpoint(path)
        for name, part in parts.items():
            _restore(part, saved["parts"][name])
        _restore_global_states(saved)
        torch.set_rng_state(saved["torch"])
        for i, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, i)
        now = versions()
        changed = [
            f"{k} {v} (now {now.get(k)})" for k, v in saved["versions"].items() if v != now.get(k)
        ]
    except Exception as error:  # zipfile and torch raise many kinds for a damaged or foreign file
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        remedy = "delete it, or start again with --no-resume"
        raise UserError(f"cannot resume from {path} ({reason}); {remedy}") from error
    if changed:
        note = f"note: {path} was written under {', '.join(changed)}: numbers may differ"
        print(note, file=sys.stderr)
    return saved["parts"]
