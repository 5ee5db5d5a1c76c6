"""The networks of values, two in one, and a step of an optimizer."""

import itertools
import math

import torch
from torch import Tensor, nn

from dynashift.fast_mish import mish


class TwinMLP(nn.Module):
    """Two networks (d_in) -> hidden x 3 -> 1 of one shape, computed in one product per layer.

    V, Q and the twin critics have two heads, the command network has one.
    """

    # DIFF 37: Mish, as in the released code; the paper says ReLU for the auxiliary networks.

    def __init__(self, d_in: int, hidden: int, heads: int = 2):
        super().__init__()
        shapes = list(itertools.pairwise([d_in, hidden, hidden, hidden, 1]))
        self.W = nn.ParameterList(torch.empty(heads, m, n) for m, n in shapes)
        self.b = nn.ParameterList(torch.empty(heads, 1, n) for _, n in shapes)
        for i, (m, _) in enumerate(shapes):
            for parameter in (self.W[i], self.b[i]):
                nn.init.uniform_(parameter, -1 / math.sqrt(m), 1 / math.sqrt(m))  # as nn.Linear

    def forward(self, *inputs: Tensor) -> Tensor:
        x = torch.cat(inputs, -1)  # [..., d_in]
        h = x.reshape(1, -1, x.shape[-1]).expand(len(self.W[0]), -1, -1)  # [heads, B, d_in]
        for i, (W, b) in enumerate(zip(self.W, self.b, strict=True)):
            if i > 0:
                h = mish(h)
            h = torch.baddbmm(b, h, W)
        return h.reshape(len(h), *x.shape[:-1])  # [heads, ...]


def gradient_step(optimizer, loss: Tensor, clip: float | None = None) -> Tensor | None:
    """Minimise the loss in this optimiser's parameters alone; returns the norm that it clips."""
    parameters = optimizer.param_groups[0]["params"]
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(parameters, clip) if clip else None
    optimizer.step()
    return norm
