"""The policy of a run folder as an agent, and as an exported folder."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch

import taf_dt as taf
from dynashift import checkpoints, export, gate_report, runs
from dynashift.checkpoints import read_checkpoint
from dynashift.checksums import write_hdf5
from dynashift.errors import UserError, one_line_errors
from dynashift.files import read_json

D_S, D_A, K = 11, 3, 3
TINY = dict(layers=2, heads=2, width=8, hidden=8, cvae_hidden=8, K=K, M=2, target_batch=8, label_batch=8, cvae_batch=8)
TINY |= dict(label_updates=4, command_updates=4, cvae_updates=2, updates=4, eval_every=4, eval_episodes=5, lr=0.01)
FULL = {"policy.safetensors", "policy.json", "policy.onnx", "example.py"}


@pytest.fixture(autouse=True)
def _leave_no_trace():
    """A run changes how torch computes, and draws from global generators."""
    deterministic, states = torch.get_deterministic_debug_mode(), (random.getstate(), torch.get_rng_state())
    yield
    torch.set_deterministic_debug_mode(deterministic)
    random.setstate(states[0])
    torch.set_rng_state(states[1])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Logs of a hopper, drawn at random, with states that are far from 0."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in ("source", "target"):
        states = rng.normal(100, 0.1, (201, D_S)).astype(np.float32)
        columns = {"observations": states[:-1], "next_observations": states[1:]}
        columns |= {"actions": rng.uniform(-1, 1, (200, D_A)).astype(np.float32), "rewards": rng.normal(size=200)}
        columns |= {"terminals": np.arange(200) % 20 == 19, "timeouts": np.zeros(200, bool)}
        write_hdf5(folder / f"{name}.hdf5", columns, "embedded", {})
    return {name: str(folder / f"{name}.hdf5") for name in ("source", "target")}


def flags(**values) -> list[str]:
    """Command line of these values."""
    line = []
    for name, value in values.items():
        name = name.replace("_", "-")
        line += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return line


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A function that trains, and returns the run folder and the last evaluation's inputs and actions."""
    known = {}

    def train(**changes):
        key = json.dumps(changes)
        if key not in known:
            out = tmp_path_factory.mktemp("runs")
            words = flags(device="cpu", out=out, **(files | TINY | changes))
            history, play = [], runs.play

            def watched(args, act, judge):
                history.clear()

                def seen(*inputs):
                    action = act(*inputs)
                    history.append((*(x.copy() for x in inputs), action.copy()))
                    return action

                return play(args, seen, workers=1, judge=judge)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gate_report, "draw", lambda *_: None)
                patch.setattr(runs, "play", watched)
                taf.train(runs.read_args(taf.Args, taf.defaults, "", words))
            (result,) = out.glob("taf_dt/*/*/result.json")
            known[key] = SimpleNamespace(folder=result.parent, history=history, words=words)
        return known[key]

    return train


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """A function that trains and exports: the run and the folder with its graph."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the graph needs pip install -r requirements-export.txt")
    known = {}

    def make(**changes):
        run = trained(**changes)
        if run.folder not in known:
            known[run.folder] = tmp_path_factory.mktemp("exported") / "policy"
            export.write(taf.load_agent(run.folder), known[run.folder])
        return run, known[run.folder]

    return make


# ---------------------------------------------------------------------------------------------- load_agent


@pytest.mark.parametrize("token", ["advantage", "rtg"])
def test_a_loaded_agent_acts_as_the_evaluation_did_bit_for_bit(trained, token):
    run = trained(token=token)
    agent = taf.load_agent(run.folder, n=5)
    assert len(run.history) > K
    assert len({alive.sum() for _, _, alive, _ in run.history}) > 1  # the episodes have other lengths
    for _ in range(2):  # reset() forgets the first time
        agent.reset()
        for observations, rewards, alive, actions in run.history:
            np.testing.assert_array_equal(agent.act(observations, rewards, alive), actions)
    assert np.ptp(np.stack([actions[0] for *_, actions in run.history]), 0).min() > 0


def test_one_robot_needs_no_further_dimension(trained):
    run = trained(eval_episodes=1)
    agent = taf.load_agent(run.folder)
    for observations, _, _, actions in run.history:
        action = agent.act(observations[0].tolist())
        assert action.shape == (D_A,)
        np.testing.assert_array_equal(action, actions[0])


def test_robots_side_by_side_act_as_each_alone(trained):
    run = trained()
    rng = np.random.default_rng(1)
    observations = rng.normal(100, 0.1, (8, 4, D_S))
    together = taf.load_agent(run.folder, n=4)
    actions = np.stack([together.act(x) for x in observations])  # [8, 4, D_A]
    alone = taf.load_agent(run.folder)
    for i in range(4):
        alone.reset()
        found = np.stack([alone.act(x) for x in observations[:, i]])
        np.testing.assert_allclose(found, actions[:, i], atol=1e-6)


def test_loading_leaves_the_random_numbers_of_training_alone(trained):
    """They are in the checkpoint, and a resumed run restores them."""
    run = trained()
    random.seed(5)
    before = random.getstate()
    taf.load_agent(run.folder)
    assert random.getstate() == before


def own_robot(folder: Path) -> dict:
    """Random logs of a pendulum, whose actions lie between -2 and 2."""
    env, rng = gymnasium.make("Pendulum-v1"), np.random.default_rng(0)
    for name in ("source", "target"):
        columns = {"observations": [], "actions": [], "rewards": [], "timeouts": []}
        for episode in range(2):
            state, _ = env.reset(seed=episode)
            for t in range(200):
                action = rng.uniform(-2, 2, 1).astype(np.float32)
                after, reward, *_ = env.step(action)
                for column, x in zip(columns.values(), (state, action, reward, t == 199), strict=True):
                    column.append(x)
                state = after
        np.savez(folder / f"{name}.npz", terminals=np.zeros(400, bool), **columns)
    return {"env": "Pendulum-v1", **{name: folder / f"{name}.npz" for name in ("source", "target")}}


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    return {k: str(x) for k, x in own_robot(tmp_path_factory.mktemp("pendulum")).items()}


@pytest.mark.parametrize("env", ["Pendulum-v1", "logs"])
def test_actions_have_the_units_of_the_robot(trained, pendulum, env):
    """The evaluation has them between -1 and 1, and its simulator scales them."""
    run = trained(**pendulum | {"env": env})
    agent = taf.load_agent(run.folder, n=len(run.history[0][0]))
    low, high = agent.bounds
    assert low == pytest.approx([-2], abs=0.02)
    assert high == pytest.approx([2], abs=0.02)
    for observations, rewards, alive, actions in run.history:
        found = agent.act(observations, rewards, alive)
        np.testing.assert_array_equal(found, low + (actions + 1) / 2 * (np.array(high) - low))


@pytest.mark.parametrize("shape", [(D_S + 1,), (2, D_S), (1, 1, D_S), ()])
def test_observations_of_another_shape_are_refused(trained, shape):
    with pytest.raises(UserError, match=r"observations have shape .*, not \(1, 11\)"):
        taf.load_agent(trained().folder).act(np.zeros(shape))


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for name in ("args.json", "ckpt.pt"):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def test_folders_that_hold_no_policy_are_one_line_each(trained, tmp_path):
    with pytest.raises(UserError, match=r"there is no checkpoint in .*; name a run folder"):
        taf.load_agent(tmp_path)
    broken = copy_of(trained().folder, tmp_path / "broken")
    (broken / "ckpt.pt").write_bytes((broken / "ckpt.pt").read_bytes()[:-500])
    with pytest.raises(UserError, match=r"cannot read .*ckpt\.pt \(BadZipFile"):
        taf.load_agent(broken)
    other = copy_of(trained().folder, tmp_path / "other")
    checkpoints.write_json(other / "args.json", read_json(other / "args.json") | {"batch": 3})
    with pytest.raises(UserError, match=r"run by another script or version .*batch"):
        taf.load_agent(other)
    for change, message in (
        (lambda record: record["done"].pop("policy"), "the policy has not been trained yet"),
        (lambda record: record.pop("mu"), "is of an earlier version and lacks the statistics"),
    ):
        folder = copy_of(trained().folder, tmp_path / message[:4].strip())
        saved = read_checkpoint(folder / "ckpt.pt")
        change(saved["parts"]["record"])
        torch.save(saved, folder / "ckpt.pt")
        with pytest.raises(UserError, match=message):
            taf.load_agent(folder)


# -------------------------------------------------------------------------------------------------- export


def command_line(monkeypatch, *words) -> None:
    monkeypatch.setattr(sys, "argv", ["taf_dt.py", *map(str, words)])
    with one_line_errors():
        taf.main()


def test_the_flag_exports_a_finished_run_and_refuses_a_folder_that_exists(trained, tmp_path, monkeypatch, capsys):
    run = trained()
    monkeypatch.setattr(export, "PACKAGES", ("onnx_that_nobody_has",))
    folder = tmp_path / "a" / "policy"
    command_line(monkeypatch, *run.words, "--export", folder)
    said = capsys.readouterr().out
    assert "is done: score" in said  # nothing was trained again
    assert "no policy.onnx without onnx_that_nobody_has: pip install -r requirements-export.txt" in said
    assert f"policy exported to {folder}" in said
    assert {path.name for path in folder.iterdir()} == {"policy.safetensors", "policy.json"}
    assert os.listdir(folder.parent) == ["policy"]
    before = (folder / "policy.json").read_bytes()
    with pytest.raises(SystemExit, match=r"error: --export .*policy is there already; name another, or delete it"):
        command_line(monkeypatch, *run.words, "--export", folder)
    assert (folder / "policy.json").read_bytes() == before


def test_nothing_is_trained_for_a_folder_that_exists(files, tmp_path, monkeypatch):
    words = flags(device="cpu", out=tmp_path / "runs", **files)
    (tmp_path / "policy").write_text("a file")
    with pytest.raises(SystemExit, match="is there already"):
        command_line(monkeypatch, *words, "--export", tmp_path / "policy")
    assert not (tmp_path / "runs").exists()


def test_a_failure_leaves_no_folder(trained, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    agent = taf.load_agent(trained().folder)  # before the disk is full
    monkeypatch.setattr(export.files, "write_bytes", full)
    with pytest.raises(UserError, match=r"cannot write --export .*policy: No space left on device"):
        export.write(agent, tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_weights_and_statistics_are_those_of_the_run(trained, tmp_path, monkeypatch):
    from safetensors.numpy import load_file

    monkeypatch.setattr(export, "PACKAGES", ("onnx_that_nobody_has",))
    run = trained()
    export.write(taf.load_agent(run.folder), tmp_path / "policy")
    weights = load_file(tmp_path / "policy" / "policy.safetensors")
    saved = read_checkpoint(run.folder / "ckpt.pt")["parts"]
    expected = {f"{net}.{name}": x.numpy() for net in ("policy", "command") for name, x in saved[net].items()}
    assert weights.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(weights[name], x)
    about = read_json(tmp_path / "policy" / "policy.json")
    assert about["weights"] == {name: list(x.shape) for name, x in expected.items()}
    np.testing.assert_allclose(about["state_mean"], 100, atol=0.05)
    np.testing.assert_allclose(about["state_std"], 0.1, rtol=0.2)
    assert about["memory"]["states"] == {"shape": ["n", K, D_S], "dtype": "float32"}
    assert about["inputs"] == {"observation": {"shape": ["n", D_S], "dtype": "float64"}}


@pytest.mark.parametrize("case", ["advantage", "rtg", "pendulum"])
def test_the_graph_acts_as_the_agent_does(exported, pendulum, case):
    """For longer than an episode, with states that are clipped, and one robot or several."""
    import onnxruntime

    run, folder = exported(**pendulum | {"time_embedding": False} if case == "pendulum" else {"token": case})
    assert {path.name for path in folder.iterdir()} == FULL
    about = read_json(folder / "policy.json")
    session = onnxruntime.InferenceSession(str(folder / "policy.onnx"))
    rng = np.random.default_rng(2)
    for n, steps in ((1, 1005), (4, 10)):
        agent = taf.load_agent(run.folder, n=n)
        memory = {k: np.zeros([n, *x["shape"][1:]], x["dtype"]) for k, x in about["memory"].items()}
        worst, reward, d_s = 0.0, np.zeros(n), about["inputs"]["observation"]["shape"][1]
        for _ in range(steps):
            inputs = {"observation": agent.pre["mu"] + rng.normal(0, 8, (n, d_s)) * agent.pre["sd"], "reward": reward}
            inputs = {name: inputs[name] for name in about["inputs"]}
            action, *after = session.run(None, inputs | memory)
            memory = dict(zip(memory, after, strict=True))
            worst = max(worst, float(np.abs(action - agent.act(inputs["observation"], reward)).max()))
            reward = rng.normal(size=n)
        assert worst < 1e-5
        assert memory["t"].tolist() == [steps] * n


def test_zeroed_rows_start_one_robot_again(exported):
    import onnxruntime

    run, folder = exported(token="advantage")
    session = onnxruntime.InferenceSession(str(folder / "policy.onnx"))
    _, memory = export.interface(taf.load_agent(run.folder))
    memory = {k: x.numpy() for k, x in memory.items()}
    rng = np.random.default_rng(3)
    observations = rng.normal(100, 0.1, (9, 2, D_S))
    for t, x in enumerate(observations):
        if t == 5:
            for column in memory.values():
                column[1] = 0
        action, *after = session.run(None, {"observation": x, **memory})
        memory = dict(zip(memory, after, strict=True))
    for i, start in ((0, 0), (1, 5)):
        agent = taf.load_agent(run.folder)
        for x in observations[start:, i]:
            expected = agent.act(x)
        np.testing.assert_allclose(action[i], expected, atol=1e-5)


def test_the_example_runs_without_this_project_and_without_torch(exported, tmp_path):
    run, folder = exported(token="rtg")
    example = folder / "example.py"
    code = "import runpy, sys; sys.modules |= dict.fromkeys(['torch', 'dynashift', 'taf_dt', 'safetensors']);"
    words = [sys.executable, "-I", "-c", f"{code} runpy.run_path({str(example)!r}, run_name='__main__')"]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    actions = np.array([json.loads(line) for line in found.stdout.splitlines()])[:, 0]
    agent = taf.load_agent(run.folder)
    expected = [agent.act(agent.pre["mu"]) for _ in range(3)]
    np.testing.assert_allclose(actions, expected, atol=1e-5)
    assert len(example.read_text().splitlines()) <= 25
