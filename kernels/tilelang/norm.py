"""RMSNorm of rows, with the FP8-32 rounding of its result; see `kernels.ops.rows`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.row_parts import parts


def threads_for(width: int) -> int:
    """Threads for a row of `width` columns, a multiple of 256: the fewest that hold up to five vectors each."""
    vectors = width // 8
    return next(t for t in range(32, 1025, 32) if vectors % t == 0 and vectors // t <= 5)


def _rms_norm(width: int, rounded: bool) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    threads = 32 if width < 256 else threads_for(width)
    vectors = max(width // 8 // threads, 1)
    p = parts()

    @T.prim_func
    def rms_norm(
        x: T.Tensor((num_rows, width), "bfloat16"),
        weight: T.Tensor((width,), "float32"),
        eps: T.float32,
        y: T.Tensor((num_rows, width), "bfloat16"),
        y_rounded: T.Tensor((num_rows, width), "bfloat16"),
    ):
        with T.Kernel(num_rows, threads=threads) as row:
            thread = T.get_thread_binding()
            values = T.alloc_local((vectors * 8,), "float32")
            some = T.alloc_local((8,), "float32")
            raw = T.alloc_local((vectors * 8,), "bfloat16")
            total = T.alloc_local((1,), "float32")
            scale = T.alloc_local((2,), "float32")
            sums = T.alloc_shared((threads // 32,), "float32")
            for v in T.unroll(vectors):
                for i in T.unroll(8):
                    raw[v * 8 + i] = 0.0
                if (v * threads + thread) * 8 < width:
                    for i in T.vectorized(8):
                        raw[v * 8 + i] = x[row, (v * threads + thread) * 8 + i]
            total[0] = 0.0
            for v in T.unroll(vectors):
                for i in T.vectorized(8):
                    values[v * 8 + i] = T.Cast("float32", raw[v * 8 + i])
                for i in T.unroll(8):
                    total[0] += values[v * 8 + i] * values[v * 8 + i]
            p.keep_warp_sum(total, sums, thread)
            p.warps_sum(total, sums, 0, threads // 32)
            total[0] = T.rsqrt(total[0] / T.float32(width) + eps)
            # All lanes exchange values, those beyond a narrow row too.
            for v in T.unroll(vectors):
                if (v * threads + thread) * 8 < width:
                    for i in T.unroll(8):
                        some[i] = values[v * 8 + i]
                    p.normed(some, total[0], weight, (v * threads + thread) * 8)
                    p.store(some, y, row, (v * threads + thread) * 8)
                if rounded:
                    p.fp8_round(some, scale)
                    if (v * threads + thread) * 8 < width:
                        p.store(some, y_rounded, row, (v * threads + thread) * 8)

    return rms_norm


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, rounded: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Norms rows; contract of `kernels.ops.rows.rms_norm`.

    Raises:
        ValueError: the width is neither 128 nor a multiple of 256, the weight has another one, or a dtype differs.
    """
    if x.dim() != 2 or x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(f"bf16 [T, n], contiguous, is supported; got {x.dtype} {tuple(x.shape)}")
    if x.shape[1] != 128 and (x.shape[1] % 256 or not x.shape[1]):
        raise ValueError(f"rows of {x.shape[1]} columns: 128 and multiples of 256 are supported")
    if weight.shape != x.shape[1:] or weight.dtype != torch.float32:
        raise ValueError(f"an fp32 weight of {x.shape[1]} is needed; got {tuple(weight.shape)}")
    y = torch.empty_like(x)
    y_rounded = torch.empty_like(x) if rounded else y
    if len(x):
        build(_rms_norm, x.shape[1], rounded)(x, weight, eps, y, y_rounded)
    return (y, y_rounded) if rounded else y


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: hidden size (before F8 products and before others), compressor latent."""
    return [
        Variant(f"rms_norm.{n}{'.rounded' if r else ''}", _rms_norm, (n, r))
        for n, r in ((5120, False), (5120, True), (512, False))
    ]
