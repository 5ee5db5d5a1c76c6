"""Every fenced shell command of README.md and CONTRIBUTING.md in a fresh clone: as it is, or with a tiny budget.

Each command is a process that imports everything anew, so only the first block is run without TEST_README=1.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import taf_dt
import taf_preprocess
from experiments import runner

ROOT = Path(__file__).parents[1]

# What is not run: checked for its form.
INSTALL = [r"python3 -m venv \.venv", r"source \.venv/bin/activate", r"pip install (-q )?-r (\S+)"]

# What is run as it is.
SHORT = [
    "bash run_all.sh --list | head",
    "python -m experiments.report",
    "python -m pytest -n 0 tests/test_theory.py -k gate",
    "ruff check . && ruff format --check .",
    "python docs/tables.py",
]

# What is run with these words appended.
TINY = "--source-size 1000 --layers 1 --heads 1 --width 16 --hidden 16 --cvae-hidden 16 --updates 2 --label-updates 2"
TINY += " --command-updates 2 --cvae-updates 2 --eval-episodes 1 --target-batch 8 --label-batch 16"
APPENDED = {
    "python taf_dt.py --quick --data embedded": TINY,
    "python taf_dt.py --env hopper --shift morph --alpha 3.5": f"{TINY} --data embedded",
    "python taf_dt.py --env hopper --shift morph --target mine.hdf5 --quick": f"{TINY} --data embedded",
    "python taf_preprocess.py --env hopper --shift morph --source medium --target medium": "--data embedded"
    " --source-size 1000",
    "bash run_all.sh --estimate": "--quick --method bc",
    "JOBS=2 bash run_all.sh --quick": "--method bc --table gravity",
    "bash run_all.sh": "--status",
    "python -m pytest": "-n 0 tests/test_docs.py -k malformed",
    "python docs/walkthrough.py": "--source-size 1500 --updates 2 --width 8",
}

# What is replaced, with the reason: no flag makes it short, or it needs something that is not there.
SHORTER_BENCHMARK = "sys.path.insert(0, 'benchmarks'); import bench_env as b; b.BLOCK, b.ROUNDS = 5, 1; b.main()"
REPLACED = {
    "python tests/mutations.py 1000": ("a thousand take minutes", "python tests/mutations.py 5"),
    "python collect.py rollout --policy dynashift/policies/hopper-morph-medium.npz --env hopper --shift morph"
    " --steps 5000 --out mine.hdf5": (
        "5000 transitions take a while",
        "python collect.py rollout --policy dynashift/policies/hopper-morph-medium.npz --env hopper --shift morph"
        " --steps 500 --out mine.hdf5",
    ),
    "python collect.py train --env hopper --shift friction": (
        "it needs requirements-data.txt, an hour, and the example's row, which tests/test_new_shift.py adds",
        "python collect.py train --env hopper --shift morph --help",
    ),
    "python collect.py rollout --policy dynashift/policies/hopper-none-medium.npz --env hopper --shift friction"
    " --steps 5000 --out friction/medium.hdf5": (
        "it needs the example's row, and is run in tests/test_new_shift.py",
        "python collect.py rollout --help > /dev/null",
    ),
    "python taf_dt.py --env hopper --shift friction --target friction/medium.hdf5 --quick": (
        "it needs the example's row, and is run in tests/test_new_shift.py",
        "python taf_dt.py --help > /dev/null",
    ),
    "python benchmarks/bench_env.py": (
        "it has no flags, and its exit status depends on the speed",
        f'python -c "import sys; {SHORTER_BENCHMARK}" | grep "geometric mean: single"',
    ),
    "tensorboard --logdir runs": (
        "it serves until it is stopped, and wants a run",
        "python baselines/bc.py --quick --data embedded --updates 2 --eval-episodes 1 > /dev/null\n"
        "tensorboard --logdir runs --inspect | grep eval/normalized_score",
    ),
    "python docs/build.py": ("it needs requirements-docs.txt", "python -m py_compile docs/build.py"),
}


def blocks(name: str) -> list[list[str]]:
    """The lines of every fenced shell block, without comments."""
    found = re.findall(r"```(?:bash|sh|console)\n(.*?)```", (ROOT / name).read_text(), re.S)
    lines = [[line.partition(" #")[0].strip() for line in block.splitlines()] for block in found]
    return [[line for line in block if line] for block in lines]


BLOCKS = [(name, i, block) for name in ("README.md", "CONTRIBUTING.md") for i, block in enumerate(blocks(name))]


def what_is_run(command: str) -> str:
    """In this test, for a command of the documents; nothing for one that installs."""
    for pattern in INSTALL:
        if found := re.fullmatch(pattern, command):
            assert not found.groups() or (ROOT / found[2]).is_file(), command
            return ""
    if command in SHORT:
        return command
    if command in APPENDED:
        return f"{command} {APPENDED[command]}"
    assert command in REPLACED, f"{command}: enter it in one of the tables of this file"
    return REPLACED[command][1]


@pytest.fixture
def clone(tmp_path):
    """What is committed, and what has been changed since."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("a fresh clone needs git and a checkout that git knows, not an unpacked archive")
    folder, options = tmp_path / "clone", dict(check=True, capture_output=True, text=True, cwd=ROOT)
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], **options)
    listed = subprocess.run(["git", "ls-files", "-z", "-cmo", "--exclude-standard"], **options).stdout
    for name in {name for name in listed.split("\0") if name and Path(name).parts[0] != ".venv"}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Generated once for all blocks."""
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize(("name", "i", "block"), BLOCKS, ids=[f"{n}-{i}-{b[-1]}" for n, i, b in BLOCKS])
def test_block(name, i, block, request):
    """Pasted as a whole. This test's environment takes the place of the one that the README's first block activates."""
    if (name, i) != BLOCKS[0][:2] and os.environ.get("TEST_README") != "1":
        pytest.skip("two minutes of processor time for all blocks; TEST_README=1 runs them")
    clone, data = request.getfixturevalue("clone"), request.getfixturevalue("data")
    lines = [line for command in block if (line := what_is_run(command))]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "DYNASHIFT_DATA": str(data)}
    env = {k: v for k, v in env.items() if not k.startswith("PYTEST_")}
    script = "\n".join(["set -ex", *lines])
    run = subprocess.run(["bash", "-c", script], cwd=clone, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert not re.search(r"Traceback|\w+Error\b", run.stderr), run.stderr[-4000:]
    if "python -m experiments.report" in block:
        assert (clone / "results" / "report.html").is_file()
        assert len(list((clone / "runs").rglob("result.json"))) == 1


WORK = {  # what begins once the flags are understood
    "python taf_dt.py": (taf_dt, "train"),
    "python taf_preprocess.py": (taf_preprocess, "load_task"),
    "bash run_all.sh": (runner, "chosen"),
}


@pytest.mark.parametrize(
    ("start", "command"), [(start, command) for start in WORK for command in [*SHORT, *APPENDED] if start in command]
)
def test_the_flags_of_a_command_are_understood(start, command, tmp_path, monkeypatch):
    """In this process, and no further."""
    module, name = WORK[start]

    def understood(*_, **__):
        raise InterruptedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, name, understood)
    words = shlex.split(what_is_run(command).partition(" | ")[0])
    monkeypatch.setattr(sys, "argv", words[words.index(start.split()[1]) :])
    with pytest.raises(InterruptedError):
        module.main()


def test_no_entry_without_a_command():
    commands = {command for _, _, block in BLOCKS for command in block}
    assert {*SHORT, *APPENDED, *REPLACED} <= commands
    assert all(any(re.fullmatch(pattern, command) for command in commands) for pattern in INSTALL)


def test_a_new_command_must_be_entered():
    with pytest.raises(AssertionError, match="enter it in one of the tables"):
        what_is_run("python taf_dt.py --no-such-flag")
    with pytest.raises(AssertionError, match="no-such-file"):
        what_is_run("pip install -r no-such-file.txt")


def test_two_blocks_set_everything_up():
    """Each by itself, on a fresh machine: one runs, one tests."""
    setup = ["python3 -m venv .venv", "source .venv/bin/activate", "pip install -q -r requirements.txt"]
    first, second, *others = blocks("README.md")
    assert first == [*setup, "python taf_dt.py --quick --data embedded"]
    assert second == [*setup, "python -m pytest"]
    assert not any(line in block for block in others for line in setup)


def test_ci_runs_the_second_block_to_the_letter():
    (line,) = re.findall(r"^test_command=.*$", (ROOT / ".ci" / "run").read_text(), re.M)
    run = subprocess.run(["bash", "-euc", f'{line}\necho "$test_command"'], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.splitlines() == blocks("README.md")[1]


def test_editable_installation_is_possible():
    """`pip install -e .`, which the README mentions."""
    import tomllib

    assert "pip install -e ." in (ROOT / "README.md").read_text()
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]


def test_every_time_is_of_some_hardware():
    section = (ROOT / "README.md").read_text().split("## Time\n")[1].split("\n## ")[0]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.strip().splitlines()]
    assert head == ["hardware", "command", "time", "expected"]
    assert {hardware.split(";")[0] for hardware, *_ in rows} == {"two CPU cores", "one GPU", "Slurm cluster"}
    times = {command: time for hardware, command, time, _ in rows if hardware.startswith("two CPU cores")}
    assert re.match(r"\d+(\.\d+)? min \(measured", times["`python -m pytest`"])


def test_what_the_readme_must_mention():
    text = (ROOT / "README.md").read_text()
    assert all(word in text for word in ("git clone", "tensorboard --logdir runs", "```bibtex", "pip install -e ."))
