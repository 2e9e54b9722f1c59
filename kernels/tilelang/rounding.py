"""FP8-32 rounding of activations; see `kernels.ops.rounding`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build

THREADS = 128


def _round_rows(width: int) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    blocks = width // 32

    @T.prim_func
    def round_rows(
        x: T.Tensor((num_rows, width), "bfloat16"), y: T.Tensor((num_rows, width), "bfloat16")
    ):
        with T.Kernel(num_rows, threads=THREADS) as row:
            values = T.alloc_fragment((blocks, 32), "float32")
            scale = T.alloc_fragment((blocks,), "float32")
            for b, i in T.Parallel(blocks, 32):
                values[b, i] = T.Cast("float32", x[row, b * 32 + i])
            T.reduce_absmax(values, scale, dim=1)
            for b in T.Parallel(blocks):
                # Up to the next power of two on the bits: a logarithm would misplace some.
                peak = T.max(scale[b], 1e-4) * T.float32(1 / 448)
                bits = (T.reinterpret(peak, "int32") + 0x7FFFFF) & 0x7F800000
                scale[b] = T.reinterpret(bits, "float32")
            for b, i in T.Parallel(blocks, 32):
                code = T.Cast("float8_e4m3fn", T.clamp(values[b, i] / scale[b], -448.0, 448.0))
                y[row, b * 32 + i] = T.Cast("bfloat16", T.Cast("float32", code) * scale[b])

    return round_rows


def round_rows(x: Tensor) -> Tensor:
    """Rounds rows to FP8-32; contract and bits of `kernels.ops.rounding.round_rows`.

    Raises:
        ValueError: the width is no multiple of 32.
    """
    if x.shape[1] % 32:
        raise ValueError(f"rows of {x.shape[1]} columns: FP8-32 needs a multiple of 32")
    y = torch.empty_like(x)
    if len(x):
        build(_round_rows, x.shape[1])(x, y)
    return y


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: hidden size, query rank, output rank, expert width."""
    return [Variant(f"round_rows.{n}", _round_rows, (n,)) for n in (5120, 1280, 8192, 2304)]
