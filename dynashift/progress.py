"""Logs of a run, and what it costs."""

import sys
import time
from pathlib import Path

import torch

from dynashift.events import Events
from dynashift.folders import writing

try:
    import resource
except ImportError:  # Windows: memory is not measured
    resource = None


def open_writer(folder: Path, step: int):
    """TensorBoard writer of a run that has done `step` updates.

    Whatever a killed run logged after these updates is purged, regardless of its tag. Since every
    stage counts from 1, each needs a folder of its own.
    """
    # TensorBoard reads the files in the order of their names, which contain the second and the
    # process id. These do not order two files that were started within one second or on two
    # machines, so the earlier files are numbered.
    with writing(folder):
        for i, file in enumerate(sorted(folder.glob("events.out.tfevents.*"))):
            file.rename(folder / f"events.out.tfevents.{i:010d}")
    return Events(folder, step + 1 if step else 0)


def on_host(values: dict) -> dict:
    """Turn one-element tensors into numbers, with one transfer per device; keep the rest."""
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
    if bar is not None:  # it shows this at its next refresh
        losses = [(k[7:], float(v)) for k, v in values.items() if k.startswith("losses/")]
        bar.set_postfix(dict(losses[:1]), refresh=False)


def stopwatch(stages: dict, device="cpu"):
    """Returns lap(name), which charges the time since the last lap and its peak memory to a stage.

    Save `stages` in the checkpoint, so that a resumed run keeps adding to it. Work that is lost
    when a run is killed does not count.
    """
    last = time.perf_counter()
    cuda = torch.device(device).type == "cuda"

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
    """Peak resident memory in MB since the last call, or since the start if it cannot be reset."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: this resets the peak
        return float(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6 if resource else 0.0


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
