"""Stored weight formats of the released checkpoint: expands them to fp32, quantises fp32 into them.

Expanding is exact: a code value times a power of two. Quantising picks, for every tile, the
smallest power-of-two scale that clips nothing, and rounds codes to nearest with ties to the even
code. The loader uses the first half, the maker of demo checkpoints the second; neither touches
files.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from flashmesh.kernels.quantize import E2M1_MAX, E4M3_MAX, e2m1_codes

Kind = Literal["F8", "F4", "F8row", "BF16", "F32"]
"""F8: e4m3 with one scale for each 32x32 tile. F4: two e2m1 codes a byte, one scale for each row
and 32 columns. F8row: e4m3, one scale for each row and 32 columns. BF16 and F32: plain."""

TILE = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([sign * value for sign in (1, -1) for value in _MAGNITUDES])
_E2M1_PAIRS = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=-1)  # even, odd
_SCALES = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan])


class Stored(NamedTuple):
    """How a file holds one tensor, in safetensors' words.

    Attributes:
        dtype: safetensors dtype name of the weight.
        shape: stored shape of the weight.
        scale_shape: shape of its F8_E8M0 scales, or None.
    """

    dtype: str
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...] | None


def stored(kind: Kind, shape: tuple[int, ...]) -> Stored:
    """Says how a tensor of this kind and logical shape is stored."""
    if kind in ("BF16", "F32"):
        return Stored(kind, shape, None)
    rows, columns = shape
    if kind == "F8":
        return Stored("F8_E4M3", shape, (_tiles(rows), _tiles(columns)))
    if kind == "F8row":
        return Stored("F8_E4M3", shape, (rows, _tiles(columns)))
    return Stored("I8", (rows, columns // 2), (rows, _tiles(columns)))


def _tiles(size: int, tile: int = TILE) -> int:
    return -(-size // tile)


def expand(kind: Kind, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Turns stored values into fp32, exactly.

    Args:
        kind: the format of `weight`.
        weight: as stored (F4: int8 or uint8 `[N, K/2]`, the even column in the low nibble).
        scale: float8_e8m0fnu, or None where the format has none.

    Returns:
        fp32 of the logical shape. NaN codes, and scale byte 255, give NaN.
    """
    if scale is None:
        return weight.float()
    factors = scale_values(scale)
    if kind == "F4":
        pairs = _E2M1_PAIRS.to(weight.device)[weight.view(torch.uint8).long()]
        values = pairs.flatten(-2)
    else:
        values = weight.float()
    if kind == "F8":
        factors = factors.repeat_interleave(TILE, dim=0)[: values.shape[0]]
    return values * factors.repeat_interleave(TILE, dim=-1)[..., : values.shape[-1]]


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Returns fp32 of E8M0 scales, float8_e8m0fnu or their bytes; NaN for byte 255."""
    return _SCALES.to(scale.device)[scale.view(torch.uint8).long()]


def quantise(kind: Kind, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stores fp32 values in a format.

    Args:
        kind: the format to produce.
        values: finite fp32; 2-D where the format has scales, for F4 with an even number of columns.

    Returns:
        The weight as stored, and its float8_e8m0fnu scales or None.
    """
    if kind == "F32":
        return values, None
    if kind == "BF16":
        return values.bfloat16(), None
    limit = E2M1_MAX if kind == "F4" else E4M3_MAX
    rows_of_tile = TILE if kind == "F8" else 1
    exponents = _scale_exponents(_tile_maxima(values, rows_of_tile), limit)
    scale = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    factors = scale_values(scale)
    factors = factors.repeat_interleave(rows_of_tile, dim=0)[: values.shape[0]]
    factors = factors.repeat_interleave(TILE, dim=1)[:, : values.shape[1]]
    scaled = (values / factors).clamp(-limit, limit)
    if kind != "F4":
        return scaled.to(torch.float8_e4m3fn), scale
    codes = e2m1_codes(scaled)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8), scale


def _tile_maxima(values: torch.Tensor, rows_of_tile: int) -> torch.Tensor:
    rows, columns = values.shape
    padding = (0, -columns % TILE, 0, -rows % rows_of_tile)
    padded = torch.nn.functional.pad(values.abs(), padding)
    return padded.view(_tiles(rows, rows_of_tile), rows_of_tile, -1, TILE).amax(dim=(1, 3))


def _scale_exponents(maxima: torch.Tensor, limit: float) -> torch.Tensor:
    """Returns ceil(log2(maxima / limit)) from the bits of both: a logarithm would misplace some."""
    limit_mantissa, limit_exponent = math.frexp(limit)
    mantissas, exponents = torch.frexp(maxima)
    exponents = exponents - limit_exponent + (mantissas > limit_mantissa).int()
    # A tile of zeros takes scale 1; byte 255 would mean NaN.
    return torch.where(maxima == 0, 0, exponents).clamp(-127, 127)
