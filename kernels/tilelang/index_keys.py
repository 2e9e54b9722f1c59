"""Index keys and index queries: normed (keys), rotated and rounded to MXFP4-32; see `kernels.ops.rows`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.row_parts import parts

THREADS = 128
FLOOR, INVERSE_PEAK = 6 * 2.0**-126, 1 / 6
"""Of MXFP4's scales."""


def _store_index_key(width: int, half: int, page_rows: int) -> Any:
    """A row takes width / 8 lanes of a warp, so that sums and maxima need no barrier."""
    import tilelang.language as T

    num_rows, num_pages = T.dynamic("num_rows, num_pages")
    lanes = width // 8
    rows = THREADS // lanes
    stay = width - 2 * half
    steps = lanes.bit_length() - 1
    p = parts()

    @T.prim_func
    def store_index_key(
        key: T.Tensor((num_rows, width), "bfloat16"),
        k_norm: T.Tensor((width,), "float32"),
        cos: T.Tensor((num_rows, half), "float32"),
        sin: T.Tensor((num_rows, half), "float32"),
        ik: T.Tensor((num_pages, page_rows * (width // 2 + width // 32)), "uint8"),
        place: T.Tensor((num_rows,), "int32"),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_rows, rows), threads=THREADS) as group:
            thread = T.get_thread_binding()
            values = T.alloc_local((8,), "float32")
            total = T.alloc_local((1,), "float32")
            scale = T.alloc_local((2,), "float32")
            word = T.alloc_local((1,), "uint32")
            codes = T.alloc_local((4,), "uint8")
            mine = group * rows + thread // lanes
            # Lanes beyond the last row repeat it, since all of a warp exchange values; they store nothing.
            row = T.min(mine, num_rows - 1)
            column = thread % lanes * 8
            p.load(key, row, column, values)
            total[0] = 0.0
            p.add_squares(values, total)
            p.lanes_sum(total, steps)
            total[0] = T.rsqrt(total[0] / T.float32(width) + eps)
            p.normed(values, total[0], k_norm, column)
            if column >= stay:
                p.rotate(values, cos, sin, row, (column - stay) // 2)
            p.block_scale(values, scale, FLOOR, INVERSE_PEAK)
            word[0] = T.uint32(0)
            for i in T.unroll(8):
                p.e2m1_code(values[i] * scale[1], word, i)
            for i in T.unroll(4):
                codes[i] = T.Cast("uint8", (word[0] >> T.uint32(i * 8)) & T.uint32(255))
            if mine < num_rows:  # noqa: SIM102 (joined, every access would check again)
                if place[row] >= 0:
                    page = place[row] // page_rows
                    at = place[row] % page_rows
                    for i in T.vectorized(4):
                        ik[page, at * (width // 2) + column // 2 + i] = codes[i]
                    if column % 32 == 0:
                        ik[page, page_rows * (width // 2) + at * (width // 32) + column // 32] = (
                            T.Cast("uint8", T.reinterpret(scale[0], "int32") >> 23)
                        )

    return store_index_key


# Lanes without a row repeat the last one: that is guard enough.
_store_index_key.pass_configs = {"tl.disable_safe_memory_legalize": True}


def _index_queries(heads: int, width: int, half: int) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    columns = heads * width
    vectors = columns // 8 // THREADS
    stay = width - 2 * half
    p = parts()

    @T.prim_func
    def index_queries(
        iq: T.Tensor((num_rows, columns), "bfloat16"),
        cos: T.Tensor((num_rows, half), "float32"),
        sin: T.Tensor((num_rows, half), "float32"),
        out: T.Tensor((num_rows, columns), "bfloat16"),
    ):
        with T.Kernel(num_rows, threads=THREADS) as row:
            thread = T.get_thread_binding()
            raw = T.alloc_local((vectors * 8,), "bfloat16")
            values = T.alloc_local((8,), "float32")
            scale = T.alloc_local((2,), "float32")
            rounded = T.alloc_local((2,), "float32")
            for v in T.unroll(vectors):
                for i in T.vectorized(8):
                    raw[v * 8 + i] = iq[row, (v * THREADS + thread) * 8 + i]
            for v in T.unroll(vectors):
                for i in T.vectorized(8):
                    values[i] = T.Cast("float32", raw[v * 8 + i])
                # THREADS * 8 columns are whole heads: a thread's place in its head is the same for every vector.
                if thread * 8 % width >= stay:
                    p.rotate(values, cos, sin, row, (thread * 8 % width - stay) // 2)
                p.block_scale(values, scale, FLOOR, INVERSE_PEAK)
                for i in T.unroll(8):
                    p.e2m1_magnitude(values[i] * scale[1], rounded)
                    values[i] = T.reinterpret(
                        T.reinterpret(rounded[0] * scale[0], "uint32")
                        | (T.reinterpret(values[i], "uint32") & T.uint32(0x80000000)),
                        "float32",
                    )
                p.store(values, out, row, (v * THREADS + thread) * 8)

    return index_queries


def store_index_key(
    key: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, ik: Tensor, row: Tensor, eps: float
) -> None:
    """Stores index keys; contract of `kernels.ops.rows.store_index_key`.

    Raises:
        ValueError: the width is none of 64, 128 and 256, or shapes or dtypes do not fit together.
    """
    width, half = key.shape[1], cos.shape[1]
    row_bytes = width // 2 + width // 32
    _check(key, width, cos, sin)
    if k_norm.shape != (width,) or k_norm.dtype != torch.float32:
        raise ValueError(f"an fp32 weight of {width} is needed; got {tuple(k_norm.shape)}")
    if row.shape != (len(key),) or row.dtype != torch.int32:
        raise ValueError("row is int32 with an entry for every row")
    if ik.dim() != 2 or ik.shape[1] % row_bytes or ik.dtype != torch.uint8:
        raise ValueError(f"pages hold rows of {row_bytes} bytes; got {tuple(ik.shape)}")
    if len(key):
        kernel = build(_store_index_key, width, half, ik.shape[1] // row_bytes)
        kernel(key, k_norm, cos, sin, ik, row, eps)


def index_queries(iq: Tensor, cos: Tensor, sin: Tensor, width: int = 128) -> Tensor:
    """Rotates and rounds index queries; contract of `kernels.ops.rows.index_queries`.

    Raises:
        ValueError: the width is none of 64, 128 and 256, the columns no multiple of 1024, or shapes do not fit.
    """
    _check(iq, width, cos, sin)
    if iq.shape[1] % 1024:
        raise ValueError(f"{iq.shape[1]} columns of index queries: multiples of 1024 are supported")
    out = torch.empty(len(iq), iq.shape[1] // width, width, dtype=iq.dtype, device=iq.device)
    if len(iq):
        kernel = build(_index_queries, iq.shape[1] // width, width, cos.shape[1])
        kernel(iq, cos, sin, out.view(iq.shape))
    return out


def _check(x: Tensor, width: int, cos: Tensor, sin: Tensor) -> None:
    half = cos.shape[1]
    if width not in (64, 128, 256) or half % 4 or 2 * half > width:
        raise ValueError(
            f"index heads of {width}, {half} pairs rotated: heads of 64, 128 or 256 and a multiple of "
            "4 pairs are supported"
        )
    if x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError("rows are contiguous bf16")
    if cos.shape != (len(x), half) or sin.shape != cos.shape:
        raise ValueError("cos and sin need an entry for every row")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError("cos and sin are fp32")


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: pages of ratio 2 and of ratio 1, and queries."""
    return [
        Variant("store_index_key.64", _store_index_key, (128, 32, 64)),
        Variant("store_index_key.128", _store_index_key, (128, 32, 128)),
        Variant("index_queries", _index_queries, (32, 128, 32)),
    ]
