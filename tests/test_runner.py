"""The runner: what is done, failed, busy or killed, signals, damaged files, folders that cannot be written.

Most runs here are stand-ins that count, save and resume.
"""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from standins import cmdline, command, ended, environ, results, start, until

from dynashift import runs
from dynashift.errors import InUse, UserError, one_line_errors
from experiments import machine, runner
from experiments.state import State

ROOT = Path(__file__).parents[1]


def test_runs_everything_then_skips_it(jobs, tmp_path):
    state, commands = State(tmp_path / "runs"), jobs(5, "a", 5, 0.01)
    assert ended(start(commands, state, 2)) == 0
    assert len(results(tmp_path / "a")) == 5
    assert ended(start(commands, state, 2, "again")) == 0
    assert "5 commands, 5 of them done" in (tmp_path / "again").read_text()
    assert "finished" in {p.name for p in (tmp_path / "a" / "000").iterdir()}
    (tmp_path / "a" / "003" / "result.json").unlink()  # a result that was deleted by hand is made again
    assert ended(start(commands, state, 2, "third")) == 0
    assert (tmp_path / "a" / "003" / "finished").read_text() == "xx"
    assert (tmp_path / "a" / "000" / "finished").read_text() == "x"


def test_threads_cards_and_order(jobs, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(machine, "cores", lambda: 8)
    show = "import os, sys, time; print(time.time_ns()); time.sleep(.3); print(time.time_ns())\nfor k in "
    show += "('OMP_NUM_THREADS', 'OMP_WAIT_POLICY', 'CUDA_VISIBLE_DEVICES'): print(os.environ[k])\n"
    (tmp_path / "show.py").write_text(show)
    state, show = State(tmp_path / "runs"), tmp_path / "show.py"
    commands = [command(show, 0, after=command(show, 2).name), command(show, 1), command(show, 2)]
    assert ended(start(commands, state, 3)) == 0
    logs = [(tmp_path / "runs" / "logs" / f"{c.name}.log").read_text().split()[-5:] for c in commands]
    assert [log[2:4] for log in logs] == [["2", "PASSIVE"]] * 3
    assert {log[4] for log in logs[1:]} == {"3", "5"}
    assert int(logs[0][0]) > int(logs[2][1])
    monkeypatch.setenv("JOBS", "none")
    with pytest.raises(UserError, match="JOBS is the number"):
        machine.jobs_at_once(one=False)


def test_failures_are_listed_with_their_last_lines(jobs, tmp_path):
    (tmp_path / "bad.py").write_text("print('a' * 9)\nraise ValueError('the flux is low')\n")
    commands = [*jobs(2, "a", 5, 0.01), command(tmp_path / "bad.py")]
    state = State(tmp_path / "runs")
    assert ended(start(commands, state, 2)) == 1
    said = (tmp_path / "stderr").read_text()
    assert "2 done, 1 failed, 0 left" in said
    assert said.rstrip().endswith("ValueError: the flux is low")
    assert len(results(tmp_path / "a")) == 2
    (tmp_path / "bad.py").write_text("print('repaired')")
    assert ended(start(commands, state, 2)) == 0


def test_a_run_in_use_by_another_process_is_no_failure(jobs, tmp_path):
    """The script was started by hand."""
    state, (job,) = State(tmp_path / "runs"), jobs(1, "a", 100, 0.02)
    other = subprocess.Popen([sys.executable, *job.words], stdout=subprocess.DEVNULL)
    until((tmp_path / "a" / "000" / "pid").exists)
    assert ended(start([job], state, 1)) == 0
    assert other.wait() == 0
    assert ": busy after" in (tmp_path / "stderr").read_text()
    assert "1 done, 0 failed" in (tmp_path / "stderr").read_text()
    assert (tmp_path / "a" / "000" / "finished").read_text() == "x"


def test_a_folder_in_use_ends_a_script_with_a_status_of_its_own(tmp_path, capsys):
    """The status tells the runner that another process has started the run, and that it did not fail."""
    folder = tmp_path / "a"
    with runs.session(folder, {}), pytest.raises(SystemExit) as end, one_line_errors(), runs.session(folder, {}):
        pass
    assert end.value.code == InUse.status
    said = capsys.readouterr().err
    assert re.fullmatch(rf"error: {tmp_path}/a is in use by process {os.getpid()} on \S+; .*\n", said)


def test_the_result_is_in_the_folder_that_the_run_has_signed(jobs, tmp_path):
    """Whatever the folder is called and whatever the run prints; done at once, the second time."""
    (job,) = jobs(1, "a", 1, 0)
    for i in range(2):
        state = State(tmp_path / f"runs{i}")
        assert ended(start([job], state, 1)) == 0
        known = json.loads((state.folder / f"{job.name}.json").read_text())
        assert Path(known["result"]).samefile(tmp_path / "a" / "000" / "result.json")


def test_two_runners_share_the_work(jobs, tmp_path):
    state, commands = State(tmp_path / "runs"), jobs(10, "a", 10, 0.02)
    runners = [start(commands, state, 2, f"log{i}") for i in range(2)]
    assert [ended(pid) for pid in runners] == [0, 0]
    assert [(p / "finished").read_text() for p in (tmp_path / "a").iterdir()] == ["x"] * 10
    logs = "".join(p.read_text() for p in (tmp_path / "runs" / "logs").iterdir())
    assert logs.count("+ python") == 10  # none was tried twice


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_stopped_runner_lets_its_runs_save(jobs, tmp_path, number, send):  # send: also under nohup
    state, commands = State(tmp_path / "runs"), jobs(3, "a", 53, 0.02)
    pid = start(commands, state, 2)
    until((tmp_path / "a" / "001" / "ckpt").exists)
    os.kill(pid, number)
    assert ended(pid) == 128 + number
    assert "the same command goes on from here" in (tmp_path / "stderr").read_text()
    saved = json.loads((tmp_path / "a" / "001" / "ckpt").read_text())[0]
    assert saved < 53
    assert not results(tmp_path / "a")
    assert ended(start(commands, state, 2)) == 0
    assert ended(start(jobs(3, "b", 53, 0), State(tmp_path / "other"), 3)) == 0
    assert results(tmp_path / "a") == results(tmp_path / "b")


def test_fifty_kills_change_nothing(jobs, tmp_path):
    rng, state, commands = random.Random(0), State(tmp_path / "runs"), jobs(12, "a", 60, 0.02)
    assert ended(start(jobs(12, "b", 60, 0), State(tmp_path / "other"), 4)) == 0
    pid, hits = start(commands, state, 3), Counter()
    while sum(hits.values()) < 50:
        time.sleep(rng.uniform(0.02, 0.25))
        if os.waitpid(pid, os.WNOHANG)[0]:
            pid = start(commands, state, 3)
            if len(results(tmp_path / "a")) == 12:  # too fast: do some of them once more
                for folder in rng.sample(sorted((tmp_path / "a").iterdir()), 6):
                    shutil.rmtree(folder)
            continue
        if rng.random() < 0.4:
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            os.kill(pid, number)
            hits["runner", number] += 1
        elif pids := [int(p.read_text() or 0) for p in (tmp_path / "a").glob("*/pid")]:
            alive = [p for p in pids if p and str(tmp_path / "job.py").encode() in cmdline(p)]
            if alive:
                os.kill(rng.choice(alive), signal.SIGKILL)
                hits["run", signal.SIGKILL] += 1
    while ended(pid):
        pid = start(commands, state, 3)
    assert len({who for who, _ in hits}) == 2
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert len(results(tmp_path / "a")) == 12


def test_status_counts(jobs, tmp_path, capsys):
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    state, bad = State(tmp_path / "runs"), command(tmp_path / "bad.py")
    commands = [*jobs(1, "a", 1, 0), bad, *jobs(2, "b", 1000, 0.02)]
    assert ended(start(commands[:2], state, 1)) == 1
    pid = start(commands[2:3], state, 1)
    until((tmp_path / "b" / "000" / "pid").exists)
    runner.status(commands, state)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 143
    said = capsys.readouterr().out
    assert said.startswith("1 done, 1 running, 1 failed, 1 waiting\n")
    assert f"failed: {tmp_path / 'runs' / 'logs' / bad.name}.log" in said
    runner.status(commands, state)
    assert capsys.readouterr().out.startswith("1 done, 0 running, 1 failed, 2 waiting\n")


def test_damaged_state_files_count_as_absent(jobs, tmp_path, capsys):
    """Whatever they hold, the command is given again, and finds its run done."""
    state, (job,) = State(tmp_path / "runs"), jobs(1, "a", 1, 0)
    assert ended(start([job], state, 1)) == 0
    file = state.folder / f"{job.name}.json"
    whole = json.loads(file.read_text())
    damaged = ["", "{", "[]", "null", "7", "[" * 100_000, "\0\xff", '{"status": "done"}']
    damaged += [json.dumps({k: v for k, v in whole.items() if k != key}) for key in whole]
    damaged += [json.dumps(whole | {"seconds": "long"}), json.dumps(whole | {"result": 3})]
    for text in damaged:
        file.write_text(text)
        assert state.outcome(job.name) is None
        assert not state.is_done(job)
        runner.status([job], state)
        assert capsys.readouterr().out == "0 done, 0 running, 0 failed, 1 waiting\n"
    assert ended(start([job], state, 1)) == 0
    assert state.is_done(job)
    assert (tmp_path / "a" / "000" / "finished").read_text() == "x"


def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_system_without_locks(jobs, tmp_path, monkeypatch):
    """One line says so, and everything is run."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    state, commands = State(tmp_path / "runs"), jobs(4, "a", 1, 0)
    assert ended(start(commands, state, 2)) == 0
    said = (tmp_path / "stderr").read_text()
    note = f"note: {state.folder} has no locks (No locks available); start one runner only"
    assert said.splitlines().count(note) == said.count("No locks available") == 1
    assert "Traceback" not in said
    assert len(results(tmp_path / "a")) == 4
    monkeypatch.undo()
    assert not any(map(state.is_locked, commands))


def test_nohup_is_respected(jobs, tmp_path):
    """Where SIGHUP is ignored on purpose, it stops nothing."""
    state, commands = State(tmp_path / "runs"), jobs(1, "a", 15, 0.02, "gate")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pid = start(commands, state, 1)
    signal.signal(signal.SIGHUP, before)
    until((tmp_path / "a" / "000" / "ckpt").exists)
    os.kill(pid, signal.SIGHUP)
    (tmp_path / "a" / "000.go").write_text("")
    assert ended(pid) == 0
    assert len(results(tmp_path / "a")) == 1


def test_a_space_in_out_does_not_preprocess_again(tmp_path):
    """With the real script: the second time everything is done."""
    out = tmp_path / "my runs"
    words = ["taf_preprocess.py", "--env", "hopper", "--shift", "morph", "--data", "embedded", "--device", "cpu"]
    job = command(*words, "--source-size", 600, "--out", out / "preprocess")
    (tmp_path / "my commands").write_text(f"{job}\n")
    words = ["bash", ROOT / "run_all.sh", "--commands", tmp_path / "my commands", "--out", out]
    env = environ(tmp_path, DYNASHIFT_DATA=str(tmp_path / "data"))
    first, again = (subprocess.run(words, env=env, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "1 commands, 0 of them done" in first.stderr
    assert "1 commands, 1 of them done" in again.stderr
    assert State(out).log(job.name).read_text().count("+ python") == 1
    assert len(list((out / "preprocess").glob("*.npz"))) == 1


# ------------------------------------------------------------------------------------------- no place to write


def test_a_folder_that_cannot_be_written(jobs, tmp_path):
    (tmp_path / "file").write_text("")
    assert ended(start(jobs(2, "a"), State(tmp_path / "file" / "runs"), 2)) != 0  # below a file
    (tmp_path / "commands").write_text("python no.py\n")
    words = ["--commands", str(tmp_path / "commands"), "--out", str(tmp_path / "file" / "runs")]
    run = subprocess.run(["bash", ROOT / "run_all.sh", *words], env=environ(tmp_path), capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == f"error: cannot write to {words[-1]}: Not a directory; choose another --out\n"


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
    state, commands, log = State(small_disk / "runs"), jobs(20, "disk/a", 5, 0.01), tmp_path / "said"
    assert ended(start(commands, state, 2, log)) == 1
    assert re.search("the disk of .* is full; make room|No space left on device; (fix that|make room)", log.read_text())
    found = results(small_disk / "a")  # those that are there are whole
    assert 0 < len(found) < 20
    for path in (small_disk / "runs" / ".run_all").glob("*.json"):
        assert json.loads(path.read_text())["status"] in ("done", "failed")
    assert not list((small_disk / "runs" / ".run_all").glob(".*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert ended(start(commands, state, 2, log)) == 0
    assert ended(start(jobs(20, "b", 5, 0), State(tmp_path / "other"), 2)) == 0
    assert results(small_disk / "a") == results(tmp_path / "b")
