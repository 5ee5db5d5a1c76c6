"""What CONTRIBUTING.md promises, tried in a copy of the project: how many places a new thing needs."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from standins import TOGETHER, write_run

from dynashift.results import read_result

ROOT = Path(__file__).parents[1]
PARTS = ("baselines", "dynashift", "experiments", "studies", "tests")
FILES = ("run_all.sh", "taf_dt.py", "taf_preprocess.py", "pyproject.toml")
TINY = "--env hopper --shift morph --data embedded --source-size 1000 --updates 4 --eval-every 2 --eval-episodes 1"
TINY += " --hidden 8 --device cpu --seed 3"


class Copy:
    def __init__(self, folder: Path, data: Path):
        self.folder = folder
        own = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "DYNASHIFT_DATA": str(data)}
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | own
        for name in PARTS:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy(ROOT / name, folder / name)

    def edit(self, name: str, before: str, new: str) -> None:
        """Insert a text before another one, which must occur once."""
        text = (self.folder / name).read_text()
        assert text.count(before) == 1
        (self.folder / name).write_text(text.replace(before, new + before))

    def shell(self, *words) -> str:
        run = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        return run.stdout

    def python(self, *words) -> str:
        return self.shell(sys.executable, *map(str, words))

    def together(self, *lines) -> str:
        """Programs in one process, and then those of the grid's own tests that hold whatever the table's rows."""
        which = "methods or ablations or grid_has or table_has or quick"
        return self.python("-c", TOGETHER, *lines, f"-m pytest -q -n 0 tests/test_grid.py -k {shlex.quote(which)}")

    def listed(self, *words) -> list[str]:
        return self.shell("bash", "run_all.sh", "--list", *words).splitlines()

    def changed(self) -> set[str]:
        """Files that are not as in the project; new ones included."""
        found = set()
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder)
            if path.is_file() and "__pycache__" not in name.parts:
                other = ROOT / name
                if not other.exists() or other.read_bytes() != path.read_bytes():
                    found.add(str(name))
        return found


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path / "copy", tmp_path / "data")


def table(folder: Path, name: str) -> dict[str, dict[str, str]]:
    """Row -> column -> cell of a Markdown table of the report."""
    (path,) = folder.glob(f"tables/{name}-*.md")
    lines = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:]}


PROGRAMS = (
    "*.py",
    "baselines/*.py",
    "benchmarks/*.py",
    "docs/*.py",
    "dynashift/**/*.py",
    "experiments/**/*.py",
    "studies/*.py",
)
SHORT = ("benchmarks", "docs", "dynashift", "experiments", "studies")  # their files have at most 300 lines
LONGEST = {"taf_dt.py": 750, "taf_preprocess.py": 450}


def test_no_file_and_no_function_is_too_long_to_read():
    for path in {path for pattern in PROGRAMS for path in ROOT.glob(pattern)}:
        text, name = path.read_text(), str(path.relative_to(ROOT))
        limit = LONGEST.get(name, 300 if name.startswith(SHORT) else 800)
        assert len(text.splitlines()) <= limit, name
        assert max(map(len, text.splitlines()), default=0) <= 100, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{name}: {node.name}"


def test_a_new_method_is_its_file_and_its_row(copy):
    script = (ROOT / "baselines" / "iql.py").read_text().replace('"iql"', '"newq"')
    (copy.folder / "baselines" / "newq.py").write_text(script)
    row = '    Method("newq", "NewQ", "value", "baselines/newq.py", "#123456"),\n'
    copy.edit("experiments/methods.py", '    Method("bc", ', row)
    assert copy.changed() == {"baselines/newq.py", "experiments/methods.py"}

    lines = copy.listed("--method", "newq")
    assert len(lines) == 108 * 5
    assert all(line.startswith("python baselines/newq.py --env ") for line in lines)
    assert len(copy.listed("--quick", "--method", "newq")) == 3
    copy.together(f"baselines/newq.py {TINY}", f"baselines/iql.py {TINY}", "-m experiments.report")
    results = {p.parts[-4]: read_result(p) for p in (copy.folder / "runs").rglob("result.json")}
    assert set(results) == {"newq", "iql"}
    row = table(copy.folder / "results", "morph")["hopper: medium → medium"]
    score = results["newq"]["summaries"]["final"]["score"]
    assert re.match(rf"\**{score:.1f} \(1\)", row["NewQ"])
    assert row["TAF-DT"].startswith("—")
    page = (copy.folder / "results" / "report.html").read_text()
    assert "NewQ" in page


def test_a_new_flag_is_a_field_a_use_and_a_test(copy):
    """The field is that of CONTRIBUTING.md, to the letter."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (field,) = re.findall(r"^    noise: .*\n", text, re.M)
    copy.edit("taf_dt.py", "    ema_every: ", field)
    use = "        a_hat = a_hat + args.noise * torch.randn_like(a_hat)\n"
    copy.edit("taf_dt.py", '        q_last = nets["critics_bar"](', use)
    (copy.folder / "tests/test_noise.py").write_text(NOISE)
    assert copy.changed() == {"taf_dt.py", "tests/test_noise.py"}

    copy.python("-m", "pytest", "-q", "-n", "0", "tests/test_noise.py")
    shown = " ".join(copy.python("taf_dt.py", "--help").replace("│", " ").split())
    assert "--noise FLOAT standard deviation of noise on the target policy's actions (default: 0.0)" in shown
    words = [sys.executable, "taf_dt.py", "--noise", "-1"]
    run = subprocess.run(words, cwd=copy.folder, env=copy.env, capture_output=True, text=True)
    assert (run.returncode, run.stderr.splitlines()) == (1, ["error: --noise must not be negative, and is -1.0"])


NOISE = """
from pathlib import Path

import taf_dt
from dynashift import folders, runs


def test_the_folder_is_named_after_it():
    plain = runs.compose(taf_dt.Args)
    noisy = runs.compose(taf_dt.Args, noise=0.2)
    folder = folders.run_dir("runs", "taf_dt", "x", 1, noisy, runs.flatten(plain), runs.IGNORE)
    assert folder == Path("runs/taf_dt/x/seed1-noise0.2")
"""


def test_a_new_ablation_is_a_row(copy):
    row = '    Ablation("dropout", "Dropout", "dropout", 0.1, (0.0, 0.1, 0.3),\n'
    row += '             quick_default=0.0, tasks=(("hopper", "morph", "medium", "medium"),)),\n'
    copy.edit("experiments/grid.py", '    Ablation("xi", ', row)
    assert copy.changed() == {"experiments/grid.py"}

    lines = copy.listed("--table", "dropout")
    assert len(lines) == 3
    assert all("taf_dt.py --env hopper --shift morph" in line for line in lines)
    assert [line.partition("--dropout ")[2] for line in lines] == ["0.0", "", "0.3"]
    for value, score in ((0.0, 11.0), (0.1, 22.0), (0.3, 33.0)):
        changed = {} if value == 0.1 else {"dropout": value}
        write_run(copy.folder / "runs", "taf_dt", "hopper morph medium medium", 1, [score], changed)
    copy.together("-m experiments.report")
    row = table(copy.folder / "results", "dropout")["hopper morph: medium → medium"]
    cells = [row[f"dropout = {value}"] for value in (0.0, 0.1, 0.3)]
    assert cells == ["11.0 (1)", "22.0 (1)", "**33.0 (1)**"]
    assert list(copy.folder.glob("results/figures/sweep-dropout-*.svg"))
