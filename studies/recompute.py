"""Run published results again, each from its command at its commit:

    python -m studies.recompute --data FOLDER --number 2

FOLDER has the published target files in target/ and D4RL's medium files, from whose policies the
source data are rolled out again, in d4rl_medium/. On the same kind of processor, a repeated run
agrees in every return of every evaluation. On another kind it is only another run of its setting.
"""

import itertools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

from dynashift.errors import UserError, one_line_errors
from dynashift.results import read_result
from studies.table import RESULTS

ROOT = RESULTS.parent
COMMANDS = RESULTS / "published" / "commands.txt"


def given(line: str) -> tuple[str, dict]:
    """(method, arguments) of a command line: those that it names.

    As they were typed, without the script's own parser, because the runs were made with the flags
    and the defaults of the commit that their result.json names.
    """
    _, name, *words = shlex.split(line)
    values = {}
    for flag, word in itertools.pairwise([*words, "--"]):
        if not flag.startswith("--"):
            continue
        key = flag.removeprefix("--").replace("-", "_")
        if not word.startswith("--"):
            try:
                values[key] = json.loads(word)
            except ValueError:
                values[key] = word
        elif key.startswith("no_"):
            values[key.removeprefix("no_")] = False
        else:
            values[key] = True
    return Path(name).stem, values


def command_of(raw: dict, commands: list[tuple[str, dict]]) -> int | None:
    """Which command names what this run changed, and most of its arguments, none with another
    value."""
    fits = [
        i
        for i, (method, args) in enumerate(commands)
        if method == raw["method"] and all(raw["args"].get(k) == v for k, v in args.items())
    ]
    changed = raw["changed"].keys()
    return max(
        fits,
        key=lambda i: (changed <= commands[i][1].keys(), len(commands[i][1])),
        default=None,
    )


def has_commit(commit: str) -> bool:
    ask = ["git", "-C", ROOT, "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(ask, capture_output=True).returncode == 0


def again(raw: dict, line: str, data: Path, folder: Path) -> dict:
    """The result of this run, from its command, in a new clone of its commit in this folder."""

    def call(*words, cwd=folder):
        threads = raw["device"].split(", ")[-1].split()[0]
        env = os.environ | {"OMP_NUM_THREADS": threads, "HOME": str(folder)}
        done = subprocess.run([*map(str, words)], cwd=cwd, env=env, text=True, capture_output=True)
        if done.returncode:
            raise UserError(f"{shlex.join(map(str, words))} failed: {done.stderr[-500:]}")

    call("git", "clone", "-q", "--no-checkout", "--shared", ROOT, folder, cwd=ROOT)
    call("git", "checkout", "-q", raw["versions"]["commit"])
    shutil.copytree(data / "target", folder / "data" / "target")
    if "source" in raw["data"]:
        env = raw["args"]["env"]
        (policy,) = (data / "d4rl_medium").glob(f"{env}_medium-v2*.hdf5")
        out = Path("data", env, "medium.hdf5")
        (folder / out).parent.mkdir()
        words = ["rollout", "--policy", policy, "--env", env, "--steps", 1_000_000, "--out", out]
        call(sys.executable, "collect.py", *words)
    call(sys.executable, *shlex.split(line)[1:])
    (found,) = folder.glob("*/*/*/seed*/result.json")  # of this one run
    return json.loads(found.read_bytes())


def main(data: Path, number: int = 2, seed: int | None = None) -> list[tuple[dict, dict]]:
    """Published and repeated results of some runs, drawn at random. data: folder of the data.
    number: how many. seed: of the draw."""
    lines = COMMANDS.read_text().splitlines()
    commands = [given(line) for line in lines]
    runs = [read_result(path) for path in sorted(COMMANDS.parent.rglob("result.json"))]
    runs = [raw for raw in runs if has_commit(raw["versions"]["commit"])]
    if not runs:
        raise UserError("no commit of a published run is here; clone the whole history")
    pairs = []
    for raw in random.Random(seed).sample(runs, min(number, len(runs))):
        line = lines[command_of(raw, commands)]
        print(f"{raw['versions']['commit'][:7]}: {line}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = again(raw, line, data.resolve(), Path(folder, "clone"))
        scores = [x["evaluations"][-1]["score"] for x in (raw, found)]
        print(f"published {scores[0]!r}, now {scores[1]!r}", flush=True)
        pairs.append((raw, found))
    return pairs


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
