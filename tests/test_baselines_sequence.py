"""baselines/dt.py, qt.py and dadt.py: losses by hand, order of tokens, returns to go, learning, runs and resume."""

import dataclasses
import inspect
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import taf_dt
from baselines import dadt, dara, dt, igdf, iql, otdf, qt
from baselines import taf_dt_released as released
from dynashift import checkpoints, evaluation, progress, run_record, runs
from dynashift.checksums import write_hdf5
from dynashift.datasets import Dataset, TaskArgs, load_task
from dynashift.errors import UserError

ROOT = Path(__file__).parents[1]
SCRIPTS = [dt, qt, dadt]
TINY = dict(layers=2, heads=2, width=16, K=4, batch=8, dropout=0.1, eval_episodes=2)
script = pytest.mark.parametrize("m", SCRIPTS, ids=lambda m: m.__name__.split(".")[-1])


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def tiny(m, **changes):
    """Arguments of a very small run."""
    changes = TINY | (dict(hidden=16, drop_ends=False, ema_start=3) if m is qt else {}) | changes
    return runs.replace(runs.plain(m.Args, m.defaults, m.Args()), **changes)


def columns(lengths, seed=0, fails=True):
    """Episodes of those lengths with hopper's shapes; they fail at the end, or run into a limit."""
    rng, n = np.random.default_rng(seed), sum(lengths)
    end = np.zeros(n, bool)
    end[np.cumsum(lengths) - 1] = True
    obs = rng.normal(size=(n, 11)).astype(np.float32)
    after = np.roll(obs, -1, 0)
    after[end] = rng.normal(size=(end.sum(), 11))
    return {
        "observations": obs,
        "actions": rng.uniform(-1, 1, (n, 3)).astype(np.float32),
        "rewards": rng.normal(1, 1, n).astype(np.float32),
        "next_observations": after,
        "terminals": end & fails,
        "timeouts": end & (not fails),
    }


def dataset(lengths, seed=0, fails=True):
    return Dataset("hopper", "morph", "x", "own", "x", f"{seed}", **columns(lengths, seed, fails))


def inputs(B=3, K=5, seed=0):
    """tokens, states, actions, steps, valid"""
    g = torch.Generator().manual_seed(seed)
    tokens, states = torch.randn(B, K, generator=g), torch.randn(B, K, 11, generator=g)
    actions = torch.randn(B, K, 3, generator=g)
    return [tokens, states, actions, torch.arange(K).repeat(B, 1) + 7, torch.ones(B, K, dtype=torch.bool)]


def policy_of(m, **changes):
    torch.manual_seed(0)
    return m.Policy(11, 3, tiny(m, **changes)).eval()


def outputs(policy, *x, **options):
    """Actions and, where there are any, next states."""
    found = policy(*x, **options)
    return found if isinstance(found, tuple) else (found, None)


# ------------------------------------------------------------------------------------------------ losses


@script
def test_action_loss_by_hand(m):
    loss = m.masked_mse
    a, pi = torch.tensor([[[0.0, 1.0], [9.0, 9.0]], [[1.0, 1.0], [0.0, 0.0]]]), torch.zeros(2, 2, 2)
    valid = torch.tensor([[True, False], [True, True]])
    # squared errors 0, 1 | padding | 1, 1 | 0, 0: three steps of two entries
    assert loss(a, pi, valid).item() == pytest.approx((0 + 1 + 1 + 1 + 0 + 0) / 6)
    with pytest.raises(AssertionError):
        loss(a, pi[..., :1], valid)
    with pytest.raises(AssertionError):
        loss(a, pi, valid[..., None])


def test_k_step_target_is_a_plain_loop():
    rng, gamma, K = np.random.default_rng(0), 0.9, 6
    r, q_last = rng.normal(size=(5, K)), rng.normal(size=5)
    failed = np.array([0, 1, 0, 1, 0], bool)
    terminal = np.zeros((5, K), bool)
    terminal[:, -1] = failed
    expected = np.zeros((5, K))
    for b in range(5):
        for i in range(K):
            total = sum(gamma ** (j - i) * r[b, j] for j in range(i, K - 1))  # the last reward is not in it
            expected[b, i] = total + (0 if failed[b] else gamma ** (K - 1 - i) * q_last[b])
    found = qt.k_step_target(*(torch.tensor(x) for x in (r, terminal, q_last)), gamma)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_critic_loss_and_q_term_by_hand():
    q = torch.tensor([[[1.0, 2.0, 50.0]], [[0.0, 4.0, 50.0]]])  # [2, 1, 3]
    y, valid = torch.tensor([[3.0, 3.0, -7.0]]), torch.tensor([[True, True, True]])
    assert qt.critic_loss(q, y, valid).item() == pytest.approx((4 + 1) / 2 + (9 + 1) / 2)  # not the last step
    valid = torch.tensor([[False, True, True]])
    assert qt.critic_loss(q, y, valid).item() == pytest.approx(1 + 1)
    q = torch.tensor([[[1.0, -3.0, 9.0]], [[2.0, 4.0, 9.0]]], requires_grad=True)
    valid = torch.tensor([[True, True, False]])
    found = set()
    for seed in range(8):
        torch.manual_seed(seed)
        term = qt.q_term(q, valid)
        found.add(round(term.item(), 5))
        (gradient,) = torch.autograd.grad(term, q)
        head = 0 if gradient[0].abs().sum() > 0 else 1
        scale = (2 + 4) / 2 if head == 0 else (1 + 3) / 2  # the other one's mean size, a constant
        torch.testing.assert_close(gradient[head, 0], torch.tensor([-0.5, -0.5, 0.0]) / scale)
        assert gradient[1 - head].abs().sum() == 0
    assert found == {round(-(1 - 3) / 2 / 3, 5), round(-(2 + 4) / 2 / 2, 5)}


@script
def test_learning_rates_are_those_of_torch_schedulers(m):
    args = tiny(m, updates=50, **(dict(iteration=4, period=15) if m is qt else dict(warmup=7)))
    adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=args.lr)
    if m is qt:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=args.period)
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda i: min((i + 1) / args.warmup, 1))
    for step in range(1, 51):
        assert m.learning_rate(step, args) == pytest.approx(adam.param_groups[0]["lr"], rel=1e-9)
        adam.step()
        if m is not qt or step % args.iteration == 0:
            schedule.step()


# ---------------------------------------------------------------------------------------- tokens and windows


@script
def test_an_output_depends_on_its_past_alone(m):
    policy, x, K = policy_of(m), inputs(), 5
    a, s_next = outputs(policy, *x)
    kinds = {"token": 0, "state": 1, "action": 2}
    for t in range(K):
        for kind, i in kinds.items():
            y = [z.clone() for z in x]
            y[i][:, t] += 1.0
            b, after = outputs(policy, *y)
            # the action of step t sees R_t and s_t, but not a_t
            first = t + (kind == "action")
            assert torch.equal(a[:, :first], b[:, :first]), (kind, t)
            changed = (a != b).flatten(2).any(2).any(0)
            assert changed[first:].all(), (kind, t)
            if s_next is not None:  # the next state of step t sees all of step t
                first = min(t, s_next.shape[1])
                assert torch.equal(s_next[:, :first], after[:, :first]), (kind, t)
                assert (s_next != after).flatten(2).any(2).any(0)[first:].all(), (kind, t)


@script
def test_padding_changes_nothing(m):
    policy, x = policy_of(m), inputs()
    a, s_next = outputs(policy, *x)
    for fill in (0, 1):
        pads = [torch.full((3, 2, *z.shape[2:]), fill, dtype=z.dtype) for z in x]
        pads[4] = torch.zeros(3, 2, dtype=torch.bool)
        b, after = outputs(policy, *(torch.cat([p, z], 1) for p, z in zip(pads, x, strict=True)))
        assert torch.isfinite(b).all()
        torch.testing.assert_close(b[:, 2:], a, rtol=1e-5, atol=1e-6)
        if s_next is not None:
            torch.testing.assert_close(after[:, 2:], s_next, rtol=1e-5, atol=1e-6)
    last = outputs(policy, *x, only_last=True)[0]
    torch.testing.assert_close(last, a[:, -1:], rtol=1e-5, atol=1e-6)


@script
def test_gradients_of_padded_windows_are_finite(m):
    policy, x = policy_of(m).train(), inputs()
    x[4][:, :3] = False
    a, s_next = outputs(policy, *x)
    (a.sum() + (0 if s_next is None else s_next.sum())).backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)


def one_product(state: dict) -> dict:
    """Weights of taf_dt.py's layers, where queries, keys and values come from one product."""
    found = {}
    for name, x in state.items():
        if "key_value" in name:
            continue
        if "query" in name:
            x = torch.cat([x, state[name.replace("query", "key_value")]])
        found[name.replace("query", "qkv")] = x
    return found


@script
def test_a_layer_is_that_of_taf_dt(m):
    """Same weights, same numbers: taf_dt.py computes queries apart from keys, and only for the tokens that are read."""
    torch.manual_seed(0)
    mine, theirs = m.Block(16, 2, 0.1).eval(), taf_dt.Block(16, 2, 0.1).eval()
    for parameter in theirs.parameters():  # biases begin at 0, where errors would hide
        parameter.data += 0.1 * torch.randn_like(parameter)
    mine.load_state_dict(one_product(theirs.state_dict()))
    x, valid = torch.randn(3, 7, 16), torch.ones(3, 7, dtype=torch.bool)
    valid[1, :3] = False
    ones = torch.ones(7, 7, dtype=torch.bool)
    mask = ones.tril() & valid[:, None, None] | ones.tril().triu()
    added = torch.where(mask, 0.0, -torch.inf)
    for read in (slice(None), slice(1, None, 3), slice(6, None)):
        torch.testing.assert_close(mine(x, mask)[:, read], theirs(x, added, read), rtol=0, atol=1e-6)


@script
def test_a_layer_is_that_of_torch(m):
    """nn.TransformerEncoderLayer with the normalisation first, on the same weights."""
    torch.manual_seed(0)
    mine = m.Block(16, 2, 0.1).eval()
    theirs = torch.nn.TransformerEncoderLayer(16, 2, 64, 0.1, batch_first=True, norm_first=True).eval()
    theirs.self_attn.in_proj_weight.data, theirs.self_attn.in_proj_bias.data = mine.qkv.weight.data, mine.qkv.bias.data
    theirs.self_attn.out_proj, theirs.linear1, theirs.linear2 = mine.out, mine.up, mine.down
    x, ones = torch.randn(3, 7, 16), torch.ones(7, 7, dtype=torch.bool)
    expected = theirs(x, src_mask=~ones.tril())  # true there: not to be seen
    torch.testing.assert_close(mine(x, ones.tril()[None, None]), expected, rtol=1e-5, atol=1e-6)


@script
def test_dropout_is_there_in_training_alone(m):
    policy, x = policy_of(m, dropout=0.5), inputs()
    first, again = (outputs(policy, *x)[0] for _ in range(2))
    assert torch.equal(first, again)
    policy.train()
    torch.manual_seed(0)
    one, other = (outputs(policy, *x)[0] for _ in range(2))
    torch.manual_seed(0)
    repeated = outputs(policy, *x)[0]
    assert not torch.equal(one, other)
    assert torch.equal(one, repeated)


@script
def test_windows_are_consecutive_steps_of_one_episode(m):
    source, target, args = dataset([1, 6, 3], 0), dataset([4, 9], 1, fails=False), tiny(m)
    data, mu, sd = m.merge(source, target, "cpu")
    obs = np.concatenate([source.observations, target.observations])
    np.testing.assert_allclose(data.states, (obs - obs.mean(0)) / (obs.std(0) + 1e-6), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mu, obs.mean(0), rtol=1e-4, atol=1e-6)
    ends, K = np.cumsum([1, 6, 3, 4, 9]), args.K
    begins, rewards = np.array([0, *ends[:-1]]), np.concatenate([source.rewards, target.rewards])
    b = m.windows(data, torch.arange(len(obs)), K)
    for i in range(len(obs)):
        episode = np.searchsorted(ends, i, side="right")
        rows = np.arange(i, min(i + K, ends[episode]))
        assert b.valid[i].tolist() == [False] * (K - len(rows)) + [True] * len(rows)
        assert torch.equal(b.states[i, -len(rows) :], data.states[rows])
        assert torch.equal(b.actions[i, -len(rows) :], data.actions[rows])
        assert b.steps[i, -len(rows) :].tolist() == (rows - begins[episode]).tolist()
        to_go = [rewards[k : ends[episode]].sum() / 1000 for k in rows]
        np.testing.assert_allclose(b.tokens[i, -len(rows) :], to_go, rtol=1e-4, atol=1e-7)
        for padding in (x[i, : K - len(rows)] for x in b):
            assert padding.abs().sum() == 0 if padding.dtype != torch.bool else not padding.any()
        if m is dadt:  # the true next state, at the end of the window and of the episode too
            after = np.concatenate([source.next_observations, target.next_observations])[rows]
            np.testing.assert_allclose(b.next_states[i, -len(rows) :], (after - mu) / (sd + 1e-6), rtol=1e-4, atol=1e-5)
        if m is qt:
            np.testing.assert_allclose(b.rewards[i, -len(rows) :], rewards[rows])
            failed = np.concatenate([source.terminals, target.terminals])[rows]
            assert b.terminal[i, -len(rows) :].tolist() == failed.tolist()


@script
def test_half_of_a_batch_is_of_each_domain(m):
    source, target = dataset([30, 30], 0), dataset([10], 1)
    source.actions[:], target.actions[:] = 1.0, -1.0
    for merge, low, high in (("half", 8, 8), ("concat", 11, 16)):
        args = tiny(m, merge=merge, batch=16)
        torch.manual_seed(0)
        b = m.sample_windows(m.merge(source, target, "cpu")[0], args)
        assert low <= (b.actions[:, -1, 0] > 0).sum() <= high


def test_qt_drops_window_starts_near_the_ends():
    source, target, K = dataset([12, 5, 7], 0), dataset([9], 1), 4
    data = qt.drop_ends(qt.merge(source, target, "cpu")[0], K)
    assert data.starts_s.tolist() == [*range(8), 12, 17, 18, 19]  # not the last K steps of an episode
    assert data.starts_t.tolist() == [24 + i for i in range(5)]
    data = qt.drop_ends(qt.merge(dataset([30], 0), target, "cpu")[0], 6)
    assert len(data.starts_s) == 24
    with pytest.raises(UserError, match="longer than K = 4"):
        qt.drop_ends(qt.merge(dataset([4], 0), target, "cpu")[0], K)
    for source_name in ("medium", "medium-replay", "medium-expert"):
        assert runs.plain(qt.Args, qt.defaults, runs.compose(qt.Args, source=source_name)).drop_ends
        assert not runs.plain(qt.Args, qt.defaults, runs.compose(qt.Args, env="walker2d", source=source_name)).drop_ends


# --------------------------------------------------------------------------------------------- evaluation


class Played:
    """A simulator that plays a recorded episode, whatever is done."""

    act_dim = 3

    def __init__(self, episode, n):
        self.episode, self.n, self.t = episode, n, 0

    def reset(self, seeds):
        return np.repeat(self.episode.observations[:1], self.n, 0)

    def step(self, actions):
        assert actions.shape == (self.n, 3)
        reward, obs = self.episode.rewards[self.t], self.episode.next_observations[self.t]
        self.t += 1
        ended = np.full(self.n, self.t == len(self.episode))
        return np.repeat(obs[None], self.n, 0), np.full(self.n, float(reward)), ended, ended & False

    def close(self):
        pass


@script
def test_returns_to_go_are_the_same_in_training_and_rollout(m, monkeypatch):
    """A rollout that meets an episode of the data, asked for its return, sees the tokens of that episode's windows."""
    episode, args = dataset([11], 1), tiny(m, K=4, eval_episodes=1)
    data, *norm = m.merge(dataset([9], 0), episode, "cpu")
    second = {} if m is qt else {"second_target": 5000.0}
    args = runs.replace(args, return_target=float(episode.returns[0]), **second)
    monkeypatch.setattr(evaluation, "make_batch", lambda env, shift, n: Played(episode, n))
    nets, seen = m.build(args, 11, 3, "cpu"), []

    def recorded(R, S, A, T, valid, only_last):
        seen.append([x[0].clone() for x in (R, S, A, T, valid)])
        a = torch.as_tensor(episode.actions[len(seen) - 1]).expand(len(R), 1, 3)
        return a if m is dt else (a, None)

    monkeypatch.setattr(nets["policy"], "forward", recorded)
    result = m.evaluate(nets, norm, args, *([False] if m is qt else []))
    np.testing.assert_allclose(result["returns"], episode.returns, rtol=1e-6)
    assert result["lengths"] == [11]
    for t in range(11):
        rows = 9 + torch.arange(max(0, t - 3), t + 1)
        R, S, A, T, valid = (x[-len(rows) :] for x in seen[t])
        assert valid.all()
        assert seen[t][4].sum() == len(rows)
        torch.testing.assert_close(R, data.tokens[rows], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(S, data.states[rows])
        torch.testing.assert_close(A[:-1], data.actions[rows][:-1])
        assert torch.equal(T, data.steps[rows])


def test_guided_candidates(monkeypatch):
    args = tiny(qt, candidates=7, guided_noise=0.0, guided_returns=(3000.0, 1000.0), return_target=3000.0, K=4)
    nets = qt.build(args, 11, 3, "cpu")
    nets["policy"].eval()
    R, S, A, T, valid = inputs(2, 4)
    valid[1, :3] = False
    R, S, A, T = R * valid, S * valid[..., None], A * valid[..., None], T * valid
    seen, forward = [], nets["policy"].forward
    monkeypatch.setattr(nets["policy"], "forward", lambda *x, **o: seen.append(x) or forward(*x, **o))
    a = qt.guided_action(nets, R, S, A, T, valid, args, torch.Generator().manual_seed(0))
    assert a.shape == (2, 1, 3)
    tokens = seen[0][0].view(2, 7, 4)
    q = nets["critics_bar"](S[0, -2], A[0, -2]).amin(0) / 1000
    for c in range(7):
        other = (R - (0.0 if c < 4 else 2.0)) * valid
        last = other[:, -1].clone()
        if c == 6:  # what the critics expect, in the episode that has a last step
            last[0] = q - (R[0, -2] - R[0, -1])
        torch.testing.assert_close(tokens[:, c, :-1], other[:, :-1])
        torch.testing.assert_close(tokens[:, c, -1], last)
    same = runs.replace(args, guided_returns=(3000.0,), candidates=1)
    greedy = nets["policy"](R[1:], S[1:], A[1:], T[1:], valid[1:], only_last=True)[0]
    found = qt.guided_action(nets, R[1:], S[1:], A[1:], T[1:], valid[1:], same, torch.Generator())
    torch.testing.assert_close(found, greedy)


# ---------------------------------------------------------------------------------- agreement with TAF-DT


def test_qt_and_the_released_taf_dt_agree_where_the_algorithms_do(monkeypatch):
    """Same weights and batch: same actions, next states, target, losses, and the same critics after an update."""
    args = tiny(qt, dropout=0.0, K=5, eta=2.0, clip_grad=5.0, lr=1e-3)
    theirs = runs.compose(
        released.Args,
        token="rtg", state_loss=1, layers=2, heads=2, width=16, hidden=16, dropout=0.0, K=5, alpha=2.0, eta_reg=0.0,
        clip_grad=5.0, lr=1e-3, cvae_hidden=8, target_batch=8, beta=0.0, return_target=3000.0, M=1,
        tau=args.tau,
    )  # fmt: skip
    torch.manual_seed(1)
    nets, other = qt.build(args, 11, 3, "cpu"), released.build(theirs, 11, 3, "cpu")
    for name in ("policy", "policy_bar", "critics", "critics_bar"):
        for parameter in other[name].parameters():  # biases begin at 0, where errors would hide
            parameter.data += 0.05 * torch.randn_like(parameter)
        nets[name].load_state_dict(one_product(other[name].state_dict()))
    data, *_ = qt.merge(dataset([9, 3, 14], 0), dataset([5, 20], 1, fails=False), "cpu")
    b = qt.windows(data, torch.tensor([0, 7, 10, 20, 25, 27, 31, 50]), args.K)
    assert b.terminal[:, -1].any()
    assert not b.valid.all()
    x = b.tokens, b.states, b.actions, b.steps, b.valid
    weight = b.valid.float()
    their_b = taf_dt.Batch(*x, b.rewards, b.terminal, weight, weight)
    close = dict(rtol=1e-4, atol=1e-6)

    nets["policy"].eval(), other["policy"].eval()
    pi, s_next = nets["policy"](*x)
    their_pi, their_s = other["policy"].predict(their_b)
    at = b.valid
    torch.testing.assert_close(pi[at], their_pi[at], **close)
    torch.testing.assert_close(s_next[at[:, :-1]], their_s[at[:, :-1]], **close)
    a_last = nets["policy_bar"](*x, only_last=True)[0][:, 0]
    torch.testing.assert_close(a_last, other["policy_bar"](their_b, only_last=True)[:, 0], **close)
    q, their_q = nets["critics"](b.states, b.actions), other["critics"](b.states, b.actions)
    torch.testing.assert_close(q, their_q, **close)

    q_last = nets["critics_bar"](b.states[:, -1], a_last).amin(0)
    y = qt.k_step_target(b.rewards, b.terminal, q_last, args.gamma)
    their_y = released.k_step_target(b.rewards, b.terminal, q_last, theirs.gamma)
    torch.testing.assert_close(y[at], their_y[at], **close)
    their_loss = released.critic_loss(their_q, their_y, weight, b.valid)
    torch.testing.assert_close(qt.critic_loss(q, y, b.valid), their_loss, **close)
    torch.testing.assert_close(
        qt.masked_mse(b.actions, pi, b.valid), taf_dt.dt_loss(b.actions, their_pi, weight), **close
    )
    for seed in range(4):
        torch.manual_seed(seed)
        mine = qt.q_term(nets["critics"](b.states, pi), b.valid)
        torch.manual_seed(seed)
        torch.testing.assert_close(mine, released.q_term(other["critics"](b.states, their_pi), b.valid), **close)

    nets["policy"].train(), other["policy"].train()
    monkeypatch.setattr(qt, "sample_windows", lambda *_: b)
    q_terms, q_term = [], qt.q_term
    monkeypatch.setattr(qt, "q_term", lambda *x: q_terms.append(q_term(*x)) or q_terms[-1])
    logs = qt.update(nets, data, args, 1)
    their_logs = released.update_critics(other, their_b, theirs) | released.update_policy(other, their_b, theirs)
    torch.testing.assert_close(logs["losses/critic"], their_logs["losses/critic"], **close)
    torch.testing.assert_close(logs["losses/action"], their_logs["losses/dt"], **close)
    torch.testing.assert_close(logs["losses/state"], their_logs["losses/state"], **close)
    # the policy's whole loss, from parts computed by hand: each valid step but a window's last predicts the next state
    error = (s_next - b.states[:, 1:]).square().mean(-1)[b.valid[:, :-1]].mean()
    torch.testing.assert_close(logs["losses/state"], error, **close)
    whole = logs["losses/action"] + args.state_loss * error + args.eta * q_terms[0]
    torch.testing.assert_close(logs["charts/q_policy"], their_logs["charts/q_policy"], **close)
    torch.testing.assert_close(logs["losses/policy"], whole, **close)
    for name in ("critics", "critics_bar"):
        for mine, their in zip(nets[name].parameters(), other[name].parameters(), strict=True):
            torch.testing.assert_close(mine, their, rtol=1e-3, atol=2e-5)


# ------------------------------------------------------------------------------------- learning and updates


def bandit(m, reward, n=512):
    """Two-step episodes in constant states: the first action decides the reward, the second does nothing."""
    rng = np.random.default_rng(0)
    raw = columns([2] * n, 0)
    raw["observations"][:] = np.tile(np.eye(2, 11), (n, 1))
    raw["next_observations"][:] = np.tile(np.eye(2, 11)[::-1], (n, 1))
    raw["actions"][:] = rng.uniform(-0.9, 0.9, (2 * n, 3))
    raw["rewards"][0::2], raw["rewards"][1::2] = reward(raw["actions"][0::2]), 0
    data = Dataset("hopper", "morph", "x", "own", "x", "x", **raw)
    return m.merge(data, data, "cpu")[0]


@pytest.mark.parametrize("m", [dt, dadt])
def test_commanded_returns_are_reproduced_in_order(m):
    """The return is 1000 times the first action's first entry: asked for r, the policy should answer r."""
    torch.manual_seed(0)
    args = tiny(m, K=2, dropout=0.0, batch=64, layers=1, warmup=20, lr=5e-3, clip_grad=1.0)
    data = bandit(m, lambda a: 1000 * a[:, 0])
    nets = m.build(args, 11, 3, "cpu")
    for step in range(1, 251):
        m.update(nets, data, args, step)
    nets["policy"].eval()
    asked = torch.linspace(-0.8, 0.8, 9)
    x = asked[:, None], data.states[:1].expand(9, 1, -1), torch.zeros(9, 1, 3), torch.zeros(9, 1, dtype=torch.long)
    a = outputs(nets["policy"], *x, torch.ones(9, 1, dtype=torch.bool))[0][:, 0]
    assert (a[:, 0].diff() > 0).all()
    torch.testing.assert_close(a[:, 0], asked, atol=0.25, rtol=0)
    assert a[:, 1:].abs().max() < 0.25  # the rest does not matter: its mean


def test_dadt_learns_linear_dynamics():
    """s' = A s + B a is linear, as the head is: the error falls to a few per cent of the variance."""
    torch.manual_seed(0)
    rng, args = np.random.default_rng(0), tiny(dadt, K=1, dropout=0.0, width=32, batch=64, layers=1, lr=5e-3, warmup=20)
    args = runs.replace(args, clip_grad=1.0)
    A, B = 0.9 * np.linalg.qr(rng.normal(size=(11, 11)))[0], rng.normal(size=(3, 11))
    raw = columns([1] * 4000, fails=False)
    raw["next_observations"][:] = raw["observations"] @ A + raw["actions"] @ B
    data, *_ = dadt.merge(*[Dataset("hopper", "morph", "x", "own", "x", "x", **raw)] * 2, "cpu")
    nets = dadt.build(args, 11, 3, "cpu")
    first = None
    for step in range(1, 301):
        loss = dadt.update(nets, data, args, step)["losses/state"].item()
        first = first or loss
    assert first > 1
    assert loss < 0.06 * data.next_states.var().item()


def test_qt_prefers_what_its_critics_prefer():
    """Reward 2 + 2 a or 2 - 2 a, a the first entry: cloning answers 0, QT the best action. The critics know both."""
    found, grid = {}, torch.zeros(9, 3)
    grid[:, 0] = torch.linspace(-0.8, 0.8, 9)
    for eta, sign in ((0.0, 1), (2.0, 1), (2.0, -1)):
        torch.manual_seed(0)
        args = tiny(qt, K=2, dropout=0.0, batch=32, layers=1, eta=eta, lr=3e-3, clip_grad=5.0, ema_start=10)
        data = bandit(qt, lambda a, sign=sign: 2 + 2 * sign * a[:, 0])
        data = data._replace(tokens=torch.zeros_like(data.tokens))  # nothing is asked for: the critics alone decide
        nets = qt.build(args, 11, 3, "cpu")
        for step in range(1, 121):
            qt.update(nets, data, args, step)
        b = qt.windows(data, torch.arange(0, 64, 2), 2)
        found[eta, sign] = nets["policy"].eval()(b.tokens, b.states, b.actions, b.steps, b.valid)[0][:, 0, 0].mean()
        q = nets["critics"](data.states[:1].expand(9, -1), grid).mean(0)
        torch.testing.assert_close(q, 2 + 2 * sign * grid[:, 0], atol=0.6, rtol=0)
    assert abs(found[0.0, 1]) < 0.2
    assert found[2.0, 1] > 0.7
    assert found[2.0, -1] < -0.7


def test_qt_says_whether_its_critics_know_the_returns():
    """Critics that are told the returns, and ones that are told their opposite, against a loop over the episodes."""
    gamma, lengths = 0.9, ([30, 20], [25, 40])
    source, target = dataset(lengths[0], 0), dataset(lengths[1], 1, fails=False)
    data = qt.merge(source, target, "cpu")[0]
    expected = []
    for part in (source, target):
        for rewards in np.split(part.rewards.astype(float), part.starts[1:]):
            expected += [sum(gamma**k * r for k, r in enumerate(rewards[i:])) for i in range(len(rewards))]
    rows = torch.arange(len(expected))
    np.testing.assert_allclose(qt.discounted_returns(data, rows, gamma), expected, rtol=1e-4, atol=1e-5)

    known = {tuple(s.tolist()): x for s, x in zip(data.states, expected, strict=True)}
    # Of the target, whose episodes run into a limit, the rows with 0.9^left < 0.05: 29 steps or more before it.
    counted = [*range(50), *range(75, 75 + 12)]
    for sign in (1, -1):
        nets = {"critics": lambda s, a, sign=sign: torch.tensor([[sign * known[tuple(x.tolist())] for x in s]] * 2)}
        found = qt.check_critics(nets, data, gamma, n=400)
        assert found["correlation"] == pytest.approx(sign, abs=1e-4)
        assert found["q"] == pytest.approx(sign * found["return"], rel=1e-4)
    both = [np.mean([expected[i] for i in counted[:50]]), np.mean([expected[i] for i in counted[50:]])]
    assert min(both) - 0.1 < found["return"] < max(both) + 0.1
    short = qt.merge(dataset([5], 0, fails=False), dataset([5], 1, fails=False), "cpu")[0]
    assert qt.check_critics(nets, short, 0.99)["return"] is None


@script
def test_an_update_waits_for_nothing(m):
    """On the meta device, which has shapes and no numbers: .item() or a branch on a value would fail there."""
    args = tiny(m)
    data, *_ = m.merge(dataset([9, 9], 0), dataset([9], 1), "cpu")
    data = type(data)(*(x.to("meta") for x in data))
    with torch.device("meta"):
        nets = m.build(args, 11, 3, "meta")
    for step in (2, 3, 5):
        logs = m.update(nets, data, args, step)
    assert all(x.device.type == "meta" and x.shape == () for x in logs.values())


@script
def test_target_networks_and_checkpoint(m):
    """All that has a state is in what is saved; QT's slow copies follow by their rates."""
    args = tiny(m)
    nets = m.build(args, 11, 3, "cpu")
    if m is not qt:
        assert set(nets) == {"policy", "adam"}
        return
    assert set(nets) == {"policy", "critics", "policy_bar", "critics_bar", "adam_policy", "adam_critics"}
    data, *_ = m.merge(dataset([9, 9], 0), dataset([9], 1), "cpu")
    first = [p.clone() for p in nets["policy_bar"].parameters()]
    slow = [p.clone() for p in nets["critics_bar"].parameters()]
    for step in range(1, 5):  # not yet: ema_start is 3, and the first multiple of 5 comes after
        m.update(nets, data, args, step)
        for old, bar, net in zip(slow, nets["critics_bar"].parameters(), nets["critics"].parameters(), strict=True):
            old.lerp_(net.detach(), args.tau)
            torch.testing.assert_close(old, bar)
    assert all(torch.equal(a, b) for a, b in zip(first, nets["policy_bar"].parameters(), strict=True))
    m.update(nets, data, args, 5)
    for old, bar, net in zip(first, nets["policy_bar"].parameters(), nets["policy"].parameters(), strict=True):
        torch.testing.assert_close(bar, old.lerp(net.detach(), 1 - args.ema_decay))


# --------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def files(tmp_path):
    paths = [str(tmp_path / f"{name}.hdf5") for name in ("from", "to")]
    for seed, path in enumerate(paths):
        write_hdf5(path, columns([40, 7, 1, 30], seed, fails=bool(seed)), "own", {})
    return dict(zip(("source", "target"), paths, strict=True))


def small_run(m, files, out, **changes):
    changes = dict(updates=12, eval_every=5, save_every=4, log_every=3, out=out, device="cpu", **files) | changes
    changes |= {"drop_ends": True} if m is qt else {}
    return tiny(m, **changes)


@script
def test_run_through_and_bit_exact_resume(m, files, tmp_path, monkeypatch, capsys, send):
    name, logged = m.__name__.split(".")[-1], []
    log = progress.log
    monkeypatch.setattr(
        run_record, "log", lambda w, step, values, bar=None: logged.append(values) or log(w, step, values)
    )
    args = small_run(m, files, tmp_path / "a", diagnostics=True)
    result = m.train(args)
    text = capsys.readouterr().out
    assert "the target data's own mean" in text
    (file,) = (tmp_path / "a").glob("*/*/*/result.json")
    assert runs.read_result(file) == result
    assert file.parts[-4:-2] == (name, "hopper-morph-from-to-own")
    assert result["method"] == name
    assert {"args", "summaries", "evaluations", "stages", "data", "versions", "device", "changed"} <= set(result)
    assert [e["step"] for e in result["evaluations"]] == [5, 10, 12]
    second = {"guided_score", "critics"} if m is qt else {"second_score"}
    assert all({"returns", "lengths", "score", "step"} | second == set(e) for e in result["evaluations"])
    assert all(len(e["returns"]) == 2 and math.isfinite(e["score"]) for e in result["evaluations"])
    assert result["changed"]["width"] == 16
    assert "diagnostics" not in result["changed"]
    assert [d["step"] for d in result["diagnostics"]] == list(range(1, 13))
    assert result["diagnostics"][0]["stitched"]["J_a"] > 0
    assert set(result["diagnostics"][0]["unstitched"]) == ({"J_a", "J_Q_own"} if m is qt else {"J_a"})
    values = [x for entry in logged for k, x in entry.items() if k.startswith("losses/")]
    assert len(values) >= 4
    assert np.isfinite(values).all()
    saved = torch.load(file.with_name("ckpt.pt"), weights_only=True)["parts"]
    torch.manual_seed(args.run.seed)
    runs.seed_everything(args.run.seed)
    fresh = m.build(args, 11, 3, "cpu")
    for net in ("policy",) + (("critics",) if m is qt else ()):
        for key, start in fresh[net].state_dict().items():
            assert not torch.equal(saved[net][key], start), f"{net} {key} did not move"

    # Interrupted by a signal at some update, and started again: the same numbers to the last bit.
    stop_at = int(np.random.default_rng().integers(1, 12))
    update = m.update

    def interrupted(nets, data, args, step):
        if step == stop_at:
            send(signal.SIGTERM)
        return update(nets, data, args, step)

    monkeypatch.setattr(m, "update", interrupted)
    again = runs.replace(args, out=tmp_path / "b")
    with pytest.raises(SystemExit) as status:
        m.train(again)
    assert status.value.code == 128 + signal.SIGTERM
    assert not list((tmp_path / "b").glob("*/*/*/result.json"))
    monkeypatch.setattr(m, "update", update)
    resumed = m.train(again)
    assert resumed["evaluations"] == result["evaluations"], stop_at
    assert resumed["diagnostics"] == result["diagnostics"], stop_at
    (other,) = (tmp_path / "b").glob("*/*/*/ckpt.pt")
    parts = torch.load(other, weights_only=True)["parts"]
    for part in set(parts) - {"record"}:
        torch.testing.assert_close(parts[part], saved[part], rtol=0, atol=0)

    # A finished run is left alone, evaluated again on demand, and refused if the data are others.
    monkeypatch.setattr(m, "update", None)
    assert m.train(args) == result
    assert "is done" in capsys.readouterr().out
    once_more = m.train(runs.replace(args, eval_only=True))
    np.testing.assert_allclose(once_more["returns"], result["evaluations"][-1]["returns"], rtol=1e-4)
    file.unlink()
    write_hdf5(files["target"], columns([40, 20], 5), "own", {})
    with pytest.raises(UserError, match="other data"):
        m.train(args)


@script
def test_reference_critics_of_a_taf_dt_run(m, files, tmp_path):
    from dynashift.datasets import load_pair

    args = small_run(m, files, tmp_path, diagnostics=True)
    source, target = load_pair("hopper", "morph", args.task.source, args.task.target)
    folder = tmp_path / "taf_dt" / "task" / "seed1"
    (tmp_path / "preprocess").mkdir(parents=True)
    folder.mkdir(parents=True)
    gate = np.arange(len(source)) % 3 > 0
    mu, sd = target.observations.mean(0, dtype=np.float64), target.observations.std(0, dtype=np.float64)
    np.savez(tmp_path / "preprocess" / "p.npz", gate=gate, mu=mu, sd=sd)
    torch.manual_seed(0)
    V, Q = taf_dt.TwinMLP(11, 8), taf_dt.TwinMLP(14, 8)
    record = {"sha256": [source.sha256, target.sha256]}
    runs.save_checkpoint(folder / "ckpt.pt", {"V": V, "Q": Q, "record": record})
    theirs = {"hidden": 8, "gamma": 0.9, "state_norm": "target"}
    record = {"args": theirs, "preprocess": "elsewhere/preprocess/p.npz", "evaluations": []}
    checkpoints.write_json(folder / "result.json", record)

    args = runs.replace(args, reference=folder)
    data, *_ = m.merge(source, target, "cpu")
    pool, nets = m.junctions(args, data, source, target), m.build(args, 11, 3, "cpu")
    rows = pool["stitched"]["rows"]
    assert rows.shape == (1024, 4)
    first_half = rows[:512, 0]
    assert gate[first_half].all()  # retained source rows, then target rows
    assert (rows[:512, 2:] >= len(source)).all()
    assert (rows[512:, 2:] < len(source)).all()

    def states(x):
        return torch.as_tensor(np.clip((x - mu) / (sd + 1e-8), -10, 10), dtype=torch.float32)

    obs = states(np.concatenate([source.observations, target.observations]))
    after = states(np.concatenate([source.next_observations, target.next_observations]))
    rewards = np.concatenate([source.rewards, target.rewards])
    td = []
    with torch.no_grad():
        for window in rows[:40].tolist():
            s = [*obs[window], after[window[-1]]]
            v = [V(x).mean().item() for x in s]
            td += [abs(rewards[i] + 0.9 * v[t + 1] - v[t]) for t, i in enumerate(window)]  # K = 4: all are near
        some = {**pool["stitched"], "rows": rows[:40], "s": pool["stitched"]["s"][:40]}
        found = m.junction_metrics(nets, data, some)
        x = data.tokens[rows[:40]], data.states[rows[:40]], data.actions[rows[:40]], data.steps[rows[:40]]
        nets["policy"].eval()
        pi = outputs(nets["policy"], *x, torch.ones(40, 4, dtype=torch.bool))[0]
        q = Q(obs[rows[:40]], pi).mean(0)
    whole = m.junctions(runs.replace(args, reference=folder), data, source, target)["stitched"]["TD"]
    assert whole == pytest.approx(np.mean(td), rel=0.25)  # 40 windows stand for 1024
    assert found["J_a"] == pytest.approx((pi[:, 2] - pi[:, 1]).norm(dim=-1).mean().item(), rel=1e-4)
    assert found["J_Q"] == pytest.approx((q[:, 2] - q[:, 1]).abs().mean().item(), rel=1e-4, abs=1e-6)

    runs.save_checkpoint(folder / "ckpt.pt", {"V": V, "Q": Q, "record": {"sha256": ["?", "?"]}})
    with pytest.raises(UserError, match="other data"):
        m.junctions(args, data, source, target)
    (tmp_path / "preprocess" / "p.npz").unlink()
    with pytest.raises(UserError, match="not a finished run"):
        m.junctions(args, data, source, target)
    with pytest.raises(UserError, match="not a finished run"):
        m.junctions(runs.replace(args, reference=tmp_path), data, source, target)


# ------------------------------------------------------------------------------------------- command line


@script
def test_every_argument_is_read(m):
    text = Path(m.__file__).read_text()
    modules = (runs, run_record, evaluation, load_task, TaskArgs)
    shared = "".join(map(inspect.getsource, modules))
    own = {f.name for f in dataclasses.fields(m.Args)}
    known = runs.flatten(m.Args()).keys()
    for name in known:
        read_in = text if name in own else text + shared
        assert re.search(rf"\b(args(\.\w+)?|task|self)\.{name}\b", read_in), f"nothing reads --{name}"
    for name in ("QUICK", "Args"):
        assert name in text
    assert set(m.QUICK) <= known
    assert known >= m.IGNORE - {"capture_video", "export"}  # flags of taf_dt.py alone
    assert m.IGNORE > runs.IGNORE


@script
def test_flags_of_the_task_are_those_of_taf_dt(m):
    common = "env shift source target seed data data_dir source_size out device quick resume eval_only diagnostics"
    common += " torch_deterministic log_every save_every eval_every eval_episodes"
    theirs, ours = runs.flatten(taf_dt.Args()), runs.flatten(m.Args())
    for name in common.split():
        assert ours[name] == theirs[name], name


def test_qt_reports_its_official_inference_in_short_runs_too():
    for args in (qt.Args(), runs.compose(qt.Args, quick=True)):
        assert qt.defaults(args).get("guided", args.guided) == "last"


def test_settings_by_task():
    assert dt.defaults(runs.compose(dt.Args, env="ant", shift="kinematic"))["return_target"] == 5122.57
    assert dt.defaults(runs.compose(dt.Args, env="halfcheetah"))["second_target"] == 12000
    expected = {
        ("halfcheetah", "medium"): (5.0, 15.0, 5, 101_000),
        ("hopper", "medium-replay"): (3.0, 9.0, 20, 101_000),
        ("hopper", "data/hopper/medium-replay.hdf5"): (3.0, 9.0, 20, 101_000),
    }
    expected |= {
        ("halfcheetah", "medium-expert"): (0.4, 15.0, 20, 100_000),
        ("halfcheetah", "/data/medium-expert.npz"): (0.4, 15.0, 20, 100_000),
        ("hopper", "medium-replay/own.hdf5"): (1.0, 9.0, 20, 101_000),  # the folder says nothing
        ("ant", "own.hdf5"): (2.0, 5.0, 20, 101_000),
    }
    for (env, source), values in expected.items():
        a = runs.plain(qt.Args, qt.defaults, runs.compose(qt.Args, env=env, source=source))
        assert (a.eta, a.clip_grad, a.K, a.updates) == values
    a = runs.plain(qt.Args, qt.defaults, runs.compose(qt.Args, env="halfcheetah", source="medium-expert"))
    assert (a.tau, a.ema_decay, a.ema_start) == (0.005, 0.995, 1000)
    assert qt.learning_rate(100_000, a) == pytest.approx(3e-4 * (1 + math.cos(0.9 * math.pi)) / 2)


@pytest.mark.parametrize("m", [qt, taf_dt, released, iql, dara, igdf, otdf], ids=lambda m: m.__name__.split(".")[-1])
def test_slow_copies_follow_the_budget_in_every_script(m):
    """By hand: 0.005, unless the copy would then remember more than a fiftieth of the run; at most 0.05."""
    official = m.Args.updates
    for updates, rate, of_policy in (
        (official, 0.005, 0.005),
        (50_000, 0.005, 0.005),
        (20_000, 0.005, 0.0125),  # which moves every fifth update
        (5_000, 0.01, 0.05),
        (2_500, 0.02, 0.05),
        (100, 0.05, 0.05),
    ):
        a = runs.plain(m.Args, m.defaults, runs.compose(m.Args, updates=updates))
        assert a.tau == pytest.approx(rate), updates
        if m in (qt, taf_dt, released):
            start = round(1000 * updates / official)
            assert (a.ema_decay, a.ema_start) == (pytest.approx(1 - of_policy), start), updates
        else:
            assert not hasattr(a, "ema_decay")
    quick = runs.plain(m.Args, m.defaults, runs.compose(m.Args, quick=True))
    assert quick.updates < 0.1 * official
    assert quick.tau == pytest.approx(max(0.005, 50 / quick.updates))


@pytest.mark.parametrize("updates", [400, 2_500, 20_000, 101_000])
def test_the_target_policy_forgets_its_beginning(updates):
    """How much of the random first weights it still holds at the end, and in the middle of a run."""
    for m in (qt, taf_dt, released):
        a = runs.plain(m.Args, m.defaults, runs.compose(m.Args, updates=updates))
        counted = [sum(i % a.ema_every == 0 for i in range(a.ema_start + 1, n + 1)) for n in (updates // 2, updates)]
        assert [a.ema_decay**n < limit for n, limit in zip(counted, (0.15, 0.02), strict=True)] == [True, True]


@pytest.mark.parametrize("given", ["--updates {}", "--updates={}", "--quick --updates {}"])
def test_the_official_number_of_updates_has_the_official_averages(given):
    """Also where --quick would have fewer, and although the number is the one that holds without the flag."""
    for m in (qt, taf_dt, iql):
        a = runs.read_args(m.Args, m.defaults, "", given.format(m.Args.updates).split())
        assert (a.updates, a.tau) == (m.Args.updates, 0.005)
        assert getattr(a, "ema_decay", 0.995) == 0.995
        assert getattr(a, "ema_start", 1000) == 1000
        short = runs.read_args(m.Args, m.defaults, "", ["--quick"])
        assert (short.updates < a.updates, short.tau) == (True, pytest.approx(max(0.005, 50 / short.updates)))


@script
@pytest.mark.parametrize("changes", [dict(width=15), dict(device="nowhere"), dict(batch=1)])
def test_what_cannot_be_is_refused(m, changes):
    with pytest.raises(UserError, match=f"^--{next(iter(changes))} |--width"):
        m.train(tiny(m, **changes))


@script
def test_a_context_is_long_enough(m):
    """For QT's critics, which bootstrap from a later step, and for jumps from one step to the next."""
    with pytest.raises(UserError, match=r"--K 1 must be at least 2" if m is qt else "--diagnostics needs --K"):
        m.resolve(tiny(m, K=1, diagnostics=True))


def test_scripts_run_from_anywhere(tmp_path):
    """As a user starts them: help needs no data and names the paper; an error is one line."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = {}
    for name, flags in (("dt", ["--help"]), ("qt", ["--device", "nowhere"]), ("dadt", ["--help"])):
        command = [sys.executable, ROOT / "baselines" / f"{name}.py", *flags]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        jobs[name] = subprocess.Popen(command, cwd=tmp_path, env=environ, **pipes)
    for name, job in jobs.items():
        out, error = job.communicate(timeout=120)
        if name == "qt":
            assert job.returncode == 1
            assert error.startswith("error: --device nowhere")
            assert len(error.strip().splitlines()) == 1
        else:
            assert job.returncode == 0
            assert "Paper:" in out
            assert "--merge" in out
