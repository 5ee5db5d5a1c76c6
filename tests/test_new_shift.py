"""A new shift in a copy of the project, by CONTRIBUTING.md's recipe to the letter: its row, its data, nothing else."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from standins import TOGETHER

ROOT = Path(__file__).parents[1]
TABLE = Path("dynashift") / "tasks.py"

RUN = "--source-size 600 --data embedded --device cpu --updates 3 --eval-episodes 1 --hidden 8 --target-batch 8"
IQL = f"{RUN} --source-batch 8"
RELEASED = (
    f"{RUN} --layers 1 --heads 1 --width 8 --cvae-hidden 8 --M 2 --label-updates 2 --command-updates 2 --cvae-updates 2"
)
TAF_DT = f"{RELEASED} --label-batch 8 --cvae-batch 8"


def recipe() -> tuple[str, list[str]]:
    """The row, and the commands that make and use its data."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("\n## A shift\n")[1].split("\n## ")[0]
    (row,) = re.findall(r"```python\n(.*?)```", section, re.S)
    _, commands = re.findall(r"```bash\n(.*?)```", section, re.S)
    return row, [line.removeprefix("python ") for line in commands.splitlines()]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy with the row at the end of the table."""
    folder = tmp_path_factory.mktemp("copy") / "project"
    left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", "results", "docs", "tests")
    shutil.copytree(ROOT, folder, ignore=left_out)
    text = (folder / TABLE).read_text()
    begin = text.index("\nSHIFTS = {\n")
    end = text.index("\n}\n", begin)  # of the table
    (folder / TABLE).write_text(f"{text[: end + 1]}{recipe()[0]}{text[end + 1 :]}")
    return folder


@pytest.fixture(scope="module")
def start(project, tmp_path_factory):
    """Runs a program in the copy, and returns what it prints."""
    data = tmp_path_factory.mktemp("data")
    environ = {**os.environ, "HOME": str(data), "DYNASHIFT_DATA": str(data), "OMP_NUM_THREADS": "1"}
    environ |= {"PYTHON": sys.executable, "PYTHONPATH": ""}

    def start(*command) -> str:
        run = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        return run.stdout

    return start


@pytest.fixture(scope="module")
def trained(project, start):
    """The recipe's commands and every kind of script, at tiny budgets."""
    _, (rollout, train) = recipe()
    task = shlex.join(["--env", "hopper", "--shift", "friction", "--target", "friction/medium.hdf5"])
    before = rollout.replace("--shift friction", "--shift none").replace("friction/", "unshifted/")
    lines = [
        rollout,
        before,
        f"taf_preprocess.py {task} --data embedded --source-size 600 --out runs/preprocess",
        f"{train} {TAF_DT}",
        f"taf_dt.py {task} {TAF_DT}",
        f"baselines/taf_dt_released.py {task} {RELEASED} --guided never",
        f"baselines/otdf.py {task} {IQL} --cvae-updates 2 --cvae-hidden 8 --cvae-batch 8",
        f"baselines/iql.py {task} {IQL}",
    ]
    start(sys.executable, "-c", TOGETHER, *lines)
    return project


def test_the_simulator_has_the_new_dynamics(trained):
    """The same policy from the same seeds moves differently, and no transition is recorded in the unshifted robot."""
    columns = {}
    for folder in ("friction", "unshifted"):
        with h5py.File(trained / folder / "medium.hdf5") as file:
            columns[folder] = {key: np.asarray(file[key]) for key in ("observations", "next_observations")}
    assert len(columns["friction"]["observations"]) == 5000
    first, other = columns["friction"], columns["unshifted"]
    np.testing.assert_array_equal(first["observations"][0], other["observations"][0])
    assert not np.array_equal(first["next_observations"][:50], other["next_observations"][:50])


def test_all_scripts_train_on_it(trained):
    folders = sorted(path.parent.relative_to(trained / "runs") for path in (trained / "runs").rglob("result.json"))
    methods = [folder.parts[0] for folder in folders]
    assert methods == ["iql", "otdf", "taf_dt", "taf_dt", "taf_dt_released"]
    assert {folder.parts[1] for folder in folders} == {"hopper-friction-medium-medium-embedded-own"}
    assert list((trained / "runs" / "preprocess").glob("hopper-friction-*.npz"))


def test_the_grid_has_its_runs(start):
    listed = start("bash", "run_all.sh", "--list", "--shift", "friction").splitlines()
    commands = [shlex.split(line, comments=True) for line in listed]
    assert {words[words.index("--shift") + 1] for words in commands} == {"friction"}
    assert {words[words.index("--env") + 1] for words in commands} == {"hopper"}
    scripts = [Path(words[1]).stem for words in commands]
    assert {scripts.count(name) for name in ("taf_dt", "iql", "dara", "igdf", "otdf", "dt", "qt", "dadt")} == {45}
    assert scripts.count("bc") == 15


def test_the_report_has_its_table(trained, start):
    start(sys.executable, "report.py")
    tables = [path.read_text() for path in (trained / "results" / "tables").glob("friction-*.md")]
    scored = set()
    for text in tables:
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
        head = rows[0]
        (row,) = [row for row in rows if row[0] == "hopper: medium → medium"]
        scored |= {name for name, cell in zip(head, row, strict=True) if re.match(r"\**-?\d", cell)}
    assert scored == {"TAF-DT", "TAF-DT released", "OTDF", "IQL", "target data"}
    assert "Friction shift" in (trained / "results" / "report.html").read_text()
