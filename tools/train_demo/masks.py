"""Who sees whom in packed rows: windows, compressed rows, selections, all as masks.

Documents begin where `start` says; nobody sees across their borders. The letters are those of `network`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from flashmesh.kernels.reference.select import order_keys

if TYPE_CHECKING:
    from torch import Tensor

_LOWEST = torch.iinfo(torch.int64).min


class Masks(NamedTuple):
    """Who sees whom: window `[B, N, W, 2 W]` in N chunks of W queries, compressed rows by ratio `[B, T, J]`."""

    window: Tensor
    visible: dict[int, Tensor]


def make_masks(start: Tensor, window: int) -> Masks:
    """Makes the masks of rows whose documents start at int64 `[B, T]`, T a multiple of `window`."""
    num_tokens = start.shape[1]
    place = torch.arange(num_tokens, device=start.device)
    # Key k of a chunk stands at the chunk's beginning - W + k.
    query = torch.arange(window, device=start.device).unsqueeze(1)
    key = torch.arange(2 * window, device=start.device) - window
    near = (key <= query) & (key > query - window)
    starts = functional.pad(start, (window, 0), value=-1).unflatten(1, (-1, window))
    keys = torch.cat((starts[:, :-1], starts[:, 1:]), 2)
    same = starts[:, 1:].unsqueeze(3) == keys.unsqueeze(2)
    visible = {}
    for ratio in (1, 2):
        first = torch.arange(0, num_tokens, ratio, device=start.device)
        known = first + ratio - 1 <= place.unsqueeze(1)
        visible[ratio] = known & (start[:, ::ratio].unsqueeze(1) == start.unsqueeze(2))
    return Masks(same & near, visible)


def top(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Marks the best allowed columns, ties as the runtime breaks them."""
    keys = order_keys(scores).masked_fill(~allowed, _LOWEST)
    least = keys.topk(min(count, keys.shape[-1]), -1, sorted=False).values.amin(-1, keepdim=True)
    return allowed & (keys >= least)


def candidates(scores: Tensor, visible: Tensor, block: int, count: int) -> Tensor:
    """Marks the columns of the best blocks; the block of the last visible column always stays."""
    seen = visible.unflatten(-1, (-1, block)).any(-1)
    place = torch.arange(seen.shape[-1], device=seen.device)
    last = torch.where(seen, place, -1).amax(-1, keepdim=True)
    peaks = scores.masked_fill(~visible, -torch.inf).unflatten(-1, (-1, block)).amax(-1)
    kept = top(torch.where(place == last, torch.inf, peaks), seen, count)
    return visible & kept.repeat_interleave(block, -1)
