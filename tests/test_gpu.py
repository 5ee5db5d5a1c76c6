"""On a GPU: the first losses are the CPU's, the quick job runs, and nothing lacks a deterministic form."""

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import taf_dt as taf
from benchmarks import bench_gpu
from benchmarks.bench_train import synthetic
from benchmarks.operations import operations
from dynashift import behaviour, faster, runs

ROOT = Path(__file__).parents[1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# What torch.use_deterministic_algorithms documents to raise an error, with the operations that compute it. Conditions
# that the documentation adds (a mode, an argument) are left out, so this refuses more than torch does.
WITHOUT_DETERMINISTIC_FORM = {
    "torch.nn.AvgPool3d": ["avg_pool3d_backward"],
    "torch.nn.AdaptiveAvgPool2d": ["_adaptive_avg_pool2d_backward"],
    "torch.nn.AdaptiveAvgPool3d": ["_adaptive_avg_pool3d_backward"],
    "torch.nn.AdaptiveMaxPool2d": ["adaptive_max_pool2d_backward"],
    "torch.nn.FractionalMaxPool2d": ["fractional_max_pool2d_backward"],
    "torch.nn.FractionalMaxPool3d": ["fractional_max_pool3d_backward"],
    "torch.nn.MaxUnpool1d": ["max_unpool2d"],
    "torch.nn.MaxUnpool2d": ["max_unpool2d"],
    "torch.nn.MaxUnpool3d": ["max_unpool3d"],
    "torch.nn.functional.interpolate": [
        "upsample_linear1d_backward",
        "upsample_bilinear2d_backward",
        "_upsample_bilinear2d_aa_backward",
        "upsample_bicubic2d_backward",
        "_upsample_bicubic2d_aa_backward",
        "upsample_trilinear3d_backward",
    ],
    "torch.nn.ReflectionPad1d": ["reflection_pad1d_backward"],
    "torch.nn.ReflectionPad2d": ["reflection_pad2d_backward"],
    "torch.nn.ReflectionPad3d": ["reflection_pad3d_backward"],
    "torch.nn.NLLLoss": ["nll_loss_forward", "nll_loss2d_forward"],
    "torch.nn.CTCLoss": ["_ctc_loss_backward"],
    "torch.nn.EmbeddingBag": ["_embedding_bag_backward", "_embedding_bag_dense_backward"],
    "torch.Tensor.put_": ["put", "put_"],
    "torch.histc": ["histc"],
    "torch.bincount": ["bincount"],
    "torch.median": ["median", "nanmedian"],
    "torch.nn.functional.grid_sample": ["grid_sampler_2d_backward", "grid_sampler_3d_backward"],
    "torch.cumsum": ["cumsum", "cumsum_"],
    "torch.Tensor.scatter_reduce": ["scatter_reduce", "scatter_reduce_"],
    "torch.Tensor.resize_": ["resize_"],
}
OPERATIONS = set().union(*WITHOUT_DETERMINISTIC_FORM.values())


def test_the_list_of_operations_is_that_of_torch_s_documentation():
    text = torch.use_deterministic_algorithms.__doc__.split(":class:`RuntimeError` when ``mode=True``:")[1]
    documented = re.findall(r"\* :(?:class|func):`([\w.]+)`", text.split("In addition")[0])
    assert set(WITHOUT_DETERMINISTIC_FORM) == set(documented)
    assert [name for name in OPERATIONS if not hasattr(torch.ops.aten, name)] == []


def quick(device: str = "cpu", **changes) -> taf.Args:
    chosen = taf.QUICK | dict(K=5, eta_reg=0.4, return_target=0.0, device=device, dropout=0.0) | changes
    return runs.compose(taf.Args, **chosen)


def first_losses(device: str, monkeypatch) -> dict:
    """Of every stage at the sizes of --quick, from the same networks, rows and noise wherever they lie."""
    args = quick(device)
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    nets = taf.build(args, 11, 3, "cpu")
    data = synthetic(11, 3, rows=4_000, target=1_000)
    rows = torch.randint(5_000, (256,), generator=g).to(device)
    noise = torch.randn(args.M, 96 * 5, 6, generator=g).to(device)
    latents = torch.randn(256, 6, generator=g).to(device)
    b = taf.windows(data, torch.randint(4_900, (96,), generator=g), 5)
    for name, net in nets.items():
        if not name.startswith("adam"):
            net.to(device)
    data, b = taf.Data(*(x.to(device) for x in data)), taf.Batch(*(x.to(device) for x in b))
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(taf, "sample_transitions", lambda *_: rows)
        patch.setattr(behaviour, "uniform", lambda *_: rows)
        patch.setattr(torch, "randn_like", lambda _: latents)
        patch.setattr(torch, "randn", lambda *_, **__: noise)
        logs = taf.update_values(nets, data, args) | taf.update_command(nets, data, args)
        logs |= taf.update_behaviour(nets, data, args)
        logs |= taf.update_critics(nets, b, args) | taf.update_policy(nets, b, args)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn, which a GPU would draw differently
    return {name: x.item() for name, x in logs.items() if name.startswith("losses/")}


def test_the_first_losses_are_those_of_these_networks_and_rows(monkeypatch):
    found = first_losses("cpu", monkeypatch)
    assert set(found) == {f"losses/{x}" for x in ("v", "q", "command", "cvae", "critic", "policy", "dt", "reg")}
    assert all(map(math.isfinite, found.values()))
    assert found == first_losses("cpu", monkeypatch)


@pytest.mark.gpu
@needs_gpu
def test_the_first_losses_on_the_gpu_are_the_cpu_s(monkeypatch):
    assert first_losses("cuda", monkeypatch) == pytest.approx(first_losses("cpu", monkeypatch), rel=1e-3, abs=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("flags", [[], ["--compile"], ["--precision", "bf16"]])
def test_the_quick_job_runs_on_the_gpu(flags, tmp_path):
    few = [
        "--label-updates",
        "50",
        "--command-updates",
        "50",
        "--cvae-updates",
        "50",
        "--updates",
        "50",
        "--eval-episodes",
        "1",
    ]
    command = [sys.executable, ROOT / "taf_dt.py", "--quick", "--data", "embedded", "--device", "cuda", *few, *flags]
    subprocess.run([*command, "--out", tmp_path / "runs"], check=True, cwd=tmp_path)
    assert list(tmp_path.rglob("result.json"))


STAGES = [taf.update_values, taf.update_command, taf.update_behaviour, taf.update_actor_critic]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("update", STAGES)
def test_a_compiled_stage_is_replayed_as_a_graph(update):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    args = quick("cuda", dropout=0.1)
    data = taf.Data(*(x.to("cuda") for x in synthetic(11, 3, rows=4_000, target=1_000)))
    nets = taf.build(args, 11, 3, "cuda")
    function = faster.compiled(update, nets, data, torch.device("cuda"))
    for _ in range(4):  # once to warm up, once to record
        function(nets, data, args)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("update", STAGES)
def test_no_operation_of_an_update_lacks_a_deterministic_form(update):
    args = quick(dropout=0.1)
    data = synthetic(11, 3, rows=4_000, target=1_000)
    nets = taf.build(args, 11, 3, "cpu")
    names = {name.removeprefix("aten::") for name in operations(lambda: update(nets, data, args))}
    assert "randint" in names
    assert not names & OPERATIONS


def test_the_benchmark_without_a_gpu_says_so_in_one_line(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is present, so its absence cannot be tested")
    script = ROOT / "benchmarks" / "bench_gpu.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: there is no CUDA device here; bench_train.py measures a CPU\n"


def test_the_page_of_a_device_is_appended_to_the_table(tmp_path):
    """Measured on the CPU, which is a device like any other, but for its memory."""
    args = quick(layers=1, M=2)
    data = synthetic(11, 3, rows=4_000, target=1_000)
    found = bench_gpu.measure("plain", args, data, 0.01, torch.device("cpu"))
    expected = sum(getattr(args, count) / found[stage] for stage, (_, count) in bench_gpu.STAGES.items()) / 3600
    assert found["hours"] == pytest.approx(expected)
    table = tmp_path / "gpu.md"
    for name in ("one", "two"):
        bench_gpu.append(table, [bench_gpu.row(name, "hopper, K = 5", "plain", found)])
    lines = table.read_text().splitlines()[-4:]
    assert {line.count("|") for line in lines} == {11}
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| one", "| two"]
    assert np.isfinite([float(x) for x in lines[2].split(" | ")[4:8]]).all()
