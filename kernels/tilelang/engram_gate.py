"""Gated injection of Engram values; see `kernels.ops.engram`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build

VECTOR = 8


def _engram_gate(num_streams: int, width: int) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    # A thread holds the same columns of all streams, so streams, keys and value are read once. Two blocks of 320
    # threads a multiprocessor attain 95 % of a copy, one of 640 (or three) less.
    turns = 2 if width % (2 * 32 * VECTOR) == 0 else 1
    threads = width // VECTOR // turns
    warps = threads // 32
    sums = 3 * num_streams  # of X^2, K^2 and X q k K, for every stream

    @T.prim_func
    def engram_gate(
        streams: T.Tensor((num_rows, num_streams, width), "bfloat16"),
        kv: T.Tensor((num_rows, (num_streams + 1) * width), "bfloat16"),
        q_weight: T.Tensor((num_streams, width), "bfloat16"),
        k_weight: T.Tensor((num_streams, width), "bfloat16"),
        text: T.Tensor((num_rows,), "bool"),
        out: T.Tensor((num_rows, num_streams, width), "bfloat16"),
    ):
        with T.Kernel(num_rows, threads=threads) as row:
            T.annotate_min_blocks_per_sm(2)
            thread = T.get_thread_binding()
            x = T.alloc_local((turns, num_streams, VECTOR), "bfloat16")
            key = T.alloc_local((turns, num_streams, VECTOR), "bfloat16")
            value = T.alloc_local((turns, VECTOR), "bfloat16")
            q = T.alloc_local((VECTOR,), "bfloat16")
            k = T.alloc_local((VECTOR,), "bfloat16")
            part = T.alloc_local((sums,), "float32")
            wide = T.alloc_local((2,), "float32")
            partials = T.alloc_shared((warps + 1, sums), "float32")  # gates in the last row
            dot = T.alloc_var("float32")
            gate = T.alloc_var("float32")

            for turn in T.unroll(turns):
                first = (turn * threads + thread) * VECTOR
                for s in T.unroll(num_streams):
                    for i in T.vectorized(VECTOR):
                        x[turn, s, i] = streams[row, s, first + i]
                for s in T.unroll(num_streams):
                    for i in T.vectorized(VECTOR):
                        key[turn, s, i] = kv[row, s * width + first + i]
                for i in T.vectorized(VECTOR):
                    value[turn, i] = kv[row, num_streams * width + first + i]
            for j in T.unroll(sums):
                part[j] = 0
            for turn in T.unroll(turns):
                first = (turn * threads + thread) * VECTOR
                for s in T.unroll(num_streams):
                    for i in T.vectorized(VECTOR):
                        q[i] = q_weight[s, first + i]
                    for i in T.vectorized(VECTOR):
                        k[i] = k_weight[s, first + i]
                    for i in T.unroll(VECTOR):
                        wide[0] = T.Cast("float32", x[turn, s, i])
                        wide[1] = T.Cast("float32", key[turn, s, i])
                        part[3 * s] += wide[0] * wide[0]
                        part[3 * s + 1] += wide[1] * wide[1]
                        part[3 * s + 2] += (
                            wide[0] * (T.Cast("float32", q[i]) * T.Cast("float32", k[i])) * wide[1]
                        )
            for step in T.unroll(5):
                for j in T.unroll(sums):
                    part[j] += T.shfl_xor(part[j], 16 >> step)
            if thread % 32 == 0:
                for j in T.unroll(sums):
                    partials[thread // 32, j] = part[j]
            T.sync_threads()
            if thread < num_streams:
                for j in T.unroll(3):
                    part[j] = 0
                for w in T.serial(warps):
                    for j in T.unroll(3):
                        part[j] += partials[w, 3 * thread + j]
                dot = (
                    part[2]
                    * T.rsqrt(part[0] / width + 1e-20)
                    * T.rsqrt(part[1] / width + 1e-20)
                    * T.float32(width**-0.5)
                )
                gate = T.sqrt(T.max(T.abs(dot), 1e-6))
                gate = T.if_then_else(dot > 0, gate, T.if_then_else(dot < 0, -gate, 0.0))
                partials[warps, thread] = T.if_then_else(text[row], 1 / (1 + T.exp(-gate)), 0.0)
            T.sync_threads()
            for turn in T.unroll(turns):
                for s in T.unroll(num_streams):
                    gate = partials[warps, s]
                    for i in T.unroll(VECTOR):
                        x[turn, s, i] = T.Cast(
                            "bfloat16",
                            T.Cast("float32", x[turn, s, i])
                            + gate * T.Cast("float32", value[turn, i]),
                        )
                    for i in T.vectorized(VECTOR):
                        out[row, s, (turn * threads + thread) * VECTOR + i] = x[turn, s, i]

    return engram_gate


def engram_gate(
    streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, text: Tensor
) -> Tensor:
    """Injects looked-up values; contract of `kernels.ops.engram.engram_gate`.

    Raises:
        ValueError: D is no multiple of 256 up to 8192, or shapes or types differ.
    """
    num_rows, num_streams, width = streams.shape
    if width % 256 or width > 1024 * VECTOR:
        raise ValueError(f"{width} columns: a multiple of 256 up to {1024 * VECTOR} is needed")
    if kv.shape != (num_rows, (num_streams + 1) * width) or text.shape != (num_rows,):
        raise ValueError("engram_gate: streams [T, S, D], kv [T, (S + 1) * D], text [T]")
    if q_weight.shape != (num_streams, width) or k_weight.shape != (num_streams, width):
        raise ValueError("engram_gate: weights are [S, D]")
    if any(t.dtype != torch.bfloat16 for t in (streams, kv, q_weight, k_weight)):
        raise ValueError("engram_gate: streams, kv and weights are bf16")
    out = torch.empty_like(streams)
    if num_rows:
        build(_engram_gate, num_streams, width)(streams, kv, q_weight, k_weight, text, out)
    return out


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash."""
    return [Variant("engram_gate", _engram_gate, (4, 5120))]
