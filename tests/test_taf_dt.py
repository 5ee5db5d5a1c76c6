"""The parts of taf_dt.py: losses, windows, sampler, Transformer, agent, one update of every stage.
Whole runs are in test_taf_dt_runs.py. The reference implementations here are loops over plain numbers.
"""

import contextlib
import itertools
import math
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributions

import taf_dt as taf
from benchmarks.operations import operations
from dynashift import evaluation, faster, runs
from dynashift.behaviour import CVAE, behaviour_log_density, cvae_loss
from dynashift.datasets import Dataset
from dynashift.errors import UserError
from dynashift.fast_dropout import dropout
from dynashift.optimise import gradient_step
from studies import junctions

TINY = dict(width=16, heads=2, layers=2, hidden=8, cvae_hidden=8, K=3, dropout=0.0, target_batch=16, label_batch=16)
TINY |= dict(cvae_batch=16, eta_reg=0.5, return_target=100.0, device="cpu", eval_episodes=2, M=3)


def arguments(**changes) -> taf.Args:
    return runs.compose(taf.Args, **{**TINY, **changes})


def toy(lengths, failures=(), seed=0, d=3, a=2, first_row=0, **columns) -> Dataset:
    """Random episodes. The first entry of an action is the number of its row."""
    rng, n, end = np.random.default_rng(seed), sum(lengths), np.zeros(sum(lengths), bool)
    end[np.cumsum(lengths) - 1] = True
    terminals = np.zeros(n, bool)
    terminals[np.cumsum(lengths)[list(failures)] - 1] = True
    actions = rng.uniform(-1, 1, (n, a))
    actions[:, 0] = first_row + np.arange(n)
    data = dict(observations=rng.normal(size=(n, d)), next_observations=rng.normal(size=(n, d)), actions=actions)
    data = {k: np.asarray(v, np.float32) for k, v in (data | {"rewards": rng.normal(size=n)} | columns).items()}
    return Dataset("hopper", "morph", "toy", "own", "toy", "00", terminals=terminals, timeouts=end & ~terminals, **data)


def support(data: Dataset, begins, K: int) -> np.ndarray:
    """The rows inside the windows of at most K steps that begin where `begins` is true."""
    left = np.repeat(data.lengths, data.lengths) - data.steps
    inside = np.zeros(len(data), bool)
    for i in np.flatnonzero(begins):
        inside[i : i + min(K, left[i])] = True
    return inside


def preprocessed(source: Dataset, gate=None, d=3, seed=0, eta_w=1.0, K=3) -> dict:
    """What taf_preprocess.preprocess returns, for any gate [N_s]; costs are random."""
    n, rng = len(source), np.random.default_rng(seed)
    gate = np.ones(n, bool) if gate is None else gate
    retained = support(source, gate, K)
    c = np.where(retained, rng.uniform(size=n), np.nan)
    omega = np.exp(-eta_w * c)
    pre = {"gate": gate, "retained": retained, "d_m": rng.uniform(size=n)}
    pre |= {"c_tilde": c, "omega": omega, "w": omega / np.nansum(omega)}
    return pre | {"mu": np.full(d, 0.1), "sd": np.full(d, 0.7), "mu_source": np.zeros(d), "sd_source": np.ones(d)}


LENGTHS_S, LENGTHS_T = (9, 4, 12, 2, 7), (8, 3, 10)
N_S, N_T = sum(LENGTHS_S), sum(LENGTHS_T)


def small(args=None, gate=None, seed=0):
    """(Data, pre) of two small datasets, of whose episodes some fail and some run into the time limit."""
    source = toy(LENGTHS_S, failures=(0, 3), seed=seed)
    target = toy(LENGTHS_T, failures=(1,), seed=seed + 100, first_row=N_S)
    if gate is None:
        gate = np.random.default_rng(seed + 7).uniform(size=N_S) < 0.3
    args = args or arguments()
    pre = preprocessed(source, gate, seed=seed, K=args.gate.K)
    return taf.fuse(source, target, pre, args, "cpu"), pre, source, target


def tensor(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


def build(args, d_s=3, d_a=2, seed=0):
    torch.manual_seed(seed)
    return taf.build(args, d_s, d_a, "cpu")


def shake(*networks):
    """Weights of order one, unlike at the start of training, where attention is nearly even."""
    for network in networks:
        for parameter in network.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)


def policy_stage(nets, data, args, step) -> dict:
    """Lines 8 to 11 of Algorithm 1, as in the loop of `train`."""
    taf.set_learning_rate(nets, ("critics", "policy"), args, step, args.updates)
    logs = taf.update_actor_critic(nets, data, args)
    taf.update_target_policy(nets, args, step)
    return logs


# ------------------------------------------------------------------------------------- losses, by hand


def test_losses_by_hand():
    assert taf.expectile(tensor([2.0, -2.0]), 0.9).tolist() == pytest.approx([3.6, 0.4])
    assert taf.weighted_mean(tensor([1.0, 5.0]), tensor([3.0, 1.0])).item() == 2
    y = taf.value_target(tensor([1.0, 2.0]), torch.tensor([False, True]), tensor([[3.0, 5.0], [4.0, 1.0]]), 0.5)
    assert y.tolist() == [2.5, 2.0]
    y = tensor([1.0, 3.0])
    assert taf.value_loss(y, tensor([[0.0, 4.0], [1.0, 1.0]]), 0.8).item() == pytest.approx(0.5 + 1.6)
    assert taf.action_value_loss(y, tensor([[0.0, 3.0], [1.0, 1.0]])).item() == pytest.approx(0.25 + 1.0)
    assert taf.advantage(tensor([[1.0, 2.0], [3.0, 4.0]]), tensor([[0.0, 1.0], [1.0, 1.0]])).tolist() == [1.5, 2.0]
    assert taf.standardise(tensor([3.0]), tensor(1.0), tensor(2.0)).item() == pytest.approx(1)
    assert taf.command_loss(tensor([1.0, -1.0]), tensor([0.0, 0.0]), 0.98).item() == pytest.approx(0.5)
    mean, std = tensor([[1.0, 0.0]]), tensor([[1.0, math.e]])
    kl = (0.5 + (math.e**2 - 1) / 2 - 1) / 2
    loss = cvae_loss(tensor([[0.0, 1.0]]), tensor([[0.5, 1.0]]), mean, std, 0.5)
    assert loss.item() == pytest.approx(0.125 + 0.5 * kl)
    a, pi = tensor([[[0.0, 0.0], [1.0, 1.0]]]), tensor([[[1.0, 0.0], [1.0, 3.0]]])
    assert taf.dt_loss(a, pi, tensor([[1.0, 3.0]])).item() == pytest.approx((0.5 + 3 * 2) / 4)


def test_k_step_target_and_critic_loss_by_hand():
    r, q_last = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([8.0])
    goes_on, failed = torch.tensor([[False, False, False]]), torch.tensor([[False, False, True]])
    assert taf.k_step_target(r, goes_on, q_last, 0.5).tolist() == [[4.0, 6.0, 8.0]]
    assert taf.k_step_target(r, failed, q_last, 0.5).tolist() == [[3.0, 4.0, 4.0]]
    assert taf.critic_weight(tensor([[0.5, 1.0, 2.0]]), failed).tolist() == [[0.5, 1.0, 2.0]]
    weight = taf.critic_weight(tensor([[0.5, 1.0, 2.0]]), goes_on)
    assert weight.tolist() == [[0.5, 1.0, 0.0]]
    q = tensor([[[4.0, 6.0, 0.0]], [[3.0, 6.0, 0.0]]])
    assert taf.critic_loss(q, tensor([[4.0, 6.0, 8.0]]), weight).item() == pytest.approx(0.5 / 1.5)


def test_q_term_by_hand():
    q, weight = tensor([[1.0, -4.0]]).requires_grad_(), tensor([[1.0, 1.0]])
    term = taf.q_term(q, weight)
    assert term.item() == pytest.approx(1.5 / 2.5)
    (gradient,) = torch.autograd.grad(term, q)  # the normaliser is a constant
    assert gradient.flatten().tolist() == pytest.approx([-1 / 5, -1 / 5])
    assert taf.q_term(q, tensor([[3.0, 1.0]])).item() == pytest.approx(-(3 - 4) / (3 + 4))


def test_behaviour_density_by_hand():
    cvae = CVAE(3, 2, 8).double()
    for parameter in cvae.decoder[-1].parameters():
        parameter.data.zero_()  # a_m = 0, whatever the latent
    a = tensor([[0.3, -0.4]])
    found = behaviour_log_density(cvae, tensor([[1.0, 2.0, 3.0]]), a, torch.randn(10, 1, 4).double(), 0.1, "prior")
    assert found.item() == pytest.approx(math.log(10) - 0.25 / 0.2 - math.log(2 * math.pi * 0.1))


# ----------------------------------------------------------------------------- losses, against loops and NumPy


def loop_expectile(u, zeta):
    return np.abs(zeta - (np.asarray(u) < 0)) * np.asarray(u) ** 2


@pytest.mark.parametrize("seed", range(10))
def test_losses_against_numpy(seed):
    rng = np.random.default_rng(seed)
    B, zeta = int(rng.integers(1, 9)), float(rng.uniform(0.05, 0.95))
    y, r, c = rng.normal(size=(3, B)) * 3
    q, v = rng.normal(size=(2, 2, B)) * 3
    terminal = rng.uniform(size=B) < 0.3
    close = dict(rel=1e-6, abs=1e-7)
    found = taf.value_target(tensor(r), torch.tensor(terminal), tensor(v), 0.97)
    assert found.tolist() == pytest.approx([r[i] + 0.97 * (not terminal[i]) * min(v[:, i]) for i in range(B)], **close)
    found = taf.value_loss(tensor(y), tensor(v), zeta)
    assert found.item() == pytest.approx(sum(loop_expectile(y - v[h], zeta).mean() for h in (0, 1)), **close)
    found = taf.action_value_loss(tensor(y), tensor(q))
    half = [((y - q[h]) ** 2 / 2).mean() for h in (0, 1)]
    assert found.item() == pytest.approx(sum(half), **close)
    assert taf.advantage(tensor(q), tensor(v)).tolist() == pytest.approx((q.mean(0) - v.mean(0)).tolist(), **close)
    found = taf.standardise(tensor(y), tensor(y.mean()), tensor(2.5)).tolist()
    assert found == pytest.approx(((y - y.mean()) / 2.5).tolist(), rel=1e-6, abs=1e-7)
    found = taf.command_loss(tensor(y), tensor(c), zeta).item()
    assert found == pytest.approx(loop_expectile(y - c, zeta).mean(), **close)
    a, a_hat = rng.normal(size=(2, B, 2))
    mean, std = rng.normal(size=(B, 4)), np.exp(rng.normal(size=(B, 4)))
    normal = distributions.Normal(tensor(mean), tensor(std))
    kl = distributions.kl_divergence(normal, distributions.Normal(tensor(0.0), tensor(1.0))).mean().item()
    found = cvae_loss(tensor(a), tensor(a_hat), tensor(mean), tensor(std), 0.3).item()
    assert found == pytest.approx(((a - a_hat) ** 2).mean() + 0.3 * kl, **close)


@pytest.mark.parametrize("seed", range(5))
def test_window_losses_against_numpy(seed):
    rng = np.random.default_rng(seed)
    B, K, d = (int(n) for n in rng.integers(1, 6, 3))
    a, pi = rng.normal(size=(2, B, K, d))
    q, q_hat = rng.normal(size=(2, B, K)), rng.normal(size=(B, K))
    weight = rng.uniform(size=(B, K)) + 1e-3
    found = taf.dt_loss(tensor(a), tensor(pi), tensor(weight)).item()
    terms = [weight[i, j] * np.mean((a[i, j] - pi[i, j]) ** 2) for i in range(B) for j in range(K)]
    assert found == pytest.approx(sum(terms) / weight.sum())
    found = taf.critic_loss(tensor(q), tensor(q_hat), tensor(weight)).item()
    terms = [weight[i, j] * (q[h, i, j] - q_hat[i, j]) ** 2 for h in (0, 1) for i in range(B) for j in range(K)]
    assert found == pytest.approx(sum(terms) / weight.sum())
    smaller = q.min(0)
    wanted = -(smaller * weight).sum() / (np.abs(smaller) * weight).sum()
    assert taf.q_term(tensor(smaller), tensor(weight)).item() == pytest.approx(wanted)


@pytest.mark.parametrize("latents", ["prior", "posterior"])
@pytest.mark.parametrize("seed", range(3))
def test_behaviour_density_against_torch_distributions(seed, latents):
    torch.manual_seed(seed)
    M, B, d_s, d_a = 5, 7, 3, 2
    cvae, s, a = CVAE(d_s, d_a, 16).double(), torch.randn(B, d_s).double(), torch.rand(B, d_a).double() * 2 - 1
    noise, variance = torch.randn(M, B, 2 * d_a).double(), 0.05
    found = behaviour_log_density(cvae, s, a, noise, variance, latents)
    mean, std = cvae.encode(s, a) if latents == "posterior" else (torch.zeros(B, 2 * d_a), torch.ones(B, 2 * d_a))
    assert mean.shape == std.shape == (B, 2 * d_a)
    means = torch.stack([cvae.decode(s, mean + std * noise[m]) for m in range(M)], 1)  # [B, M, d_a]
    parts = distributions.Independent(distributions.Normal(means, math.sqrt(variance)), 1)
    mixture = distributions.MixtureSameFamily(distributions.Categorical(torch.ones(B, M)), parts)
    torch.testing.assert_close(found, mixture.log_prob(a) + math.log(M), check_dtype=False, rtol=1e-6, atol=1e-6)


def test_cvae_loss_is_the_elbo_where_its_noise_has_a_quarter_of_the_weight():
    """-ELBO of N(a_hat, variance) and the prior N(0, 1), over d_a / (2 variance), but for a constant."""
    torch.manual_seed(0)
    a, a_hat = torch.randn(2, 6, 3).double()
    mean, std, variance = torch.randn(6, 6).double(), torch.rand(6, 6).double() + 0.1, 0.025
    prior = distributions.Independent(distributions.Normal(torch.zeros(6), torch.ones(6)), 1)
    posterior = distributions.Independent(distributions.Normal(mean, std), 1)
    noise = distributions.Normal(torch.zeros(3).double(), math.sqrt(variance))
    log_density = (noise.log_prob(a - a_hat) - noise.log_prob(torch.zeros(3))).sum(-1)
    elbo = (log_density - distributions.kl_divergence(posterior, prior)).mean()
    assert cvae_loss(a, a_hat, mean, std, 4 * variance).item() == pytest.approx(-elbo.item() * 2 * variance / 3)


def two_modes(args, *latents: str, half: float = 0.3, n: int = 1_000):
    """A CVAE trained on a = +-half, whatever the state: its KL, and for each kind of latents L_reg at both modes, at
    their mean and at 1. Its variance is 0.02, because two Gaussians of the default 0.1 at +-0.3 have one maximum, in
    the middle."""
    torch.manual_seed(1)
    s, a = torch.randn(n, 3), half * (2.0 * torch.randint(2, (n, 1)) - 1)
    nets = taf.build(args, 3, 1, "cpu")
    data = SimpleNamespace(states=s, actions=a, target_rows=torch.arange(n))
    for _ in range(args.cvae_updates):
        taf.update_behaviour(nets, data, args)
    with torch.no_grad():
        mean, std = nets["cvae"].encode(s, a)
        kl = distributions.kl_divergence(distributions.Normal(mean, std), distributions.Normal(0.0, 1.0)).sum(-1).mean()
        noise, density = torch.randn(10, n, 2), behaviour_log_density
        at = [torch.full_like(a, x) for x in (-half, half, 0.0, 1.0)]
        reg = [[-density(nets["cvae"], s, x, noise, 0.02, kind).mean().item() for x in at] for kind in latents]
        return kl.item(), *reg


def test_the_behaviour_model_keeps_two_modes_apart():
    """Modes at +-0.3 have the variance 0.09. Latents tell them apart if that of the noise, kl / 4, is smaller."""
    sizes = dict(cvae_hidden=32, cvae_batch=128, cvae_updates=1_000, lr=2e-3)
    kl, (left, right, between, outside), (*_, blind) = two_modes(arguments(**sizes), "prior", "posterior")
    assert max(left, right) < between - 0.1
    assert outside > between + 1  # nor is it flat
    assert kl > 0.5  # log 2 = 0.69 nats tell which mode it is
    # Latents of the posterior are encoded from the action itself: they rebuild it as far as they can, wherever it
    # lies, and so the penalty hardly grows off the data.
    assert blind < outside - 0.5
    released = dict(cvae_kl=0.5, cvae_decay=1e-4)
    kl, (left, right, between, _) = two_modes(arguments(**released, **sizes), "posterior")
    assert between < min(left, right) - 0.1  # pulled to the mean, which the data never show
    assert kl < 0.01


def test_the_cvae_s_spread_is_clamped():
    cvae = CVAE(3, 2, 8)
    for value, wanted in ((-99.0, math.exp(-4)), (99.0, math.exp(15))):
        torch.nn.init.constant_(cvae.encoder[-1].bias, value)
        _, std = cvae.encode(torch.zeros(1, 3), torch.zeros(1, 2))
        assert std.max().item() == pytest.approx(wanted, rel=1e-5)


WRONG = {
    "weighted_mean": lambda B: taf.weighted_mean(torch.ones(B), torch.ones(B, 1)),
    "value_target": lambda B: taf.value_target(torch.ones(B, 1), torch.zeros(B).bool(), torch.ones(2, B), 0.9),
    "value_loss": lambda B: taf.value_loss(torch.ones(B, 1), torch.ones(2, B), 0.5),
    "action_value_loss, q": lambda B: taf.action_value_loss(torch.ones(B), torch.ones(2, B, 1)),
    "action_value_loss, y": lambda B: taf.action_value_loss(torch.ones(B, 1), torch.ones(2, B)),
    "advantage": lambda B: taf.advantage(torch.ones(2, B, 1), torch.ones(2, B)),
    "command_loss": lambda B: taf.command_loss(torch.ones(B), torch.ones(B, 1), 0.5),
    "critic_loss, q": lambda B: taf.critic_loss(torch.ones(2, B, 4, 1), torch.ones(B, 4), torch.ones(B, 4)),
    "critic_loss, weight": lambda B: taf.critic_loss(torch.ones(2, B, 4), torch.ones(B, 4), torch.ones(B, 1)),
    "dt_loss": lambda B: taf.dt_loss(torch.ones(B, 4, 3), torch.ones(B, 4, 1), torch.ones(B, 4)),
    "dt_loss, weight": lambda B: taf.dt_loss(torch.ones(B, 4, 3), torch.ones(B, 4, 3), torch.ones(B, 4, 1)),
    "q_term": lambda B: taf.q_term(torch.ones(B, 4), torch.ones(B, 4, 1)),
}


@pytest.mark.parametrize("B", [2, 5])
@pytest.mark.parametrize("name", WRONG)
def test_a_column_against_a_row_is_refused(name, B):
    with pytest.raises((AssertionError, RuntimeError)):
        WRONG[name](B)


def episode_of(data, row):
    """Rows from `row` to the end of its episode."""
    return range(row, row + int(data.left[row]))


@pytest.mark.parametrize("K", [1, 2, 3, 6])
def test_k_step_target_against_a_plain_loop_over_episodes(K):
    """From the datasets, not from the batch: failures, time limits, windows cut by an episode's end."""
    data, _, source, target = small(arguments(K=K), gate=np.ones(N_S, bool))
    r = np.concatenate([source.rewards, target.rewards]).astype(float)
    failed = np.concatenate([source.terminals, target.terminals])
    timeouts = np.concatenate([source.timeouts, target.timeouts])
    assert (failed.sum(), timeouts.sum()) == (3, 5)
    starts = torch.arange(N_S + N_T)
    b = taf.windows(data, starts, K)
    q_last, gamma = torch.randn(len(starts), generator=torch.Generator().manual_seed(0)), 0.9
    q = torch.randn(2, len(starts), K, generator=torch.Generator().manual_seed(1))
    found = taf.k_step_target(b.rewards, b.terminal, q_last, gamma)
    weight = taf.critic_weight(b.weight, b.terminal)
    total = count = 0.0
    for start in range(N_S + N_T):
        rows = list(episode_of(data, start))[:K]
        t, shift = rows[-1], K - len(rows)
        for i in rows:
            target_i = sum(gamma ** (step - i) * r[step] for step in range(i, t))
            target_i += gamma ** (t - i) * (r[t] if failed[t] else q_last[start].item())
            place = shift + i - start
            assert found[start, place].item() == pytest.approx(target_i, rel=1e-5, abs=1e-5)
            if i < t or failed[t]:
                w = data.weight[i].item()
                total += w * sum((q[h, start, place].item() - target_i) ** 2 for h in (0, 1))
                count += w
    assert weight.sum().item() == pytest.approx(count, rel=1e-5)
    assert taf.critic_loss(q, found, weight).item() == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("reg_tokens", ["mix", "target", "all"])
@pytest.mark.parametrize("reg_latents", ["prior", "posterior"])
def test_policy_loss_is_the_sum_of_its_terms(reg_tokens, reg_latents):
    args = arguments(alpha=2.5, eta_reg=0.3, variance=0.2)
    args = runs.replace(args, reg_tokens=reg_tokens, reg_latents=reg_latents)
    data, *_ = small(args)
    nets = build(args)
    b = taf.windows(data, torch.tensor([0, 7, 8, 20, N_S, N_S + 9]), args.gate.K)
    is_source = torch.arange(6) < 4
    noise = torch.randn(args.M, 6 * args.gate.K, 4)
    total, logs = taf.policy_loss(nets, b, noise, args)
    with torch.no_grad():
        pi = nets["policy"](b)
        q = nets["critics"](b.states, pi).numpy().astype(float)
    w, valid = b.weight.numpy().astype(float), b.valid.numpy()
    assert not valid.all()
    dt = (w * ((b.actions - pi).numpy().astype(float) ** 2).mean(-1)).sum() / w.sum()
    q_term = -(w * q.min(0)).sum() / (w * np.abs(q.min(0))).sum()
    density, counts = [], []
    for k, (i, j) in enumerate(np.ndindex(valid.shape)):
        s, a = b.states[i, j], pi[i, j]
        if valid[i, j]:
            mean, std = nets["cvae"].encode(s, a) if reg_latents == "posterior" else (0.0, 1.0)
            means = [nets["cvae"].decode(s, mean + std * noise[m, k]) for m in range(args.M)]
            parts = [distributions.Normal(x, 0.2**0.5).log_prob(a).sum() for x in means]
            density.append(torch.stack(parts).logsumexp(0).item())
            counts.append({"mix": w[i, j], "target": float(not is_source[i]), "all": 1.0}[reg_tokens])
    reg = -np.average(density, weights=counts)
    wanted = {"losses/dt": dt, "losses/reg": reg, "charts/q_policy": np.average(q.min(0), weights=w)}
    wanted["losses/policy"] = dt + 0.3 * reg + 2.5 * q_term
    assert {name: x.item() for name, x in logs.items()} == pytest.approx(wanted, rel=1e-4)
    assert total.item() == pytest.approx(wanted["losses/policy"], rel=1e-4)


# ------------------------------------------------------------------------------------------ windows


def test_windows_are_the_next_steps_of_one_episode_padded_on_the_left():
    args = arguments(K=4)
    data, _, source, target = small(args)
    b = taf.windows(data, torch.arange(N_S + N_T), 4)
    lengths = np.concatenate([np.repeat(d.lengths, d.lengths) - d.steps for d in (source, target)])
    columns = {
        name: np.concatenate([getattr(source, name), getattr(target, name)])
        for name in ("rewards", "actions", "terminals")
    }
    states = np.concatenate([source.observations, (target.observations - 0.1) / (0.7 + 1e-8)]).clip(-10, 10)
    steps = np.concatenate([source.steps, target.steps])
    for start in range(N_S + N_T):
        n = min(4, lengths[start])
        padding, rows = 4 - n, slice(start, start + n)
        assert b.valid[start].tolist() == [False] * padding + [True] * n
        for column in b:
            assert not column[start, :padding].any()
        assert (b.rewards[start, padding:].numpy() == columns["rewards"][rows]).all()
        assert (b.actions[start, padding:].numpy() == columns["actions"][rows]).all()
        assert (b.terminal[start, padding:].numpy() == columns["terminals"][rows]).all()
        assert (b.steps[start, padding:].numpy() == steps[rows]).all()
        np.testing.assert_allclose(b.states[start, padding:], states[rows], rtol=1e-5, atol=1e-6)
    assert (b.weight[N_S:] == b.valid[N_S:].float()).all()


def test_steps_are_clipped_and_time_limits_are_no_failures():
    long = toy((1003,), seed=1)
    data = taf.fuse(long, toy((5,)), preprocessed(long), arguments(), "cpu")
    assert data.steps[:1003].tolist() == [*range(1000), 999, 999, 999]
    assert not data.terminal.any()
    assert not taf.windows(data, torch.tensor([1001, 1005]), 3).terminal.any()


def test_returns_to_go_are_undiscounted_thousands():
    args = arguments(token="rtg")
    data, _, source, target = small(args)
    for d, tokens in ((source, data.tokens[:N_S]), (target, data.tokens[N_S:])):
        for start, length in zip(d.starts, d.lengths, strict=True):
            for i in range(start, start + length):
                wanted = sum(float(r) for r in d.rewards[i : start + length]) / 1000
                assert tokens[i].item() == pytest.approx(wanted, rel=1e-4, abs=1e-7)


# ------------------------------------------------------------------------------------------ sampler


def agree(counts, probabilities):
    """Counts of independent draws: each within five standard deviations."""
    counts, p = np.asarray(counts, float), np.asarray(probabilities, float)
    n = counts.sum()
    assert p.sum() == pytest.approx(1)
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9).all(), (counts / n, p)


def test_transitions_are_drawn_from_the_fused_law():
    args = arguments(eta_w=3.0, label_batch=100_000)
    source, target = toy(LENGTHS_S), toy(LENGTHS_T)
    gate = np.arange(N_S) % 5 == 0
    pre = preprocessed(source, gate, eta_w=3.0)
    inside = support(source, gate, args.gate.K)
    assert gate.sum() < inside.sum() < N_S
    data = taf.fuse(source, target, pre, args, "cpu")
    torch.manual_seed(0)
    rows, B_s = taf.sample_transitions(data, args), 50_000
    assert rows.shape == (150_000,)
    assert (rows[:B_s] < N_S).all()
    assert (rows[B_s:] >= N_S).all()
    agree(np.bincount(rows[B_s:] - N_S, minlength=N_T), np.full(N_T, 1 / N_T))
    law = np.where(inside, pre["w"], 0)
    agree(np.bincount(rows[:B_s], minlength=N_S), law / law.sum())
    assert (taf.sample_transitions(data, runs.replace(args, beta=0.0)) >= N_S).all()


def starts_of(b):
    """The row of a window's first step: the first entry of an action is its row."""
    first = (~b.valid).sum(1)
    return b.actions[torch.arange(len(first)), first, 0].long().numpy()


def test_windows_are_drawn_from_the_fused_law():
    K, eta_w, B_s, B_t = 3, 3.0, 20_000, 40_000
    args = arguments(K=K, eta_w=eta_w, target_batch=B_t)
    lengths = (19, 4, 12, 2, 9)
    n = sum(lengths)
    source, target = toy(lengths), toy((8, 3, 10), first_row=n)
    gate = np.arange(n) % 4 == 1
    pre = preprocessed(source, gate, eta_w=eta_w, K=K)
    data = taf.fuse(source, target, pre, args, "cpu")
    omega = np.where(pre["retained"], np.exp(-eta_w * np.nan_to_num(pre["c_tilde"])), 0)
    left = np.repeat(source.lengths, source.lengths) - source.steps
    left_t = np.repeat(target.lengths, target.lengths) - target.steps
    torch.manual_seed(0)
    b = taf.sample_windows(data, args)
    is_source = np.arange(B_s + B_t) < B_s
    starts = starts_of(b)
    agree(np.bincount(starts[~is_source] - n, minlength=21), np.full(21, 1 / 21))
    agree(np.bincount(starts[is_source], minlength=n), gate / gate.sum())
    # no window crosses an episode's end
    valid, row = b.valid.numpy(), b.actions[:, :, 0].numpy()
    both_left = np.concatenate([left, left_t])
    assert (valid.sum(1) == np.minimum(K, both_left[starts])).all()
    assert (np.diff(row)[valid[:, :-1]] == 1).all()
    assert (valid == (np.sort(valid, 1))).all()
    # what the tokens weigh
    weight, row = b.weight.numpy(), row.astype(int)
    assert not weight[~valid].any()
    assert (weight[~is_source][valid[~is_source]] == 1).all()
    tokens = valid[is_source]
    found, wanted = weight[is_source][tokens], omega[row[is_source][tokens]]
    assert (found > 0).all()  # each token of a source window has its own omega
    ratio = found / wanted
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
    assert found.mean() == pytest.approx(1, abs=0.02)
    assert np.ptp(found) > 0.5
    share = valid[is_source].sum() / valid.sum()  # a third, but for windows that are cut short
    assert weight[is_source].sum() / weight.sum() == pytest.approx(share, abs=0.005)


def test_weights_have_mean_one_over_what_can_be_drawn():
    """Exactly, not in a sample: uniform starts, at most K tokens each."""
    for K in (1, 3, 5):
        data, *_ = small(arguments(K=K), gate=np.arange(N_S) % 2 == 0)
        b = taf.windows(data, data.source_starts, K)
        assert (b.weight.sum() / b.valid.sum()).item() == pytest.approx(1, rel=1e-5)


def test_falls_reach_v_and_q_and_the_critics():
    """Windows that end in a failure are kept fragments like any other; without them no value knows of a fall."""
    args = arguments()
    gate = np.zeros(N_S, bool)
    gate[[0, 6]] = True  # the first episode has nine steps, and fails: the second window is its last
    data, *_ = small(args, gate)
    assert data.terminal[data.source_rows].any()
    assert taf.windows(data, data.source_starts, args.gate.K).terminal[:, -1].tolist() == [False, True]


@pytest.mark.parametrize("kind", ["none", "mmd", "ot"])
def test_filters_change_gate_or_weights(kind):
    source, target = toy(LENGTHS_S), toy(LENGTHS_T)
    gate = np.arange(N_S) % 5 == 0 if kind == "mmd" else np.ones(N_S, bool)
    pre = preprocessed(source, gate)
    inside = pre["retained"]
    if kind != "ot":
        pre["c_tilde"] = np.full(N_S, np.nan)
        pre["omega"] = np.where(inside, 1.0, np.nan)
        pre["w"] = np.where(inside, 1 / inside.sum(), np.nan)
    data = taf.fuse(source, target, pre, arguments(filter=kind), "cpu")
    assert data.source_starts.tolist() == np.flatnonzero(gate).tolist()
    assert data.source_rows.tolist() == np.flatnonzero(inside).tolist()
    if kind == "ot":
        assert data.weight[:N_S].std() > 0.05
    else:
        weight = data.weight[:N_S].numpy()
        assert (weight[~inside] == 0).all()
        assert np.ptp(weight[inside]) == 0


def test_beta_zero_draws_no_source_data():
    args = arguments(beta=0.0, filter="none")
    data, *_ = small(args, gate=np.ones(N_S, bool))
    names = ("states", "next_states", "rewards")
    data = data._replace(**{name: getattr(data, name).clone() for name in names})
    for name in names:
        getattr(data, name)[:N_S] = torch.nan
    nets = build(args)
    logs = taf.update_values(nets, data, args) | taf.update_command(nets, data, args)
    logs |= taf.update_behaviour(nets, data, args) | policy_stage(nets, data, args, 1)
    assert all(torch.isfinite(x) for x in logs.values())
    sizes = [(128, 0.0), (128, 1 / 3), (512, 1 / 3), (128, 83 / 211)]
    assert [taf.source_batch(*size) for size in sizes] == [0, 64, 256, 83]


def test_beta_zero_standardises_by_the_target_alone():
    """V and Q never saw the source data, whose advantages are noise."""
    args = arguments(beta=0.0, filter="none")
    data, *_ = small(args, gate=np.ones(N_S, bool))
    data = data._replace(states=torch.cat([50 * data.states[:N_S], data.states[N_S:]]))
    tokens = taf.relabel(build(args), data, args)[0].tokens
    assert tokens[N_S:].mean().item() == pytest.approx(0, abs=1e-4)
    assert tokens[N_S:].std().item() == pytest.approx(1, abs=1e-4)


# --------------------------------------------------------------------------------------- advantage tokens


@pytest.mark.parametrize("N", [N_S + N_T, 200_050])
def test_tokens_against_numpy(N):
    """The larger number of rows, which repeats the smaller one, takes more than one block."""
    args = arguments()
    data, pre, *_ = small(args)
    nets = build(args)
    rows = torch.arange(N) % (N_S + N_T)
    some = {"states": data.states[rows], "actions": data.actions[rows], "rewards": data.rewards[rows]}
    used = np.concatenate([pre["retained"], np.ones(N_T, bool)])[rows]  # by the policy
    some["source_rows"] = torch.tensor(np.flatnonzero(used & (rows.numpy() < N_S)))
    some["target_rows"] = torch.tensor(np.flatnonzero(rows.numpy() >= N_S))
    found, moments = taf.relabel(nets, data._replace(**some), args)
    with torch.no_grad():
        v = nets["V"](data.states).double().numpy().mean(0)
        q = nets["Q"](data.states, data.actions).double().numpy().mean(0)
    A = q - v
    seen = A[rows][used]
    assert 0 < pre["retained"].sum() < N_S
    wanted = {"mu_A": seen.mean(), "sigma_A": seen.std(ddof=1)}
    assert moments == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    tokens = (A - seen.mean()) / seen.std(ddof=1)
    np.testing.assert_allclose(found.tokens, np.where(used, tokens[rows], 0), rtol=1e-3, atol=1e-4)
    assert found._replace(tokens=0) == data._replace(**some, tokens=0)  # nothing else has changed


def sorted_expectile(y, p, zeta):
    """e with sum_i p_i |zeta - 1(y_i < e)| (y_i - e) = 0, exactly: linear between neighbours in the sorted sample."""
    order = np.argsort(y)
    y, p = np.asarray(y, float)[order], np.asarray(p, float)[order]
    for k in range(1, len(y)):  # k values below
        weight = p * np.where(np.arange(len(y)) < k, 1 - zeta, zeta)
        e = (weight * y).sum() / weight.sum()
        if y[k - 1] <= e <= y[k]:
            return e
    raise AssertionError("no expectile")


def test_the_command_converges_to_the_expectile_of_the_fused_law():
    assert sorted_expectile([0, 1], [0.5, 0.5], 0.98) == pytest.approx(0.98)
    args = arguments(zeta=0.9, lr=0.02, command_decay=0.0, label_batch=600, beta=0.4, eta_w=3.0)
    source = toy(LENGTHS_S)
    gate = np.arange(N_S) % 5 == 0
    pre = preprocessed(source, gate, eta_w=3.0)
    data = taf.fuse(source, toy(LENGTHS_T), pre, args, "cpu")
    tokens = torch.randn(N_S + N_T, generator=torch.Generator().manual_seed(3)) * 2
    data = data._replace(states=torch.ones_like(data.states), tokens=tokens)
    nets = build(args)
    commands = []
    for step in range(400):
        if step == 200:
            nets["adam_command"].param_groups[0]["lr"] = 2e-3
        taf.update_command(nets, data, args)
        if step >= 250:
            commands.append(nets["command"](data.states[:1]).item())
    law = np.concatenate([0.4 * np.nan_to_num(pre["w"]), np.full(N_T, 0.6 / N_T)])
    assert np.mean(commands) == pytest.approx(sorted_expectile(tokens.numpy(), law, 0.9), abs=0.03)


# -------------------------------------------------------------------------------------------- Transformer


def random_batch(args, B=3, d_s=3, d_a=2, padding=None, seed=0) -> taf.Batch:
    g = torch.Generator().manual_seed(seed)
    K = args.gate.K
    states = torch.randn(B, K, d_s, generator=g).double()
    actions = torch.randn(B, K, d_a, generator=g).double()
    tokens, steps = torch.randn(B, K, generator=g).double(), torch.randint(0, 1000, (B, K), generator=g)
    valid = torch.arange(K) >= torch.tensor(padding or [0] * B)[:, None]
    return taf.Batch(tokens, states, actions, steps, valid)


def copy_of(b: taf.Batch, rows=slice(None), first=0) -> taf.Batch:
    """The policy's inputs of these windows, from the step `first` on."""
    return taf.Batch(*(x[rows, first:].clone() for x in b[:5]))


def random_policy(args, seed=0, d_s=3, d_a=2):
    torch.manual_seed(seed)
    policy = taf.Policy(d_s, d_a, args).double().eval()
    shake(policy)
    return policy


def test_an_action_sees_the_past_its_command_and_its_state_and_nothing_else():
    """The exact pattern of dependence, which is that of the order (c_1, s_1, a_1, c_2, ...)."""
    args = arguments(K=4)
    policy, b = random_policy(args), random_batch(args, B=2)
    inputs = [x.requires_grad_() for x in (b.tokens, b.states, b.actions)]
    pi = policy(b)
    assert pi.shape == (2, 4, 2)
    for i in range(4):
        gradients = torch.autograd.grad(pi[0, i].sum(), inputs, retain_graph=True)
        seen = [g[0].reshape(4, -1).abs().sum(1) > 0 for g in gradients]
        assert seen[0].tolist() == seen[1].tolist() == [j <= i for j in range(4)]
        assert seen[2].tolist() == [j < i for j in range(4)]
        assert all(not g[1].any() for g in gradients)  # windows of a batch do not mix
    assert pi.abs().max() < 1  # tanh


def test_changing_the_future_never_changes_an_earlier_output():
    args = arguments(K=4)
    policy, b = random_policy(args), random_batch(args)
    before = policy(b)
    for i in range(4):
        later = copy_of(b)
        later.tokens[:, i + 1 :] += 3
        later.states[:, i + 1 :] -= 2
        later.actions[:, i:] *= -1
        later.steps[:, i + 1 :] = 7
        after = policy(later)
        assert torch.equal(after[:, : i + 1], before[:, : i + 1])
        if i < 3:
            assert not torch.allclose(after[:, i + 1], before[:, i + 1])


@pytest.mark.parametrize("only_last", [False, True])
def test_padding_changes_nothing(only_last):
    args, padding = arguments(K=5), [0, 2, 4]
    policy, b = random_policy(args), random_batch(args, padding=padding)
    before = policy(b, only_last)
    other = copy_of(b)
    for i, n in enumerate(padding):
        for column, value in ((other.tokens, 99), (other.states, -99), (other.actions, 99), (other.steps, 999)):
            column[i, :n] = value
    after = policy(other, only_last)
    for i, n in enumerate(padding):
        at = slice(None) if only_last else slice(n, None)
        assert torch.equal(after[i, at], before[i, at])
        # and a padded window is the shorter window
        short = policy(copy_of(b, slice(i, i + 1), n), only_last)
        torch.testing.assert_close(short[0], before[i, at], rtol=1e-9, atol=1e-12)


def reference_policy(W, heads, layers, tokens, states, actions, steps, valid):
    """One window, token by token, in NumPy. W: weights by name."""

    def linear(name, x):
        return W[f"{name}.weight"] @ x + W[f"{name}.bias"]

    def norm(name, x):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * W[f"{name}.weight"] + W[f"{name}.bias"]

    x, real = [], []
    for c, s, a, t, v in zip(tokens, states, actions, steps, valid, strict=True):
        t = W["embed_t.weight"][t] if "embed_t.weight" in W else 0.0
        x += [linear("embed_c", np.array([c])) + t, linear("embed_s", s) + t, linear("embed_a", a) + t]
        real += 3 * [v]
    x = [norm("norm_in", token) for token in x]
    for layer in range(layers):
        name, new = f"blocks.{layer}", []
        normed = [norm(f"{name}.norm1", token) for token in x]
        q = [linear(f"{name}.query", token) for token in normed]
        k, v = zip(*(np.split(linear(f"{name}.key_value", token), 2) for token in normed), strict=True)
        for i, token in enumerate(x):
            seen = [j for j in range(i + 1) if real[j] or j == i]
            out = []
            for h in range(heads):
                part = slice(h * len(token) // heads, (h + 1) * len(token) // heads)
                logits = np.array([q[i][part] @ k[j][part] for j in seen]) / math.sqrt(len(token) / heads)
                p = np.exp(logits - logits.max())
                out.append(sum(p_j * v[j][part] for p_j, j in zip(p / p.sum(), seen, strict=True)))
            token = token + linear(f"{name}.out", np.concatenate(out))
            hidden = np.maximum(linear(f"{name}.up", norm(f"{name}.norm2", token)), 0)
            new.append(token + linear(f"{name}.down", hidden))
        x = new
    x = [norm("norm_out", token) for token in x]
    return np.tanh([linear("action", token) for token in x[1::3]])


@pytest.mark.parametrize("clock", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("K", [1, 4])
def test_the_transformer_against_numpy(K, layers, clock):
    """Which computes all tokens of all layers: what the network leaves out, it does not need."""
    args, padding = arguments(K=K, layers=layers, time_embedding=clock), [0, K // 4, K - 1]
    policy, b = random_policy(args), random_batch(args, padding=padding)
    with torch.no_grad():
        pi, last = policy(b), policy(b, only_last=True)
        later = policy(b._replace(steps=b.steps + 7 - 14 * (b.steps > 500)))
    assert last.shape == (3, 1, 2)
    W = {name: x.numpy() for name, x in policy.state_dict().items()}
    for i, n in enumerate(padding):
        wanted = reference_policy(W, args.heads, args.layers, *(x[i].numpy() for x in b[:5]))
        np.testing.assert_allclose(pi[i, n:], wanted[n:], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(last[i, 0], wanted[-1], rtol=1e-8, atol=1e-10)
    assert torch.equal(later, pi) == (not clock)


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_are_separate_networks(heads):
    torch.manual_seed(0)
    net = taf.TwinMLP(5, 8, heads).double()
    s, a = torch.randn(4, 3, 3).double(), torch.randn(4, 3, 2).double()
    found = net(s, a)
    assert found.shape == (heads, 4, 3)
    for h in range(heads):
        x = torch.cat([s, a], -1)
        for i, (W, b) in enumerate(zip(net.W, net.b, strict=True)):
            x = (x * torch.tanh(torch.log1p(x.exp())) if i else x) @ W[h] + b[h]  # Mish
        torch.testing.assert_close(found[h], x[..., 0])
    assert len(net.W) == 4


def test_dropout_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(1000, 333)
    for p in (0.1, 0.5):
        y = dropout(x, p)
        assert y.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
        assert (y == 0).float().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / x.numel()))
        rows = (y == 0).float()
        assert np.corrcoef(rows[:, 0], rows[:, 1])[0, 1] == pytest.approx(0, abs=0.16)
    assert dropout(x, 0.0) is x


def test_dropout_acts_in_training_alone():
    args = arguments(dropout=0.5)
    policy, b = random_policy(args), random_batch(args)
    assert torch.equal(policy(b), policy(b))
    policy.train()
    assert not torch.equal(policy(b), policy(b))


# ---------------------------------------------------------------------------- the same actions in a rollout


class Replay:
    """A batch of simulators whose states and rewards are given, whatever is done; episode i has lengths[i] steps."""

    act_dim = 2

    def __init__(self, states, rewards, lengths):
        self.states, self.rewards, self.lengths = states, rewards, np.array(lengths)
        self.actions, self.t, self.closed = [], 0, False

    def reset(self, seed):
        return self.states[:, 0]

    def step(self, actions):
        ended = self.t >= self.lengths
        self.actions.append(actions.copy())
        reward = np.where(ended, 0.0, self.rewards[:, min(self.t, self.rewards.shape[1] - 1)])
        self.t += 1
        now = np.minimum(self.t, self.lengths)
        done = self.t >= self.lengths
        return self.states[np.arange(len(now)), now], reward, done & (self.lengths % 2 == 0), done

    def close(self):
        self.closed = True


@pytest.mark.parametrize("token", ["advantage", "rtg"])
@pytest.mark.parametrize("K", [2, 4])
def test_the_agent_acts_as_the_policy_does_on_windows_of_its_history(monkeypatch, K, token):
    """Teacher forcing: each step's context against one training window that ends at that step. Steps
    0 to K - 2 are padded, the later ones roll, and those beyond the time limit (here 8) share its
    last embedding."""
    monkeypatch.setattr(taf, "time_limit", lambda task: 8)
    rng, lengths = np.random.default_rng(K), (11, 6)
    states, rewards = rng.normal(size=(2, 12, 3)).astype(np.float32), rng.normal(size=(2, 11)) * 500
    args = arguments(K=K, token=token, dropout=0.3, return_target=float(rewards[0, :11].sum()))
    played = []
    monkeypatch.setattr(evaluation, "make_batch", lambda env, shift, n, **_: played[-1])
    nets = build(args)
    shake(nets["policy"], nets["command"])
    pre = preprocessed(toy((3,)))
    agent = taf.Agent(nets, pre, args, 2)
    for _ in range(2):  # a second evaluation begins with an empty context, and is the same
        played.append(Replay(states, rewards, lengths))
        found = taf.evaluate(agent, args)
        assert nets["policy"].training
        assert played[-1].closed
        assert found["lengths"] == list(lengths)
        assert found["returns"] == pytest.approx([rewards[0, :11].sum(), rewards[1, :6].sum()])
    executed, again = (np.stack(batch.actions, 1) for batch in played)  # [2, 11, 2]
    np.testing.assert_array_equal(executed, again)
    assert not executed[1, 6:].any()  # after its end
    nets["policy"].eval()
    for i, length in enumerate(lengths):
        # a dataset of all beginnings of the episode: its first step, its first two, ...
        cut = [slice(0, t + 1) for t in range(length)]
        columns = dict(observations=states[i], next_observations=states[i, 1:], actions=executed[i], rewards=rewards[i])
        columns = {k: np.concatenate([x[c] for c in cut]) for k, x in columns.items()}
        data = taf.fuse(toy((3,)), toy([t + 1 for t in range(length)], **columns), pre, args, "cpu")
        starts = torch.tensor([3 + t * (t + 1) // 2 + max(0, t + 1 - K) for t in range(length)])
        with torch.no_grad():
            if token == "advantage":
                tokens = nets["command"](data.states)[0]
            else:  # what is left of the return that was asked for
                to_go = (args.return_target - np.concatenate([[0], rewards[i].cumsum()[:-1]])) / 1000
                tokens = np.concatenate([np.zeros(3), *(to_go[c] for c in cut)])
            data = data._replace(tokens=torch.as_tensor(tokens, dtype=torch.float32))
            b = taf.windows(data, starts, K)
            assert b.valid[:, 0].tolist() == [t >= K - 1 for t in range(length)]
            assert int(b.steps.max()) == min(7, length - 1)
            pi = nets["policy"](b)
        np.testing.assert_allclose(pi[:, -1], executed[i, :length], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------- junction diagnostics


def test_the_junction_pool_against_a_loop():
    K, h = 5, 3
    args = arguments(K=K)
    source, target = toy((20, 30, 5, 25), seed=1), toy((15, 6, 22), seed=2)
    gate = np.random.default_rng(0).uniform(size=80) < 0.7
    data = taf.fuse(source, target, preprocessed(source, gate), args, "cpu")
    pool = junctions.junction_pool(data, K, size=100, candidates=3000)  # of so many, the nearest is the nearest of all
    assert {name: x.shape for name, x in pool.items()} == {"stitched": (100, K), "unstitched": (100, K)}
    again = junctions.junction_pool(data, K, size=100, candidates=3000)
    assert all(torch.equal(pool[name], again[name]) for name in pool)
    left, states, domain = data.left.numpy(), data.states.numpy(), np.arange(123) >= 80
    begin = {False: [i for i in range(80) if gate[i] and left[i] > K], True: [i for i in range(80, 123) if left[i] > K]}
    directions = []
    for rows, plain in zip(pool["stitched"].tolist(), pool["unstitched"].tolist(), strict=True):
        i, j = rows[0], rows[h]
        assert rows == [i, i + 1, i + 2, j, j + 1]
        assert plain == [i, i + 1, i + 2, i + 3, i + 4]
        assert i in begin[bool(domain[i])]
        assert domain[i] != domain[j]
        distance = [((states[x] - states[i + h]) ** 2).sum() for x in begin[bool(domain[j])]]
        assert j == begin[bool(domain[j])][int(np.argmin(distance))]
        directions.append(bool(domain[i]))
    assert directions == [False] * 50 + [True] * 50
    few = junctions.junction_pool(data, K, size=100, candidates=2)["stitched"]
    assert len(set(few[:, h].tolist())) > len(set(pool["stitched"][:, h].tolist()))
    with pytest.raises(UserError, match="--K"):
        junctions.junction_pool(taf.fuse(toy((6,)), toy((5,)), preprocessed(toy((6,))), args, "cpu"), 5)


@pytest.mark.parametrize("K", [2, 5, 6])
def test_junction_metrics_against_a_loop(K):
    args = arguments(K=K, dropout=0.5)
    source, target = toy((20, 30), seed=1), toy((15, 22), seed=2)
    data = taf.fuse(source, target, preprocessed(source), args, "cpu")
    data = data._replace(tokens=torch.randn(87))
    nets = build(args)
    shake(*(nets[name] for name in ("policy", "V", "Q", "critics")))
    pool = junctions.junction_pool(data, K, size=8)
    found = junctions.measure(nets, data, pool, gamma=0.9)
    assert found.keys() == pool.keys()
    assert nets["policy"].training
    nets["policy"].eval()
    h = math.ceil(K / 2)
    for name, rows in pool.items():
        J_a, J_Q, J_own, TD = [], [], [], []
        for window in rows.tolist():
            w = torch.tensor(window)
            x = (data.tokens[w][None], data.states[w][None], data.actions[w][None], data.steps[w][None])
            with torch.no_grad():
                pi = nets["policy"](taf.Batch(*x, torch.ones(1, K).bool()))[0]
                q = [nets["Q"](data.states[r], pi[k]).mean().item() for k, r in enumerate(window)]
                own = [nets["critics"](data.states[r], pi[k]).min().item() for k, r in enumerate(window)]
            J_a.append(float(np.linalg.norm((pi[h] - pi[h - 1]).numpy())))
            J_Q.append(abs(q[h] - q[h - 1]))
            J_own.append(abs(own[h] - own[h - 1]))
            for k in range(K):
                if abs(k - h) <= 2:
                    after = data.states[window[k + 1]] if k + 1 < K else data.next_states[window[k]]
                    v, v_after = (nets["V"](s).mean().item() for s in (data.states[window[k]], after))
                    TD.append(abs(data.rewards[window[k]].item() + 0.9 * v_after - v))
        wanted = {"J_a": np.mean(J_a), "J_Q": np.mean(J_Q), "J_Q_own": np.mean(J_own), "TD": np.mean(TD)}
        assert found[name] == pytest.approx(wanted, rel=1e-3, abs=1e-5)


# ---------------------------------------------------------------------------------------- updates


def weights_of(nets):
    return {k: [p.detach().clone() for p in net.parameters()] for k, net in nets.items() if not k.startswith("adam")}


def changed(nets, before):
    return {
        k for k, old in before.items() if any((p != o).any() for p, o in zip(nets[k].parameters(), old, strict=True))
    }


@pytest.mark.parametrize(("ema_start", "first"), [(0, 1), (1, 1), (4, 4)])
def test_the_average_of_the_policy_begins_with_the_policy(ema_start, first):
    """Also where it begins at once: updates are counted from 1, so there is no update 0 that could copy it."""
    args = arguments(ema_start=ema_start, ema_every=100)
    nets = build(args)
    shake(nets["policy"])
    for step in range(1, 6):
        taf.update_target_policy(nets, args, step)
        pairs = zip(nets["policy"].parameters(), nets["policy_bar"].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == (step >= first)


def test_each_update_changes_its_own_networks_alone():
    args = arguments(ema_start=10, ema_every=3)
    data, *_ = small(args)
    nets = build(args)
    batch = taf.sample_windows(data, args)
    stages = {
        ("V", "Q", "V_bar"): lambda: taf.update_values(nets, data, args),
        ("command",): lambda: taf.update_command(nets, data, args),
        ("cvae",): lambda: taf.update_behaviour(nets, data, args),
        ("critics", "critics_bar"): lambda: taf.update_critics(nets, batch, args),
        ("policy",): lambda: taf.update_policy(nets, batch, args),
        (): lambda: taf.update_target_policy(nets, args, 9) or {},
        ("policy_bar",): lambda: taf.update_target_policy(nets, args, 10) or {},
    }
    for names, update in stages.items():
        before = weights_of(nets)
        logs = update()
        assert changed(nets, before) == set(names)
        assert all(x.numel() == 1 and torch.isfinite(x) for x in logs.values())
    for name in ("V_bar", "policy_bar", "critics_bar"):
        assert not any(p.requires_grad for p in nets[name].parameters())


def test_target_networks_move_as_told():
    args = arguments(tau=0.1, ema_start=3, ema_every=2, ema_decay=0.9)
    data, *_ = small(args)
    nets = build(args)
    bar = weights_of(nets)
    assert changed(nets, bar | {"policy": bar["policy_bar"], "critics": bar["critics_bar"], "V": bar["V_bar"]}) == set()
    taf.update_values(nets, data, args)
    for slow, fast, old in zip(nets["V_bar"].parameters(), nets["V"].parameters(), bar["V_bar"], strict=True):
        torch.testing.assert_close(slow.data, 0.9 * old + 0.1 * fast.data)
    for step in range(1, 7):
        old = weights_of(nets)
        policy_stage(nets, data, args, step)
        new = weights_of(nets)
        for slow, fast, was in zip(new["critics_bar"], new["critics"], old["critics_bar"], strict=True):
            torch.testing.assert_close(slow, 0.9 * was + 0.1 * fast)
        for slow, fast, was in zip(new["policy_bar"], new["policy"], old["policy_bar"], strict=True):
            wanted = {3: fast, 4: 0.9 * was + 0.1 * fast, 6: 0.9 * was + 0.1 * fast}.get(step, was)
            torch.testing.assert_close(slow, wanted)


def test_the_learning_rate_falls_along_half_a_cosine_or_not_at_all():
    nets = build(arguments())
    for cosine, wanted in ((False, [2e-3] * 5), (True, [2e-3, 2e-3 * (0.5 + 0.5**1.5), 1e-3, 2e-3 * (0.5 - 0.5**1.5)])):
        args = arguments(lr=2e-3, cosine=cosine, updates=4)
        for step, rate in zip(range(1, 5), wanted, strict=False):
            moving = ("critics", "policy") if step % 2 else ("values",)
            for name in nets:
                if name.startswith("adam"):
                    nets[name].set_rate(3e-4)
            assert taf.set_learning_rate(nets, moving, args, step, 4) == pytest.approx(rate)
            for name, part in nets.items():
                if name.startswith("adam"):
                    moves = name.removeprefix("adam_") in moving
                    assert part.param_groups[0]["lr"] == pytest.approx(rate if moves else 3e-4)


@pytest.mark.parametrize(("stage", "update"), [("values", "V"), ("command", "command"), ("cvae", "cvae")])
def test_the_rate_of_the_stages_before_the_policy_falls_too(stage, update):
    """With --cosine: the last of a hundred updates hardly moves a weight, as Adam moves it by its rate at most."""
    args = arguments(lr=1e-2, cosine=True)
    nets, (data, *_) = build(args), small(args)
    function = {"V": taf.update_values, "command": taf.update_command, "cvae": taf.update_behaviour}[update]
    weights, rates = [], []

    class Run:
        record, threads = {"threads": {stage: 1}}, 1

        def steps(self, name, updates):
            for step in range(1, updates + 1):
                weights.append(torch.cat([p.detach().flatten() for p in nets[update].parameters()]))
                yield step
            weights.append(torch.cat([p.detach().flatten() for p in nets[update].parameters()]))

        def log(self, step, logs):
            rates.append(logs["charts/learning_rate"])

    taf.run_stage(Run(), stage, 100, function, nets, data, args)
    assert rates == pytest.approx([1e-2 * (1 + math.cos(math.pi * i / 100)) / 2 for i in range(100)])
    moved = [(new - old).abs().max().item() for old, new in itertools.pairwise(weights)]
    assert moved[0] == pytest.approx(1e-2, rel=0.01)
    assert 0 < moved[-1] < 1e-4


def test_the_critics_regress_on_the_target_networks_value():
    """One update: what the critics' loss is computed from, in the order of Algorithm 1."""
    args = arguments(gamma=0.9, ema_start=100, dropout=0.5)
    data, *_ = small(args)
    nets = build(args)
    shake(nets["policy_bar"], nets["critics_bar"])
    b = taf.windows(data, torch.cat([data.source_starts[:4], data.target_rows[:8]]), args.gate.K)
    with torch.no_grad():
        a_hat = nets["policy_bar"](b)[:, -1]
        q_last = nets["critics_bar"](b.states[:, -1], a_hat).amin(0)
        q_hat = taf.k_step_target(b.rewards, b.terminal, q_last, 0.9)
        q = nets["critics"](b.states, b.actions)
        loss = taf.critic_loss(q, q_hat, taf.critic_weight(b.weight, b.terminal))
    logs = taf.update_critics(nets, b, args)
    assert logs["losses/critic"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert logs["charts/q_largest"].item() == pytest.approx(q.abs().max().item(), rel=1e-5)
    # without guidance and regulariser L_pi is L_DT
    logs = taf.update_policy(nets, b, arguments(alpha=0.0, eta_reg=0.0))
    assert logs["losses/policy"].item() == pytest.approx(logs["losses/dt"].item())


def test_gradients_are_clipped_and_penalties_are_where_they_belong():
    args = arguments()
    nets = build(args)
    decay = {name: net.param_groups[0]["weight_decay"] for name, net in nets.items() if name.startswith("adam")}
    assert decay == {"adam_values": 0, "adam_command": 5e-4, "adam_cvae": 0, "adam_critics": 0, "adam_policy": 1e-4}
    assert build(arguments(cvae_decay=1e-4))["adam_cvae"].param_groups[0]["weight_decay"] == 1e-4
    p = torch.nn.Parameter(torch.zeros(4))
    norm = gradient_step(torch.optim.SGD([p], lr=1.0), (100 * p).sum(), clip=5.0)
    assert norm.item() == pytest.approx(200)
    assert p.norm().item() == pytest.approx(5, rel=1e-4)
    gradient_step(torch.optim.SGD([p], lr=1.0), (1e6 * p).sum())
    assert p.norm().item() == pytest.approx(2e6, rel=1e-4)


def test_a_small_batch_can_be_learnt_by_heart():
    args = arguments(K=4, alpha=0.0, eta_reg=0.0, lr=1e-2, width=32, layers=1, decay=0.0)
    data, *_ = small(args)
    data = data._replace(actions=torch.rand(data.actions.shape) * 1.8 - 0.9)
    nets = build(args)
    b = taf.windows(data, torch.tensor([0, 13, 20, 34, 37]), 4)
    noise = torch.zeros(args.M, b.valid.numel(), 4)
    for _ in range(150):
        loss, logs = taf.policy_loss(nets, b, noise, args)
        gradient_step(nets["adam_policy"], loss, args.clip_grad)
    assert loss.item() == pytest.approx(logs["losses/dt"].item())
    assert loss.item() < 1e-3
    assert b.weight.sum() > 5


def test_a_full_update_of_every_stage_never_leaves_the_device(monkeypatch):
    """The device `meta` holds no numbers: a tensor made elsewhere, or a number taken to the host, is an error."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # it does not support `meta`
    args = arguments(dropout=0.1, ema_start=1, ema_every=1)
    data, *_ = small(args)
    data, nets = taf.Data(*(x.to("meta") for x in data)), taf.build(args, 3, 2, "meta")
    logs = taf.update_values(nets, data, args) | taf.update_command(nets, data, args)
    logs |= taf.update_behaviour(nets, data, args)
    for step in (1, 2):
        logs |= policy_stage(nets, data, args, step)
    assert {x.device.type for x in logs.values()} == {"meta"}
    with pytest.raises((RuntimeError, NotImplementedError)):  # that device does notice it
        logs["losses/policy"].item()


STAGES = [taf.update_values, taf.update_command, taf.update_behaviour, taf.update_actor_critic]


def losses_of(update, args, updates=20, prepare=lambda update, *_: update) -> list[dict]:
    """What a stage logs, update after update."""
    data, *_ = small(args)
    actions = torch.rand(data.actions.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data = data._replace(actions=actions)
    nets = build(args)
    torch.manual_seed(1)
    function = prepare(update, nets, data)
    logs = [function(nets, data, args) for _ in range(updates)]
    return [{name: x.item() for name, x in each.items()} for each in logs]


def test_bf16_gives_the_same_losses():
    plain, low = (losses_of(taf.update_actor_critic, arguments(precision=x, width=32), 2) for x in ("fp32", "bf16"))
    for a, b in zip(plain, low, strict=True):
        for key in ("losses/critic", "losses/policy", "losses/dt", "losses/reg"):
            assert b[key] == pytest.approx(a[key], rel=0.03, abs=0.02), key
    assert plain != low  # it does something


def test_critics_targets_reductions_and_optimisers_stay_in_fp32(monkeypatch):
    """Under bfloat16 every loss function is given fp32, and so are the gradients and Adam's moments."""
    seen = {}

    def watched(name):
        original = getattr(taf, name)

        def function(*inputs):
            seen[name] = {x.dtype for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()}
            return original(*inputs)

        return function

    for name in ("dt_loss", "q_term", "critic_loss", "k_step_target", "weighted_mean"):
        monkeypatch.setattr(taf, name, watched(name))
    args, valued = arguments(precision="bf16"), []
    nets, (data, *_) = build(args), small(args)
    for name in ("critics", "critics_bar"):
        nets[name].register_forward_hook(lambda _, inputs, q: valued.append(q.dtype))
    logs = taf.update_actor_critic(nets, data, args)
    assert all(dtypes == {torch.float32} for dtypes in seen.values())
    assert len(seen) == 5
    assert valued == [torch.float32] * 3
    assert {x.dtype for x in logs.values()} == {torch.float32}
    states = [x for p in nets["policy"].parameters() for x in (p.grad, *nets["adam_policy"].state[p].values())]
    assert {x.dtype for x in states} == {torch.float32}


COMPILER = any(map(shutil.which, ("g++", "c++", "clang++")))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("update", STAGES)
def test_compiled_stages_give_the_same_losses(update, backend):
    """Every stage, whole, in one graph. aot_eager: what torch.compile makes of the program, without machine code."""
    if backend == "inductor" and not COMPILER:
        pytest.skip("no C++ compiler for torch.compile")
    if not os.environ.get("TEST_COMPILE") and (backend, update) != ("aot_eager", taf.update_behaviour):
        pytest.skip("minutes of the compiler; set TEST_COMPILE=1")
    import torch._inductor.config

    torch._dynamo.reset()

    def prepare(update, nets, data):
        return faster.compiled(update, nets, data, torch.device("cpu"), backend=backend)

    args = arguments(layers=1)
    with torch._inductor.config.patch(fallback_random=True):  # the numbers that torch would draw
        plain, compiled = losses_of(update, args), losses_of(update, args, prepare=prepare)
    assert len(plain) == 20
    for a, b in zip(plain, compiled, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-4)


@pytest.mark.skipif(not os.environ.get("TEST_COMPILE"), reason="a minute of the compiler; set TEST_COMPILE=1")
def test_a_compiled_update_has_dropout_and_follows_the_learning_rate():
    """The graph has no break and is made once: another rate is another number in the same graph."""
    torch._dynamo.reset()
    graphs = []
    args = arguments(layers=1, dropout=0.5, cosine=True, updates=100)
    nets, (data, *_) = build(args), small(args)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    update = faster.compiled(taf.update_actor_critic, nets, data, torch.device("cpu"), backend=backend)
    for step in (1, 100):
        rate = taf.set_learning_rate(nets, ("critics", "policy"), args, step, args.updates)
        before = nets["policy"].action.weight.clone()
        losses = update(nets, data, args)
        moved = (nets["policy"].action.weight - before).abs().max().item()
        assert moved == pytest.approx(rate, rel=0.7)  # Adam moves by its rate at first, and by less after a turn
        assert math.isfinite(losses["losses/policy"].item())
    assert len(graphs) == 1


@pytest.mark.parametrize("update", STAGES)
def test_what_a_compiled_update_reads_and_changes_stays_in_its_place(update):
    """CUDA replays no graph that changes an input which may move, and copies every other one that may."""
    if not os.environ.get("TEST_COMPILE") and update not in (taf.update_command, taf.update_behaviour):
        pytest.skip("seconds of the compiler; set TEST_COMPILE=1")
    from torch._dynamo.backends.common import aot_autograd
    from torch._guards import TracingContext

    torch._dynamo.reset()
    found = []

    def backend(graph, _):
        found.append(TracingContext.get().fw_metadata)
        return graph.forward

    args = arguments(layers=1)
    nets, (data, *_) = build(args), small(args)
    options = {"backend": aot_autograd(fw_compiler=backend)}
    faster.compiled(update, nets, data, torch.device("cpu"), **options)(nets, data, args)
    (graph,) = found
    assert sum(x.mutates_data for x in graph.input_info) >= 4 * 8  # weights, both moments and count, of 8 weights
    assert set(graph.static_input_indices) == set(range(len(graph.input_info)))


# Each operation is a launch on a GPU, at 6 microseconds. These bounds are what there is now.
LAUNCHES = {taf.update_values: 107, taf.update_command: 50, taf.update_behaviour: 82, taf.update_actor_critic: 506}


@pytest.mark.parametrize("update", STAGES)
def test_an_update_does_not_grow_in_operations(update):
    args = runs.compose(taf.Args, **TINY | dict(layers=4, dropout=0.1))
    nets, (data, *_) = build(args), small(args)
    nets["cvae"].requires_grad_(update is taf.update_behaviour)
    update(nets, data, args)  # the optimiser makes its state in the first one
    found = operations(lambda: update(nets, data, args))
    assert LAUNCHES[update] / 1.1 < len(found) <= LAUNCHES[update], len(found)
    assert "aten::_local_scalar_dense" not in found  # no number goes to the host
    assert not any("bernoulli" in name or "softmax" in name for name in found)  # parts of operations that are one there
