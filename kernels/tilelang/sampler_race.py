"""Macros of the draw among tokens that may be drawn: the race of noisy scores, and the best token of a row.

A score is that of `sampler_draw`, `x * to_log2 - offset`. `x` holds a thread's values of one step; the first of them is
the token `base`.
"""

from types import SimpleNamespace
from typing import Any

from flashmesh.kernels.tilelang.sampler_device import LARGEST
from flashmesh.kernels.tilelang.sampler_noise import philox_macro
from flashmesh.kernels.tilelang.sampler_row import STRIDE, row_part

NO_ID = 0x7FFFFFFF
BAR = 23.25
"""2^-score that must be exceeded at first: the likeliest token's noise is above -3.14 = -4.53 ln 2."""


def races(size: int) -> Any:
    """Returns the macros for CTAs that hold `size` logits each."""
    import tilelang.language as T

    held = row_part(size)
    pair, count = held.pair, 4 * held.pair
    philox = philox_macro()

    def score_of(value, to_log2, offset):
        return T.call_extern("float32", "__fmaf_rn", value, to_log2, -offset)

    @T.macro
    def race(
        x,
        most,
        base,
        words,
        source,
        to_log2: T.Ref,
        offset: T.Ref,
        bar: T.Ref,
        mass_sum: T.Ref,
        best: T.Ref,
        best_score: T.Ref,
        best_id: T.Ref,
    ):
        """Adds masses to `mass_sum`, and has tokens whose score with noise exceeds `best` take its place.

        Args:
            most: largest value of the step.
            source: of the noise: position, choice, and two words of the seed.
            bar: what is known of the warp's best score, as 2^-score.
        """
        score = T.alloc_local((count,), "float32")
        chance = T.alloc_local((count,), "float32")
        has_new = T.alloc_var("int32")
        has_new = 0
        if most > -T.infinity("float32"):
            for j in T.unroll(count):
                score[j] = score_of(x[j], to_log2, offset)
                chance[j] = T.call_extern("float32", "ex2", score[j])
                mass_sum += chance[j]
            likeliest = T.call_extern("float32", "ex2", score_of(most, to_log2, offset))
            # 1 - u is at least 2^-33.
            if likeliest * bar >= T.float32(2.0**-33):
                for u in T.unroll(pair):
                    philox(words, u * 4, T.Cast("uint32", (base + u * STRIDE) // 4), *source)
                for j in T.unroll(count):
                    if T.call_extern("bool", "may_win", words[j], chance[j], bar):
                        has_new = 1
                if has_new != 0:
                    for j in T.unroll(count):
                        if T.call_extern("bool", "may_win", words[j], chance[j], bar):
                            noisy = score[j] - T.call_extern(
                                "float32", "log2_exponential", words[j]
                            )
                            if noisy > best:
                                best = noisy
                                best_id = held.place_of(base, j)  # noqa: F841 (the caller reads it)
                                best_score = score[j]  # noqa: F841 (likewise)
        if T.any_sync(has_new) != 0:
            of_warp = T.warp_reduce_max(best)
            bar = T.min(T.float32(BAR), T.call_extern("float32", "ex2", T.float32(0.001) - of_warp))

    @T.macro
    def part_of(ends, level, slot, lane, count, absent):
        """What the `lane`-th of `count` warps or CTAs has left."""
        word = T.reinterpret(ends[level, slot, lane % count], "float32")
        return T.if_then_else(lane < count, word, T.float32(absent))

    @T.macro
    def combine(
        level,
        count,
        ends,
        links,
        rank,
        lane,
        warp,
        raw_sum: T.Ref,
        mass_sum: T.Ref,
        best: T.Ref,
        best_score: T.Ref,
        best_id: T.Ref,
    ):
        """The best token and the sums of `count` threads, warps or CTAs (levels 0 to 2), left for the next level."""
        if level == 2:
            T.call_extern("handle", "await", T.address_of(links[3]), 0)
        if level > 0:
            raw_sum = part_of(ends, level - 1, 0, lane, count, 0.0)
            mass_sum = part_of(ends, level - 1, 1, lane, count, 0.0)
            best = part_of(ends, level - 1, 2, lane, count, -LARGEST)
            best_score = part_of(ends, level - 1, 3, lane, count, -LARGEST)
            best_id = T.if_then_else(
                lane < count, T.reinterpret(ends[level - 1, 4, lane % count], "int32"), NO_ID
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
            for slot, word in enumerate((raw_sum, mass_sum, best, best_score, best_id)):
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

    return SimpleNamespace(race=race, combine=combine)
