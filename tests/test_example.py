"""The worked example of docs/own_robot.md, every command of it, at a tiny budget."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from matplotlib.image import imread

ROOT = Path(__file__).parents[1]
TINY = "--layers 1 --heads 1 --width 8 --hidden 8 --cvae-hidden 8 --updates 2 --label-updates 2 --command-updates 2"
TINY += " --cvae-updates 2 --eval-episodes 1 --target-batch 8 --label-batch 8 --device cpu"
APPENDED = {"make_logs.py": "--old-episodes 4 --new-episodes 3", "taf_dt.py": TINY, "show.py": "--episodes 2"}


def commands() -> list[str]:
    section = (ROOT / "docs" / "own_robot.md").read_text().partition("## A worked example")[2]
    return re.search(r"```bash\n(.*?)```", section, re.S)[1].replace("\\\n", " ").splitlines()


@pytest.fixture
def copy(tmp_path):
    """The example in a folder of its own, beside the script, whose modules stay where they are."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("*.hdf5", "*.png"))
    (tmp_path / "taf_dt.py").symlink_to(ROOT / "taf_dt.py")
    return tmp_path


@pytest.mark.skipif(os.environ.get("TEST_README") != "1", reason="six processes that import everything; TEST_README=1")
def test_from_logs_to_a_policy(copy):
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = {}
    for command in commands():
        name = Path(command.split()[1]).name
        if name == "show.py":  # the folder's name tells the budget
            (folder,) = copy.glob("runs/taf_dt/Pendulum-v1-own-*-old-new-own/seed1-quick*")
            command = f"{command.rpartition(' ')[0]} {folder}"
        if name == "example.py" and not importlib.util.find_spec("onnxscript"):
            assert not (copy / "pendulum" / "policy.onnx").exists()
            continue
        words = ["bash", "-c", f"{command} {APPENDED.get(name, '')}"]
        run = subprocess.run(words, cwd=copy, env=environ, capture_output=True, text=True)
        assert run.returncode == 0, f"{command}\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
        said[name] = run.stdout
    with h5py.File(copy / "examples" / "own_robot" / "new.hdf5") as file:
        rewards, cos = file["rewards"][:].reshape(3, 200), file["observations"][:, 0]
        assert file["actions"][:].min() < -1
        assert np.flatnonzero(file["timeouts"]).tolist() == [199, 399, 599]
    assert f"mean return {rewards.sum(1).mean():.0f}" in said["make_logs.py"]
    up = np.mean(cos.reshape(3, 200)[:, 150:].mean(1) > 0.9)
    assert f"3 episodes, {up:.0%} end upright, mean return {rewards.sum(1).mean():.0f}" in said["show.py"]
    assert imread(copy / "examples" / "own_robot" / "policy.png").std() > 0.05  # something is drawn


def test_gravity_of_the_logs_is_that_of_the_command():
    """One number in two places: where the new machine is logged, and where its policy is evaluated."""
    spec = importlib.util.spec_from_file_location("make_logs", ROOT / "examples" / "own_robot" / "make_logs.py")
    make_logs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_logs)
    assert any(f"""'{{"g": {make_logs.NEW:g}}}'""" in command for command in commands())
    # The speed changes by (3 g / 2 sin(angle) + 3 torque) times 0.05 s.
    columns = make_logs.log(make_logs.NEW, 1, 3)
    (_, sin, speed), after = columns["observations"][0], columns["next_observations"][0, 2]
    expected = speed + (3 * make_logs.NEW / 2 * sin + 3 * columns["actions"][0, 0]) * 0.05
    assert after == pytest.approx(np.clip(expected, -8, 8), abs=1e-4)
