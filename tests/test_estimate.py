"""--estimate: sums by hand, a real measurement of the cheapest method, and that it ends in time."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from standins import environ

from dynashift.arguments import flatten
from dynashift.errors import UserError
from experiments import estimate, scripts
from experiments.estimate import Measurement
from experiments.grid import Selection, grid
from experiments.pool import STOP
from experiments.state import State, read_json

ROOT = Path(__file__).parents[1]


def test_estimate_measures_once_and_says_what_it_rests_on(tmp_path):
    """The real measurement, of the cheapest method, however busy the machine is."""
    code = "from experiments import estimate, runner; estimate.LIMIT = 3600; runner.main()"
    words = [sys.executable, "-c", code, "--estimate", "--quick", "--method", "bc", "--out", str(tmp_path / "runs")]
    options = dict(env=environ(tmp_path), cwd=ROOT, capture_output=True, text=True)
    first, again = (subprocess.run(words, **options) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "measuring bc" in first.stderr
    assert "measuring" not in again.stderr
    assert re.search(r"bc +3 runs, each \d+ min \d\d s", first.stdout)
    assert re.search(r"about \d+\.\d hours here with JOBS=\d", first.stdout)
    assert "This rests on a few updates" in first.stdout
    assert first.stdout == again.stdout
    (rates,) = read_json(tmp_path / "runs" / ".run_all" / "measured.json").values()
    assert set(rates) == {"policy", "evaluation"}
    assert all(0 < seconds < 100 for seconds in rates.values())


def test_seconds_of_a_run_are_its_updates_times_their_cost(tmp_path, monkeypatch):
    """With rates that are known, against the sum by hand."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rates = {"preprocess mmd": 1e-4, "values": 0.1, "command": 0.2, "cvae": 0.3, "policy": 0.5, "evaluation": 7.0}
    words = "taf_dt.py --env hopper --shift morph --updates 1000 --eval-every 100 --label-updates 200 --command-updates"
    words += " 300 --cvae-updates 400 --source-size 10000"
    known = {"taf_dt, K 5, quick False, auto, 3 threads": rates}
    total, before = Measurement(known, tmp_path).seconds_of(tuple(words.split()))
    assert total == pytest.approx(10 + 200 * 0.1 + 300 * 0.2 + 400 * 0.3 + 1000 * 0.5 + 7 * (10 + 3))
    assert before == pytest.approx(1e-4 * 10_000)


def test_values_of_a_run_are_those_that_its_script_reads(tmp_path):
    """Although the command line is read for one task only."""
    commands = grid(Selection(quick=True, env=("ant",), method=("taf_dt", "otdf"), out=tmp_path)).runs
    measurement = Measurement({}, tmp_path)
    for words in {command.words[0]: command.words for command in commands}.values():
        module = scripts.module_of(words[0])
        read = flatten(scripts.read_args(module, words[1:]))
        assert measurement.values_of(words) == read, words
        assert "ant" in words


def test_estimate_ends_in_time(tmp_path, monkeypatch, capfd):
    """What is being measured when the time is up is given up; the sums are of what is known."""

    def measured(self, script, values):
        if "bc" in script:
            return 3600.0, 0.0
        assert not self.is_over  # nothing is begun after that
        signal.raise_signal(signal.SIGALRM)
        raise AssertionError("it goes on")

    commands = grid(Selection(quick=True, method=("bc", "iql"), out=tmp_path)).runs
    monkeypatch.setattr(Measurement, "values_of", lambda self, _: None if self.is_over else {"K": 5})
    monkeypatch.setattr(Measurement, "seconds_with", measured)
    handlers = [signal.getsignal(n) for n in STOP]
    assert estimate.estimate(sorted(commands, key=lambda c: "bc" not in c.words[0]), State(tmp_path), 2) == 0
    said = capfd.readouterr().out
    assert "about 1.5 hours here with JOBS=2" in said  # three runs of an hour
    assert "Not in the sum, because a minute was too short to measure them: 3 runs of iql." in said
    some = [command for command in commands if "iql" in command.words[0]]
    assert estimate.estimate(some, State(tmp_path), 2) == 0
    said = "nothing could be measured within 45 s; give the same command again when this machine is less busy\n"
    assert capfd.readouterr().out == said
    monkeypatch.setattr(estimate, "LIMIT", 0.1)
    monkeypatch.setattr(estimate, "GRACE", 0.1)
    monkeypatch.setattr(Measurement, "seconds_of", lambda *_: [signal.pause() for _ in range(100)])
    with pytest.raises(UserError, match=r"no answer after 0\.2 s"):
        estimate.estimate(commands, State(tmp_path), 2)
    for number, handler in zip(STOP, handlers, strict=True):
        signal.signal(number, handler)


def test_a_minute_is_enough_for_the_estimate_to_start_measure_and_end():
    assert estimate.LIMIT + estimate.GRACE <= 50


def test_nothing_is_measured_when_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("baselines/bc.py", "--env", "hopper", "--shift", "morph", "--quick")
    assert Measurement({}, tmp_path, is_over=True).seconds_of(words) is None
    read = {("baselines/bc.py", "--quick"): scripts.read_args(scripts.module_of(words[0]), ["--quick"])}
    assert Measurement({}, tmp_path, is_over=True, read=read).seconds_of(words) is None
    known = {"bc, K None, quick True, auto, 1 threads": {"policy": 0.0}}
    assert Measurement(known, tmp_path, is_over=True, read=read).seconds_of(words) == (estimate.STARTUP, 0.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
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
