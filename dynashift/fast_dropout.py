"""Dropout that does not cost more than the layers around it on a CPU."""

import torch
import torch.nn.functional as F


def dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    """F.dropout from 16 random bits per entry; a float per entry is several times slower."""
    if p == 0:
        return x
    if x.is_cuda or torch.compiler.is_compiling():  # there it is one kernel, or part of one
        return F.dropout(x, p)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device)
    bits = words.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
    keep = bits.ge_(round(p * 2**16) - 2**15)  # 0 or 1, still integers: a product with bool is slow
    return x * keep.to(x.dtype) * (1 / (1 - p))
