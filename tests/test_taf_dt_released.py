"""baselines/taf_dt_released.py: the released code's reading of TAF-DT. Numbers are computed again in loops over plain
numbers; whole runs are small ones."""

import json
import math
import os
import random
import signal
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributions

import taf_dt
import taf_preprocess
from baselines import taf_dt_released as taf
from dynashift import gate_report, runs
from dynashift.checksums import write_hdf5
from dynashift.datasets import Dataset
from dynashift.errors import UserError, one_line_errors
from dynashift.tasks import QUALITIES, ROBOTS

ROOT = Path(__file__).parents[1]
TABLES = ROOT.parent / "shared" / "spec" / "paper_tables.json"
SHIFTS = ("morph", "kinematic", "gravity")
TASKS = list(product(SHIFTS, ROBOTS, QUALITIES["source"], QUALITIES["target"]))
NETS = {"V", "V_bar", "Q", "command", "cvae", "policy", "policy_bar", "critics", "critics_bar"}
TINY = dict(width=16, heads=2, layers=2, hidden=8, cvae_hidden=8, K=3, dropout=0.0, target_batch=16)
TINY |= dict(eta_reg=0.5, return_target=100.0, device="cpu", eval_episodes=2, M=3)
LENGTHS_S, LENGTHS_T = (9, 4, 12, 2, 7), (8, 3, 10)
N_S, N_T = sum(LENGTHS_S), sum(LENGTHS_T)


def arguments(**changes) -> taf.Args:
    return runs.compose(taf.Args, **{**taf.GATE, **TINY, **changes})


def toy(lengths, failures=(), seed=0, first_row=0) -> Dataset:
    """Random episodes. The first entry of an action is the number of its row."""
    rng, n, end = np.random.default_rng(seed), sum(lengths), np.zeros(sum(lengths), bool)
    end[np.cumsum(lengths) - 1] = True
    terminals = np.zeros(n, bool)
    terminals[np.cumsum(lengths)[list(failures)] - 1] = True
    actions = rng.uniform(-1, 1, (n, 2))
    actions[:, 0] = first_row + np.arange(n)
    columns = dict(observations=rng.normal(size=(n, 3)), next_observations=rng.normal(size=(n, 3)))
    columns |= dict(actions=actions, rewards=rng.normal(size=n))
    columns = {name: x.astype(np.float32) for name, x in columns.items()}
    return Dataset(
        "hopper", "morph", "toy", "own", "toy", "00", **columns, terminals=terminals, timeouts=end & ~terminals
    )


def preprocessed(source: Dataset, gate=None, seed=0) -> dict:
    """What taf_preprocess.preprocess returns with OT on all source data, for any gate [N_s]."""
    n, rng = len(source), np.random.default_rng(seed)
    c = rng.uniform(size=n)
    gate = np.ones(n, bool) if gate is None else gate
    pre = {"gate": gate, "d_m": rng.uniform(size=n), "c_tilde": c, "omega": np.exp(-c)}
    return pre | {
        "mu": np.full(3, 0.1),
        "sd": np.full(3, 0.7),
        "mu_source": np.full(3, -0.2),
        "sd_source": np.full(3, 1.5),
    }


def small(args=None, gate=None, seed=0):
    """(Data, pre, source, target), of whose episodes some fail and some run into the time limit."""
    source = toy(LENGTHS_S, failures=(0, 3), seed=seed)
    target = toy(LENGTHS_T, failures=(1,), seed=seed + 100, first_row=N_S)
    gate = np.random.default_rng(seed + 7).uniform(size=N_S) < 0.5 if gate is None else gate
    pre = preprocessed(source, gate, seed)
    return taf.fuse(source, target, pre, args or arguments(), "cpu"), pre, source, target


def both(source, target, column):
    return np.concatenate([getattr(source, column), getattr(target, column)])


def build(args, seed=0):
    torch.manual_seed(seed)
    return taf.build(args, 3, 2, "cpu")


def stir(nets, *names):
    """Weights of order one, unlike at the start of training."""
    for name in names:
        for parameter in nets[name].parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)


def window(data: Dataset, start: int, K: int) -> range:
    """Rows of the window that begins there."""
    left = np.repeat(data.lengths, data.lengths) - data.steps
    return range(start, start + min(K, left[start]))


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


def expectile(u, zeta):
    return abs(zeta - (u < 0)) * u**2


def weights_of(nets):
    return {k: [p.detach().clone() for p in net.parameters()] for k, net in nets.items() if not k.startswith("adam")}


def changed(nets, before):
    same = {k: all(map(torch.equal, nets[k].parameters(), old)) for k, old in before.items()}
    return {k for k in before if not same[k]}


# ------------------------------------------------------------------------------------------ settings


@pytest.mark.skipif(not TABLES.exists(), reason=f"the tables are not in {TABLES}")
def test_settings_of_all_tasks_are_those_of_the_released_code():
    table = json.loads(TABLES.read_text())["extra_released_code_configuration"]["data"]
    assert len(TASKS) == 108
    for shift, env, source, target in TASKS:
        given = runs.compose(taf.Args, env=env, shift=shift, source=source, target=target)
        args = runs.plain(taf.Args, taf.defaults, given)
        wanted = table[shift][env][f"{source}->{target}"]
        found = {"K": args.gate.K, "alpha": args.alpha, "eta_reg": args.eta_reg, "mmd_keep": args.gate.xi}
        found |= {"source_batch_after_filter": taf.source_batch(args.target_batch, args.beta)}
        found |= {"command_expectile": args.zeta, "value_expectile": args.zeta_v, "vae_decoder_variance": args.variance}
        found |= {"adv_scale": args.adv_scale, "reg_on_all_positions": args.reg_positions == "all"}
        found |= {"cql_weight": args.cql or None, "reward_rescaled_by_weights": args.reward_rescale}
        found |= {"grad_clip": args.clip_grad, "policy_updates": args.updates}
        assert found == pytest.approx({k: wanted[k] for k in found}), (shift, env, source, target)


def test_every_task_has_values_and_the_released_gate():
    optional = {"data_dir", "source_size", "score_range", "ess"}
    for shift, env, source, target in TASKS:
        task = dict(env=env, shift=shift, source=source, target=target)
        args = runs.plain(taf.Args, taf.defaults, runs.compose(taf.Args, **task))
        assert not [k for k, v in runs.flatten(args).items() if v is None and k not in optional]
        taf.check(args)
        gate = runs.compose(taf_preprocess.Args, preset="released", **task)
        assert args.gate == runs.plain(taf_preprocess.Args, taf_preprocess.defaults, gate).gate
        assert args.drop_ends == (env == "hopper")
        assert (args.tau, args.ema_decay, args.ema_start) == (0.005, 0.995, 1000)  # stopping early is official


def test_flags_reach_the_defaults_of_task_and_pair():
    def resolved(*words):
        return runs.read_args(taf.Args, taf.defaults, "", list(words))

    args = resolved("--env", "halfcheetah", "--shift", "gravity", "--zeta", "0.8")
    assert (args.alpha, args.zeta, args.adv_scale, args.gate.encoder, args.drop_ends) == (2.0, 0.8, 1.0, "raw", False)
    pair = resolved("--shift", "kinematic")  # has settings of its own, also where it is a file
    assert (pair.variance, pair.eta_reg) == (0.05, 0.6)
    file = resolved("--shift", "kinematic", "--source", "folder/medium.hdf5")
    assert runs.replace(file, source="medium") == pair
    assert resolved("--no-drop-ends", "--mmd-gamma", "0.5").gate.mmd_gamma == 0.5
    args = resolved("--quick", "--updates", "7")
    assert (args.updates, args.width, args.state_loss) == (7, taf_dt.QUICK["width"], 1.0)
    assert runs.flatten(resolved("--quick")).items() >= taf.QUICK.items()
    assert resolved("--shift", "none", "--target", "none").beta == 0


BAD = (
    "--K 1, --zeta 1.0, --beta 0.6, --beta 0.003, --gamma 1, --lr nan, --heads 3, --updates 0, --cql -1, --candidates 0"
)


@pytest.mark.parametrize("words", BAD.split(", "))
def test_a_value_that_cannot_be_is_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(taf, "load_task", None)
    monkeypatch.setattr(sys, "argv", ["x", *words.split(), "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as status, one_line_errors():
        taf.main()
    line = capsys.readouterr().err + str(status.value.code)
    assert "error: " in line
    assert words.split()[0] in line


@pytest.mark.parametrize("words", ["--preset released", "--preset=released"])
def test_the_former_flag_names_the_new_command(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["taf_dt.py", "--env", "ant", *words.split(), "--out", "a b"])
    with pytest.raises(UserError, match=r"python baselines/taf_dt_released.py --env ant --out 'a b'$"):
        taf_dt.main()


# -------------------------------------------------------------------------------- the fused law, (c) (e) (j)


def test_rewards_shrink_with_both_costs():
    data, pre, source, target = small()
    d, c = pre["d_m"], pre["c_tilde"]
    for i in range(N_S):
        factor = math.exp(-c[i]) * math.exp(-(d[i] - min(d)) / (max(d) - min(d)))
        assert data.rewards[i].item() == pytest.approx(source.rewards[i] * factor, rel=1e-5)
    assert data.rewards[N_S:].tolist() == target.rewards.tolist()
    plain, *_ = small(arguments(reward_rescale=False))
    assert plain.rewards.tolist() == data.raw_rewards.tolist() == both(source, target, "rewards").tolist()


def test_rewards_without_gate_or_weights_stay_as_they_are():
    source, target = toy(LENGTHS_S), toy(LENGTHS_T)
    nothing = np.full(N_S, np.nan)
    pre = preprocessed(source) | {"d_m": nothing, "c_tilde": nothing, "omega": np.ones(N_S)}
    data = taf.fuse(source, target, pre, arguments(), "cpu")
    assert data.rewards.tolist() == data.raw_rewards.tolist()


def test_weights_are_those_of_ot_on_all_source_data():
    data, pre, *_ = small()
    np.testing.assert_allclose(data.weight[:N_S], np.exp(-pre["c_tilde"]), rtol=1e-6)
    assert (data.weight[N_S:] == 1).all()
    assert (data.reg_weight == 1).all()
    assert data.source_starts.tolist() == np.flatnonzero(pre["gate"]).tolist()


def test_c_an_episode_ends_at_time_limits_too():
    data, _, source, target = small()
    ends = [*np.cumsum(LENGTHS_S) - 1, *N_S + np.cumsum(LENGTHS_T) - 1]
    assert data.terminal.nonzero().flatten().tolist() == ends
    assert both(source, target, "terminals").sum() == 3 < len(ends)


@pytest.mark.parametrize("K", [2, 3])
def test_e_only_the_last_two_steps_of_a_long_episode_are_in_no_window(K):
    args = arguments(K=K, drop_ends=True)
    data, _, source, target = small(args, gate=np.ones(N_S, bool))
    left = np.concatenate([np.repeat(d.lengths, d.lengths) - d.steps for d in (source, target)])
    starts = torch.cat([data.source_starts, data.target_starts])
    assert starts.tolist() == np.flatnonzero(left > K + 1).tolist()
    rows, valid = taf_dt.window_rows(data.left, starts, K)
    assert valid.all()
    long = np.concatenate([np.repeat(d.lengths, d.lengths) for d in (source, target)]) > K + 1
    assert sorted(set(rows.flatten().tolist())) == np.flatnonzero(long & (left > 2)).tolist()
    with pytest.raises(UserError, match="--xi"):
        small(arguments(K=11, drop_ends=True))


def test_j_states_have_their_own_domains_statistics_and_are_not_clipped():
    source, target = toy(LENGTHS_S), toy(LENGTHS_T)
    pre = preprocessed(source) | {"sd": np.full(3, 1e-3)}
    data = taf.fuse(source, target, pre, arguments(), "cpu")
    np.testing.assert_allclose(data.states[:N_S], (source.observations + 0.2) / 1.5, rtol=1e-5)
    np.testing.assert_allclose(data.states[N_S:], (target.observations - 0.1) / 1e-3, rtol=1e-3)
    assert data.states.abs().max() > 100


def agree(counts, probabilities):
    """Counts of independent draws: each within five standard deviations."""
    counts, p = np.asarray(counts, float), np.asarray(probabilities, float)
    n = counts.sum()
    assert p.sum() == pytest.approx(1)
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9).all(), (counts / n, p)


def test_a_batch_keeps_the_cheapest_of_the_source_windows_drawn():
    """E[windows among the j best] = E[min(B_s, Binomial(B_t, j / m))]"""
    args = arguments(target_batch=16)
    B_s, B_t, batches = 8, 16, 1500
    data, pre, source, _ = small(args)
    torch.manual_seed(0)
    starts = torch.stack([taf.sample_starts(data, args) for _ in range(batches)]).numpy()
    assert starts.shape == (batches, B_s + B_t)
    agree(np.bincount(starts[:, B_s:].ravel() - N_S, minlength=N_T), np.full(N_T, 1 / N_T))
    score = {i: np.mean([-pre["c_tilde"][j] for j in window(source, i, 3)]) for i in np.flatnonzero(pre["gate"])}
    ranked, up_to = sorted(score, key=lambda i: -score[i]), [0.0]
    for j in range(1, len(ranked) + 1):
        p = j / len(ranked)
        law = [math.comb(B_t, x) * p**x * (1 - p) ** (B_t - x) for x in range(B_t + 1)]
        up_to.append(sum(min(B_s, x) * law[x] for x in range(B_t + 1)))
    wanted = np.zeros(N_S)
    wanted[ranked] = np.diff(up_to)
    found = np.bincount(starts[:, :B_s].ravel(), minlength=N_S) / batches
    assert wanted.sum() == pytest.approx(B_s)
    assert np.abs(found - wanted).max() < 5 * np.sqrt(wanted.max() / batches)
    assert wanted[ranked[0]] > 3 * wanted[ranked[-1]]
    assert (taf.sample_starts(data, arguments(beta=0.0)) >= N_S).all()


# ------------------------------------------------------------------------------------------- the Transformer


def batch_of(args, padding=(0, 1, 2), seed=0):
    g = torch.Generator().manual_seed(seed)
    B, K = len(padding), args.gate.K
    x = [torch.randn(B, K, *d, generator=g).double() for d in ((), (3,), (2,))]
    steps = torch.randint(0, 1000, (B, K), generator=g)
    return taf.Batch(*x, steps, torch.arange(K) >= torch.tensor(padding)[:, None])


def test_the_second_head_predicts_next_states_from_all_that_came_before():
    args = arguments(K=4)
    policy, b = taf.Policy(3, 2, args).double().eval(), batch_of(args, (0, 0))
    stir({"policy": policy}, "policy")
    inputs = [x.requires_grad_() for x in b[:3]]
    pi, s_next = policy.predict(b)
    assert s_next.shape == (2, 3, 3)
    torch.testing.assert_close(pi, policy(b), rtol=1e-9, atol=1e-12)  # the action head sees no difference
    torch.testing.assert_close(pi[:, -1:], policy(b, only_last=True), rtol=1e-9, atol=1e-12)
    for i in range(3):
        for g in torch.autograd.grad(s_next[0, i].sum(), inputs, retain_graph=True):
            assert (g[0].reshape(4, -1).abs().sum(1) > 0).tolist() == [j <= i for j in range(4)]
            assert not g[1].any()


def test_next_states_do_not_depend_on_padding():
    args = arguments(K=4)
    policy, b = taf.Policy(3, 2, args).double().eval(), batch_of(args, (0, 2))
    before = policy.predict(b)[1]
    other = b._replace(**{k: torch.where(b.valid[..., None], getattr(b, k), 99) for k in ("states", "actions")})
    after = policy.predict(other)[1]
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1, 2:], before[1, 2:])
    assert not torch.equal(after[1, :2], before[1, :2])


def test_initial_weights_of_embeddings_and_heads_are_those_of_torch():
    torch.manual_seed(0)
    policy = taf.Policy(3, 2, arguments(width=64))
    assert policy.embed_t.weight.std().item() == pytest.approx(1, abs=0.02)
    for layer in (policy.embed_c, policy.embed_s, policy.embed_a, policy.action, policy.next_state):
        bound = layer.in_features**-0.5
        assert 0.8 * bound < layer.weight.abs().max() <= bound
        assert layer.bias.abs().max() > 0
    assert policy.blocks[0].up.weight.std().item() == pytest.approx(0.02, abs=0.001)
    assert not policy.blocks[0].up.bias.any()


# -------------------------------------------------------------------------------------------- losses, (b) (f) (g)


def random_window_case(seed):
    rng = np.random.default_rng(seed)
    B, K = (int(n) for n in rng.integers(2, 6, 2))
    valid = np.arange(K) >= rng.integers(0, K, B)[:, None]
    valid[0] = True
    return rng, B, K, valid, rng.uniform(0.3, 1, (B, K)) * valid


def test_k_step_target_by_hand():
    r, q_last = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([8.0])
    goes_on, ended = torch.tensor([[False, False, False]]), torch.tensor([[False, False, True]])
    assert taf.k_step_target(r, goes_on, q_last, 0.5).tolist() == [[4.0, 6.0, 8.0]]
    assert taf.k_step_target(r, ended, q_last, 0.5).tolist() == [[2.0, 2.0, 0.0]]


@pytest.mark.parametrize("seed", range(5))
def test_k_step_target_on_windows_against_a_loop(seed):
    K, gamma = 3, 0.9
    data, _, source, target = small(arguments(reward_rescale=False), seed=seed)
    starts = torch.arange(N_S + N_T)
    b = taf_dt.windows(data, starts, K)
    q_last = torch.randn(len(starts), generator=torch.Generator().manual_seed(seed))
    found = taf.k_step_target(b.rewards, b.terminal, q_last, gamma)
    for start in starts.tolist():
        one, first = (source, 0) if start < N_S else (target, N_S)
        rows = window(one, start - first, K)
        t = rows[-1]
        value = 0.0 if one.terminals[t] or one.timeouts[t] else q_last[start].item()
        for k, i in enumerate(rows):
            wanted = sum(gamma ** (j - i) * one.rewards[j] for j in range(i, t)) + gamma ** (t - i) * value
            assert found[start, K - len(rows) + k].item() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_b_critic_loss_is_divided_by_the_count(seed):
    rng, B, K, valid, weight = random_window_case(seed)
    q, q_hat = rng.normal(size=(2, B, K)), rng.normal(size=(B, K))
    terms = [
        weight[i, j] * sum((q[h, i, j] - q_hat[i, j]) ** 2 for h in (0, 1))
        for i in range(B) for j in range(K - 1) if valid[i, j]
    ]  # fmt: skip
    found = taf.critic_loss(tensor(q), tensor(q_hat), tensor(weight), torch.tensor(valid))
    assert found.item() == pytest.approx(sum(terms) / len(terms))


@pytest.mark.parametrize("seed", range(5))
def test_f_the_conservative_penalty_takes_the_smaller_head_before_the_last_step(seed):
    rng, B, K, valid, weight = random_window_case(seed)
    n = 4
    q, q_pi, q_random = rng.normal(size=(2, B, K)), rng.normal(size=(2, B, K)), rng.normal(size=(2, n, B, K))
    terms = []
    for i, j in product(range(B), range(K - 1)):
        if valid[i, j]:
            values = [min(q_pi[:, i, j]), *(min(q_random[:, m, i, j]) for m in range(n))]
            terms.append(weight[i, j] * (math.log(sum(map(math.exp, values))) - min(q[:, i, j])))
    found = taf.cql_penalty(*map(tensor, (q, q_pi, q_random, weight)), torch.tensor(valid))
    assert found.item() == pytest.approx(sum(terms) / len(terms))


@pytest.mark.parametrize("seed", range(5))
def test_g_the_q_term_has_no_weights_and_either_head(seed):
    rng, B, K, valid, _ = random_window_case(seed)
    q = tensor(rng.normal(size=(2, B, K))).requires_grad_()
    heads = [q[h].detach().numpy()[valid] for h in (0, 1)]
    either = [-heads[h].mean() / np.abs(heads[1 - h]).mean() for h in (0, 1)]
    found = [taf.q_term(q, torch.tensor(valid)) for _ in range(40)]
    assert {round(x.item(), 9) for x in found} == {round(x, 9) for x in either}
    (gradient,) = torch.autograd.grad(found[0], q)  # of one head; the normaliser is a constant
    assert sorted(int(g.count_nonzero()) for g in gradient) == [0, valid.sum()]


@pytest.mark.parametrize("reg_positions", ["all", "last"])
def test_policy_loss_is_the_sum_of_its_terms(reg_positions):
    """(b): each a sum of weighted tokens over their count."""
    args = arguments(reg_positions=reg_positions, alpha=2.5, eta_reg=0.3, variance=0.2, state_loss=0.7)
    data, *_ = small(args)
    nets, K = build(args), args.gate.K
    stir(nets, "policy", "critics", "cvae")
    b = taf_dt.windows(data, torch.tensor([0, 7, 8, 20, N_S, N_S + 6, N_S + 20]), K)
    noise = torch.randn(args.M, 7 * (K if reg_positions == "all" else 1), 4)
    torch.manual_seed(3)
    loss, logs = taf.policy_loss(nets, b, noise, args)
    torch.manual_seed(3)
    head = int(torch.randint(2, (1,)))
    with torch.no_grad():
        pi, s_next = nets["policy"].predict(b)
        q = nets["critics"](b.states, pi).numpy().astype(float)
    weight, valid = b.weight.numpy().astype(float), b.valid.numpy()
    tokens = [(i, j) for i, j in product(range(7), range(K)) if valid[i, j]]
    dt = np.mean([weight[i, j] * np.mean((b.actions[i, j] - pi[i, j]).numpy() ** 2) for i, j in tokens])
    state = [
        weight[i, j + 1] * np.mean((b.states[i, j + 1] - s_next[i, j]).numpy() ** 2) for i, j in tokens if j < K - 1
    ]
    guidance = -np.mean([q[head, i, j] for i, j in tokens]) / np.mean([abs(q[1 - head, i, j]) for i, j in tokens])
    density = []
    for i, j in tokens:
        if reg_positions == "all" or j == K - 1:
            s, a = b.states[i, j], pi[i, j]
            mean, std = nets["cvae"].encode(s, a)
            k = i * K + j if reg_positions == "all" else i
            centres = [nets["cvae"].decode(s, mean + std * noise[m, k]) for m in range(args.M)]
            parts = [distributions.Normal(x, 0.2**0.5).log_prob(a).sum() for x in centres]
            density.append(torch.stack(parts).logsumexp(0).item())
    wanted = {"losses/dt": dt, "losses/state": np.mean(state), "losses/reg": -np.mean(density)}
    assert {name: logs[name].item() for name in wanted} == pytest.approx(wanted, rel=1e-4)
    total = dt + 0.7 * np.mean(state) - 0.3 * np.mean(density) + 2.5 * guidance
    assert loss.item() == pytest.approx(total, rel=1e-4)
    assert weight[valid].mean() < 0.9  # so that it matters by what the sum is divided


WRONG = {
    "padded_mean": lambda B: taf.padded_mean(torch.ones(B), torch.ones(B, 1)),
    "masked_mean": lambda B: taf.masked_mean(torch.ones(B), torch.ones(B, 1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_would_broadcast_are_refused(name):
    with pytest.raises(AssertionError):
        WRONG[name](3)


# ------------------------------------------------------------------------- updates before the policy, (a) (d) (i)


def test_v_and_q_see_raw_windows_with_weights_on_q_alone():
    args = arguments(gamma=0.9, zeta_v=0.8)
    data, pre, source, target = small(args)
    nets, K = build(args), args.gate.K
    stir(nets, "V_bar")
    torch.manual_seed(5)
    starts = taf.sample_starts(data, args).tolist()
    raw = torch.tensor(both(source, target, "observations"))
    with torch.no_grad():
        v, v_bar = nets["V"](raw).numpy(), nets["V_bar"](raw).numpy()
        q = nets["Q"](raw, data.actions).numpy()
    torch.manual_seed(5)
    logs = taf.update_values(nets, data, args)
    loss_v = loss_q = 0.0
    for start in starts:
        one, first = (source, 0) if start < N_S else (target, N_S)
        for i in window(one, start - first, K):
            row = first + i
            y = data.rewards[row].item()  # scaled
            if not (one.terminals[i] or one.timeouts[i]):
                y += 0.9 * min(v_bar[:, row + 1])
            weight = math.exp(-pre["c_tilde"][i]) if start < N_S else 1.0
            loss_v += sum(expectile(y - v[h, row], 0.8) for h in (0, 1))
            loss_q += weight * sum((y - q[h, row]) ** 2 for h in (0, 1))
    count = len(starts) * K  # padding counts
    assert logs["losses/v"].item() == pytest.approx(loss_v / count, rel=1e-4)
    assert logs["losses/q"].item() == pytest.approx(loss_q / count, rel=1e-4)


@pytest.mark.parametrize("beta", [1 / 3, 0.0])
def test_a_tokens_are_residuals_with_raw_rewards(beta):
    args = arguments(gamma=0.9, adv_scale=2.0, beta=beta)
    data, _, source, target = small(args)
    nets = build(args)
    stir(nets, "V")
    found, moments = taf.relabel(nets, data, args)
    A = []
    for one in (source, target):
        with torch.no_grad():
            v = nets["V"](torch.tensor(one.observations)).double().numpy().mean(0)
        after = [*v[1:], v[-1]]  # across the ends of episodes too
        A += [one.rewards[i] + 0.9 * after[i] - v[i] for i in range(len(one))]
    used = np.array(A if beta else A[N_S:])
    assert moments == pytest.approx({"mu_A": used.mean(), "sigma_A": used.std()}, rel=1e-4)
    np.testing.assert_allclose(found.tokens, 2 * (np.array(A) - used.mean()) / used.std(), rtol=1e-3, atol=1e-4)
    assert not torch.equal(data.rewards, data.raw_rewards)


def test_d_half_of_the_command_s_batch_is_source_without_the_filter(monkeypatch):
    args = arguments(zeta=0.9, target_batch=2000)
    data, pre, source, target = small(args)
    data = data._replace(tokens=torch.randn(N_S + N_T))
    nets, seen, windows = build(args), [], taf_dt.windows
    monkeypatch.setattr(taf_dt, "windows", lambda data, starts, K: seen.append(starts) or windows(data, starts, K))
    with torch.no_grad():
        c = nets["command"](data.states)[0].numpy()
    logs = taf.update_command(nets, data, args)
    starts = seen[0].numpy()
    assert (starts[:2000] < N_S).all()
    assert (starts[2000:] >= N_S).all()
    agree(np.bincount(starts[:2000], minlength=N_S), pre["gate"] / pre["gate"].sum())  # cheap and expensive ones
    agree(np.bincount(starts[2000:] - N_S, minlength=N_T), np.full(N_T, 1 / N_T))
    total = 0.0
    for start in starts:
        one, first = (source, 0) if start < N_S else (target, N_S)
        total += sum(
            expectile(data.tokens[first + i].item() - c[first + i], 0.9) for i in window(one, start - first, 3)
        )
    assert logs["losses/command"].item() == pytest.approx(total / (4000 * 3), rel=1e-4)
    taf.update_command(nets, data, runs.replace(args, beta=0.0))
    assert len(seen[1]) == 2000
    assert (seen[1] >= N_S).all()


def test_i_the_behaviour_model_sees_windows(monkeypatch):
    args = arguments(cvae_kl=0.5)
    data, _, _, target = small(args)
    nets, seen, windows = build(args), [], taf_dt.windows
    monkeypatch.setattr(taf_dt, "windows", lambda data, starts, K: seen.append(starts) or windows(data, starts, K))
    cvae = nets["cvae"]
    with torch.no_grad():
        mean, std = cvae.encode(data.states, data.actions)
        prior = distributions.Normal(torch.zeros(4), torch.ones(4))
        kl = distributions.kl_divergence(distributions.Normal(mean, std), prior).mean(-1).numpy()
        for parameter in cvae.decoder[-1].parameters():
            parameter.zero_()  # a_hat = 0, whatever the noise
    logs = taf.update_behaviour(nets, data, args)
    assert seen[0].shape == (args.target_batch,)
    total = 0.0
    for start in seen[0].tolist():
        for i in window(target, start - N_S, 3):
            total += np.mean(target.actions[i] ** 2) + 0.5 * kl[N_S + i]
    assert logs["losses/cvae"].item() == pytest.approx(total / (args.target_batch * 3), rel=1e-4)


# ---------------------------------------------------------------------------- updates of critics and policy, (j)


def test_the_critics_regress_on_the_target_networks_value():
    args = arguments(gamma=0.9, cql=0.3)
    data, *_ = small(args)
    nets = build(args)
    stir(nets, "policy_bar", "critics_bar", "critics")
    b = taf_dt.windows(data, torch.cat([data.source_starts[:4], data.target_starts[:8]]), args.gate.K)
    torch.manual_seed(0)
    with torch.no_grad():
        pi_bar = nets["policy_bar"](b)
        q_hat = taf.k_step_target(
            b.rewards, b.terminal, nets["critics_bar"](b.states[:, -1], pi_bar[:, -1]).amin(0), 0.9
        )
        q = nets["critics"](b.states, b.actions)
        loss = taf.critic_loss(q, q_hat, b.weight, b.valid)
        a_random = torch.rand(args.cql_actions, *b.actions.shape) * 2 - 1
        q_random = torch.stack([nets["critics"](b.states, a) for a in a_random], 1)
        penalty = taf.cql_penalty(q, nets["critics"](b.states, pi_bar), q_random, b.weight, b.valid)
    torch.manual_seed(0)
    logs = taf.update_critics(nets, b, args)
    assert logs["losses/critic"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert logs["losses/cql"].item() == pytest.approx(penalty.item(), rel=1e-4)
    assert logs["charts/q_largest"].item() == pytest.approx(q.abs().max().item(), rel=1e-5)


def test_the_target_policy_acts_with_dropout():
    args = arguments(dropout=0.5)
    data, *_ = small(args)
    nets, b = build(args), taf_dt.windows(data, torch.arange(5), 3)
    assert not torch.equal(nets["policy_bar"](b), nets["policy_bar"](b))
    assert not any(p.requires_grad for p in nets["policy_bar"].parameters())


def test_j_the_target_policy_follows_at_1006_and_1011():
    args = taf.Args()
    nets = {"policy": torch.nn.Linear(1, 1, bias=False), "policy_bar": torch.nn.Linear(1, 1, bias=False)}
    nets["policy"].weight.data.fill_(1.0)
    nets["policy_bar"].weight.data.fill_(0.0)
    moved, value = [], 0.0
    for step in range(1, 1013):
        taf.update_target_policy(nets, args, step)
        if nets["policy_bar"].weight.item() != value:
            moved.append(step)
            value = nets["policy_bar"].weight.item()
    assert moved == [1006, 1011]
    assert value == pytest.approx(1 - 0.995**2)


def test_j_evaluation_is_every_1000_updates():
    args = runs.plain(taf.Args, taf.defaults, taf.Args())
    assert args.run.eval_every == 1000
    assert args.updates == 101_000


def test_the_learning_rate_falls_in_steps():
    args, nets = taf.Args(), build(arguments())
    for step, k in ((1, 0), (1000, 0), (1001, 1), (101_000, 100)):
        wanted = 3e-4 * (1 + math.cos(math.pi * k / 500)) / 2
        assert taf.set_learning_rate(nets, args, step) == pytest.approx(wanted)
        assert nets["adam_policy"].param_groups[0]["lr"] == nets["adam_critics"].param_groups[0]["lr"] > 2.7e-4


def test_each_update_changes_its_own_networks_alone():
    args = arguments(ema_start=0, ema_every=1, cql=0.1, dropout=0.1)
    data, *_ = small(args)
    nets, b = build(args), taf_dt.windows(data, torch.arange(12), 3)
    stages = {
        ("V", "Q", "V_bar"): lambda: taf.update_values(nets, data, args),
        ("command",): lambda: taf.update_command(nets, data, args),
        ("cvae",): lambda: taf.update_behaviour(nets, data, args),
        ("critics", "critics_bar"): lambda: taf.update_critics(nets, b, args),
        ("policy",): lambda: taf.update_policy(nets, b, args),
        ("policy_bar",): lambda: taf.update_target_policy(nets, args, 2) or {},
    }
    for names, update in stages.items():
        before = weights_of(nets)
        logs = update()
        assert changed(nets, before) == set(names)
        assert all(x.numel() == 1 and torch.isfinite(x) for x in logs.values())
    decay = {name: net.param_groups[0]["weight_decay"] for name, net in nets.items() if name.startswith("adam")}
    assert decay == {"adam_values": 0, "adam_command": 5e-4, "adam_cvae": 1e-4, "adam_critics": 0, "adam_policy": 1e-4}


@pytest.mark.parametrize("reg_positions", ["all", "last"])
def test_a_full_update_of_every_stage_never_leaves_the_device(reg_positions, monkeypatch):
    """The device `meta` holds no numbers: a tensor made elsewhere, or a number taken to the host, is an error."""
    args = arguments(dropout=0.1, cql=0.1, ema_start=0, ema_every=1, reg_positions=reg_positions)
    data, *_ = small(args)
    data, nets = taf.Data(*(x.to("meta") for x in data)), taf.build(args, 3, 2, "meta")
    logs = dict(taf.update_values(nets, data, args))
    monkeypatch.setattr(torch.Tensor, "item", lambda x: 0.0)  # the two moments are recorded
    data, _ = taf.relabel(nets, data, args)
    monkeypatch.undo()
    logs |= taf.update_command(nets, data, args) | taf.update_behaviour(nets, data, args)
    for step in (1, 2):
        b = taf.sample_windows(data, args)
        logs |= taf.update_critics(nets, b, args) | taf.update_policy(nets, b, args)
        taf.update_target_policy(nets, args, step)
    assert {x.device.type for x in logs.values()} == {"meta"}
    with pytest.raises((RuntimeError, NotImplementedError)):  # that device does notice
        logs["losses/policy"].item()


def test_beta_zero_draws_no_source_data():
    args = arguments(beta=0.0, filter="none")
    data, *_ = small(args, gate=np.ones(N_S, bool))
    names = ("states", "raw_states", "rewards", "raw_rewards", "tokens")
    data = data._replace(**{name: getattr(data, name).clone() for name in names})
    for name in names:
        getattr(data, name)[:N_S] = torch.nan
    nets = build(args)
    logs = taf.update_values(nets, data, args)
    data, moments = taf.relabel(nets, data, args)
    b = taf.sample_windows(data, args)
    logs |= taf.update_command(nets, data, args) | taf.update_behaviour(nets, data, args)
    logs |= taf.update_critics(nets, b, args) | taf.update_policy(nets, b, args)
    assert all(torch.isfinite(x) for x in logs.values())
    assert all(map(math.isfinite, moments.values()))


# -------------------------------------------------------------------------------------------------- acting, (h)


def watched_policy(nets):
    seen, forward = [], nets["policy"].forward
    nets["policy"].forward = lambda b, only_last: seen.append((b, forward(b, only_last))) or seen[-1][1]
    return seen


def test_h_half_of_the_candidates_see_the_first_command_halved():
    args = arguments(K=3, candidates=50)
    nets = build(args)
    stir(nets, "policy")
    nets["policy"].eval()
    seen = watched_policy(nets)
    tokens, states, actions = torch.randn(3, 3), torch.randn(3, 3, 3), torch.randn(3, 3, 2)
    # An episode's first step is first in the context, second after one step of padding, or no longer there.
    steps = torch.tensor([[0, 1, 2], [0, 0, 1], [4, 5, 6]])
    valid = torch.tensor([[True] * 3, [False, True, True], [True] * 3])
    context = taf.Batch(tokens, states, actions, steps, valid)
    with torch.no_grad():
        a = taf.guided_action(nets, context, args, torch.Generator().manual_seed(0))
    given, candidates = seen[0][0].tokens.view(3, 50, 3), seen[0][1][:, 0].view(3, 50, 2)
    for i, first in enumerate((0, 1, None)):
        for m in range(50):
            wanted = tokens[i].tolist()
            if m >= 25 and first is not None:
                wanted[first] /= 2
            assert given[i, m, :2].tolist() == pytest.approx(wanted[:2])
        noise = given[i, :, -1] - tokens[i, -1]
        assert (noise == 0).nonzero().flatten().tolist() == [0, 1]
        assert noise.std().item() == pytest.approx(0.1, rel=0.4)
        assert (candidates[i] - a[i]).abs().sum(1).min() == 0


def test_h_at_the_first_step_the_last_command_is_the_one_halved():
    args = arguments(K=2, guided_noise=0.0, candidates=4)
    nets = build(args)
    nets["policy"].eval()
    seen = watched_policy(nets)
    valid = torch.tensor([[False, True]])
    context = taf.Batch(
        torch.tensor([[0.0, 6.0]]), torch.zeros(1, 2, 3), torch.zeros(1, 2, 2), torch.zeros(1, 2).long(), valid
    )
    with torch.no_grad():
        taf.guided_action(nets, context, args, torch.Generator().manual_seed(0))
    assert seen[0][0].tokens.tolist() == [[0, 6], [0, 6], [0, 3], [0, 3]]


def test_guidance_draws_by_the_softmax_of_the_target_critics():
    args = arguments(K=2, candidates=5, guided_noise=1.0)
    nets = build(args)
    stir(nets, "policy")
    nets["policy"].eval()
    nets["critics_bar"].forward = lambda s, a: torch.stack([8 * a[..., 0], 8 * a[..., 0] + 1])
    n = 4000  # the same context: only noise and the draw differ
    one = [
        torch.randn(1, 2),
        torch.randn(1, 2, 3),
        torch.randn(1, 2, 2),
        torch.ones(1, 2).long(),
        torch.ones(1, 2).bool(),
    ]
    context = taf.Batch(*(x.expand(n, *x.shape[1:]) for x in one))
    seen = watched_policy(nets)
    with torch.no_grad():
        a = taf.guided_action(nets, context, args, torch.Generator().manual_seed(0))
    candidates = seen[0][1][:, 0].view(n, 5, 2)
    p = (8 * candidates[..., 0]).softmax(1)  # [n, 5]
    expected = (p * candidates[..., 0]).sum(1)
    spread = (p * (candidates[..., 0] - expected[:, None]).square()).sum().sqrt() / n
    assert abs((a[:, 0] - expected).mean()) < 5 * spread
    assert (a[:, 0] - candidates[..., 0].mean(1)).mean() > 10 * spread


def test_agents_do_not_clip_and_the_greedy_one_acts_as_the_policy():
    args = arguments(K=2, return_target=0.0)
    nets = build(args)
    nets["policy"].eval()
    pre = {"mu": np.zeros(3), "sd": np.full(3, 1e-3)}
    agent = taf.Agent(nets, pre, args, 1)
    a = agent.act(np.ones((1, 3), np.float32), np.zeros(1), np.ones(1, bool))
    assert agent.context.states[0, -1].tolist() == pytest.approx([1000.0] * 3, rel=1e-4)
    with torch.no_grad():
        s = agent.context.states
        command = nets["command"](s[:, -1])[0]
        context = agent.context._replace(tokens=torch.stack([0 * command, command], 1), actions=torch.zeros(1, 2, 2))
        np.testing.assert_allclose(a, nets["policy"](context)[:, -1], rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------- whole runs


RUN = dict(layers=1, heads=1, width=8, hidden=8, cvae_hidden=8, K=3, M=2, target_batch=8, candidates=4, dropout=0.1)
RUN |= dict(label_updates=4, command_updates=3, cvae_updates=3, updates=8, ema_start=2, ema_every=2, eval_episodes=2)
RUN |= dict(log_every=1, save_every=2, eval_every=2, cql=0.1, lr=1e-3)


@pytest.fixture(autouse=True)
def _leave_no_trace(monkeypatch):
    """A run changes how torch computes, and draws from global generators. The figure has its own tests."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(gate_report, "draw", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    deterministic, states = torch.get_deterministic_debug_mode(), (random.getstate(), torch.get_rng_state())
    yield
    torch.set_deterministic_debug_mode(deterministic)
    random.setstate(states[0])
    torch.set_rng_state(states[1])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two datasets of hopper's shapes, every other episode of which fails."""
    folder, paths = tmp_path_factory.mktemp("data"), {}
    for seed, role in enumerate(("source", "target")):
        rng, n = np.random.default_rng(seed), 240
        last = np.arange(1, n + 1) % 20 == 0
        states = 0.3 * rng.normal(size=(n + 1, 11))
        columns = {"observations": states[:-1], "next_observations": states[1:]}
        columns |= {"actions": rng.uniform(-1, 1, (n, 3)), "rewards": rng.normal(1, 1, n)}
        columns |= {"terminals": last & (np.arange(n) // 20 % 2 == 0), "timeouts": last & (np.arange(n) // 20 % 2 == 1)}
        paths[role] = str(folder / f"{role}.hdf5")
        write_hdf5(paths[role], columns, "embedded", {})
    return paths


def settings(files, out, **changes) -> taf.Args:
    given = runs.compose(taf.Args, device="cpu", out=Path(out), **files)
    return runs.replace(runs.plain(taf.Args, taf.defaults, given), **{**RUN, **changes})


def folder_of(out) -> Path:
    (folder,) = (path.parent for path in Path(out).glob("taf_dt_released/*/*/args.json"))
    return folder


def outcome(out):
    """All that training produced, as bytes, but for the time it took."""

    def flat(x):
        if isinstance(x, torch.Tensor):
            return str(x.dtype), tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(x, dict):
            return [(flat(k), flat(v)) for k, v in x.items()]
        return [flat(v) for v in x] if isinstance(x, list | tuple) else x

    saved = torch.load(folder_of(out) / "ckpt.pt", weights_only=True)
    saved["parts"]["record"].pop("stages")
    return {k: flat(saved[k]) for k in ("parts", "python", "numpy", "torch")}


def test_a_run_through_in_which_every_network_learns(files, tmp_path, capsys):
    args = settings(files, tmp_path)
    result = taf.train(args)
    assert result["method"] == "taf_dt_released"
    assert [e["step"] for e in result["evaluations"]] == [2, 4, 6, 8]
    assert [e["guided_score"] is None for e in result["evaluations"]] == [True, False, False, False]
    assert result["summaries"]["mean_of_last_three"]["steps"] == [4, 6, 8]
    assert "guided_score" in result["summaries"]["final"]
    assert {"values", "command", "cvae", "policy", "evaluation"} <= set(result["stages"])
    assert "guided by the critics" in capsys.readouterr().out
    saved = torch.load(folder_of(tmp_path) / "ckpt.pt", weights_only=True)["parts"]
    runs.seed_everything(args.run.seed)
    fresh = taf.build(args, 11, 3, "cpu")
    assert {name for name in fresh if not name.startswith("adam")} == NETS
    for name in NETS:
        for key, value in fresh[name].state_dict().items():
            assert torch.isfinite(saved[name][key]).all()
            assert not torch.equal(saved[name][key], value), (name, key)

    # done already; and once more, the last checkpoint alone
    assert taf.train(args) == result
    found = taf.train(runs.replace(args, eval_only=True))
    final = result["evaluations"][-1]
    assert found == {key: final[key] for key in ("score", "returns", "guided_score")}


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """One run without a stop: its result and its folder."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate_report, "draw", lambda *_: None)
        return taf.train(settings(files, out)), out


@pytest.mark.parametrize("stage", ["update_values", "update_command", "update_behaviour", "update_critics"])
def test_stopped_and_resumed_is_the_same_to_the_bit(stage, files, tmp_path, monkeypatch, send, whole):
    result, out = whole
    update, count = getattr(taf, stage), [0]

    def stopped(*arguments):
        count[0] += 1
        if count[0] == 3:
            send(signal.SIGTERM)
        return update(*arguments)

    monkeypatch.setattr(taf, stage, stopped)
    args = settings(files, tmp_path / "stopped", save_every=1000)
    with pytest.raises(SystemExit, match="143"):
        taf.train(args)
    assert not runs.is_done(folder_of(tmp_path / "stopped"))
    again = taf.train(args)
    assert again["evaluations"] == result["evaluations"]
    assert outcome(tmp_path / "stopped") == outcome(out)


def test_watching_a_run_does_not_change_it(files, tmp_path):
    taf.train(settings(files, tmp_path / "a", guided="never"))
    taf.train(settings(files, tmp_path / "b", guided="always", eval_every=1, eval_episodes=3, save_every=5))
    a, b = (torch.load(folder_of(tmp_path / x) / "ckpt.pt", weights_only=True) for x in "ab")
    for name in NETS:
        assert all(torch.equal(a["parts"][name][key], x) for key, x in b["parts"][name].items())
    assert torch.equal(a["torch"], b["torch"])


def test_returns_as_tokens_skip_values_and_command(files, tmp_path):
    result = taf.train(settings(files, tmp_path, token="rtg", updates=2))
    assert not {"values", "command"} & set(result["stages"])
    assert result["changed"]["token"] == "rtg"


@pytest.mark.parametrize("changes", [dict(beta=0.0), dict(filter="mmd"), dict(filter="ot"), dict(reg_positions="all")])
def test_a_switch_runs(changes, files, tmp_path):
    result = taf.train(settings(files, tmp_path, updates=2, guided="never", **changes))
    assert changes.items() <= result["args"].items()
    assert math.isfinite(result["summaries"]["final"]["score"])
    if "beta" in changes:
        assert not [stage for stage in result["stages"] if stage.startswith("preprocess")]


def test_one_dataset_alone(files, tmp_path):
    task = dict(shift="none", source=files["source"], target="none", device="cpu", out=tmp_path)
    args = runs.plain(taf.Args, taf.defaults, runs.compose(taf.Args, **task))
    result = taf.train(runs.replace(args, **RUN))
    assert result["args"]["beta"] == 0
    assert list(result["data"]) == ["target"]
