"""Seeds, devices and memory."""

import contextlib
import ctypes
import os
import platform
import random
import re
from pathlib import Path

import numpy as np
import torch

from dynashift.errors import UserError


def seed_everything(seed: int, deterministic: bool = True) -> None:
    """Seed Python, NumPy, and torch on all devices.

    deterministic: an operation whose result could differ between two runs raises an error.
    """
    if deterministic:
        # cuBLAS needs this to be deterministic, and reads it once, at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  some libraries draw from it
    torch.manual_seed(seed)
    # The same as torch.use_deterministic_algorithms, without the import of torch's compiler.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.backends.cudnn.benchmark = False  # it chooses algorithms by timing them


def pick_device(name: str) -> torch.device:
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one."""
    name = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0]}); try cpu"
        ) from None


def device_name(device) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The processor and the instructions that torch uses: others round differently."""
    found = {}
    with contextlib.suppress(OSError):  # Linux
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            found[name.strip()] = value.strip()
    name = found.get("model name") or platform.processor() or platform.machine()
    name = " ".join(re.sub(r"\((R|TM)\)|\bCPU\b|@.*|\d+-Core.*", " ", name).split())
    kind = ".".join(found[key] for key in ("cpu family", "model") if key in found)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name} ({', '.join(filter(None, [kind, capability]))})"


def reuse_memory() -> None:
    """Keep freed memory in the process (with glibc; elsewhere this does nothing).

    By default, the memory of large tensors goes back to the system, which zeroes its pages when the
    next tensor needs them. That can take up to half of an update's time on a CPU.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
            libc.mallopt(option, 2**30)
