"""Speed of gate and weights beside their references.

    python benchmarks/bench_preprocess.py hopper_medium-v2.hdf5 hopper_morph_medium.hdf5
    python benchmarks/bench_preprocess.py ant_medium-v2.hdf5 ant_morph_medium.hdf5 --env ant \\
        --only full

Full size is 1,000,000 source transitions. With fewer, the report says so, and the problem of
500,000 rows draws some of them more than once. Each part runs in its own process (on Linux), so
that the peak memory is its own, and what the process held before is subtracted.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from dynashift.errors import one_line_errors  # noqa: E402
from dynashift.progress import peak_memory  # noqa: E402

Part = Literal["mmd", "pot", "ours", "large", "full"]


def pair(source: Path, target: Path, env: str, n: int):
    """Features [n, d] and [M, d] of an OT problem."""
    import taf_preprocess as taf
    from dynashift.datasets import read_hdf5

    source, target = read_hdf5(source, env), read_hdf5(target, env)
    rows = np.sort(np.random.default_rng(0).choice(len(source), n, replace=n > len(source)))
    x, y = taf.transition_features(source, rows), taf.transition_features(target, slice(None))
    del source, target
    peak_memory()  # resets the peak: reading the files must not hide the solver's
    return x, y


def part_pot(source, target, env, n=20_000):
    """Dense float64 ot.sinkhorn, to its default error of 1e-9."""
    import ot

    x, y = pair(source, target, env, n)
    before, start = peak_memory(), time.perf_counter()
    x, y = x.astype(float), y.astype(float)
    C = 1 - x @ y.T / (np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1) + 1e-8)
    P, log = ot.sinkhorn(ot.unif(n), ot.unif(len(y)), C / C.max(), 0.1, numItermax=10_000, log=True)
    P /= P.sum(1, keepdims=True)
    P *= C
    c = P.sum(1)
    seconds = time.perf_counter() - start
    return {"c": c, "seconds": seconds, "MB": peak_memory() - before, "passes": log["niter"]}


def part_ours(source, target, env, n=20_000):
    from dynashift import fast_ot

    x, y = pair(source, target, env, n)
    before, start = peak_memory(), time.perf_counter()
    c, info = fast_ot.row_costs(x, y)
    seconds = time.perf_counter() - start
    return {"c": c, "seconds": seconds, "MB": peak_memory() - before, "passes": info["passes"]}


def part_large(source, target, env):
    return part_ours(source, target, env, 500_000) | {"c": np.zeros(0)}


def part_mmd(source, target, env, n=20_000):
    import torch

    import taf_preprocess as taf
    from dynashift import fast_mmd
    from dynashift.datasets import read_hdf5

    source, target = read_hdf5(source, env).first(n), read_hdf5(target, env)
    mu = target.observations.mean(0, dtype=np.float64)
    sd = target.observations.std(0, dtype=np.float64)
    z_s, z_t = (taf.normalise(data.observations, mu, sd) for data in (source, target))
    K, gamma = 5, taf.bandwidth(z_s, z_t, "wide")
    pairs = ((z_s, source), (z_t, target))
    domains = [(z, data.lengths, taf.fragment_lengths(data.lengths, K)) for z, data in pairs]
    rounds, M, n = [], len(target), len(source)
    for _ in range(3):  # in turn, so that a busy moment of the machine affects all of them
        start = time.perf_counter()
        d, _ = fast_mmd.fragment_scores(*domains, K, gamma)
        ours = time.perf_counter() - start
        # What cannot be avoided is one exponential for each pair of states: here as one would write
        # it, 500 rows at a time, ...
        some, start = torch.full((500, M), -1.0), time.perf_counter()
        for _ in range(0, n, 500):
            torch.exp2(some)
        bare = time.perf_counter() - start

        def in_place(rows):  # ... and here in the fastest way there is, within each core's cache
            block, out = torch.full((2, 256, 512), -1.0)
            for _ in range(0, M, 512):
                torch.exp2(block, out=out)

        def passes(rows):  # every pair also needs a product of states and a square root
            left, right, out = torch.ones(256, 13), torch.ones(13, 512), torch.empty(256, 512)
            for _ in range(0, M, 512):
                torch.mm(left, right, out=out).exp2_().sqrt_()

        laps = [time.perf_counter()]
        for form in (in_place, passes):
            list(fast_mmd.in_blocks(form, n, 256, "cpu", None))
            laps.append(time.perf_counter())
        rounds.append((ours, bare, *np.diff(laps)))

    begins = [np.flatnonzero(l_i) for _, _, l_i in domains]
    row, start = np.random.default_rng(0).choice(begins[0]), time.perf_counter()
    fragment = z_s[row : row + domains[0][2][row]]
    others = [z_t[i : i + domains[1][2][i]] for i in begins[1]]
    (loop,) = taf.fragment_scores([fragment], others, gamma)
    per_pair = (time.perf_counter() - start) / len(others)
    ours, bare, cached, floor = np.median(rounds, 0)
    ratios = np.median([(o / b, o / c, o / f) for o, b, c, f in rounds], 0)
    return {
        "c": np.zeros(0), "n": n, "M": M,
        "ours": ours, "bare": bare, "cached": cached, "floor": floor, "ratios": ratios.tolist(),
        "loop": per_pair * n * M, "error": abs(d[row] / loop - 1),
    }  # fmt: skip


def part_full(source, target, env):
    """The whole script at 1,000,000 x 5,000."""
    with tempfile.TemporaryDirectory() as out:
        script = [sys.executable, str(ROOT / "taf_preprocess.py"), "--env", env, "--out", out]
        command = [*script, "--source", source, "--target", target]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        with np.load(next(Path(out).glob("*.npz"))) as file:
            meta = json.loads(str(file["meta"]))
    memory = max(stage["peak_memory_mb"] for stage in meta["stages"].values())
    n = meta["source"]["transitions"]
    return {"c": np.zeros(0), "seconds": seconds, "MB": memory, "n": n} | meta["report"]


def measure(part: str, *arguments) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"BENCH_RESULT": f"{folder}/result.npz"}
        command = [sys.executable, __file__, *map(str, arguments), "--only", part]
        subprocess.run(command, check=True, env=environ)
        with np.load(f"{folder}/result.npz") as file:
            return json.loads(str(file["rest"])) | {"c": file["c"]}


def report(what: str, bar: str, value: str, met: bool) -> None:
    print(f"{what:62} bar {bar:22} measured {value:28} {'met' if met else 'MISSED'}", flush=True)


def report_mmd(r: dict) -> None:
    times = f"{r['ours']:.2f} s; pair by pair {r['loop']:.0f} s (extrapolated); "
    times += f"exponentials {r['bare']:.2f} s as torch.exp2(x), {r['cached']:.2f} s within cache"
    print(f"MMD, {r['n']} x {r['M']}, K = 5: {times}")
    gain = r["loop"] / r["ours"]
    report("MMD against a loop over pairs", ">= 100x", f"{gain:.0f}x", gain >= 100)
    error = r["error"]
    report("MMD, relative difference to the loop", "<= 1e-5", f"{error:.1e}", error <= 1e-5)
    work = "the product, the exponential and the square root of every pair, within cache"
    print(f"  {work}: {r['floor']:.2f} s")
    plain, cached, floor = r["ratios"]
    report("MMD against bare exponentials, torch.exp2(x)", "<= 3x", f"{plain:.2f}x", plain <= 3)
    report("MMD against bare exponentials, within cache", "<= 3x", f"{cached:.2f}x", cached <= 3)
    print(f"  MMD against product, exponential and square root, within cache: {floor:.2f}x")


def report_ot(pot: dict, ours: dict) -> None:
    times = f"POT {pot['seconds']:.1f} s, {pot['passes']} iterations; ours {ours['seconds']:.1f} s"
    print(f"OT, 20000 rows: {times}")
    ratio = ours["seconds"] / pot["seconds"]
    report("OT 20,000: time against POT's ot.sinkhorn", "<= 1x", f"{ratio:.2f}x", ratio <= 1)
    share = ours["MB"] / pot["MB"]
    value = f"{share:.2f}x ({ours['MB']:.0f} MB)"
    report("OT 20,000: memory against POT", "<= 0.2x", value, share <= 0.2)
    error = np.abs(ours["c"] / pot["c"] - 1).max()
    what = "OT 20,000: relative difference of the row costs"
    report(what, "<= 1e-5", f"{error:.1e}", error <= 1e-5)


def main(source: Path, target: Path, /, env: str = "hopper", only: Part | None = None) -> None:
    """Measure.

    Args:
        source: source data in D4RL's layout, best with 1,000,000 transitions
        target: target data
        env: robot
        only: one part
    """
    if out := os.environ.pop("BENCH_RESULT", None):  # inside the process of one part
        result = globals()[f"part_{only}"](source, target, env)
        c = result.pop("c")
        np.savez(out, c=c, rest=json.dumps(result, default=float))
        return
    arguments = (source, target, "--env", env)
    if only in (None, "mmd"):
        report_mmd(measure("mmd", *arguments))
    if only in (None, "pot", "ours"):
        report_ot(measure("pot", *arguments), measure("ours", *arguments))
    if only in (None, "large"):
        r = measure("large", *arguments)
        value = f"{r['seconds']:.0f} s, {r['passes']} full passes"
        report("OT 500,000: time", "<= 120 s (hopper)", value, r["seconds"] <= 120)
        report("OT 500,000: memory", "bounded", f"{r['MB']:.0f} MB", r["MB"] < 3000)
    if only in (None, "full"):
        r = measure("full", *arguments)
        whole = f"whole script, {r['n']:,}"
        minutes = r["seconds"] / 60
        bar = {"hopper": 6}.get(env, 10)
        report(f"{whole}: time", f"<= {bar} min", f"{minutes:.1f} min", minutes <= bar)
        memory = f"{r['MB']:.0f} MB"
        report(f"{whole}: resident memory", "<= 3000 MB", memory, r["MB"] <= 3000)


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main)
