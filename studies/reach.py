"""How far a change of the fused law reaches into what is learned:

    python -m studies.reach runs/taf_dt/*/*      (in the folder in which the runs were started)

Any two finished runs of taf_dt.py on one task are compared on the target's own states: by the
advantages that they give to the target's transitions (rank correlation), and by the actions that
their policies take there (root mean square of the difference, over the spread of the data's
actions). The table has the means over pairs that differ in the seed alone, in the filter alone, and
in whether there is source data at all (--beta 0). A filter that reaches no further than another
seed cannot be seen in a score.
"""

import itertools
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import tyro
from scipy.stats import spearmanr

import taf_dt
from dynashift.errors import one_line_errors
from dynashift.files import progress_bar
from studies.policy import load
from studies.table import markdown

KINDS = {"seed": "another seed", "filter": "another filter", "source": "no source"}


class Learnt(NamedTuple):
    task: str
    settings: dict  # seed, filter and source, of which two runs are compared in one alone
    advantages: np.ndarray  # [N_t]
    actions: np.ndarray  # [n, d_a] of the policy, at the last step of every target window
    spread: float  # root mean square deviation of the data's actions


@torch.no_grad()
def learnt(folder: Path) -> Learnt:
    args, nets, data, _, _ = load(folder)
    s, a = data.states[data.target_rows], data.actions[data.target_rows]
    advantages = taf_dt.advantage(nets["Q"](s, a), nets["V"](s))  # [N_t]
    # Full windows, so that every context is one that the robot meets while it runs.
    full = data.target_rows[data.left[data.target_rows] >= args.gate.K]
    b = taf_dt.windows(data, full, args.gate.K)
    b = b._replace(tokens=nets["command"](b.states)[0])
    actions = nets["policy"].eval()(b, only_last=True)[:, 0]
    settings = {
        "seed": args.run.seed,
        "filter": args.gate.filter if args.beta else "",
        "source": args.beta > 0,
    }
    task = f"{args.task.env} {args.task.shift} {Path(args.task.target).stem}"
    spread = float((a - a.mean(0)).square().mean().sqrt())
    return Learnt(task, settings, advantages.numpy(), actions.numpy(), spread)


def differs_in(a: Learnt, b: Learnt) -> str | None:
    """The kind of a pair, if it is one of the three."""
    names = {name for name in KINDS if a.settings[name] != b.settings[name]}
    if names == {"source", "filter"}:  # without source data, there is no filter
        with_source = a if a.settings["source"] else b
        return "source" if with_source.settings["filter"] == "both" else None
    return names.pop() if len(names) == 1 else None


def compare(found: list[Learnt]) -> dict:
    """(task, kind) -> [rank correlation, distance of the actions] of each pair"""
    pairs = defaultdict(list)
    for a, b in itertools.combinations(found, 2):
        kind = differs_in(a, b) if a.task == b.task else None
        if kind:
            rank = float(spearmanr(a.advantages, b.advantages)[0])
            distance = float(np.sqrt(np.mean((a.actions - b.actions) ** 2))) / a.spread
            pairs[a.task, kind].append((rank, distance))
    return pairs


def table(pairs: dict) -> str:
    head = ["task"]
    head += [f"{what}, {kind}" for what in ("advantages", "actions") for kind in KINDS.values()]
    rows = []
    for task in dict.fromkeys(task for task, _ in pairs):
        means = {kind: np.mean(pairs[task, kind], 0) for kind in KINDS if (task, kind) in pairs}
        cells = [f"{means[kind][i]:.2f}" if kind in means else "" for i in (0, 1) for kind in KINDS]
        rows.append([task, *cells])
    return markdown(head, rows)


def main(folders: tyro.conf.Positional[list[Path]]) -> None:
    finished = [folder for folder in folders if (folder / "result.json").exists()]
    if not finished:
        raise SystemExit("none of these is the folder of a finished run")
    print(table(compare([learnt(folder) for folder in progress_bar(finished, unit="run")])))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
