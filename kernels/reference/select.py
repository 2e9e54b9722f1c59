"""Selection under a total order: value descending, then index ascending, and -0 equals +0.

`torch.topk` picks any of several equal values, and another one when a row is padded. ReLU scores tie at zero all the
time, so every selection here goes through keys that are all different.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOWEST = torch.iinfo(torch.int64).min


def order_keys(values: Tensor) -> Tensor:
    """Returns int64 keys `[..., n]` whose descending order is the total order of fp32 `values`."""
    bits = (values + 0.0).view(torch.int32)  # adding 0 makes -0 +0
    rising = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    index = torch.arange(values.shape[-1], dtype=torch.int64, device=values.device)
    return (rising << 32) - index


def top_sorted(values: Tensor, count: int) -> Tensor:
    """Returns the indices int64 `[..., count]` of the largest values, largest first."""
    return order_keys(values).topk(count, -1).indices


def top_rows(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Selects the best allowed columns of every row.

    Args:
        scores: fp32 `[R, J]`.
        allowed: bool `[R, J]`.
        count: how many at most.

    Returns:
        int64 `[R, count]`: indices ascending, then -1 where fewer are allowed.
    """
    width = scores.shape[1]
    keys = order_keys(scores).masked_fill(~allowed, _LOWEST)
    best, index = keys.topk(min(count, width), -1, sorted=False)
    index = index.masked_fill(best == _LOWEST, width).sort(-1).values
    index = torch.where(index == width, -1, index)
    return torch.nn.functional.pad(index, (0, count - index.shape[1]), value=-1)


def candidate_mask(scores: Tensor, visible: Tensor, *, block: int, count: int) -> Tensor:
    """Marks the columns that reindexing layers may select from.

    Those of `candidate_blocks`, or all visible ones where there are no more blocks than `count`.

    Args:
        scores, visible, block, count: as there.

    Returns:
        bool `[R, J]`.
    """
    num_blocks = scores.shape[1] // block
    if num_blocks <= count:
        return visible
    chosen = candidate_blocks(scores, visible, block=block, count=count)
    kept = torch.zeros(scores.shape[0], num_blocks + 1, dtype=torch.bool, device=scores.device)
    kept.scatter_(1, torch.where(chosen < 0, num_blocks, chosen), True)
    return visible & kept[:, :num_blocks].repeat_interleave(block, 1)


def candidate_blocks(scores: Tensor, visible: Tensor, *, block: int, count: int) -> Tensor:
    """Selects the best blocks of columns: one counts as its best visible score, that of the last visible column stays.

    Args:
        scores: fp32 `[R, J]`, J a multiple of `block`.
        visible: bool `[R, J]`; in every row a prefix.
        block: columns of a block.
        count: how many blocks at most.

    Returns:
        int64 `[R, count]`: ids of blocks that have visible columns, ascending, then -1.
    """
    peaks = scores.masked_fill(~visible, -torch.inf).unflatten(1, (-1, block)).amax(-1)
    any_visible = visible.unflatten(1, (-1, block)).any(-1)
    last = (any_visible.sum(1, keepdim=True) - 1).clamp_(min=0)
    return top_rows(peaks.scatter(1, last, torch.inf), any_visible, count)
