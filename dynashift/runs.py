"""The record of a run: folder, seeds, checkpoints, logs, result. Written once here, for all training scripts.

A script is a plain function with a loop for each stage:

    folder = runs.run_dir("runs", "bc", task, args.seed, args, Args(), RUN_ARGS)
    with runs.session(folder, args, RUN_ARGS, args.resume) as stop:
        if runs.is_done(folder):
            return runs.read_json(folder / "result.json")
        runs.seed_everything(args.seed, args.torch_deterministic)
        policy, adam, rng = build(args)
        parts = {"policy": policy, "adam": adam, "rng": rng}  # all that has a state
        record = {"done": 0, "evaluations": [], "stages": {}}
        if saved := runs.load_checkpoint(folder / "ckpt.pt", parts):  # last before the loop: restores random states
            record = saved["record"]
        lap, writer = runs.stopwatch(record["stages"]), runs.open_writer(folder, record["done"])
        for step in (bar := runs.progress("policy", record["done"], args.steps)):
            losses = update(policy, adam, rng)
            if step % args.log_every == 0:
                runs.log(writer, step, losses, bar)
            if step % args.eval_every == 0:
                record["evaluations"].append(evaluate(step, policy))
            if step % args.save_every == 0 or step == args.steps or stop():
                record["done"] = step
                lap("policy")
                writer.flush()  # a resumed run does not log again what came before the checkpoint
                runs.save_checkpoint(folder / "ckpt.pt", {**parts, "record": record})
                if stop():
                    sys.exit(stop())
        writer.close()
        return runs.write_result(folder, args, record["evaluations"], record["stages"], data)
"""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from dynashift.errors import UserError
from dynashift.files import atomic

try:
    import fcntl
    import resource
except ImportError:  # Windows: runs are not locked and their memory is not measured
    fcntl = resource = None


# ---------------------------------------------------------------------------------------- folder and seeds


def run_dir(root, exp: str, task: str, seed: int, args, defaults, ignore=()) -> Path:
    """root/exp/task/seed3, plus -{8 hex} of those arguments that differ from their defaults.

    ignore: names of the arguments that stand in the path already or do not change the result (device, resume, ...).
    """
    args, defaults = _plain(args), _plain(defaults)
    changed = {k: v for k, v in args.items() if k not in ignore and v != defaults[k]}
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]
    return Path(root, exp, task, f"seed{seed}-{digest}" if changed else f"seed{seed}")


def seed_everything(seed: int, deterministic: bool = True) -> None:
    """Python, NumPy, and torch on all devices. deterministic: an operation that would not repeat itself is an error."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, before its first use
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  some libraries draw from it
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False  # it chooses algorithms by the clock


def pick_device(name: str) -> torch.device:
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one."""
    name = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}); try cpu") from None


def reuse_memory() -> None:
    """Freed memory stays with the process (glibc; elsewhere nothing happens). By default large tensors are given back
    to the system, and their pages zeroed when the next one asks for them: up to half of an update on a CPU."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
            libc.mallopt(option, 2**30)


@contextlib.contextmanager
def session(folder: Path, args, ignore=(), resume: bool = True):
    """Own a run folder: lock it, clear it of leftovers, write args.json, turn SIGINT and SIGTERM into a request.

    Yields stop(): 0, or once a signal has come the status to exit with after the next checkpoint. A second signal acts
    at once. With resume=False the result, checkpoints and logs of an earlier run are deleted.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_file = open(folder / ".lock", "a+")  # noqa: SIM115  closed by the `with` below
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder for the runs") from error
    with lock_file, _signals() as stop:
        _lock(lock_file, folder)
        for leftover in folder.glob(".*.tmp"):  # of a process that was killed, for there is no other one here
            leftover.unlink()
        for old in () if resume else ("result.json", "*.pt", "**/events.out.tfevents.*"):
            for file in folder.glob(old):
                file.unlink()
        now = _plain(args)
        if is_done(folder) or any(folder.glob("*.pt")):  # same folder, other values: a default in the code has changed
            then = read_json(folder / "args.json")
            common = sorted((now.keys() & then.keys()) - set(ignore))
            if changed := [f"{k}={then[k]} (now {now[k]})" for k in common if then[k] != now[k]]:
                raise UserError(f"{folder} was run with {', '.join(changed)}; start it anew with --no-resume")
        if not is_done(folder):  # a finished record is left as it is
            write_json(folder / "args.json", now)
        yield stop


def _lock(file, folder: Path) -> None:
    """The system drops this lock with the process, however that ends."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise UserError(f"{folder} is in use by process {file.read() or '?'}; wait for it or end it") from None
    except OSError as error:  # some network file systems
        print(f"note: {folder} cannot be locked ({error.strerror}); do not start a run twice", file=sys.stderr)
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}")
    file.flush()


@contextlib.contextmanager
def _signals():
    status = 0
    old = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    old = {n: handler for n, handler in old.items() if handler != signal.SIG_IGN}  # as SIGINT is in background jobs

    def request(number, frame):
        nonlocal status
        status = 128 + number
        signal.signal(number, old[number])
        os.write(2, b"\nstopping at the next checkpoint; the same signal again stops at once\n")

    try:
        for number in old:
            signal.signal(number, request)
        yield lambda: status
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# -------------------------------------------------------------------------------------------------- files


def _write(path: Path, data: bytes) -> None:
    try:
        with atomic(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _plain(x):
    """x in JSON's types. NaN and infinity, which JSON lacks, become null: no result is lost to one bad number."""
    if dataclasses.is_dataclass(x):
        x = dataclasses.asdict(x)
    if isinstance(x, np.ndarray | np.generic | torch.Tensor):
        x = x.tolist()
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if isinstance(x, Path):
        return x.as_posix()
    return None if isinstance(x, float) and not math.isfinite(x) else x


def write_json(path, x) -> None:
    """Atomic. Takes NumPy numbers and arrays, tensors, paths and dataclasses too; NaN and infinity become null."""
    _write(Path(path), (json.dumps(_plain(x), indent=1, allow_nan=False) + "\n").encode())


def read_json(path):
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); delete it, or start anew with --no-resume") from error


def _state(part):
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if isinstance(part, torch.Generator):
        return part.get_state()
    return _plain(part.bit_generator.state) if isinstance(part, np.random.Generator) else part


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
        "numpy": _plain(np.random.get_state(legacy=False)),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "versions": versions(),
    }
    torch.save(saved, buffer := io.BytesIO())
    try:  # rather fail now than at the resume
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise TypeError(f"{path} would be unreadable: a part holds more than tensors, numbers and strings") from error
    _write(Path(path), buffer.getvalue())


def load_checkpoint(path, parts: dict) -> dict | None:
    """Restore those parts (modules, optimizers, schedulers, generators) and the global random states.

    Returns all that was saved, by name, or None if there is no such file. Loose tensors come on the CPU.
    """
    path = Path(path)
    if not path.exists():
        return None
    try:
        data = path.read_bytes()
        if broken := zipfile.ZipFile(io.BytesIO(data)).testzip():  # torch.load verifies no checksums
            raise ValueError(f"{broken} is damaged")
        # To the CPU, whatever the device: load_state_dict moves weights, but would leave Adam's step counts on a GPU.
        saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for name, part in parts.items():
            _restore(part, saved["parts"][name])
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])  # noqa: NPY002
        torch.set_rng_state(saved["torch"])
        for i, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, i)
        changed = [f"{k} {v} (now {versions().get(k)})" for k, v in saved["versions"].items() if v != versions().get(k)]
    except Exception as error:  # zipfile and torch have many for a file that is damaged or not ours
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"cannot resume from {path} ({reason}); delete it, or start anew with --no-resume") from error
    if changed:
        print(f"note: {path} was written under {', '.join(changed)}: numbers may differ", file=sys.stderr)
    return saved["parts"]


# ------------------------------------------------------------------------------------ logs, progress, costs


def open_writer(folder: Path, step: int):
    """TensorBoard writer of a run that has done `step` updates. What a killed run logged after them is purged, whatever
    its tag: so stages that all count from 1 need a folder each."""
    from torch.utils.tensorboard import SummaryWriter  # here, for it takes a second

    # Files are read in the order of their names, which hold the second and the process: no order at all for two that
    # were started within a second, or on two machines. So earlier files are numbered.
    for i, file in enumerate(sorted(folder.glob("events.out.tfevents.*"))):
        file.rename(folder / f"events.out.tfevents.{i:010d}")
    return SummaryWriter(str(folder), purge_step=step + 1 if step else 0)


def log(writer, step: int, values: dict, bar=None) -> None:
    """Log numbers and one-element tensors, the latter moved to the host all at once; show them in the bar too."""
    if unknown := [k for k in values if not k.startswith(("losses/", "charts/", "eval/"))]:
        raise ValueError(f"log keys begin with losses/, charts/ or eval/: {unknown}")
    tensors = {k: v.detach() for k, v in values.items() if isinstance(v, torch.Tensor)}
    for device in {v.device for v in tensors.values()}:
        keys = [k for k, v in tensors.items() if v.device == device]
        host = torch.stack([tensors[k].float().reshape(()) for k in keys]).tolist()
        values = values | dict(zip(keys, host, strict=True))
    for key, value in values.items():
        writer.add_scalar(key, value, step)
    if bar is not None:
        bar.set_postfix({k: float(v) for k, v in values.items()}, refresh=False)  # shown when a refresh is due


def progress(label: str, start: int, end: int, seconds: float = 60) -> tqdm:
    """start + 1, ..., end with a bar, updates/s and time left; where stderr is no terminal, a line every `seconds`."""
    options = {"desc": label, "initial": start, "total": end, "unit": " updates", "miniters": 1}
    if not sys.stderr.isatty():
        options["file"] = types.SimpleNamespace(
            write=lambda text: text.strip() and print(text.strip(), file=sys.stderr), flush=sys.stderr.flush
        )
        options["bar_format"] = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
        options["mininterval"] = options["maxinterval"] = seconds
    return tqdm(range(start + 1, end + 1), **options)


def stopwatch(stages: dict, device="cpu"):
    """lap(name) charges the seconds since the last lap to a stage and notes the process's peak memory up to now.

    stages belongs in the checkpoint, so that a resumed run goes on adding. Work lost to a kill is not counted.
    """
    last, cuda = time.perf_counter(), torch.device(device).type == "cuda"

    def lap(name: str) -> None:
        nonlocal last
        if cuda:
            torch.cuda.synchronize(device)
        stage = stages.setdefault(name, {"seconds": 0.0, "peak_memory_mb": 0.0})
        now = time.perf_counter()
        stage["seconds"] += now - last
        last = now
        if resource:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
            stage["peak_memory_mb"] = max(stage["peak_memory_mb"], peak)
        if cuda:
            peak = torch.cuda.max_memory_allocated(device) / 1e6
            stage["peak_cuda_memory_mb"] = max(stage.get("peak_cuda_memory_mb", 0.0), peak)

    return lap


# ------------------------------------------------------------------------------------------------- result


@functools.cache  # once: the commit is that of the code as it was started
def versions() -> dict:
    found = {"python": platform.python_version(), "commit": None}
    for package in ("torch", "numpy", "mujoco", "gymnasium"):
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # The ceiling keeps git from a repository further up, in which an installed copy happens to lie.
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, no repository, no commit yet
        git = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=10, check=True)
        found["commit"] = git.stdout.strip()
    return found


def summaries(evaluations: list[dict]) -> dict:
    """Of evaluations {step, returns, score} in the order of their steps. Three answers to three questions, not to be
    mixed: `best` is chosen by the very score it reports. {} if there are no evaluations."""

    def mean(chosen):
        score = float(np.mean([e["score"] for e in chosen]))
        return_mean = float(np.mean([np.mean(e["returns"]) for e in chosen]))
        return {"steps": [e["step"] for e in chosen], "score": score, "return_mean": return_mean}

    if not evaluations:
        return {}
    best = max(evaluations, key=lambda e: e["score"] if math.isfinite(e["score"]) else -math.inf)
    return {"final": mean(evaluations[-1:]), "mean_of_last_three": mean(evaluations[-3:]), "best": mean([best])}


def write_result(folder: Path, args, evaluations: list[dict], stages: dict, data: dict, device="cpu", **more) -> dict:
    """result.json, written last: if it is there, the run is done. data: name -> provenance (kind, sha256)."""
    name = f"{platform.machine()}, {torch.get_num_threads()} threads"
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
    result = {"args": args, "summaries": summaries(evaluations), "evaluations": evaluations, "stages": stages}
    result |= {"data": data, "versions": versions(), "device": name, **more}
    write_json(folder / "result.json", result)
    return read_json(folder / "result.json")


def is_done(folder: Path) -> bool:
    return (folder / "result.json").exists()


def finished(folder: Path, *data) -> dict | None:
    """The result of a run that is done, and says so; None if it is not. data: the datasets that it must be of."""
    if not is_done(folder):
        return None
    result = read_json(folder / "result.json")
    if sorted(x["sha256"] for x in result["data"].values()) != sorted(x.sha256 for x in data):
        raise UserError(f"{folder} was run with other data; start it anew with --no-resume")
    print(f"{folder} is done: score {result['summaries']['final']['score']:.1f}; --no-resume starts it anew")
    return result
