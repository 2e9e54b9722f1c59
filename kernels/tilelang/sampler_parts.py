"""Macros of the kernel that draws: passes of a CTA over its part of a row, and what the CTAs of a cluster send.

In all passes a thread has the same elements, so that it may overwrite them without a barrier. `x` is its registers for
one step of a pass. A value's depth is how far it is below the largest, in quarters of a bit of its probability.
"""

from types import SimpleNamespace
from typing import Any

from flashmesh.kernels.tilelang.sampler_device import BINS, COPIES, MASS_BITS, RANKS, THREADS, WARPS

STRIDE = THREADS * 4
READS = RANKS * WARPS // 32


def passes(loops: int) -> Any:
    """Returns the macros of passes of `loops` steps."""
    import tilelang.language as T

    pair = 2 if loops % 2 == 0 else 1

    @T.macro
    def load(part, x, at, count):
        for u in T.unroll(count):
            for j in T.vectorized(4):
                x[u * 4 + j] = part[at + u * STRIDE + j]

    @T.macro
    def largest_of(x, count):
        most = T.alloc_var("float32")
        most = x[0]
        for j in T.unroll(1, count):
            most = T.max(most, x[j])
        return most

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
                    part[(i * pair + j // 4) * STRIDE + tx * 4 + j % 4] = -T.infinity("float32")

    return SimpleNamespace(
        pair=pair,
        load=load,
        largest_of=largest_of,
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


def messages() -> Any:
    """Returns the macros of what CTAs send: `links` are barriers, one for each kind of message."""
    import tilelang.language as T

    @T.macro
    def make_links(links):
        """By one thread. Links 0 to 2 bring maxima, 3 what rank 0 needs in the end, 4 and 5 histograms."""
        for i in T.unroll(6):
            T.call_extern("handle", "make_barrier", T.address_of(links[i]))
        T.call_extern("handle", "tl::fence_barrier_init")
        for i in T.unroll(3):
            T.call_extern("handle", "expect", T.address_of(links[i]), 4 * RANKS * WARPS)
        T.call_extern("handle", "expect", T.address_of(links[3]), 20 * RANKS)
        for i in T.unroll(2):
            T.call_extern("handle", "expect", T.address_of(links[4 + i]), 8 * RANKS * BINS)

    @T.macro
    def cluster_max(mail, links, link, rank, lane, warp, value):
        """Largest value of the cluster's threads."""
        of_warp = T.warp_reduce_max(value)
        if lane < RANKS:
            T.call_extern(
                "handle",
                "send_word",
                T.address_of(mail[link % 2, rank * WARPS + warp]),
                lane,
                T.reinterpret(of_warp, "uint32"),
                T.address_of(links[link]),
            )
        T.call_extern("handle", "await", T.address_of(links[link]), 0)
        most = T.alloc_var("float32")
        most = -T.infinity("float32")
        for i in T.unroll(READS):
            most = T.max(most, T.reinterpret(mail[link % 2, i * 32 + lane], "float32"))
        return T.warp_reduce_max(most)

    @T.macro
    def send_histogram(bins, sums, links, turn, tx):
        """Adds a CTA's bins to the sums of all CTAs, empties them, and waits for what the others add."""
        total = T.alloc_var("uint64")
        total = T.uint64(0)
        if tx < BINS:
            for i in T.unroll(COPIES):
                total += T.Cast("uint64", bins[i, tx])
                bins[i, tx] = T.uint32(0)
            for i in T.unroll(RANKS):
                T.call_extern(
                    "handle",
                    "send_sum",
                    T.address_of(sums[turn % 2, tx]),
                    i,
                    total,
                    T.address_of(links[4 + turn % 2]),
                )
        T.call_extern("handle", "await", T.address_of(links[4 + turn % 2]), turn // 2 % 2)
        if tx == 0:
            T.call_extern("handle", "expect", T.address_of(links[4 + turn % 2]), 8 * RANKS * BINS)

    @T.macro
    def part_of(ends, level, slot, lane, count, absent):
        """What the `lane`-th of `count` warps or CTAs has left."""
        word = T.reinterpret(ends[level, slot, lane % count], "float32")
        return T.if_then_else(lane < count, word, T.float32(absent))

    return SimpleNamespace(
        make_links=make_links,
        cluster_max=cluster_max,
        send_histogram=send_histogram,
        part_of=part_of,
    )
