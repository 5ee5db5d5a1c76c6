"""Behaviour, pinned: after 20 updates of every stage each script has the parameters that pins.json records.

Every script is started by its command line alone, so that no change inside it needs a change here. The data are
drawn here, because a simulator that rounds differently would soon give other data. `python tests/test_pins.py --record`
rewrites pins.json; a commit that does so changes behaviour and says why.

TEST_PINS=1 also compares every bit of the parameters, which holds on one machine only.
"""

import hashlib
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
PINS = Path(__file__).with_suffix("").with_name("pins.json")
EXACT = os.environ.get("TEST_PINS") == "1"

COMMON = "--env hopper --shift morph --source-size 500 --device cpu"
RUN = f"{COMMON} --updates 20 --eval-episodes 1 --lr 1e-3"
IQL = f"{RUN} --source-batch 8 --target-batch 8 --hidden 16"
DT = f"{RUN} --batch 8 --K 4 --layers 1 --width 16"
TAF_DT = (
    f"{RUN} --layers 1 --heads 2 --width 16 --hidden 16 --cvae-hidden 16 --M 2 --target-batch 8 --label-updates 20 "
    "--command-updates 20 --cvae-updates 20"
)
COMMANDS = {  # name of the pin: command line
    "taf_preprocess paper": f"taf_preprocess.py {COMMON}",
    "taf_preprocess released": f"taf_preprocess.py {COMMON} --preset released",
    "taf_dt paper": f"taf_dt.py {TAF_DT} --label-batch 8 --cvae-batch 8",
    "taf_dt released": f"baselines/taf_dt_released.py {TAF_DT} --cql 0.1 --candidates 4",
    "bc": f"baselines/bc.py {RUN} --batch 8 --hidden 16",
    "bc source share": f"baselines/bc.py {RUN} --batch 8 --hidden 16 --source-share 0.5",
    "dadt": f"baselines/dadt.py {DT}",
    "dara": f"baselines/dara.py {IQL}",
    "dt": f"baselines/dt.py {DT}",
    "igdf": f"baselines/igdf.py {IQL} --encoder-updates 20 --encoder-dim 8",
    "iql": f"baselines/iql.py {IQL}",
    "otdf": f"baselines/otdf.py {IQL} --cvae-updates 20 --cvae-batch 8 --cvae-hidden 16",
    "qt": f"baselines/qt.py {DT} --heads 2 --hidden 16 --guided never",
}


def write_toy(path: Path, episodes: int, seed: int) -> None:
    """Random walks with the dimensions of hopper; every other episode ends in a failure."""
    rng = np.random.default_rng(seed)
    rows = {key: [] for key in ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")}
    for k in range(episodes):
        n = int(rng.integers(10, 40))
        states = np.array([1.2, *np.zeros(10)]) + 0.1 * rng.standard_normal((n + 1, 11)).cumsum(0)
        actions = rng.uniform(-1, 1, (n, 3))
        last = np.arange(n) == n - 1
        rows["observations"].append(states[:-1])
        rows["next_observations"].append(states[1:])
        rows["actions"].append(actions)
        rows["rewards"].append(1 + states[1:, 0] - np.square(actions).sum(1))
        rows["terminals"].append(last & (k % 2 == 0))
        rows["timeouts"].append(last & (k % 2 == 1))
    with h5py.File(path, "w") as file:
        for key, parts in rows.items():
            column = np.concatenate(parts)
            file[key] = column if column.dtype == bool else column.astype(np.float32)


def start(command: str, source: str, target: str, out: Path) -> None:
    script, *flags = command.split()
    before = sys.argv, sys.path[:]
    threads = torch.get_num_threads()
    sys.argv = [script, *flags, "--source", source, "--target", target, "--out", str(out)]
    torch.set_num_threads(1)  # which sums in one order on every machine, and is faster for tensors of this size
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
        torch.set_num_threads(threads)


def numbers(tensors: list[torch.Tensor]) -> dict:
    arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
    flat = np.concatenate([array.ravel() for array in arrays]).astype(np.float64)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    return {"count": flat.size, "sum": flat.sum(), "squares": flat @ flat, "sha256": digest}


def is_network(state) -> bool:
    return isinstance(state, dict) and bool(state) and all(isinstance(x, torch.Tensor) for x in state.values())


def outcome(out: Path) -> dict:
    """What a script left in its folder, by network, or by array of the preprocessing."""
    found = {}
    for path in out.rglob("ckpt.pt"):
        parts = torch.load(path, map_location="cpu", weights_only=True)["parts"]
        found |= {name: numbers(list(state.values())) for name, state in parts.items() if is_network(state)}
    for path in out.rglob("*.npz"):
        with np.load(path, allow_pickle=False) as file:
            kept = np.flatnonzero(file["gate"])
            inside = file["retained"]
            found["gate"] = {"count": len(kept), "indices": hashlib.sha256(kept.astype("<i8").tobytes()).hexdigest()}
            for name in ("omega", "w"):
                found[name] = numbers([torch.from_numpy(file[name][inside])])
    return found


def measure(name: str, folder: Path) -> dict:
    source, target = folder / "medium.hdf5", folder / "expert.hdf5"
    write_toy(source, episodes=24, seed=1)
    write_toy(target, episodes=8, seed=2)
    start(COMMANDS[name], str(source), str(target), folder / "out")
    return outcome(folder / "out")


@pytest.mark.parametrize("name", COMMANDS)
def test_twenty_updates_give_the_recorded_parameters(name, tmp_path, monkeypatch):
    monkeypatch.setattr("dynashift.gate_report.draw", lambda *_: None)  # it takes longer than the updates
    pinned = json.loads(PINS.read_text())[name]
    found = measure(name, tmp_path)
    assert {part: x["count"] for part, x in found.items()} == {part: x["count"] for part, x in pinned.items()}
    for part, then in pinned.items():
        now = found[part]
        assert now.get("indices") == then.get("indices"), part
        if "sum" in then:
            # A sum of terms with many signs has no scale of its own; this is the largest sum with these squares.
            scale = np.sqrt(then["count"] * then["squares"])
            assert now["sum"] == pytest.approx(then["sum"], rel=0, abs=1e-5 * scale), part
            assert now["squares"] == pytest.approx(then["squares"], rel=1e-5), part
        if EXACT:
            assert now.get("sha256") == then.get("sha256"), part


EMBEDDED = "taf_preprocess.py --env hopper --shift morph --data embedded --device cpu --source-size 1000"


def measure_embedded(folder: Path) -> dict:
    start(EMBEDDED, "medium-expert", "medium", folder / "out")
    return outcome(folder / "out")


@pytest.mark.skipif(not EXACT, reason="generated data are equal to the bit on one machine only; set TEST_PINS=1")
def test_generated_data_are_the_recorded_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNASHIFT_DATA", str(tmp_path / "data"))
    assert measure_embedded(tmp_path) == json.loads(PINS.read_text())["embedded"]


def record() -> None:
    pins = {}
    for name in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            pins[name] = measure(name, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DYNASHIFT_DATA"] = f"{folder}/data"
        pins["embedded"] = measure_embedded(Path(folder))
    PINS.write_text(json.dumps(pins, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: python tests/test_pins.py --record")
    sys.path.insert(0, str(ROOT))
    record()
