"""Speed of training: every stage beside its products, the policy's beside the published step too.

    python benchmarks/bench_train.py [--robots hopper ant] [--K 5 20] [--seconds 20] [--clock cpu]
                                     [--precision fp32 bf16] [--compile]

At the paper's configuration (4 layers, 4 heads, width 256, 64 + 128 windows), in turn within one
run, so that a busy machine slows all of them:

    update      one update of taf_dt.py; of the policy's stage, sampling and averages included
    products    its matrix products alone, recorded from it and replayed on random matrices
    compiled    the update as one compiled function, with --compile; the policy's takes minutes
    published   the authors' own step, transcribed in published.py, always in fp32 as theirs

Then it shows the parts of the policy's update beside their products, and how many operations an
update has. Each is a launch on a GPU, which bounds the updates per second there. --clock cpu counts
the time of this process alone; on a machine that others use, set OMP_NUM_THREADS=1 as well.
"""

import copy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import torch
import tyro
from torch import nn

import taf_dt
from benchmarks.operations import LAUNCH, operations, products, replay
from benchmarks.published import published_update
from dynashift import faster, runs
from dynashift.behaviour import behaviour_log_density
from dynashift.errors import one_line_errors
from dynashift.optimise import gradient_step
from dynashift.tasks import ROBOTS

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def synthetic(d_s: int, d_a: int, rows: int = 200_000, target: int = 5_000) -> taf_dt.Data:
    """Data of the right shapes: episodes of 1000 steps of noise."""
    n, step = rows + target, torch.arange(rows + target) % 1000
    weight, kept = torch.rand(n) + 0.5, torch.arange(0, rows, 2)
    return taf_dt.Data(
        states=torch.randn(n, d_s),
        actions=torch.rand(n, d_a) * 2 - 1,
        rewards=torch.randn(n),
        next_states=torch.randn(n, d_s),
        terminal=torch.zeros(n, dtype=torch.bool),
        steps=step,
        left=1000 - step,
        weight=weight,
        reg_weight=weight,
        tokens=torch.randn(n),
        source_rows=kept,
        source_cdf=torch.linspace(0, 1, len(kept) + 1, dtype=torch.float64)[1:],
        source_starts=kept,
        target_rows=torch.arange(rows, n),
    )


def policy_stage(nets: dict, data: taf_dt.Data, args: taf_dt.Args) -> dict:
    """Lines 8 to 11 of Algorithm 1, as in the loop of `taf_dt.train`."""
    logs = taf_dt.update_actor_critic(nets, data, args)
    taf_dt.update_target_policy(nets, args, args.ema_start + args.ema_every)
    return logs


POLICY = "policy and critics"
STAGES = {
    "V and Q": taf_dt.update_values,
    "command": taf_dt.update_command,
    "CVAE": taf_dt.update_behaviour,
    POLICY: policy_stage,
}


def interleaved(functions: dict, seconds: float, clock=time.perf_counter) -> dict[str, float]:
    """Median seconds of each, run in turn."""
    took = {name: [] for name in functions}
    for f in functions.values():
        f()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(took.values()))) < 3:
        for name, f in functions.items():
            start = clock()
            f()
            took[name].append(clock() - start)
    return {name: float(np.median(x)) for name, x in took.items()}


def parts_of_update(nets: dict, data: taf_dt.Data, args: taf_dt.Args) -> dict:
    """The parts of the policy's update as functions without arguments."""
    b = taf_dt.sample_windows(data, args)
    noise = torch.randn(args.M, b.valid.numel(), 2 * b.actions.shape[-1])
    parameters, state = list(nets["policy"].parameters()), {}
    low = taf_dt.low_precision(args.tools.precision, b.states.device)  # as in the update

    def critics():
        with torch.no_grad():
            q_last = nets["critics_bar"](b.states[:, -1], b.actions[:, -1]).amin(0)
            q_hat = taf_dt.k_step_target(b.rewards, b.terminal, q_last, args.gamma)
        q = nets["critics"](b.states, b.actions)
        loss = taf_dt.critic_loss(q, q_hat, b.weight)
        gradient_step(nets["adam_critics"], loss, args.clip_grad)

    @low
    @torch.no_grad()
    def target_policy():
        nets["policy_bar"](b, only_last=True)

    @low
    def transformer():
        state["pi"] = nets["policy"](b).to(b.actions.dtype)

    def guidance():
        taf_dt.q_term(nets["critics"](b.states, state["pi"]).amin(0), b.weight)

    @low
    @torch.no_grad()
    def regulariser():
        s, a = b.states.flatten(0, 1), b.actions.flatten(0, 1)
        cvae, latents = nets["cvae"], args.reg_latents
        behaviour_log_density(cvae, s, a, noise, args.variance, latents)

    @low
    def forward():
        state["loss"] = taf_dt.policy_loss(nets, b, noise, args)[0]

    def backward():
        state["gradients"] = torch.autograd.grad(state["loss"], parameters)

    def optimiser():
        for parameter, gradient in zip(parameters, state["gradients"], strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(parameters, args.clip_grad)
        nets["adam_policy"].step()
        taf_dt.polyak_update(nets["policy_bar"], nets["policy"], 0.005)

    parts = {"sampling": lambda: taf_dt.sample_windows(data, args), "critics": critics}
    parts |= {"target policy": target_policy, "loss": forward, "  Transformer": transformer}
    parts |= {"  Q term": guidance, "  L_reg": regulariser, "backward": backward}
    return parts | {"optimiser, average": optimiser}


def peak(clock) -> float:
    """Operations a second in one large product."""
    a = torch.randn(2048, 2048)
    took = interleaved({"x": lambda: a @ a}, 2, clock)["x"]
    return 2 * 2048**3 / took


def measure_stage(name: str, nets, data, args, seconds: float, clock, compile: bool) -> None:
    def update():
        STAGES[name](nets, data, args)

    nets["cvae"].requires_grad_(name == "CVAE")
    pairs, flop = products(update)
    forms = {"update": update, "products": lambda: replay(pairs)}
    counted = {"update": update}
    if name == POLICY:
        forms["published"] = counted["published"] = published_update(data, nets["cvae"], args)
    if compile:
        forms["compiled"] = compiled_update(name, nets, data, args)
    t = interleaved(forms, seconds, clock)
    precision = args.tools.precision
    print(f"\n{args.task.env}, K = {args.gate.K}, {name}, {precision}: {flop / 1e9:.2f} GFLOP")
    for form, took in t.items():
        print(f"  {form:22} {took * 1e3:8.1f} ms  {1 / took:8.2f} /s")
    for form in ("update", "compiled")[: 1 + compile]:
        print(f"  {form + ' / products':22} {t[form] / t['products']:8.2f}   (bar: at most 1.3)")
    for form, function in counted.items():
        n = len(operations(function))
        speed = f"{1 / (n * LAUNCH):8.0f} /s at {LAUNCH * 1e6:.0f} us"
        print(f"  launches, {form:12} {n:8}     {speed}")
    if name == POLICY:
        ratio = t["published"] / t["update"]
        print(f"  published / update     {ratio:8.2f}   (bar: at least 2.5)")
        measure_parts(parts_of_update(nets, data, args), t["update"], seconds / 2, clock)


def measure_parts(parts: dict, whole: float, seconds: float, clock) -> None:
    """Each part's time, its share of the whole update's seconds, and its own products' time."""
    alone = {part: products(function)[0] for part, function in parts.items()}
    forms = parts | {(part, "products"): partial(replay, pairs) for part, pairs in alone.items()}
    t = interleaved(forms, seconds, clock)
    for part in parts:
        own = f"products {t[part, 'products'] * 1e3:8.1f} ms"
        print(f"    {part:20} {t[part] * 1e3:8.1f} ms  {t[part] / whole:7.1%}   {own}")


def compiled_update(name: str, nets: dict, data: taf_dt.Data, args: taf_dt.Args):
    """The stage's compiled update, of copies of the networks, after its first call."""
    nets, start = copy.deepcopy(nets), time.perf_counter()
    function = faster.compiled(STAGES[name], nets, data, torch.device("cpu"))
    function(nets, data, args)
    print(f"\n{name}: compiled in {time.perf_counter() - start:.0f} s")
    return lambda: function(nets, data, args)


def main(
    robots: tuple[str, ...] = ("hopper", "ant"),
    K: tuple[int, ...] = (5, 20),
    seconds: float = 20,
    clock: Literal["wall", "cpu"] = "wall",
    precision: tuple[Literal["fp32", "bf16"], ...] = ("fp32",),
    compile: bool = False,
) -> None:
    runs.reuse_memory()  # as the script does; it helps all three
    speed = peak(CLOCKS[clock]) / 1e9
    print(f"{torch.get_num_threads()} threads, peak of a large product {speed:.0f} GFLOP/s")
    for robot in robots:
        d_s, d_a = ROBOTS[robot].obs_dim, ROBOTS[robot].act_dim
        data = synthetic(d_s, d_a)
        for k in K:
            torch.manual_seed(0)
            args = runs.compose(taf_dt.Args, env=robot, K=k, eta_reg=0.5, return_target=0.0)
            nets = taf_dt.build(args, d_s, d_a, "cpu")
            for name in STAGES if k == K[0] else (POLICY,):
                for one in precision if name == POLICY else ("fp32",):  # only this stage has both
                    form = runs.replace(args, precision=one)
                    measure_stage(name, nets, data, form, seconds, CLOCKS[clock], compile)


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main)
