"""Stand-ins for the runs of the training scripts, which count, save and resume, and for their results."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from dynashift.errors import UserError
from dynashift.files import write_json
from experiments.commands import Command
from experiments.pool import run_here
from experiments.state import State

# A miniature run: owns its folder, saves every fifth step, resumes, saves on SIGTERM, writes its result last.
JOB = """
import fcntl, hashlib, json, os, signal, socket, sys, time
folder, steps, pause, *gate, _, _ = sys.argv[1:]
steps, pause = int(steps), float(pause)
os.makedirs(folder, exist_ok=True)
lock, stop = open(f"{folder}/.lock", "a"), []
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(75)
lock.truncate(0)
lock.write(f"{os.getpid()} on {socket.gethostname()}")
lock.flush()
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
def save(name, x):
    with open(f"{folder}/{name}.tmp", "w") as file:
        file.write(json.dumps(x) + " " * 4000)
    os.replace(f"{folder}/{name}.tmp", f"{folder}/{name}")
if os.path.exists(f"{folder}/result.json"):
    sys.exit()
open(f"{folder}/pid", "w").write(str(os.getpid()))
n, h = json.load(open(f"{folder}/ckpt")) if os.path.exists(f"{folder}/ckpt") else (0, folder[-3:])
while n < steps:
    n, h = n + 1, hashlib.sha256(f"{h}{n}".encode()).hexdigest()
    time.sleep(pause)
    if n % 5 == 0 or stop:
        save("ckpt", [n, h])
    while n == 10 and not stop and gate and not os.path.exists(f"{folder}.go"):
        time.sleep(0.02)
    if stop:
        sys.exit(143)
save("result.json", h)
open(f"{folder}/finished", "a").write("x")
"""

# Several programs in one process, because each would spend seconds on imports: a script, or "-m MODULE", and its words.
TOGETHER = """
import runpy, shlex, sys
sys.path.insert(0, "")
for line in sys.argv[1:]:
    first, *rest = shlex.split(line)
    sys.argv = rest if first == "-m" else [first, *rest]
    (runpy.run_module if first == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")
"""


def command(*words, after: str | None = None) -> Command:
    return Command(tuple(map(str, words)), after)


def make_jobs(folder: Path):
    """A function that makes n stand-in commands, each with a folder below the one named."""
    (folder / "job.py").write_text(JOB)

    def make(n: int, under: str, steps: int = 20, pause: float = 0.02, *gate: str) -> list[Command]:
        # --out: so that the folder lies three levels below it, as in OUT/METHOD/TASK/SEED
        more = (steps, pause, *gate, "--out", folder.parent)
        return [command(folder / "job.py", folder / under / f"{i:03}", *more) for i in range(n)]

    return make


def start(commands: list[Command], state: State, jobs: int, log="stderr") -> int:
    """The runner in a forked process, which saves the seconds that a new interpreter needs for imports."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        sys.stderr = open(state.out.parent / log, "a", buffering=1)  # noqa: SIM115
        code = run_here(commands, state, jobs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def results(folder: Path) -> dict:
    return {p.parent.name: json.loads(p.read_text()) for p in sorted(folder.glob("*/result.json"))}


def until(condition, seconds: float = 300):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.02)
    return found


def cmdline(pid: int) -> bytes:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes() if path.exists() else b""


def environ(folder: Path, **more) -> dict:
    own = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    return os.environ | own | more


def write_run(
    root, method, task, seed, scores, changed=None, kind="published", target_score=30.0, name="", args=None, **more
):
    """One result.json with the last evaluations' scores; returns its path."""
    robot, shift, source, target = task.split()
    args = dict(env=robot, shift=shift, source=source, target=target, seed=seed) | (args or {}) | (changed or {})
    evaluations = [{"step": 5000 * (i + 1), "returns": [1.0] * 10, "score": s} for i, s in enumerate(scores)]
    data = {"source": {"kind": kind, "sha256": "s"}, "target": {"kind": kind, "sha256": "t", "score": target_score}}
    if method == "bc":
        del data["source"]
    result = {"method": method, "args": args, "changed": changed or {}, "evaluations": evaluations, "data": data}
    result["device"] = "a machine"
    result["stages"] = {"values": {"seconds": 60.0, "peak_memory_mb": 500.0}, "policy": {"seconds": 90.0 + seed}}
    digest = hashlib.sha256(json.dumps([changed, kind, args]).encode()).hexdigest()[:8]
    folder = root / method / "-".join(task.split()) / (name or f"seed{seed}-{digest}")
    folder.mkdir(parents=True)
    write_json(folder / "result.json", result | more)
    return folder / "result.json"
