"""SwiGLU of the shared expert; see `kernels.ops.moe`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build

VECTOR = 8
LANES = 32 // VECTOR
"""Threads that hold the 32 columns of one FP8-32 block."""


def _swiglu(width: int, limit: float, round_output: bool) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    threads = max(t for t in range(32, 257, 32) if width // VECTOR % t == 0)
    columns = threads * VECTOR

    @T.prim_func
    def swiglu(
        gu: T.Tensor((num_rows, 2 * width), "bfloat16"),
        out: T.Tensor((num_rows, width), "bfloat16"),
    ):
        with T.Kernel(width // columns, num_rows, threads=threads) as (block, row):
            first = block * columns + T.get_thread_binding() * VECTOR
            g = T.alloc_local((VECTOR,), "bfloat16")
            u = T.alloc_local((VECTOR,), "bfloat16")
            a = T.alloc_local((VECTOR,), "float32")
            code = T.alloc_local((VECTOR,), "float8_e4m3fn")
            peak = T.alloc_var("float32", 1e-4)
            bits = T.alloc_var("int32")
            for i in T.vectorized(VECTOR):
                g[i] = gu[row, first + i]
            for i in T.vectorized(VECTOR):
                u[i] = gu[row, width + first + i]
            for i in T.unroll(VECTOR):
                # Approximate exponential and quotient: a few units in the last of 24 bits, of which bf16 keeps 8.
                a[i] = T.min(T.Cast("float32", g[i]), limit)
                a[i] = T.call_extern("float32", "__fdividef", a[i], 1 + T.__exp(-a[i]))
                a[i] *= T.clamp(T.Cast("float32", u[i]), -limit, limit)
            for i in T.vectorized(VECTOR):
                g[i] = T.Cast("bfloat16", a[i])
            if round_output:
                for i in T.vectorized(VECTOR):
                    a[i] = T.Cast("float32", g[i])
                for i in T.unroll(VECTOR):
                    peak = T.max(peak, T.abs(a[i]))
                for step in T.unroll(LANES.bit_length() - 1):
                    peak = T.max(peak, T.shfl_xor(peak, 1 << step))
                # Up to the next power of two on the bits: a logarithm would misplace some. Its inverse is exact, and
                # no value leaves the range of e4m3, whose conversion saturates anyway.
                bits = (T.reinterpret(peak * T.float32(1 / 448), "int32") + 0x7FFFFF) & 0x7F800000
                for i in T.unroll(VECTOR):
                    a[i] *= T.reinterpret((254 << 23) - bits, "float32")
                for i in T.vectorized(VECTOR):
                    code[i] = T.Cast("float8_e4m3fn", a[i])
                for i in T.vectorized(VECTOR):
                    a[i] = T.Cast("float32", code[i])
                for i in T.unroll(VECTOR):
                    a[i] *= T.reinterpret(bits, "float32")
                for i in T.vectorized(VECTOR):
                    g[i] = T.Cast("bfloat16", a[i])
            for i in T.vectorized(VECTOR):
                out[row, first + i] = g[i]

    return swiglu


def swiglu(gu: Tensor, limit: float, round_output: bool) -> Tensor:
    """Activates the shared expert; contract of `kernels.ops.moe.swiglu`.

    Raises:
        ValueError: the width is no multiple of 256, or the type not bf16.
    """
    num_rows, width = gu.shape[0], gu.shape[1] // 2
    if gu.shape[1] % 512:
        raise ValueError(f"{gu.shape[1]} columns: twice a multiple of 256 is needed")
    if gu.dtype != torch.bfloat16:
        raise ValueError(f"gu is {gu.dtype}, not bf16")
    out = torch.empty(num_rows, width, dtype=torch.bfloat16, device=gu.device)
    if num_rows:
        build(_swiglu, width, float(limit), round_output)(gu, out)
    return out


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash."""
    return [Variant(f"swiglu.{r}", _swiglu, (2304, 10.0, r)) for r in (True, False)]
