"""Which commands make which table: counts from the paper, flags that the scripts understand, shared preprocessing."""

import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tyro
from standins import environ

import taf_dt
import taf_preprocess
from dynashift import runs, tasks
from experiments import runner, scripts
from experiments.commands import Command, read_commands, write_commands
from experiments.grid import ABLATIONS, ORDER, QUICK_TASKS, TABLES, Selection, grid
from experiments.methods import CLONING, METHODS, OURS
from experiments.paper import MAIN, PAPER, PAPER_METHODS, QUALITIES, SHIFTS, SOURCES, TARGETS, TASKS

ROOT = Path(__file__).parents[1]
TASKS_OF_CLONING = {(robot, shift, target) for robot, shift, _, target in TASKS}


@pytest.fixture(scope="module")
def everything() -> set[str]:
    """All runs of all tables."""
    return set(map(str, grid(Selection()).runs))


def test_the_table_of_methods():
    """Every script of baselines/ has a row, every row a script that records its runs under that name."""
    files = {f"baselines/{path.name}" for path in (ROOT / "baselines").glob("[a-z]*.py")}
    assert {method.script for method in METHODS.values()} == {*files, "taf_dt.py"}
    assert set(PAPER_METHODS) <= set(METHODS)
    assert len({m.label for m in METHODS.values()}) == len({m.color for m in METHODS.values()}) == len(METHODS)
    for method in METHODS.values():
        assert f'open_run("{method.name}"' in (ROOT / method.script).read_text()
        flags = runs.flatten(scripts.read_args(scripts.module_of(method.script), []))
        assert method.junctions == ("diagnostics" in flags)
        assert (method.family == "sequence") == ("K" in flags)


def test_tasks_are_those_of_the_data():
    assert (tasks.QUALITIES["source"], tasks.QUALITIES["target"]) == (SOURCES, TARGETS)
    assert set(TASKS) >= set(MAIN)
    assert len(MAIN) == 3 * 4 * len(QUALITIES) == 108


def test_the_grid_has_the_papers_runs_once_each():
    found = grid(Selection())
    lines, names = list(map(str, found.runs)), {c.name for c in found.shared}
    assert len(lines) == len(set(lines)) == len({c.name for c in found.runs})
    expected = {m.script: 5 * len(TASKS) for m in METHODS.values()}
    expected |= {METHODS[name].script: 5 * len(TASKS_OF_CLONING) for name in CLONING}
    varied = {a.name: len(a.rows) * (len(a.values) - 1) * a.seeds for a in ABLATIONS.values()}
    assert sum(varied[name] for name in PAPER["ablations"]) == 78 + 16
    expected["taf_dt.py"] += sum(varied.values())
    assert Counter(c.words[0] for c in found.runs) == expected
    if set(TASKS) == set(MAIN):  # only the paper's shifts
        assert expected["baselines/bc.py"] == 180  # 36 target datasets x 5 seeds
        assert sum(expected[METHODS[m].script] for m in PAPER_METHODS) == 4320 + sum(varied.values())
    junctions = [m for m in METHODS.values() if m.junctions]
    assert sum(c.words.count("--diagnostics") for c in found.runs) == 4 * len(junctions) * 5
    assert len(found.shared) == len(TASKS) + 5  # the pairs, and those without the reward, which have three seeds
    # of one seed each: these runs make gate and weights themselves
    own = {f"--{a.factor.replace('_', '-')}" for a in ABLATIONS.values() if a.changes_gate and a.seeds == 1}
    ours = [c for c in found.runs if c.words[0] == "taf_dt.py" and not own & set(c.words)]
    assert all(c.after in names for c in ours)
    seeds = [c.flags["--seed"] for c in found.runs]
    assert seeds == sorted(seeds)  # all tables with one seed come first


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_its_runs(table, everything):
    nominal = {a.name.replace("_", "-"): len(a.rows) * len(a.values) * a.seeds for a in ABLATIONS.values()}
    nominal |= dict(filtering=12, advantage=6, alpha=40, expectile=16, xi=20) | {"ot-reward": 30, "ot-cost": 15}
    nominal |= dict(times=2 * 5, junction=4 * 5 * sum(m.junctions for m in METHODS.values()))
    for shift in SHIFTS:
        tasks, alone = (sum(task[1] == shift for task in some) for some in (TASKS, TASKS_OF_CLONING))
        nominal[shift] = 5 * (tasks * (len(METHODS) - len(CLONING)) + alone * len(CLONING))
    nominal["summary"] = sum(nominal[shift] for shift in SHIFTS)
    nominal |= dict.fromkeys(PAPER["summary"], 5 * (36 * (len(METHODS) - len(CLONING)) + 12 * len(CLONING)))
    some = set(map(str, grid(Selection(table=(table,))).runs))
    assert len(some) == nominal[table]
    assert some <= everything  # the same command, whatever else is asked for


def test_filters():
    def count(**options):
        return len(grid(Selection(**options)).runs)

    assert count(method=("qt",), env=("ant",), shift=("morph",), seeds=(1, 2)) == 9 * 2
    assert count(table=("ot-reward",), seeds=(7,)) == 10
    assert count(method=("taf_dt", "bc"), table=("gravity",), seeds=(1,)) == 36 + 12
    command = grid(Selection(data="d4rl", data_dir=Path("d"), out=Path("o"), device="cpu")).runs[0]
    assert shlex.join(command.words).endswith("--seed 1 --data d4rl --data-dir d --device cpu --out o")
    with pytest.raises(SystemExit):
        tyro.cli(runner.Args, args=["--table", "no-such-table"])


def test_quick_has_every_table_and_method():
    commands = grid(Selection(quick=True)).runs
    assert {Path(c.words[0]).stem for c in commands} == set(ORDER) == set(METHODS)
    assert all(grid(Selection(quick=True, table=(table,))).runs for table in TABLES)
    assert all("--data embedded" in str(c) and "--quick" in c.words for c in commands)
    zeta = [str(c) for c in grid(Selection(quick=True, table=("expectile",))).runs]
    assert sum("--zeta 0.98" in line for line in zeta) == sum("--zeta" not in line for line in zeta) == 1
    flags = {re.sub(r"--(quick|updates|eval-episodes).*", "", str(c)) for c in commands}
    assert len(flags) == len(commands)
    # an ablation without any of the quick tasks has its default on a task of its own
    varied = sum(len(a.values) - bool(set(QUICK_TASKS) & set(a.rows)) for a in ABLATIONS.values())
    assert len(commands) == 3 * len(METHODS) + varied


def test_ablations_say_what_the_scripts_have():
    """Defaults, also with --quick, and which arguments are those of the preprocessing."""
    default = runs.flatten(scripts.read_args(taf_dt, []))
    quick = runs.flatten(scripts.read_args(taf_dt, ["--quick"]))
    gate = runs.flatten(scripts.read_args(taf_preprocess, []))
    for ablation in ABLATIONS.values():
        assert default[ablation.factor] == ablation.default
        other = ablation.quick_default
        assert quick[ablation.factor] == (ablation.default if other is None else other)
        assert ablation.changes_gate == (ablation.factor in gate), ablation.name
        assert ablation.default in ablation.values
        assert len(ablation.labels) in (0, len(ablation.values))


def test_every_command_is_understood_by_its_script():
    """Every script with every set of flags that occurs; the values of task and seed are tried for one of each."""
    shapes, task = {}, ("--env", "--shift", "--source", "--target", "--seed")
    other = Selection(data="d4rl", data_dir=Path("d"), device="cpu", out=Path("o"))
    for selection in (Selection(), Selection(quick=True), other):
        found = grid(selection)
        for command in (*found.shared, *found.runs):
            words = command.words
            short = tuple(w for i, w in enumerate(words) if w not in task and words[i - 1] not in task)
            shapes[short] = command
    assert len(shapes) > 60
    for command in shapes.values():
        words, given = command.words, command.flags
        args = runs.flatten(scripts.read_args(scripts.module_of(words[0]), words[1:]))
        assert all(args[name] == given[f"--{name}"] for name in ("env", "shift", "target"))
        for factor in {"--alpha", "--zeta", "--xi"} & given.keys():
            assert args[factor[2:]] == float(given[factor])
        assert ("--no-ot-reward" not in words) == args.get("ot_reward", True)
        if "--diagnostics" in words:
            assert args["diagnostics"]
            assert words[0] == "taf_dt.py" or "reference" in args


def test_shared_preprocessing_is_what_the_runs_look_for(tmp_path):
    """The file that taf_preprocess.py makes ahead is the one that taf_dt.py would make."""
    found = grid(Selection(table=("ot-reward", "alpha"), out=tmp_path, quick=True))
    by_name = {c.name: c for c in found.shared}
    compared = 0
    for command in (c for c in found.runs if c.after):
        ahead = scripts.read_args(taf_preprocess, by_name[command.after].words[1:])
        args = scripts.read_args(taf_dt, command.words[1:])
        assert (args.task, args.gate) == (ahead.task, ahead.gate)
        assert args.run.out / "preprocess" == ahead.out
        compared += 1
    assert compared > 3


def test_a_file_of_commands_is_read_as_it_was_written(tmp_path):
    """Spaces in paths and names included: a folder with a space must not make another command of it."""
    selection = Selection(quick=True, table=("alpha", "junction"), out=tmp_path / "my runs", data_dir=Path("a 'b"))
    found = grid(selection)
    commands = [*found.shared, *found.runs, Command(("x.py", "--source", "my own data.hdf5"), found.runs[0].name)]
    (tmp_path / "commands").write_text("# a comment\n\n" + write_commands(commands))
    again = read_commands(tmp_path / "commands")
    assert again == commands
    assert [c.name for c in again] == [c.name for c in commands]
    assert not any(re.search(r"\s", c.name) for c in commands)
    assert any(c.after for c in commands[: len(found.runs)])


def test_list_prints_commands_without_torch(tmp_path):
    words = ["runner", "--list", "--quick", "--method", "bc", "--out", str(tmp_path / "runs")]
    script = f"import sys; from experiments import runner; sys.argv = {words}; runner.main()"
    script += "; assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 3
    assert all(line.startswith("python baselines/bc.py --env ") for line in run.stdout.splitlines())
    assert "3 runs" in run.stderr
    assert not (tmp_path / "runs").exists()


def test_a_list_that_is_not_read_to_its_end(tmp_path):
    words, options = ["bash", "-c", "bash run_all.sh --list | head -1"], dict(capture_output=True, text=True)
    run = subprocess.run(words, cwd=ROOT, env=environ(tmp_path), **options)
    assert run.stdout.startswith("python ")
    assert "Error" not in run.stderr


def test_our_method_comes_first():
    assert ORDER[0] == OURS  # the others need its critics for the junction figure
