"""What trained policies do:  python results/policy.py runs/taf_dt/*/*  (where the runs' commands were given)

For each finished run of taf_dt.py: L_DT on target windows, on target windows with the steps of another one, and on
retained source windows, each over the variance of the actions; size of the gradients of the three terms of Eq. (28),
each with its coefficient, on one batch; mean and largest Q on target transitions, beside the discounted return that
follows them in the data; and scores of the same ten episodes with greedy actions, with critic-guided ones, with the
command held at -1, 0 and 1, and with command networks trained anew for other expectiles zeta (the policy does not
depend on them).
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import torch
import tyro
from scipy.signal import lfilter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import taf_dt
from dynashift.datasets import load_task

HEAD = ["run", "L_DT target", "other steps", "L_DT source", "gradient of L_DT", "of L_reg", "of L_Q", "Q mean, largest"]
HEAD += ["return", "greedy", "guided", "command -1", "0", "1", "zeta 0.5", "0.7", "0.98"]


def load(folder: Path):
    """Arguments, networks, data and gate of a finished run."""
    raw = json.loads((folder / "result.json").read_bytes())
    paths = {f.name for f in dataclasses.fields(taf_dt.Args) if "Path" in str(f.type)}
    args = taf_dt.Args(**{k: Path(v) if k in paths and v else v for k, v in raw["args"].items()})
    source, target = load_task(args)
    with np.load(raw["preprocess"], allow_pickle=False) as file:
        pre = dict(file)
    data = taf_dt.fuse(source, target, pre, args, "cpu")
    nets = taf_dt.build(args, data.states.shape[1], data.actions.shape[1], "cpu")
    saved = torch.load(folder / "ckpt.pt", map_location="cpu", weights_only=True)["parts"]
    for name, part in nets.items():
        part.load_state_dict(saved[name])
    return args, nets, data._replace(tokens=taf_dt.label(nets, data, args)[0]), pre, target


def discounted(target, gamma: float) -> np.ndarray:
    """Discounted return from every step to the end of the data's episode."""
    parts = np.split(target.rewards.astype(np.float64), target.starts[1:])
    return np.concatenate([lfilter([1], [1, -gamma], part[::-1])[::-1] for part in parts])


def imitation(nets: dict, data: taf_dt.Data, starts: torch.Tensor, K: int, shift: int = 0) -> float:
    """Squared error of the actions on windows that begin at these rows, over their variance. shift: the policy is told
    the steps of the window so many places on, which is another."""
    b = taf_dt.windows(data, taf_dt.uniform(starts, 1024), K)
    with torch.no_grad():
        pi, _ = nets["policy"].eval()(b.tokens, b.states, b.actions, b.steps.roll(shift, 0), b.valid)
    return float(taf_dt.dt_loss(b.actions, pi, b.valid.float()) / b.actions[b.valid].var(0).mean())


def gradients(nets: dict, data: taf_dt.Data, args: taf_dt.Args) -> list[float]:
    """Norms, over the policy's parameters, of the gradients of L_DT, eta_reg L_reg and alpha L_Q."""
    B_s = taf_dt.source_batch(args.target_batch, args.beta)
    b = taf_dt.sample_windows(data, B_s, args.target_batch, args.K, args.source_weighting)
    rows = b.valid.numel() if args.reg_positions == "all" else len(b.valid)
    noise, weights = torch.randn(args.M, rows, 2 * b.actions.shape[-1]), list(nets["policy"].parameters())
    _, terms = taf_dt.policy_loss(nets, b, noise, args)
    sizes = []
    for name, factor in (("dt", 1.0), ("reg", args.eta_reg), ("q_term", args.alpha)):
        found = torch.autograd.grad(factor * terms[name], weights, retain_graph=True, allow_unused=True)
        sizes.append(float(torch.stack([g.norm() for g in found if g is not None]).norm()))
    return sizes


def line(folder: Path, guided: bool) -> str:
    torch.manual_seed(0)
    args, nets, data, pre, target = load(folder)
    domains = (data.starts_t, 0), (data.starts_t, 1), (data.starts_s, 0)
    errors = [imitation(nets, data, starts, args.K, shift) for starts, shift in domains]
    cells = [f"{folder.parent.name} {folder.name}"] + [f"{x:.3f}" for x in errors]
    cells += [f"{x:.2f}" for x in gradients(nets, data, args)]
    with torch.no_grad():
        q = nets["critics"](data.states[data.starts_t], data.actions[data.starts_t]).mean(0)
    cells += [f"{q.mean():.0f}, {q.max():.0f}", f"{discounted(target, args.gamma).mean():.0f}"]

    def score(**more):
        return f"{taf_dt.evaluate(nets, pre, args, taf_dt.eval_seed(args), **more)['score']:.1f}"

    cells += [score(), score(guided=True) if guided else ""]
    for command in (-1.0, 0.0, 1.0):
        nets["command"] = lambda s, c=command: s.new_full((1, len(s)), c)
        cells.append(score())
    for zeta in (0.5, 0.7, 0.98):
        fresh = taf_dt.build(args, data.states.shape[1], data.actions.shape[1], "cpu")
        nets |= {name: fresh[name] for name in ("command", "adam_command")}
        for _ in range(args.command_updates):
            taf_dt.update_command(nets, data, dataclasses.replace(args, zeta=zeta))
        cells.append(score())
    return f"| {' | '.join(cells)} |"


def main(folders: tyro.conf.Positional[list[Path]], guided: bool = True) -> None:
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|", flush=True)
    for folder in folders:
        if (folder / "result.json").exists():
            print(line(folder, guided), flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
