"""Checkpoints, JSON files, and the versions that are recorded with them."""

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
    """x in JSON's types. NaN and infinity, which JSON lacks, become null: no result is lost to one bad number."""
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
    """A record with its hash. Takes NumPy numbers and arrays, tensors, paths and dataclasses too; NaN and infinity
    become null."""
    files.write_json(path, to_json(x))


@functools.cache  # once: the commit is that of the code as it was started
def versions() -> dict:
    found = {"python": platform.python_version(), "commit": None}
    for package in ("torch", "numpy", "mujoco", "gymnasium"):
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    root = Path(__file__).resolve().parents[1]
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    # The ceiling keeps git from a repository further up, in which an installed copy happens to lie.
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    with contextlib.suppress(
        OSError, subprocess.SubprocessError
    ):  # no git, no repository, no commit yet
        git = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=10, check=True
        )
        found["commit"] = git.stdout.strip()
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


def save_checkpoint(path, parts: dict) -> None:
    """Atomic. parts: modules, optimizers, schedulers, generators of NumPy or torch, and plain data, which is to say
    dicts, lists and tuples of tensors, numbers and strings. Library versions and all global random states are added."""
    saved = {
        "parts": {name: _state(part) for name, part in parts.items()},
        "python": random.getstate(),
        "numpy": to_json(np.random.get_state(legacy=False)),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "versions": versions(),
    }
    torch.save(saved, buffer := io.BytesIO())
    try:  # rather fail now than at the resume
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise TypeError(
            f"{path} would be unreadable: a part holds more than tensors, numbers and strings"
        ) from error
    files.write_bytes(path, buffer.getvalue())


def read_checkpoint(path, device="cpu") -> dict:
    """All that `save_checkpoint` wrote, on the CPU unless told. A damaged file raises one of many exceptions."""
    return torch.load(files.read_zip(path), map_location=device, weights_only=True)


def load_checkpoint(path, parts: dict) -> dict | None:
    """Restore those parts (modules, optimizers, schedulers, generators) and the global random states.

    Returns all that was saved, by name, or None if there is no such file. Tensors outside of parts are on the CPU.
    """
    path = Path(path)
    if not path.exists():
        return None
    try:
        # To the CPU, whatever the device: load_state_dict moves weights, but would leave Adam's step counts on a GPU.
        saved = read_checkpoint(path)
        for name, part in parts.items():
            _restore(part, saved["parts"][name])
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])  # noqa: NPY002
        torch.set_rng_state(saved["torch"])
        for i, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, i)
        changed = [
            f"{k} {v} (now {versions().get(k)})"
            for k, v in saved["versions"].items()
            if v != versions().get(k)
        ]
    except Exception as error:  # zipfile and torch have many for a file that is damaged or not ours
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"cannot resume from {path} ({reason}); delete it, or start again with --no-resume"
        ) from error
    if changed:
        print(
            f"note: {path} was written under {', '.join(changed)}: numbers may differ",
            file=sys.stderr,
        )
    return saved["parts"]
