"""Engram: looked-up table rows, and their gated injection into the residual streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.engram import add_gated
from flashmesh.kernels.formats import expand

if TYPE_CHECKING:
    from torch import Tensor


def engram_rows(codes: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Looks up table rows and expands them; values are exact in bf16 unless a scale is below 2^-115.

    Args:
        codes: float8_e4m3fn `[R, width]`, width a multiple of 32.
        scales: uint8 `[R, width/32]`, E8M0: byte b is 2^(b - 127).
        rows: int64 `[T, columns]`, each in [0, R).

    Returns:
        bf16 `[T, columns * width]`.
    """
    flat = rows.flatten()
    picked = codes.view(torch.uint8)[flat].view(torch.float8_e4m3fn)
    values = expand("F8row", picked, scales[flat])
    return values.bfloat16().view(len(rows), rows.shape[1] * codes.shape[1])


def engram_gate(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, text: Tensor
) -> Tensor:
    """Adds the looked-up value to every stream, through a gate of the stream's agreement with its key.

    With X a stream and K its key, `d = sum(X * q * k * K) * rsqrt(mean(X^2)) * rsqrt(mean(K^2)) / sqrt(D)` and the
    gate is `sigmoid(sign(d) * sqrt(max(|d|, 1e-6)))`, in fp32.

    Args:
        streams: bf16 `[T, S, D]`.
        kv: bf16 `[T, (S + 1) * D]`: S keys, then the value.
        q_weight, k_weight: bf16 `[S, D]`.
        text: bool `[T]`; False (an image span) closes the gate.

    Returns:
        bf16 `[T, S, D]`.
    """
    gated = add_gated(streams.float(), kv.float(), q_weight.float(), k_weight.float(), text)
    return gated.bfloat16()
