"""Ratio-2 compressors join a token with the one before it; see `kernels.ops.rows`.

Two kernels, since the first rows of a call read what its last rows overwrite: join, then store.
"""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build


def _join(width: int) -> Any:
    import tilelang.language as T

    num_rows, num_slots, ring = T.dynamic("num_rows, num_slots, ring")
    threads = width // 4

    @T.prim_func
    def join_pairs(
        value: T.Tensor((num_rows, width), "float32"),
        gate: T.Tensor((num_rows, width), "float32"),
        open_pair: T.Tensor((num_slots, ring, 2, width), "float32"),
        slot: T.Tensor((num_rows,), "int32"),
        pos: T.Tensor((num_rows,), "int32"),
        begin: T.Tensor((num_rows,), "bool"),
        out: T.Tensor((num_rows, width), "bfloat16"),
    ):
        with T.Kernel(num_rows, threads=threads) as row:
            column = T.get_thread_binding() * 4
            values = T.alloc_local((2, 4), "float32")
            gates = T.alloc_local((2, 4), "float32")
            joined = T.alloc_local((4,), "bfloat16")
            peak = T.alloc_local((1,), "float32")
            parts = T.alloc_local((2,), "float32")
            for i in T.vectorized(4):
                values[1, i] = value[row, column + i]
            for i in T.vectorized(4):
                gates[1, i] = gate[row, column + i]
            if begin[row] or row == 0:
                # Position 0 has none before it, and its result is of no use; any place in the ring will do.
                place = (pos[row] + ring - 1) % ring
                for i in T.vectorized(4):
                    values[0, i] = open_pair[slot[row], place, 0, column + i]
                for i in T.vectorized(4):
                    gates[0, i] = open_pair[slot[row], place, 1, column + i]
            else:
                for i in T.vectorized(4):
                    values[0, i] = value[row - 1, column + i]
                for i in T.vectorized(4):
                    gates[0, i] = gate[row - 1, column + i]
            for i in T.unroll(4):
                peak[0] = T.max(gates[0, i], gates[1, i])
                parts[0] = T.exp(gates[0, i] - peak[0])
                parts[1] = T.exp(gates[1, i] - peak[0])
                joined[i] = T.Cast(
                    "bfloat16",
                    (parts[0] * values[0, i] + parts[1] * values[1, i]) / (parts[0] + parts[1]),
                )
            for i in T.vectorized(4):
                out[row, column + i] = joined[i]

    return join_pairs


def _store(width: int) -> Any:
    import tilelang.language as T

    num_rows, num_slots, ring = T.dynamic("num_rows, num_slots, ring")
    threads = width // 4

    @T.prim_func
    def store_pairs(
        value: T.Tensor((num_rows, width), "float32"),
        gate: T.Tensor((num_rows, width), "float32"),
        open_pair: T.Tensor((num_slots, ring, 2, width), "float32"),
        slot: T.Tensor((num_rows,), "int32"),
        pos: T.Tensor((num_rows,), "int32"),
    ):
        with T.Kernel(num_rows, threads=threads) as row:
            column = T.get_thread_binding() * 4
            later = T.min(row + ring, num_rows - 1)
            # A row that a later one of its sequence would overwrite stays out: blocks run in no order.
            if row + ring >= num_rows or slot[later] != slot[row] or pos[later] != pos[row] + ring:
                for i in T.vectorized(4):
                    open_pair[slot[row], pos[row] % ring, 0, column + i] = value[row, column + i]
                for i in T.vectorized(4):
                    open_pair[slot[row], pos[row] % ring, 1, column + i] = gate[row, column + i]

    return store_pairs


def join_pairs(
    value: Tensor, gate: Tensor, open_pair: Tensor, slot: Tensor, pos: Tensor, begin: Tensor
) -> Tensor:
    """Joins pairs and keeps open ones; contract of `kernels.ops.rows.join_pairs`.

    Raises:
        ValueError: the width is no multiple of 128, or shapes or dtypes do not fit together.
    """
    width = value.shape[1]
    if width % 128 or width > 4096:
        raise ValueError(f"pairs of {width} columns: a multiple of 128 up to 4096 is supported")
    if gate.shape != value.shape or open_pair.shape[2:] != (2, width):
        raise ValueError(
            f"gate {tuple(gate.shape)} or open_pair {tuple(open_pair.shape)} does not fit"
        )
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in (value, gate, open_pair)):
        raise ValueError("value, gate and open_pair are contiguous fp32")
    if any(x.shape != (len(value),) for x in (slot, pos, begin)):
        raise ValueError("slot, pos and begin need an entry for every row")
    if slot.dtype != torch.int32 or pos.dtype != torch.int32 or begin.dtype != torch.bool:
        raise ValueError("slot and pos are int32, begin is bool")
    out = torch.empty(value.shape, dtype=torch.bfloat16, device=value.device)
    if len(value):
        build(_join, width)(value, gate, open_pair, slot, pos, begin, out)
        build(_store, width)(value, gate, open_pair, slot, pos)
    return out


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash."""
    return [Variant("join_pairs", _join, (512,)), Variant("store_pairs", _store, (512,))]
