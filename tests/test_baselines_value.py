"""baselines/iql.py, dara.py, igdf.py, otdf.py and bc.py: losses, the official errors, whole runs, resumption, and small
problems whose answer is known."""

import importlib
import inspect
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import taf_preprocess
from dynashift import evaluation, run_record, run_texts, runs
from dynashift.checksums import write_hdf5
from dynashift.datasets import Dataset, TaskArgs, load_pair, load_task
from dynashift.errors import UserError

ROOT = Path(__file__).parents[1]
NAMES = ("iql", "dara", "igdf", "otdf", "bc")
SCRIPTS = {name: importlib.import_module(f"baselines.{name}") for name in NAMES}
iql, dara, igdf, otdf, bc = SCRIPTS.values()
every_script = pytest.mark.parametrize("name", NAMES)
UPDATES = 100
TINY = {"updates": UPDATES, "hidden": 8, "eval_every": 50, "eval_episodes": 2, "log_every": 20, "save_every": 30}
SMALL_BATCH = {"source_batch": 8, "target_batch": 8}
OWN = {
    "iql": SMALL_BATCH,
    "dara": SMALL_BATCH,
    "igdf": SMALL_BATCH | {"encoder_updates": 40, "encoder_dim": 4},
    "otdf": SMALL_BATCH | {"cvae_updates": 40, "cvae_hidden": 8, "M": 3, "reg_weight": 0.5},
    "bc": {"batch": 8},
}


def t(*values):
    return torch.tensor(values, dtype=torch.float32)


def transitions(n, seed, episode=50):
    """Rows of hopper's shapes; every other episode ends in failure."""
    rng = np.random.default_rng(seed)
    states = rng.normal(0, 1, (n + 1, 11)).astype(np.float32)
    end = np.arange(1, n + 1) % episode == 0
    failed = end & (np.arange(1, n + 1) % (2 * episode) == 0)
    following = states[1:] + end[:, None].astype(np.float32)  # not the next row's state where an episode ends
    columns = {"observations": states[:-1], "actions": rng.uniform(-1, 1, (n, 3)).astype(np.float32)}
    columns |= {"rewards": rng.normal(1, 1, n).astype(np.float32), "next_observations": following}
    return columns | {"terminals": failed, "timeouts": end & ~failed}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, n, seed in (("s", 400, 0), ("t", 150, 1), ("t2", 150, 2)):
        write_hdf5(folder / f"{name}.hdf5", transitions(n, seed), "embedded", {})
    return {name: str(folder / f"{name}.hdf5") for name in ("s", "t", "t2")}


def tiny(name, files, out, **more):
    values = {"source": files["s"], "target": files["t"], "out": out, "device": "cpu", **TINY, **OWN[name], **more}
    return runs.compose(SCRIPTS[name].Args, **values)


def parameters(checkpoint):
    """All tensors of a checkpoint, of networks and of optimisers."""
    parts = torch.load(checkpoint, weights_only=True)["parts"]
    found = {}

    def walk(prefix, x):
        if isinstance(x, torch.Tensor):
            found[prefix] = x
        for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
            walk(f"{prefix}.{key}", value)

    walk("", {key: value for key, value in parts.items() if key != "record"})
    return found


# ------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("script", [iql, dara, igdf, otdf])
def test_losses_of_iql_by_hand(script):
    assert script.v_loss(t(1, 2), t(2, 0), 0.7).item() == pytest.approx((0.3 * 1 + 0.7 * 4) / 2)
    q, r, v_next = torch.stack([t(1, 2), t(0, 0)]), t(1, 1), t(2, 5)
    terminal = torch.tensor([False, True])  # targets 1 + 0.5 * 2 = 2 and 1
    if script in (iql, dara):
        assert script.q_loss(q, r, terminal, v_next, 0.5).item() == pytest.approx((1 + 1) / 2 + (4 + 1) / 2)
    else:
        weight = t(2, 0.5)
        loss = script.q_loss(q, r, terminal, v_next, 0.5, weight).item()
        assert loss == pytest.approx((2 + 0.5) / 2 + (8 + 0.5) / 2)
        with pytest.raises(AssertionError):
            script.q_loss(q, r, terminal, v_next, 0.5, weight[:, None])
    with pytest.raises(AssertionError):
        script.v_loss(t(1, 2), t(1, 2)[:, None], 0.7)


@pytest.mark.parametrize("script", [iql, dara, igdf, otdf])
def test_policy_loss_by_hand(script):
    more = (False,) if script in (iql, otdf) else ()
    factor = 2 if script is otdf else 1  # OTDF sums over the two entries of an action, the others average
    advantage, a, pi = t(0, math.log(2)), torch.zeros(2, 2), torch.stack([t(1, 1), t(1, 3)])
    assert script.policy_loss(advantage, a, pi, 1.0, 100.0, *more).item() == pytest.approx(factor * (1 + 2 * 5) / 2)
    assert script.policy_loss(advantage, a, pi, 3.0, 100.0, *more).item() == pytest.approx(factor * (1 + 8 * 5) / 2)
    assert script.policy_loss(advantage, a, pi, 3.0, 1.5, *more).item() == pytest.approx(factor * (1 + 1.5 * 5) / 2)
    with pytest.raises(AssertionError):
        script.policy_loss(advantage[:, None], a, pi, 1.0, 100.0, *more)


def test_iql_s_weights_by_domain_by_hand():
    args = runs.compose(iql.Args, beta=2.0, max_weight=5.0, source_batch=2)
    advantage = t(0, math.log(3) / 2, math.log(2) / 2, 0, 9)  # weights 1, 3 | 2, 1, 5
    found = {key.removeprefix("charts/"): x.item() for key, x in iql.weight_charts(advantage, args).items()}
    assert found == pytest.approx(
        {
            "weight_source": 2,
            "effective_source": (1 + 3) ** 2 / (1 + 9) / 2,
            "weight_target": 8 / 3,
            "effective_target": (2 + 1 + 5) ** 2 / (4 + 1 + 25) / 3,
        }
    )
    for domain, A in (("source", advantage[:2]), ("target", advantage[2:])):  # which are those of the loss
        loss = iql.policy_loss(A, torch.ones(len(A), 2), torch.zeros(len(A), 2), 2.0, 5.0, False)
        assert loss.item() == pytest.approx(found[f"weight_{domain}"])

    # Weights whose squares are too small for a number of 32 bits are no divergence.
    found = iql.weight_charts(t(0, 0, -40, -40, -40), args)
    assert found["charts/effective_target"].item() == pytest.approx(1)
    assert found["charts/weight_target"].item() < 1e-30
    alone = iql.weight_charts(advantage, runs.replace(args, source_batch=0))
    assert alone.keys() == {"charts/weight_target", "charts/effective_target"}
    assert alone["charts/weight_target"].item() == pytest.approx(12 / 5)


def test_loss_of_cloning_by_hand():
    assert bc.bc_loss(torch.stack([t(0, 1)]), torch.stack([t(2, 1)])).item() == pytest.approx(2)
    with pytest.raises(AssertionError):
        bc.bc_loss(torch.zeros(3, 2), torch.zeros(3, 1))


@pytest.mark.parametrize("script", [iql, dara, igdf, otdf])
def test_batched_critics_are_two_networks(script):
    torch.manual_seed(0)
    heads, s, a = script.EnsembleMLP(2, 5, 7), torch.randn(4, 3), torch.randn(4, 2)
    for k in range(2):
        net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 1))
        for layer, W, b in zip(net[::2], heads.W, heads.b, strict=True):
            layer.weight.data, layer.bias.data = W.data[k].T, b.data[k, 0]
        torch.testing.assert_close(heads(s, a)[k], net(torch.cat([s, a], 1))[:, 0])


def test_the_error_of_an_earlier_iql_is_beta_0():
    """Weights [B, 1] times errors [B]: the gradients are those of --beta 0, times the mean weight."""
    torch.manual_seed(0)
    advantage, a, pi = torch.randn(6), torch.randn(6, 3), torch.randn(6, 3, requires_grad=True)
    weight = (3 * advantage).exp().clamp(max=100)
    (official,) = torch.autograd.grad((weight[:, None] * (a - pi).square().mean(1)).mean(), pi)
    ours = [iql.policy_loss(advantage, a, pi, beta, 100.0, bug) for beta, bug in ((3.0, True), (0.0, False))]
    with_flag, unweighted = (torch.autograd.grad(loss, pi)[0] for loss in ours)
    torch.testing.assert_close(with_flag, official)
    torch.testing.assert_close(official, weight.mean() * unweighted)


@pytest.mark.parametrize("script", [iql, dara, igdf, otdf])
def test_rewards_and_states_as_in_the_other_codes_by_hand(script, monkeypatch):
    def data(states, rewards, ends):
        s, n = np.array(states, np.float32)[:, None], len(states)
        columns = {"observations": s, "actions": np.zeros((n, 1), np.float32), "rewards": np.array(rewards, np.float32)}
        columns |= {"next_observations": s + 1, "terminals": np.array(ends, bool), "timeouts": np.zeros(n, bool)}
        return Dataset("hopper", "morph", "x", "own", "x", "x", **columns)

    source, target = data([0, 2, 4], [1, 2, -1], [False, True, True]), data([6], [7], [True])
    cost = (np.zeros(3),) if script is otdf else ()

    def seen(**changes):
        args = runs.compose(script.Args, device="cpu", **changes)
        norm = script.state_moments(source, target, args)
        return script.on_device(source, target, norm, args, *cost), norm

    plain, norm = seen()
    assert plain.states[:, 0].tolist() == [0, 2, 4, 6]
    assert plain.next_states[:, 0].tolist() == [1, 3, 5, 7]
    assert plain.rewards.tolist() == [1, 2, -1, 7]
    assert plain.N_s == 3
    assert plain.rewards.dtype == plain.states.dtype == torch.float32
    assert [x.tolist() for x in norm] == [[0], [1]]
    assert norm[0].dtype == norm[1].dtype == np.float64

    # returns 1 + 2, -1 and 7: the largest is 8 above the smallest
    assert seen(scale_rewards=True)[0].rewards.tolist() == [125, 250, -125, 875]
    with pytest.raises(UserError, match="--scale-rewards"):
        script.reward_scale(target, target, runs.compose(script.Args, scale_rewards=True))

    # mean 3, variance (9 + 1 + 1 + 9) / 4 = 5
    scaled, norm = seen(normalise_states=True)
    sd = math.sqrt(5) + 1e-3
    np.testing.assert_allclose(scaled.states[:, 0], np.array([-3, -1, 1, 3]) / sd, rtol=1e-6)
    np.testing.assert_allclose(scaled.next_states[:, 0], np.array([-2, 0, 2, 4]) / sd, rtol=1e-6)
    assert scaled.rewards.tolist() == plain.rewards.tolist()
    np.testing.assert_allclose(np.concatenate(norm), [3, sd])

    # the policy sees the simulator's states as it saw the data's
    policy, acted = nn.Linear(1, 2), []
    monkeypatch.setattr(runs, "play", lambda args, act, **_: acted.append(act(np.array([[6.0]]))))
    with torch.no_grad():  # as `play` has it
        script.evaluate({"policy": policy, "Q": None}, norm, runs.compose(script.Args, device="cpu"))
        expected = policy(torch.tensor([[3 / sd]], dtype=torch.float32))
    expected = (expected[:, :1] if script is otdf else expected).tanh()
    np.testing.assert_allclose(acted[0], expected.numpy(), rtol=1e-6)


def test_learning_rate_is_torch_s_cosine():
    args = runs.compose(iql.Args, updates=20, lr=0.1)
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 20)
    for step in range(1, 21):
        assert iql.learning_rate(step, args) == pytest.approx(adam.param_groups[0]["lr"])
        adam.step()
        schedule.step()
    assert iql.learning_rate(17, runs.replace(args, cosine=False)) == 0.1


def test_samples_come_from_both_domains():
    data = iql.Data(*(torch.arange(10.0)[:, None],) * 2, *(torch.arange(10.0),) * 3, N_s=7)
    b = iql.sample(data, 100, 50)
    assert set(b.rewards[:100].tolist()) == set(range(7))
    assert set(b.rewards[100:].tolist()) == {7, 8, 9}
    assert (b.states[:, 0] == b.rewards).all()
    assert len(iql.sample(data, 0, 5).rewards) == 5


def test_official_numbers():
    common = {"updates": 1_000_000, "source_batch": 128, "target_batch": 128, "lr": 3e-4, "hidden": 256, "gamma": 0.99}
    common |= {"expectile": 0.7, "beta": 3.0, "max_weight": 100.0, "tau": 0.005, "cosine": True, "eval_every": 10_000}
    own = {"iql": {"official_bug": False}, "dara": {"eta": 0.1, "clip": 10, "noise": 1, "official_bug": False}}
    own["igdf"] = {"encoder_updates": 7_000, "encoder_dim": 64, "xi": 0.75, "alpha": 1.0, "official_bug": False}
    own["otdf"] = {"keep": 0.8, "cvae_updates": 10_000, "cvae_batch": 128, "cvae_hidden": 750, "cvae_lr": 1e-3}
    own["otdf"] |= {"cvae_kl": 0.5, "M": 10, "variance": 0.1, "ot_reg": 0.05, "official_bug": False}
    for name, values in own.items():
        for key, value in (common | values).items():
            assert runs.flatten(SCRIPTS[name].Args())[key] == value, (name, key)
    shifts = ("morph", "gravity", "kinematic")
    weights = {shift: otdf.defaults(runs.compose(otdf.Args, shift=shift))["reg_weight"] for shift in shifts}
    assert weights == {"morph": 0.5, "gravity": 0.5, "kinematic": 0.1}
    assert (bc.Args().batch, bc.Args().updates, bc.Args().hidden) == (256, 100_000, 256)


# --------------------------------------------------------------------------------------------------- DARA


def test_classifier_loss_and_correction_against_numpy():
    rng = np.random.default_rng(0)
    sas, sa = rng.normal(0, 3, (2, 6, 2)).astype(np.float32)
    target = np.array([0, 0, 0, 1, 1, 1])
    log_sas, log_sa = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (sas, sa))
    loss = dara.classifier_loss(*map(torch.from_numpy, (sas, sa, target))).item()
    rows = np.arange(6)
    assert loss == pytest.approx(-(log_sas[rows, target] + log_sa[rows, target]).mean(), rel=1e-5)
    dr = log_sas[:, 1] - log_sa[:, 1] - log_sas[:, 0] + log_sa[:, 0]
    found = dara.reward_correction(torch.from_numpy(sas), torch.from_numpy(sa), 4.0)
    np.testing.assert_allclose(found, dr.clip(-4, 4), atol=1e-5)
    assert (np.abs(dr) > 4).any()


def shifted(n, delta, sigma, seed):
    """Columns of n transitions of scalars: s' = s + a + delta + sigma noise with a ~ U(-1, 1)"""
    g = torch.Generator().manual_seed(seed)
    s, a = torch.randn(n, 1, generator=g), torch.rand(n, 1, generator=g) * 2 - 1
    s_next = s + a + delta + sigma * torch.randn(n, 1, generator=g)
    return s, a, torch.zeros(n), s_next, torch.zeros(n, dtype=torch.bool)


def joined(source, target, script=dara):
    """The data whose columns these are, the source's rows first."""
    return script.Data(*(torch.cat(columns) for columns in zip(source, target, strict=True)), N_s=len(source[0]))


def corrections(official_bug, delta=1.0, sigma=0.5):
    """dr of source transitions after training, and the exact logarithm of the densities' ratio"""
    torch.manual_seed(0)
    args = runs.compose(dara.Args, hidden=32, lr=3e-3)
    nets = dara.build(args, 1, 1, "cpu")
    source = shifted(5000, 0.0, sigma, 0)
    data = joined(source, shifted(5000, delta, sigma, 1))
    target = (torch.arange(256) >= 128).long()
    for _ in range(800):
        logits = dara.domain_logits(nets, dara.sample(data, 128, 128), 0.0, official_bug)
        dara.gradient_step(nets["adam_classifiers"], dara.classifier_loss(*logits, target))
    with torch.no_grad():
        every = dara.Batch(*source)
        dr = dara.reward_correction(*dara.domain_logits(nets, every, 0.0, official_bug), 10.0)
    x = (every.next_states - every.states - every.actions)[:, 0]
    return dr.numpy(), ((x * delta - delta**2 / 2) / sigma**2).numpy()


def test_dara_finds_the_ratio_of_densities_and_the_official_form_cannot():
    dr, exact = corrections(official_bug=False)
    assert np.corrcoef(dr, exact)[0, 1] > 0.95
    assert np.abs(dr - exact).mean() < 0.3 * np.abs(exact).mean()
    sure = np.abs(exact) > 1
    assert (np.sign(dr[sure]) == np.sign(exact[sure])).mean() > 0.98
    assert dr.mean() < -1  # source transitions lose reward: minus KL(source || target) = -2
    twice, _ = corrections(official_bug=True)
    assert np.abs(exact).max() > 4
    assert np.abs(twice).max() <= 2
    assert np.abs(twice).mean() < 0.7 * np.abs(dr).mean()


def test_official_classifiers_cannot_be_sure():
    nets = {"sas": nn.Linear(3, 2), "sa": nn.Linear(2, 2)}
    for net in nets.values():
        nn.init.zeros_(net.weight)
        net.bias.data = t(-50, 50)  # as certain of "target" as possible
    b, target = dara.Batch(*shifted(4, 0.0, 1.0, 0)), torch.ones(4, dtype=torch.long)
    right, twice = (dara.classifier_loss(*dara.domain_logits(nets, b, 0.0, bug), target) for bug in (False, True))
    assert right.item() == pytest.approx(0, abs=1e-6)
    assert twice.item() == pytest.approx(-2 * math.log(math.e / (1 + math.e)))  # 0.731 and no more


def test_corrections_go_to_source_rewards_alone(monkeypatch):
    args = runs.compose(dara.Args, hidden=8, eta=0.5, source_batch=6, target_batch=4)
    nets = dara.build(args, 1, 1, "cpu")
    seen = []

    def losses(nets, b, args, iql_losses=dara.iql_losses):
        seen.append(b.rewards)
        return iql_losses(nets, b, args)

    monkeypatch.setattr(dara, "iql_losses", losses)
    monkeypatch.setattr(dara, "reward_correction", lambda sas, sa, clip: torch.full((len(sas),), 3.0))
    dara.update(nets, joined(shifted(20, 0.0, 1.0, 0), shifted(20, 1.0, 1.0, 1)), args, 1)
    assert seen[0].tolist() == [1.5] * 6 + [0.0] * 4


# --------------------------------------------------------------------------------------------------- IGDF


def test_contrastive_loss_against_numpy():
    rng = np.random.default_rng(0)
    phi, psi, other = rng.normal(size=(4, 3)), rng.normal(size=(4, 3)), rng.normal(size=(5, 3))
    total = 0.0
    for i in range(4):
        total += np.log1p(np.exp(-phi[i] @ psi[i])) + sum(np.log1p(np.exp(phi[i] @ other[j])) for j in range(5))
    loss = igdf.contrastive_loss(*map(torch.from_numpy, (phi, psi, other))).item()
    assert loss == pytest.approx(total / 24)


def test_encoders_tell_the_target_s_transitions():
    """Target s' = s + a, source s' = s - a: a transition as the target's scores higher than one as the source's."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    s, a = torch.randn(8000, 2, generator=g), (torch.rand(8000, 2, generator=g) * 2 - 1)
    sign = torch.where(torch.arange(8000) < 4000, -1.0, 1.0)[:, None]  # source first
    data = igdf.Data(s, a, torch.zeros(8000), s + sign * a, torch.zeros(8000, dtype=torch.bool), 4000)
    args = runs.compose(igdf.Args, hidden=64, encoder_dim=16, lr=1e-3)
    nets = igdf.build(args, 2, 2, "cpu")
    before = igdf.score(nets, s, a, data.next_states)
    for _ in range(600):
        igdf.update_encoders(nets, data, args)
    s, a = s[:1000], a[:1000]
    far = a.norm(dim=1) > 0.7  # where the two differ at all
    consistent, other = (igdf.score(nets, s[far], a[far], (s + k * a)[far]) for k in (1, -1))
    assert (consistent > other).float().mean() > 0.9
    assert before.std() > 0
    assert consistent.abs().amax() <= 1 + 1e-6


def test_official_broadcast_gives_all_transitions_one_weight(monkeypatch):
    seen = {}
    data = joined(*(shifted(40, delta, 1.0, 0) for delta in (0.0, 1.0)), igdf)
    for bug in (False, True):
        torch.manual_seed(0)
        args = runs.compose(igdf.Args, hidden=8, encoder_dim=4, source_batch=8, target_batch=4, official_bug=bug)
        nets = igdf.build(args, 1, 1, "cpu")

        def losses(nets, b, args, weight, bug=bug, iql_losses=igdf.iql_losses):
            total, logs = iql_losses(nets, b, args, weight)
            with torch.no_grad():
                y = b.rewards + args.gamma * torch.where(b.terminal, 0.0, nets["V"](b.next_states)[0])
                seen[bug] = weight, (y - nets["Q"](b.states, b.actions)).square(), logs["losses/q"]
            return total, logs

        with monkeypatch.context() as patch:
            patch.setattr(igdf, "iql_losses", losses)
            igdf.update(nets, data, args, 1)
    weight, error, loss = seen[False]
    assert weight.shape == (6 + 4,)
    assert (weight[6:] == 1).all()
    assert weight[:6].std() > 0
    assert loss.item() == pytest.approx((weight * error).mean(1).sum().item(), rel=1e-5)
    official = sum((weight[:, None] * head).mean() for head in error)  # [B, 1] times [B]: a [B, B]
    assert seen[True][2].item() == pytest.approx(official.item(), rel=1e-5)
    assert abs(official - loss).item() > 1e-4 * loss.item()


def test_without_updates_of_the_encoders_random_ones_filter(files, tmp_path):
    final = {}
    for updates in (40, 0):
        igdf.train(tiny("igdf", files, tmp_path, encoder_updates=updates))
    for path in tmp_path.rglob("ckpt.pt"):
        done = torch.load(path, weights_only=True)["parts"]["record"]["done"]
        final["trained" if done.get("encoders") else "random"] = parameters(path)
    runs.seed_everything(1)
    first = igdf.build(tiny("igdf", files, tmp_path), 11, 3, "cpu")["phi"].state_dict()
    assert all((final["random"][f".phi.{key}"] == value).all() for key, value in first.items())
    assert not any((final["trained"][f".phi.{key}"] == value).all() for key, value in first.items())


# --------------------------------------------------------------------------------------------------- OTDF


def test_source_weights_by_hand():
    rows, weight = otdf.source_weights(t(3, 1, 5, 2), 3)
    assert rows.tolist() == [1, 3, 0]
    np.testing.assert_allclose(weight, np.exp([0, -0.25, -0.5]), rtol=1e-6)
    rows, weight = otdf.source_weights(t(2, 2), 1)  # nothing to choose between
    assert weight.tolist() == [1.0]


def test_official_policy_loss_is_cloning_times_a_number():
    torch.manual_seed(0)
    advantage, a, pi = torch.randn(6), torch.randn(6, 3), torch.randn(6, 3, requires_grad=True)

    def gradient(advantage, bug):
        return torch.autograd.grad(otdf.policy_loss(advantage, a, pi, 3.0, 100.0, bug), pi)[0]

    weight, error = (3 * advantage).exp().clamp(max=100), (a - pi).square().sum(1)
    official = otdf.policy_loss(advantage, a, pi, 3.0, 100.0, True).item()
    assert official == pytest.approx((weight.mean() * error.mean()).item(), rel=1e-5)
    other = advantage.flip(0)  # to whom the advantages belong
    torch.testing.assert_close(gradient(advantage, True), gradient(other, True))
    assert (gradient(advantage, False) - gradient(other, False)).abs().amax() > 1e-3


def test_cvae_loss_and_density_against_torch_distributions():
    torch.manual_seed(0)
    cvae, s, a = otdf.CVAE(4, 2, 16), torch.randn(5, 4), torch.rand(5, 2)
    mean, std = cvae.encode(s, a)
    prior = torch.distributions.kl_divergence(torch.distributions.Normal(mean, std), torch.distributions.Normal(0, 1))
    expected = (a - 0.3).square().mean() + 0.5 * prior.mean()
    torch.testing.assert_close(otdf.cvae_loss(a, torch.full_like(a, 0.3), mean, std, 0.5), expected)
    noise = torch.randn(7, 5, 4)
    log_sum = []
    for m in range(7):
        decoded = torch.distributions.Normal(cvae.decode(s, mean + std * noise[m]), math.sqrt(0.1))
        log_sum.append(decoded.log_prob(a).sum(1))
    found = otdf.behaviour_log_density(cvae, s, a, noise, 0.1)
    torch.testing.assert_close(found, torch.stack(log_sum).logsumexp(0))


def test_transport_costs_are_those_of_sinkhorn_and_computed_once(files, tmp_path, monkeypatch):
    import ot

    source, target = load_pair("hopper", "morph", files["s"], files["t"])
    args = tiny("otdf", files, tmp_path, ot_reg=0.2, ot_tol=1e-5)
    c = otdf.transport_costs(source, target, args)["c_hat"]
    x, y = (
        np.concatenate([d.observations, d.actions, d.next_observations], 1, dtype=np.float64) for d in (source, target)
    )
    C = 1 - (x / np.linalg.norm(x, axis=1, keepdims=True)) @ (y / np.linalg.norm(y, axis=1, keepdims=True)).T
    C /= (scale := C.max())
    assert otdf.mean_scaled_cost(x, y) == pytest.approx(C.mean())
    reg = float(f"{0.2 * C.mean():.2g}")
    P = ot.sinkhorn(np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y)), C, reg, stopThr=1e-10, numItermax=10_000)
    np.testing.assert_allclose(c, scale * (P * C).sum(1) / P.sum(1), rtol=1e-3)

    monkeypatch.setattr(taf_preprocess, "gate_and_weights", None)  # it would be called if anything were solved again
    again = otdf.transport_costs(source, target, runs.replace(args, seed=2, official_bug=True, updates=7))
    np.testing.assert_array_equal(again["c_hat"], c)


def test_evaluating_again_needs_no_transport_costs(files, tmp_path):
    args = tiny("otdf", files, tmp_path)
    result = otdf.train(args)
    shutil.rmtree(tmp_path / "preprocess")
    again = otdf.train(runs.replace(args, eval_only=True))
    assert again["returns"] == result["evaluations"][-1]["returns"]
    assert not (tmp_path / "preprocess").exists()


def test_otdf_follows_cheap_source_rows_and_the_target_s_behaviour():
    """One step, one state. The reward is a_0, and -a_0 in the expensive part of the source; a_1 is 0.5 in the target
    and -0.5 in the source: the filter decides where a_0 goes, the behaviour model where a_1 goes."""
    N_s = N_t = 400
    rng = torch.Generator().manual_seed(0)
    actions = torch.rand(N_s + N_t, 2, generator=rng) * 1.6 - 0.8
    actions[:N_s, 1], actions[N_s:, 1] = -0.5, 0.5
    expensive = torch.arange(N_s + N_t) < 0.75 * N_s
    rewards = actions[:, 0] * torch.where(expensive, -1.0, 1.0)
    nothing = torch.zeros(N_s + N_t, 3)
    columns = nothing, actions, rewards, nothing, torch.ones(N_s + N_t, dtype=torch.bool), expensive.float()
    data = otdf.Data(*columns, N_s)

    def learnt(**changes):
        options = {"hidden": 32, "lr": 5e-3, "source_batch": 96, "target_batch": 16, "keep": 0.25, "reg_weight": 0.0}
        options |= {"cvae_hidden": 32, "cvae_batch": 64, "M": 4, "updates": 300, "cosine": False, "beta": 5.0} | changes
        torch.manual_seed(0)
        args = runs.compose(otdf.Args, **options)
        nets = otdf.build(args, 3, 2, "cpu")
        for _ in range(200 if args.reg_weight else 0):  # otherwise nobody asks the model
            otdf.update_behaviour(nets, data, args)
        for step in range(1, 301):
            otdf.update(nets, data, args, step)
        total, logs = otdf.otdf_losses(nets, otdf.Batch(*columns), args, torch.ones(N_s + N_t))
        parts = [logs[f"losses/{name}"] for name in ("v", "q", "policy", "reg")]
        torch.testing.assert_close(total, parts[0] + parts[1] + parts[2] + args.reg_weight * parts[3])
        return nets["policy"](nothing[:1])[0, :2].tanh().tolist()

    plain, unfiltered, regularised = learnt(), learnt(keep=1.0), learnt(reg_weight=2.0)
    assert plain[0] > 0.4  # the cheap rows and the target agree
    assert plain[0] > unfiltered[0] + 0.2
    assert plain[1] < 0.2  # more than half of the rows are the source's
    assert regularised[1] > plain[1] + 0.2


# ---------------------------------------------------------------------------------------------- whole runs


@every_script
def test_a_run_from_start_to_end(name, files, tmp_path, monkeypatch):
    script, logged = SCRIPTS[name], []
    monkeypatch.setattr(run_record, "log", lambda writer, step, values, bar=None: logged.append((step, values)))
    args = tiny(name, files, tmp_path)
    result = script.train(args)
    folder = next(tmp_path.glob(f"{name}/hopper-morph-s-t-own/seed1-*"))

    keys = {"args", "summaries", "evaluations", "stages", "data", "versions", "device", "method", "changed"}
    assert keys <= result.keys()
    assert result["method"] == name
    assert result["changed"]["hidden"] == 8
    assert not result["changed"].keys() & {"seed", "source", "out", "quick"}
    assert [e["step"] for e in result["evaluations"]] == [50, 98, 99, 100]
    assert all(len(e["returns"]) == len(e["lengths"]) == 2 for e in result["evaluations"])
    assert set(result["summaries"]) == {"final", "mean_of_last_three", "best"}
    assert set(result["data"]) == ({"target"} if name == "bc" else {"source", "target"})
    assert {"policy", "evaluation"} <= set(result["stages"])

    values = [value for _, values in logged for value in values.values()]
    assert len(logged) > 5
    assert np.isfinite([float(value) for value in values]).all()
    assert any(key.startswith("losses/") for _, values in logged for key in values)

    runs.seed_everything(args.run.seed)
    first = script.build(args, 11, 3, "cpu")
    last = parameters(folder / "ckpt.pt")
    for part, net in first.items():
        for key, value in net.state_dict().items() if isinstance(net, nn.Module) else ():
            assert (last[f".{part}.{key}"] != value).any(), f"{part}.{key} was not trained"

    assert script.train(args) == result  # done: nothing is computed again
    again = script.train(runs.replace(args, eval_only=True))
    assert again["returns"] == result["evaluations"][-1]["returns"]


def test_a_run_with_scaled_rewards_and_normalised_states(files, tmp_path):
    """The stored policy acts as it did at the end, so its states are normalised by the same numbers."""
    flags = {"scale_rewards": True, "normalise_states": True}
    result = iql.train(args := tiny("iql", files, tmp_path, **flags))
    assert {name: result["changed"][name] for name in flags} == flags
    again = iql.train(runs.replace(args, eval_only=True))
    assert again["returns"] == result["evaluations"][-1]["returns"]
    other = iql.train(tiny("iql", files, tmp_path))
    assert other["evaluations"][-1]["returns"] != again["returns"]


class Death(Exception):
    pass


@every_script
def test_interrupted_and_resumed_is_uninterrupted(name, files, tmp_path, monkeypatch, send):
    script = SCRIPTS[name]
    whole = script.train(tiny(name, files, tmp_path / "whole"))
    rng = np.random.default_rng(NAMES.index(name))
    args, count = tiny(name, files, tmp_path / "parts"), 0
    stages = [f for f in ("update_encoders", "update_behaviour", "update") if hasattr(script, f)]
    total = UPDATES + 40 * (len(stages) - 1)
    # First a signal, after which the run saves and ends; then a death without warning, after a checkpoint.
    at = {int(rng.integers(5, total // 2)): "signal", int(rng.integers(total // 2 + 35, total - 1)): "death"}

    def disturbed(update):
        def one(*args, **options):
            nonlocal count
            count += 1
            if at.get(count) == "signal":
                send(signal.SIGINT)
            elif at.get(count) == "death":
                raise Death
            return update(*args, **options)

        return one

    with monkeypatch.context() as patch:
        for stage in stages:
            patch.setattr(script, stage, disturbed(getattr(script, stage)))
        with pytest.raises(SystemExit) as status:
            script.train(args)
        assert status.value.code == 130
        with pytest.raises(Death):
            script.train(args)
    torch.manual_seed(99)  # must not matter, whatever happened in between
    resumed = script.train(args)
    one, other = (parameters(next((tmp_path / p).rglob("ckpt.pt"))) for p in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert resumed["evaluations"] == whole["evaluations"]
    assert count > total - 40


def test_another_seed_is_another_run(files, tmp_path):
    one, other = (bc.train(tiny("bc", files, tmp_path, seed=seed)) for seed in (1, 2))
    assert one["evaluations"] != other["evaluations"]


def test_a_checkpoint_of_other_data_is_refused(files, tmp_path):
    name = Path(files["t"]).name
    for folder, file in (("a", "t"), ("b", "t2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(Path(files[file]).read_bytes())
    args = tiny("iql", files, tmp_path / "runs", target=str(tmp_path / "a" / name), updates=200)
    iql.train(args)
    folder = next((tmp_path / "runs").rglob("seed1-*"))
    (folder / "result.json").unlink()
    with pytest.raises(UserError, match="other data"):
        iql.train(runs.replace(args, target=str(tmp_path / "b" / name)))


@pytest.mark.parametrize(("name", "more"), [("iql", {"lr": 1e9}), ("bc", {"lr": 1e38})])
def test_divergence_ends_the_run(name, more, files, tmp_path):
    with pytest.raises(UserError, match="diverged at update"):
        SCRIPTS[name].train(tiny(name, files, tmp_path, **more))
    assert not list(tmp_path.rglob("result.json"))


def test_cloning_needs_no_source(files, tmp_path):
    args = tiny("bc", files, tmp_path, source="nowhere/to-be-found.hdf5")
    assert bc.train(args)["summaries"]["final"]["score"] is not None
    assert list(tmp_path.glob("bc/hopper-morph-to-be-found-t-own"))


@pytest.mark.parametrize(
    ("share", "size", "wanted"), [(0.0, 8, 0), (0.25, 8, 2), (0.5, 7, 4), (0.9, 10, 9), (1.0, 8, 8)]
)
def test_cloning_draws_its_share_from_the_source(share, size, wanted):
    """By hand: the first number of a state says its dataset, the second its row."""
    source, target = (
        bc.Data(torch.stack([torch.full((n,), mark), torch.arange(n).float()], 1), torch.zeros(n, 1))
        for n, mark in ((5, 1.0), (3, -1.0))
    )
    args, seen = runs.compose(bc.Args, source_share=share, batch=size), set()
    for _ in range(100):
        states = bc.sample_both({"source": source, "target": target}, args).states
        assert states[:, 0].tolist() == [1.0] * wanted + [-1.0] * (size - wanted)
        seen |= {*map(tuple, states.tolist())}
    assert len(seen) == 5 * (wanted > 0) + 3 * (wanted < size)  # every row of what is used


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9, 1.0])
def test_cloning_normalises_by_what_it_clones(share):
    """Against moments of the rows with weights, whose sum over a dataset is its share."""
    rng = np.random.default_rng(0)
    states = {"source": rng.normal(3, 2, (70, 4)), "target": rng.normal(-1, 0.5, (30, 4))}
    data = {role: SimpleNamespace(observations=x.astype(np.float32)) for role, x in states.items()}
    rows = np.concatenate([data["source"].observations, data["target"].observations]).astype(float)
    weights = np.repeat([share / 70, (1 - share) / 30], (70, 30))
    mu, sd = bc.state_moments(data, share)
    np.testing.assert_allclose(mu, np.average(rows, 0, weights))
    np.testing.assert_allclose(sd**2, np.average((rows - mu) ** 2, 0, weights))
    alone = bc.state_moments({"target": data["target"]}, 0.0)
    assert (alone[1] == data["target"].observations.std(0, dtype=float)).all()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_cloning_source_and_target_together(share, files, tmp_path):
    args = tiny("bc", files, tmp_path, source_share=share)
    result = bc.train(args)
    [folder] = tmp_path.glob("bc/hopper-morph-s-t-own/seed1-*")
    plain, changed = bc.Args(), runs.compose(bc.Args, source_share=share)
    name = runs.run_dir("runs", "bc", "task", 1, changed, plain, bc.ignore(changed)).name
    assert name == f"seed1-source_share{share:g}"
    assert {role: x["path"] for role, x in result["data"].items()} == {"source": files["s"], "target": files["t"]}
    assert result["changed"]["source_share"] == share
    runs.seed_everything(args.run.seed)
    first, last = bc.build(args, 11, 3, "cpu")["policy"].state_dict(), parameters(folder / "ckpt.pt")
    for key, value in first.items():
        assert (last[f".policy.{key}"] != value).any(), f"{key} was not trained"
    smaller = bc.train(runs.replace(args, source_size=100))
    assert smaller["data"]["source"]["transitions"] == 100
    assert len(list(tmp_path.glob("bc/*/*"))) == 2  # another size is another run, as it has an effect here

    # What the end of other runs is compared with is cloning of the target alone.
    assert run_texts.find_cloning(args, result["data"]["target"]["sha256"]) is None
    alone = bc.train(runs.replace(args, source_share=0.0, source_size=100))
    assert set(alone["data"]) == {"target"}
    assert run_texts.find_cloning(args, result["data"]["target"]["sha256"])[1] == alone["summaries"]["final"]["score"]
    assert "source_size" not in alone["changed"]


def test_cloning_the_source_alone_does_not_see_the_target_s_actions(files, tmp_path):
    """Another target with the same states and other actions."""
    rows = transitions(150, 1)
    write_hdf5(tmp_path / "t.hdf5", rows | {"actions": -rows["actions"]}, "embedded", {})
    weights = {}
    for share in (1.0, 0.5):
        for target in (files["t"], str(tmp_path / "t.hdf5")):
            out = tmp_path / f"{share}-{len(weights)}"
            bc.train(tiny("bc", files, out, target=target, source_share=share))
            weights[share, target] = parameters(next(out.glob("bc/*/*/ckpt.pt")))
        one, other = (weights[share, target] for target in (files["t"], str(tmp_path / "t.hdf5")))
        assert all(torch.equal(one[key], other[key]) for key in one) == (share == 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_share": -0.1}, "from 0 to 1, not -0.1"),
        ({"source_share": 1.5}, "from 0 to 1, not 1.5"),
        ({"source_share": 0.01, "batch": 8}, "--source-share 0.01 of --batch 8 leaves one dataset no transition"),
        ({"source_share": 0.99, "batch": 8}, "--source-share 0.99 of --batch 8 leaves one dataset no transition"),
    ],
)
def test_shares_that_cannot_be_are_refused(changes, words):
    with pytest.raises(UserError, match=re.escape(words)):
        bc.train(runs.compose(bc.Args, device="cpu", **changes))


# ------------------------------------------------------------------------------------------- command line


COMMON = runs.flatten(runs.RunArgs()) | runs.flatten(TaskArgs())
EXPLAINED = inspect.getsource(runs.RunArgs) + inspect.getsource(TaskArgs)


@every_script
def test_every_argument_is_read_and_explained(name):
    script = SCRIPTS[name]
    text = inspect.getsource(script)
    body, rest = inspect.getsource(script.Args), text[text.index("def defaults(") :]
    modules = (runs, run_record, evaluation, load_task, TaskArgs)
    shared = "".join(map(inspect.getsource, modules))
    for flag in runs.flatten(script.Args()):
        common = flag in COMMON  # explained in the shared classes, and read by the shared code or here
        read_in, explained_in = (rest + shared, EXPLAINED) if common else (rest, body)
        assert re.search(rf"\b(args(\.\w+)?|task|self)\.{flag}\b", read_in), f"nothing reads --{flag}"
        explanation = rf"    {flag}: .*\n    \"\"\".+\"\"\"\n"
        assert re.search(explanation, explained_in), f"--{flag} is not explained"


@every_script
def test_quick_is_a_default_that_flags_override(name):
    script = SCRIPTS[name]
    quick = runs.plain(script.Args, script.defaults, runs.compose(script.Args, quick=True, env="ant", seed=3))
    assert (quick.updates, quick.task.env, quick.run.seed) == (script.QUICK["updates"], "ant", 3)
    assert quick.updates <= 30_000
    assert script.resolve(runs.replace(quick, seed=0)).run.seed == 0


@every_script
def test_wrong_values_are_refused_in_one_line(name):
    script = SCRIPTS[name]
    plain = runs.plain(script.Args, script.defaults, script.Args())
    bad = [{"updates": 0}, {"hidden": 0}, {"seed": -1}, {"lr": 0.0}, {"device": "abacus"}]
    bad += [] if name == "bc" else [{"expectile": 1.0}, {"gamma": 1.0}]
    bad += {"igdf": [{"xi": 0.0}, {"xi": 1.5}], "otdf": [{"keep": 0.0}, {"ot_tol": 0.0}]}.get(name, [])
    for change in bad:
        with pytest.raises(UserError, match=f"--{next(iter(change)).replace('_', '-')}"):
            script.train(runs.replace(plain, **change))


FLAGS = (
    "--env --shift --source --target --seed --data --data-dir --source-size --out --device --quick --resume --eval-only"
)
FLAGS = [*FLAGS.split(), "--torch-deterministic", "--log-every", "--save-every", "--eval-every", "--eval-episodes"]


@every_script
def test_help_names_every_flag(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        SCRIPTS[name].main()
    help_text = capsys.readouterr().out
    assert "Paper: " in help_text
    for flag in [*FLAGS, *(f"--{flag.replace('_', '-')}" for flag in runs.flatten(SCRIPTS[name].Args()))]:
        assert flag in help_text


def test_scripts_start_from_anywhere(tmp_path):
    command = [sys.executable, ROOT / "baselines" / "otdf.py", "--target", "nothing.hdf5", "--source", "x.hdf5"]
    failed = subprocess.run([*command, "--out", "runs"], cwd=tmp_path, capture_output=True, text=True)
    assert failed.stderr.strip() == "error: x.hdf5: no such file"
    assert failed.returncode == 1
    assert not (tmp_path / "runs").exists()


# --------------------------------------------------------------------------------------- devices, learning


@every_script
def test_an_update_stays_on_its_device(name, files, tmp_path):
    """torch's `meta` device has no values: any .item(), any tensor left on the CPU fails."""
    script, args = SCRIPTS[name], tiny(name, files, tmp_path)
    nets = script.build(args, 11, 3, "meta")
    shapes = {"states": (60, 11), "actions": (60, 3), "next_states": (60, 11)}
    columns = [torch.empty(shapes.get(field, (60,)), device="meta") for field in script.Batch._fields]
    if name == "bc":
        data = {"target": bc.Data(*columns)}
    else:
        columns[4] = columns[4].bool()
        data = script.Data(*columns, N_s=40)
    for stage in ("update_encoders", "update_behaviour", "update"):
        if hasattr(script, stage):
            logs = getattr(script, stage)(nets, data, args, *([1] if stage == "update" else []))
            assert all(x.device.type == "meta" and x.shape == () for x in logs.values())


def test_iql_finds_the_values_of_a_chain():
    """Five states in a row, steps to the left or right with equal chance, a reward of 1 and the end on the right. The
    fixed point of Eqs. (5) and (6) is found by iteration over the table."""
    gamma, zeta, n = 0.9, 0.8, 5
    state, right = np.repeat(np.arange(n), 2), np.tile([0, 1], n)
    after, ends = np.clip(state + 2 * right - 1, 0, n - 1), (state == n - 1) & (right == 1)
    V = np.zeros(n)
    for _ in range(500):
        Q = np.where(ends, 1.0, gamma * V[after]).reshape(n, 2)
        low, high = Q.min(1), Q.max(1)
        V = (zeta * high + (1 - zeta) * low) / 1.0  # the expectile of two equally likely values
    one_hot = torch.eye(n)
    steps, failed = torch.from_numpy(2.0 * right - 1).float()[:, None], torch.from_numpy(ends)
    rows = one_hot[state], steps, failed.float(), one_hot[after], failed
    data = joined(rows, rows, iql)
    torch.manual_seed(0)
    args = runs.compose(iql.Args, hidden=32, lr=3e-3, gamma=gamma, expectile=zeta, beta=20.0, tau=0.05, updates=1200,
                    source_batch=64, target_batch=64)  # fmt: skip
    nets = iql.build(args, n, 1, "cpu")
    for step in range(1, args.updates + 1):
        iql.update(nets, data, args, step)
    with torch.no_grad():
        v, q = nets["V"](one_hot)[0].numpy(), nets["Q"](one_hot[state], steps).numpy().reshape(2, n, 2)
        pi = nets["policy"](one_hot).tanh().numpy()
    np.testing.assert_allclose(v, V, rtol=0.1)
    np.testing.assert_allclose(q, np.broadcast_to(Q, q.shape), rtol=0.1)
    assert (pi > 0.5).all()  # to the right, although the data go both ways equally often


def test_cloning_recovers_a_linear_policy():
    torch.manual_seed(0)
    s, K = torch.randn(4000, 3), torch.tensor([[0.2, -0.1], [0.1, 0.3], [-0.2, 0.1]])
    args = runs.compose(bc.Args, hidden=64, lr=1e-3, batch=128)
    nets, data = bc.build(args, 3, 2, "cpu"), bc.Data(s, (s @ K).clamp(-0.95, 0.95))
    for step in range(1000):
        bc.update(nets, {"target": data}, args, step)
    fresh = torch.randn(500, 3)
    with torch.no_grad():
        error = (nets["policy"](fresh).tanh() - (fresh @ K).clamp(-0.95, 0.95)).square().mean().sqrt()
    assert error < 0.03  # of actions with a standard deviation of 0.3


def test_states_are_normalised_for_cloning():
    x = np.array([[1.0, 5.0], [3.0, 5.0]], np.float32)
    mu, sd = x.mean(0), x.std(0)
    np.testing.assert_allclose(bc.normalise(x, mu, sd), [[-1, 0], [1, 0]], atol=1e-6)
    assert bc.normalise(np.array([[100.0, 6.0]]), mu, sd).tolist() == [[10, 10]]
