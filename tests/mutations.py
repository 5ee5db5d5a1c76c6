"""Random damage to every kind of file that is read back: python tests/mutations.py 1000

Each mutation must be refused in one line, or be noticed and the file made again, or leave what is read unchanged.
Anything else counts as silent (wrong content was accepted), traceback or crash, and the exit status is 1.
tests/test_mutations.py runs a sample of it.
"""

import contextlib
import io
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import h5py
import numpy as np
import torch
import tyro

from dynashift import (
    checkpoints,
    checksums,
    datasets,
    download,
    files,
    gate_files,
    generated,
    policies,
    run_record,
    runs,
    transitions,
)
from dynashift.errors import UserError, one_line_errors
from experiments import slurm
from experiments.commands import Command, digest, read_commands, write_commands
from experiments.slurm import Array
from experiments.state import Outcome, State, read_json

BAD = ("silent", "traceback", "crash")


# ------------------------------------------------------------------------------------------------- mutations


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One of the things that happen to files: bits, bytes, blocks, lengths, and edits by hand."""
    out, n = bytearray(data), len(data)
    i, j = sorted(rng.randrange(n) for _ in range(2))
    j = min(j, i + rng.choice([1, 4, 64, 512, 4096]))
    digits = [k for k in range(n) if 48 <= data[k] <= 57] if n < 50_000 else []
    kind = rng.choice(["bit", "bit", "bit", "byte", "digit", "digit", "zero", "cut", "grow", "drop", "twice", "swap"])
    if kind == "bit" or (kind == "digit" and not digits):
        out[i] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        out[i] = rng.randrange(256)
    elif kind == "digit":
        out[rng.choice(digits)] = 48 + rng.randrange(10)
    elif kind == "zero":
        out[i:j] = bytes(j - i)
    elif kind == "cut":
        del out[i:]
    elif kind == "grow":
        out += rng.randbytes(rng.choice([1, 100, 5000]))
    elif kind == "drop":
        del out[i:j]
    elif kind == "twice":
        out[i:i] = out[i:j]
    elif kind == "swap":
        out[i:j] = out[i:j][::-1]
    return bytes(out)


# ----------------------------------------------------------------------------------------------- what is read


def plain(x):
    """Something that == compares bit by bit, NaN included."""
    if isinstance(x, torch.Tensor):
        x = x.numpy()
    if isinstance(x, np.ndarray):
        return x.dtype.str, x.shape, x.tobytes()
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return [plain(value) for value in x] if isinstance(x, list | tuple) else repr(x)


def toy(n: int = 60) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(n + 1, 11)).astype("f")
    data = {"observations": obs[:-1], "next_observations": obs[1:], "rewards": rng.normal(size=n).astype("f")}
    data |= {"actions": rng.uniform(-1, 1, (n, 3)).astype("f"), "terminals": np.arange(n) % 20 == 19}
    return data | {"timeouts": np.arange(n) == n + 1}


def world(folder: Path) -> dict:
    """kind -> (path, read). read returns what a script would continue with, or None if it makes the file again."""
    evaluations = [{"step": s, "returns": [1.5, 2.25], "lengths": [7, 9], "score": s + 0.125} for s in (8, 9, 10)]
    run_record.write_result(folder / "run", {"lr": 1e-3, "seed": 1}, evaluations, {"policy": {"seconds": 3.5}}, {})
    torch.manual_seed(0)
    net, rng = torch.nn.Linear(30, 30), np.random.default_rng(1)
    parts = {"net": net, "adam": torch.optim.Adam(net.parameters()), "rng": rng}
    net(torch.ones(30)).sum().backward()
    parts["adam"].step()
    runs.save_checkpoint(folder / "run" / "ckpt.pt", {**parts, "record": {"done": {"policy": 8}, "sha256": ["a"]}})
    arguments = {"lr": 1e-3, "seed": 1, "shift": "morph", "widths": [64, 64]}
    checkpoints.write_json(folder / "run" / "args.json", arguments)
    arrays = {name: np.random.default_rng(2).normal(size=50) for name in gate_files.ARRAYS if name != "meta"}
    files.write_npz(folder / "gate.npz", meta=np.array(json.dumps({"report": {"retained": 50}})), **arrays)
    about = {"env": "hopper", "shift": "none", "quality": "medium", "seed": 0, "policies": ["a", "b"]}
    checksums.write_hdf5(folder / "embedded.hdf5", toy(), "embedded", about)
    checksums.write_hdf5(folder / "made.hdf5", toy(), "own", about)
    with h5py.File(folder / "own.hdf5", "w") as file:
        for key, value in toy().items():
            file.create_dataset(key, data=value, compression="gzip", chunks=True)
    (folder / "hopper_medium-v2.hdf5").write_bytes((folder / "own.hdf5").read_bytes())
    known = {"bytes": 0, "sha256": checksums.identify(folder / "own.hdf5")[1]}
    download.PUBLISHED["hopper_medium-v2.hdf5"] = known
    own = known["sha256"]
    policy = policies.FOLDER / "hopper-none-medium.npz"
    (folder / "policy.npz").write_bytes(policy.read_bytes())

    def columns(dataset):
        return dataset and {key: getattr(dataset, key) for key in (*transitions.COLUMNS, "kind", "env", "quality")}

    def read_own(path):
        """Another hash means other data, which a run refuses because its record has the hash it began with."""
        dataset = datasets.read_hdf5(path, "hopper")
        return columns(dataset) if dataset.sha256 == own else None

    def read_checkpoint(path):
        fresh = torch.nn.Linear(30, 30)
        again = {"net": fresh, "adam": torch.optim.Adam(fresh.parameters()), "rng": np.random.default_rng(5)}
        saved = runs.load_checkpoint(path, again)
        states = [again["net"].state_dict(), again["adam"].state_dict(), again["rng"].bit_generator.state]
        return [saved["record"], *states, torch.get_rng_state(), random.getstate()]

    def read_args(path):
        with runs.reading(path.parent, arguments):
            return runs.read_json(path)

    def read_lock(path):
        with runs.session(path.parent, arguments):
            return "the folder is ours, whatever an earlier process left there"

    (folder / "run" / ".lock").write_text("123 on a machine")
    state, command = State(folder / "runs"), Command(("bc.py", "--seed", "1", "--out", "a b"))
    state.record(command, Outcome("done", str(command), 12.5, 0, str(folder / "run" / "result.json")))
    arrays = {"71": asdict(Array("run_all-2-00000000.txt", 2)), "72": asdict(Array("x.txt", 1))}
    files.write_json(state.folder / "jobs.json", arrays)
    files.write_json(state.folder / "measured.json", {"bc, K None": {"policy": 0.125, "evaluation": 3.5}})
    listed = write_commands([command, Command(("taf_dt.py", "--seed", "2"), after=command.name)])
    submitted = state.folder / f"run_all-1-{digest(listed)}.txt"
    submitted.write_text(listed)
    return {
        "outcome": (state.folder / f"{command.name}.json", lambda path: state.outcome(command.name)),
        "queue": (state.folder / "jobs.json", lambda path: slurm.arrays(state) or None),
        "rates": (state.folder / "measured.json", lambda path: read_json(path) or None),
        "commands": (submitted, read_commands),
        "lock": (folder / "run" / ".lock", read_lock),
        "result": (folder / "run" / "result.json", runs.read_result),
        "arguments": (folder / "run" / "args.json", read_args),
        "checkpoint": (folder / "run" / "ckpt.pt", read_checkpoint),
        "gate": (folder / "gate.npz", gate_files.read),
        "cached data": (folder / "embedded.hdf5", lambda path: columns(generated._cached(path, about, 60))),
        "generated data": (folder / "made.hdf5", lambda path: columns(datasets.read_hdf5(path, "hopper"))),
        "published data": (folder / "hopper_medium-v2.hdf5", lambda path: columns(datasets.read_hdf5(path, "hopper"))),
        "own data": (folder / "own.hdf5", read_own),
        "policy": (folder / "policy.npz", lambda path: policies.load_policy(path, "hopper")._asdict()),
    }


def verdict(path: Path, read, good, damaged: bytes) -> str:
    path.write_bytes(damaged)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            found = read(path)
    except UserError as error:
        return "refused" if "\n" not in str(error) and len(str(error)) < 1000 else "traceback"
    except Exception:
        return "traceback"
    if found is None:
        return "made again" if said.getvalue().count("\n") <= 1 else "traceback"
    return "unchanged" if plain(found) == good else "silent"


def work(connection, folder: Path, first: int, count: int, seed: int) -> None:
    """Send (case, kind, verdict) of the cases from the first one on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # of HDF5, which writes there
    kinds = world(folder)
    intact = {kind: path.read_bytes() for kind, (path, _) in kinds.items()}
    good = {kind: plain(read(path)) for kind, (path, read) in kinds.items()}
    for case in range(first, count):
        rng = random.Random(f"{seed} {case}")
        kind = list(kinds)[case % len(kinds)]
        path, read = kinds[kind]
        damaged = mutate(intact[kind], rng)
        connection.send((case, kind, None))
        connection.send((case, kind, verdict(path, read, good[kind], damaged)))
        path.write_bytes(intact[kind])


def run(count: int, seed: int = 0) -> list[tuple[int, str, str]]:
    """(case, kind, verdict) of each, found in a separate process, because a damaged HDF5 file may crash the library."""
    found, first, context = [], 0, multiprocessing.get_context("fork")
    while first < count:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = context.Pipe(False)
            process = context.Process(target=work, args=(theirs, Path(folder), first, count, seed))
            process.start()
            theirs.close()
            last = None
            with contextlib.suppress(EOFError):
                while True:
                    last = ours.recv()
                    if last[2]:
                        found.append(last)
            process.join()
        if process.exitcode and last is None:
            raise RuntimeError("the undamaged files could not be made and read")
        if last[2] is None:
            found.append((last[0], last[1], "crash"))
        first = last[0] + 1
    return found


def main(count: tyro.conf.Positional[int] = 1000, seed: int = 0) -> None:
    found = run(count, seed)
    table, names = Counter((kind, what) for _, kind, what in found), ["refused", "made again", "unchanged", *BAD]
    print(f"{'kind':16}" + "".join(f"{name:>12}" for name in names))
    for kind in dict.fromkeys(kind for _, kind, _ in found):
        print(f"{kind:16}" + "".join(f"{table[kind, name]:12}" for name in names))
    print(f"{'all':16}" + "".join(f"{sum(what == name for _, _, what in found):12}" for name in names))
    for case, kind, what in found:
        if what in BAD:
            print(f"case {case} of seed {seed}: {kind}, {what}")
    sys.exit(any(what in BAD for _, _, what in found))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
