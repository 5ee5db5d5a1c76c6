"""What an update consists of: its operations, each of which a GPU launches, and its products."""

from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import taf_dt

LAUNCH = 6e-6  # seconds that a GPU needs from the start of one small kernel to the next

PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}


class Record(TorchDispatchMode):
    """Names of the operations that compute something, and the factors of all matrix products."""

    def __init__(self):
        super().__init__()
        self.names, self.products = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if not _only_describes(func):
            self.names.append(name)
        if name in PRODUCTS:
            first = PRODUCTS[name]
            self.products.append(args[first : first + 2])
        elif "scaled_dot_product" in name and "backward" not in name:
            # Two products per head: the scores, and the mean of the values under them.
            q, k, v = (x.flatten(0, 1) for x in args[:3])
            self.products += [(q, k.mT), (q @ k.mT, v)]
        return func(*args, **(kwargs or {}))


def _only_describes(func) -> bool:
    """A view, memory that nothing has been written to, or a mark for a profiler: no kernel."""
    views = [r.alias_info for r in func._schema.returns]
    made = "empty" in func.name() or "_unsafe_view" in func.name()
    marks = func.namespace == "profiler"
    return made or marks or any(x is not None and not x.is_write for x in views)


def operations(update) -> list[str]:
    """The operations of one update, by name, with those as on a GPU that are one of them there."""
    on_gpu = {"mish": F.mish, "dropout": _dropout, "attention": _attention}
    published = mock.patch.object(F, "dropout", _dropout)
    with mock.patch.multiple(taf_dt, **on_gpu), published, Record() as record:
        update()
    return record.names


# As on a GPU. On a CPU, F.dropout is several operations, and attention with p is many.
def _dropout(x, p, training=True, inplace=False):
    return torch.native_dropout(x, p, True)[0] if p and training else x


def _attention(q, k, v, mask, p):
    return F.scaled_dot_product_attention(q, k, v, mask)


def products(update) -> tuple[list, float]:
    """Random matrices laid out as in one update, and the floating-point operations of their
    products."""
    with Record() as record:
        update()
    pairs, flop = [], 0.0
    for pair in record.products:
        a, b = (_like(x) for x in pair)
        pairs.append((a, b))
        flop += 2.0 * a.numel() * b.shape[-1]
    return pairs, flop


def _like(x: torch.Tensor) -> torch.Tensor:
    if 0 in x.stride():
        return torch.randn(x.shape, device=x.device).to(x.dtype)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).normal_()


def replay(pairs: list) -> None:
    for a, b in pairs:
        torch.matmul(a, b)
