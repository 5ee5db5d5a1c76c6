"""What trained policies do:

    python -m studies.policy runs/taf_dt/*/*      (in the folder in which the runs were started)

For each finished run of taf_dt.py, the first table has
- L_DT on target windows, on target windows with the steps of another one, and on retained source
  windows, each divided by the variance of the actions;
- the norms of the gradients of the three terms of Eq. (28), each with its coefficient, on one
  batch;
- the behaviour model's own error on the target's actions, with the latent 0, and the divergence of
  its latents from their prior;
- the mean and the largest Q on target transitions, beside the discounted return that follows them
  in the data.

The second table has scores of the same ten episodes with greedy actions, with those of the
behaviour model, with the command held at -1, 0 and 1, and with command
networks that are trained again for other expectiles zeta (the policy does not depend on them).
"""

from pathlib import Path

import numpy as np
import torch
import tyro
from scipy.signal import lfilter
from torch.distributions import Normal, kl_divergence

import taf_dt
from dynashift import runs
from dynashift.behaviour import CVAE
from dynashift.datasets import load_task
from dynashift.errors import one_line_errors
from dynashift.files import progress_bar, read_npz
from experiments import scripts

LEARNT = [
    "run",
    "L_DT target",
    "other steps",
    "L_DT source",
    "gradient of L_DT",
    "of L_reg",
    "of L_Q",
]
LEARNT += ["CVAE's error", "its KL", "Q mean, largest", "return"]
SCORES = ["run", "greedy", "CVAE alone", "command -1", "0", "1", "zeta 0.5", "0.7", "0.98"]


def load(folder: Path):
    """Arguments, networks, data and gate of a finished run."""
    raw = runs.read_result(folder / "result.json")
    args = runs.compose(taf_dt.Args, **scripts.from_json(raw["args"]))
    source, target = load_task(args.task)
    pre = read_npz(raw["preprocess"])
    data = taf_dt.fuse(source, target, pre, args, "cpu")
    nets = taf_dt.build(args, data.states.shape[1], data.actions.shape[1], "cpu")
    saved = runs.read_checkpoint(folder / "ckpt.pt")["parts"]
    for name, part in nets.items():
        part.load_state_dict(saved[name])
    if args.token == "advantage":
        data, _ = taf_dt.relabel(nets, data, args)
    return args, nets, data, pre, target


def discounted(target, gamma: float) -> np.ndarray:
    """Discounted return from every step to the end of the data's episode."""
    parts = np.split(target.rewards.astype(np.float64), target.starts[1:])
    return np.concatenate([lfilter([1], [1, -gamma], part[::-1])[::-1] for part in parts])


def imitation(nets: dict, data: taf_dt.Data, starts: torch.Tensor, K: int, shift: int = 0) -> float:
    """Squared error of the actions on windows that begin at these rows, over their variance. shift:
    give the policy the steps of another window, which is this many places further on."""
    b = taf_dt.windows(data, taf_dt.uniform(starts, 1024), K)
    with torch.no_grad():
        pi = nets["policy"].eval()(b._replace(steps=b.steps.roll(shift, 0)))
    return float(taf_dt.dt_loss(b.actions, pi, b.valid.float()) / b.actions[b.valid].var(0).mean())


def gradients(nets: dict, data: taf_dt.Data, args: taf_dt.Args) -> list[float]:
    """Norms of the gradients of L_DT, eta_reg L_reg and alpha L_Q in the policy's parameters."""
    b = taf_dt.sample_windows(data, args)
    noise, weights = (
        torch.randn(args.M, b.valid.numel(), 2 * b.actions.shape[-1]),
        list(nets["policy"].parameters()),
    )
    _, logs = taf_dt.policy_loss(nets, b, noise, args)
    guidance = taf_dt.q_term(nets["critics"](b.states, nets["policy"](b)).amin(0), b.weight)
    sizes = []
    for term in (logs["losses/dt"], args.eta_reg * logs["losses/reg"], args.alpha * guidance):
        found = torch.autograd.grad(term, weights, retain_graph=True)
        sizes.append(float(torch.stack([g.norm() for g in found]).norm()))
    return sizes


@torch.no_grad()
def behaviour(cvae: CVAE, s: torch.Tensor, a: torch.Tensor) -> tuple[float, float]:
    """Squared error of the actions that the decoder has for the latent 0, over their variance, and
    the mean divergence of a latent from its prior: 0 if it says nothing about the action.
    s [N, d_s], a [N, d_a]"""
    mean, std = cvae.encode(s, a)
    error = (cvae.decode(s, torch.zeros_like(mean)) - a).square().mean() / a.var(0).mean()
    return float(error), float(kl_divergence(Normal(mean, std), Normal(0.0, 1.0)).mean())


def decoder(cvae: CVAE, mu: np.ndarray, sd: np.ndarray):
    """The behaviour model as a policy: observations [n, d_s] -> actions [n, d_a], with the latent
    0."""

    @torch.no_grad()
    def act(obs, rewards, alive):
        s = torch.as_tensor(taf_dt.normalise(obs, mu, sd))
        return cvae.decode(s, s.new_zeros(len(s), cvae.decoder[0].in_features - s.shape[1])).numpy()

    return act


def rows(folder: Path) -> tuple[list[str], list[str]]:
    """Cells of both tables."""
    torch.manual_seed(0)
    args, nets, data, pre, target = load(folder)
    name = f"{folder.parent.name} {folder.name}"
    domains = (data.target_rows, 0), (data.target_rows, 1), (data.source_starts, 0)
    learnt = [name] + [
        f"{imitation(nets, data, starts, args.gate.K, shift):.3f}" for starts, shift in domains
    ]
    learnt += [f"{x:.2f}" for x in gradients(nets, data, args)]
    s, a = data.states[data.target_rows], data.actions[data.target_rows]
    learnt += [f"{x:.3f}" for x in behaviour(nets["cvae"], s, a)]
    with torch.no_grad():
        q = nets["critics"](s, a).mean(0)
    learnt += [f"{q.mean():.0f}, {q.max():.0f}", f"{discounted(target, args.gamma).mean():.0f}"]

    agent = taf_dt.Agent(nets, pre, args, args.run.eval_episodes)

    def score():
        return f"{taf_dt.evaluate(agent, args)['score']:.1f}"

    alone = runs.play(args, decoder(nets["cvae"], pre["mu"], pre["sd"]))["score"]
    scores = [name, score(), f"{alone:.1f}"]
    for command in (-1.0, 0.0, 1.0):
        nets["command"] = lambda s, c=command: s.new_full((1, len(s)), c)
        scores.append(score())
    for zeta in (0.5, 0.7, 0.98):
        fresh = taf_dt.build(args, data.states.shape[1], data.actions.shape[1], "cpu")
        nets |= {name: fresh[name] for name in ("command", "adam_command")}
        for _ in range(args.command_updates):
            taf_dt.update_command(nets, data, runs.replace(args, zeta=zeta))
        scores.append(score())
    return learnt, scores


def main(folders: tyro.conf.Positional[list[Path]]) -> None:
    finished = [folder for folder in folders if (folder / "result.json").exists()]
    if not finished:
        raise SystemExit("none of these is the folder of a finished run")
    found = [rows(folder) for folder in progress_bar(finished, unit="run")]
    for head, lines in zip((LEARNT, SCORES), zip(*found, strict=True), strict=True):
        print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
        print("".join(f"| {' | '.join(cells)} |\n" for cells in lines))


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
