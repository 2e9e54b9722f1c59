"""Sparse attention: a window and selected compressed rows, read from the caches' bytes, rotations included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.formats import expand
from flashmesh.kernels.ops.rows import rotated_pairs
from flashmesh.kernels.quantize import unpack_nvfp4_16
from flashmesh.kernels.reference.attention import attend

if TYPE_CHECKING:
    from torch import Tensor

_MAX_KEYS = 1 << 16
"""Keys unpacked at once; bounds memory, and does not change bits."""


def sparse_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: Tensor,
    window_index: Tensor,
    kv: Tensor,
    kv_index: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """Attends with every head to a row's window keys and then to its selected compressed keys.

    A key is its own value, for all heads. The last `2 * P` columns of a head are rotated, in adjacent pairs: the query
    on the way in (fp32, then rounded to bf16, as a stored key was), the result back on the way out (fp32, before its
    only rounding). Keys are stored rotated. A sink takes part in a head's denominator only.

    Args:
        q: bf16 `[T, H, E]`, not yet rotated; E a multiple of 32.
        cos: fp32 `[T, P]`, of the rows' positions.
        sin: fp32 `[T, P]`.
        window: uint8 `[Nw, E + E/32]`: e4m3 codes, then the exponent byte of the power of two over 32 of them.
        window_index: int32 `[T, W]`, rows of `window`; -1 where there is none, in any place and number.
        kv: uint8 `[Nk, E/2 + E/16]`: pairs of e2m1 codes, the even column low, then the e4m3 scale of 16 of them.
        kv_index: int32 `[T, K]`, rows of `kv`, or -1; K = 0 where a layer has only its window.
        sink: fp32 `[H]`, a logit without a value.
        scale: of the logits.

    Returns:
        bf16 `[T, H, E]`; zeros in rows without any key.
    """
    step = max(1, _MAX_KEYS // max(1, window_index.shape[1] + kv_index.shape[1]))
    out = torch.empty_like(q)
    for begin in range(0, len(q), step):
        rows = slice(begin, begin + step)
        keys = torch.cat(
            (
                unpack_window(_gather(window, window_index[rows])),
                unpack_kv(_gather(kv, kv_index[rows])),
            ),
            1,
        )
        present = torch.cat((window_index[rows], kv_index[rows]), 1) >= 0
        keys = keys.masked_fill(~present.unsqueeze(-1), 0)
        c, s = cos[rows], sin[rows]
        rotated = rotated_pairs(q[rows].float(), c, s).bfloat16().float()
        # The peak of no logits at all would be minus infinity less itself; their values are zeros.
        some = present | ~present.any(1, keepdim=True)
        out[rows] = rotated_pairs(attend(rotated, keys, some, sink, scale), c, -s).bfloat16()
    return out


def unpack_window(stored: Tensor) -> Tensor:
    """Reads window rows: uint8 `[..., E + E/32]` to fp32 `[..., E]`."""
    width = stored.shape[-1] // 33 * 32
    codes = stored[..., :width].contiguous().view(torch.float8_e4m3fn)
    return expand("F8row", codes, stored[..., width:])


def unpack_kv(stored: Tensor) -> Tensor:
    """Reads compressed rows: uint8 `[..., E/2 + E/16]` to fp32 `[..., E]`."""
    width = stored.shape[-1] // 9 * 8
    return unpack_nvfp4_16(stored[..., :width], stored[..., width:])


def _gather(stored: Tensor, index: Tensor) -> Tensor:
    """Returns bytes `[T, N, B]` of indexed rows, and anything for -1."""
    if not len(stored):
        return stored.new_zeros((*index.shape, stored.shape[1]))
    return stored[index.clamp(min=0).long()]
