"""The .npz files of taf_preprocess.py: their names, reading and writing."""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from dynashift import gate_report
from dynashift.checkpoints import versions
from dynashift.errors import UserError
from dynashift.files import read_npz, say, slug, write_npz
from dynashift.progress import clock

ARRAYS = ("d_m", "gate", "retained", "c_hat", "c_tilde", "omega", "w", "mu", "sd")
ARRAYS += ("mu_source", "sd_source", "meta")


def path_of(out: Path, task, gate, version: int, source, target) -> Path:
    """The file of exactly these data, flags and version of the code."""
    asked = dataclasses.asdict(gate) | {"version": version}
    asked |= {"inputs": [[data.sha256, len(data)] for data in (source, target)]}
    asked |= {"env": task.env, "shift": task.shift}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    name = "-".join([task.env, task.shift, Path(task.source).stem, Path(task.target).stem, digest])
    return out / f"{slug(name)}.npz"


def read(path: Path) -> dict | None:
    """What the file holds; None if it is not there, is damaged, or lacks an array."""
    if not path.exists():
        return None
    try:
        arrays = read_npz(path, *ARRAYS)
        return arrays | {"meta": json.loads(str(arrays["meta"])), "path": path}
    except (OSError, ValueError) as error:
        print(f"note: {path} is damaged ({error}) and is computed again", file=sys.stderr)
        return None


def write(path: Path, arrays: dict, meta: dict, source, target) -> dict:
    """Write the file and its figure, and return what `read` would find in the file."""
    meta = meta | {"source": source.provenance, "target": target.provenance, "versions": versions()}
    text = json.dumps(meta, default=str)
    write_npz(path, meta=np.array(text), **arrays)
    seconds = clock(sum(stage["seconds"] for stage in meta["stages"].values()))
    say(f"gate and weights: {arrays['retained'].sum():,} retained, done in {seconds}")
    gate_report.draw(path.with_suffix(".png"), meta, arrays, source, target)
    return arrays | {"meta": json.loads(text), "path": path}


def refuse_unusable(gate, **datasets) -> None:
    """Refuse datasets that cannot be gated and weighted as these arguments of the gate ask."""
    for name, data in datasets.items():
        if gate.filter in ("both", "mmd") and data.lengths.max() < gate.K:
            raise UserError(f"every {name} episode is shorter than K = {gate.K}; lower --K")
        for column in ("observations", "actions", "rewards", "next_observations"):
            if not np.isfinite(getattr(data, column)).all():
                raise UserError(f"the {name} data hold NaN or infinite {column}; drop those rows")
