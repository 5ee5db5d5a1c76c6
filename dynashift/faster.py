"""How fast a stage runs, chosen by short measurements: precision, threads and compilation.

What is chosen is kept in the run's record: a resumed run goes on with it, bit for bit.
"""

import copy
import functools
import inspect
import os
import time

import torch

from dynashift.arguments import replace
from dynashift.files import say
from dynashift.progress import clock

GAIN = 1.15  # times as fast, at least, for bfloat16 to be chosen: it costs digits
PATIENCE = 5  # seconds of measurement without a line that says so
NARROW = 128  # below it nothing is tried (width 64 loses), so that equal runs stay equal


def pick_precision(update, nets: dict, data, args, rounds: int = 3) -> str:
    """fp32 or bf16. auto: bf16 where the hardware has it and this update gains by it.

    In narrow networks, casting the numbers takes longer than the faster products save.
    """
    name, device = args.tools.precision, torch.device(args.run.device)
    if name != "auto":
        return name
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        able = any("bf16" in key and has for key, has in torch.cpu.get_capabilities().items())
    if not able or args.width < NARROW:
        return "fp32"
    trials = {
        name: functools.partial(update, data=data, args=replace(args, precision=name))
        for name in ("fp32", "bf16")
    }
    took = on_copies(trials, nets, rounds, device)
    return "bf16" if took["fp32"] >= GAIN * took["bf16"] else "fp32"


def on_copies(trials: dict, nets: dict, rounds: int, device: torch.device) -> dict:
    """The least time of each trial(nets). Neither networks nor random numbers change."""
    copies = copy.deepcopy(nets)
    functions = {key: functools.partial(trial, copies) for key, trial in trials.items()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return in_turn(functions, rounds, device)


def low_precision(name: str, device: torch.device):
    """The context in which products are in bfloat16 if that is the precision's name."""
    # Without a cache of cast weights: each is used once, and a captured graph must cast its own.
    enabled = name == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def in_turn(functions: dict, rounds: int, device: torch.device) -> dict:
    """The least time of each function, in seconds, after one call that does not count."""

    def seconds(function) -> float:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    expected = rounds * sum(map(seconds, functions.values()))
    if expected > PATIENCE:  # a first call is slow, above all if it compiles
        say(f"measuring how updates are fastest here: up to {clock(expected)}")
    took = [{key: seconds(f) for key, f in functions.items()} for _ in range(rounds)]
    return {key: min(times[key] for times in took) for key in functions}


def pick_threads(update, nets: dict, data, args, rounds: int = 4) -> int:
    """One thread or all, whichever is faster for this update, which is tried on copies."""
    most = torch.get_num_threads()
    if most == 1 or "OMP_NUM_THREADS" in os.environ:  # there is no choice, or it has been made
        return most

    def trial(nets, threads: int) -> None:
        torch.set_num_threads(threads)
        for _ in range(3):
            update(nets, data, args)

    trials = {threads: functools.partial(trial, threads=threads) for threads in (most, 1)}
    took = on_copies(trials, nets, rounds, torch.device("cpu"))
    torch.set_num_threads(most)
    return min(took, key=took.get)


def settle_precision(run, update, nets: dict, data, args):
    """The arguments with a precision in place of auto, which a resumed run keeps."""
    if "precision" not in run.record:
        torch.set_num_threads(run.threads)  # the stage before may have needed one alone
        update = as_run("policy", update, nets, data, args)
        run.record["precision"] = pick_precision(update, nets, data, args)
    return replace(args, precision=run.record["precision"])


def prepare(run, stage: str, update, nets: dict, data, args):
    """The stage's update(nets, data, args) -> logs: its threads are set, --compile compiles it."""
    threads = run.record.setdefault("threads", {})
    if torch.device(args.run.device).type == "cpu":
        torch.set_num_threads(run.threads)
        if stage not in threads:  # tried without --compile, whose products are the same
            threads[stage] = pick_threads(update, nets, data, args)
        torch.set_num_threads(threads[stage])
    return as_run(stage, update, nets, data, args)


def as_run(stage: str, update, nets: dict, data, args):
    """The update, or with --compile what is made of it at its first call."""
    device = torch.device(args.run.device)
    # On a CPU, compilation takes minutes in the policy's stage, and the update then takes longer.
    if args.tools.compile and (device.type == "cuda" or stage != "policy"):
        return compiled(update, nets, data, device)
    return update


def compiled(update, nets: dict, data, device: torch.device, **options):
    """The whole update as one function without a break: losses, gradients, optimisers, averages.

    On CUDA it is recorded as a graph, which the host starts with one call.
    """
    import torch._inductor.config  # here, because it takes seconds to import

    torch._dynamo.config.trace_autograd_ops = True  # gradients are taken inside
    torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()
    for part in nets.values():
        if isinstance(part, Adam):
            part.make_static()
    for column in data:
        torch._dynamo.mark_static_address(column)  # or every replay would copy the whole dataset

    def whole(nets, data, args):
        logs = update(nets, data, args)
        return tuple(logs), torch.stack([x.detach().float() for x in logs.values()])

    if device.type == "cuda":
        options = {"mode": "reduce-overhead", **options}
    function = torch.compile(whole, fullgraph=True, dynamic=False, **options)

    def call(nets, data, args) -> dict:
        names, values = function(nets, data, args)
        # The next replay of a graph overwrites its results.
        return dict(zip(names, values.clone().unbind(), strict=True))

    return call


class Adam(torch.optim.Adam):
    """torch's Adam, whose step can be part of a compiled update."""

    # As torch wraps these methods, they first import its compiler, which takes seconds.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    _plain_step = inspect.unwrap(torch.optim.Adam.step)

    rate = None  # the last one that was set

    def make_static(self) -> None:
        """What a step reads exists before the first one, so that all steps share one graph.

        It also keeps its place in memory: no graph is replayed whose changed inputs may move.
        """
        for group in self.param_groups:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
                if not self.state[p]:
                    zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[p] = {"step": torch.zeros((), device=device), **zeros}
                for x in (group["lr"], *self.state[p].values()):
                    torch._dynamo.mark_static_address(x)

    def set_rate(self, rate: float) -> None:
        for group in self.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = rate
            elif rate != self.rate:  # that number, because reading the tensor waits for the GPU
                group["lr"].fill_(rate)
        self.rate = rate

    @torch.no_grad()
    def step(self, closure=None):
        if not torch.compiler.is_compiling():
            return self._plain_step(closure)
        for group in self.param_groups:  # the fused kernel cannot be traced with a tensor as rate
            self._traceable_step(group)

    @torch.no_grad()
    def _traceable_step(self, group: dict) -> None:
        assert not group["decoupled_weight_decay"], "no decoupled weight decay in a compiled step"
        parameters, (beta1, beta2) = group["params"], group["betas"]
        states = [self.state[p] for p in parameters]
        steps, m, v = ([s[name] for s in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        gradients = [p.grad for p in parameters]
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        size = torch._foreach_sqrt(v)
        torch._foreach_div_(size, (1 - beta2 ** steps[0]).sqrt())
        torch._foreach_add_(size, group["eps"])
        change = torch._foreach_div(m, size)
        torch._foreach_mul_(change, group["lr"] / (1 - beta1 ** steps[0]))
        torch._foreach_sub_(parameters, change)
