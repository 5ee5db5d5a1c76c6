"""Choices by measurement: precision and threads; the Adam that a compiled update holds; fast forms."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import taf_dt as taf
from dynashift import faster, runs
from dynashift.fast_attention import attention
from dynashift.fast_mish import mish


@pytest.mark.parametrize(
    ("able", "gain", "chosen"), [(False, 9.0, "fp32"), (True, 1.1, "fp32"), (True, 2.1, "bf16"), (True, 0.1, "fp32")]
)
def test_bf16_is_chosen_where_it_exists_and_this_update_gains(able, gain, chosen, monkeypatch):
    tried, nets, settings = [], {"net": nn.Linear(3, 3)}, runs.replace(taf.Args(), device="cpu")

    def update(nets, data, args):
        tried.append((args.tools.precision, nets["net"].weight.data_ptr()))

    def clock(functions, rounds, device):
        for function in functions.values():
            function()
        return {"fp32": gain, "bf16": 1.0}

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": able})
    monkeypatch.setattr(faster, "in_turn", clock)
    assert faster.pick_precision(update, nets, None, settings) == chosen
    assert [name for name, _ in tried] == ["fp32", "bf16"] * able
    assert faster.pick_precision(update, nets, None, runs.replace(settings, width=64)) == "fp32"
    assert len(tried) == 2 * able  # nothing is tried on a narrow network
    assert nets["net"].weight.data_ptr() not in [where for _, where in tried]  # only copies are trained
    for named in ("fp32", "bf16"):
        assert faster.pick_precision(update, nets, None, runs.replace(settings, precision=named)) == named


def test_the_probes_draw_no_random_number_and_change_no_network(monkeypatch):
    net = nn.Linear(3, 3)
    nets = {"net": net, "adam": faster.Adam(net.parameters(), lr=0.1)}
    tried = []

    def update(nets, data, args):
        tried.append((torch.get_num_threads(), nets["net"]))
        nets["net"](torch.randn(4, 3)).sum().backward()
        nets["adam"].step()

    before, state, threads = net.weight.clone(), torch.get_rng_state(), torch.get_num_threads()
    once = {"once": lambda copies: update(copies, None, None)}
    assert set(faster.on_copies(once, nets, 1, torch.device("cpu"))) == {"once"}
    tried.clear()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    try:
        assert faster.pick_threads(update, nets, None, None, rounds=1) in (1, 2)
        assert torch.get_num_threads() == 2
        assert {n for n, _ in tried} == {1, 2}
        monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the user has chosen
        tried.clear()
        assert faster.pick_threads(update, nets, None, None) == 2
        assert tried == []
    finally:
        torch.set_num_threads(threads)
    assert (torch.get_rng_state() == state).all()
    assert (net.weight == before).all()
    assert not nets["adam"].state
    assert net not in [other for _, other in tried]


@pytest.mark.parametrize(("seconds", "lines"), [(0.4, []), (2, ["measuring how updates are fastest here: up to 16 s"])])
def test_a_measurement_that_takes_long_is_announced(seconds, lines, monkeypatch, capsys):
    """Once, as soon as its first round tells how long it takes: full networks may need minutes."""
    now, seen = [0.0], []
    monkeypatch.setattr(faster.time, "perf_counter", lambda: now[0])

    def update():
        seen.append(capsys.readouterr().out.splitlines())
        now[0] += seconds

    took = faster.in_turn({1: update, 2: update}, 4, torch.device("cpu"))
    assert took == {1: pytest.approx(seconds), 2: pytest.approx(seconds)}
    assert seen == [[], [], lines, *[[]] * 7]  # what has appeared since the update before


@pytest.mark.parametrize(("slow", "chosen"), [(1, 2), (2, 1)])
def test_the_faster_number_of_threads_is_chosen(slow, chosen, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(faster, "in_turn", lambda functions, rounds, device: {n: 1.0 + (n == slow) for n in functions})
    assert faster.pick_threads(None, {}, None, None) == chosen


@pytest.mark.parametrize(("device", "others"), [("cpu", []), ("cuda", ["policy"])])
def test_compile_leaves_the_policy_s_update_on_a_cpu_as_it_is(device, others, monkeypatch):
    monkeypatch.setattr(faster, "compiled", lambda *_: "compiled")
    stages, settings = ("values", "command", "cvae", "policy"), runs.replace(taf.Args(), device=device)
    found = {stage: faster.as_run(stage, "plain", {}, None, runs.replace(settings, compile=True)) for stage in stages}
    assert [stage for stage in stages if found[stage] == "compiled"] == ["values", "command", "cvae", *others]
    assert {faster.as_run(stage, "plain", {}, None, settings) for stage in stages} == {"plain"}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_step_that_can_be_compiled_is_torch_s(decay):
    """Both from one start with the same gradients and a rate that falls."""
    parameters = [[nn.Parameter(torch.full((2, 3), x)) for x in (1.0, -2.0)] for _ in range(2)]
    ours = faster.Adam(parameters[0], lr=0.1, weight_decay=decay)
    theirs = torch.optim.Adam(parameters[1], lr=0.1, weight_decay=decay)
    ours.make_static()
    g = torch.Generator().manual_seed(0)
    for step in range(20):
        ours.set_rate(0.1 / (1 + step))
        theirs.param_groups[0]["lr"] = 0.1 / (1 + step)
        for mine, other in zip(*parameters, strict=True):
            mine.grad = torch.randn(2, 3, generator=g)
            other.grad = mine.grad.clone()
        ours._traceable_step(ours.param_groups[0])
        theirs.step()
    for mine, other in zip(*parameters, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    moments = [adam.state[p[0]] for adam, p in zip((ours, theirs), parameters, strict=True)]
    assert moments[0]["step"] == moments[1]["step"] == 20
    torch.testing.assert_close(moments[0]["exp_avg_sq"], moments[1]["exp_avg_sq"])


def test_a_rate_is_written_only_when_it_changes():
    """Each time is a launch on a GPU."""
    adam = faster.Adam([nn.Parameter(torch.ones(3))], lr=0.1)
    adam.set_rate(0.2)
    assert adam.param_groups[0]["lr"] == 0.2
    adam.make_static()
    rate, versions = adam.param_groups[0]["lr"], []
    for value in (0.2, 0.2, 0.3, 0.3, 0.2):
        adam.set_rate(value)
        assert rate == pytest.approx(value)
        versions.append(rate._version)
    assert versions == [0, 0, 1, 1, 2]


def test_a_step_that_can_be_compiled_refuses_the_penalty_that_it_does_not_have():
    p = nn.Parameter(torch.ones(3))
    adam = faster.Adam([p], lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)
    adam.make_static()
    with pytest.raises(AssertionError, match="no decoupled weight decay in a compiled step"):
        adam._traceable_step(adam.param_groups[0])


def test_the_fast_mish_and_its_gradient_are_torch_s_in_double_precision():
    x = torch.cat([torch.linspace(-90, 90, 20_001), torch.tensor([0.0, 1e4, -1e4])]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    torch.testing.assert_close(mish(x).double(), F.mish(exact), rtol=1e-6, atol=1e-30)
    found, expected = (torch.autograd.grad(f(z).sum(), z)[0] for f, z in ((mish, x), (F.mish, exact)))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    assert torch.autograd.gradcheck(mish, torch.linspace(-4, 4, 9).double().requires_grad_())


@pytest.mark.parametrize(("positions", "queries"), [(5, 5), (15, 1), (16, 5), (40, 40)])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
def test_the_fast_attention_and_its_gradients_are_torch_s_in_double_precision(positions, queries, precision):
    """On both sides of the length at which its form changes, with padding in front, and fewer queries than keys."""
    generator = torch.Generator().manual_seed(positions)
    shapes = [(3, 2, n, 8) for n in (queries, positions, positions)]
    exact = [torch.randn(s, generator=generator, dtype=torch.float64).to(precision).double() for s in shapes]
    seen = torch.ones(positions, positions, dtype=torch.bool).tril() & (torch.arange(positions) >= 2)
    mask = torch.where(seen | torch.eye(positions, dtype=torch.bool), 0.0, -torch.inf)[-queries:].expand(3, 1, -1, -1)
    rounded = [x.to(precision).requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    found, expected = attention(*rounded, mask, 0.0), F.scaled_dot_product_attention(*exact, mask.double())
    assert found.dtype == precision
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[precision]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    direction = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((found * direction).sum(), rounded)
    for mine, other in zip(gradients, torch.autograd.grad((expected * direction).sum(), exact), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=2 * tolerance)


def test_dropout_of_attention_drops_weights_and_keeps_their_sum_on_average():
    weightless, n = torch.zeros(500, 1, 20, 4), 20
    values = torch.eye(n).expand(500, 1, n, n)  # the result is the weights themselves
    torch.manual_seed(0)
    weights = attention(weightless, weightless, values, torch.zeros(500, 1, n, n), 0.25)
    assert weights.unique().tolist() == pytest.approx([0, 1 / n / 0.75])
    assert (weights == 0).double().mean() == pytest.approx(0.25, abs=0.005)  # 200,000 draws: 0.001 is one deviation
    assert weights.sum(-1).mean() == pytest.approx(1, abs=0.01)


def test_no_compiler_is_imported_for_a_run(monkeypatch):
    """It takes longer than all other libraries together."""
    for name in ("torch._dynamo", "torch._inductor", "torch._inductor.config"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # the compiler replaces it once it is there
    before = torch.get_deterministic_debug_mode()
    try:
        runs.seed_everything(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_deterministic_debug_mode(before)
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    adam = faster.Adam([p], lr=0.1, fused=True)
    adam.step()
    adam.load_state_dict(adam.state_dict())
    adam.zero_grad()
    assert p.grad is None
    assert p.detach() == pytest.approx(0.9)
