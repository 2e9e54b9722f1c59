"""Macros of the search for what may not be drawn: histograms of a CTA's part of a row, the bin at which it is cut.

A thread's elements are its own in all passes, so that it may overwrite them without a barrier. A value's depth is how
far it is below the largest, in quarters of a bit of its probability.
"""

from types import SimpleNamespace
from typing import Any

from flashmesh.kernels.tilelang.sampler_device import (
    BINS,
    COPIES,
    MASS_BITS,
    THREADS,
    WARPS,
)
from flashmesh.kernels.tilelang.sampler_row import STRIDE, row_part

COMMON = 4 * (40 - MASS_BITS)
"""Coarse bins of mass have a unit each: that of bin b is 2^((COMMON - b) / 4) of a common one, which is 2^-40 of the
likeliest token."""


def cut_steps(size: int) -> Any:
    """Returns the macros for CTAs that hold `size` logits each."""
    import tilelang.language as T

    held = row_part(size)
    loops, load, pair, largest_of = held.loops, held.load, held.pair, held.largest_of

    def in_bin(mass, bin):
        """A mass in the common unit, in that of a coarse bin, rounded up."""
        return T.call_extern(
            "uint64",
            "to_above",
            T.Cast("float64", mass) * T.call_extern("float64", "quarters", bin - COMMON),
        )

    @T.macro
    def depth_of(value, to_depth, from_depth):
        return T.call_extern("float32", "__fmaf_rn", value, to_depth, from_depth)

    @T.macro
    def fine_of(depth, scale):
        return T.call_extern("float32", "to_fine", depth, scale, (BINS - 1) * scale)

    @T.macro
    def add(bins, warp, place, weight):
        T.call_extern(
            "uint32",
            "atomicAdd",
            T.address_of(bins[warp % COPIES, place]),
            T.Cast("uint32", weight),
        )

    @T.macro
    def count_coarse(part, x, bins, tx, floor, to_depth, from_depth):
        """Counts the values from `floor` in coarse bins."""
        tail = T.alloc_var("uint32")
        tail = T.uint32(0)
        for i in T.serial(loops // pair):
            load(part, x, i * pair * STRIDE + tx * 4, pair)
            for j in T.unroll(4 * pair):
                if x[j] >= floor:
                    depth = depth_of(x[j], to_depth, from_depth)
                    place = T.call_extern("float32", "to_place", depth)
                    if place == T.float32(BINS - 1):
                        tail += T.uint32(1)
                    else:
                        add(bins, tx // 32, T.call_extern("int32", "of_place", place), T.uint32(1))
        if tail > T.uint32(0):
            add(bins, tx // 32, BINS - 1, tail)

    @T.macro
    def weigh_coarse(part, x, bins, tx, to_depth, from_depth):
        """Sums masses in coarse bins."""
        for i in T.serial(loops // pair):
            load(part, x, i * pair * STRIDE + tx * 4, pair)
            if largest_of(x, 4 * pair) > -T.infinity("float32"):
                for j in T.unroll(4 * pair):
                    depth = depth_of(x[j], to_depth, from_depth)
                    T.call_extern(
                        "handle", "add_mass", T.address_of(bins[tx // 32 % COPIES, 0]), depth
                    )

    @T.macro
    def add_fine(part, x, bins, tx, coarse, by_mass, to_depth, from_depth):
        """Counts or sums in the fine bins of a coarse one."""
        base = T.Cast("uint32", coarse) * T.uint32(256) + T.uint32(0x4B000000)
        exponent = coarse * 0.25 + MASS_BITS
        for i in T.serial(loops // pair):
            load(part, x, i * pair * STRIDE + tx * 4, pair)
            for j in T.unroll(4 * pair):
                T.call_extern(
                    "handle",
                    "add_fine",
                    T.address_of(bins[tx // 32 % COPIES, 0]),
                    depth_of(x[j], to_depth * 256, from_depth * 256),
                    base,
                    exponent,
                    by_mass == 1,
                )

    @T.macro
    def add_values(
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
    ):
        """Counts or sums the values of a fine bin whose keys are in [low, high], in bins of 2^shift keys."""
        # No value of the range is missed, though there may be more.
        middle = lowest * 0.5 + highest * 0.5
        half = (highest * 0.5 - lowest * 0.5) * T.float32(1 + 2.0**-20) + T.abs(middle) * T.float32(
            2.0**-20
        )
        for i in T.serial(loops // pair):
            load(part, x, i * pair * STRIDE + tx * 4, pair)
            some = T.alloc_var("bool")
            some = False
            for j in T.unroll(4 * pair):
                some = T.call_extern("bool", "is_near", x[j], middle, half, some)
            if some:
                for j in T.unroll(4 * pair):
                    key = T.call_extern("uint32", "to_key", x[j])
                    if T.call_extern("bool", "is_between", key, low, high):
                        depth = depth_of(x[j], to_depth, from_depth)
                        if fine_of(depth, scale) == fine:
                            weight = T.alloc_var("uint32")
                            weight = T.uint32(1)
                            if by_mass == 1:
                                weight = T.call_extern("uint32", "to_mass", depth, coarse)
                            add(bins, tx // 32, T.Cast("int32", (high - key) >> shift), weight)

    @T.macro
    def count_ids(part, x, bins, tx, first, cut, low, high, shift):
        """Counts the values equal to `cut` by their ids."""
        for i in T.serial(loops):
            load(part, x, i * STRIDE + tx * 4, 1)
            for j in T.unroll(4):
                id = first + i * STRIDE + tx * 4 + j
                if x[j] == cut and id >= T.Cast("int32", low) and id <= T.Cast("int32", high):
                    add(
                        bins,
                        tx // 32,
                        (id - T.Cast("int32", low)) >> T.Cast("int32", shift),
                        T.uint32(1),
                    )

    @T.macro
    def least_of_groups(least_of, lane, warp, num_kept: T.Ref, largest: T.Ref):
        """Least of the maxima of `num_kept` or more groups of threads: so many values are not below it."""
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
            least_of_all = T.min(least_of_all, T.reinterpret(least_of[i], "float32"))
        return least_of_all

    @T.macro
    def find_bin(
        sums,
        warp_sums,
        found,
        turn: T.Ref,
        tx,
        lane,
        warp,
        row,
        top_p,
        stage: T.Ref,
        by_mass,
        target: T.Ref,
        total: T.Ref,
        raw: T.Ref,
    ):
        """Leaves in `found` the bin that reaches `target`, how much of the bin that takes, and what the bin has."""
        until = T.alloc_var("uint64")
        if tx < BINS:
            raw = sums[turn % 2, tx]
            # Nobody sends here again before this CTA has sent its next histogram.
            sums[turn % 2, tx] = T.uint64(0)
            # Masses in coarse bins are compared in the common unit.
            total = raw
            if stage == 0 and by_mass == 1:
                total = T.call_extern(
                    "uint64",
                    "to_nearest",
                    T.Cast("float64", raw) * T.call_extern("float64", "quarters", COMMON - tx),
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

    @T.macro
    def drop_after_fine(part, x, tx, lowest, highest, fine, scale, to_depth, from_depth):
        """Overwrites what comes after a fine bin in [lowest, highest]."""
        for i in T.serial(loops):
            load(part, x, i * STRIDE + tx * 4, 1)
            for j in T.unroll(4):
                fine_x = fine_of(depth_of(x[j], to_depth, from_depth), scale)
                if x[j] >= lowest and x[j] <= highest and fine_x > fine:
                    part[i * STRIDE + tx * 4 + j] = -T.infinity("float32")

    @T.macro
    def drop_ids(part, x, tx, first, cut, last):
        """Overwrites the values equal to `cut` after the id `last`."""
        for i in T.serial(loops):
            load(part, x, i * STRIDE + tx * 4, 1)
            for j in T.unroll(4):
                if x[j] == cut and first + i * STRIDE + tx * 4 + j > last:
                    part[i * STRIDE + tx * 4 + j] = -T.infinity("float32")

    @T.macro
    def drop_below(part, x, tx, cut):
        for i in T.serial(loops // pair):
            load(part, x, i * pair * STRIDE + tx * 4, pair)
            for j in T.unroll(4 * pair):
                if x[j] < cut:
                    part[held.place_of(i * pair * STRIDE + tx * 4, j)] = -T.infinity("float32")

    return SimpleNamespace(
        least_of_groups=least_of_groups,
        find_bin=find_bin,
        in_bin=in_bin,
        depth_of=depth_of,
        fine_of=fine_of,
        count_coarse=count_coarse,
        weigh_coarse=weigh_coarse,
        add_fine=add_fine,
        add_values=add_values,
        count_ids=count_ids,
        drop_after_fine=drop_after_fine,
        drop_ids=drop_ids,
        drop_below=drop_below,
    )
