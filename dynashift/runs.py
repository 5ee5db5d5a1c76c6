"""The record of a run: folder, seeds, checkpoints, logs, result. Written once here, for all training scripts.

A script is a plain function with a plain loop for each stage:

    source, target = load_task(args.task)
    with runs.open_run("bc", args, runs.plain(Args, defaults, args), source=source, target=target) as run:
        if run.result:  # it is done already
            return run.result
        runs.seed_everything(args.run.seed, args.run.torch_deterministic)
        nets = build(args)  # all that has a state
        run.begin(nets)  # last before the loop: restores random states
        if args.run.eval_only:
            return run.only_evaluated(evaluate(nets))
        for step in run.steps("policy", args.updates):  # saves after the body where that is due
            run.log(step, update(nets))  # first after the update: divergence ends the run before it is saved
            if run.evaluation_due(step):
                run.evaluated(step, evaluate(nets))
        return run.finish()
"""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from dynashift import files
from dynashift.envs import make, make_batch
from dynashift.errors import InUse, UserError
from dynashift.events import Events
from dynashift.files import check_folder, open_lock, progress_bar, read_json, say, slug
from dynashift.results import read_result, summaries  # noqa: F401  part of this module's interface
from dynashift.scores import normalized_score

try:
    import fcntl
    import resource
except ImportError:  # Windows: runs are not locked and their memory is not measured
    fcntl = resource = None


# ---------------------------------------------------------------------------------------------- arguments


Flat = tyro.conf.OmitArgPrefixes  # the flags of a part of Args keep their own names: --seed, not --run.seed


@dataclass(frozen=True)
class RunArgs:
    """Flags of the run, the same in all training scripts."""

    out: Path = Path("runs")
    """folder of the runs; taf_dt.py and otdf.py keep their gates and costs in its folder preprocess"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one"""
    quick: bool = False
    """a small run of a few minutes: less data, smaller networks, fewer updates; a flag given beside it wins"""
    seed: int = 1
    """of networks, batches and dropout; evaluation episodes have their own"""
    resume: bool = True
    """go on from the run folder's checkpoint; --no-resume starts from the beginning"""
    eval_only: bool = False
    """evaluate the run folder's last checkpoint again, and nothing else"""
    torch_deterministic: bool = True
    """refuse operations that would not repeat themselves"""
    log_every: int = 500
    """log every N updates"""
    save_every: int = 5_000
    """save a checkpoint every N updates"""
    eval_every: int = 10_000
    """evaluate every N updates; there are three more evaluations at 98, 99 and 100 % of the updates"""
    eval_episodes: int = 10
    """episodes of an evaluation"""
    track: bool = False
    """log to Weights & Biases as well (pip install wandb)"""


def flatten(args) -> dict:
    """All arguments by the names of their flags, whichever part of Args they are in."""
    values = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        values |= flatten(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def replace(args, **values):
    """A copy with other values of the arguments of these names."""
    if unknown := values.keys() - flatten(args).keys():
        raise TypeError(f"{type(args).__name__} has no {', '.join(sorted(unknown))}")
    return _replaced(args, values)


def _replaced(args, values: dict):
    changed = {}
    for field in dataclasses.fields(args):
        old = getattr(args, field.name)
        changed[field.name] = _replaced(old, values) if dataclasses.is_dataclass(old) else values.get(field.name, old)
    return type(args)(**changed)


def compose(Args, **values):
    """Args with these values, by the names of their flags: the inverse of `flatten`."""
    return replace(Args(), **values)


# Arguments that choose the task and the place of a run: no default of a task, preset or --quick changes them.
GIVEN = ("env", "shift", "source", "target", "seed", "data", "data_dir", "out", "device", "quick", "preset")
# Arguments that are part of the run folder's path, are its inputs, or have no effect on the result.
IGNORE = {
    "env", "shift", "source", "target", "seed", "data", "data_dir",
    "out", "device", "resume", "eval_only", "log_every", "save_every", "track", "capture_video",
}  # fmt: skip


def plain(Args, defaults, args):
    """What Args would be for the task of `args` if the command line gave nothing else.

    defaults(args) is the script's own function: the values, by the names of their flags, that the task, a preset and
    --quick have where the command line says nothing.
    """
    values = flatten(args)
    return compose(Args, **defaults(args) | {name: values[name] for name in GIVEN if name in values})


def read_args(Args, defaults, description: str, words: list[str] | None = None):
    """The arguments of the command line, or of these words. They are read twice: the first time for the task, preset
    and --quick, whose values are then the defaults under which all flags are read, and which --help shows."""
    words = sys.argv[1:] if words is None else words
    first = tyro.cli(Args, args=[word for word in words if word not in ("-h", "--help")])
    return tyro.cli(Args, args=words, default=plain(Args, defaults, first), description=description)


def refuse_preset(script: str) -> None:
    """Answer --preset, which has become a script of its own, with the command that replaces it."""
    words = list(sys.argv[1:])
    for i, word in enumerate(words):
        if word == "--preset" or word.startswith("--preset="):
            value = word.partition("=")[2] or "".join(words[i + 1 : i + 2])
            rest = words[:i] + words[i + (1 if "=" in word else 2) :]
            command = shlex.join(["python", script if value == "released" else sys.argv[0], *rest])
            raise UserError(f"there is no --preset any more; use {command}")


def budget_share(args, values: dict, official: int) -> float:
    """Updates of a run as a share of the official number, at most 1. args: what the command line gave; values: the
    defaults that hold where it gave nothing."""
    default = type(args).updates
    updates = args.updates if args.updates != default else values.get("updates", default)
    return min(1.0, max(1, updates) / official)


def averaging_rate(rate: float, share: float) -> float:
    """The rate at which a slow copy follows its network, in a run of this share of the official updates."""
    # A copy remembers the last 1 / rate updates. A shorter run keeps that memory's share of the run, or its copies
    # would end with what they began with; but beyond 1/20 a copy would hardly be slower than its network.
    return max(rate, min(0.05, rate / share))


def check_args(args, positive: str, not_negative: str = "", shares: str = "") -> None:
    """Refuse an --out that cannot be written to, and any of these arguments, named with spaces in between, or of the
    run's, that does not have the sign it must have. shares lie between 0 and 1."""
    values = flatten(args)
    if not args.run.eval_only:
        check_folder(args.run.out)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} must be a number, not {value}")
    for name in f"updates log_every save_every eval_every eval_episodes {positive}".split():
        if values[name] is None or not values[name] > 0:
            raise UserError(f"--{name.replace('_', '-')} must be positive, not {values[name]}")
    for name in f"seed {not_negative}".split():
        if values[name] is None or not values[name] >= 0:
            raise UserError(f"--{name.replace('_', '-')} must not be negative, and is {values[name]}")
    if args.run.track:
        import_wandb()
    for name in shares.split():
        if not 0 <= values[name] < 1:
            raise UserError(f"--{name.replace('_', '-')} lies between 0 and 1, and is {values[name]}")
    if args.run.seed >= 2**31 // 10_000:  # evaluation episodes have seeds of their own, from 10,000 times this one
        raise UserError(f"--seed {args.run.seed} is too large; use one below {2**31 // 10_000}")


# ---------------------------------------------------------------------------------------- folder and seeds


LONGEST = 60  # characters of a run folder's name


def run_dir(root, exp: str, task: str, seed: int, args, defaults, ignore=()) -> Path:
    """root/exp/task/seed3, plus what differs from the defaults: seed3-quick-filter_none-no_ot_reward-updates2000.

    ignore: names of the arguments that stand in the path already or do not change the result (device, resume, ...).
    Other arguments never have the same name: where it would be too long, or could be read in two ways, 8 hex digits of
    all that differs follow.
    """
    args, defaults = _plain(args), _plain(defaults)
    changed = {k: v for k, v in args.items() if k not in ignore and v != defaults[k]}
    order = sorted(changed, key=lambda name: (name != "quick", name))
    words = [f"seed{seed}", *(_word(name, changed[name], defaults[name]) for name in order)]
    known = {name: default for name, default in defaults.items() if name not in ignore}
    unclear = any(sum(_may_be_of(*item, word) for item in known.items()) != 1 for word in words[1:])
    if unclear or len("-".join(words)) > LONGEST:
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]
        words = [word for word in words if "?" not in word]
        while len("-".join([*words, digest])) > LONGEST:
            words.pop()
        words.append(digest)
    return Path(root, exp, task, "-".join(words))


def _word(name: str, value, default) -> str:
    """An argument and its value without a hyphen; "?" if they cannot be written like that."""
    if isinstance(default, bool):
        return {True: name, False: f"no_{name}"}[value] if isinstance(value, bool) else "?"
    if value is None:
        return f"no_{name}"
    if isinstance(value, str) and isinstance(default, str | None) and re.fullmatch("[A-Za-z0-9.-]+", value):
        return f"{name}_{value.replace('-', '+')}"
    number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if number and isinstance(default, int | float | None):
        return name + (str(value) if isinstance(value, int) else np.format_float_positional(value, trim="-"))
    return "?"


def _may_be_of(name: str, default, word: str) -> bool:
    """Whether `_word` could have written this of an argument with that name and default."""
    word = word.removeprefix("no_") if word == f"no_{name}" else word
    values = "" if isinstance(default, bool) else "[0-9.]+" if isinstance(default, int | float) else "_[A-Za-z0-9.+]+"
    values += "|[0-9.]+" if default is None else ""
    return word == name or re.fullmatch(f"{re.escape(name)}({values})", word) is not None


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


def device_name(device) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def reuse_memory() -> None:
    """Freed memory stays with the process (glibc; elsewhere nothing happens). By default large tensors are given back
    to the system, and their pages zeroed when the next one asks for them: up to half of an update on a CPU."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
            libc.mallopt(option, 2**30)


# Ctrl-C; end; a terminal or connection that was closed; a cluster's warning that the time is nearly up.
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]


class Stop:
    """What one of SIGNALS asked for. status: 0, or what to exit with. now: nothing would be lost by exiting at once,
    and so the signal does that; otherwise the loop saves first."""

    status, now = 0, True


@contextlib.contextmanager
def signals(folder: Path | None = None, again: str = "the same command"):
    """SIGNALS as requests while the block lasts: yields a Stop. A second signal acts at once. folder: where the
    checkpoint is, if there is one; again: what continues from it."""
    stop, old = Stop(), {n: signal.getsignal(n) for n in SIGNALS}
    # Ignored, as SIGINT is in background jobs and SIGHUP under nohup; None: not Python's.
    old = {n: handler for n, handler in old.items() if handler not in (signal.SIG_IGN, None)}

    def request(number, frame):
        stop.status = 128 + number
        signal.signal(number, old[number])
        if stop.now:
            sys.exit(stop.status)

    try:
        for number in old:
            signal.signal(number, request)
        yield stop
    except SystemExit:
        if stop.status:
            saved = folder is not None and (folder / "ckpt.pt").exists()
            say(f"saved; {again} continues" if saved else "stopped; the same command starts again")
            gc.freeze()  # the interpreter need not look through all that torch holds before it ends
        raise
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def session(folder: Path, args, ignore=(), resume: bool = True):
    """Own a run folder: lock it, clear it of leftovers, write args.json, turn SIGNALS into a request.

    Yields a Stop. With resume=False the result, checkpoints and logs of an earlier run are deleted.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_file = open_lock(folder / ".lock")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder for the runs") from error
    again = "the same command" if resume else "the same command without --no-resume"
    with lock_file, signals(folder, again) as stop:
        _lock(lock_file, folder)
        leftovers = [".*.tmp"]  # of a process that was killed, because there is no other one here
        with _writing(folder):
            for old in leftovers if resume else [*leftovers, "result.json", "*.pt", "**/events.out.tfevents.*"]:
                for file in folder.glob(old):
                    file.unlink()
        now = _plain(args)
        if is_done(folder) or any(folder.glob("*.pt")):
            _check_same(folder, now, ignore)
        if not is_done(folder):  # a finished record is left as it is
            write_json(folder / "args.json", now)
        yield stop


def _check_same(folder: Path, now: dict, ignore) -> None:
    """The same folder, but other values: a default in the code has changed."""
    then = read_json(folder / "args.json")
    common = sorted((now.keys() & then.keys()) - set(ignore))
    if changed := [f"{k}={then[k]} (now {now[k]})" for k in common if then[k] != now[k]]:
        raise UserError(f"{folder} was run with {', '.join(changed)}; start it again with --no-resume")


@contextlib.contextmanager
def reading(folder: Path, args, ignore=()):
    """A session for --eval-only, which writes nothing: the folder may be read-only, or in use. Yields a Stop."""
    with signals(folder) as stop:
        if (folder / "ckpt.pt").exists():
            _check_same(folder, _plain(args), ignore)
        yield stop


def _lock(file, folder: Path) -> None:
    """The system drops this lock with the process, however that ends."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise InUse(f"{folder} is in use by process {file.read() or '?'}; wait for it or end it") from None
    except OSError as error:  # some network file systems
        print(f"note: {folder} cannot be locked ({error.strerror}); do not start a run twice", file=sys.stderr)
    with _writing(folder / ".lock"):
        os.ftruncate(file.fileno(), 0)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        os.write(file.fileno(), f"{os.getpid()} on {socket.gethostname()}".encode())


# -------------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def _writing(path: Path):
    """What cannot be deleted, renamed or written here is one line."""
    try:
        yield
    except OSError as error:
        raise files.CannotWrite(error.errno, error.strerror, str(path)) from None


def _plain(x):
    """x in JSON's types. NaN and infinity, which JSON lacks, become null: no result is lost to one bad number."""
    if dataclasses.is_dataclass(x):
        x = flatten(x)
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
    """A record with its hash. Takes NumPy numbers and arrays, tensors, paths and dataclasses too; NaN and infinity
    become null."""
    files.write_json(path, _plain(x))


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
    files.write_bytes(path, buffer.getvalue())


def read_checkpoint(path, device="cpu") -> dict:
    """All that `save_checkpoint` wrote, on the CPU unless told. A damaged file raises one of many exceptions."""
    return torch.load(files.read_zip(path), map_location=device, weights_only=True)


def load_checkpoint(path, parts: dict) -> dict | None:
    """Restore those parts (modules, optimizers, schedulers, generators) and the global random states.

    Returns all that was saved, by name, or None if there is no such file. Loose tensors come on the CPU.
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
    # Files are read in the order of their names, which hold the second and the process: no order at all for two that
    # were started within a second, or on two machines. So earlier files are numbered.
    with _writing(folder):
        for i, file in enumerate(sorted(folder.glob("events.out.tfevents.*"))):
            file.rename(folder / f"events.out.tfevents.{i:010d}")
    return Events(folder, step + 1 if step else 0)


def on_host(values: dict) -> dict:
    """One-element tensors as numbers, all of a device moved at once; the rest as it is."""
    tensors = {k: v.detach() for k, v in values.items() if isinstance(v, torch.Tensor)}
    for device in {v.device for v in tensors.values()}:
        keys = [k for k, v in tensors.items() if v.device == device]
        host = torch.stack([tensors[k].float().reshape(()) for k in keys]).tolist()
        values = values | dict(zip(keys, host, strict=True))
    return values


def log(writer, step: int, values: dict, bar=None) -> None:
    """Log numbers and one-element tensors; show the first loss in the bar too."""
    if unknown := [k for k in values if not k.startswith(("losses/", "charts/", "eval/"))]:
        raise ValueError(f"log keys begin with losses/, charts/ or eval/: {unknown}")
    values = on_host(values)
    for key, value in values.items():
        writer.add_scalar(key, value, step)
    if bar is not None:  # shown when a refresh is due
        losses = [(k[7:], float(v)) for k, v in values.items() if k.startswith("losses/")]
        bar.set_postfix(dict(losses[:1]), refresh=False)


def stopwatch(stages: dict, device="cpu"):
    """lap(name) charges the seconds since the last lap, and the process's peak memory in that time, to a stage.

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
        stage["peak_memory_mb"] = max(stage["peak_memory_mb"], peak_memory())
        if cuda:
            peak = torch.cuda.max_memory_allocated(device) / 1e6
            stage["peak_cuda_memory_mb"] = max(stage.get("peak_cuda_memory_mb", 0.0), peak)
            torch.cuda.reset_peak_memory_stats(device)

    return lap


def peak_memory() -> float:
    """Largest resident memory in MB since the last call; where the system has no such thing, since the beginning."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
        return float(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6 if resource else 0.0


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


def write_result(folder: Path, args, evaluations: list[dict], stages: dict, data: dict, device="cpu", **more) -> dict:
    """result.json, written last: if it is there, the run is done. data: name -> provenance (kind, sha256)."""
    result = {"args": args, "evaluations": evaluations, "stages": stages}
    result |= {"data": data, "versions": versions(), "device": device_name(device), **more}
    write_json(folder / "result.json", result)
    return read_result(folder / "result.json")


def is_done(folder: Path) -> bool:
    return (folder / "result.json").exists()


def finished(folder: Path, *data) -> dict | None:
    """The result of a run that is done, and says so; None if it is not. data: the datasets that it must be of."""
    if not is_done(folder):
        return None
    result = read_result(folder / "result.json")
    if sorted(x["sha256"] for x in result["data"].values()) != sorted(x.sha256 for x in data):
        raise UserError(f"{folder} was run with other data; start it anew with --no-resume")
    print(f"{folder} is done: score {_shown(result)}; --no-resume starts it again")
    return result


def _shown(result: dict) -> str:
    """The final score as text. It is no number if the returns of an episode were none."""
    score = result["summaries"].get("final", {}).get("score")
    return "undefined" if score is None else f"{score:.1f}"


# ---------------------------------------------------------------------------------------------- open runs


@torch.no_grad()
def play(args, act, workers: int | None = None) -> dict:
    """Episodes side by side in the target's simulator, the same ones at every evaluation.

    act: from observations [n, d_s], the rewards [n] of the last step, and which episodes are still
    going on [n], to actions [n, d_a].
    """
    n = args.run.eval_episodes
    batch = make_batch(args.task.env, args.task.shift, n, **({} if workers is None else {"workers": workers}))
    obs = batch.reset(10_000 * args.run.seed)
    alive = np.ones(n, bool)
    returns, lengths, rewards = np.zeros(n), np.zeros(n, int), np.zeros(n)
    while alive.any():
        obs, rewards, terminated, truncated = batch.step(act(obs, rewards, alive))
        returns += rewards  # 0 after the end
        lengths += alive
        alive = ~(terminated | truncated)
    batch.close()
    score = float(normalized_score(args.task.env, args.task.shift, returns.mean()))
    return {"returns": returns.tolist(), "lengths": lengths.tolist(), "score": score}


def record_video(path: Path, args, act) -> None:
    """The first episode of an evaluation again, with a camera. act: as for `play`, for one robot."""
    import imageio

    seed = 10_000 * args.run.seed
    env = make(args.task.env, args.task.shift, seed=seed, render_mode="rgb_array", width=320, height=320)
    obs, _ = env.reset(seed=seed)
    frames, steps, reward, ended = [], 0, 0.0, False
    while not ended:
        if steps % 3 == 0:  # a GIF's clock has hundredths of a second
            frames.append(env.render())
        action = act(obs[None], np.array([reward]), np.ones(1, bool))[0]
        obs, reward, terminated, truncated, _ = env.step(action)
        ended = terminated or truncated
        steps += 1
    env.close()
    imageio.mimsave(path, frames, duration=3000 * env.unwrapped.dt, loop=0)
    say(f"video of {steps} steps: {path}")


@dataclass
class Run:
    """A run that is open, and all that its loops need: made by `open_run`."""

    method: str
    args: Any
    plain: dict  # the arguments that this task has if nothing else is given
    ignore: set[str]
    data: dict  # role -> Dataset
    folder: Path
    stop: Stop  # of `session`
    result: dict | None  # of a run that is done
    limit: float = math.inf  # values beyond it have diverged
    remedy: str = "--lr"  # what to lower then
    lap: Any = None  # of `stopwatch`, which starts with the first stage
    bar: Any = None  # of the stage

    def head(self) -> None:
        """Print what is going to be done."""
        args = self.args
        say(f"{self.method} on {args.task.env} {args.task.shift}, seed {args.run.seed}")
        if changed := self._changed({"seed"}):
            say(f"  changed  {', '.join(f'{k}={v}' for k, v in changed.items())}")
        for role, data in self.data.items():
            score = f", normalised score {data.score:.1f}" if role == "target" else ""
            name = args.task.source if args.task.target == "none" else getattr(args.task, role)
            say(f"  {role:7}  {name}, {data.kind}, {len(data):,} transitions{score}")
        say(f"  device   {args.run.device}: {device_name(args.run.device)}")
        say(f"  results  {self.folder}")

    def _changed(self, ignore: set[str]) -> dict:
        everything = flatten(self.args)
        return {k: v for k, v in everything.items() if k not in self.ignore | ignore and v != self.plain[k]}

    def begin(self, nets: dict, **more) -> None:
        """Go on from the checkpoint, if there is one. nets: all that has a state; more: what the record has besides."""
        self.nets, hashes = nets, [x.sha256 for x in self.data.values()]
        self.record = {"done": {}, "evaluations": [], "stages": {}, "sha256": hashes, **more}
        if saved := load_checkpoint(self.folder / "ckpt.pt", nets):
            if saved["record"]["sha256"] != hashes:
                raise UserError(f"{self.folder} was begun with other data; start it anew with --no-resume")
            self.record = saved["record"]
        elif self.args.run.eval_only:
            raise UserError(
                f"there is no checkpoint in {self.folder}, the folder of exactly these arguments; run the same command "
                "without --eval-only first, or name the arguments of the run that is there"
            )
        if self.args.run.eval_only and not self.record["done"].get("policy", self.record["done"].get(self.method)):
            raise UserError(f"{self.folder}: the policy has not been trained yet; go on without --eval-only")
        self.last = [round(self.args.updates * share) for share in (0.98, 0.99, 1)]
        if self.record["done"] and not self.args.run.eval_only:
            stage, update = list(self.record["done"].items())[-1]
            say(f"resumed at update {update} of stage {stage}")

    def steps(self, stage: str, end: int, folder: str | None = None):
        """The updates of a stage that are left, up to `end`, for a loop that calls `log` after each. After its body the
        checkpoint is saved where that is due. folder: of the events, if not that of the stage's name."""
        start = self.record["done"].get(stage, 0)
        if start >= end:
            return
        self.lap = self.lap or stopwatch(self.record["stages"], self.args.run.device)
        self.stage, self.end, self.logged = stage, end, start
        self.writer = open_writer(self.folder / (folder or stage), start)
        say(f"{stage}: {end - start:,} updates" + f" of {end:,}" * bool(start))
        options = {"desc": stage, "initial": start, "total": end, "unit": " updates", "miniters": 1, "seconds": 60}
        self.bar = progress_bar(range(start + 1, end + 1), **options)
        with self.bar:
            for step in self.bar:
                self.stop.now = False  # what this update changes is to be saved first
                yield step
                assert self.logged == step, "every update is logged: where a checkpoint is due, that detects divergence"
                if self.save:
                    self.record["done"][stage] = step
                    self._charge()
                    self.writer.flush()  # a resumed run does not log again what came before the checkpoint
                    save_checkpoint(self.folder / "ckpt.pt", {**self.nets, "record": self.record})
                    if self.stop.status:
                        sys.exit(self.stop.status)
                if step == start + 100 and (expected := (end - start) * self.bar.format_dict["elapsed"] / 100) > 60:
                    say(f"{stage}: about {clock(expected)}")
        self.stop.now = True
        self.writer.close()
        say(f"{stage}: {end:,} updates done in {clock(self.record['stages'][self._charged]['seconds'])}")

    @property
    def _charged(self) -> str:
        """The stage's name in the result, where that of the policy is the same for all methods."""
        return "policy" if self.stage == self.method else self.stage

    def _charge(self) -> None:
        self.lap(self._charged)

    def log(self, step: int, values: dict) -> None:
        """Every so many updates, before every checkpoint and evaluation: one transfer, a look at it, and the log."""
        self.logged = step  # a signal that comes after this waits for the next update: what is saved has been looked at
        self.save = step % self.args.run.save_every == 0 or step == self.end or bool(self.stop.status)
        due = self.save or step % self.args.run.log_every == 0 or self._evaluates(step)
        if self._evaluates(step + 1):  # which may be abandoned: then it is done again from here
            self.save = True
        if not due and not self.save:
            return
        values = on_host(values)
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        large = [name for name in ("charts/q_largest", "charts/v_largest") if values.get(name, 0) > self.limit]
        bad += [f"{name} = {values[name]:.3g} (bound {self.limit:.3g})" for name in large]
        if bad:
            there = (self.folder / "ckpt.pt").exists()
            kept = f"the last good checkpoint is kept in {self.folder}" if there else "nothing was saved yet"
            raise UserError(
                f"{self.stage} diverged at update {step}: {', '.join(bad)}; {kept}; "
                f"try a lower {self.remedy}, or another --seed"
            )
        if not due:
            return
        rate = self.bar.format_dict["rate"]  # None in the first moment
        log(self.writer, step, values | ({"charts/updates_per_sec": rate} if rate else {}), self.bar)

    def evaluation_due(self, step: int) -> bool:
        """Where it is, the time up to now is the stage's, and what follows the evaluation's. A signal abandons that."""
        if due := self._evaluates(step):
            self._charge()
            self.stop.now = True
            if self.stop.status:
                sys.exit(self.stop.status)
        return due

    def _evaluates(self, step: int) -> bool:
        """Nothing comes between the last three, which have a summary of their own."""
        due = step in self.last or (step % self.args.run.eval_every == 0 and step < self.last[0])
        return due and self._charged == "policy"

    def evaluated(self, step: int, e: dict, **more) -> None:
        """Record an evaluation {returns, lengths, score, ...}. more: further numbers to log, None if there is none."""
        self.stop.now = False
        self.record["evaluations"].append({"step": step, **e})
        spread = np.std(e["returns"], ddof=min(1, len(e["returns"]) - 1))
        more |= {"return_mean": np.mean(e["returns"]), "return_std": spread, "normalized_score": e["score"]}
        log(self.writer, step, {f"eval/{name}": x for name, x in more.items() if x is not None})
        guided = e.get("guided_score")
        beside = "" if guided is None else f", guided by the critics {guided:.1f}"
        say(f"{step} updates: score {e['score']:.1f}{beside} (target data {self.data['target'].score:.1f})")
        self.lap("evaluation")

    def only_evaluated(self, e: dict) -> dict:
        """What --eval-only prints and returns."""
        print(f"normalised score {e['score']:.1f}, returns {np.round(e['returns'], 1).tolist()}")
        if e.get("guided_score") is not None:
            print(f"guided by the critics {e['guided_score']:.1f}")
        return {key: e[key] for key in ("score", "returns", "guided_score") if key in e}

    def diagnosed(self, step: int, found: dict) -> None:
        """Record metrics at stitch junctions, {pool: {metric: value}}."""
        self.record["diagnostics"].append({"step": step, **found})
        log(self.writer, step, {f"charts/{m}_{pool}": x for pool in found for m, x in found[pool].items()})

    def finish(self, pre: dict | None = None) -> dict:
        """Write the result, print the score. pre: what `taf_preprocess.preprocess` found, if that was asked."""
        stages = self.record["stages"]
        more = {"changed": self._changed({"quick", "preset", "diagnostics"})}  # seen in other values, or of no effect
        if "diagnostics" in self.record:
            more["diagnostics"] = self.record["diagnostics"]
        if pre:
            more |= {"preprocess": pre["path"], "report": pre["meta"]["report"]}
            stages = {f"preprocess {name}": x for name, x in pre["meta"]["stages"].items()} | stages
        more |= {"method": self.method, "device": self.args.run.device}
        seen = {role: x.provenance for role, x in self.data.items()}
        result = write_result(self.folder, self.args, self.record["evaluations"], stages, seen, **more)
        final = result["summaries"].get("final", {})
        say(f"normalised score {_shown(result)}")
        if final.get("guided_score") is not None:
            say(f"guided by the critics {final['guided_score']:.1f}")
        say(f"the target data's own mean {self.data['target'].score:.1f}")
        if self.method != "bc" and (cloning := find_cloning(self.args, self.data["target"].sha256)):
            say(f"cloning {cloning[1]:.1f} ({cloning[0]})")
        say(f"{self.folder / 'result.json'}")
        if pre and (figure := Path(pre["path"]).with_suffix(".png")).exists():
            say(f"{figure}")
        say(f"tensorboard --logdir {self.folder}")
        return result


def import_wandb():
    try:
        import wandb
    except ImportError:
        raise UserError("--track needs a further package: pip install wandb") from None
    return wandb


def find_cloning(args, sha256: str) -> tuple[Path, float] | None:
    """The folder and final score of a finished run of baselines/bc.py on the same target data and under the same --out;
    of several, one with the same --quick and --seed if there is one."""
    found = []
    for path in sorted(args.run.out.glob(f"bc/{args.task.env}-{args.task.shift}-*/seed*/result.json")):
        with contextlib.suppress(UserError, KeyError, TypeError):  # not one of ours, or damaged
            result = read_result(path)
            other = [result["args"][name] != getattr(args.run, name) for name in ("quick", "seed")]
            other.append(result["changed"] != {})
            alone = not result["args"].get("source_share")  # of bc.py: the target data and nothing else
            if alone and result["data"]["target"]["sha256"] == sha256:
                found.append((other, path.parent, float(result["summaries"]["final"]["score"])))
    return min(found)[1:] if found else None


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


@contextlib.contextmanager
def open_run(method: str, args, plain, ignore=IGNORE, **data):
    """Own the folder of these arguments for as long as the block lasts: yields a Run.

    plain: the same task's arguments if nothing else is given. data: the datasets by role, `target` among them. One
    that has both roles is recorded once.
    """
    if data.get("source") is data["target"]:
        del data["source"]
    names = [Path(quality).stem for quality in (args.task.source, args.task.target)]
    kinds = sorted({x.kind for x in data.values()})
    task = slug("-".join([args.task.env, args.task.shift, *names, *(kinds if kinds != ["published"] else [])]))
    plain = flatten(plain) | {"quick": False}
    folder = run_dir(args.run.out, method, task, args.run.seed, args, plain, ignore)
    opened = reading(folder, args, ignore) if args.run.eval_only else session(folder, args, ignore, args.run.resume)
    with opened as stop:
        reuse_memory()
        result = None if args.run.eval_only else finished(folder, *data.values())
        run = Run(method, args, plain, set(ignore), data, folder, stop, result)
        if not result and not args.run.eval_only:
            run.head()
            if args.run.track:
                options = {"project": "taf-dt", "name": str(folder), "dir": str(folder)}
                import_wandb().init(config=flatten(args), sync_tensorboard=True, **options)
        try:
            yield run
        finally:
            if run.bar is not None:
                run.bar.close()  # an exception left it open
