"""Windows of K steps, as rows of a table of transitions in the order of time."""

import torch
from torch import Tensor


def uniform(rows: Tensor, size: int) -> Tensor:
    """Some of these rows, drawn uniformly, [size]."""
    return rows[torch.randint(len(rows), (size,), device=rows.device)]


def window_rows(left: Tensor, starts: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Rows [B, K] of the windows that begin at these rows [B], and which of them are valid [B, K].

    left [N]: steps from every row to its episode's end, itself included. A window that meets this
    end is padded on the left, so that its last step is always the last one here.
    """
    length = left[starts].clamp(max=K)  # [B]
    position = torch.arange(K, device=starts.device) - (K - length)[:, None]  # [B, K]
    return starts[:, None] + position.clamp(min=0), position >= 0


def gather(data, names, rows: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """These columns of the data at these rows [B, K], zero where `valid` [B, K] is false."""
    columns = {"valid": valid}
    for name in set(names) - {"valid"}:
        x = getattr(data, name)[rows]  # [B, K] or [B, K, d]
        columns[name] = x * valid.view(*valid.shape, *[1] * (x.ndim - 2))
    return columns
