"""The behaviour model alone:

    python -m studies.behaviour data/target/hopper_morph_medium_expert.hdf5

L_reg keeps the policy near a model of the target's behaviour, a CVAE. This script trains the model
with several weights of its KL divergence and several L2 penalties, at the sizes of taf_dt.py
--quick (with --no-quick at full size), beside a plain regression, which is its decoder without
latents. Every third episode is held out, from the second on, so that of medium-expert data there is
at least one of each kind. All columns are means over held-out steps, for seeds 1 to --seeds:

    KL           of the latents, in nats: 0 if they say nothing about the action
    error        squared error of the decoder with the latent 0, over the variance of the actions
    log p        log density of the data's actions: importance-weighted bound at variance kl / 4,
                 where the loss is the ELBO; for the regression that of a Gaussian with the variance
                 of the residuals in training
    best         the same at the variance that suits the held-out data best
    L_reg        at the data's actions; then how much higher it is at the regression's actions
                 ("mean"), at actions of other steps ("others") and at uniformly random ones
                 ("random"): near 0 the term penalises nothing
"""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import taf_dt
from dynashift import runs
from dynashift.behaviour import CVAE, behaviour_log_density
from dynashift.datasets import Dataset, read_hdf5
from dynashift.download import task_of
from dynashift.errors import UserError, one_line_errors
from dynashift.files import progress_bar
from dynashift.networks import gradient_step

VARIANCES = tuple(10 ** (-k / 4) for k in range(2, 15))  # 0.3 to 0.0003


def split(target: Dataset) -> tuple[Tensor, Tensor, Tensor]:
    """States [N, d_s], actions [N, d_a], and whether the episode is held out [N]."""
    states = target.observations
    mu, sd = states.mean(0, dtype=np.float64), states.std(0, dtype=np.float64)
    s = torch.as_tensor(taf_dt.normalise(states, mu, sd))
    episode = torch.arange(len(target.lengths)).repeat_interleave(torch.as_tensor(target.lengths))
    return s, torch.as_tensor(target.actions), episode % 3 == 1


def train(args: taf_dt.Args, s: Tensor, a: Tensor) -> CVAE:
    torch.manual_seed(args.run.seed)
    nets = taf_dt.build(args, s.shape[1], a.shape[1], "cpu")
    data = SimpleNamespace(states=s, actions=a, target_rows=torch.arange(len(s)))
    for _ in progress_bar(range(args.cvae_updates), desc=f"KL {args.cvae_kl:g}", unit="update"):
        taf_dt.update_behaviour(nets, data, args)
    return nets["cvae"]


def regression(args: taf_dt.Args, s: Tensor, a: Tensor) -> CVAE:
    """The decoder with the latent 0, without encoder and penalty."""
    torch.manual_seed(args.run.seed)
    net = CVAE(s.shape[1], a.shape[1], args.cvae_hidden)
    adam = torch.optim.Adam(net.decoder.parameters(), lr=args.lr)
    for _ in progress_bar(range(args.cvae_updates), desc="regression", unit="update"):
        rows = torch.randint(len(s), (args.cvae_batch,))
        gradient_step(adam, F.mse_loss(middle(net, s[rows]), a[rows]))
    return net


def middle(net: CVAE, s: Tensor) -> Tensor:
    """Actions for the latent 0."""
    return net.decode(s, s.new_zeros(len(s), net.decoder[0].in_features - s.shape[1]))


def gaussian(error, d_a: int, variance: float):
    """Log density of actions under N(mean, variance), from their squared error per dimension."""
    return -0.5 * d_a * (error / variance + math.log(2 * math.pi * variance))


@torch.no_grad()
def log_likelihood(net: CVAE, s: Tensor, a: Tensor, variances, M: int = 200) -> list[float]:
    """Mean of log p(a | s), from below, for each variance: p is the mean of
    p(a | s, z) p(z) / q(z | s, a) over M latents z of the encoder's q."""
    sums = torch.zeros(len(variances), dtype=torch.float64)
    for s_b, a_b in zip(s.split(256), a.split(256), strict=True):
        posterior = Normal(*net.encode(s_b, a_b))
        z = posterior.sample((M,))  # [M, B, 2 d_a]
        weight = (Normal(0.0, 1.0).log_prob(z) - posterior.log_prob(z)).sum(-1)
        error = (net.decode(s_b.expand(M, *s_b.shape), z) - a_b).square().mean(-1)  # [M, B]
        for i, variance in enumerate(variances):
            density = gaussian(error, a.shape[1], variance)
            sums[i] += ((density + weight).logsumexp(0) - math.log(M)).sum()
    return (sums / len(s)).tolist()


@torch.no_grad()
def regularisers(
    net: CVAE, s: Tensor, actions: list[Tensor], args: taf_dt.Args, M: int = 10
) -> list[float]:
    """Mean L_reg, with 1/M, at each of these actions [N, d_a]."""
    noise = torch.randn(M, len(s), 2 * actions[0].shape[1])
    options = args.variance, args.reg_latents
    found = [behaviour_log_density(net, s, a, noise, *options).mean() for a in actions]
    return [math.log(M) - float(x) for x in found]


@torch.no_grad()
def measure(net: CVAE, plain: CVAE, s: Tensor, a: Tensor, args: taf_dt.Args) -> list[float]:
    """Columns of one model."""
    torch.manual_seed(0)
    kl = kl_divergence(Normal(*net.encode(s, a)), Normal(0.0, 1.0)).sum(-1).mean()
    error = (middle(net, s) - a).square().mean() / a.var(0).mean()
    own, *others = log_likelihood(net, s, a, (args.cvae_kl / 4, *VARIANCES))
    actions = [a, middle(plain, s), a[torch.randperm(len(a))], torch.rand_like(a) * 2 - 1]
    data, *far = regularisers(net, s, actions, args)
    return [float(kl), float(error), own, max(own, *others), data, *[x - data for x in far]]


@torch.no_grad()
def measure_regression(
    plain: CVAE, s: Tensor, a: Tensor, s_train: Tensor, a_train: Tensor
) -> list[float]:
    fitted = float((middle(plain, s_train) - a_train).square().mean())
    error, d_a = float((middle(plain, s) - a).square().mean()), a.shape[1]
    return [
        error / float(a.var(0).mean()),
        gaussian(error, d_a, fitted),
        gaussian(error, d_a, error),
    ]


def study(
    path: Path, args: taf_dt.Args, settings: list[tuple[float, float]], seeds: int
) -> dict[str, list]:
    """Name of a model -> its columns, each with one number per seed."""
    s, a, held = split(read_hdf5(path, args.task.env, args.task.shift))
    if not held.any():
        raise UserError(f"{path}: has one episode only, so that none can be held out")
    seen, test, found = (s[~held], a[~held]), (s[held], a[held]), {}
    for seed in range(1, seeds + 1):
        args = runs.replace(args, seed=seed)
        plain = regression(args, *seen)
        found.setdefault("regression", []).append(measure_regression(plain, *test, *seen))
        for kl, decay in settings:
            changed = runs.replace(args, cvae_kl=kl, cvae_decay=decay)
            numbers = measure(train(changed, *seen), plain, *test, changed)
            found.setdefault(f"KL {kl:g}, L2 {decay:g}", []).append(numbers)
    return {name: list(zip(*numbers, strict=True)) for name, numbers in found.items()}


def main(
    files: tyro.conf.Positional[tuple[Path, ...]],
    kl: tuple[float, ...] = (0.5, 0.1, 0.03, 0.01),
    penalties: tuple[float, ...] = (0.0,),
    updates: tuple[int, ...] = (10_000,),
    seeds: int = 1,
    quick: bool = True,
) -> None:
    """
    Args:
        files: target data, with the task in the name.
        kl: weights of the KL divergence.
        penalties: L2 penalties, each with all these weights.
        updates: lengths of training.
        seeds: models of each kind.
        quick: the sizes and the learning rate of taf_dt.py --quick.
    """
    print("| file | model | updates | KL | error | log p | best | L_reg | mean | others | random |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for path in files:
        env, shift, _ = task_of(path) or ("", "", "")
        if not shift or shift == "none":
            raise UserError(f"{path}: its name tells no task, such as hopper_morph_medium.hdf5")
        chosen = runs.compose(taf_dt.Args, env=env, shift=shift, quick=quick)
        args = runs.plain(taf_dt.Args, taf_dt.defaults, chosen)
        for n in updates:
            settings = [(x, y) for y in penalties for x in kl]
            changed = runs.replace(args, cvae_updates=n)
            for name, columns in study(path, changed, settings, seeds).items():
                cells = [", ".join(f"{x:.3f}" for x in column) for column in columns]
                if name == "regression":
                    cells = ["", *cells, "", "", "", ""]
                print(f"| {' | '.join([path.stem, name, f'{n:,}', *cells])} |", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__)
