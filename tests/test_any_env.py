"""Tasks of your own: any Gymnasium environment (--env Pendulum-v1), and logs without one (--env logs)."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import imageio
import numpy as np
import pytest
import torch
from test_no_shift import OWN as TINY
from test_no_shift import RUN, run, script

import taf_dt
from dynashift import any_env, checksums, datasets, evaluation, make_batch, own_data, runs
from dynashift.datasets import TaskArgs, load_target, load_task, returns_to_ask
from dynashift.errors import UserError
from dynashift.offline import LogBatch
from dynashift.scores import normalized_score, score_name
from dynashift.tasks import Spaces, find_task
from experiments.report.reading import read_runs

ROOT = Path(__file__).parents[1]
METHODS = ["taf_dt", "bc", "iql", "dara", "igdf", "otdf", "dt", "qt", "dadt", "taf_dt_released"]


def rollout(episodes, seed, **kwargs):
    """Columns of random behaviour on Pendulum, with actions in its own units, [-2, 2]."""
    env, rng, rows = gymnasium.make("Pendulum-v1", max_episode_steps=40, **kwargs), np.random.default_rng(seed), []
    for e in range(episodes):
        obs, _ = env.reset(seed=1000 * seed + e)
        ended = False
        while not ended:
            a = rng.uniform(-2, 2, 1).astype(np.float32)
            new, reward, terminated, truncated, _ = env.step(a)
            rows.append((obs, a, reward, new, terminated, truncated))
            obs, ended = new, terminated or truncated
    names = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


@pytest.fixture(autouse=True)
def _no_figure(monkeypatch):
    """It takes longer than a run of this size, and has its own tests."""
    monkeypatch.setattr("dynashift.gate_report.draw", lambda *_: None)


@pytest.fixture(scope="module")
def columns():
    return {"old": rollout(6, 1), "new": rollout(4, 2, g=5.0)}


@pytest.fixture
def pair(columns, tmp_path):
    """--source and --target of two files."""
    np.savez(tmp_path / "old.npz", **columns["old"])
    checksums.write_hdf5(tmp_path / "new.hdf5", columns["new"], "own", {})
    return {"source": str(tmp_path / "old.npz"), "target": str(tmp_path / "new.hdf5")}


def words(pair, tmp_path):
    return f"--source {pair['source']} --target {pair['target']} --out {tmp_path / 'runs'} {RUN}"


# ------------------------------------------------------------------------------------------------ environments


def test_a_batch_is_what_gymnasium_does_with_scaled_actions():
    task = TaskArgs(env="Pendulum-v1", env_kwargs='{"g": 5.0}')
    batch, rng = make_batch(task.env, task.shift, 2), np.random.default_rng(0)
    alone = [gymnasium.make("Pendulum-v1", g=5.0) for _ in range(2)]
    start = [env.reset(seed=7 + i)[0] for i, env in enumerate(alone)]
    np.testing.assert_allclose(batch.reset(7), start)
    for t in range(205):
        a = rng.uniform(-1, 1, (2, 1))
        obs, reward, terminated, truncated = batch.step(a)
        if t < 200:
            steps = [env.step(np.float32(2 * x)) for env, x in zip(alone, a, strict=True)]
            np.testing.assert_allclose(obs, [s[0] for s in steps], rtol=1e-6)
            np.testing.assert_allclose(reward, [s[1] for s in steps], rtol=1e-6)
            assert truncated.tolist() == [s[3] for s in steps] == [t == 199] * 2
            last = obs
        else:  # an episode that ended stays as it is
            assert not reward.any()
            np.testing.assert_array_equal(obs, last)
        assert not terminated.any()
    batch.close()


def test_a_batch_refuses_what_is_no_action():
    shift = TaskArgs(env="Pendulum-v1").shift
    batch = make_batch("Pendulum-v1", shift, 2)
    batch.reset(0)
    with pytest.raises(UserError, match="NaN or infinite"):
        batch.step(np.full((2, 1), np.nan))
    with pytest.raises(ValueError, match="shape"):
        batch.step(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="at least one"):
        make_batch("Pendulum-v1", shift, 0)


def test_scaling_and_back():
    bounds = ([-2.0, 0.0], [2.0, 10.0])
    a = np.array([[-2, 0], [2, 10], [1, 2.5]], np.float32)
    scaled = any_env.scale(a, bounds)
    np.testing.assert_allclose(scaled, [[-1, -1], [1, 1], [0.5, -0.5]])
    np.testing.assert_allclose(any_env.unscale(scaled, bounds), a)
    np.testing.assert_allclose(any_env.unscale(np.array([3.0, -9.0]), bounds), [2, 0])
    assert any_env.show_bounds(bounds) == "[-2, 2], [0, 10]"


def test_the_time_limit_is_the_environment_s_own(pair):
    own = {
        limit: TaskArgs(env="Pendulum-v1", env_kwargs=json.dumps({"max_episode_steps": limit})) for limit in (30, 60)
    }
    for limit, task in own.items():
        assert any_env.time_limit(task) == limit
        args = runs.compose(taf_dt.Args, env=task.env, env_kwargs=task.env_kwargs, width=8, heads=1, layers=1, K=3)
        assert taf_dt.Policy(3, 1, args).embed_t.num_embeddings == limit
    assert any_env.time_limit(TaskArgs(env="Pendulum-v1")) == 200
    assert any_env.time_limit(TaskArgs(env="hopper")) == any_env.time_limit(TaskArgs(env="logs")) == 1000
    assert len({task.shift for task in own.values()}) == 2  # each has a folder of its own


def test_scores(pair):
    plain, ranged = (TaskArgs(env="Pendulum-v1", **pair, score_range=r) for r in (None, (-400.0, -100.0)))
    assert normalized_score(plain.env, plain.shift, -123.0) == pytest.approx(-123.0)
    assert score_name(plain.env, plain.shift) == "mean return"
    assert normalized_score(ranged.env, ranged.shift, -175.0) == pytest.approx(75.0)
    assert score_name(ranged.env, ranged.shift) == score_name("hopper", "morph") == "normalised score"
    target = load_task(plain)[1]
    assert target.score == pytest.approx(target.returns.mean())
    assert load_task(ranged)[1].score == pytest.approx((target.returns.mean() + 400) / 3, rel=1e-6)
    assert returns_to_ask(plain) == pytest.approx([target.returns.max()] * 2)
    assert returns_to_ask(ranged) == (-100.0, -100.0)
    assert returns_to_ask(TaskArgs(env="hopper", shift="morph")) == (3152.75, 3600)
    row = find_task(plain.env, plain.shift)
    values = taf_dt.defaults(runs.compose(taf_dt.Args, env="Pendulum-v1", **pair))
    assert (values["K"], values["eta_reg"]) == (row.K, row.eta_reg) == (5, 0.5)


def test_an_environment_of_your_own_module(tmp_path, monkeypatch, columns):
    """It is found where the command is given, has arguments, no time limit, and terminates."""
    (tmp_path / "my_robot.py").write_text("""
import gymnasium, numpy as np
class Robot(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,))
    action_space = gymnasium.spaces.Box(np.array([-1, 0], "f"), np.array([1, 5], "f"))
    def __init__(self, stop=3):
        self.stop = stop
    def reset(self, seed=None, options=None):
        self.x = np.zeros(2)
        return self.x, {}
    def step(self, a):
        self.x = self.x + a
        return self.x, 1.0, bool(self.x[1] > self.stop), False, {}
gymnasium.register("MyRobot-v0", Robot)
""")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = TaskArgs(env="my_robot:MyRobot-v0", env_kwargs='{"stop": 7}')
    assert any_env.find_spaces(task.env, task.shift) == Spaces(obs_dim=2, act_dim=2, bounds=([-1.0, 0.0], [1.0, 5.0]))
    batch = make_batch(task.env, task.shift, 1)
    batch.reset(0)
    found = [batch.step(np.array([[1.0, 0.2]])) for _ in range(3)]  # 0.2 of [0, 5] is 3
    assert [bool(f[2][0]) for f in found] == [False, False, True]
    np.testing.assert_allclose(found[1][0], [[2, 6]])
    batch.reset(0)
    for _ in range(999):
        assert not batch.step(np.array([[0.0, -1.0]]))[3]
    assert batch.step(np.array([[0.0, -1.0]]))[3]


# --------------------------------------------------------------------------------------------------------- scripts


@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_an_environment_of_your_own(method, pair, tmp_path, monkeypatch, capsys):
    more = '--env Pendulum-v1 --env-kwargs {"max_episode_steps":15} --score-range -200 -50'
    result = run(method, f"{words(pair, tmp_path)} {more} {TINY[method]}", monkeypatch)
    final = result["evaluations"][-1]
    assert final["lengths"] == [15, 15]
    assert final["score"] == pytest.approx((np.mean(final["returns"]) + 200) / 1.5)
    assert result["data"]["target"]["bounds"] == [[-2.0], [2.0]]
    out = capsys.readouterr().out
    assert out.count("actions lie in [-2, 2] and are scaled to [-1, 1]") == 1
    assert "normalised score" in out


@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_logs_alone(method, pair, tmp_path, monkeypatch, capsys):
    result = run(method, f"{words(pair, tmp_path)} --env logs {TINY[method]}", monkeypatch)
    final = result["summaries"]["final"]
    assert final["score"] is None
    assert final["return_mean"] is None
    offline = final["offline"]
    assert (offline["episodes"], offline["transitions"]) == (1, 40)  # a tenth of four, at least one
    assert result["data"]["target"]["transitions"] == 120
    assert 0 < offline["action_mse"] < 4
    assert ({"q_policy", "q_data"} <= offline.keys()) == (method not in ("bc", "dt", "dadt"))
    assert ("commands_in_range" in offline) == (method == "taf_dt")
    losses = {name: x for stage in result["losses"].values() for name, x in stage.items()}
    assert losses
    assert np.isfinite(list(losses.values())).all()
    assert "action error" in capsys.readouterr().out
    found, problems = read_runs(tmp_path / "runs")  # which the paper's tables have no row for
    assert found == []
    assert "no table has env 'logs'" in problems[0]


def test_what_logs_report_of_bc_computed_from_its_checkpoint(pair, tmp_path, monkeypatch):
    line = f"{words(pair, tmp_path)} --env logs {TINY['bc']}"
    result = run("bc", line, monkeypatch)
    task = TaskArgs(env="logs", **pair)
    train, held = load_target(task), own_data.held_out(task)
    assert len(train) + len(held) == 160
    assert not {x.tobytes() for x in train.observations} & {x.tobytes() for x in held.observations}
    folder = next((tmp_path / "runs" / "bc").glob("logs-own-*/seed1*"))
    bc = script("bc")
    nets = bc.build(runs.compose(bc.Args, hidden=8), 3, 1, "cpu")
    runs.load_checkpoint(folder / "ckpt.pt", nets)
    mu, sd = train.observations.mean(0, dtype=float), train.observations.std(0, dtype=float)
    states = torch.as_tensor(bc.normalise(held.observations, mu, sd))
    error = (nets["policy"](states).tanh().detach().numpy() - held.actions) ** 2
    offline = result["summaries"]["final"]["offline"]
    assert offline["action_mse"] == pytest.approx(error.mean(), rel=1e-5)
    assert offline["action_variance"] == pytest.approx(held.actions.var(), rel=1e-5)
    again = run("bc", f"{line} --eval-only", monkeypatch)
    assert again["offline"] == offline


def test_held_out_episodes_in_place_of_simulators(columns, pair):
    """Whatever is done, the recorded states follow, and each episode counts once."""
    data = load_task(TaskArgs(env="Pendulum-v1", **pair))[1]

    def judge(obs, a):
        return {"q": obs[:, 2] + a[:, 0], "large": a[:, 0] > 0}

    batch = LogBatch(data, 5, judge)  # four episodes: the fifth is the first again
    seen, ended = [batch.reset(10_000)], np.zeros(5, bool)
    while not ended.all():
        a = np.stack([data.actions[data.starts[i % 4] + batch.t] for i in range(5)]) + np.float32(0.1)
        a[4] = 77  # which would spoil every mean
        obs, reward, terminated, truncated = batch.step(a)
        assert reward[4] == reward[0]
        seen.append(obs)
        ended = terminated | truncated
    np.testing.assert_array_equal(np.stack(seen[:-1])[:, 1], data.observations[data.starts[1] :][:40])
    found = batch.found()
    assert found["action_mse"] == pytest.approx(0.01, rel=1e-4)
    assert found["q_policy"] - found["q_data"] == pytest.approx(0.1, rel=1e-4)
    assert found["q_data"] == pytest.approx((data.observations[:, 2] + data.actions[:, 0]).mean(), rel=1e-4)
    assert found["large"] == pytest.approx((data.actions > -0.1).mean())
    assert (found["episodes"], found["transitions"]) == (4, 160)
    part = batch.found(slice(1, 2))
    assert (part["episodes"], part["transitions"]) == (1, 40)


def test_the_held_out_share(columns):
    data = datasets.Dataset("logs", "own", "x", "own", "x", "x", **rollout(25, 3))
    train, held = own_data.split(data)
    assert (len(train.starts), len(held.starts)) == (23, 2)
    assert train.lengths.tolist() == [40] * 23
    np.testing.assert_array_equal(held.observations[:40], data.observations[240:280])  # number 6 of 25


def test_one_dataset_alone(pair):
    task = TaskArgs(env="Pendulum-v1", source=pair["source"], target="none")
    source, target = load_task(task, one_is_enough=True)
    assert source is target
    with pytest.raises(UserError, match="needs target data"):
        load_task(task)
    with pytest.raises(UserError, match=r"^--source-size must be positive, not -5$"):
        TaskArgs(env="Pendulum-v1", **pair, source_size=-5)
    small = TaskArgs(env="Pendulum-v1", **pair, source_size=50)
    assert [len(x) for x in load_task(small)] == [50, 160]
    alone = load_target(TaskArgs(env="Pendulum-v1", target=pair["target"]))
    assert len(alone) == 160
    source, target = load_task(replace(task, env="logs"), one_is_enough=True)
    assert source is target
    assert len(target) == 200  # of 240; the sixth episode is held out


def test_logs_of_the_target_alone(pair, tmp_path, monkeypatch):
    """bc.py needs no source; what it holds out is then the same."""
    line = f"--target {pair['target']} --out {tmp_path / 'runs'} {RUN} --env logs {TINY['bc']}"
    result = run("bc", line, monkeypatch)
    assert result["summaries"]["final"]["offline"]["transitions"] == 40
    held = own_data.held_out(TaskArgs(env="logs", **pair))
    alone = own_data.held_out(TaskArgs(env="logs", target=pair["target"]))
    np.testing.assert_array_equal(alone.observations, held.observations)


class Drawn(gymnasium.Env):
    """A bar as long as the sum of all actions, whose range is [0, 10]."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gymnasium.spaces.Box(0, 10, (1,))

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.x = np.zeros(1)
        return self.x, {}

    def step(self, action):
        self.x = self.x + action
        return self.x, 0.0, False, False, {}

    def render(self):
        return np.where(np.arange(64) < self.x, 255, 0).astype(np.uint8)[None, :, None].repeat(16, 0).repeat(3, 2)


def test_a_video(tmp_path, capsys):
    if "Drawn-v0" not in gymnasium.registry:
        gymnasium.register("Drawn-v0", Drawn, max_episode_steps=6)
    args, seen = runs.compose(script("bc").Args, env="Drawn-v0"), []
    evaluation.record_video(tmp_path / "video.gif", args, lambda obs, *_: seen.append(obs.item()) or np.zeros((1, 1)))
    assert seen == [0, 5, 10, 15, 20, 25]  # the middle of the range each time
    frames = imageio.mimread(tmp_path / "video.gif")
    assert [int((frame[8, :, 0] > 127).sum()) for frame in frames] == [0, 15]  # every third step
    evaluation.record_video(tmp_path / "none.gif", runs.replace(args, env="logs"), lambda *_: None)
    assert "no simulator" in capsys.readouterr().out
    assert not (tmp_path / "none.gif").exists()


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--env CartPole-v1", "actions must be a Box of one dimension, not Discrete.*discrete actions are not supp"),
        ("--env Blackjack-v1", "observations must be a Box of one dimension, not Tuple.*FlattenObservation"),
        ("--env CarRacing-v3", "observations must be a Box|cannot be made"),
        ("--env hoper", r"^--env hoper is unknown; did you mean hopper\?$"),
        ("--env Walker --shift gravity", r"^--env Walker is unknown; did you mean walker2d\?$"),
        ("--env robot", "robot cannot be made .*halfcheetah, hopper, walker2d, ant, logs, a Gymnasium id"),
        ("--env Pendulm-v1", "cannot be made .*Did you mean: `Pendulum`"),
        ("--env no_such_module:Robot-v0", "cannot be made .*No module named 'no_such_module'"),
        ("--env Pendulum-v1 --shift morph", "--shift changes one of .*leave it out"),
        ("--env Pendulum-v1 --env-kwargs {g", "is not JSON"),
        ("--env Pendulum-v1 --env-kwargs [1]", "must be an object"),
        ('--env Pendulum-v1 --env-kwargs {"weight":3}', "cannot be made .*weight"),
        ("--env Pendulum-v1 --score-range 5 2", "a lower and a higher return, not 5.0 2.0"),
        ('--env hopper --env-kwargs {"g":1}', "are for a Gymnasium id or logs, not hopper"),
        ('--env logs --env-kwargs {"g":1}', "no simulator; leave out --env-kwargs"),
        ("--env Pendulum-v1 --source medium", "--source and --target are files ending in .* not 'medium'"),
        ("--env Pendulum-v1 --source nothing.npz", "nothing.npz: no such file"),
        ("--env MountainCarContinuous-v0", r"observations has shape \(240, 3\), expected \(240, 2\) for MountainCar"),
    ],
)
def test_bad_tasks_are_one_line(line, message, pair, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=message) as error:
        run("bc", f"{words(pair, tmp_path)} {line} {TINY['bc']} --source-share 0.5", monkeypatch)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("observations", lambda x: x[:, :2], r"observations has shape \(160, 2\), expected \(160, 3\)"),
        ("actions", lambda x: x[:, 0].round().astype(int), r"actions has shape \(160,\), expected \(160, 1\)"),
        ("actions", lambda x: np.where(x == x[5], np.nan, x), "actions holds NaN or infinite values, first in row 5"),
        ("rewards", lambda x: np.where(x == x[9], np.inf, x), "rewards holds NaN or infinite values, first in row 9"),
        ("timeouts", lambda x: 0 * x, "one episode, and at least two are needed"),
    ],
)
@pytest.mark.parametrize("env", ["Pendulum-v1", "logs"])
def test_bad_targets_are_one_line(env, key, change, message, columns, pair, tmp_path):
    bad = columns["new"] | {key: change(columns["new"][key])}
    np.savez(tmp_path / "bad.npz", **bad)
    task = TaskArgs(env=env, source=pair["source"], target=str(tmp_path / "bad.npz"))
    if env == "logs":  # where the files alone say what is right
        other = {
            "observations has": "observations have 2 entries, not 3 as in .*old.npz",
            "actions has": "discrete actions are not supported",
        }
        message = next((x for begin, x in other.items() if message.startswith(begin)), message)
    with pytest.raises(UserError, match=message) as error:
        load_task(task)
    assert "\n" not in str(error.value)


def test_actions_beyond_the_bounds(columns, pair, tmp_path):
    """An environment has bounds of its own; of logs the largest action is the bound."""
    np.savez(tmp_path / "bad.npz", **columns["new"] | {"actions": 3 * columns["new"]["actions"]})
    files = pair | {"target": str(tmp_path / "bad.npz")}
    with pytest.raises(UserError, match=r"of 160 actions leave \[-2, 2\], the range of Pendulum-v1's motors"):
        load_task(TaskArgs(env="Pendulum-v1", **files))
    source, target = load_task(TaskArgs(env="logs", **files))
    largest = 3 * np.abs(columns["new"]["actions"]).max()
    assert max(-target.bounds[0][0], target.bounds[1][0]) == pytest.approx(largest)
    assert np.abs(source.actions).max() < 0.4


def test_help_lists_the_robots_and_makes_nothing(pair):
    """Also for a task of your own, whose files and environment it does not touch."""
    for more in ([], ["--env", "no_such_module:Robot-v0", "--source", "no.npz", "--target", "no.npz"]):
        command = [sys.executable, "baselines/dt.py", *more, "--help"]
        environ = os.environ | {"COLUMNS": "200"}
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
        assert "--env {halfcheetah,hopper,walker2d,ant,ID,logs}" in done.stdout
        assert "--score-range LOW HIGH" in done.stdout
