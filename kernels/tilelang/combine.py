"""Sum over a token's experts; see `kernels.ops.moe`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build

VECTOR = 8
THREADS = 128


def _combine(width: int, count: int, with_shared: bool) -> Any:
    import tilelang.language as T

    num_rows, num_places = T.dynamic("num_rows"), T.dynamic("num_places")
    columns = THREADS * VECTOR

    @T.prim_func
    def combine(
        y: T.Tensor((num_places, width), "bfloat16"),
        place: T.Tensor((num_rows, count), "int32"),
        ids: T.Tensor((num_rows, count), "int32"),
        shared: T.Tensor((num_rows, width), "bfloat16"),
        out: T.Tensor((num_rows, width), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(width, columns), num_rows, threads=THREADS) as (block, row):
            first = block * columns + T.get_thread_binding() * VECTOR
            parts = T.alloc_local((count, VECTOR), "bfloat16")
            extra = T.alloc_local((VECTOR,), "bfloat16")
            total = T.alloc_local((VECTOR,), "float32")
            if first < width:
                # All loads before the first use: this is nothing but memory latency.
                for slot in T.unroll(count):
                    if ids[row, slot] >= 0:
                        for i in T.vectorized(VECTOR):
                            parts[slot, i] = y[place[row, slot], first + i]
                    else:
                        for i in T.vectorized(VECTOR):
                            parts[slot, i] = 0
                if with_shared:
                    for i in T.vectorized(VECTOR):
                        extra[i] = shared[row, first + i]
                for i in T.unroll(VECTOR):
                    total[i] = T.Cast("float32", parts[0, i])
                    for slot in T.unroll(1, count):
                        total[i] += T.Cast("float32", parts[slot, i])
                for i in T.unroll(VECTOR):
                    parts[0, i] = T.Cast("bfloat16", total[i])
                    if with_shared:
                        parts[0, i] = T.Cast(
                            "bfloat16", T.Cast("float32", parts[0, i]) + T.Cast("float32", extra[i])
                        )
                for i in T.vectorized(VECTOR):
                    out[row, first + i] = parts[0, i]

    return combine


def combine(y: Tensor, place: Tensor, ids: Tensor, shared: Tensor | None = None) -> Tensor:
    """Adds up what a token's experts gave; contract and bits of `kernels.ops.moe.combine`.

    Raises:
        ValueError: the width is no multiple of 8, or shapes or types differ.
    """
    num_rows, width = len(ids), y.shape[1]
    if width % VECTOR:
        raise ValueError(f"rows of {width} columns: a multiple of {VECTOR} is needed")
    if place.shape != ids.shape or (shared is not None and shared.shape != (num_rows, width)):
        raise ValueError("combine: place and ids are [T, count], shared is [T, D]")
    if y.dtype != torch.bfloat16 or place.dtype != torch.int32 or ids.dtype != torch.int32:
        raise ValueError("combine: y is bf16, place and ids are int32")
    out = torch.empty(num_rows, width, dtype=torch.bfloat16, device=y.device)
    if num_rows:
        kernel = build(_combine, width, ids.shape[1], shared is not None)
        kernel(y, place, ids, out if shared is None else shared, out)
    return out


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: top-6 of the backbone, top-3 of the draft blocks."""
    return [Variant(f"combine.{count}", _combine, (5120, count, True)) for count in (6, 3)]
