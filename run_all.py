"""Every run behind the paper's tables and figures, then the report. Started by `bash run_all.sh`.

    bash run_all.sh --quick                                every table at a tiny budget, on embedded data
    JOBS=4 bash run_all.sh                                 everything, four runs at a time
    bash run_all.sh --table alpha xi --env hopper          a part of it
    bash run_all.sh --list                                 one command a line, for any scheduler
    bash run_all.sh --estimate                             how long that takes here, measured within a minute
    bash run_all.sh --slurm -- --time=1-0 --gres=gpu:1     job arrays; what follows -- goes to sbatch
    bash run_all.sh --status                               how far it is

A run is known by its command line. OUT/.run_all has two files for each: NAME.lock, locked while somebody is on it, and
NAME.json, how it ended; its output is OUT/logs/NAME.log. What was stopped or killed goes on from its checkpoint when
the same command is given again. With Slurm, JOBS runs share one task of the array, and so its card.
"""

import contextlib
import fcntl
import hashlib
import importlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from dynashift import tasks
from dynashift.errors import UserError, one_line_errors
from dynashift.files import atomic

PAPER = json.loads((Path(__file__).parent / "dynashift" / "paper.json").read_bytes())
# The paper's shifts in its order, then those that only the table of tasks has.
SHIFTS = (*PAPER["summary"], *(shift for shift in tasks.SHIFTS if shift not in {"none", *PAPER["summary"]}))
NEW = [(env, shift) for env, shift in tasks.all_tasks() if shift not in {"none", *PAPER["summary"]}]
MAIN = [tuple(task.split()) for task in PAPER["main"]]  # (robot, shift, source, target)
MAIN += [(*task, *pair) for task in NEW for pair in itertools.product(*tasks.QUALITIES.values())]
ABLATIONS = {name.replace("_", "-"): ablation for name, ablation in PAPER["ablations"].items()}
METHODS = [*reversed(PAPER["methods"]), "bc"]  # taf_dt first: others want its critics for the junction figure
TABLES = [*SHIFTS, "summary", *ABLATIONS, "times", "junction"]
# The junction figure's tasks and methods: their runs of the main tables measure it along the way.
JUNCTION = [("hopper", "kinematic"), ("walker2d", "morph"), ("ant", "gravity"), ("halfcheetah", "kinematic")]
JUNCTION = [(*task, "medium", "medium") for task in JUNCTION]
JUNCTION_METHODS = ("taf_dt", "qt", "dt", "dadt")
GATE_FACTORS = {"filter", "xi", "ot_cost", "ot_reward"}  # factors that change gate or weights

# --quick: three tasks that lie in all tables, one seed, and the same few updates for every method.
QUICK_TASKS = [("halfcheetah", "morph"), ("hopper", "kinematic"), ("ant", "gravity"), *NEW]
QUICK_TASKS = [(*task, "medium", "medium") for task in QUICK_TASKS]
QUICK_SIZE = 100_000  # source transitions: what --quick of the scripts has, which taf_preprocess.py has to be told
# The same flags for all, or the report would take each method for a setting of its own.
QUICK = ["--quick", "--updates", "400", "--eval-episodes", "2"]
QUICK_ZETA = 0.55  # what --quick of taf_dt.py has
IN_USE = "is in use by process"  # what a run says whose folder somebody else has, see dynashift/runs.py
POLL, AGAIN, TRIES = 0.1, 5.0, 3  # seconds between two looks, before a run in other hands is tried again; attempts


@dataclass(frozen=True)
class Args:
    # what to run
    table: tuple[Literal[tuple(TABLES)], ...] = ()
    """only what these tables need"""
    method: tuple[Literal[tuple(METHODS)], ...] = ()
    """only these methods"""
    env: tuple[tasks.Env, ...] = ()
    """only these robots"""
    shift: tuple[Literal[SHIFTS], ...] = ()
    """only these shifts"""
    seeds: tuple[int, ...] = ()
    """seeds, 1 to 5 unless given; an ablation of one seed takes the first"""
    quick: bool = False
    """every table at a tiny budget: one seed, few tasks, few updates, embedded data"""
    commands: Path | None = None
    """run the lines of this file instead, as --list prints them"""

    # where and how
    data: Literal["auto", "d4rl", "embedded"] | None = None
    """published data, generated data, or whichever can be had; auto, and embedded with --quick"""
    data_dir: Path | None = None
    """where the published files lie"""
    out: Path = Path("runs")
    """folder of the runs"""
    results: Path = Path("results")
    """folder of the report"""
    device: str = "auto"
    """cpu, cuda, ...; auto is cuda where there is one"""

    # what to do, unless it is to run
    list: bool = False
    """print the commands, and on stderr their number"""
    estimate: bool = False
    """measure for at most a minute how many hours they would take here"""
    status: bool = False
    """count what is done, running, failed and waiting"""
    slurm: bool = False
    """submit to Slurm"""
    throttle: int = 100
    """with --slurm: tasks of an array that may run at once"""
    line: int | None = None
    """with --commands: the n-th JOBS lines of the file alone, as a task of a Slurm array does"""


# ----------------------------------------------------------------------------------------------- the grid


def cells(args: Args) -> list[tuple]:
    """(method, task, seed, factor, value) of every run that the tables need, once. Factor "" is the default."""
    seeds, found = list(dict.fromkeys(args.seeds)) or ([1] if args.quick else [1, 2, 3, 4, 5]), {}
    main = QUICK_TASKS if args.quick else MAIN
    for table in args.table or TABLES:
        if table in (*SHIFTS, "summary"):
            for method, task in ((m, t) for m in METHODS for t in main if table in (t[1], "summary")):
                task = (*task[:2], "medium", task[3]) if method == "bc" else task  # it sees no source: once for all
                found |= dict.fromkeys((method, task, seed, "", None) for seed in seeds)
        elif table == "junction":
            tasks = [t for t in JUNCTION if not args.quick or t in main]
            found |= dict.fromkeys((m, t, seed, "", None) for m in JUNCTION_METHODS for t in tasks for seed in seeds)
        elif table == "times":
            tasks = [tuple(t.split()) for t in PAPER["times"]["rows"]]
            found |= dict.fromkeys(
                ("taf_dt", t, s, "", None) for t in tasks for s in seeds if not args.quick or t in main
            )
        else:
            ablation = ABLATIONS[table]
            tasks = [t for t in (tuple(t.split()) for t in ablation["rows"]) if not args.quick or t in main]
            factor, default = ablation["factor"], ablation["default"]
            default = QUICK_ZETA if args.quick and factor == "zeta" else default
            for task in tasks[:1] if args.quick else tasks:
                for value in ablation["values"]:
                    varied = ("", None) if value == default else (factor, value)
                    found |= dict.fromkeys(("taf_dt", task, seed, *varied) for seed in seeds[: ablation["seeds"]])
    chosen = {"method": args.method, "env": args.env, "shift": args.shift}
    found = [c for c in found if all(not names or c[0] in names or set(c[1]) & set(names) for names in chosen.values())]
    return sorted(found, key=lambda c: seeds.index(c[2]))  # one seed of everything before the next


def flags(factor: str, value) -> list[str]:
    name = factor.replace("_", "-")
    return [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]


def new(words: list[str], after: str | None = None) -> dict:
    """A command under its name. after: the name of one that has to end before."""
    digest, value = hashlib.sha256("\0".join(words).encode()).hexdigest()[:8], dict(itertools.pairwise(words))
    parts = [value.get(f"--{name}") for name in ("env", "shift", "source", "target")]
    parts = [Path(words[0]).stem, *(Path(part).stem for part in parts if part), *[f"seed{value.get('--seed')}"]]
    return {"name": "-".join([*parts, digest]).replace("-seedNone", ""), "words": words, "after": after}


def grid(args: Args) -> tuple[list[dict], list[dict]]:
    """Commands of the preprocessing that several runs share, and of the runs."""
    shared = ["--data", args.data or ("embedded" if args.quick else "auto")]
    shared += ["--data-dir", str(args.data_dir)] if args.data_dir else []
    shared += ["--device", args.device] if args.device != "auto" else []
    commands, before, reference = [], {}, {}
    for method, task, seed, factor, value in cells(args):
        pair = [
            word
            for name, x in zip(("env", "shift", "source", "target"), task, strict=True)
            for word in (f"--{name}", x)
        ]
        extra, after = flags(factor, value) if factor else [], None
        if method == "taf_dt":
            size = ["--source-size", str(QUICK_SIZE)] if args.quick else []
            gate = extra if factor in GATE_FACTORS else []
            after = new(["taf_preprocess.py", *pair, *shared, "--out", str(args.out / "preprocess"), *size, *gate])
            after = before.setdefault(after["name"], after)["name"]
        diagnostics = not factor and method in JUNCTION_METHODS and task in JUNCTION
        if diagnostics and method != "taf_dt":
            after = reference.get(task)
        script = "taf_dt.py" if method == "taf_dt" else f"baselines/{method}.py"
        words = [
            script,
            *pair,
            "--seed",
            str(seed),
            *shared,
            *(["--out", str(args.out)] if args.out != Path("runs") else []),
        ]
        commands.append(new([*words, *extra, *["--diagnostics"] * diagnostics, *(QUICK if args.quick else [])], after))
        if diagnostics and method == "taf_dt":
            reference.setdefault(task, commands[-1]["name"])
    wanted = Counter(c["after"] for c in commands)
    once = {name for name in before if wanted[name] < 2}  # then the run may as well do it itself
    commands = [c | {"after": None} if c["after"] in once else c for c in commands]
    return [c for name, c in before.items() if name not in once], commands


def read_commands(path: Path) -> list[dict]:
    """A file as --list prints it; `# after NAME` at the end of a line is this program's own."""
    commands = []
    for line in path.read_text().splitlines():
        words = shlex.split(line, comments=True)
        after = re.search(r"# after (\S+)$", line)
        if words:
            commands.append(new(words[1:] if Path(words[0]).name.startswith("python") else words, after and after[1]))
    return commands


def text(command: dict) -> str:
    return "python " + shlex.join(command["words"])


# ------------------------------------------------------------------------------------------ what is known


def state_of(args: Args) -> Path:
    return args.out / ".run_all"


def read(path: Path) -> dict:
    """{} if it is missing or damaged: then the command is given once more, and a run that is done says so at once."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return {}


def write(path: Path, x) -> None:
    try:
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(x, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; mend that and give the same command again") from None


def is_done(command: dict, args: Args) -> bool:
    known = read(state_of(args) / f"{command['name']}.json")
    return known.get("status") == "done" and (not known["result"] or Path(known["result"]).exists())


def lock_of(command: dict, args: Args, kind: int = fcntl.LOCK_EX):
    """The command's lock file, locked; None if somebody else has it. The system frees it when its holders have died."""
    try:
        state_of(args).mkdir(parents=True, exist_ok=True)
        lock = open(state_of(args) / f"{command['name']}.lock", "a")  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"cannot write to {state_of(args)}: {error.strerror}; choose another folder with --out"
        ) from None
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


# ------------------------------------------------------------------------------------------- on this machine


def cards() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [card for card in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if card]
    if not shutil.which("nvidia-smi"):
        return []
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [str(i) for i in range(found.count("GPU "))]


def cores() -> int:
    if "SLURM_CPUS_ON_NODE" in os.environ:  # of the job; without Slurm's task plugin it may see all
        return int(os.environ["SLURM_CPUS_ON_NODE"])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def jobs_at_once(args: Args) -> int:
    """JOBS; else one a core, or four a card: small runs leave most of one idle."""
    default = 1 if args.slurm or args.line else min(cores(), 4 * len(cards()) or cores())
    if not (jobs := os.environ.get("JOBS") or str(default)).isdigit() or int(jobs) < 1:
        raise UserError(f"JOBS is the number of runs at a time, not {jobs!r}")
    return int(jobs)


def begin(command: dict, args: Args, slot: int, jobs: int, lock) -> dict:
    """The command as a process. It inherits the lock, which so outlives a runner that is killed."""
    words, known = command["words"], read(state_of(args) / f"{command['after']}.json")
    if "--diagnostics" in words and words[0] != "taf_dt.py" and known.get("result"):
        words = [*words, "--reference", str(Path(known["result"]).parent)]  # V, Q and gate of taf_dt's run
    log, visible = args.out / "logs" / f"{command['name']}.log", cards()
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // jobs))
    env = os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}  # waiting threads burn no core
    env |= {"CUDA_VISIBLE_DEVICES": visible[slot % len(visible)]} if visible else {}
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(f"+ python {shlex.join(words)}\n".encode())
            file.flush()
            start = file.tell()
            # A session of its own: Ctrl-C reaches the runner alone, which passes it on as SIGTERM, once.
            options = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True)
            process = subprocess.Popen([sys.executable, *words], pass_fds=[lock.fileno()], **options)
    except OSError as error:
        raise UserError(f"cannot write {log}: {error.strerror}; mend that and give the same command again") from None
    times = {"since": time.monotonic(), "began": time.time()}
    return command | times | {"process": process, "lock": lock, "log": log, "start": start, "slot": slot}


def result_of(run: dict) -> str | None:
    """Where the run has its result: in the folder whose lock file it signed. Preprocessing alone has none."""
    out = Path(dict(itertools.pairwise(run["words"])).get("--out", "runs"))
    signed = f"{run['process'].pid} on {socket.gethostname()}"
    for lock in out.glob("*/*/*/.lock"):  # method, task, seed
        with contextlib.suppress(OSError):  # a folder that is being deleted
            if lock.stat().st_mtime > run["began"] - 60 and lock.read_text() == signed:
                return str(lock.parent / "result.json")
    return None


def end(run: dict, args: Args, stopping: bool) -> str:
    """How it ended: done, failed, busy (somebody else is on it), killed or stopped. Notes it and frees the lock."""
    status, seconds = run["process"].returncode, time.monotonic() - run["since"]
    with run["lock"]:
        with run["log"].open("rb") as file:
            file.seek(max(run["start"], run["log"].stat().st_size - 20_000))
            output = file.read().decode(errors="replace")
        if status and stopping:
            return "stopped"
        if status and IN_USE in output[-1000:]:
            return "busy"
        if status < 0 or status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            return "killed"  # not its own fault: it goes on from its checkpoint
        result = result_of(run)
        how = "failed" if status else "done"
        known = {"status": how, "command": text(run), "seconds": round(seconds, 1), "exit": status, "result": result}
        write(state_of(args) / f"{run['name']}.json", known)
        return how


def clock(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {int(seconds) % 60:02} s"


def left(todo: list[dict], running: list[dict], args: Args, jobs: int, took: dict) -> str:
    """Time left, by the mean of what finished runs of the same method took."""
    known = [s for method in took.values() for s in method]
    if not known:
        return "?"

    def cost(command):
        seconds = took.get(command["words"][0]) or known
        return sum(seconds) / len(seconds)

    ahead = sum(map(cost, todo)) + sum(max(0, cost(r) - time.monotonic() + r["since"]) for r in running)
    return clock(ahead / max(1, min(jobs, len(todo) + len(running))))


def run_here(commands: list[dict], args: Args, jobs: int) -> int:
    """All commands, `jobs` at a time, each after the one it waits for. Returns 0, 1, or 128 + a signal's number."""
    signals, began, shown = [], time.monotonic(), 0.0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.append(number))
    took, results = {}, {c["name"]: "done" for c in commands if is_done(c, args)}  # name -> done or failed
    for c in commands:
        if c["name"] in results:
            seconds = read(state_of(args) / f"{c['name']}.json").get("seconds", 0)
            took.setdefault(c["words"][0], []).extend([seconds] if seconds > 20 else [])  # not "is done" at once
    todo, running, not_before, tries = [c for c in commands if c["name"] not in results], [], {}, {}
    print(f"{len(commands)} commands, {len(results)} of them done; {jobs} at a time", file=sys.stderr)

    def count():
        states, elsewhere = list(results.values()), sum(c["name"] in not_before for c in todo)
        line = f"{states.count('done')} of {len(commands)} done, {len(running)} running"
        line += f", {states.count('failed')} failed" * ("failed" in states)
        line += f", {elsewhere} in other hands" * bool(elsewhere)
        return f"{line}; {clock(time.monotonic() - began)}, about {left(todo, running, args, jobs, took)} left"

    def say(line):
        print(f"\r\033[K{line}" if sys.stderr.isatty() else line, file=sys.stderr)

    trouble, sent = "", 0
    while running or (todo and not signals and not trouble):
        pending = {c["name"] for c in [*todo, *running]}
        for command in list(todo):
            name, now = command["name"], time.monotonic()
            if len(running) == jobs or signals or trouble:
                break
            if not_before.get(name, 0) > now or command["after"] in pending:
                continue
            try:
                lock = lock_of(command, args)
                if lock and not is_done(command, args):
                    slot = min(set(range(jobs)) - {run["slot"] for run in running})
                    running.append(begin(command, args, slot, jobs, lock))
                elif lock:  # another runner has been there
                    lock.close()
                    results[name] = "done"
                else:  # another runner is on it, or a run goes on whose runner was killed
                    not_before[name] = now + AGAIN
                    continue
                todo.remove(command)
                not_before.pop(name, None)
            except UserError as error:
                trouble = str(error)
        for run in [run for run in running if run["process"].poll() is not None]:
            running.remove(run)
            try:
                how = end(run, args, bool(signals or trouble))
            except UserError as error:
                how, trouble = "stopped", str(error)
            name, seconds = run["name"], time.monotonic() - run["since"]
            tries[name] = tries.get(name, 0) + (how == "killed")
            if how in ("busy", "killed") and tries[name] < TRIES:
                todo.append({k: run[k] for k in ("name", "words", "after")})
                not_before |= {name: time.monotonic() + AGAIN} if how == "busy" else {}
            elif how != "stopped":
                results[name] = "failed" if how == "killed" else how
                took.setdefault(run["words"][0], []).append(seconds)
            if how == "failed" and shutil.disk_usage(args.out).free < 2**16:
                trouble = f"the disk of {args.out} is full; make room and give the same command again"
            say(f"{name}: {how} after {clock(seconds)}; {count()}")
        while sent < len(signals) or (
            trouble and not sent
        ):  # the first asks the scripts to save, the next does not wait
            sent += 1
            say(f"waiting for {len(running)} runs to save; once more stops them at once")
            for run in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run["process"].pid, signal.SIGTERM if sent < 3 else signal.SIGKILL)
        if sys.stderr.isatty() and time.monotonic() > shown + 1:
            shown = time.monotonic()
            print(f"\r\033[K{count()}", end="", file=sys.stderr, flush=True)
        time.sleep(POLL)

    failed = [name for name, how in results.items() if how == "failed"]
    states = list(results.values())
    say(f"{states.count('done')} done, {len(failed)} failed, {len(commands) - len(results)} left to do")
    for name in failed:
        log = args.out / "logs" / f"{name}.log"
        print(f"\n{log}:", *log.read_text(errors="replace").splitlines()[-8:], sep="\n  ", file=sys.stderr)
    if trouble:
        raise UserError(trouble)
    if signals:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 128 + signals[0]
    return 1 if failed else 0


def report(args: Args) -> int:
    print(f"+ python report.py --runs {args.out} --out {args.results}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, "report.py", "--runs", str(args.out), "--out", str(args.results)]).returncode


# ---------------------------------------------------------------------------------------------- estimate

LIMIT = 60  # seconds that --estimate may take in all
SHARE = 16  # large sequence models are measured with a sixteenth of their batch
ROWS = 2000  # transitions of the random data
BASIS = f"""
This rests on a few updates of every stage and one short evaluation for each script and context length, on random data
with hopper's shapes, multiplied by the number of updates and evaluations of a run. Large sequence models were measured
with 1/{SHARE} of their batch, gate and weights with {ROWS:,} transitions, and scaled up. Downloads and the generation
of data are not included. Other work on this machine during the measurement makes the numbers larger."""


def random_data(path: Path) -> None:
    """A file in D4RL's layout: ten episodes of random numbers."""
    import h5py
    import numpy as np

    rng, ends = np.random.default_rng(0), np.arange(ROWS) % (ROWS // 10) == ROWS // 10 - 1
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(ROWS, 11)).astype(np.float32)
        file["actions"] = rng.uniform(-1, 1, (ROWS, 3)).astype(np.float32)
        file["rewards"] = rng.uniform(size=ROWS).astype(np.float32)
        file["terminals"], file["timeouts"] = np.zeros(ROWS, bool), ends


def rates_of(module, args, folder: Path) -> dict[str, float]:
    """Seconds of one update of each stage, of one evaluation of 1000 steps, and of the whole preprocessing."""
    runs = importlib.import_module("dynashift.runs")  # here, because it imports torch
    names = runs.flatten(args)
    large = "K" in names and not args.run.quick  # updates of a second or more
    batches = [name for name in ("batch", "target_batch") if large and name in names]
    folder.mkdir()
    random_data(folder / "medium.hdf5")
    # quick: its values are replaced by now, and without it taf_dt.py makes an estimate of its own
    small = dict(env="hopper", quick=True, source_size=None, out=folder, torch_deterministic=False)
    small |= dict.fromkeys(("source", "target"), str(folder / "medium.hdf5"))
    small |= {name: max(1, names[name] // SHARE) for name in batches}
    small |= {"diagnostics": False} if "diagnostics" in names else {}
    small |= {"guided": "never"} if "guided" in names else {}
    counts = {name: 8 for name in names if name.endswith("updates")} | ({"updates": 1} if large else {})
    found = []
    for seed, more in enumerate((0, 0, 1)):  # the first warms up; of the others the difference counts
        updates = {name: 1 + more * count for name, count in counts.items()}
        result = module.train(runs.replace(args, **small, **updates, seed=seed))
        found.append({name: stage["seconds"] for name, stage in result["stages"].items()})
    (_, earlier, stages), rates = found, {}
    for name, seconds in stages.items():
        field = f"{name.removesuffix('s')}_updates"
        count, scale = (counts[field], 1) if field in counts else (counts["updates"], SHARE if batches else 1)
        rates[name] = scale * max(seconds - earlier[name], 0.1 * seconds) / count
    # good policies reach the end of an episode, and preprocessing has no updates
    rates["evaluation"] = stages["evaluation"] * 1000 / max(result["evaluations"][-1].get("lengths", [1000]))
    return rates | {name: seconds for name, seconds in stages.items() if name.startswith("preprocess")}


def seconds_of(words: list[str], measured: dict, laps: list[float], folder: Path) -> tuple[float, float] | None:
    """Of a run, and of its preprocessing; None if that is not known and there is no time left to measure it.

    laps: times at which measurements began or ended; the next one may take as long as the longest.
    """
    module = importlib.import_module(words[0].removesuffix(".py").replace("/", "."))
    runs = importlib.import_module("dynashift.runs")  # here, because it imports torch
    args = runs.read_args(module.Args, module.defaults, "", words[1:])
    values = runs.flatten(args)
    key = f"{Path(words[0]).stem}, K {values.get('K')}, quick {args.run.quick}, {args.run.device}"
    key += f", {os.environ['OMP_NUM_THREADS']} threads"
    if key not in measured:
        longest = max((b - a for a, b in itertools.pairwise(laps)), default=0)
        if time.monotonic() + longest > laps[0] + LIMIT - 2:
            return None
        print(f"measuring {key}", file=sys.stderr)
        quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with quiet[0], quiet[1]:
            measured[key] = rates_of(module, args, folder / str(len(measured)))
        laps.append(time.monotonic())
    total, before = 10.0, 0.0  # to start and to load the data
    for name, seconds in measured[key].items():
        if name.startswith("preprocess"):
            before += seconds * (args.task.source_size or 1_000_000) / ROWS
        elif name == "evaluation":
            total += seconds * (args.updates // args.run.eval_every + 3)
        else:
            total += seconds * values.get(f"{name.removesuffix('s')}_updates", args.updates)
    return total, before


def estimate_here(commands: list[dict], args: Args, jobs: int, folder: Path) -> None:
    """In a process of its own, which the caller ends after LIMIT seconds, or at a signal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they reach the caller
    signal.alarm(int(LIMIT) + 5)  # if the caller was killed
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // jobs)))
    runs, preprocess = importlib.import_module("dynashift.runs"), importlib.import_module("taf_preprocess")
    runs.save_checkpoint = preprocess.figure = lambda *_: None  # nothing of the runs measured is kept
    path, laps = state_of(args) / "measured.json", [time.monotonic()]
    measured, known, pairs, hours, unknown = read(path), {}, set(), defaultdict(list), Counter()
    for words in (command["words"] for command in commands):
        ignored = ("--seed", "--source", "--target", "--data", "--data-dir")
        short = tuple(w for i, w in enumerate(words) if w not in ignored and words[i - 1] not in ignored)
        if short not in known:
            known[short] = seconds_of(list(short), measured, laps, folder)
            write(path, measured)
        if known[short] is None:
            unknown[Path(words[0]).stem] += 1
            continue
        seconds, before = known[short]
        pair = tuple(words[: words.index("--seed")])  # gate, weights and transport costs are shared by all seeds
        hours[Path(words[0]).stem].append((seconds + (before if pair not in pairs else 0)) / 3600)
        pairs.add(pair)
    for method, times in hours.items():
        print(f"{method:8} {len(times):5} runs, each {clock(3600 * sum(times) / len(times))} on average")
    total = sum(map(sum, hours.values())) / jobs
    print(f"about {total:,.1f} hours here with JOBS={jobs}.{BASIS}")
    if unknown:
        names = ", ".join(f"{n} runs of {method}" for method, n in unknown.items())
        print(f"Not in the sum, as a minute was too short to measure them: {names}. The same command goes on.")
    print(f"What was measured: {path}")


def estimate(commands: list[dict], args: Args, jobs: int) -> int:
    """Measure in a process that can be ended at once; the scripts themselves wait for the next checkpoint."""
    if args.commands:
        raise UserError("--estimate is for the runs of --table and the like, not for --commands")
    write(state_of(args) / "measured.json", read(state_of(args) / "measured.json"))  # fails now if it cannot
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=estimate_here, args=(commands, args, jobs, Path(folder)))
        process.start()
        try:
            process.join(LIMIT)
        finally:
            late = process.is_alive()
            process.kill()
            process.join()
    if late:
        raise UserError(f"not all was measured within {LIMIT} s; the same command goes on from there")
    return process.exitcode


# ------------------------------------------------------------------------------------------------- Slurm


def output_of(*words: str, **options) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True, **options).stdout.strip()
    except FileNotFoundError:
        raise UserError(f"there is no {words[0]} here; --slurm is for a cluster's login node") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"{words[0]}: {error.stderr.strip() or error.returncode}") from None


def in_slurm(args: Args) -> dict:
    """Name of a command -> state of its task in Slurm, which is asked only if something was submitted from here."""
    if not any(state_of(args).glob("run_all-*.txt")):
        return {}
    found = {}
    for line in output_of("squeue", "-h", "-r", "--me", "-o", "%j %K %T").splitlines():
        job, task, state = line.split()
        if job.startswith("run_all-") and (path := state_of(args) / f"{job}.txt").exists():
            jobs = int(job.split("-")[1])
            part = read_commands(path)[(int(task) - 1) * jobs : int(task) * jobs]
            found |= {command["name"]: state for command in part}
    return found


def submit(commands: list[dict], args: Args, extra: list[str], jobs: int) -> None:
    """Arrays of at most MaxArraySize tasks: preprocessing, what waits for it, what waits for that, and all the rest."""
    queued = in_slurm(args)
    todo = {c["name"]: c for c in commands if not is_done(c, args) and c["name"] not in queued}
    needed, groups = {c["after"] for c in todo.values()}, {}

    def depth(command):
        return 1 + depth(todo[command["after"]]) if command["after"] in todo else 0

    for c in todo.values():
        groups.setdefault((depth(c), c["name"] in needed), []).append(c)
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", output_of("scontrol", "show", "config"))
    most, ids = (int(found[1]) if found else 1001) - 1, {}
    logs = args.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for level, wanted in sorted(groups, key=lambda group: (group[0], not group[1])):
        group = groups[level, wanted]
        # afterany: where preprocessing failed, the run tries it again and says itself why it cannot be
        wait = ":".join(["afterany", *ids.get((level - 1, True), [])])
        for part in (group[i : i + most * jobs] for i in range(0, len(group), most * jobs)):
            lines = "".join(text(c) + f"  # after {c['after']}" * bool(c["after"]) + "\n" for c in part)
            job = f"run_all-{jobs}-{hashlib.sha256(lines.encode()).hexdigest()[:8]}"
            with atomic(file := state_of(args) / f"{job}.txt") as temporary:
                temporary.write_text(lines)
            worker = [sys.executable, "run_all.py", "--out", args.out, "--commands", file, "--line"]
            script = ["#!/bin/bash", f"export JOBS={jobs}"]
            script += [f'exec {shlex.join(map(str, worker))} "$SLURM_ARRAY_TASK_ID"', ""]
            options = [f"--job-name={job}", f"--array=1-{-(-len(part) // jobs)}%{args.throttle}", "--requeue"]
            options += ["--signal=B:TERM@300", "--open-mode=append", f"--output={logs}/slurm-%A_%a.log"]
            options += [f"--dependency={wait}"] if ":" in wait else []
            number = output_of("sbatch", "--parsable", *options, *extra, input="\n".join(script)).split(";")[0]
            ids.setdefault((level, wanted), []).append(number)
            print(f"job {number}: {len(part)} commands" + f", {wait}" * (":" in wait), file=sys.stderr)
    print(f"{len(todo)} commands submitted, {len(queued)} in the queue before", file=sys.stderr)
    if ids and not args.commands:
        wait = ":".join(["--dependency=afterany", *(number for group in ids.values() for number in group)])
        words = [sys.executable, "report.py", "--runs", str(args.out), "--out", str(args.results)]
        number = output_of(
            "sbatch",
            "--parsable",
            "--job-name=report",
            wait,
            f"--output={logs}/report.log",
            *extra,
            input=f"#!/bin/bash\nexec {shlex.join(words)}\n",
        )
        print(f"job {number}: the report, at the end", file=sys.stderr)


def requeue() -> None:
    """Slurm's warning before the time limit or a preemption: ask for another turn. Not if the job was cancelled."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if job and output_of("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING":
        output_of("scontrol", "requeue", job)


def status(commands: list[dict], args: Args) -> None:
    slurm, counts, failed = in_slurm(args), dict.fromkeys(("done", "running", "failed", "waiting"), 0), []
    queued = 0
    for command in commands:
        name, how = command["name"], "waiting"
        if slurm.get(name) in ("RUNNING", "COMPLETING"):
            how = "running"
        elif is_done(command, args):
            how = "done"
        elif (state_of(args) / f"{name}.lock").exists() and not lock_of(command, args, fcntl.LOCK_SH):
            how = "running"
        elif name not in slurm and read(state_of(args) / f"{name}.json").get("status") == "failed":
            how = "failed"
            failed.append(args.out / "logs" / f"{name}.log")
        counts[how] += 1
        queued += how == "waiting" and name in slurm
    note = f" ({queued} of them in Slurm's queue)" * bool(queued)
    print(", ".join(f"{n} {how}" for how, n in counts.items()) + note)
    print("".join(f"failed: {log}\n" for log in failed), end="")


# -------------------------------------------------------------------------------------------------- main


def main() -> int:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args, extra = tyro.cli(Args, args=words[:cut], description=__doc__), words[cut + 1 :]
    if extra and not args.slurm:
        raise UserError("what follows -- goes to sbatch, and needs --slurm")
    jobs, before = jobs_at_once(args), []
    if args.commands:
        commands = read_commands(args.commands)
        commands = commands[(args.line - 1) * jobs : args.line * jobs] if args.line else commands
    else:
        before, commands = grid(args)
    if not commands:
        raise UserError("no run fits these filters")
    if args.list:
        print("\n".join(map(text, commands)), flush=True)
    if args.quick and not args.commands:
        tasks = ", ".join(f"{env} {shift} {source} -> {target}" for env, shift, source, target in QUICK_TASKS)
        print(
            f"quick: {len(QUICK_TASKS)} of 108 tasks ({tasks}), one row in each ablation, one seed, embedded data,"
            f" small networks and {QUICK[2]} updates: left out is all that makes the numbers meaningful",
            file=sys.stderr,
        )
    if args.list:
        print(f"{len(commands)} runs, {len(before)} shared preprocessings; --estimate: how long", file=sys.stderr)
        return 0
    if args.estimate:
        return estimate(commands, args, jobs)
    if args.status:
        status(commands, args)
        return 0
    if args.slurm:
        submit([*before, *commands], args, extra, jobs)
        return 0
    code = run_here([*before, *commands], args, jobs)
    if args.line and code > 128:
        requeue()
    return code if code > 128 or args.commands else report(args) or code


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
