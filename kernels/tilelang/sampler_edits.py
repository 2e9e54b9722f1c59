"""Macros of what a row is edited with before it is drawn from: penalties, biases, a grammar's mask, exclusions.

Each of them ends where all threads have met.
"""

from types import SimpleNamespace
from typing import Any

from flashmesh.kernels.tilelang.sampler_device import THREADS
from flashmesh.kernels.tilelang.sampler_row import STRIDE, row_part


def edits_of(size: int) -> Any:
    """Returns the macros for CTAs that hold `size` logits each."""
    import tilelang.language as T

    loops = row_part(size).loops

    @T.macro
    def each_entry(ends, ids, row, first, tx, act, operands):
        """Calls `act` for the entries of a row's list whose ids this CTA holds, with their places here and there."""
        for i in T.serial(T.ceildiv(ends[row + 1] - ends[row], THREADS)):
            at = ends[row] + i * THREADS + tx
            if at < ends[row + 1]:
                place = ids[at] - first
                if place >= 0 and place < size:
                    act(at, place, *operands)
        T.sync_threads()

    @T.macro
    def penalize(at, place, part, in_output, repetition, frequency, presence, row):
        value = part[place]
        times = T.Cast("float32", in_output[at])
        scaled = T.if_then_else(
            value > 0, T.ieee_fdiv(value, repetition[row]), value * repetition[row]
        )
        less = T.ieee_sub(scaled, T.ieee_mul(frequency[row], times))
        part[place] = T.if_then_else(in_output[at] > 0, less - presence[row], less)

    @T.macro
    def add_bias(at, place, part, biases):
        part[place] = part[place] + biases[at]

    @T.macro
    def exclude(at, place, part, saved):
        saved[at] = part[place]
        part[place] = -T.infinity("float32")

    @T.macro
    def admit(at, place, part, saved):
        """Takes back an exclusion."""
        part[place] = saved[at]

    @T.macro
    def mask(part, allowed, row, first, tx):
        for i in T.serial(loops):
            place = i * STRIDE + tx * 4
            if place < size:
                bits = allowed[row, (first + place) // 32] >> ((first + place) % 32)
                for j in T.unroll(4):
                    if (bits >> j) & 1 == 0:
                        part[place + j] = -T.infinity("float32")
        T.sync_threads()

    return SimpleNamespace(
        each_entry=each_entry,
        penalize=penalize,
        add_bias=add_bias,
        exclude=exclude,
        admit=admit,
        mask=mask,
    )
