"""Rounding that a gradient passes: forward the runtime's own quantisers, backward the identity.

A straight-through estimator. The formats are those of `flashmesh.kernels`, so what trains here is what a checkpoint
stores and what a server computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmesh.kernels.formats import expand, quantise
from flashmesh.kernels.quantize import fp8_32, mxfp4_32, nvfp4_16

if TYPE_CHECKING:
    from torch import Tensor

    from flashmesh.kernels.formats import Kind


def window_row(x: Tensor) -> Tensor:
    """Rounds as a window row is cached: FP8-32 over the last axis."""
    return _straight(x, fp8_32(x.detach()))


def compressed_row(x: Tensor) -> Tensor:
    """Rounds as a compressed row is cached: NVFP4-16 over the last axis."""
    return _straight(x, nvfp4_16(x.detach())[2])


def index_vector(x: Tensor) -> Tensor:
    """Rounds as index keys and queries are: MXFP4-32 over the last axis."""
    return _straight(x, mxfp4_32(x.detach())[2])


def stored_weight(kind: Kind, weight: Tensor) -> Tensor:
    """Rounds as a checkpoint stores a weight of this kind; a stack `[experts, N, K]` matrix by matrix."""
    values = weight.detach()
    flat = values.flatten(0, -2) if values.dim() == 3 else values
    return _straight(weight, expand(kind, *quantise(kind, flat)).view_as(values))


def _straight(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded - x.detach())
