"""Jumps at stitch junctions (Fig. fig:jumps): how much a policy's action, its value and the
temporal-difference residual change where a window passes from one domain to the other.

The training scripts measure this twenty times with --diagnostics. The windows are a validation
set: always the same ones, half of them from source to target and half back, and as many that stay
in their episode.
"""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

import taf_dt
from dynashift import runs
from dynashift.datasets import Dataset
from dynashift.errors import UserError
from dynashift.files import read_npz
from dynashift.windows import gather
from taf_preprocess import normalise


def junction_pool(data, K: int, size: int = 1024, candidates: int = 256) -> dict[str, Tensor]:
    """Rows [size, K] of windows that change domain in the middle, and of as many that do not.

    data: anything with states [N, d_s], left [N], and source_starts and target_rows.
    """
    rng = torch.Generator().manual_seed(0)
    half = math.ceil(K / 2)
    states, left = data.states.cpu(), data.left.cpu()
    S, T = (x.cpu()[left[x.cpu()] > K] for x in (data.source_starts, data.target_rows))
    if len(S) == 0 or len(T) == 0:
        raise UserError(f"no episode is longer than K = {K}, so nothing can be stitched; lower --K")
    pool = {"stitched": [], "unstitched": []}
    for one, other in ((S, T), (T, S)):
        i = one[torch.randint(len(one), (size // 2,), generator=rng)]
        j = other[torch.randint(len(other), (size // 2, candidates), generator=rng)]
        # The second half begins with the state that is nearest to what would have come next.
        nearest = (states[j] - states[i + half][:, None]).square().sum(-1).argmin(1)
        j = j[torch.arange(len(j)), nearest]
        steps = torch.arange(K)
        rows = torch.where(steps < half, i[:, None] + steps, j[:, None] + steps - half)
        pool["stitched"].append(rows)
        pool["unstitched"].append(i[:, None] + steps)
    return {name: torch.cat(rows).to(data.states.device) for name, rows in pool.items()}


@torch.no_grad()
def measure(nets: dict, data, pool: dict[str, Tensor], gamma: float) -> dict:
    """J_a, J_Q and TD of taf_dt's policy on the windows of a pool, {pool: {metric: value}}."""
    nets["policy"].eval()
    found = {}
    for name, rows in pool.items():
        t = math.ceil(rows.shape[1] / 2)  # t*: the first step after the junction
        valid = torch.ones_like(rows, dtype=torch.bool)
        b = taf_dt.Batch(**gather(data, taf_dt.Batch._fields, rows, valid))
        # Definition [unlabelled, "junction metrics J_a, J_Q, TD"]
        pi = nets["policy"](b)  # [P, K, d_a]
        end = data.next_states[rows[:, -1:]]
        v = nets["V"](torch.cat([b.states, end], 1)).mean(0)  # [P, K + 1]
        td = b.rewards + gamma * v[:, 1:] - v[:, :-1]  # [P, K]
        q = nets["Q"](b.states, pi).mean(0)  # [P, K]
        own = nets["critics"](b.states, pi).amin(0)  # [P, K]
        values = {
            "J_a": (pi[:, t] - pi[:, t - 1]).norm(dim=-1),
            "J_Q": (q[:, t] - q[:, t - 1]).abs(),
            "J_Q_own": (own[:, t] - own[:, t - 1]).abs(),
            "TD": td[:, max(0, t - 2) : t + 3].abs(),
        }
        found[name] = {metric: float(x.mean()) for metric, x in values.items()}
    nets["policy"].train()
    return found


def reference_pool(
    states: Tensor, left: Tensor, K: int, folder: Path | None, source: Dataset, target: Dataset
) -> dict:
    """The pools for a baseline with these states [N, d_s] and steps left [N].

    Windows and critics are those of the finished taf_dt run in `folder`, so that all methods are
    measured in the same way. Each pool has rows [P, K] and, if there is a folder, Q, s and TD.
    """
    device = states.device
    N_s = len(source)
    rows = torch.arange(len(left), device=device)
    view = SimpleNamespace(
        states=states, left=left, source_starts=rows[:N_s], target_rows=rows[N_s:]
    )
    if folder is None:
        return {name: {"rows": found} for name, found in junction_pool(view, K).items()}
    V, Q, gate, mu, sd, gamma = read_reference(folder, source, target, device)

    def both(column):
        return np.concatenate([getattr(source, column), getattr(target, column)])

    view.states = torch.as_tensor(normalise(both("observations"), mu, sd), device=device)
    view.source_starts = torch.as_tensor(np.flatnonzero(gate), device=device)
    rewards = torch.as_tensor(both("rewards"), device=device)
    after = both("next_observations")
    t = math.ceil(K / 2)
    pool = {}
    for name, rows in junction_pool(view, K).items():
        s = view.states[rows]  # [P, K, d_s]
        end = normalise(after[rows[:, -1].cpu()], mu, sd)
        end = torch.as_tensor(end, device=device)[:, None]
        with torch.no_grad():
            v = V(torch.cat([s, end], 1)).mean(0)  # [P, K + 1]
        td = (rewards[rows] + gamma * v[:, 1:] - v[:, :-1]).abs()  # [P, K]
        td = td[:, max(0, t - 2) : t + 3].mean().item()
        pool[name] = {"rows": rows, "Q": Q, "s": s, "TD": td}
    return pool


def read_reference(folder: Path, source: Dataset, target: Dataset, device) -> tuple:
    """V, Q, gate, mu, sd and gamma of a finished taf_dt run on these data."""
    try:
        result = runs.read_result(folder / "result.json")
        args = result["args"]
        path = folder.resolve().parents[2] / "preprocess" / Path(result["preprocess"]).name
        saved = runs.read_checkpoint(folder / "ckpt.pt", device)["parts"]
        pre = read_npz(path, "gate", "mu", "sd")
        gate, mu, sd = pre["gate"], pre["mu"], pre["sd"]
        same = saved["record"]["sha256"] == [source.sha256, target.sha256]
        if not same or len(gate) != len(source) or args["state_norm"] != "target":
            raise ValueError("that run had other data, or states of another form")
        d_s, d_a = source.observations.shape[1], source.actions.shape[1]
        V = taf_dt.TwinMLP(d_s, args["hidden"]).to(device)
        Q = taf_dt.TwinMLP(d_s + d_a, args["hidden"]).to(device)
        V.load_state_dict(saved["V"])
        Q.load_state_dict(saved["Q"])
    except Exception as error:  # torch and zipfile have many for a file that is damaged
        reason = str(error).split(";")[0]
        raise UserError(
            f"--reference {folder}: not a finished run on these data: {reason}"
        ) from None
    return V, Q, gate, mu, sd, args["gamma"]
