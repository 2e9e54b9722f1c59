"""Drawing of tokens; see `kernels.ops.sampler`.

A cluster of eight CTAs holds one row of logits in its shared memory: device memory is read once, however many passes
a row's parameters ask. Which are: maximum; edits and maximum again; histograms for top-k, then for top-p; sum and
draw. What CTAs know alone they send to all, who combine it in rank order, so every CTA arrives at the same bits.
Histograms count in integers, whose sums no order of atomics changes.

Temperature and noise are taken in binary logarithms: `argmax(s / T - ln(-ln u))` is `argmax(s2 - log2(-ln u))` with
`s2 = s * log2(e) / T`. As `-ln u >= 1 - u`, a token whose `2^s2 * 2^-best` does not exceed `1 - u` cannot win, and
only those that may are given two logarithms.
"""

import math
from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.ops.sampler import Lists, Sampled, SampleParams
from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.sampler_device import (
    BINS,
    COPIES,
    LARGEST,
    LOG2_E,
    MASS_BITS,
    NO_ID,
    RANKS,
    SOURCE,
    THREADS,
    TOKEN_NOISE,
    WARPS,
    check_logits,
    philox_macro,
    pieces_of,
)
from flashmesh.kernels.tilelang.sampler_parts import STRIDE, messages, passes
from flashmesh.kernels.tilelang.sampler_top import top_logprobs, top_variants

__all__ = ["TOKEN_NOISE", "sample", "top_logprobs", "variants"]


def _noise() -> Any:
    """Words and log2(-ln u) of single tokens, for tests."""
    import tilelang.language as T

    num = T.dynamic("num")
    philox = philox_macro()

    @T.prim_func
    def noise(
        blocks: T.Tensor((num,), "int32"),
        seed: T.Tensor((1,), "int64"),
        choice: T.Tensor((1,), "int32"),
        position: T.Tensor((1,), "int32"),
        out: T.Tensor((num, 4), "int32"),
        scores: T.Tensor((num, 4), "float32"),
    ):
        with T.Kernel(T.ceildiv(num, THREADS), threads=THREADS) as group:
            T.import_source(SOURCE)
            i = group * THREADS + T.get_thread_binding()
            words = T.alloc_local((4,), "uint32")
            if i < num:
                bits = T.Cast("uint64", seed[0])
                philox(
                    words,
                    0,
                    T.Cast("uint32", blocks[i]),
                    T.Cast("uint32", position[0]),
                    T.Cast("uint32", choice[0]),
                    T.Cast("uint32", bits),
                    T.Cast("uint32", bits >> T.uint64(32)),
                )
                for j in T.unroll(4):
                    out[i, j] = T.Cast("int32", words[j])
                    scores[i, j] = T.call_extern("float32", "log2_exponential", words[j])

    return noise


def _sample(vocab: int, edits: bool, masked: bool) -> Any:
    """Kernel for rows of `vocab` logits; `edits` and `masked` leave out what no row of a batch has."""
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    num_ends, num_masks = T.dynamic("num_ends"), T.dynamic("num_masks")
    num_counts, num_biases, num_excluded = (
        T.dynamic("num_counts"),
        T.dynamic("num_biases"),
        T.dynamic("num_excluded"),
    )
    size = vocab // RANKS
    loops = -(-size // STRIDE)
    padded = loops * STRIDE
    pieces = pieces_of(size)
    philox = philox_macro()
    steps, post = passes(loops), messages()
    pair, load = steps.pair, steps.load

    @T.prim_func
    def sample(
        logits: T.Tensor((num_rows, vocab), "float32"),
        temperature: T.Tensor((num_rows,), "float32"),
        top_k: T.Tensor((num_rows,), "int32"),
        top_p: T.Tensor((num_rows,), "float32"),
        min_p: T.Tensor((num_rows,), "float32"),
        seed: T.Tensor((num_rows,), "int64"),
        choice: T.Tensor((num_rows,), "int32"),
        position: T.Tensor((num_rows,), "int32"),
        repetition: T.Tensor((num_rows,), "float32"),
        frequency: T.Tensor((num_rows,), "float32"),
        presence: T.Tensor((num_rows,), "float32"),
        count_ends: T.Tensor((num_ends,), "int32"),
        count_ids: T.Tensor((num_counts,), "int32"),
        in_output: T.Tensor((num_counts,), "int32"),
        bias_ends: T.Tensor((num_ends,), "int32"),
        bias_ids: T.Tensor((num_biases,), "int32"),
        biases: T.Tensor((num_biases,), "float32"),
        excluded_ends: T.Tensor((num_ends,), "int32"),
        excluded_ids: T.Tensor((num_excluded,), "int32"),
        saved: T.Tensor((num_excluded,), "float32"),
        allowed: T.Tensor((num_masks, vocab // 32), "int32"),
        token: T.Tensor((num_rows,), "int32"),
        logprob: T.Tensor((num_rows,), "float32"),
        processed_logprob: T.Tensor((num_rows,), "float32"),
    ):
        with T.Kernel(RANKS, num_rows, threads=THREADS, cluster_dims=(RANKS, 1, 1)) as (rank, row):
            T.import_source(SOURCE)
            T.annotate_min_blocks_per_sm(3)
            tx = T.get_thread_binding()
            lane = tx % 32
            warp = tx // 32
            part = T.alloc_shared((padded,), "float32")
            bins = T.alloc_shared((COPIES, BINS), "uint32")
            sums = T.alloc_shared((2, BINS), "uint64")
            warp_sums = T.alloc_shared((BINS // 32,), "uint64")
            found = T.alloc_shared((3,), "uint64")
            mail = T.alloc_shared((2, RANKS * WARPS), "uint32")
            ends = T.alloc_shared((2, 5, max(RANKS, WARPS)), "uint32")
            least_of = T.alloc_shared((WARPS,), "uint32")
            links = T.alloc_shared((6,), "uint64")
            arrived = T.alloc_barrier([1] * len(pieces))
            x = T.alloc_local((4 * pair,), "float32")
            words = T.alloc_local((4 * pair,), "uint32")
            first = rank * size

            if tx == 0:
                post.make_links(links)
            if tx < BINS:
                for i in T.unroll(COPIES):
                    bins[i, tx] = T.uint32(0)
                for i in T.unroll(2):
                    sums[i, tx] = T.uint64(0)

            # 1. The row comes to shared memory; its largest logit, and whether it holds a NaN.
            for piece, (begin, end) in enumerate(pieces):
                T.tma_copy(
                    logits[row, first + begin : first + end],
                    part[begin:end],
                    barrier=arrived[piece],
                )
                if tx == 0:
                    T.barrier_arrive(arrived[piece])
            for i in T.serial(T.ceildiv(padded - size, THREADS)):
                if size + i * THREADS + tx < padded:
                    part[size + i * THREADS + tx] = -T.infinity("float32")
            heat = T.alloc_var("float32")
            heat = temperature[row]
            num_kept = T.alloc_var("int32")
            num_kept = top_k[row]
            to_log2 = T.alloc_var("float32")
            to_log2 = T.min(T.max(T.ieee_fdiv(T.float32(LOG2_E), heat), 1e-37), 1e34)
            largest = T.alloc_var("float32", init=-T.infinity("float32"))
            raw_sum = T.alloc_var("float32", init=0.0)
            T.sync_threads()
            T.cluster_arrive()
            for piece, (begin, end) in enumerate(pieces):
                T.mbarrier_wait_parity(arrived[piece], 0)
                before = T.alloc_var("float32")
                before = largest
                for i in T.unroll(-(-(end - begin) // STRIDE)):
                    load(part, x, begin + i * STRIDE + tx * 4, 1)
                    for j in T.unroll(4):
                        largest = T.max(largest, x[j])
                # The sum below the thread's own maximum, while the next piece is on its way.
                shift_of = T.max(largest, T.float32(-LARGEST))
                raw_sum = raw_sum * T.call_extern(
                    "float32", "ex2", (before - shift_of) * T.float32(LOG2_E)
                )
                for i in T.unroll(-(-(end - begin) // STRIDE)):
                    load(part, x, begin + i * STRIDE + tx * 4, 1)
                    for j in T.unroll(4):
                        raw_sum += T.call_extern(
                            "float32", "ex2", (x[j] - shift_of) * T.float32(LOG2_E)
                        )
            of_thread = T.alloc_var("float32")
            of_thread = largest
            if T.isnan(raw_sum):
                largest = T.infinity("float32")
            # All barriers are made: the first message may leave.
            T.cluster_wait()
            raw_max = T.alloc_var("float32")
            raw_max = post.cluster_max(mail, links, 0, rank, lane, warp, largest)
            top = T.alloc_var("float32")
            top = raw_max
            is_fine = T.alloc_var("bool")
            is_fine = T.abs(raw_max) <= T.float32(LARGEST)
            raw_sum *= T.call_extern(
                "float32",
                "ex2",
                (T.max(of_thread, T.float32(-LARGEST)) - raw_max) * T.float32(LOG2_E),
            )

            if (edits or masked) and is_fine:
                if edits:
                    for i in T.serial(T.ceildiv(count_ends[row + 1] - count_ends[row], THREADS)):
                        at = count_ends[row] + i * THREADS + tx
                        if at < count_ends[row + 1]:
                            place = count_ids[at] - first
                            if place >= 0 and place < size:
                                value = part[place]
                                times = T.Cast("float32", in_output[at])
                                scaled = T.if_then_else(
                                    value > 0,
                                    T.ieee_fdiv(value, repetition[row]),
                                    value * repetition[row],
                                )
                                less = T.ieee_sub(scaled, T.ieee_mul(frequency[row], times))
                                part[place] = T.if_then_else(
                                    in_output[at] > 0, less - presence[row], less
                                )
                    T.sync_threads()
                    for i in T.serial(T.ceildiv(bias_ends[row + 1] - bias_ends[row], THREADS)):
                        at = bias_ends[row] + i * THREADS + tx
                        if at < bias_ends[row + 1]:
                            place = bias_ids[at] - first
                            if place >= 0 and place < size:
                                part[place] = part[place] + biases[at]
                    T.sync_threads()
                if masked:
                    for i in T.serial(loops):
                        place = i * STRIDE + tx * 4
                        if place < size:
                            bits = allowed[row, (first + place) // 32] >> ((first + place) % 32)
                            for j in T.unroll(4):
                                if (bits >> j) & 1 == 0:
                                    part[place + j] = -T.infinity("float32")
                    T.sync_threads()
                if edits:
                    for i in T.serial(
                        T.ceildiv(excluded_ends[row + 1] - excluded_ends[row], THREADS)
                    ):
                        at = excluded_ends[row] + i * THREADS + tx
                        if at < excluded_ends[row + 1]:
                            place = excluded_ids[at] - first
                            if place >= 0 and place < size:
                                saved[at] = part[place]
                                part[place] = -T.infinity("float32")
                    T.sync_threads()
                largest = -T.infinity("float32")
                for i in T.serial(loops):
                    load(part, x, i * STRIDE + tx * 4, 1)
                    for j in T.unroll(4):
                        largest = T.max(largest, x[j])
                top = post.cluster_max(mail, links, 1, rank, lane, warp, largest)
                if edits and top == -T.infinity("float32"):
                    # Nothing but the excluded ids is admitted: they are.
                    for i in T.serial(
                        T.ceildiv(excluded_ends[row + 1] - excluded_ends[row], THREADS)
                    ):
                        at = excluded_ends[row] + i * THREADS + tx
                        if at < excluded_ends[row + 1]:
                            place = excluded_ids[at] - first
                            if place >= 0 and place < size:
                                part[place] = saved[at]
                    T.sync_threads()
                    for i in T.serial(loops):
                        load(part, x, i * STRIDE + tx * 4, 1)
                        for j in T.unroll(4):
                            largest = T.max(largest, x[j])
                    top = post.cluster_max(mail, links, 2, rank, lane, warp, largest)
                is_fine = T.abs(top) <= T.float32(LARGEST)

            # A score is `x * to_log2 - offset`. The offset's rounding is common to all; where it is not small either,
            # the row is shifted.
            offset = T.alloc_var("float32")
            offset = top * to_log2
            if is_fine and heat > 0 and not (T.abs(offset) <= T.float32(256)):
                for i in T.serial(loops):
                    for j in T.vectorized(4):
                        part[i * STRIDE + tx * 4 + j] = part[i * STRIDE + tx * 4 + j] - top
                largest = largest - top
                top = 0.0
                offset = 0.0
            # Depth is `x * to_depth + from_depth`, not negative by rounding.
            to_depth = to_log2 * -4
            from_depth = offset * 4 + T.float32(2.0**-10)

            # 2. What may not be drawn becomes -inf: values below `cut`, and of equal ones the last.
            cut = T.alloc_var("float32", init=-LARGEST)
            has_cut = T.alloc_var("bool")
            has_cut = False
            turn = T.alloc_var("int32", init=0)
            for by_mass in T.serial(2):
                # 0: coarse bins of the depth; 1: fine ones within one of these; 2: bins of the value; 3: of the id;
                # 4: done.
                stage = T.alloc_var("int32")
                stage = 4
                target = T.alloc_var("uint64")
                target = T.uint64(0)
                # Values below `floor` are not worth a look.
                floor = T.alloc_var("float32")
                floor = -LARGEST
                if is_fine and heat > 0:
                    if by_mass == 0:
                        if num_kept > 0 and num_kept < vocab:
                            stage = 0
                            target = T.Cast("uint64", num_kept)
                            if num_kept <= THREADS:
                                # Each of `num_kept` groups of threads has a value from the least of their maxima.
                                for i in T.unroll(5):
                                    if num_kept <= (THREADS >> (i + 1)):
                                        largest = T.max(largest, T.shfl_xor(largest, 1 << i))
                                least = T.warp_reduce_min(largest)
                                if lane == 0:
                                    least_of[warp] = T.reinterpret(least, "uint32")
                                T.sync_threads()
                                least_of_all = T.alloc_var("float32")
                                least_of_all = T.reinterpret(least_of[0], "float32")
                                for i in T.unroll(1, WARPS):
                                    least_of_all = T.min(
                                        least_of_all, T.reinterpret(least_of[i], "float32")
                                    )
                                floor = T.max(floor, least_of_all)
                    else:
                        if top_p[row] < 1:
                            stage = 0
                low = T.alloc_var("uint32")
                high = T.alloc_var("uint32")
                shift = T.alloc_var("uint32")
                coarse = T.alloc_var("float32")
                scale = T.alloc_var("float32")
                fine = T.alloc_var("float32")
                lowest = T.alloc_var("float32")
                highest = T.alloc_var("float32")
                low = T.uint32(0)
                high = T.uint32(0)
                shift = T.uint32(0)
                coarse = 0.0
                scale = 1.0
                fine = 0.0
                lowest = 0.0
                highest = 0.0
                while stage < 4:
                    has_cut = True
                    if stage == 0 and by_mass == 0:
                        steps.count_coarse(part, x, bins, tx, floor, to_depth, from_depth)
                    elif stage == 0:
                        steps.weigh_coarse(part, x, bins, tx, to_depth, from_depth)
                    elif stage == 1:
                        steps.add_fine(part, x, bins, tx, coarse, by_mass, to_depth, from_depth)
                    elif stage == 2:
                        steps.add_values(
                            part,
                            x,
                            bins,
                            tx,
                            lowest,
                            highest,
                            low,
                            high,
                            shift,
                            fine,
                            scale,
                            coarse,
                            by_mass,
                            to_depth,
                            from_depth,
                        )
                    else:
                        steps.count_ids(part, x, bins, tx, first, cut, low, high, shift)
                    T.sync_threads()
                    post.send_histogram(bins, sums, links, turn, tx)
                    total = T.alloc_var("uint64")
                    total = T.uint64(0)
                    raw = T.alloc_var("uint64")
                    raw = T.uint64(0)
                    until = T.alloc_var("uint64")
                    if tx < BINS:
                        raw = sums[turn % 2, tx]
                        # Nobody sends here again before this CTA has sent its next histogram.
                        sums[turn % 2, tx] = T.uint64(0)
                        # Coarse bins of mass have a scale each; a common one is 2^-40 of the likeliest token.
                        total = raw
                        if stage == 0 and by_mass == 1:
                            total = T.call_extern(
                                "uint64",
                                "to_nearest",
                                T.Cast("float64", raw)
                                * T.call_extern("float64", "quarters", 4 * (40 - MASS_BITS) - tx),
                            )
                        until = total
                        for i in T.unroll(5):
                            other = T.shfl_up(until, 1 << i)
                            if lane >= (1 << i):
                                until += other
                        if lane == 31:
                            warp_sums[warp] = until
                    T.sync_threads()
                    whole = T.alloc_var("uint64")
                    whole = T.uint64(0)
                    for i in T.unroll(BINS // 32):
                        if i < warp:
                            until += warp_sums[i]
                        whole += warp_sums[i]
                    if stage == 0 and by_mass == 1:
                        target = T.call_extern(
                            "uint64",
                            "to_above",
                            T.Cast("float64", whole) * T.Cast("float64", top_p[row]),
                        )
                    target = T.max(T.min(target, whole), T.uint64(1))
                    if tx < BINS and until >= target and until - total < target:
                        found[0] = T.Cast("uint64", tx)
                        found[1] = target - (until - total)
                        found[2] = raw
                    turn += 1
                    T.sync_threads()
                    bin = T.Cast("int32", found[0])
                    target = found[1]
                    raw = found[2]
                    if stage == 0:
                        if by_mass == 1:
                            target = T.max(
                                T.uint64(1),
                                T.min(
                                    raw,
                                    T.call_extern(
                                        "uint64",
                                        "to_above",
                                        T.Cast("float64", target)
                                        * T.call_extern(
                                            "float64", "quarters", bin - 4 * (40 - MASS_BITS)
                                        ),
                                    ),
                                ),
                            )
                        coarse = T.Cast("float32", bin)
                        # Margins make up for rounding: membership of the coarse bin is tested as well.
                        width = T.ieee_fdiv(T.float32(0.25), to_log2)
                        margin = ((coarse + 2) * width + T.abs(top)) * T.float32(2.0**-21)
                        highest = T.min(top, top - (coarse - 0.01) * width + margin)
                        lowest = T.max(top - (coarse + 1.01) * width - margin, T.float32(-LARGEST))
                        if bin == BINS - 1:
                            lowest = T.float32(-LARGEST)
                        high = T.call_extern("uint32", "to_key", highest)
                        low = T.call_extern("uint32", "to_key", lowest)
                        stage = 2
                        if bin < BINS - 1:
                            stage = 1
                        scale = 1.0
                        fine = coarse
                    elif stage == 1:
                        scale = 256.0
                        fine = coarse * 256 + T.Cast("float32", bin)
                        width = T.ieee_fdiv(T.float32(0.25 / 256), to_log2)
                        margin = ((fine + 2) * width + T.abs(top)) * T.float32(2.0**-21)
                        # A quarter for the depth's offset of 2^-10, and its rounding.
                        highest = T.min(top, top - (fine - 0.3) * width + margin)
                        lowest = T.max(top - (fine + 0.8) * width - margin, T.float32(-LARGEST))
                        high = T.call_extern("uint32", "to_key", highest)
                        low = T.call_extern("uint32", "to_key", lowest)
                        stage = 2
                    else:
                        if stage == 2:
                            high = high - (T.Cast("uint32", bin) << shift)
                            low = T.max(low, high - ((T.uint32(1) << shift) - T.uint32(1)))
                            highest = T.call_extern("float32", "of_key", high)
                            lowest = T.call_extern("float32", "of_key", low)
                            depth = steps.depth_of(lowest, to_depth, from_depth)
                            # The least that a token of this bin weighs.
                            unit = T.alloc_var("uint64")
                            unit = T.uint64(1)
                            if by_mass == 1:
                                unit = T.Cast(
                                    "uint64", T.call_extern("uint32", "to_mass", depth, coarse)
                                )
                            if target + unit > raw:
                                # The whole bin is kept.
                                cut = lowest
                                if steps.fine_of(depth, scale) > fine:
                                    # The last bin reaches into what comes after its fine bin.
                                    steps.drop_after_fine(
                                        part,
                                        x,
                                        tx,
                                        lowest,
                                        highest,
                                        fine,
                                        scale,
                                        to_depth,
                                        from_depth,
                                    )
                                stage = 4
                            else:
                                if shift == T.uint32(0):
                                    target = T.truncdiv(target + unit - T.uint64(1), unit)
                                    cut = lowest
                                    low = T.uint32(0)
                                    high = T.uint32(vocab - 1)
                                    stage = 3
                        else:
                            low = low + (T.Cast("uint32", bin) << shift)
                            high = T.min(high, low + ((T.uint32(1) << shift) - T.uint32(1)))
                            if shift == T.uint32(0):
                                steps.drop_ids(part, x, tx, first, cut, T.Cast("int32", low))
                                stage = 4
                    # So that 256 bins cover [low, high].
                    bits = T.alloc_var("int32")
                    bits = 24 - T.call_extern("int32", "__clz", T.reinterpret(high - low, "int32"))
                    shift = T.Cast("uint32", T.max(bits, 0))
                if by_mass == 1 and is_fine and heat > 0 and min_p[row] > 0:
                    cut = T.max(cut, top + T.ieee_fdiv(T.log2(min_p[row]), to_log2))
                    has_cut = True
                if has_cut:
                    steps.drop_below(part, x, tx, cut)
                    has_cut = False

            # 3. The draw among them.
            if is_fine:
                best = T.alloc_var("float32", init=-T.infinity("float32"))
                best_score = T.alloc_var("float32", init=-T.infinity("float32"))
                best_id = T.alloc_var("int32", init=NO_ID)
                mass_sum = T.alloc_var("float32", init=0.0)
                is_random = heat > 0
                key_low = T.alloc_var("uint32")
                key_high = T.alloc_var("uint32")
                place_word = T.alloc_var("uint32")
                choice_word = T.alloc_var("uint32")
                key_low = T.Cast("uint32", seed[row])
                key_high = T.Cast("uint32", seed[row] >> T.int64(32))
                place_word = T.Cast("uint32", position[row])
                choice_word = T.Cast("uint32", choice[row])
                # 2^-score that must be exceeded: the likeliest token's noise is above -3.14 = -4.53 ln 2.
                bar = T.alloc_var("float32", init=23.25)
                for i in T.serial(loops // pair):
                    load(part, x, i * pair * STRIDE + tx * 4, pair)
                    base = first + i * pair * STRIDE + tx * 4
                    most = steps.largest_of(x, 4 * pair)
                    if is_random:
                        score = T.alloc_local((4 * pair,), "float32")
                        chance = T.alloc_local((4 * pair,), "float32")
                        has_new = T.alloc_var("int32")
                        has_new = 0
                        if most > -T.infinity("float32"):
                            for j in T.unroll(4 * pair):
                                score[j] = T.call_extern(
                                    "float32", "__fmaf_rn", x[j], to_log2, -offset
                                )
                                chance[j] = T.call_extern("float32", "ex2", score[j])
                                mass_sum += chance[j]
                            likeliest = T.call_extern(
                                "float32",
                                "ex2",
                                T.call_extern("float32", "__fmaf_rn", most, to_log2, -offset),
                            )
                            # 1 - u is at least 2^-33.
                            if likeliest * bar >= T.float32(2.0**-33):
                                for u in T.unroll(pair):
                                    philox(
                                        words,
                                        u * 4,
                                        T.Cast("uint32", (base + u * STRIDE) // 4),
                                        place_word,
                                        choice_word,
                                        key_low,
                                        key_high,
                                    )
                                for j in T.unroll(4 * pair):
                                    if T.call_extern("bool", "may_win", words[j], chance[j], bar):
                                        has_new = 1
                                if has_new != 0:
                                    for j in T.unroll(4 * pair):
                                        if T.call_extern(
                                            "bool", "may_win", words[j], chance[j], bar
                                        ):
                                            noisy = score[j] - T.call_extern(
                                                "float32", "log2_exponential", words[j]
                                            )
                                            if noisy > best:
                                                best = noisy
                                                best_id = base + j // 4 * STRIDE + j % 4
                                                best_score = score[j]
                        if T.any_sync(has_new) != 0:
                            of_warp = T.warp_reduce_max(best)
                            bar = T.min(
                                T.float32(23.25),
                                T.call_extern("float32", "ex2", T.float32(0.001) - of_warp),
                            )
                    elif most == top:
                        for j in T.unroll(4 * pair):
                            if x[j] == top and base + j // 4 * STRIDE + j % 4 < best_id:
                                best_id = base + j // 4 * STRIDE + j % 4
                                best = 0.0
                                best_score = 0.0

                # 4. The best token and the sums: of a warp, of its CTA, of the cluster.
                for level, count in enumerate((32, WARPS, RANKS)):
                    if level == 0 or (warp == 0 and (level == 1 or rank == 0)):
                        if level == 2:
                            T.call_extern("handle", "await", T.address_of(links[3]), 0)
                        if level > 0:
                            raw_sum = post.part_of(ends, level - 1, 0, lane, count, 0.0)
                            mass_sum = post.part_of(ends, level - 1, 1, lane, count, 0.0)
                            best = post.part_of(ends, level - 1, 2, lane, count, -LARGEST)
                            best_score = post.part_of(ends, level - 1, 3, lane, count, -LARGEST)
                            best_id = T.if_then_else(
                                lane < count,
                                T.reinterpret(ends[level - 1, 4, lane % count], "int32"),
                                NO_ID,
                            )
                        raw_sum = T.warp_reduce_sum(raw_sum)
                        mass_sum = T.warp_reduce_sum(mass_sum)
                        most = T.warp_reduce_max(best)
                        best_id = T.if_then_else(best == most, best_id, NO_ID)
                        best = most
                        winner = T.warp_reduce_min(best_id)
                        best_score = T.warp_reduce_max(
                            T.if_then_else(best_id == winner, best_score, T.float32(-LARGEST))
                        )
                        best_id = winner
                        if lane == 0:
                            for slot, word in enumerate(
                                (raw_sum, mass_sum, best, best_score, best_id)
                            ):
                                if level == 0:
                                    ends[0, slot, warp] = T.reinterpret(word, "uint32")
                                if level == 1:
                                    T.call_extern(
                                        "handle",
                                        "send_word",
                                        T.address_of(ends[1, slot, rank]),
                                        0,
                                        T.reinterpret(word, "uint32"),
                                        T.address_of(links[3]),
                                    )
                        if level == 2 and lane == 0:
                            token[row] = best_id
                            logprob[row] = logits[row, best_id] - raw_max - T.log(raw_sum)
                            processed_logprob[row] = T.if_then_else(
                                is_random,
                                (best_score - T.log2(mass_sum)) * T.float32(math.log(2)),
                                T.float32(0),
                            )
                    if level == 0:
                        T.sync_threads()
            else:
                if rank == 0 and tx == 0:
                    token[row] = -1
                    logprob[row] = T.float32(float("nan"))
                    processed_logprob[row] = T.float32(float("nan"))

    return sample


_sample.pass_configs = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}


def sample(logits: Tensor, params: SampleParams) -> Sampled:
    """Draws one token a row; contract of `kernels.ops.sampler.sample`, with fp32 where that has float64.

    Raises:
        ValueError: logits are not contiguous fp32, or the vocabulary is no multiple of 32 or above 131,072; a tensor of
            parameters has another shape or type than its contract says.
    """
    rows, vocab = check_logits(logits)
    _check(params, rows, vocab)
    token = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprob, processed = (torch.empty(rows, device=logits.device) for _ in range(2))
    if not rows:
        return Sampled(token, logprob, processed)
    lists = (params.counts, params.bias, params.excluded)
    edits = any(part is not None for part in lists)
    # Row r of a list that no row has is empty; without any list, the kernel has no code that would look.
    zeros = torch.zeros(rows + 1, dtype=torch.int32, device=logits.device) if edits else token
    ids, amounts = token[:1], logprob[:1]
    counts, bias, excluded = (
        part if part is not None and len(part.ids) else Lists(zeros, ids) for part in lists
    )
    build(_sample, vocab, edits, params.allowed is not None)(
        logits,
        *params[:10],
        counts.ends,
        counts.ids,
        ids if counts.values is None else counts.values,
        bias.ends,
        bias.ids,
        amounts if bias.values is None else bias.values,
        excluded.ends,
        excluded.ids,
        torch.empty(len(excluded.ids), device=logits.device),
        token.new_empty(1, vocab // 32) if params.allowed is None else params.allowed,
        token,
        logprob,
        processed,
    )
    return Sampled(token, logprob, processed)


def _check(params: SampleParams, rows: int, vocab: int) -> None:
    for name, values in zip(params._fields[:10], params[:10], strict=True):
        dtype = {"top_k": torch.int32, "seed": torch.int64, "choice": torch.int32}.get(
            name, torch.int32 if name == "position" else torch.float32
        )
        _check_tensor(name, values, (rows,), dtype)
    kinds: dict[str, torch.dtype | None] = {
        "counts": torch.int32,
        "bias": torch.float32,
        "excluded": None,
    }
    for name, kind in kinds.items():
        part = getattr(params, name)
        if part is not None:
            _check_tensor(f"{name}.ends", part.ends, (rows + 1,), torch.int32)
            _check_tensor(f"{name}.ids", part.ids, (len(part.ids),), torch.int32)
            if kind is not None:
                _check_tensor(f"{name}.values", part.values, (len(part.ids),), kind)
    if params.allowed is not None:
        _check_tensor("allowed", params.allowed, (rows, vocab // 32), torch.int32)


def _check_tensor(
    name: str, values: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if values is None:
        raise ValueError(f"{name} is missing: {dtype} {list(shape)}")
    if values.shape != shape or values.dtype != dtype or not values.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)},"
            f" not {values.dtype} {list(values.shape)}"
        )


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: rows plain, with penalties, bias or exclusions, under a grammar, with both; top tokens."""
    return [
        Variant("sample", _sample, (129280, False, False)),
        Variant("sample.edits", _sample, (129280, True, False)),
        Variant("sample.masked", _sample, (129280, False, True)),
        Variant("sample.edits.masked", _sample, (129280, True, True)),
        *top_variants(),
    ]
