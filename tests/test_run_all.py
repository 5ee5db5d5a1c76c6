"""run_all.py: the grid, the runner under kills, Slurm. Most runs here are stand-ins that count, save and resume."""

import importlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import tyro

import run_all
import taf_dt
from dynashift import runs
from dynashift.errors import UserError
from run_all import Args, grid, run_here, text

ROOT = Path(__file__).parents[1]

# A run in small: owns its folder, saves every fifth step, resumes, saves on SIGTERM, writes its result last, at once.
JOB = """
import fcntl, hashlib, json, os, signal, socket, sys, time
folder, steps, pause, *gate, _, _ = sys.argv[1:]
steps, pause = int(steps), float(pause)
os.makedirs(folder, exist_ok=True)
lock, stop = open(f"{folder}/.lock", "a"), []
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(f"error: {folder} is in use by process 1; wait for it or end it")
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


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A function that makes n stand-in commands, each with a folder below the one named."""
    monkeypatch.setattr(run_all, "AGAIN", 0.2)
    monkeypatch.setattr(run_all, "POLL", 0.02)
    (tmp_path / "job.py").write_text(JOB)

    def make(n: int, under: str, steps: int = 20, pause: float = 0.02, *gate: str) -> list[dict]:
        # --out: so that the folder lies three levels below it, as in OUT/METHOD/TASK/SEED
        words = [str(tmp_path / "job.py"), str(steps), str(pause), *gate, "--out", str(tmp_path.parent)]
        return [run_all.new([words[0], str(tmp_path / under / f"{i:03}"), *words[1:]]) for i in range(n)]

    return make


def start(commands, args, jobs, log="stderr") -> int:
    """The runner in a process of its own, without the seconds that a new interpreter takes to import."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        sys.stderr = open(args.out.parent / log, "a", buffering=1)  # noqa: SIM115
        code = run_here(commands, args, jobs)
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


# ------------------------------------------------------------------------------------------------- the grid


def test_the_grid_has_the_papers_runs_once_each():
    before, commands = grid(Args())
    lines = list(map(text, commands))
    assert len(lines) == len(set(lines)) == len({c["name"] for c in commands}) == 4320 + 180 + 78 + 16
    assert Counter(c["words"][0] for c in commands) == {
        **{f"baselines/{m}.py": 540 for m in ("iql", "dara", "igdf", "otdf", "dt", "qt", "dadt")},
        "baselines/bc.py": 180,  # 36 target datasets x 5 seeds
        "taf_dt.py": 540 + 78 + 16,
    }
    nominal = dict(filtering=12, advantage=6, alpha=40, expectile=16, xi=20, times=2 * 5, junction=4 * 4 * 5)
    nominal |= {"ot-reward": 30, "ot-cost": 15, "morph": 1500, "kinematic": 1500, "gravity": 1500, "summary": 4500}
    for table in run_all.TABLES:
        some = set(map(text, grid(Args(table=(table,)))[1]))
        assert len(some) == nominal[table]
        assert some <= set(lines)  # the same command, whatever is asked for beside it
    assert len([line for line in lines if "--diagnostics" in line]) == 80
    names = {c["name"] for c in before}
    assert len(before) == 108 + 5  # the pairs, and those without the reward, which have three seeds
    assert all(c["after"] in names for c in commands if c["words"][0] == "taf_dt.py" and "--ot-cost" not in c["words"]
               and "--xi" not in c["words"] and "--filter" not in c["words"])  # fmt: skip
    seeds = [c["words"][c["words"].index("--seed") + 1] for c in commands]
    assert seeds == sorted(seeds)  # all tables with one seed come first


def test_filters():
    def count(**options):
        return len(grid(Args(**options))[1])

    assert count(method=("qt",), env=("ant",), shift=("morph",), seeds=(1, 2)) == 9 * 2
    assert count(table=("ot-reward",), seeds=(7,)) == 10
    assert count(method=("taf_dt", "bc"), table=("gravity",), seeds=(1,)) == 36 + 12
    words = grid(Args(data="d4rl", data_dir=Path("d"), out=Path("o"), device="cpu"))[1][0]["words"]
    assert shlex.join(words).endswith("--seed 1 --data d4rl --data-dir d --device cpu --out o")
    with pytest.raises(SystemExit):
        tyro.cli(Args, args=["--table", "no-such-table"])


def test_quick_has_every_table_and_method():
    _, commands = grid(Args(quick=True))
    assert {Path(c["words"][0]).stem for c in commands} == set(run_all.METHODS)
    assert all(grid(Args(quick=True, table=(table,)))[1] for table in run_all.TABLES)
    assert all("--data embedded" in text(c) and "--quick" in c["words"] for c in commands)
    zeta = [text(c) for c in grid(Args(quick=True, table=("expectile",)))[1]]
    assert taf_dt.QUICK["zeta"] == run_all.QUICK_ZETA, "or a run of that value would be taken for another"
    assert sum("--zeta 0.98" in line for line in zeta) == sum("--zeta" not in line for line in zeta) == 1
    flags = {re.sub(r"--(quick|updates|eval-episodes).*", "", text(c)) for c in commands}
    assert len(flags) == len(commands) == 43


def test_every_command_is_understood_by_its_script():
    """Every script with every set of flags that occurs; the values of task and seed are tried for one of each."""
    shapes = {}
    for args in (Args(), Args(quick=True), Args(data="d4rl", data_dir=Path("d"), device="cpu", out=Path("o"))):
        for command in [c for part in grid(args) for c in part]:
            task = ("--env", "--shift", "--source", "--target", "--seed")
            words = command["words"]
            shapes[tuple(w for i, w in enumerate(words) if w not in task and words[i - 1] not in task)] = words
    assert len(shapes) > 60
    for words in shapes.values():
        module = importlib.import_module(words[0].removesuffix(".py").replace("/", "."))
        args = runs.flatten(runs.read_args(module.Args, module.defaults, "", words[1:]))
        given = dict(itertools.pairwise(words))
        for name in ("env", "shift", "target"):
            assert args[name] == given[f"--{name}"]
        for factor in {"--alpha", "--zeta", "--xi"} & given.keys():
            assert args[factor[2:]] == float(given[factor])
        assert ("--no-ot-reward" not in words) == args.get("ot_reward", True)
        if "--diagnostics" in words:
            assert args["diagnostics"]
            assert words[0] == "taf_dt.py" or "reference" in args


def test_shared_preprocessing_is_what_the_runs_look_for(tmp_path):
    """The file that taf_preprocess.py makes ahead is the one that taf_dt.py would make."""
    import taf_dt
    import taf_preprocess

    before, commands = grid(Args(table=("ot-reward", "alpha"), out=tmp_path, quick=True))
    by_name = {c["name"]: c for c in before}
    for command in (c for c in commands if c["after"]):
        words = by_name[command["after"]]["words"][1:]
        ahead = taf_preprocess.resolve(tyro.cli(taf_preprocess.Args, args=words))
        args = runs.flatten(runs.read_args(taf_dt.Args, taf_dt.defaults, "", command["words"][1:]))
        own = {name: args[name] for name in runs.flatten(taf_preprocess.Args())}
        own = taf_preprocess.resolve(runs.compose(taf_preprocess.Args, **own | {"out": args["out"] / "preprocess"}))
        assert own == ahead


def test_list_prints_commands_without_torch(tmp_path):
    words = ["run_all.py", "--list", "--quick", "--method", "bc", "--out", str(tmp_path / "runs")]
    script = f"import sys, run_all; sys.argv = {words}; run_all.main(); assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 3
    assert all(line.startswith("python baselines/bc.py --env ") for line in run.stdout.splitlines())
    assert "3 runs" in run.stderr
    assert not (tmp_path / "runs").exists()


def test_a_list_that_is_not_read_to_its_end(tmp_path):
    words, options = ["bash", "-c", "bash run_all.sh --list | head -1"], dict(capture_output=True, text=True)
    run = subprocess.run(words, cwd=ROOT, env=environ(tmp_path), **options)
    assert run.stdout.startswith("python ")
    assert "Error" not in run.stderr


def test_estimate_measures_once_and_says_what_it_rests_on(tmp_path):
    """The real measurement, of the cheapest method."""
    words = ["--estimate", "--quick", "--method", "bc", "--out", str(tmp_path / "runs")]
    words = ["bash", str(ROOT / "run_all.sh"), *words]
    first, again = (subprocess.run(words, env=environ(tmp_path), capture_output=True, text=True) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "measuring bc" in first.stderr
    assert "measuring" not in again.stderr
    assert re.search(r"bc +3 runs, each \d+ min \d\d s", first.stdout)
    assert re.search(r"about \d+\.\d hours here with JOBS=\d", first.stdout)
    assert "This rests on a few updates" in first.stdout
    assert first.stdout == again.stdout
    (rates,) = json.loads((tmp_path / "runs" / ".run_all" / "measured.json").read_text()).values()
    assert set(rates) == {"policy", "evaluation"}
    assert all(0 < seconds < 100 for seconds in rates.values())


def test_seconds_of_a_run_are_its_updates_times_their_cost(tmp_path, monkeypatch):
    """With rates that are known, against the sum by hand."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rates = {"preprocess mmd": 2.0, "labels": 0.1, "command": 0.2, "cvae": 0.3, "policy": 0.5, "evaluation": 7.0}
    words = "taf_dt.py --env hopper --shift morph --updates 1000 --eval-every 100 --label-updates 200 --command-updates"
    words += " 300 --cvae-updates 400 --source-size 10000"
    known = {"taf_dt, K 5, quick False, auto, 3 threads": rates}
    total, before = run_all.seconds_of(words.split(), known, [0.0], tmp_path)
    assert total == pytest.approx(10 + 200 * 0.1 + 300 * 0.2 + 400 * 0.3 + 1000 * 0.5 + 7 * (10 + 3))
    assert before == 2.0 * 10_000 / run_all.ROWS


def test_estimate_ends_in_time(tmp_path, monkeypatch, capfd):
    """Where nothing can be measured any more, it says so; a measurement that does not end is ended."""
    args = Args(quick=True, method=("bc", "iql"), out=tmp_path)
    monkeypatch.setattr(run_all, "LIMIT", 30)
    monkeypatch.setattr(run_all, "seconds_of", lambda words, *_: (3600.0, 0.0) if "bc" in words[0] else None)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert run_all.estimate(grid(args)[1], args, 2) == 0
    said = capfd.readouterr().out
    assert "about 1.5 hours here with JOBS=2" in said  # three runs of an hour
    assert "Not in the sum, as a minute was too short to measure them: 3 runs of iql." in said
    monkeypatch.setattr(run_all, "LIMIT", 0.1)
    monkeypatch.setattr(run_all, "seconds_of", lambda *_: signal.pause())
    with pytest.raises(UserError, match="not all was measured within"):
        run_all.estimate(grid(args)[1], args, 2)
    for number, handler in zip((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), handlers, strict=True):
        signal.signal(number, handler)


def test_nothing_is_measured_when_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["baselines/bc.py", "--env", "hopper", "--shift", "morph", "--quick"]
    late = time.monotonic() - run_all.LIMIT
    assert run_all.seconds_of(words, {}, [late], tmp_path) is None
    now = time.monotonic()  # a measurement has just taken most of the time: the next one would, too
    assert run_all.seconds_of(words, {}, [now - 0.6 * run_all.LIMIT, now], tmp_path) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_estimate_stops_at_the_first_signal(tmp_path, number):
    words = ["bash", str(ROOT / "run_all.sh"), "--estimate", "--method", "qt", "--out", str(tmp_path / "runs")]
    (tmp_path / "tmp").mkdir()
    env = environ(tmp_path, TMPDIR=str(tmp_path / "tmp"))
    options = dict(env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    run = subprocess.Popen(words, **options)
    assert run.stderr.readline().startswith("measuring qt")
    os.killpg(run.pid, number)  # as a terminal does: to all of them
    assert run.communicate() == ("", "")
    assert run.returncode == 128 + number
    assert not list((tmp_path / "tmp").iterdir())
    with pytest.raises(ProcessLookupError):  # nothing of it is left
        os.killpg(run.pid, 0)


def environ(tmp_path, **more) -> dict:
    return os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)} | more


# ----------------------------------------------------------------------------------------------- the runner


def test_runs_everything_then_skips_it(jobs, tmp_path):
    args, commands = Args(out=tmp_path / "runs"), jobs(5, "a", 5, 0.01)
    assert ended(start(commands, args, 2)) == 0
    assert len(results(tmp_path / "a")) == 5
    assert ended(start(commands, args, 2, "again")) == 0
    assert "5 commands, 5 of them done" in (tmp_path / "again").read_text()
    assert "finished" in {p.name for p in (tmp_path / "a" / "000").iterdir()}
    (tmp_path / "a" / "003" / "result.json").unlink()  # a result that was deleted by hand is made again
    assert ended(start(commands, args, 2, "third")) == 0
    assert (tmp_path / "a" / "003" / "finished").read_text() == "xx"
    assert (tmp_path / "a" / "000" / "finished").read_text() == "x"


def test_threads_cards_and_order(jobs, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(run_all, "cores", lambda: 8)
    show = "import os, sys, time; print(time.time_ns()); time.sleep(.3); print(time.time_ns())\nfor k in "
    show += "('OMP_NUM_THREADS', 'OMP_WAIT_POLICY', 'CUDA_VISIBLE_DEVICES'): print(os.environ[k])\n"
    (tmp_path / "show.py").write_text(show)
    args, commands = Args(out=tmp_path / "runs"), [run_all.new([str(tmp_path / "show.py"), str(i)]) for i in range(3)]
    commands[0]["after"] = commands[2]["name"]
    assert ended(start(commands, args, 3)) == 0
    logs = [(tmp_path / "runs" / "logs" / f"{c['name']}.log").read_text().split()[-5:] for c in commands]
    assert [log[2:4] for log in logs] == [["2", "PASSIVE"]] * 3
    assert {log[4] for log in logs[1:]} == {"3", "5"}
    assert int(logs[0][0]) > int(logs[2][1])
    monkeypatch.setenv("JOBS", "none")
    with pytest.raises(UserError, match="JOBS is the number"):
        run_all.jobs_at_once(args)


def test_failures_are_listed_with_their_last_lines(jobs, tmp_path):
    (tmp_path / "bad.py").write_text("print('a' * 9)\nraise ValueError('the flux is low')\n")
    commands = [*jobs(2, "a", 5, 0.01), run_all.new([str(tmp_path / "bad.py")])]
    args = Args(out=tmp_path / "runs")
    assert ended(start(commands, args, 2)) == 1
    said = (tmp_path / "stderr").read_text()
    assert "2 done, 1 failed, 0 left" in said
    assert said.rstrip().endswith("ValueError: the flux is low")
    assert len(results(tmp_path / "a")) == 2
    (tmp_path / "bad.py").write_text("print('mended')")
    assert ended(start(commands, args, 2)) == 0


def test_a_run_in_use_by_another_process_is_no_failure(jobs, tmp_path):
    """Somebody has started the script by hand."""
    args, (command,) = Args(out=tmp_path / "runs"), jobs(1, "a", 100, 0.02)
    other = subprocess.Popen([sys.executable, *command["words"]], stdout=subprocess.DEVNULL)
    until((tmp_path / "a" / "000" / "pid").exists)
    assert ended(start([command], args, 1)) == 0
    assert other.wait() == 0
    assert ": busy after" in (tmp_path / "stderr").read_text()
    assert "1 done, 0 failed" in (tmp_path / "stderr").read_text()
    assert (tmp_path / "a" / "000" / "finished").read_text() == "x"


def test_a_folder_in_use_says_so_in_the_words_that_the_runner_looks_for(tmp_path):
    """The sentence of dynashift.runs by which a run in other hands is told from one that failed."""
    with runs.session(tmp_path / "a", {}), pytest.raises(UserError) as error, runs.session(tmp_path / "a", {}):
        pass
    assert run_all.IN_USE in str(error.value)


def test_the_result_is_in_the_folder_that_the_run_has_signed(jobs, tmp_path):
    """Whatever the folder is called and whatever the run prints; done at once, the second time."""
    (command,) = jobs(1, "a", 1, 0)
    for i in range(2):
        args = Args(out=tmp_path / f"runs{i}")
        assert ended(start([command], args, 1)) == 0
        known = json.loads((args.out / ".run_all" / f"{command['name']}.json").read_text())
        assert Path(known["result"]).samefile(tmp_path / "a" / "000" / "result.json")


def test_two_runners_share_the_work(jobs, tmp_path):
    args, commands = Args(out=tmp_path / "runs"), jobs(10, "a", 10, 0.02)
    runners = [start(commands, args, 2, f"log{i}") for i in range(2)]
    assert [ended(pid) for pid in runners] == [0, 0]
    assert [(p / "finished").read_text() for p in (tmp_path / "a").iterdir()] == ["x"] * 10
    logs = "".join(p.read_text() for p in (tmp_path / "runs" / "logs").iterdir())
    assert logs.count("+ python") == 10  # none was even tried twice


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_runner_lets_its_runs_save(jobs, tmp_path, number):
    args, commands = Args(out=tmp_path / "runs"), jobs(3, "a", 53, 0.02)
    pid = start(commands, args, 2)
    until((tmp_path / "a" / "001" / "ckpt").exists)
    os.kill(pid, number)
    assert ended(pid) == 128 + number
    assert "the same command goes on from here" in (tmp_path / "stderr").read_text()
    saved = json.loads((tmp_path / "a" / "001" / "ckpt").read_text())[0]
    assert saved < 53
    assert not results(tmp_path / "a")
    assert ended(start(commands, args, 2)) == 0
    assert ended(start(jobs(3, "b", 53, 0), Args(out=tmp_path / "other"), 3)) == 0
    assert results(tmp_path / "a") == results(tmp_path / "b")


def test_fifty_kills_change_nothing(jobs, tmp_path):
    rng, args, commands = random.Random(0), Args(out=tmp_path / "runs"), jobs(12, "a", 60, 0.02)
    assert ended(start(jobs(12, "b", 60, 0), Args(out=tmp_path / "other"), 4)) == 0
    runner, hits = start(commands, args, 3), Counter()
    while sum(hits.values()) < 50:
        time.sleep(rng.uniform(0.02, 0.25))
        if os.waitpid(runner, os.WNOHANG)[0]:
            runner = start(commands, args, 3)
            if len(results(tmp_path / "a")) == 12:  # too fast: some of it once more
                for folder in rng.sample(sorted((tmp_path / "a").iterdir()), 6):
                    shutil.rmtree(folder)
            continue
        if rng.random() < 0.4:
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            os.kill(runner, number)
            hits["runner", number] += 1
        elif pids := [int(p.read_text() or 0) for p in (tmp_path / "a").glob("*/pid")]:
            alive = [pid for pid in pids if pid and str(tmp_path / "job.py").encode() in cmdline(pid)]
            if alive:
                os.kill(rng.choice(alive), signal.SIGKILL)
                hits["run", signal.SIGKILL] += 1
    while ended(runner):
        runner = start(commands, args, 3)
    assert len({who for who, _ in hits}) == 2
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert len(results(tmp_path / "a")) == 12


def cmdline(pid: int) -> bytes:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes() if path.exists() else b""


def test_status_counts(jobs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_all, "in_slurm", lambda args: {})
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    args, bad = Args(out=tmp_path / "runs"), run_all.new([str(tmp_path / "bad.py")])
    commands = [*jobs(1, "a", 1, 0), bad, *jobs(2, "b", 1000, 0.02)]
    assert ended(start(commands[:2], args, 1)) == 1
    pid = start(commands[2:3], args, 1)
    until((tmp_path / "b" / "000" / "pid").exists)
    run_all.status(commands, args)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 143
    said = capsys.readouterr().out
    assert said.startswith("1 done, 1 running, 1 failed, 1 waiting\n")
    assert f"failed: {tmp_path / 'runs' / 'logs' / bad['name']}.log" in said
    run_all.status(commands, args)
    assert capsys.readouterr().out.startswith("1 done, 0 running, 1 failed, 2 waiting\n")


def test_status_without_a_cluster(jobs, tmp_path, capsys, monkeypatch):
    """Slurm's programs are installed, but there is no cluster: nothing was submitted, so nobody asks them."""
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'Could not establish a configuration source' >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    args, commands = Args(out=tmp_path / "runs"), jobs(2, "a", 1, 0)
    run_all.status(commands, args)
    assert capsys.readouterr().out.startswith("0 done, 0 running, 0 failed, 2 waiting\n")
    (tmp_path / "runs" / ".run_all").mkdir(parents=True)
    (tmp_path / "runs" / ".run_all" / "run_all-1-00000000.txt").write_text("")
    with pytest.raises(UserError, match="squeue: Could not establish"):
        run_all.status(commands, args)


# ------------------------------------------------------------------------------------------- no place to write


def test_a_folder_that_cannot_be_written(jobs, tmp_path):
    (tmp_path / "file").write_text("")
    assert ended(start(jobs(2, "a"), Args(out=tmp_path / "file" / "runs"), 2)) != 0  # below a file
    (tmp_path / "commands").write_text("python no.py\n")
    words = ["--commands", str(tmp_path / "commands"), "--out", str(tmp_path / "file" / "runs")]
    run = subprocess.run(["bash", ROOT / "run_all.sh", *words], env=environ(tmp_path), capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(f"error: cannot write to {tmp_path / 'file' / 'runs'}")
    assert "choose another folder with --out" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(jobs, small_disk, tmp_path):
    args, commands, log = Args(out=small_disk / "runs"), jobs(20, "disk/a", 5, 0.01), tmp_path / "said"
    assert ended(start(commands, args, 2, log)) == 1
    assert re.search("the disk of .* is full; make room|No space left on device; mend that", log.read_text())
    found = results(small_disk / "a")  # those that are there are whole
    assert 0 < len(found) < 20
    for path in (small_disk / "runs" / ".run_all").glob("*.json"):
        assert json.loads(path.read_text())["status"] in ("done", "failed")
    assert not list((small_disk / "runs" / ".run_all").glob(".*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert ended(start(commands, args, 2, log)) == 0
    assert ended(start(jobs(20, "b", 5, 0), Args(out=tmp_path / "other"), 2)) == 0
    assert results(small_disk / "a") == results(tmp_path / "b")


# ---------------------------------------------------------------------------------------------- real runs

TINY = "--env hopper --shift morph --data embedded --source-size 1000 --layers 1 --heads 1 --width 16 --hidden 16"
TINY += " --cvae-hidden 16 --updates 300 --label-updates 60 --command-updates 60 --cvae-updates 60 --eval-every 100"
TINY += " --save-every 20 --eval-episodes 1 --target-batch 8 --label-batch 16 --guided never --device cpu"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The environment of tiny runs, and the evaluations of taf_dt.py without and with --token rtg."""
    folder = tmp_path_factory.mktemp("undisturbed")
    env = {**os.environ, "DYNASHIFT_DATA": str(folder / "data"), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    for more in ([], ["--token", "rtg"]):
        words = [sys.executable, "taf_dt.py", *TINY.split(), *more, "--out", folder / "runs"]
        subprocess.run(words, cwd=ROOT, env=env, check=True, capture_output=True)
    return env, evaluations(folder / "runs")


def evaluations(out: Path) -> dict:
    """Of every run: the argument that tells them apart -> its evaluations, and the stages in their order."""
    found = [json.loads(p.read_text()) for p in out.rglob("result.json")]
    return {r["args"]["token"]: [r["evaluations"], list(r["stages"])] for r in found}


def test_kills_change_nothing_in_a_real_run(undisturbed, tmp_path):
    env, expected = undisturbed
    out = tmp_path / "runs"
    (tmp_path / "commands").write_text(f"python taf_dt.py {TINY} --out {out}\n")
    words = ["bash", ROOT / "run_all.sh", "--commands", tmp_path / "commands", "--out", out]
    runner = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
    until(lambda: list(out.rglob("ckpt.pt")))
    runner.send_signal(signal.SIGINT)
    assert "goes on from here" in runner.communicate()[1]
    assert runner.returncode == 130
    (folder,) = [p.parent for p in out.rglob("ckpt.pt")]
    assert not (folder / "result.json").exists()
    before = (folder / "ckpt.pt").read_bytes()
    runner = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
    until(lambda: (folder / "ckpt.pt").read_bytes() != before)
    os.kill(int((folder / ".lock").read_text().split()[0]), signal.SIGKILL)
    said = runner.communicate()[1]
    assert runner.returncode == 0, said
    assert ": killed after" in said
    assert evaluations(out) == {"advantage": expected["advantage"]}


# ------------------------------------------------------------------------------------------------- Slurm


@pytest.fixture
def cluster():
    """One node, from a slurm.conf of its own: no systemd, no cgroups, no accounting."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch")
    path = os.environ["PATH"] + ":/usr/sbin"
    if missing := [name for name in programs if not shutil.which(name, path=path)]:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("a cluster of one's own needs root")
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # short: the path of a socket has at most 107 characters
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    munge, host = folder / "munge", socket.gethostname().split(".")[0]
    munge.chmod(0o755)
    (munge / "key").write_bytes(os.urandom(128))
    (munge / "key").chmod(0o600)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
MpiDefault=none
MaxArraySize=3
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
""")
    env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    words = ["munged", "--force", *(f"--{k}-file={munge}/{k}" for k in ("key", "pid", "log", "seed"))]
    for command in ([*words, f"--socket={munge}/socket"], ["slurmctld"], ["slurmd"]):
        subprocess.run(command, env=os.environ | env, check=True, capture_output=True)
    idle = ["sinfo", "-h", "-o", "%T"]
    until(lambda: subprocess.run(idle, env=os.environ | env, capture_output=True, text=True).stdout.strip() == "idle")
    yield env
    subprocess.run(["scancel", "--me"], env=os.environ | env, check=True)  # a failed test may leave some
    for name in ("slurmd.pid", "slurmctld.pid", "munge/pid"):
        pid = int((folder / name).read_text())
        os.kill(pid, signal.SIGTERM)
        until(lambda pid=pid: not cmdline(pid))
    shutil.rmtree(folder, ignore_errors=True)


class Slurm:
    """The commands in a file, and what a user of the cluster does with them."""

    def __init__(self, lines: list[str], folder: Path, env: dict):
        self.file, self.out, self.env = folder / "commands", folder / "runs", os.environ | env
        self.env |= {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
        self.file.write_text("\n".join(lines))

    def shell(self, *words) -> str:
        run = subprocess.run(words, env=self.env, capture_output=True, text=True, cwd=ROOT)
        assert run.returncode == 0, run.stderr
        return run.stdout + run.stderr

    def run_all(self, *words) -> str:
        return self.shell("bash", "run_all.sh", "--commands", self.file, "--out", self.out, *words)

    def queue(self) -> list[list[str]]:
        return [line.split() for line in self.shell("squeue", "-h", "-r", "-o", "%i %j %K %T").splitlines()]

    def task(self, name: str) -> str | None:
        """Slurm's number of the task that has this command."""
        for number, job, task, _ in self.queue():
            line = (self.out / ".run_all" / f"{job}.txt").read_text().splitlines()[int(task) - 1]
            if named(line) == name:
                return number
        return None


def named(line: str) -> str:
    return run_all.new(shlex.split(line, comments=True)[1:])["name"]


def test_slurm_requeues_resumes_and_waits(cluster, jobs, tmp_path):
    """One task is warned as before its time limit, one requeued, one killed for good and submitted again."""
    commands = jobs(6, "a", 40, 0.02, "gate")  # they wait in the middle, for a file
    lines = [text(c) for c in commands]
    lines[5] += f"  # after {commands[0]['name']}"
    slurm = Slurm(lines, tmp_path, cluster)
    said = slurm.run_all("--slurm", "--throttle", "1", "--", "--nice=1")
    assert "6 commands submitted" in said
    assert len(re.findall(r"job \d+: ", said)) == 4  # the first; four more, in arrays of at most two; the last
    assert re.search(r"1 commands, afterany:\d+", said)
    assert "0 commands submitted, 6 in the queue" in slurm.run_all("--slurm")  # not twice
    assert re.search(r"0 failed, \d waiting \(\d of them in Slurm's queue\)", slurm.run_all("--status"))

    hits = [
        ["scancel", "--batch", "--signal=TERM"],
        ["scontrol", "requeue"],
        [],
        ["scancel", "--full", "--signal=KILL"],
    ]
    for i, words in enumerate([*hits, [], []]):
        folder = tmp_path / "a" / f"{i:03}"
        until(lambda path=folder / "ckpt": path.exists() and json.loads(path.read_text())[0] == 10)
        assert i != 0 or not (tmp_path / "a" / "005").exists()
        if words:
            slurm.shell(*words, slurm.task(commands[i]["name"]))
            pid = int((folder / "pid").read_text())
            until(lambda pid=pid: not cmdline(pid))
        folder.with_suffix(".go").write_text("")
    until(lambda: not slurm.queue())
    assert sorted(results(tmp_path / "a")) == ["000", "001", "002", "004", "005"]
    assert slurm.run_all("--status").startswith("5 done, 0 running, 0 failed, 1 waiting")
    assert "1 commands submitted" in slurm.run_all("--slurm")  # what Slurm does not requeue of itself
    until(lambda: not slurm.queue())
    assert slurm.run_all("--status").startswith("6 done, 0 running, 0 failed, 0 waiting")
    assert ended(start(jobs(6, "b", 40, 0), Args(out=tmp_path / "other"), 2)) == 0
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert [p.read_text() for p in (tmp_path / "a").glob("*/finished")] == ["x"] * 6


def test_slurm_runs_a_table(undisturbed, cluster, tmp_path):
    """The advantage table in small, from its preprocessing on; one of the two runs is requeued in the middle."""
    out, pre = tmp_path / "runs", "python taf_preprocess.py --env hopper --shift morph --data embedded"
    lines = [f"{pre} --source-size 1000 --device cpu --out {out}/preprocess"]
    lines += [f"python taf_dt.py {TINY}{more} --out {out}  # after {named(lines[0])}" for more in ("", " --token rtg")]
    slurm = Slurm(lines, tmp_path, undisturbed[0] | cluster)
    assert "3 commands submitted" in slurm.run_all("--slurm")
    (folder,) = until(lambda: [p.parent for p in out.rglob("ckpt.pt")])[:1]
    token = json.loads((folder / "args.json").read_text())["token"]
    slurm.shell("scontrol", "requeue", slurm.task(named(lines[1 + (token == "rtg")])))
    assert not (folder / "result.json").exists()
    until(lambda: not slurm.queue())
    assert slurm.run_all("--status").startswith("3 done, 0 running, 0 failed, 0 waiting")
    assert evaluations(out) == undisturbed[1]
    logs = [(out / "logs" / f"{named(line)}.log").read_text() for line in lines]
    assert sorted(log.count("+ python") for log in logs) == [1, 1, 2]
