"""`collect.py train`, on a budget that proves that it learns, resumes and stores what can be used."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import collect
from dynashift import policies
from dynashift.datasets import load
from dynashift.policies import load_policy, meta

ROOT = Path(__file__).parents[1]


def random_policy(seed, log_std=0.0):
    rng = np.random.default_rng(seed)
    layer = lambda n_in, n_out: (rng.normal(0, 0.3, (n_out, n_in)), rng.normal(0, 0.1, n_out))  # noqa: E731
    return policies.Policy(
        [layer(11, 8), layer(8, 8)], layer(8, 3), (np.zeros((3, 8)), np.full(3, log_std)), Path("random")
    )


def test_levels_are_picked_from_the_way_up(tmp_path, monkeypatch):
    """Expert: the best. Medium: nearest 45 before the best that 50 episodes confirm. Ladder: evenly below medium."""
    returns = {10: 150.0, 9: 1500.0}  # row 10, nearest to 45, was lucky; by the first weight, which is the row's number

    def evaluate(policy, env, shift, episodes, seed):
        return returns.get(round(float(policy.mean[1][0])), 200.0) + np.array([-50, 50])

    monkeypatch.setattr(collect, "evaluate", evaluate)
    # Row 7 is above medium, and the last, nearest of all to 45, past the best. Nothing is learnt up to row 2.
    path_scores = [1, 1, 1, 10, 15, 20, 25, 60, 30, 44, 45, 91, 88, 45]
    for k, score in enumerate(path_scores):
        policy = random_policy(k)
        policy.mean[1][:] = k
        policies.save_policy(policy, tmp_path / "run" / f"{k * 2000:08d}.npz", {})
        with (tmp_path / "run" / "progress.jsonl").open("a") as file:
            file.write(json.dumps({"steps": k * 2000, "score": score, "seed": 3}) + "\n")
    paths = collect.store_levels(tmp_path / "run", "hopper", "none", tmp_path)
    steps = {meta(path)["level"]: meta(path)["training_steps"] for path in paths}
    ladder = dict(zip((f"replay{i}" for i in range(6)), (0, 6_000, 8_000, 10_000, 12_000, 16_000), strict=True))
    assert steps == {"expert": 22_000, "medium": 18_000, **ladder}
    assert meta(paths[0])["return_mean"] == 200
    monkeypatch.setattr(policies, "FOLDER", tmp_path)
    assert [p.stem for p in policies.for_quality("hopper", "none", "medium-expert")] == [
        "hopper-none-medium",
        "hopper-none-expert",
    ]
    ladder = policies.for_quality("hopper", "none", "medium-replay")
    assert [meta(p)["training_steps"] for p in ladder] == [0, 6_000, 8_000, 10_000, 12_000, 16_000, 18_000]


def test_an_expert_spoilt_by_noise_gets_less_of_it(tmp_path, monkeypatch):
    def returns(policy, env, shift, episodes, seed):  # good only when quiet
        return np.full(episodes, 3000.0 if policy.log_std[1][0] < -1 else 500.0)

    monkeypatch.setattr(collect, "evaluate", returns)
    about = {"env": "hopper", "shift": "none", "level": "expert"}
    path = collect.store_measured(random_policy(0), about, tmp_path)
    assert meta(path)["noise"] == 0.25
    np.testing.assert_allclose(load_policy(path).log_std[1], np.log(0.25), rtol=1e-3)
    assert meta(collect.store_measured(random_policy(0), about | {"level": "medium"}, tmp_path))["noise"] == 1


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
    command = [
        sys.executable,
        ROOT / "collect.py",
        "train",
        "--env",
        "hopper",
        "--out",
        tmp_path / "runs",
        "--store",
        store,
    ]
    for steps in (6_000, 14_000):  # the second call goes on where the first one stopped
        subprocess.run([*command, "--steps", str(steps)], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    rows = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
    counts = [row["steps"] for row in rows]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] >= 14_000
    snapshots = [load_policy(run / f"{steps:08d}.npz", "hopper") for steps in dict.fromkeys(counts)]
    after_warm_up = [p for p, steps in zip(snapshots, dict.fromkeys(counts), strict=True) if steps > 6_000]
    for a, b in itertools.pairwise(after_warm_up):
        assert (a.hidden[0][0] != b.hidden[0][0]).any()
    assert all(np.isfinite(p.mean[0]).all() for p in snapshots)
    assert max(row["score"] for row in rows) > 5 * rows[0]["score"]  # 6,000 updates take hopper from 1 to 20 or more
    monkeypatch.setattr(policies, "FOLDER", store)
    monkeypatch.setenv("DYNASHIFT_DATA", str(tmp_path / "data"))
    data = load("hopper", "morph", "source", "medium-expert", data="embedded", source_size=2_000)
    assert data.kind == "embedded"
    assert len(data) == 2_000
