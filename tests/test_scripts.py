"""What all scripts have in common: --help, closed pipes, folders that cannot be written to, the installed package."""

import errno
import importlib
import itertools
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import taf_preprocess
from dynashift import (
    checksums,
    datasets,
    download,
    fast_mmd,
    files,
    generated,
    policies,
    quick_help,
    runs,
)
from dynashift.errors import UserError
from experiments import collect, methods, runner, training
from experiments.report import __main__ as report

ROOT = Path(__file__).parents[1]
METHODS = [method.script.removesuffix(".py").replace("/", ".") for method in methods.ROWS]
METHODS = list(dict.fromkeys([*METHODS, "baselines.taf_dt_released"]))  # which has no column in the report
SCRIPTS = [f"{name.replace('.', '/')}.py" for name in (*METHODS, "taf_preprocess")]


def started(*command, **options):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "PYTHONUNBUFFERED": ""}
    return subprocess.run([sys.executable, *map(str, command)], env=environ, text=True, **options)


# ------------------------------------------------------------------------------------------------------ --help

LOADED = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])  # as for any script
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    placeholder = sys.modules["dynashift.quick_help"].Placeholder
    print(end.code, *(name for name, module in sys.modules.items() if type(module) is not placeholder), file=sys.stderr)
"""


def words_of(text: str) -> list[str]:
    """Without the frames around the flags, which depend on the terminal."""
    return [word for word in text.split() if word.strip("│╭╮╰╯─-")]


@pytest.mark.parametrize("script", [*SCRIPTS, "collect.py", "collect.py train"])
def test_help_loads_nothing_slow_and_says_the_same(script, capsys, monkeypatch):
    path, *words = script.split()
    words = ["--env", "walker2d", "--help"] if not words and path != "collect.py" else [*words, "--help"]
    quick = started("-c", LOADED, ROOT / path, *words, capture_output=True)
    status, *loaded = quick.stderr.split()
    assert status == "0"
    slow = {*quick_help.SLOW, "scipy", "tensorboard", "jax", "stable_baselines3"}
    assert not slow & {name.split(".")[0] for name in loaded}
    if path != "collect.py":  # with the real libraries
        monkeypatch.setattr(sys, "argv", [str(ROOT / path), *words])
        monkeypatch.setenv("COLUMNS", "80")
        capsys.readouterr()
        with pytest.raises(SystemExit, match="0"):
            importlib.import_module(path.removesuffix(".py").replace("/", ".")).main()
        assert words_of(quick.stdout) == words_of(capsys.readouterr().out)
        assert "minari:NAME" in words_of(quick.stdout)


@pytest.mark.parametrize(
    "script", [f"studies/{p.name}" for p in sorted(ROOT.glob("studies/*.py")) if "__main__" in p.read_text()]
)
def test_help_of_studies_loads_nothing_slow(script):
    """They are started by `python -m studies.NAME`, in the project's folder."""
    name = script.removesuffix(".py").replace("/", ".")
    code = LOADED.replace("runpy.run_path(sys.argv[0]", f"runpy.run_module({name!r}")
    run = started("-c", code, ROOT / script, "--help", capture_output=True, cwd=ROOT)
    status, *loaded = run.stderr.split()
    assert status == "0"
    assert run.stdout.startswith("usage: ")
    assert not {*quick_help.SLOW, "tensorboard"} & {name.split(".")[0] for name in loaded}


OTHERS = [f"benchmarks/{p.name}" for p in sorted(ROOT.glob("benchmarks/bench_*.py")) if p.stem != "bench_preprocess"]
OTHERS += ["docs/walkthrough.py", "docs/policies_gif.py", "tests/mutations.py"]


@pytest.mark.parametrize("script", OTHERS)
def test_help_of_other_scripts_loads_nothing_slow(script):
    run = started("-c", LOADED, ROOT / script, "--help", capture_output=True)
    status, *loaded = run.stderr.split()
    assert status == "0"
    assert run.stdout.startswith("usage: ")
    assert not {*quick_help.SLOW, "tensorboard"} & {name.split(".")[0] for name in loaded}


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        ("examples/own_robot/make_logs.py", "--out"),
        ("examples/own_robot/show.py", "--out"),
        ("docs/walkthrough.py", "--out"),
        ("benchmarks/bench_gpu.py", "--table"),
    ],
)
def test_output_paths_of_other_scripts_are_checked_first(script, flag, tmp_path):
    folder = tmp_path / "file"
    folder.write_text("")
    read = ["a run"] if script.endswith("show.py") else []  # which is not looked for
    run = started(ROOT / script, *read, flag, folder / "under" / "it", capture_output=True)
    assert run.returncode == 1
    assert run.stderr.startswith("error: cannot write to ")
    assert run.stderr.endswith(f"; choose another {flag}\n")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["build", "robots", "policies_gif"])
def test_output_paths_of_the_documents_are_checked_first(name, file, monkeypatch):
    """Before they read, film or draw anything."""
    if name == "build":
        pytest.importorskip("latex2mathml", reason="pip install -r requirements-docs.txt")
    monkeypatch.syspath_prepend(ROOT / "docs")
    module = importlib.import_module(name)
    work = {"build": "Site", "robots": "make", "policies_gif": "trained_agent"}[name]
    monkeypatch.setattr(module, work, never)
    monkeypatch.setattr(module, "OUT", file / "x.png", raising=False)
    with pytest.raises(UserError, match=r"^cannot write to .*file: Not a directory; choose another "):
        module.main(*() if name == "robots" else [file])


def test_the_pages_name_what_they_need(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.setitem(sys.modules, "latex2mathml.converter", None)  # as if it were not installed
    with pytest.raises(SystemExit, match=r"^error: docs/build.py needs: pip install -r requirements-docs.txt$"):
        runpy.run_path(str(ROOT / "docs" / "build.py"))


@pytest.mark.parametrize("script", ["docs/robots.py", "docs/tables.py"])
def test_help_of_other_scripts_does_nothing_else(script, tmp_path):
    """Libraries may have been loaded before the project's package: then they are left whole."""
    (tmp_path / "here").mkdir()
    run = started(ROOT / script, "--help", capture_output=True, cwd=tmp_path / "here")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: ")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("line", [["taf_dt.py", "--quick"], ["/elsewhere/taf_dt.py", "--help"]])
def test_otherwise_nothing_is_replaced(line):
    code = f"import sys; sys.argv = {line}; from dynashift import quick_help; import h5py; print(h5py.__version__)"
    run = started("-c", code, capture_output=True, cwd=ROOT)
    assert run.stdout.strip() == sys.modules["h5py"].__version__


@pytest.mark.parametrize(
    ("script", "words", "wanted"),
    [
        ("taf_dt", "--env hopper --shift morph", {"K": 5, "eta-reg": 0.4, "return-target": 3600}),
        ("taf_dt", "--env walker2d --shift gravity", {"K": 20, "eta-reg": 0.6, "return-target": 5000}),
        ("taf_dt", "--quick", {"updates": 1000, "quick": True}),
        ("taf_preprocess", "--env halfcheetah --shift gravity", {"K": 10, "mmd-reduce": "mean"}),
        ("taf_preprocess", "--preset released --shift gravity --source medium-expert", {"K": 5, "mmd-reduce": "min"}),
        ("baselines.otdf", "--shift kinematic", {"reg-weight": 0.1}),
    ],
)
def test_help_shows_the_values_of_the_task(script, words, wanted, capsys, monkeypatch):
    module = importlib.import_module(script)
    if script == "baselines.otdf":
        wanted = {"reg-weight": module.REG_WEIGHT["kinematic"]}
    monkeypatch.setattr(sys, "argv", ["x", *words.split(), "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    text = " ".join(words_of(capsys.readouterr().out))
    for flag, value in wanted.items():
        mine = text.split(f"--{flag} " if flag != "quick" else "--quick, --no-quick ")[1].split("(default: ")[1]
        assert mine.split(")")[0] == str(value), flag


# ------------------------------------------------------------------------------------------------------- pipes


@pytest.fixture
def closed():
    """The writing end of a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


FOLDERS = ("", "baselines", "benchmarks", "docs", "dynashift/**", "examples/**", "experiments/**", "studies", "tests")
STARTED = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/*.py".lstrip("/")))]
STARTED = [path for path in STARTED if '\nif __name__ == "__main__":\n' in path.read_text() if "test_" not in path.name]


@pytest.mark.parametrize("path", STARTED, ids=[str(path.relative_to(ROOT)) for path in STARTED])
def test_every_script_ends_by_the_same_rules(path):
    """In `one_line_errors`, whose behaviour is tested below, itself or in the main function that it imports."""
    text = path.read_text()
    assert "with one_line_errors():" in text or " import main\n" in text


OTHER_PLACES = ["experiments/runner.py", "benchmarks/bench_env.py", "docs/tables.py", "tests/mutations.py"]


@pytest.mark.parametrize("script", [*SCRIPTS, "collect.py", "report.py", *OTHER_PLACES])
def test_a_pipe_that_is_closed_early_ends_the_script_quietly(script, closed):
    run = started(ROOT / script, "--help", stdout=closed, stderr=subprocess.PIPE)
    assert run.stderr == ""
    assert run.returncode in (0, 141)


PRINTS = "from dynashift.errors import *; from dynashift.files import *; import sys\nwith one_line_errors():\n  "


@pytest.mark.parametrize(
    ("body", "stream", "status", "rest"),
    [
        ("for i in range(10**5): print(i)", "stdout", 141, ""),
        ("print(1)", "stdout", 0, ""),  # it fits into the buffer: the end of the process would write it
        ("for i in progress_bar(range(3), seconds=0): print(i)", "stderr", 0, "0\n1\n2\n"),
        ("print(1, file=sys.stderr); sys.stderr.flush(); print(2)", "stderr", 0, "2\n"),
        (
            "raise MemoryError",
            "stdout",
            1,
            "error: out of memory (MemoryError); use a smaller --source-size, batch or network, or a larger machine\n",
        ),
        (
            "raise ValueError('Error: engine error: Could not allocate memory')",
            "stdout",
            1,
            "error: out of memory (Error: engine error: Could not allocate memory); use a smaller --source-size, "
            "batch or network, or a larger machine\n",
        ),
        ("print('\\udcff')", "stderr", 0, "\\udcff\n"),
        ("raise UserError('\\udcff: no such file')", "stdout", 1, "error: \\udcff: no such file\n"),
        ("print(1); raise UserError('no such file')", "stdout", 1, "error: no such file\n"),
        ("print(1); raise KeyboardInterrupt", "stdout", 130, "stopped; the same command starts again\n"),
    ],
)
def test_closed_streams(body, stream, status, rest, closed):
    other = "stderr" if stream == "stdout" else "stdout"
    run = started("-c", PRINTS + body, **{stream: closed, other: subprocess.PIPE})
    assert run.returncode == status
    assert rest is None or getattr(run, other) == rest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize("body", ["print(1)", "for i in range(10**5): print(i)"])
def test_output_to_a_full_disk_is_one_line(body):
    with open("/dev/full", "w") as full:
        run = started("-c", PRINTS + body, stdout=full, stderr=subprocess.PIPE)
    assert run.returncode == 1
    words = "error: the output cannot be written (No space left on device); free some space there\n"
    assert run.stderr == words


@pytest.mark.parametrize("closed_ones", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_were_never_open(closed_ones, tmp_path):
    """No file that is opened later gets what was meant for stderr."""
    body = "say('x'); bar = list(progress_bar(range(3), seconds=0)); write_json('out.json', {})\n  "
    body += "with open('file', 'w') as f: print('note', file=sys.stderr); sys.stderr.flush()"
    (tmp_path / "code.py").write_text(PRINTS + body)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(f"{sys.executable} code.py {closed_ones}", shell=True, cwd=tmp_path, env=env).returncode == 0
    assert (tmp_path / "file").read_text() == ""
    assert files.read_json(tmp_path / "out.json") == {}


def test_a_line_does_not_begin_where_a_bar_was_left(monkeypatch, capsys):
    """A signal may leave a bar that tqdm no longer clears. In a file there are no bars."""
    files.say("saved")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    files.say("saved")
    assert capsys.readouterr().out == "saved\n\033[2K\rsaved\n"


def test_without_a_home_folder(monkeypatch, tmp_path):
    """A container's user that has neither HOME nor an entry in the list of users."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", never)
    monkeypatch.setattr(Path, "expanduser", lambda path: path if "~" not in str(path) else no_home())
    with pytest.raises(UserError, match="set DYNASHIFT_DATA"):
        datasets.load("hopper", "morph", "target", "medium", "embedded")
    with pytest.raises(UserError, match="--data-dir"):
        download.find("x")
    assert download.find("x", tmp_path) is None
    with pytest.raises(UserError, match="no home folder"):
        files.check_folder("~/runs")


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    ("script", "flag"), [("taf_dt", "--alpha"), ("baselines.taf_dt_released", "--alpha"), ("baselines.qt", "--eta")]
)
@pytest.mark.parametrize(("value", "said"), [("1e6", 1), ("101", 1), ("100", 0), ("5", 0)])
def test_a_q_term_that_swamps_imitation_is_noted_before_any_work(
    script, flag, value, said, tmp_path, monkeypatch, capsys
):
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "load_task", never)
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), flag, value])
    with pytest.raises(AssertionError, match="work has begun"):
        module.main()
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"note: {flag} ") and "lets Q swamp imitation" in line for line in lines] == [True] * said


@pytest.mark.parametrize(
    ("script", "flag"), [("taf_dt", "--alpha"), ("baselines.iql", "--beta"), ("baselines.bc", "--lr")]
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_number_is_refused_at_once(script, flag, value, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "load_target" if script == "baselines.bc" else "load_task", never)
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), flag, value])
    with pytest.raises(UserError, match=f"{flag} must be a"):
        module.main()


# ------------------------------------------------------------------------------------------------------ memory

FAILS = "raise ImportError('libx.so: failed to map segment from shared object')"


@pytest.mark.parametrize(
    ("script", "body", "said"),
    [
        (ROOT / "taf_dt.py", FAILS, "error: out of memory (libx.so: failed to map segment from shared object); "),
        (ROOT / "taf_dt.py", "raise MemoryError", "error: out of memory (MemoryError); use a smaller"),
        (ROOT / "taf_dt.py", "raise ImportError('no libx.so')", "Traceback (most recent call last):"),
        ("/elsewhere/taf_dt.py", FAILS, "Traceback (most recent call last):"),  # not ours to change
    ],
)
def test_too_little_memory_while_modules_are_imported_is_a_sentence(script, body, said):
    code = f"import sys; sys.argv = [{str(script)!r}]; from dynashift import errors\n{body}"
    run = started("-c", code, capture_output=True)
    assert run.returncode == 1
    assert run.stderr.startswith(said)
    assert run.stderr.count("\n") == 1 or said.startswith("Traceback")


def test_too_little_memory_for_the_libraries_is_a_sentence(tmp_path):
    resource = pytest.importorskip("resource")

    def limited(size, *words):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (size, size))

        return started(ROOT / "baselines" / "bc.py", *words, capture_output=True, preexec_fn=limit, cwd=tmp_path)

    run = limited(600_000_000)
    assert run.stderr == "error: out of memory (limited to 0.6 GB); allow at least 1 GB (ulimit -v)\n"
    assert (run.returncode, run.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert limited(600_000_000, "--help").returncode == 0


# ------------------------------------------------------------------------------------------------ output paths


def never(*_, **__):
    raise AssertionError("work has begun")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


@pytest.mark.parametrize("script", [*METHODS, "taf_preprocess"])
@pytest.mark.parametrize("below", ["", "runs/x"])
def test_no_data_are_loaded_for_a_folder_that_cannot_be_written_to(script, below, file, monkeypatch):
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "load_target" if script == "baselines.bc" else "load_task", never)
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(file / below)])
    with pytest.raises(UserError, match=r"^cannot write to .*: Not a directory; choose another --out$"):
        module.main()


@pytest.mark.parametrize("script", METHODS)
def test_folders_below_out_are_checked_too(script, tmp_path, monkeypatch):
    """The method's own, and that of gates and costs where the method has any."""
    module, name = importlib.import_module(script), script.split(".")[-1]
    monkeypatch.setattr(module, "load_target" if script == "baselines.bc" else "load_task", never)
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path)])
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=rf"^cannot write to .*/{name}: Not a directory; choose another --out$"):
        module.main()
    (tmp_path / name).unlink()
    (tmp_path / "preprocess").write_text("")
    keeps = "taf_dt" in name or name == "otdf"
    refused = pytest.raises(UserError, match=r"^cannot write to .*preprocess: Not a directory; choose another --out$")
    with refused if keeps else pytest.raises(AssertionError, match="work has begun"):
        module.main()


def test_nothing_is_collected_for_a_folder_that_cannot_be_written_to(file, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "roll_out", never)
    monkeypatch.setattr(training, "evaluate", never)
    policy = policies.FOLDER / "hopper-none-medium.npz"
    with pytest.raises(UserError, match=r"cannot write to .*file: Not a directory; choose another --out"):
        collect.rollout(policy, "hopper", file / "x.hdf5")
    with pytest.raises(UserError, match=r"cannot write to .*hopper-none: Not a directory; choose another --out"):
        training.train("hopper", out=file)
    with pytest.raises(UserError, match=r"cannot write to .*file: Not a directory; choose another --store"):
        training.train("hopper", out=tmp_path, store=file)
    assert list(tmp_path.iterdir()) == [file]


def test_progress_of_a_behaviour_policy_that_cannot_be_written_is_one_line(file, monkeypatch):
    monkeypatch.setattr(training, "save_policy", lambda *_: None)
    monkeypatch.setattr(training, "actor", lambda _: None)
    monkeypatch.setattr(training, "evaluate", lambda *_, **__: np.ones(10))
    with pytest.raises(UserError, match=r"^cannot write .*progress.jsonl: Not a directory; choose another folder$"):
        training.snapshot(mock.MagicMock(num_timesteps=5), file, "hopper", "none", 0, 90.0)


def test_nothing_is_read_or_run_for_a_report_that_cannot_be_written(file, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "read_runs", never)
    with pytest.raises(UserError, match=r"cannot write to .*file: Not a directory; choose another --out"):
        report.make(report.Args(out=file))
    for name in ("run_here", "report"):
        monkeypatch.setattr(runner, name, never)
    monkeypatch.setattr(runner.slurm, "submit", never)
    for more, (flag, other) in itertools.product(([], ["--slurm"]), (("--results", "--out"), ("--out", "--results"))):
        words = ["x", "--quick", "--method", "bc", flag, str(file / "x"), other, str(tmp_path / "runs"), *more]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(UserError, match=f"^cannot write to .*x: Not a directory; choose another {flag}$"):
            runner.main()


def test_a_folder_that_is_read_only_is_refused_and_a_good_one_is_left_as_it_is(tmp_path, monkeypatch):
    files.check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    with pytest.raises(UserError, match=r"cannot write to .*b: Read-only file system; choose another --out"):
        files.check_folder(tmp_path / "a" / "b")


@pytest.mark.parametrize("call", ["mkstemp", "fsync", "replace"])
def test_what_cannot_be_written_after_all_is_one_line(call, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.tempfile if call == "mkstemp" else os, call, full)
    for write in (
        lambda: checksums.write_hdf5(tmp_path / "x", {"rewards": np.zeros(3)}, "own", {}),
        lambda: policies.save_policy(policies.load_policy(policies.FOLDER / "ant-none-medium.npz"), tmp_path / "x", {}),
    ):
        with pytest.raises(UserError) as error:
            write()
        room = "make room and give the same command again"
        assert str(error.value) == f"cannot write {tmp_path / 'x'}: No space left on device; {room}"
    assert list(tmp_path.iterdir()) == []


def test_tracking_without_its_package_is_refused_before_data_are_loaded(monkeypatch):
    import taf_dt

    monkeypatch.setattr(taf_dt, "load_task", never)
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it is an ImportError
    monkeypatch.setattr(sys, "argv", ["x", "--track"])
    with pytest.raises(UserError, match="pip install wandb"):
        taf_dt.main()


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("data", ["auto", "embedded"])
def test_a_file_of_another_robot_is_found_first(role, data, tmp_path, monkeypatch):
    rows = {"observations": (9, 17), "actions": (9, 6), "rewards": 9, "terminals": 9, "next_observations": (9, 17)}
    checksums.write_hdf5(tmp_path / "x.hdf5", {key: np.zeros(shape) for key, shape in rows.items()}, "own", {})
    monkeypatch.setattr(generated, "embedded", never)
    monkeypatch.setattr(download, "published", never)
    task = {"source": "medium", "target": "medium"} | {role: str(tmp_path / "x.hdf5")}
    with pytest.raises(UserError, match=r"expected .* for hopper"):
        datasets.load_task(datasets.TaskArgs(**task, data=data))
    if role == "target":
        with pytest.raises(UserError, match=r"expected .* for hopper"):
            datasets.load_target(datasets.TaskArgs(**task, data=data))


# ---------------------------------------------------------------------------------------------- preprocessing


def test_a_signal_stops_the_preprocessing(send, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(taf_preprocess, "load_task", lambda args: (None, None))
    monkeypatch.setattr(taf_preprocess, "preprocess", lambda *_: send(2) or never())
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as status:
        taf_preprocess.main()
    assert status.value.code == 130
    assert capsys.readouterr().out == "stopped; the same command starts again\n"


def test_blocks_that_wait_are_not_computed_after_a_signal(send):
    """Only the blocks that have been started are finished."""
    seen = itertools.count()
    blocks = fast_mmd.in_blocks(lambda rows: next(seen), 10**6, 1, "cpu", None)
    assert next(blocks) == (slice(0, 1), 0)
    with pytest.raises(SystemExit, match="143"), runs.signals():
        send(15)
    assert next(seen) < 10**5


# ----------------------------------------------------------------------------------------- signals in the tests


def test_tests_send_signals_to_single_processes_alone():
    """SIGINT to their own by the fixture `send`, which also works where SIGINT is ignored, as in the background; to no
    group but that of a process which they have started with a group of its own."""
    for path in sorted((ROOT / "tests").glob("*.py")):
        if path.name == Path(__file__).name:
            continue
        text = path.read_text()
        assert not re.search(r"(raise_signal\(|getpid\(\), )(signal\.SIGINT|2\b)|interrupt_main", text), path
        assert not re.search(r"getpgrp|getpgid|os\.kill\((0|-)", text), path
        groups = re.findall(r"killpg\(([^,]+),", text)
        assert not groups or ("start_new_session=True" in text and set(groups) == {"run.pid"}), path


# ------------------------------------------------------------------------------------------------- the package


def test_the_package_holds_every_file_it_reads():
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns, packages = about["tool"]["setuptools"]["package-data"], about["tool"]["setuptools"]["packages"]
    assert {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in ROOT.glob("dynashift/**/*.py")} == {
        *packages
    }
    kept = {path for package in packages for path in (ROOT / package.replace(".", "/")).glob("*.py")}
    kept |= {
        path for name in patterns for glob in patterns[name] for path in (ROOT / name.replace(".", "/")).glob(glob)
    }
    wanted = {path for path in ROOT.glob("dynashift/**/*") if path.is_file() and "__pycache__" not in path.parts}
    assert wanted == kept
    assert {datasets.__file__, *map(str, policies.for_quality("hopper", "none", "medium-replay"))} <= {*map(str, kept)}
    assert about["project"]["version"] == "0.2.0"
    [listed] = about["tool"]["setuptools"]["dynamic"]["dependencies"]["file"]
    assert "torch==" in (ROOT / listed).read_text()
