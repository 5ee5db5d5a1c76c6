"""The runner on a Slurm cluster of one node, and real training runs that are killed, requeued and resumed."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from standins import cmdline, command, ended, results, start, until

from dynashift.errors import UserError
from dynashift.files import write_json
from experiments import runner
from experiments.commands import write_commands
from experiments.slurm import Array, in_slurm, largest_array
from experiments.state import State

ROOT = Path(__file__).parents[1]


def test_status_without_a_cluster(jobs, tmp_path, capsys, monkeypatch):
    """Slurm's programs are installed, but there is no cluster: nothing was submitted, so they are not called."""
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'Could not establish a configuration source' >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    state, commands = State(tmp_path / "runs"), jobs(2, "a", 1, 0)
    runner.status(commands, state)
    assert capsys.readouterr().out.startswith("0 done, 0 running, 0 failed, 2 waiting\n")
    write_json(state.folder / "jobs.json", {"7": {"file": "run_all-1-00000000.txt", "jobs": 1}})
    with pytest.raises(UserError, match="squeue: Could not establish"):
        runner.status(commands, state)


def fake(folder: Path, monkeypatch, **programs: str) -> None:
    """Programs of Slurm that print this text."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_queue_is_read_by_job_id(jobs, tmp_path, monkeypatch, capsys):
    """Arrays of another folder, jobs of other kinds and tasks that are over change nothing."""
    state, commands = State(tmp_path / "runs"), jobs(5, "a", 1, 0)
    state.folder.mkdir(parents=True)
    (state.folder / "one.txt").write_text(write_commands(commands[:3]))
    (state.folder / "two.txt").write_text(write_commands(commands[3:]))
    known = {"11": asdict(Array("one.txt", 2)), "12": asdict(Array("two.txt", 1)), "13": asdict(Array("gone.txt", 1))}
    write_json(state.folder / "jobs.json", known | {"14": 7, "15": {"file": "one.txt"}, "16": {"jobs": 1}})
    queue = "11 2 PENDING\n12 1 RUNNING\n99 1 RUNNING\n12 9 PENDING\n13 1 RUNNING\n14 1 RUNNING\n98 N/A RUNNING"
    fake(tmp_path, monkeypatch, squeue=queue)
    assert in_slurm(state) == {commands[2].name: "PENDING", commands[3].name: "RUNNING"}
    runner.status(commands, state)
    assert capsys.readouterr().out == "0 done, 1 running, 0 failed, 4 waiting (1 of them in Slurm's queue)\n"
    for text in ("", "[]", "{half"):
        (state.folder / "jobs.json").write_text(text)
        assert in_slurm(state) == {}


@pytest.mark.parametrize(("text", "tasks"), [("MaxArraySize            = 77\nMaxJob = 5", 76), ("Other = 1", 1000)])
def test_the_largest_array(text, tasks, tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, scontrol=f"Configuration data as of 2030-01-01T00:00:00\n{text}\nX = a=b")
    assert largest_array() == tasks


# ---------------------------------------------------------------------------------------------- real runs

TINY = "--env hopper --shift morph --data embedded --source-size 1000 --layers 1 --heads 1 --width 16 --hidden 16"
TINY += " --cvae-hidden 16 --updates 300 --label-updates 60 --command-updates 60 --cvae-updates 60 --eval-every 100"
TINY += " --save-every 20 --eval-episodes 1 --target-batch 8 --label-batch 16 --device cpu"


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """The environment of tiny runs, which share their data."""
    data = str(tmp_path_factory.mktemp("data"))
    return {**os.environ, "DYNASHIFT_DATA": data, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


def undisturbed(env, out, *more) -> dict:
    """The evaluations of taf_dt.py with these words as well."""
    line = [sys.executable, "taf_dt.py", *TINY.split(), "--out", out, *more]
    run = subprocess.run(line, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    return evaluations(out)


@pytest.fixture(scope="module")
def advantage(env, tmp_path_factory):
    return undisturbed(env, tmp_path_factory.mktemp("advantage"))


def evaluations(out: Path) -> dict:
    """Of every run: the argument that tells them apart -> its evaluations, and the stages in their order."""
    found = [json.loads(p.read_text()) for p in out.rglob("result.json")]
    return {r["args"]["token"]: [r["evaluations"], list(r["stages"])] for r in found}


def test_kills_change_nothing_in_a_real_run(env, advantage, tmp_path):
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
    assert evaluations(out) == advantage
    assert list(advantage) == ["advantage"]


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
    for daemon in ([*words, f"--socket={munge}/socket"], ["slurmctld"], ["slurmd"]):
        subprocess.run(daemon, env=os.environ | env, check=True, capture_output=True)
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
        return [line.split("|") for line in self.shell("squeue", "-h", "-r", "-o", "%i|%j|%K|%T").splitlines()]

    def task(self, name: str) -> str | None:
        """Slurm's number of the task that has this command."""
        for number, job, task, _ in self.queue():
            file = self.out / ".run_all" / f"{job}.txt"
            if file.exists() and named(file.read_text().splitlines()[int(task) - 1]) == name:
                return number
        return None


def named(line: str) -> str:
    return command(*shlex.split(line, comments=True)[1:]).name


def test_slurm_requeues_resumes_and_waits(cluster, jobs, tmp_path):
    """One task is warned as before its time limit, one requeued, one killed for good and submitted again."""
    commands = jobs(6, "a", 40, 0.02, "gate")  # they wait in the middle, for a file
    lines = list(map(str, commands))
    lines[5] += f"  # after {commands[0].name}"
    slurm = Slurm(lines, tmp_path, cluster)
    said = slurm.run_all("--slurm", "--throttle", "1", "--", "--nice=1")
    assert "6 commands submitted" in said
    assert len(re.findall(r"job \d+: ", said)) == 4  # the first; four more, in arrays of at most two; the last
    assert re.search(r"1 commands, afterany:\d+", said)
    assert "0 commands submitted, 6 in the queue" in slurm.run_all("--slurm")  # not twice
    assert re.search(r"0 failed, \d waiting \(\d of them in Slurm's queue\)", slurm.run_all("--status"))
    slurm.shell("sbatch", "--hold", "--job-name=a job | of my own", "--wrap=true")  # a user's own
    assert re.search(r"0 failed, \d waiting \(\d of them in Slurm's queue\)", slurm.run_all("--status"))
    slurm.shell("scancel", "--name=a job | of my own")

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
            slurm.shell(*words, slurm.task(commands[i].name))
            pid = int((folder / "pid").read_text())
            until(lambda pid=pid: not cmdline(pid))
        folder.with_suffix(".go").write_text("")
    until(lambda: not slurm.queue())
    assert sorted(results(tmp_path / "a")) == ["000", "001", "002", "004", "005"]
    assert slurm.run_all("--status").startswith("5 done, 0 running, 0 failed, 1 waiting")
    assert "1 commands submitted" in slurm.run_all("--slurm")  # what Slurm does not requeue by itself
    until(lambda: not slurm.queue())
    assert slurm.run_all("--status").startswith("6 done, 0 running, 0 failed, 0 waiting")
    assert ended(start(jobs(6, "b", 40, 0), State(tmp_path / "other"), 2)) == 0
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert [p.read_text() for p in (tmp_path / "a").glob("*/finished")] == ["x"] * 6


def test_slurm_runs_a_table(cluster, env, request, tmp_path):
    """The advantage table in small, from its preprocessing on; one of the two runs is requeued in the middle."""
    expected = undisturbed(env, tmp_path / "undisturbed", "--token", "rtg")
    expected |= request.getfixturevalue("advantage")  # only now: without Slurm, nothing is trained for this test
    out, pre = tmp_path / "runs", "python taf_preprocess.py --env hopper --shift morph --data embedded"
    lines = [f"{pre} --source-size 1000 --device cpu --out {out}/preprocess"]
    lines += [f"python taf_dt.py {TINY}{more} --out {out}  # after {named(lines[0])}" for more in ("", " --token rtg")]
    slurm = Slurm(lines, tmp_path, env | cluster)
    assert "3 commands submitted" in slurm.run_all("--slurm")
    (folder,) = until(lambda: [p.parent for p in out.rglob("ckpt.pt")])[:1]
    token = json.loads((folder / "args.json").read_text())["token"]
    slurm.shell("scontrol", "requeue", slurm.task(named(lines[1 + (token == "rtg")])))
    assert not (folder / "result.json").exists()
    until(lambda: not slurm.queue())
    assert slurm.run_all("--status").startswith("3 done, 0 running, 0 failed, 0 waiting")
    assert evaluations(out) == expected
    logs = [(out / "logs" / f"{named(line)}.log").read_text() for line in lines]
    assert sorted(log.count("+ python") for log in logs) == [1, 1, 2]
