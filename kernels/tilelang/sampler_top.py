"""The likeliest tokens of rows; see `kernels.ops.sampler`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.sampler_device import (
    MAX_VOCAB,
    RANKS,
    SOURCE,
    THREADS,
    WARPS,
    check_logits,
)
from flashmesh.kernels.tilelang.sampler_row import STRIDE, row_part

MAX_TOP = 20
GROUP = THREADS // 32
"""Threads of which one maximum is ranked first."""

POOL = MAX_TOP * MAX_VOCAB // RANKS // THREADS
"""Tokens of the threads that may have one of the likeliest."""


def _top_logprobs(vocab: int) -> Any:
    """Kernel for the likeliest tokens of rows of `vocab` logits.

    A token's rank is that of a 64-bit key, of its value and then its id, which no two share. The `count` largest of a
    CTA are not below the `count`-th largest of its threads' own largest, and only the threads of these can have one.
    That one in turn is not below the `count`-th largest of 32 groups of threads.
    """
    import tilelang.language as T

    num_rows, count = T.dynamic("num_rows"), T.dynamic("count")
    size = vocab // RANKS
    held = row_part(size)
    loops, load = held.loops, held.load

    @T.macro
    def key_of(value, id):
        high = T.Cast("uint64", T.call_extern("uint32", "to_key", value)) << T.uint64(32)
        return high | T.Cast("uint64", ~T.Cast("uint32", id))

    def value_of(key):
        return T.call_extern("float32", "of_key", T.Cast("uint32", key >> T.uint64(32)))

    def of_peer(mail, slot, at):
        """What the `at`-th warp of the cluster has left."""
        word = T.call_extern(
            "uint32", "peer_word", T.address_of(mail[slot, at % WARPS]), at // WARPS
        )
        return T.reinterpret(word, "float32")

    @T.prim_func
    def top_logprobs(
        logits: T.Tensor((num_rows, vocab), "float32"),
        ids: T.Tensor((num_rows, count), "int32"),
        logprobs: T.Tensor((num_rows, count), "float32"),
    ):
        with T.Kernel(RANKS, num_rows, threads=THREADS, cluster_dims=(RANKS, 1, 1)) as (rank, row):
            T.import_source(SOURCE)
            T.annotate_min_blocks_per_sm(3)
            tx = T.get_thread_binding()
            lane = tx % 32
            warp = tx // 32
            x = T.alloc_local((8,), "float32")
            part = T.alloc_shared((held.padded,), "float32")
            groups = T.alloc_shared((32,), "float32")
            peaks = T.alloc_shared((THREADS,), "uint64")
            lists = T.alloc_shared((MAX_TOP,), "uint64")
            merged = T.alloc_shared((RANKS * MAX_TOP,), "uint64")
            bound = T.alloc_shared((1,), "uint64")
            num_peaks = T.alloc_shared((1,), "int32")
            num_pooled = T.alloc_shared((1,), "int32")
            pool = T.alloc_shared((POOL,), "int32")
            mail = T.alloc_shared((2, WARPS), "uint32")
            arrived = T.alloc_barrier([1] * len(held.pieces))
            first = rank * size

            # 1. The row comes to shared memory; largest values, and sums of exponentials below them.
            held.fetch(logits, row, first, part, arrived, tx)
            if tx < MAX_TOP:
                lists[tx] = T.uint64(0)
            if tx == 0:
                num_pooled[0] = 0
                num_peaks[0] = 0
                bound[0] = T.uint64(1)
            largest = T.alloc_var("float32", init=-T.infinity("float32"))
            total = T.alloc_var("float32", init=0.0)
            T.sync_threads()
            held.take_in(part, x, arrived, tx, largest, total)
            group = T.alloc_var("float32")
            group = largest
            for i in T.unroll(3):
                group = T.max(group, T.shfl_xor(group, 1 << i))
            if tx % GROUP == 0:
                groups[tx // GROUP] = group
            of_warp = T.warp_reduce_max(largest)
            total = T.warp_reduce_sum(total * held.exp(held.finite(largest) - held.finite(of_warp)))
            if lane == 0:
                mail[0, warp] = T.reinterpret(of_warp, "uint32")
                mail[1, warp] = T.reinterpret(total, "uint32")
            T.sync_threads()

            # 2. The bound, what reaches it, and its order.
            above = T.alloc_var("int32", init=0)
            of_group = groups[lane]
            for i in T.unroll(32):
                if groups[i] > of_group or (groups[i] == of_group and i < lane):
                    above += 1
            rough = T.warp_reduce_max(
                T.if_then_else(above == count - 1, of_group, -T.infinity("float32"))
            )
            peak = T.alloc_var("uint64")
            peak = T.uint64(0)
            if largest >= rough:
                place = T.alloc_var("int32")
                place = size
                for i in T.serial(loops):
                    load(part, x, i * STRIDE + tx * 4, 1)
                    for j in T.unroll(4):
                        if x[j] == largest:
                            place = T.min(place, i * STRIDE + tx * 4 + j)
                if place < size:
                    peak = key_of(largest, first + place)
                    slot = T.atomic_add(num_peaks[0], 1, return_prev=True)
                    peaks[slot] = peak
            T.sync_threads()
            if peak > T.uint64(0):
                above = 0
                for i in T.serial(num_peaks[0]):
                    if peaks[i] > peak:
                        above += 1
                if above == count - 1:
                    bound[0] = peak
            T.sync_threads()
            if peak >= bound[0]:
                least = value_of(bound[0])
                for i in T.serial(loops):
                    load(part, x, i * STRIDE + tx * 4, 1)
                    for j in T.unroll(4):
                        if x[j] >= least or bound[0] == T.uint64(1):
                            key = key_of(x[j], first + i * STRIDE + tx * 4 + j)
                            if key >= bound[0] and i * STRIDE + tx * 4 < size:
                                slot = T.atomic_add(num_pooled[0], 1, return_prev=True)
                                pool[slot] = i * STRIDE + tx * 4 + j
            T.sync_threads()
            for i in T.serial(T.ceildiv(num_pooled[0], THREADS)):
                if i * THREADS + tx < num_pooled[0]:
                    key = key_of(part[pool[i * THREADS + tx]], first + pool[i * THREADS + tx])
                    above = 0
                    for j in T.serial(num_pooled[0]):
                        if key_of(part[pool[j]], first + pool[j]) > key:
                            above += 1
                    if above < count:
                        lists[above] = key
            T.cluster_sync()

            # 3. The cluster's order.
            if rank == 0:
                if tx < RANKS * MAX_TOP:
                    merged[tx] = T.call_extern(
                        "uint64", "peer_long", T.address_of(lists[tx % MAX_TOP]), tx // MAX_TOP
                    )
                most = T.alloc_var("float32", init=-T.infinity("float32"))
                for i in T.unroll(RANKS * WARPS // 32):
                    most = T.max(most, of_peer(mail, 0, i * 32 + lane))
                of_row = T.warp_reduce_max(most)
                sum = T.alloc_var("float32", init=0.0)
                for i in T.unroll(RANKS * WARPS // 32):
                    at = i * 32 + lane
                    of_other = of_peer(mail, 0, at)
                    sum += of_peer(mail, 1, at) * held.exp(of_other - of_row)
                log_sum = T.log(T.warp_reduce_sum(sum))
                T.sync_threads()
                if tx < RANKS * MAX_TOP:
                    key = merged[tx]
                    above = 0
                    for i in T.serial(RANKS * MAX_TOP):
                        if merged[i] > key:
                            above += 1
                    if key > T.uint64(0) and above < count:
                        ids[row, above] = T.Cast("int32", ~T.Cast("uint32", key))
                        value = value_of(key)
                        logprobs[row, above] = value - of_row - log_sum
            # Nobody leaves while its shared memory is read.
            T.cluster_sync()

    return top_logprobs


_top_logprobs.pass_configs = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Finds the likeliest tokens; contract of `kernels.ops.sampler.top_logprobs`.

    Raises:
        ValueError: logits as `sample` refuses them, or a count outside 1 to 20.
    """
    rows, vocab = check_logits(logits)
    if not 1 <= count <= MAX_TOP:
        raise ValueError(f"1 to {MAX_TOP} likeliest tokens are supported, not {count}")
    ids = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, count, device=logits.device)
    if rows:
        build(_top_logprobs, vocab)(logits, ids, logprobs)
    return ids, logprobs


def top_variants() -> list[Variant]:
    """Kernel of V4.1-Flash."""
    return [Variant("top_logprobs", _top_logprobs, (129280,))]
