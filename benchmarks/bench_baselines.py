"""Updates per second of the baselines at their official sizes.

    python benchmarks/bench_baselines.py [--rounds 5]

    plain     two critics as two modules, and torch's default Adam for each network
    default   the script as it is: critics in one batched product, fused Adam
    compiled  the same with torch.compile around the losses, which needs a C++ compiler; skip it
              with --no-compile

The data are random, in hopper's shapes. The three take turns, round after round, and the median of
the rounds' ratios counts, so that a busy moment of the machine affects all of them. To add a
script, write a function like `value_based`, which returns functions without arguments that do one
update each, and enter it in BENCHES.
"""

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from dynashift import quick_help  # noqa: F401  first: with --help, nothing slow is loaded

# isort: split
import numpy as np
import torch
import tyro
from torch import Tensor, nn

from dynashift import runs
from dynashift.errors import one_line_errors

N_S, N_T, D_S, D_A = 100_000, 5_000, 11, 3
LOSSES = {"iql": "iql_losses", "dara": "iql_losses", "igdf": "iql_losses", "otdf": "otdf_losses"}


@dataclass(frozen=True)
class Args:
    only: tuple[str, ...] = ()
    """names of the scripts; all, if none is given"""
    rounds: int = 7
    """rounds of measurement"""
    seconds: float = 1.0
    """length of a measurement"""
    compile: bool = True
    """measure torch.compile too"""


class TwoModules(nn.Module):
    """The critics as in the published code: one network after the other."""

    def __init__(self, heads: nn.Module, activation=nn.ReLU):
        super().__init__()
        self.nets = nn.ModuleList()
        for k in range(len(heads.W[0])):
            layers = [nn.Linear(*W.shape[1:]) for W in heads.W]
            for layer, W, b in zip(layers, heads.W, heads.b, strict=True):
                layer.weight.data, layer.bias.data = W.data[k].T.contiguous(), b.data[k, 0].clone()
            modules = [x for layer in layers for x in (layer, activation())][:-1]
            self.nets.append(nn.Sequential(*modules))

    def forward(self, *inputs: Tensor) -> Tensor:
        x = torch.cat(inputs, -1)
        return torch.stack([net(x)[..., 0] for net in self.nets])


class Optimizers:
    """One Adam for each network, behind the interface of one."""

    def __init__(self, parts: list, lr: float):
        self.parts = [torch.optim.Adam(list(part.parameters()), lr=lr) for part in parts]
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self):
        for part in self.parts:
            part.step()


def plain_nets(nets: dict, lr: float) -> dict:
    plain = {name: TwoModules(net) if hasattr(net, "W") else net for name, net in nets.items()}
    plain["Q_bar"].requires_grad_(False)
    # The policy comes second, as in the scripts.
    plain["adam"] = Optimizers([plain["V"], plain["policy"], plain["Q"]], lr)
    pairs = {"adam_classifiers": ("sas", "sa"), "adam_encoders": ("phi", "psi")}
    pairs["adam_cvae"] = ("cvae",)
    for name, parts in pairs.items():
        if name in nets:
            plain[name] = Optimizers([plain[part] for part in parts], lr)
    return plain


def value_based(name: str, compiled: bool) -> dict:
    script = importlib.import_module(f"baselines.{name}")
    args = runs.plain(script.Args, script.defaults, script.Args())
    shapes = {"states": (D_S,), "actions": (D_A,), "next_states": (D_S,)}
    columns = {key: torch.randn(N_S + N_T, *shapes.get(key, ())) for key in script.Batch._fields}
    columns["actions"].tanh_()
    columns["terminal"] = columns["terminal"] > 3
    data = script.Data(**columns, N_s=N_S)
    losses = getattr(script, LOSSES[name])

    def form(change, losses):
        torch.manual_seed(0)
        nets = change(script.build(args, D_S, D_A, "cpu"))

        def update():
            setattr(script, LOSSES[name], losses)  # the forms take turns
            return script.update(nets, data, args, 1)

        return update

    plain = form(lambda nets: plain_nets(nets, args.lr), losses)
    forms = {"plain": plain, "default": form(dict, losses)}
    return forms | ({"compiled": form(dict, torch.compile(losses))} if compiled else {})


def cloning(name: str, compiled: bool) -> dict:
    script = importlib.import_module(f"baselines.{name}")
    args = script.Args()
    data = {"target": script.Data(torch.randn(N_T, D_S), torch.randn(N_T, D_A).tanh())}

    def form(change):
        nets = script.build(args, D_S, D_A, "cpu")
        change(nets)
        return lambda: script.update(nets, data, args, 1)

    def unfused(nets):
        nets["adam"] = torch.optim.Adam(nets["policy"].parameters(), lr=args.lr)

    forms = {"plain": form(unfused), "default": form(lambda nets: None)}
    return forms | ({"compiled": form(lambda nets: nets["policy"].compile())} if compiled else {})


def sequence(name: str, compiled: bool) -> dict:
    script = importlib.import_module(f"baselines.{name}")
    args = runs.plain(script.Args, script.defaults, script.Args())
    rows = torch.arange(N_S + N_T)
    columns = {"steps": rows % 1000, "left": 1000 - rows % 1000, "terminal": rows % 1000 == 999}
    columns |= {"starts_s": rows[:N_S], "starts_t": rows[N_S:]}
    columns["actions"] = torch.randn(len(rows), D_A).tanh()
    columns |= {key: torch.randn(len(rows), D_S) for key in ("states", "next_states")}
    columns |= {key: torch.randn(len(rows)) for key in ("rewards", "tokens")}
    data = script.Data(**{key: columns[key] for key in script.Data._fields})

    def form(change):
        torch.manual_seed(0)
        nets = script.build(args, D_S, D_A, "cpu")
        change(nets)
        return lambda: script.update(nets, data, args, 1)

    def plain(nets):
        if "critics" in nets:
            nets |= {key: TwoModules(nets[key], nn.Mish) for key in ("critics", "critics_bar")}
            nets["adam_critics"] = torch.optim.Adam(nets["critics"].parameters(), lr=args.lr)
        for adam in (net for key, net in nets.items() if key.startswith("adam")):
            adam.param_groups[0]["fused"] = False

    forms = {"plain": form(plain), "default": form(lambda nets: None)}
    return forms | ({"compiled": form(lambda nets: nets["policy"].compile())} if compiled else {})


BENCHES = dict.fromkeys(("iql", "dara", "igdf", "otdf"), value_based) | {"bc": cloning}
BENCHES |= dict.fromkeys(("dt", "dadt", "qt"), sequence)


def rate(update, seconds: float) -> float:
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or count < 3:
        update()
        count += 1
    return count / passed


def main() -> None:
    args = tyro.cli(Args)
    kinds = ("plain", "default", "compiled")[: 2 + args.compile]
    head = " ".join(f"{kind:>9}" for kind in kinds)
    print(f"updates/s, {torch.get_num_threads()} threads;  {'':4} {head}    over plain")
    for name in args.only or BENCHES:
        forms = BENCHES[name](name, args.compile)
        for update in forms.values():
            for _ in range(3):  # and time to compile
                update()
        rounds = []
        for _ in range(args.rounds):
            rounds.append([rate(update, args.seconds) for update in forms.values()])
        rounds = np.array(rounds)
        ratio = np.median(rounds / rounds[:, :1], 0)[1:]
        numbers = " ".join(f"{x:9.1f}" for x in np.median(rounds, 0))
        print(f"{name:29} {numbers}    {'  '.join(f'{x:.2f}x' for x in ratio)}", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main()
