from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _nobody_s_own_folders(monkeypatch, tmp_path):
    """No test reads or writes the user's data folders."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DYNASHIFT_DATA", raising=False)


@pytest.fixture(scope="session")
def real_data():
    """The published data, where they lie beside the project."""
    if not (DATA / "target").is_dir():
        pytest.skip(f"the published datasets are not in {DATA}")
    return DATA
