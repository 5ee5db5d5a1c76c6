"""Policies and rollouts, against real behaviour policies and real data where they are there."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import experiments.collect
from dynashift import make, policies
from dynashift.datasets import load, read_hdf5
from dynashift.errors import UserError
from dynashift.policies import Policy, act, load_policy, rollout
from dynashift.policies.__main__ import table
from dynashift.replay import replay, usable_rows
from dynashift.tasks import ROBOTS

ROOT = Path(__file__).parents[1]


def random_policy(env, path=Path("random"), seed=0, std=-1.0) -> Policy:
    rng = np.random.default_rng(seed)
    sizes = ROBOTS[env].obs_dim, 16, 16
    hidden = [
        (rng.normal(0, 0.3, (o, i)).astype("f"), rng.normal(0, 0.1, o).astype("f"))
        for i, o in itertools.pairwise(sizes)
    ]
    mean = rng.normal(0, 0.3, (ROBOTS[env].act_dim, 16)).astype("f"), np.zeros(ROBOTS[env].act_dim, "f")
    log_std = np.zeros((ROBOTS[env].act_dim, 16), "f"), np.full(ROBOTS[env].act_dim, std, "f")
    return Policy(hidden, mean, log_std, path)


def save(policy: Policy, path: Path, **changes):
    arrays = {
        f"fc{i}.{part}": a
        for i, layer in enumerate(policy.hidden)
        for part, a in zip(("weight", "bias"), layer, strict=True)
    }
    for name in ("mean", "log_std"):
        arrays |= {f"{name}.weight": getattr(policy, name)[0], f"{name}.bias": getattr(policy, name)[1]}
    np.savez(path, **{key: value for key, value in {**arrays, **changes}.items() if value is not None})


def test_act_is_the_network_written_out():
    policy = random_policy("hopper")
    rng = np.random.default_rng(1)
    obs, noise = rng.normal(size=(5, 11)).astype("f"), rng.normal(size=(5, 3)).astype("f")
    for row in range(5):
        x = obs[row].astype(float)
        for weight, bias in policy.hidden:
            x = [
                max(0.0, sum(w * v for w, v in zip(line, x, strict=True)) + b)
                for line, b in zip(weight, bias, strict=True)
            ]
        mean = [sum(w * v for w, v in zip(line, x, strict=True)) for line in policy.mean[0]]
        sampled = [np.tanh(m + np.exp(-1.0) * e) for m, e in zip(mean, noise[row], strict=True)]
        np.testing.assert_allclose(act(policy, obs, noise)[row], sampled, atol=1e-5)
        np.testing.assert_allclose(act(policy, obs)[row], np.tanh(mean), atol=1e-5)


def test_an_action_does_not_depend_on_its_companions():
    policy = random_policy("walker2d")
    obs = np.random.default_rng(0).normal(size=(64, 17)).astype("f")
    alone = np.concatenate([act(policy, obs[i : i + 1]) for i in range(64)])
    assert (act(policy, obs) == alone).all()
    assert (act(policy, obs[::-1])[::-1] == alone).all()


@pytest.mark.parametrize(("env", "steps"), [("hopper", 8000), ("ant", 3000)])  # so many have two workers, and one
def test_rollout_is_the_same_whatever_the_workers_and_the_length(env, steps):
    policy = random_policy(env)
    long, short = rollout(policy, env, "morph", steps, seed=3, workers=1, progress=False), 700
    for other in (
        rollout(policy, env, "morph", steps, seed=3, workers=2, progress=False),
        rollout(policy, env, "morph", short, seed=3, workers=2, progress=False),
    ):
        n = len(other["rewards"])
        for key, column in other.items():
            if key != "timeouts" or n == steps:
                assert (column == long[key][:n]).all(), key
        assert other["timeouts"][-1] or other["terminals"][-1]
    assert (rollout(policy, env, "morph", 300, seed=4, progress=False)["actions"] != long["actions"][:300]).any()


def test_rollout_against_a_plain_loop():
    """Episodes one after the other in a gymnasium environment."""
    policy = random_policy("hopper", std=-20.0)  # hardly any noise, so that the plain loop needs no draws
    data = rollout(policy, "hopper", "kinematic", 200, seed=5, stochastic=False, progress=False)
    env = make("hopper", "kinematic")
    rows, episode = [], 0
    while len(rows) < 200:
        obs, done = env.reset(seed=int(np.random.SeedSequence([5, episode]).generate_state(1)[0]))[0], False
        while not done:
            action = act(policy, obs[None].astype("f"))[0]
            obs_after, reward, terminated, truncated, _ = env.step(action)
            rows.append((obs, action, reward, obs_after, terminated, truncated))
            obs, done = obs_after, terminated or truncated
        episode += 1
    for k, key in enumerate(("observations", "actions", "rewards", "next_observations", "terminals")):
        np.testing.assert_array_equal(data[key], np.array([row[k] for row in rows[:200]]).astype(data[key].dtype))
    assert data["terminals"].sum() > 1


def test_real_policies_explain_their_own_data(real_data):
    """The recorded log-probabilities of the recorded actions follow from the stored weights."""
    for path in (real_data / "d4rl_medium").glob("*.hdf5"):
        policy = load_policy(path, path.name.split("_")[0])
        with h5py.File(path) as file:
            x, actions, recorded = (
                file[key][:].astype(float) for key in ("observations", "actions", "infos/action_log_probs")
            )
        for weight, bias in policy.hidden:
            x = np.maximum(x @ weight.T + bias, 0)
        mean, log_std = (x @ weight.T + bias for weight, bias in (policy.mean, policy.log_std))
        z = (np.arctanh(actions) - mean) / np.exp(log_std.clip(-20, 2))
        density = -(z**2) / 2 - log_std - np.log(2 * np.pi) / 2 - np.log(1 - actions**2 + 1e-6)
        assert np.median(np.abs(density.sum(1) - recorded)) < 1e-3
        assert abs(z.std() - 1) < 0.03


@pytest.mark.parametrize(
    ("env", "mean", "error", "steps"),
    [
        ("hopper", 1456, 28, 20_000),
        ("halfcheetah", 4744, 82, 10_000),
        ("walker2d", 2693, 108, 10_000),
        ("ant", 3066, 202, 8_000),
    ],
)
def test_real_policies_reach_their_known_returns(real_data, env, mean, error, steps, tmp_path, in_this_process):
    policy = real_data / "d4rl_medium" / f"{env}_medium-v2.slice.hdf5"
    words = ["--policy", policy, "--env", env, "--steps", steps, "--out", tmp_path / "x.hdf5", "--seed", 1]
    made = in_this_process(experiments.collect, "rollout", *words)
    assert made.returncode == 0, made.stderr
    data = read_hdf5(tmp_path / "x.hdf5", env)
    assert data.kind == "own"  # only those of results/published are known, by their hashes
    assert len(data) == steps
    returns = data.returns[data.complete]
    ours = returns.std(ddof=1) / np.sqrt(len(returns))
    assert abs(returns.mean() - mean) < 2 * np.hypot(ours, error)
    # ... and what was written can be replayed like the published data
    rows = usable_rows(data)[:: steps // 300]
    assert not replay(data, "none", rows).falls_short()


def test_bad_policies_are_refused_in_one_line(tmp_path, in_this_process):
    good = random_policy("hopper")
    cases = {
        "cut": None,
        "text": b"hello",
        "missing": {"mean.bias": None},
        "object": {"mean.bias": np.array([{}], object)},
    }
    for name, change in cases.items():
        path = tmp_path / f"{name}.npz"
        save(good, path, **(change if isinstance(change, dict) else {}))
        if name == "cut":
            path.write_bytes(path.read_bytes()[:300])
        elif name == "text":
            path.write_bytes(change)
        with pytest.raises(UserError, match=path.name) as refused:
            load_policy(path)
        assert "\n" not in str(refused.value)
    save(good, tmp_path / "good.npz")
    assert (load_policy(tmp_path / "good.npz", "hopper").mean[0] == good.mean[0]).all()
    for arguments, word in [
        (("--policy", tmp_path / "good.npz", "--env", "ant"), "not a policy for ant"),
        (("--policy", tmp_path / "none.npz", "--env", "hopper"), "no such file"),
        (("--policy", tmp_path / "good.npz", "--env", "hopper", "--steps", 0), "at least 1"),
        (("--policy", tmp_path / "good.npz", "--env", "hopper", "--out", "hopper_morph_medium.hdf5"), "published"),
    ]:
        failed = in_this_process(experiments.collect, "rollout", "--out", tmp_path / "y.hdf5", *arguments)
        assert failed.returncode == 1
        assert word in failed.stderr
        assert "Traceback" not in failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1


SHIPPED = sorted((ROOT / "dynashift" / "policies").glob("*.npz"))


def test_shipped_policies_are_small():
    assert sum(path.stat().st_size for path in SHIPPED) < 8e6


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_policy_is_at_its_level(path):
    """A few episodes: their median must be within four standard errors of what the table says of 50 episodes. The
    median, because now and then an expert falls, and of five episodes one such would decide the mean."""
    with np.load(path, allow_pickle=False) as file:
        meta = json.loads(str(file["meta"]))
        assert all(file[key].dtype == np.float16 for key in file.files if key != "meta")
    assert path.stem == f"{meta['env']}-{meta['shift']}-{meta['level']}"
    # One worker, because the tests themselves occupy all cores.
    policy = load_policy(path, meta["env"])
    data = rollout(policy, meta["env"], meta["shift"], 5000, seed=7, workers=1, progress=False)
    returns = np.add.reduceat(
        data["rewards"].astype(float), np.flatnonzero(np.roll(data["terminals"] | data["timeouts"], 1))
    )[:-1]
    error = np.hypot(meta["return_std"] / np.sqrt(len(returns)), meta["return_std"] / np.sqrt(50))
    assert abs(np.median(returns) - meta["return_mean"]) <= 4 * error + 0.02 * abs(meta["return_mean"])
    if meta["level"] == "medium":
        assert 30 <= meta["score"] <= 60


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_blas_threads_change_nothing(tmp_path):
    """Equal seeds give equal bytes with any number of BLAS threads and workers."""
    save(random_policy("halfcheetah"), tmp_path / "p.npz")
    files = []
    for k, threads in enumerate((1, 2)):
        out = tmp_path / f"{k}.hdf5"
        command = [
            sys.executable,
            ROOT / "collect.py",
            "rollout",
            "--policy",
            tmp_path / "p.npz",
            "--env",
            "halfcheetah",
        ]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads)}
        more = ["--steps", "2500", "--out", str(out), "--workers", str(threads)]
        subprocess.run([*command, *more], check=True, env=environment, capture_output=True)
        files.append(out.read_bytes())
    assert files[0] == files[1]


def test_the_table_of_policies_is_up_to_date():
    assert table() in (policies.FOLDER / "README.md").read_text()


@pytest.mark.parametrize("quality", ["medium", "medium-replay", "medium-expert"])
def test_embedded_source_data(quality, tmp_path, monkeypatch):
    """Equal requests give equal bytes; a smaller set of one policy is the beginning of a larger one."""
    monkeypatch.setenv("DYNASHIFT_DATA", str(tmp_path))
    data = load("hopper", "morph", "source", quality, data="embedded", source_size=3000)
    assert (data.kind, data.shift, len(data)) == ("embedded", "none", 3000)
    first = Path(data.path).read_bytes()
    Path(data.path).unlink()
    assert (
        Path(load("hopper", "morph", "source", quality, data="embedded", source_size=3000).path).read_bytes() == first
    )
    if quality == "medium":
        smaller = load("hopper", "morph", "source", quality, data="embedded", source_size=1000)
        np.testing.assert_array_equal(smaller.observations, data.observations[:1000])
    if quality == "medium-expert":  # half and half
        with h5py.File(data.path) as file:
            assert list(file.attrs["policies"]) == ["hopper-none-medium", "hopper-none-expert"]
    assert not replay(data, "none", usable_rows(data)[::10]).falls_short()


def test_embedded_target_data(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNASHIFT_DATA", str(tmp_path))
    data = load("hopper", "morph", "target", "expert", data="embedded")
    assert (data.kind, data.shift, len(data)) == ("embedded", "morph", 5000)
    assert data.score > 80
    monkeypatch.setattr(policies, "FOLDER", tmp_path)
    with pytest.raises(UserError, match=r"collect\.py train"):
        load("hopper", "morph", "target", "medium", data="embedded")


def test_replay_of_a_folder(real_data, tmp_path):
    """Exit status 0 on a published file; not on the same data under the name of another shift."""

    def run(folder):
        command = [sys.executable, "-m", "dynashift.replay", str(folder), "--workers", "1"]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    published = real_data / "target" / "hopper_morph_medium.hdf5"
    for folder, name in (("right", published.name), ("wrong", "hopper_kinematic_of_another.hdf5")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).symlink_to(published)
    right, wrong, empty = run(tmp_path / "right"), run(tmp_path / "wrong"), run(tmp_path / "nothing")
    assert right.returncode == 0, right.stderr
    assert "| hopper_morph_medium | 4710 |" in right.stdout
    assert wrong.returncode == 1
    assert "1 fall short" in wrong.stdout
    assert empty.returncode == 1
    assert "no dataset here" in empty.stderr


@pytest.mark.parametrize("change", ["bias", "depth", "heads", "scalar", "nan", "half"])
def test_a_policy_whose_layers_do_not_fit_is_refused(change, tmp_path):
    with np.load(policies.FOLDER / "hopper-none-medium.npz") as file:
        arrays = dict(file)
    arrays |= {
        "bias": {"fc0.bias": arrays["fc0.bias"][1:]},
        "depth": {"mean.weight": arrays["mean.weight"][:, 1:]},
        "heads": {"log_std.weight": arrays["log_std.weight"][1:], "log_std.bias": arrays["log_std.bias"][1:]},
        "scalar": {"fc1.weight": np.float16(1)},
        "nan": {"mean.bias": arrays["mean.bias"] * np.nan},
        "half": {},
    }[change]
    if change == "half":  # without it, the layers before and after would fit
        del arrays["fc1.weight"]
    np.savez(tmp_path / "x.npz", **arrays)
    said = {"nan": "NaN or infinite", "half": r"holds no behaviour policy \(fc1.weight\)"}
    with pytest.raises(UserError, match=said.get(change, "do not fit each other")):
        policies.load_policy(tmp_path / "x.npz", "hopper")
