"""One step of an optimiser, and slow copies of networks."""

import torch
from torch import Tensor, nn


def gradient_step(optimizer, loss: Tensor, clip: float | None = None) -> Tensor | None:
    """Minimise the loss in this optimiser's parameters alone; returns the norm that it clips."""
    parameters = optimizer.param_groups[0]["params"]
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(parameters, clip) if clip else None
    optimizer.step()
    return norm


@torch.no_grad()
def polyak_update(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """slow <- (1 - rate) slow + rate fast"""
    torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), rate)
