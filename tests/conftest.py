import os
import signal
from pathlib import Path

import pytest

# pytest-xdist has a worker per core. Torch would start as many threads again in each of them, and in
# every script that a test starts, and they would spend most of their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
DATA = Path(__file__).parents[2] / "shared" / "data"


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
