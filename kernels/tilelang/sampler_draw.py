"""The kernel that draws tokens.

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

from flashmesh.kernels.tilelang.sampler_cut import cut_steps
from flashmesh.kernels.tilelang.sampler_device import (
    BINS,
    COPIES,
    LARGEST,
    LOG2_E,
    RANKS,
    SOURCE,
    THREADS,
    WARPS,
)
from flashmesh.kernels.tilelang.sampler_edits import edits_of
from flashmesh.kernels.tilelang.sampler_messages import messages
from flashmesh.kernels.tilelang.sampler_race import BAR, NO_ID, races
from flashmesh.kernels.tilelang.sampler_row import STRIDE, row_part


def draw_rows(vocab: int, edits: bool, masked: bool) -> Any:
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
    held, change, steps, draw = row_part(size), edits_of(size), cut_steps(size), races(size)
    post = messages()
    loops, load, pair = held.loops, held.load, held.pair

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
            part = T.alloc_shared((held.padded,), "float32")
            bins = T.alloc_shared((COPIES, BINS), "uint32")
            sums = T.alloc_shared((2, BINS), "uint64")
            warp_sums = T.alloc_shared((BINS // 32,), "uint64")
            found = T.alloc_shared((3,), "uint64")
            mail = T.alloc_shared((2, RANKS * WARPS), "uint32")
            ends = T.alloc_shared((2, 5, max(RANKS, WARPS)), "uint32")
            least_of = T.alloc_shared((WARPS,), "uint32")
            links = T.alloc_shared((6,), "uint64")
            arrived = T.alloc_barrier([1] * len(held.pieces))
            x = T.alloc_local((4 * pair,), "float32")
            words = T.alloc_local((4 * pair,), "uint32")
            first = rank * size
            here = (row, first, tx)

            if tx == 0:
                post.make_links(links)
            if tx < BINS:
                for i in T.unroll(COPIES):
                    bins[i, tx] = T.uint32(0)
                for i in T.unroll(2):
                    sums[i, tx] = T.uint64(0)

            # 1. The row comes to shared memory; its largest logit, and whether it holds a NaN.
            held.fetch(logits, row, first, part, arrived, tx)
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
            held.take_in(part, x, arrived, tx, largest, raw_sum)
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
            raw_sum *= held.exp(held.finite(of_thread) - raw_max)

            if (edits or masked) and is_fine:
                if edits:
                    change.each_entry(
                        count_ends,
                        count_ids,
                        *here,
                        change.penalize,
                        (part, in_output, repetition, frequency, presence, row),
                    )
                    change.each_entry(bias_ends, bias_ids, *here, change.add_bias, (part, biases))
                if masked:
                    change.mask(part, allowed, *here)
                if edits:
                    change.each_entry(
                        excluded_ends, excluded_ids, *here, change.exclude, (part, saved)
                    )
                largest = -T.infinity("float32")
                held.raise_to_largest(part, x, tx, largest)
                top = post.cluster_max(mail, links, 1, rank, lane, warp, largest)
                if edits and top == -T.infinity("float32"):
                    # Nothing but the excluded ids is admitted: they are.
                    change.each_entry(
                        excluded_ends, excluded_ids, *here, change.admit, (part, saved)
                    )
                    held.raise_to_largest(part, x, tx, largest)
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
                                floor = T.max(
                                    floor,
                                    steps.least_of_groups(least_of, lane, warp, num_kept, largest),
                                )
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
                    # What the thread's bin has, in the unit of all bins and in its own.
                    total = T.alloc_var("uint64")
                    total = T.uint64(0)
                    raw = T.alloc_var("uint64")
                    raw = T.uint64(0)
                    steps.find_bin(
                        sums,
                        warp_sums,
                        found,
                        turn,
                        tx,
                        lane,
                        warp,
                        row,
                        top_p,
                        stage,
                        by_mass,
                        target,
                        total,
                        raw,
                    )
                    turn += 1
                    T.sync_threads()
                    bin = T.Cast("int32", found[0])
                    target = found[1]
                    raw = found[2]
                    if stage == 0:
                        if by_mass == 1:
                            target = T.max(T.uint64(1), T.min(raw, steps.in_bin(target, bin)))
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
                bar = T.alloc_var("float32", init=BAR)
                for i in T.serial(loops // pair):
                    load(part, x, i * pair * STRIDE + tx * 4, pair)
                    base = first + i * pair * STRIDE + tx * 4
                    most = held.largest_of(x, 4 * pair)
                    if is_random:
                        draw.race(
                            x,
                            most,
                            base,
                            words,
                            (place_word, choice_word, key_low, key_high),
                            to_log2,
                            offset,
                            bar,
                            mass_sum,
                            best,
                            best_score,
                            best_id,
                        )
                    elif most == top:
                        for j in T.unroll(4 * pair):
                            if x[j] == top and held.place_of(base, j) < best_id:
                                best_id = held.place_of(base, j)
                                best = 0.0
                                best_score = 0.0

                # 4. The best token and the sums: of a warp, of its CTA, of the cluster.
                for level, count in enumerate((32, WARPS, RANKS)):
                    if level == 0 or (warp == 0 and (level == 1 or rank == 0)):
                        draw.combine(
                            level,
                            count,
                            ends,
                            links,
                            rank,
                            lane,
                            warp,
                            raw_sum,
                            mass_sum,
                            best,
                            best_score,
                            best_id,
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


draw_rows.pass_configs = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}
