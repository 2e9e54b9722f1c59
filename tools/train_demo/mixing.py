"""Rotary turns, and how four residual streams mix, as functions that a gradient passes and a compiler fuses.

The definitions of right are `flashmesh.kernels.reference.mhc` and `.basics`, which work in place on rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Turns(NamedTuple):
    """Cosines and sines `[B, T, P/2]` of positions."""

    cos: Tensor
    sin: Tensor


def sinkhorn(z: Tensor, iters: int, eps: float) -> Tensor:
    """Turns logits `[..., 4, 4]` into nearly doubly stochastic matrices, ending on columns."""
    m = z.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def spread(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Returns the streams `[..., 4, D]` after a sub-layer with output y `[..., D]`."""
    # A product and a sum fuse into one pass; batches of 4x4 matrices would not.
    mixed = (comb.unsqueeze(-1) * streams.unsqueeze(-2)).sum(-3)
    return mixed + post.unsqueeze(-1) * y.unsqueeze(-2)


def rotate(x: Tensor, turns: Turns) -> Tensor:
    """Rotates the last P values as adjacent pairs; x `[B, T, n]` or `[B, T, heads, n]`."""
    cos, sin = turns
    if x.dim() > cos.dim():
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    still, pairs = x[..., : -2 * cos.shape[-1]], x[..., -2 * cos.shape[-1] :]
    even, odd = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return torch.cat((still, turned.flatten(-2)), -1)
