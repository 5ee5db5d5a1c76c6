"""Cores and graphics cards of this machine, and how many runs share them."""

import os
import shutil
import subprocess

from dynashift.errors import UserError


def cards() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [card for card in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if card]
    if not shutil.which("nvidia-smi"):
        return []
    words = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    found = subprocess.run(words, capture_output=True, text=True)
    return found.stdout.split() if found.returncode == 0 else []


def cores() -> int:
    if "SLURM_CPUS_ON_NODE" in os.environ:  # without Slurm's task plugin a job may see all cores
        return int(os.environ["SLURM_CPUS_ON_NODE"])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def jobs_at_once(one: bool) -> int:
    """JOBS; by default one run per core, or four per card, because small runs leave most of a card
    idle. one: a default of one."""
    default = 1 if one else min(cores(), 4 * len(cards()) or cores())
    jobs = os.environ.get("JOBS") or str(default)
    if not jobs.isdigit() or int(jobs) < 1:
        raise UserError(f"JOBS is the number of runs at a time, not {jobs!r}")
    return int(jobs)


def threads_per_run(jobs: int) -> str:
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // jobs))


def clock(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {int(seconds) % 60:02} s"
