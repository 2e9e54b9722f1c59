"""Sparse attention over a window and selected compressed rows, and the index scores that select them.

Keys stand in one fixed layout whatever is visible: window rows by position in a block of W, then selected rows
ascending in a block of K. Absent ones are zeros with weight zero, so a row sums the same numbers in the same order in
every batch, chunking and replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmesh.kernels.shapes import TILE, pad_up

_MAX_SCORES = 1 << 22
"""Index scores computed at once; bounds memory, and does not change bits (see `shapes.TILE`)."""


def attend(q: Tensor, keys: Tensor, present: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attends with a sink in the denominator; a key is its own value.

    Args:
        q: fp32 `[R, H, E]`.
        keys: fp32 `[R, N, E]`; rows that are absent hold zeros.
        present: bool `[R, N]`; at least one in every row.
        sink: fp32 `[H]`, a logit without a value.
        scale: of the logits.

    Returns:
        fp32 `[R, H, E]`.
    """
    logits = torch.bmm(q, keys.transpose(1, 2)).mul_(scale)
    logits.masked_fill_(~present.unsqueeze(1), -torch.inf)
    sink = sink.view(1, -1, 1)
    peak = torch.maximum(logits.amax(-1, keepdim=True), sink)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True) + torch.exp(sink - peak)
    return torch.bmm(weights.div_(total), keys)


def index_scores(iq: Tensor, ik: Tensor, iw: Tensor) -> Tensor:
    """Scores every key for every query: the sum over index heads of relu(q . k) * w.

    Args:
        iq: fp32 `[n, I, F]`.
        ik: fp32 `[J, F]`, J a multiple of 64.
        iw: fp32 `[n, I]`.

    Returns:
        fp32 `[n, J]`.
    """
    num_rows, num_heads, width = iq.shape
    padded = pad_up(num_rows) - num_rows
    iq = torch.nn.functional.pad(iq, (0, 0, 0, 0, 0, padded))
    iw = torch.nn.functional.pad(iw, (0, 0, 0, padded))
    step = max(TILE, _MAX_SCORES // (num_heads * ik.shape[0]) // TILE * TILE)
    parts = []
    for begin in range(0, iq.shape[0], step):
        queries, heads = iq[begin : begin + step], iw[begin : begin + step]
        dots = torch.mm(queries.reshape(-1, width), ik.t()).view(len(queries), num_heads, -1)
        dots.relu_()
        scores = dots[:, 0] * heads[:, 0:1]
        for head in range(
            1, num_heads
        ):  # one after the other: the order of this sum is part of the result
            scores.addcmul_(dots[:, head], heads[:, head : head + 1])
        parts.append(scores)
    return torch.cat(parts)[:num_rows]
