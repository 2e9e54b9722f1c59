"""How expert weights lie in device memory, and how tokens are dealt to experts.

A tile of 64 rows and 64 columns of packed FP4 is 2048 contiguous bytes, in the order in which one warpgroup feeds it
to the tensor cores: thread t's 16 bytes begin at byte 16t, and word j of them holds its eight codes of columns 16j to
16j+15. Warp w's lane l multiplies rows 16w + l/4 and 8 rows below, columns 2(l%4), the next, and the same 8 further:
registers 0..3 of an m64k16 fragment (PTX ISA, "wgmma.mma_async"), two codes each. Bits in a word are placed so that few
instructions widen them (`_PLACES`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashmesh.kernels.formats import scale_values

ROWS = 64
COLUMNS = 64
TILE_BYTES = ROWS * COLUMNS // 2
SCALE_BYTES = ROWS * COLUMNS // 32

_PLACES = ((6, 15), (3, 12), (0, 14), (9, 13))
"""Lowest magnitude bit and sign bit of each register's code, in the low half (even column) and in the high half.

A shift by 0, 3, 6 (left) or 3 (right) puts the magnitude where bf16 has its lowest exponents; the signs of the first
two registers come along."""

_SCALE_OFFSET = 126
"""Scales are stored as the exponent field of 2^126 times their value: codes widen to bf16 times 2^-126."""


class ExpertWeights(NamedTuple):
    """The packed weights of one layer's experts.

    Attributes:
        w13: uint8 `[M, 2n/64, D/64, 2048]`, tiles of w1 and w3 with 8 rows of each in turn: one thread gets the gate
            and the linear part of the same column.
        s13: uint8 `[M, 2n/64, D/64, 128]`, exponents: rows of a thread side by side, each with its two blocks.
        w2: uint8 `[M, D/64, n/64, 2048]`.
        s2: uint8 `[M, D/64, n/64, 128]`.
        num_experts: M.
        n: width of an expert.
        d: hidden size.
    """

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor
    num_experts: int
    n: int
    d: int


class ExpertTiles(NamedTuple):
    """Slots sorted by expert, each expert's padded to whole tiles of `token_tile` slots.

    Attributes:
        rows: int32 `[P]`, number of the slot at each sorted place (token times `top_k` plus choice), -1 for padding.
        weights: fp32 `[P]`, routing weight of that slot.
        expert: int32 `[P / token_tile]`, expert of each tile, -1 for an unused tile.
        top_k: slots of a token.
    """

    rows: Tensor
    weights: Tensor
    expert: Tensor
    top_k: int


def prepare_experts(
    w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor, w2: Tensor, s2: Tensor
) -> ExpertWeights:
    """Lays out stored weights for the kernels; one expert at a time, on the device that holds them.

    Args:
        w1, w3: int8 or uint8 `[M, n, D/2]`, two e2m1 codes a byte, the even column in the low nibble.
        s1, s3: E8M0 bytes (uint8 or float8_e8m0fnu) `[M, n, D/32]`.
        w2: `[M, D, n/2]`.
        s2: `[M, D, n/32]`.

    Raises:
        ValueError: shapes do not fit each other, n or D is no multiple of 64, or a scale exceeds 2.
    """
    num_experts, n, half = w1.shape
    d = 2 * half
    if n % 64 or d % 64:
        raise ValueError(f"experts of width {n} on {d}: both must be multiples of 64")
    shapes = {
        "w1": (w1, (num_experts, n, d // 2)),
        "s1": (s1, (num_experts, n, d // 32)),
        "w3": (w3, (num_experts, n, d // 2)),
        "s3": (s3, (num_experts, n, d // 32)),
        "w2": (w2, (num_experts, d, n // 2)),
        "s2": (s2, (num_experts, d, n // 32)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    empty = w1.new_empty((), dtype=torch.uint8)
    weights = ExpertWeights(
        empty.new_empty(num_experts, n // 32, d // 64, TILE_BYTES),
        empty.new_empty(num_experts, n // 32, d // 64, SCALE_BYTES),
        empty.new_empty(num_experts, d // 64, n // 64, TILE_BYTES),
        empty.new_empty(num_experts, d // 64, n // 64, SCALE_BYTES),
        num_experts,
        n,
        d,
    )
    w1, s1, w3, s3, w2, s2 = (t.view(torch.uint8) for t in (w1, s1, w3, s3, w2, s2))
    if num_experts and max(int(s.max()) for s in (s1, s3, s2)) > 254 - _SCALE_OFFSET:
        raise ValueError("a scale of the experts exceeds 2: their codes would not widen exactly")
    for expert in range(num_experts):
        weights.w13[expert] = _tile_codes(_interleave(w1[expert], w3[expert]))
        weights.s13[expert] = _tile_scales(_interleave(s1[expert], s3[expert]))
        weights.w2[expert] = _tile_codes(w2[expert])
        weights.s2[expert] = _tile_scales(s2[expert])
    return weights


def unpack_experts(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Returns w1 `[M, n, D]`, w3 `[M, n, D]` and w2 `[M, D, n]`, fp32 and exact."""
    w13 = _untile(weights.w13, weights.s13).unflatten(1, (-1, 2, 8))
    w2 = _untile(weights.w2, weights.s2)
    return w13[:, :, 0].flatten(1, 2), w13[:, :, 1].flatten(1, 2), w2


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    """Takes 8 rows of each in turn."""
    return torch.stack((first.unflatten(0, (-1, 8)), second.unflatten(0, (-1, 8))), 1).flatten(0, 2)


def _tile_codes(packed: Tensor) -> Tensor:
    """Packed codes `[R, K/2]` to tiles `[R/64, K/64, 2048]`."""
    # Row = (tile, warp, half, lane / 4), byte = (tile, word j, half, lane % 4).
    codes = packed.view(-1, 4, 2, 8, packed.shape[1] // 32, 4, 2, 4)
    codes = codes.permute(0, 4, 1, 3, 7, 5, 6, 2).to(torch.int32)
    codes = (codes & 15) | ((codes >> 4) << 16)
    words = torch.zeros_like(codes[..., 0, 0])
    for register, (magnitude, sign) in enumerate(_PLACES):
        code = codes[..., register // 2, register % 2]
        words |= ((code & 0x70007) << magnitude) | ((code & 0x80008) << (sign - 3))
    return words.contiguous().view(torch.uint8).flatten(2)


def _tile_scales(scales: Tensor) -> Tensor:
    """Scale bytes `[R, K/32]` to tiles `[R/64, K/64, 128]`."""
    tiled = scales.view(-1, 4, 2, 8, scales.shape[1] // 2, 2).permute(0, 4, 1, 3, 2, 5)
    return (tiled + _SCALE_OFFSET).flatten(2)


def _untile(tiles: Tensor, scales: Tensor) -> Tensor:
    """Tiles `[M, R/64, K/64, 2048]` and their scales to fp32 `[M, R, K]`."""
    words = tiles.view(torch.int32).unflatten(-1, (4, 8, 4, 4))  # warp, lane / 4, lane % 4, j
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=tiles.device)
    registers = []
    for magnitude, sign in _PLACES:
        for high in (0, 16):
            value = table[((words >> (magnitude + high)) & 7).long()]
            registers.append(torch.where(((words >> (sign + high)) & 1).bool(), -value, value))
    # [M, rows/64, K/64, warp, lane / 4, lane % 4, j, column half, row half, parity]
    values = torch.stack(registers, -1).unflatten(-1, (2, 2, 2))
    values = values.permute(0, 1, 3, 8, 4, 2, 6, 7, 5, 9).flatten(1, 4).flatten(2)
    exponents = scales.unflatten(-1, (4, 8, 2, 2)).permute(0, 1, 3, 5, 4, 2, 6)
    factors = scale_values(exponents.flatten(1, 4).flatten(2) - _SCALE_OFFSET)
    return values * factors.repeat_interleave(32, -1)
