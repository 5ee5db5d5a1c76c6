"""`--shift none`, the unshifted robot as target: one dataset alone (`--target none`), or two of the same robot."""

import functools
import importlib
import re
import sys

import numpy as np
import pytest
import torch

import taf_preprocess
from baselines import dt
from dynashift import checksums, datasets, download, envs, evaluation, gate_report, generated, runs, tasks
from dynashift.errors import UserError
from experiments.report.reading import read_runs

RANDOM, EXPERT = -20.272305, 3234.3  # D4RL's references of hopper
ALONE = ("bc", "iql", "dt", "dadt", "qt", "taf_dt", "taf_dt_released")  # methods that one dataset is enough for
PAIRS = ("dara", "igdf", "otdf")
RUN = "--device cpu --updates 4 --eval-every 2 --eval-episodes 2 --log-every 1 --save-every 2"
VALUES = "--hidden 8 --source-batch 8 --target-batch 8"
SEQUENCE = "--layers 1 --heads 1 --width 8 --K 3 --batch 8"
TAF_DT = (
    "--layers 1 --heads 1 --width 8 --K 3 --hidden 8 --cvae-hidden 8 --M 2 --target-batch 8 --label-updates 2"
    " --command-updates 2 --cvae-updates 2 --ema-start 1 --ema-every 2"
)
OWN = {
    "bc": "--hidden 8 --batch 8",
    "iql": VALUES,
    "dara": VALUES,
    "igdf": f"{VALUES} --encoder-updates 2 --encoder-dim 4",
    "otdf": f"{VALUES} --cvae-updates 2 --cvae-hidden 8 --M 2",
    "dt": SEQUENCE,
    "dadt": SEQUENCE,
    "qt": f"{SEQUENCE} --hidden 8 --ema-start 1 --ema-every 2",
    "taf_dt": f"{TAF_DT} --label-batch 8 --cvae-batch 8",
    "taf_dt_released": f"{TAF_DT} --candidates 4",
}
# The functions that draw a batch, where they are not `sample`.
DRAWS = {"bc": ("sample_both",), "taf_dt": ("sample_windows", "sample_transitions")}
DRAWS |= dict.fromkeys(("dt", "dadt", "qt"), ("sample_windows",))
DRAWS["taf_dt_released"] = ("sample_starts",)


@pytest.fixture
def files(tmp_path):
    """Two datasets of hopper's shapes, with no action in common."""
    for seed, name in enumerate(("one", "other")):
        rng, n, end = np.random.default_rng(seed), 120, np.arange(1, 121) % 30 == 0
        states = rng.normal(size=(n + 1, 11)).astype(np.float32)
        columns = {"observations": states[:-1], "next_observations": states[1:] + end[:, None].astype(np.float32)}
        columns |= {"actions": rng.uniform(-1, 1, (n, 3)).astype(np.float32)}
        columns |= {"rewards": rng.normal(1, 1, n).astype(np.float32)}
        columns |= {"terminals": end, "timeouts": np.zeros(n, bool)}
        checksums.write_hdf5(tmp_path / f"{name}.hdf5", columns, "embedded", {})
    return {name: tmp_path / f"{name}.hdf5" for name in ("one", "other")}


def script(name):
    return importlib.import_module(name if name in ("taf_dt", "taf_preprocess") else f"baselines.{name}")


def run(name, words, monkeypatch):
    """A script as from its command line; returns what its training returns."""
    module, found = script(name), []
    train = module.train
    monkeypatch.setattr(module, "train", lambda args: found.append(train(args)))
    monkeypatch.setattr(sys, "argv", ["x", *words.split()])
    module.main()
    monkeypatch.setattr(module, "train", train)
    return found[0]


@pytest.fixture
def watched(monkeypatch):
    """The robots that are simulated and the datasets that are loaded, as the scripts ask for them."""
    robots, loaded = [], []
    make_batch, load = envs.make_batch, datasets.load
    monkeypatch.setattr(evaluation, "make_batch", lambda *a, **k: robots.append(a[:2]) or make_batch(*a, **k))
    monkeypatch.setattr(datasets, "load", lambda *a, **k: loaded.append(a[2:4]) or load(*a, **k))
    monkeypatch.setattr(gate_report, "draw", lambda *_: None)
    return robots, loaded


def score(returns):
    return 100 * (np.mean(returns) - RANDOM) / (EXPERT - RANDOM)


def watch(draw, drawn, data, *rest):
    """Draw a batch, and note its actions [n, d_a]."""
    found = draw(data, *rest)
    if hasattr(found, "valid"):  # windows
        drawn.append(found.actions[found.valid])
    elif hasattr(found, "actions"):  # transitions
        drawn.append(found.actions)
    else:  # their rows
        drawn.append(data.actions[found])
    return found


@pytest.mark.parametrize("name", ALONE)
def test_one_dataset_alone(name, files, tmp_path, monkeypatch, watched):
    module, drawn = script(name), []
    for function in DRAWS.get(name, ("sample",)):
        draw = functools.partial(watch, getattr(module, function), drawn)
        monkeypatch.setattr(module, function, draw)
    words = f"--shift none --source {files['one']} --target none --out {tmp_path / 'runs'} {RUN} {OWN[name]}"
    result = run(name, words, monkeypatch)

    robots, loaded = watched
    assert set(robots) == {("hopper", "none")}
    assert loaded == [("source", str(files["one"]))]
    data = datasets.read_hdf5(files["one"], "hopper")
    mine, seen = {*map(tuple, data.actions.tolist())}, {*map(tuple, torch.cat(drawn).tolist())}
    assert len(drawn) >= 4
    assert len(seen) > 4
    assert seen <= mine

    assert [e["score"] for e in result["evaluations"]] == pytest.approx(
        [score(e["returns"]) for e in result["evaluations"]]
    )
    assert list(result["data"]) == ["target"]
    about = result["data"]["target"]
    assert (about["path"], about["shift"], about["transitions"]) == (str(files["one"]), "none", 120)
    assert about["score"] == pytest.approx(score(data.rewards.reshape(-1, 30).sum(1)), abs=0.01)
    [folder] = (tmp_path / "runs" / name).iterdir()
    assert folder.name == "hopper-none-one-none-own"
    assert result["args"].get("beta", 0) == 0 or name == "iql"  # there it is a temperature

    found, problems = read_runs(tmp_path / "runs")  # the paper's tables have no such row
    assert found == []
    assert "no table has env 'hopper' with shift 'none'" in problems[0]


@pytest.mark.parametrize("name", [*ALONE, *PAIRS])
def test_two_datasets_of_one_robot(name, files, tmp_path, monkeypatch, watched):
    words = f"--shift none --source {files['one']} --target {files['other']} --out {tmp_path / 'runs'}"
    result = run(name, f"{words} {RUN} {OWN[name]}", monkeypatch)
    robots, _ = watched
    assert set(robots) == {("hopper", "none")}
    final = result["evaluations"][-1]
    assert final["score"] == pytest.approx(score(final["returns"]))
    assert result["data"]["target"]["path"] == str(files["other"])
    assert ("source" in result["data"]) == (name != "bc")


def test_gate_of_two_datasets_of_one_robot(files, tmp_path, monkeypatch, capsys):
    words = f"x --shift none --source {files['one']} --target {files['other']} --out {tmp_path / 'out'} --device cpu"
    monkeypatch.setattr(sys, "argv", words.split())
    taf_preprocess.main()
    assert "120 source transitions, against 120 of the target" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("hopper-none-one-other-*.npz"))) == 1


NEEDS = r"^this method needs target data; give --target a dataset of the same robot$"
SHIFTED = r"^--target none is a check on the source data alone, .* add --shift none, .* with gravity shift$"
REFUSED = [(name, "--shift none --target none", NEEDS) for name in (*PAIRS, "taf_preprocess")]
REFUSED += [(name, "--shift gravity --target none", SHIFTED) for name in (*ALONE, *PAIRS, "taf_preprocess")]
REFUSED += [
    (name, "--shift none", r"^no target data of the unshifted robot are published; use --target none .*$")
    for name in (*ALONE, *PAIRS, "taf_preprocess")
]
REFUSED += [
    *((name, "--shift none --target none --beta 0.5", "leave out --beta$") for name in ("taf_dt", "taf_dt_released")),
    ("bc", "--shift none --target none --source-share 0.5", r"^--source-share .* leave it out with --target none$"),
]


@pytest.mark.parametrize(("name", "words", "message"), REFUSED)
def test_refused_in_one_line_before_anything_is_read(name, words, message, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("work has begun")

    for module, function in ((datasets, "read_hdf5"), (generated, "embedded"), (download, "fetch")):
        monkeypatch.setattr(module, function, never)
    monkeypatch.setattr(sys, "argv", ["x", *words.split(), "--device", "cpu", "--out", str(tmp_path / "runs")])
    with pytest.raises(UserError, match=message):
        script(name).main()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", [*ALONE, *PAIRS, "taf_preprocess"])
def test_help_has_it_among_the_shifts(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--shift", "none", "--help"])
    with pytest.raises(SystemExit, match="0"):
        script(name).main()
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert re.search(r"--shift \{none,gravity,kinematic,morph\} ", text)


def test_generated_source_and_target_are_different_episodes():
    source, target = datasets.load_pair("hopper", "none", "medium", "expert", "embedded", source_size=500)
    again = datasets.load("hopper", "none", "target", "medium", "embedded")
    assert (source.shift, target.shift, len(source), len(target)) == ("none", "none", 500, generated.TARGET_SIZE)
    seen = {*map(bytes, source.observations)}
    assert not seen & {*map(bytes, again.observations)}
    assert target.score > again.score + 20  # the expert is a better one


def test_both_roles_have_the_statistics_of_one(files):
    one = datasets.read_hdf5(files["one"], "hopper")
    _, mu, sd = dt.merge(one, one, "cpu")
    np.testing.assert_allclose(mu, one.observations.mean(0), atol=1e-6)
    np.testing.assert_allclose(sd, one.observations.std(0), rtol=1e-5)


@pytest.mark.parametrize("name", ["taf_dt", "taf_dt_released", "taf_preprocess"])
@pytest.mark.parametrize("env", list(tasks.ROBOTS))
def test_settings_are_those_of_the_morph_shift(env, name):
    module = script(name)
    given = (runs.compose(module.Args, env=env, shift=shift) for shift in ("none", "morph"))
    none, morph = (runs.plain(module.Args, module.defaults, args) for args in given)
    assert runs.replace(none, shift="morph") == morph
