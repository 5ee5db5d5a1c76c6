"""Attention that does not cost more than the layers around it on a CPU."""

import torch
import torch.nn.functional as F

from dynashift.fast_dropout import dropout


def attention(q, k, v, mask, p: float) -> torch.Tensor:
    """F.scaled_dot_product_attention: q, k, v [B, heads, T, W / heads], mask [B, 1, T, T].

    The mask is added to the scores. On a CPU, torch's fused form is made for long sequences: with
    14 positions in 16 bits its gradient takes ten times as long as these lines.
    """
    if q.is_cuda or q.is_meta or torch.compiler.is_compiling():  # one kernel, or part of one
        return F.scaled_dot_product_attention(q, k, v, mask, p)
    q = q * q.shape[-1] ** -0.5
    if k.shape[-2] < 16:  # a softmax over rows so short does not fill a vector of 16 numbers
        scores = k @ q.transpose(-1, -2) + mask.transpose(-1, -2)  # [B, heads, T_k, T_q]
        weights = scores.softmax(-2).to(v.dtype).transpose(-1, -2)
    else:
        weights = (q @ k.transpose(-1, -2) + mask).softmax(-1).to(v.dtype)  # [B, heads, T_q, T_k]
    return dropout(weights, p) @ v
