"""FP8-32 rounding of activations, as the released model does before a product with F8 or F4 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmesh.kernels.quantize import fp8_32

if TYPE_CHECKING:
    from torch import Tensor


def round_rows(x: Tensor) -> Tensor:
    """Rounds rows to FP8-32: e4m3 values under one power-of-two scale for 32 columns.

    Values and not codes are returned, since a value of four significant bits times a power of two is exact in bf16.

    Args:
        x: bf16 `[R, n]`, n a multiple of 32.

    Returns:
        bf16 `[R, n]`.
    """
    return fp8_32(x.float()).bfloat16()
