"""The window row of a token, normed, rotated, rounded and stored; the query latent beside it. See `kernels.ops.rows`.

One block takes a row: the first threads the query latent, the rest the key. All of a row is in registers between its
load and its store.
"""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.row_parts import parts


def _query_latent_and_window(rank: int, width: int, half: int) -> Any:
    """Kernel for rows of `rank` latent columns (0: none) and `width` key columns, rotated in `half` pairs."""
    import tilelang.language as T

    num_rows, num_places = T.dynamic("num_rows, num_places")
    latent_warps, warps = rank // 256, (rank + width) // 256
    stay = width - 2 * half
    p = parts()

    @T.prim_func
    def query_latent_and_window(
        qkv: T.Tensor((num_rows, rank + width), "bfloat16"),
        q_norm: T.Tensor((max(rank, 8),), "float32"),
        kv_norm: T.Tensor((width,), "float32"),
        cos: T.Tensor((num_rows, half), "float32"),
        sin: T.Tensor((num_rows, half), "float32"),
        window: T.Tensor((num_places, width + width // 32), "uint8"),
        place: T.Tensor((num_rows,), "int32"),
        eps: T.float32,
        latent: T.Tensor((num_rows, max(rank, 8)), "bfloat16"),
        latent_rounded: T.Tensor((num_rows, max(rank, 8)), "bfloat16"),
    ):
        with T.Kernel(num_rows, threads=warps * 32) as row:
            thread = T.get_thread_binding()
            values = T.alloc_local((8,), "float32")
            total = T.alloc_local((1,), "float32")
            scale = T.alloc_local((2,), "float32")
            codes = T.alloc_local((8,), "float8_e4m3fn")
            stored = T.alloc_local((8,), "uint8")
            sums = T.alloc_shared((warps,), "float32")
            p.load(qkv, row, thread * 8, values)
            total[0] = 0.0
            p.add_squares(values, total)
            p.keep_warp_sum(total, sums, thread)
            if thread < latent_warps * 32:
                p.warps_sum(total, sums, 0, latent_warps)
                total[0] = T.rsqrt(total[0] / T.float32(max(rank, 1)) + eps)
                p.normed(values, total[0], q_norm, thread * 8)
                p.store(values, latent, row, thread * 8)
                p.fp8_round(values, scale)
                p.store(values, latent_rounded, row, thread * 8)
            else:
                if place[row] >= 0:
                    column = (thread - latent_warps * 32) * 8
                    p.warps_sum(total, sums, latent_warps, warps - latent_warps)
                    total[0] = T.rsqrt(total[0] / T.float32(width) + eps)
                    p.normed(values, total[0], kv_norm, column)
                    if column >= stay:
                        p.rotate(values, cos, sin, row, (column - stay) // 2)
                    p.fp8_codes(values, scale, codes)
                    for i in T.unroll(8):
                        stored[i] = T.reinterpret(codes[i], "uint8")
                    for i in T.vectorized(8):
                        window[place[row], column + i] = stored[i]
                    if column % 32 == 0:
                        window[place[row], width + column // 32] = T.Cast(
                            "uint8", T.reinterpret(scale[0], "int32") >> 23
                        )

    return query_latent_and_window


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
    """Norms latents and stores window rows; contract of `kernels.ops.rows.query_latent_and_window`.

    Raises:
        ValueError: a width is no multiple of 256, or shapes or dtypes do not fit together.
    """
    rank = q_norm.shape[0]
    _check(qkv, rank, kv_norm, cos, sin, window, row)
    latent = torch.empty(len(qkv), rank, dtype=torch.bfloat16, device=qkv.device)
    latent_rounded = torch.empty_like(latent)
    if len(qkv):
        kernel = build(_query_latent_and_window, rank, kv_norm.shape[0], cos.shape[1])
        kernel(qkv, q_norm, kv_norm, cos, sin, window, row, eps, latent, latent_rounded)
    return latent, latent_rounded


def store_window(
    kv: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, window: Tensor, row: Tensor, eps: float
) -> None:
    """Stores window rows; contract of `kernels.ops.rows.store_window`.

    Raises:
        ValueError: as `query_latent_and_window`.
    """
    _check(kv, 0, kv_norm, cos, sin, window, row)
    if len(kv):
        kernel = build(_query_latent_and_window, 0, kv_norm.shape[0], cos.shape[1])
        none = torch.empty(len(kv), 8, dtype=torch.bfloat16, device=kv.device)
        kernel(kv, kv_norm[:8], kv_norm, cos, sin, window, row, eps, none, none)


def _check(
    x: Tensor, rank: int, kv_norm: Tensor, cos: Tensor, sin: Tensor, window: Tensor, row: Tensor
) -> None:
    width, half = kv_norm.shape[0], cos.shape[1]
    if rank % 256 or width % 256 or not width or half % 4 or 2 * half > width:
        raise ValueError(
            f"latents of {rank} and rows of {width} columns, {half} pairs rotated: multiples of 256, "
            "256 and 4 are supported"
        )
    if x.shape[1:] != (rank + width,) or x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(f"contiguous bf16 [T, {rank + width}] is needed; got {tuple(x.shape)}")
    if cos.shape != (len(x), half) or sin.shape != cos.shape or row.shape != (len(x),):
        raise ValueError("cos, sin and row need an entry for every row")
    if window.shape[1:] != (width + width // 32,) or window.dtype != torch.uint8:
        raise ValueError(f"window rows have {width + width // 32} bytes; got {tuple(window.shape)}")
    if row.dtype != torch.int32 or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError("row is int32, cos and sin are fp32")


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: every layer's rows, and the draft's context rows."""
    return [
        Variant("query_latent_and_window", _query_latent_and_window, (1280, 512, 32)),
        Variant("store_window", _query_latent_and_window, (0, 512, 32)),
    ]
