import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tyro import _docstrings

# pytest-xdist has a worker per core. Torch would start as many threads again in each of them, and in
# every script that a test starts, and they would spend most of their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Matplotlib lists the machine's fonts at its first use, which takes seconds, and keeps the list in a folder of HOME,
# which is a new one in every test.
os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / f"dynashift-tests-fonts-{os.getuid()}"))

# For every command line that is read, tyro parses the script's source again, because the help texts are in it. This
# takes as long as all the rest of the reading, and no class changes while the tests run.
_docstrings._ClassTokenization.make = staticmethod(functools.cache(_docstrings._ClassTokenization.make))

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # once, before there are workers
        import matplotlib.font_manager  # noqa: F401  makes the list of fonts


def pytest_xdist_auto_num_workers():
    """One worker more than cores: some tests wait for other processes, and in the meantime a core would be idle."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else None


@pytest.fixture(autouse=True)
def _nobody_s_own_folders(monkeypatch, tmp_path):
    """No test reads or writes the user's data folders."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DYNASHIFT_DATA", raising=False)


@pytest.fixture
def send():
    """Sends this process, and no other, a signal that asks it to end, even if the tests were started with SIGINT
    ignored, as in the background. If the code under test does not handle it, the test fails, not the process."""

    def unhandled(number, frame):
        raise AssertionError(f"signal {number} was not handled")

    before = {number: signal.signal(number, unhandled) for number in SIGNALS}
    yield signal.raise_signal
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def in_this_process(monkeypatch, capsys):
    """Runs a script's main with these arguments; returns what a process of its own would have returned and written."""
    from dynashift.errors import one_line_errors

    def run(module, *words) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
        capsys.readouterr()
        status = 0
        try:
            with one_line_errors():
                module.main()
        except SystemExit as end:  # as the interpreter would
            status = end.code or 0
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
        return subprocess.CompletedProcess(sys.argv, status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def real_data():
    """The published data, if they are beside the project."""
    if not (DATA / "target").is_dir():
        pytest.skip(f"the published datasets are not in {DATA}")
    return DATA


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A function that makes n stand-in commands for the runner, each with a folder below the one named."""
    from standins import make_jobs

    from experiments import pool

    monkeypatch.setattr(pool, "AGAIN", 0.2)
    monkeypatch.setattr(pool, "POLL", 0.02)
    return make_jobs(tmp_path)
