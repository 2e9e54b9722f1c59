"""A sub-layer's output added to the streams, and the last collapse; see `kernels.ops.mixing`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.norm import threads_for
from flashmesh.kernels.tilelang.row_parts import parts


def _spread(width: int) -> Any:
    """Blocks are pieces of a row; a thread takes eight columns of all streams."""
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    threads = threads_for(width)
    pieces = width // 8 // threads
    p = parts()

    @T.prim_func
    def spread(
        streams: T.Tensor((num_rows, 4, width), "bfloat16"),
        y: T.Tensor((num_rows, width), "bfloat16"),
        post: T.Tensor((num_rows, 4), "float32"),
        comb: T.Tensor((num_rows, 4, 4), "float32"),
        out: T.Tensor((num_rows, 4, width), "bfloat16"),
    ):
        with T.Kernel(num_rows * pieces, threads=threads) as block:
            row = block // pieces
            raw = T.alloc_local((4, 8), "bfloat16")
            added = T.alloc_local((8,), "float32")
            total = T.alloc_local((8,), "float32")
            column = (block % pieces * threads + T.get_thread_binding()) * 8
            for s in T.unroll(4):
                for i in T.vectorized(8):
                    raw[s, i] = streams[row, s, column + i]
            p.load(y, row, column, added)
            for j in T.unroll(4):
                for i in T.unroll(8):
                    total[i] = post[row, j] * added[i]
                for s in T.unroll(4):
                    for i in T.unroll(8):
                        total[i] = T.ieee_fmaf(
                            comb[row, s, j], T.Cast("float32", raw[s, i]), total[i]
                        )
                p.store_stream(total, out, row, j, column)

    return spread


def _collapse_norm(width: int) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    threads = threads_for(width)
    vectors = width // 8 // threads
    p = parts()

    @T.prim_func
    def collapse_norm(
        streams: T.Tensor((num_rows, 4, width), "bfloat16"),
        carried: T.Tensor((num_rows, 4), "float32"),
        norm: T.Tensor((width,), "float32"),
        eps: T.float32,
        out: T.Tensor((num_rows, width), "bfloat16"),
    ):
        with T.Kernel(num_rows, threads=threads) as row:
            thread = T.get_thread_binding()
            raw = T.alloc_local((vectors * 4, 8), "bfloat16")
            u = T.alloc_local((vectors * 8,), "float32")
            values = T.alloc_local((8,), "float32")
            total = T.alloc_local((1,), "float32")
            sums = T.alloc_shared((threads // 32,), "float32")
            for v in T.unroll(vectors):
                for s in T.unroll(4):
                    for i in T.vectorized(8):
                        raw[v * 4 + s, i] = streams[row, s, (v * threads + thread) * 8 + i]
            total[0] = 0.0
            for v in T.unroll(vectors):
                for i in T.unroll(8):
                    u[v * 8 + i] = 0.0
                for s in T.unroll(4):
                    for i in T.unroll(8):
                        u[v * 8 + i] = T.ieee_fmaf(
                            carried[row, s], T.Cast("float32", raw[v * 4 + s, i]), u[v * 8 + i]
                        )
                for i in T.unroll(8):
                    u[v * 8 + i] = T.Cast("float32", T.Cast("bfloat16", u[v * 8 + i]))
                    total[0] += u[v * 8 + i] * u[v * 8 + i]
            p.keep_warp_sum(total, sums, thread)
            p.warps_sum(total, sums, 0, threads // 32)
            total[0] = T.rsqrt(total[0] / T.float32(width) + eps)
            for v in T.unroll(vectors):
                for i in T.unroll(8):
                    values[i] = u[v * 8 + i]
                p.normed(values, total[0], norm, (v * threads + thread) * 8)
                p.store(values, out, row, (v * threads + thread) * 8)

    return collapse_norm


def spread(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Spreads a sub-layer's output; contract of `kernels.ops.mixing.spread`.

    Raises:
        ValueError: the width is no multiple of 256, or shapes or dtypes do not fit together.
    """
    check(streams, y=y, post=post, comb=comb)
    out = torch.empty_like(streams)
    if len(streams):
        build(_spread, streams.shape[2])(streams, y, post, comb, out)
    return out


def collapse_norm(streams: Tensor, carried: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Collapses and norms streams; contract of `kernels.ops.mixing.collapse_norm`.

    Raises:
        ValueError: as `spread`.
    """
    check(streams, carried=carried, norm=norm)
    rows, _, width = streams.shape
    out = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    if rows:
        build(_collapse_norm, width)(streams, carried, norm, eps, out)
    return out


def check(streams: Tensor, **others: Tensor) -> None:
    """Checks operands of the mixing kernels against their streams.

    Args:
        streams: what must be bf16 `[T, 4, D]`, D a multiple of 256.
        others: any of y, post, comb, carried and norm.

    Raises:
        ValueError: one does not fit.
    """
    if streams.dim() != 3 or streams.shape[1] != 4 or streams.shape[2] % 256:
        raise ValueError(
            f"streams are [T, 4, D], D a multiple of 256 is supported; got {tuple(streams.shape)}"
        )
    rows, _, width = streams.shape
    shapes = {
        "y": (rows, width),
        "post": (rows, 4),
        "comb": (rows, 4, 4),
        "carried": (rows, 4),
        "norm": (width,),
    }
    for name, tensor in {"streams": streams, **others}.items():
        dtype = torch.bfloat16 if name in ("streams", "y") else torch.float32
        if tensor.shape != shapes.get(name, streams.shape) or tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {dtype} {shapes.get(name)}; got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash."""
    return [Variant("spread", _spread, (5120,)), Variant("collapse_norm", _collapse_norm, (5120,))]
