"""`collect.py train`, on a budget that proves that it learns, resumes and stores what can be used."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import experiments.collect
from dynashift import policies
from dynashift.datasets import load
from dynashift.policies import load_policy, meta
from experiments import training

ROOT = Path(__file__).parents[1]


def random_policy(seed, log_std=0.0):
    rng = np.random.default_rng(seed)
    layer = lambda n_in, n_out: (rng.normal(0, 0.3, (n_out, n_in)), rng.normal(0, 0.1, n_out))  # noqa: E731
    return policies.Policy(
        [layer(11, 8), layer(8, 8)], layer(8, 3), (np.zeros((3, 8)), np.full(3, log_std)), Path("random")
    )


def test_levels_are_picked_from_the_way_up(tmp_path, monkeypatch):
    """Expert: high and steady. Medium: that whose episodes are nearest 45, before it. Ladder: evenly below medium."""
    # By the first weight, which is the row's number: row 10 was lucky before, row 8 is nearest 45 but unsteady, and
    # so is row 12 for an expert.
    returns = {10: (150.0, 1), 9: (1500.0, 50), 8: (1450.0, 600), 11: (2900.0, 50), 12: (3000.0, 900)}

    def evaluate(policy, env, shift, episodes, seed):
        mean, spread = returns.get(round(float(policy.mean[1][0])), (200.0, 50))
        return mean + spread * np.array([-1, 1])

    monkeypatch.setattr(training, "evaluate", evaluate)
    # Row 7 is above medium, and the last past the best. Nothing is learnt up to row 2.
    path_scores = [1, 1, 1, 10, 15, 20, 25, 61, 31, 44, 45, 91, 92, 45]
    for k, score in enumerate(path_scores):
        policy = random_policy(k)
        policy.mean[1][:] = k
        policies.save_policy(policy, tmp_path / "run" / f"{k * 2000:08d}.npz", {})
        with (tmp_path / "run" / "progress.jsonl").open("a") as file:
            row = {"steps": k * 2000, "score": score, "return_std": 50, "seed": 3}
            file.write(json.dumps(row) + "\n")
    policies.save_policy(random_policy(0), tmp_path / "hopper-none-replay6.npz", {})  # of an older, longer ladder
    paths = training.store_levels(tmp_path / "run", "hopper", "none", tmp_path)
    assert {path.stem for path in paths} == {path.stem for path in tmp_path.glob("hopper-none-*.npz")}
    steps = {meta(path)["level"]: meta(path)["training_steps"] for path in paths}
    ladder = dict(zip((f"replay{i}" for i in range(6)), (0, 6_000, 8_000, 10_000, 12_000, 16_000), strict=True))
    assert steps == {"expert": 22_000, "medium": 18_000, **ladder}
    assert meta(paths[0])["return_mean"] == 2900
    only_medium = training.store_levels(tmp_path / "run", "hopper", "morph", tmp_path, expert=False)
    assert [path.stem for path in only_medium] == ["hopper-morph-medium"]
    monkeypatch.setattr(policies, "FOLDER", tmp_path)
    assert [p.stem for p in policies.for_quality("hopper", "none", "medium-expert")] == [
        "hopper-none-medium",
        "hopper-none-expert",
    ]
    ladder = policies.for_quality("hopper", "none", "medium-replay")
    assert [meta(p)["training_steps"] for p in ladder] == [0, 6_000, 8_000, 10_000, 12_000, 16_000, 18_000]


def test_an_expert_spoilt_by_noise_gets_less_of_it(tmp_path, monkeypatch):
    def returns(policy, env, shift, episodes, seed):  # good only without noise
        return np.full(episodes, 3000.0 if policy.log_std[1][0] < -1 else 500.0)

    monkeypatch.setattr(training, "evaluate", returns)
    about = {"env": "hopper", "shift": "none", "level": "expert"}
    path = training.store_measured(random_policy(0), about, tmp_path)
    assert meta(path)["noise"] == 0.25
    np.testing.assert_allclose(load_policy(path).log_std[1], np.log(0.25), rtol=1e-3)
    assert meta(training.store_measured(random_policy(0), about | {"level": "medium"}, tmp_path))["noise"] == 1


def test_training_without_the_packages_says_so(tmp_path):
    if _has_sbx():
        pytest.skip("SBX is installed here")
    failed = subprocess.run(
        [sys.executable, ROOT / "collect.py", "train", "--env", "hopper"], capture_output=True, text=True
    )
    assert failed.returncode == 1
    assert "pip install -r requirements-data.txt" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1


def _has_sbx() -> bool:
    from importlib.util import find_spec

    return find_spec("sbx") is not None


@pytest.mark.skipif(not _has_sbx(), reason="needs pip install -r requirements-data.txt")
def test_training_learns_resumes_and_stores(tmp_path, monkeypatch):
    run, store = tmp_path / "runs" / "hopper-none", tmp_path / "store"
    few = lambda policy, env, shift, episodes, seed: policies.evaluate(policy, env, shift, 5, seed)  # noqa: E731
    monkeypatch.setattr(training, "evaluate", few)
    for steps in (8_000, 10_000):  # the second call continues where the first one stopped
        training.train("hopper", steps=steps, out=tmp_path / "runs", store=store)
    rows = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
    counts = [row["steps"] for row in rows]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] >= 10_000
    snapshots = [load_policy(run / f"{steps:08d}.npz", "hopper") for steps in dict.fromkeys(counts)]
    after_warm_up = [p for p, steps in zip(snapshots, dict.fromkeys(counts), strict=True) if steps > 6_000]
    for a, b in itertools.pairwise(after_warm_up):
        assert (a.hidden[0][0] != b.hidden[0][0]).any()
    assert all(np.isfinite(p.mean[0]).all() for p in snapshots)
    assert max(row["score"] for row in rows) > 5 * rows[0]["score"]  # 2,000 updates take hopper from 1 to 10 or more
    monkeypatch.setattr(policies, "FOLDER", store)
    monkeypatch.setenv("DYNASHIFT_DATA", str(tmp_path / "data"))
    data = load("hopper", "morph", "source", "medium-expert", data="embedded", source_size=2_000)
    assert data.kind == "embedded"
    assert len(data) == 2_000

    # Another run begins with these networks, and with up to three times their noise.
    training.train("hopper", "morph", 2_000, stop=50, start=run, explore=3.0, out=tmp_path / "runs", store=store)
    first = load_policy(tmp_path / "runs" / "hopper-morph" / "00000000.npz")
    assert (first.hidden[0][0] == snapshots[-1].hidden[0][0]).all()
    assert not (store / "hopper-morph-expert.npz").exists()
    with np.load(tmp_path / "runs" / "hopper-morph" / "checkpoint.npz") as stored:
        obs, actions = stored["observations"], stored["actions"].astype(float)
    for simulator, scale in enumerate(np.linspace(1, 3, 8)):
        x = obs[:, simulator]
        for weight, bias in first.hidden:
            x = np.maximum(x @ weight.T + bias, 0)
        mean, log_std = (x @ weight.T + bias for weight, bias in (first.mean, first.log_std))
        noise = (np.arctanh(actions[:, simulator].clip(-1 + 1e-7, 1 - 1e-7)) - mean) / np.exp(log_std)
        assert abs(np.median(np.abs(noise)) / 0.6745 / scale - 1) < 0.25  # of a normal variable


@pytest.mark.parametrize(("flag", "value"), [("--explore", "0.5"), ("--start", "nowhere")])
def test_flags_of_training_are_checked(flag, value, tmp_path, in_this_process):
    words = ["train", "--env", "hopper", "--out", tmp_path / "runs", flag, value]
    failed = in_this_process(experiments.collect, *words)
    assert failed.returncode == 1
    assert flag in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()
