"""Ops on single rows around the attention's caches: norms, rotations, quantisation, and the stores themselves.

Angles come as `cos` and `sin`, fp32 `[T, P/2]`, of each row's position (or of its group's first); they turn the last P
columns of a row as adjacent pairs. Where a row is stored, a row number of -1 stores nothing; no two rows of a call may
name the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.ops.rounding import round_rows
from flashmesh.kernels.quantize import fp8_32_codes, mxfp4_32, nvfp4_16
from flashmesh.kernels.reference import basics

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, rounded: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Norms rows, and rounds the result to FP8-32 besides.

    Args:
        x: bf16 `[T, n]`.
        weight: fp32 `[n]`.
        eps: under the root.
        rounded: whether a product with F8 or F4 weights follows.

    Returns:
        bf16 `[T, n]`; with `rounded` also its FP8-32 values, bf16 `[T, n]`.
    """
    y = _norm(x, weight, eps)
    return (y, round_rows(y)) if rounded else y


def query_latent_and_window(
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: Tensor,
    row: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Norms the query latent, and stores the window row that came out of the same product.

    Args:
        qkv: bf16 `[T, Q+E]`: query latent, then key = value.
        q_norm, kv_norm: fp32 `[Q]` and `[E]`.
        cos, sin: fp32 `[T, P/2]`.
        window: uint8 `[N, E + E/32]`, changed in place: e4m3 codes, then E8M0 scales.
        row: int32 `[T]`, place in `window`, or -1.
        eps: of both norms.

    Returns:
        The latent bf16 `[T, Q]` and its FP8-32 values bf16 `[T, Q]`.
    """
    width = q_norm.shape[0]
    store_window(qkv[:, width:], kv_norm, cos, sin, window, row, eps)
    latent = _norm(qkv[:, :width], q_norm, eps)
    return latent, round_rows(latent)


def store_window(
    kv: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, window: Tensor, row: Tensor, eps: float
) -> None:
    """Stores window rows: RMSNorm, rotation, FP8-32, each rounded to bf16 before the next.

    Args:
        kv: bf16 `[T, E]`.
        kv_norm, cos, sin, window, row, eps: as in `query_latent_and_window`.
    """
    codes, scales = fp8_32_codes(_rotated(_norm(kv, kv_norm, eps), cos, sin).float())
    _put(window, row, torch.cat((codes, scales), 1))


def join_pairs(
    value: Tensor, gate: Tensor, open_pair: Tensor, slot: Tensor, pos: Tensor, begin: Tensor
) -> Tensor:
    """Joins every row with the token before it, as a ratio-2 compressor does, and keeps the last rows for later calls.

    Rows of a sequence are neighbours, in order of position. Only the results of odd positions are of use. All of
    `open_pair` is read before any of it is written.

    Args:
        value, gate: fp32 `[T, E]`.
        open_pair: fp32 `[slots, ring, 2, E]`, value and gate by position modulo ring; changed in place: it gets the
            last `ring` rows of every sequence.
        slot: int32 `[T]`.
        pos: int32 `[T]`.
        begin: bool `[T]`, the first row of a sequence in this call: the token before it is in `open_pair`. Row 0
            always is one.

    Returns:
        bf16 `[T, E]`.
    """
    if not len(value):
        return value.bfloat16()
    ring = open_pair.shape[1]
    slot, pos = slot.long(), pos.long()
    begin = begin.clone()
    begin[0] = True
    old = open_pair[slot, (pos - 1) % ring]
    before = [
        torch.where(begin.unsqueeze(1), old[:, index], values.roll(1, 0))
        for index, values in enumerate((value, gate))
    ]
    peak = torch.maximum(before[1], gate)
    e0, e1 = torch.exp(before[1] - peak), torch.exp(gate - peak)
    total = e0 + e1
    joined = e0 / total * before[0] + e1 / total * value
    last = torch.ones_like(begin)
    if len(value) > ring:
        last[:-ring] = (slot[ring:] != slot[:-ring]) | (pos[ring:] != pos[:-ring] + ring)
    kept = last.nonzero().squeeze(1)
    open_pair[slot[kept], pos[kept] % ring] = torch.stack((value, gate), 1)[kept]
    return joined.bfloat16()


def store_compressed(latent: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, row: Tensor) -> None:
    """Stores compressed rows: rotation (bf16), NVFP4-16.

    Args:
        latent: bf16 `[T, E]`, normed.
        cos, sin: fp32 `[T, P/2]` of the group's first position.
        kv: uint8 `[N, E/2 + E/16]`, changed in place: packed e2m1 codes, then e4m3 scales.
        row: int32 `[T]`, place in `kv`, or -1.
    """
    codes, scales, _ = nvfp4_16(_rotated(latent, cos, sin).float())
    _put(kv, row, torch.cat((codes, scales), 1))


def store_index_key(
    key: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, ik: Tensor, row: Tensor, eps: float
) -> None:
    """Stores index keys: RMSNorm (bf16), rotation (bf16), MXFP4-32.

    Args:
        key: bf16 `[T, F]`.
        k_norm: fp32 `[F]`.
        cos, sin: fp32 `[T, P/2]` of the group's first position.
        ik: uint8 `[pages, rows * (F/2 + F/32)]`, changed in place: packed e2m1 codes of a page's rows, then their E8M0
            scales.
        row: int32 `[T]`, page * rows + place in the page, or -1.
        eps: of the norm.
    """
    width = key.shape[1]
    rows = ik.shape[1] // (width // 2 + width // 32)
    codes, scales, _ = mxfp4_32(_rotated(_norm(key, k_norm, eps), cos, sin).float())
    kept = (row >= 0).nonzero().squeeze(1)
    page, place = row[kept].long() // rows, row[kept].long() % rows
    for first, data in ((0, codes[kept]), (rows * (width // 2), scales[kept])):
        size = data.shape[1]
        columns = (first + place * size).unsqueeze(1) + torch.arange(size, device=ik.device)
        ik[page.unsqueeze(1), columns] = data


def index_queries(iq: Tensor, cos: Tensor, sin: Tensor, width: int = 128) -> Tensor:
    """Rotates index queries (bf16) and rounds each head to MXFP4-32.

    Args:
        iq: bf16 `[T, I*F]`.
        cos, sin: fp32 `[T, P/2]`.
        width: F, of a head.

    Returns:
        bf16 `[T, I, F]`, exact.
    """
    heads = _rotated(iq.unflatten(1, (-1, width)), cos, sin)
    return mxfp4_32(heads.float())[2].bfloat16()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return basics.rms_norm(x.float(), weight.float(), eps).bfloat16()


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last columns of fp32 rows in adjacent pairs; no product is fused with a sum.

    Args:
        x: fp32 `[T, n]` or `[T, heads, n]`.
        cos, sin: fp32 `[T, P/2]`.
    """
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    stay = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., stay::2], x[..., stay + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :stay], turned), -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated_pairs(x.float(), cos, sin).bfloat16()


def _put(rows: Tensor, row: Tensor, data: Tensor) -> None:
    kept = (row >= 0).nonzero().squeeze(1)
    rows[row[kept].long()] = data[kept]
