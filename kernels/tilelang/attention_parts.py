"""Steps that both attention kernels consist of, as TileLang macros: a row's bits are the same in both."""

from types import SimpleNamespace
from typing import Any

HEADS, WIDTH, PAIRS = 64, 512, 32
HALF = WIDTH // 2
BLOCK = 64
"""Keys at a time."""

LOWEST = -(2.0**100)
"""Peak of no logits; minus infinity less itself would not be a number."""

STEADY = 8.0
"""Exponent of two by which logits may pass their peak before it follows."""

# Warpgroups run apart, so their barriers are written out; TileLang's own would stop all of them, or stop too often.
PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_data_race_check": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.enable_fast_math": True,
}


def _key_of(thread: Any) -> Any:
    """Returns the first of a block's two keys that a thread of the third warpgroup takes; the other is eight further.

    Four threads share a key, and take a piece each of its columns.
    """
    return thread // 32 * 16 + thread % 8


def _piece_of(thread: Any) -> Any:
    return thread % 32 // 8


def steps(factor: float) -> SimpleNamespace:
    """Returns the macros.

    Args:
        factor: of logits of unscaled queries and keys as they stand in shared memory, for powers of two.
    """
    import tilelang.language as T

    @T.macro
    def load_window(window, index, codes, scales, unit, side, key, thread):
        piece = _piece_of(thread)
        at = T.max(index[key], 0)
        for b in T.unroll(4):
            for v in T.vectorized(4):
                codes[unit, b, v] = window[at, (side * 4 + b) * 16 + piece * 4 + v]
        for b in T.unroll(2):
            # Where there is no key any row will do whose numbers are finite, since its weights are zeros.
            scales[unit, b] = T.if_then_else(
                index[key] < 0, T.uint32(0), window[at, 128 + side * 2 + b]
            )

    @T.macro
    def load_kv(kv, index, codes, scales, unit, key, thread):
        piece = _piece_of(thread)
        at = T.max(index[key], 0)
        for b in T.unroll(4):
            for v in T.vectorized(4):
                codes[unit, b, v] = kv[at, (b * 4 + piece) * 4 + v]
            scales[unit, b] = kv[at, 64 + b * 2 + piece // 2]

    @T.macro
    def convert_window(codes, scales, values, keys, unit, stage, key, thread):
        piece = _piece_of(thread)
        for b in T.unroll(4):
            shift = T.Cast("uint32", b % 2 * 16 + piece // 2 * 8)
            exponent = (scales[unit, b // 2] >> shift) & T.uint32(255)
            for w in T.unroll(2):
                T.call_extern(
                    "handle",
                    "fm_window_values",
                    T.access_ptr(values[b % 2, w, 0], "w", 8),
                    codes[unit, b, 2 * w],
                    codes[unit, b, 2 * w + 1],
                    exponent,
                )
                for v in T.vectorized(8):
                    keys[stage, key, b * 64 + piece * 16 + w * 8 + v] = values[b % 2, w, v]

    @T.macro
    def convert_kv(codes, scales, values, k_left, k_right, unit, stage, key, thread):
        piece = _piece_of(thread)
        for b in T.unroll(4):
            pair = T.call_extern(
                "uint32", "fm_kv_scales", scales[unit, b] >> T.Cast("uint32", piece % 2 * 16)
            )
            for w in T.unroll(4):
                T.call_extern(
                    "handle",
                    "fm_kv_values",
                    T.access_ptr(values[w // 2, w % 2, 0], "w", 8),
                    codes[unit, b, w],
                    pair,
                    w // 2,
                )
                if b < 2:
                    for v in T.vectorized(8):
                        k_left[stage, key, b * 128 + piece * 32 + w * 8 + v] = values[
                            w // 2, w % 2, v
                        ]
                else:
                    for v in T.vectorized(8):
                        k_right[stage, key, b * 128 - HALF + piece * 32 + w * 8 + v] = values[
                            w // 2, w % 2, v
                        ]

    @T.macro
    def fetch_window(window, index, codes, scales, here, thread):
        """Loads the first numbers of the block of window keys that starts at `here` in `index`."""
        load_window(window, index, codes, scales, 0, 0, here + _key_of(thread), thread)

    @T.macro
    def fetch_kv(kv, index, codes, scales, here, thread):
        load_kv(kv, index, codes, scales, 0, here + _key_of(thread), thread)

    @T.macro
    def begin_window(window, index, codes, scales, values, k_left, k_right, n, here, thread):
        """What the third warpgroup does with block `n`, fetched before, until the next one may be fetched.

        One unit of numbers loads while the other one is converted: unit 0 for left columns, unit 1 for right ones.
        """
        key = _key_of(thread)
        load_window(window, index, codes, scales, 1, 1, here + key, thread)
        convert_window(codes, scales, values, k_left, 0, n % 2, key, thread)
        load_window(window, index, codes, scales, 0, 0, here + key + 8, thread)
        convert_window(codes, scales, values, k_right, 1, n % 2, key, thread)
        load_window(window, index, codes, scales, 1, 1, here + key + 8, thread)
        convert_window(codes, scales, values, k_left, 0, n % 2, key + 8, thread)

    @T.macro
    def end_window(codes, scales, values, k_right, k_ready, n, thread):
        convert_window(codes, scales, values, k_right, 1, n % 2, _key_of(thread) + 8, thread)
        T.fence_proxy_async()
        T.barrier_arrive(k_ready[n % 2])

    @T.macro
    def begin_kv(kv, index, codes, scales, values, k_left, k_right, n, here, thread):
        """The same for selected keys: unit 0 is for the first of a thread's keys, unit 1 for the second."""
        key = _key_of(thread)
        load_kv(kv, index, codes, scales, 1, here + key + 8, thread)
        convert_kv(codes, scales, values, k_left, k_right, 0, n % 2, key, thread)

    @T.macro
    def end_kv(codes, scales, values, k_left, k_right, k_ready, n, thread):
        convert_kv(codes, scales, values, k_left, k_right, 1, n % 2, _key_of(thread) + 8, thread)
        T.fence_proxy_async()
        T.barrier_arrive(k_ready[n % 2])

    @T.macro
    def turn_queries(q_right, pair, cos, sin, row, thread, threads):
        c = cos[row, thread % PAIRS]
        s = sin[row, thread % PAIRS]
        column = HALF - 2 * PAIRS + thread % PAIRS * 2
        for i in T.unroll(HEADS * PAIRS // threads):
            for v in T.vectorized(2):
                pair[v] = q_right[i * (threads // PAIRS) + thread // PAIRS, column + v]
            x = T.Cast("float32", pair[0])
            y = T.Cast("float32", pair[1])
            pair[0] = T.Cast("bfloat16", x * c - y * s)
            pair[1] = T.Cast("bfloat16", x * s + y * c)
            for v in T.vectorized(2):
                q_right[i * (threads // PAIRS) + thread // PAIRS, column + v] = pair[v]

    @T.macro
    def score(q_left, q_right, k_left, k_right, stage, index, first, thread, scores):
        T.wgmma_gemm(q_left, k_left[stage, :, :], scores, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(q_right, k_right[stage, :, :], scores, transpose_B=True)
        some_absent = T.any_sync(
            (index[first + thread % 32] < 0) | (index[first + 32 + thread % 32] < 0)
        )
        T.wait_wgmma(0)
        if some_absent != 0:
            for h, n in T.Parallel(HEADS, BLOCK):
                if index[first + n] < 0:
                    scores[h, n] = -T.infinity("float32")

    @T.macro
    def weights_of(scores, highest, peak, decay, rounded):
        # A peak stays until one is 2^8 times it: weights then are up to 2^8, and sums need no decay most of the time.
        T.reduce_max(scores, highest, dim=1)
        for h in T.Parallel(HEADS):
            highest[h] = T.if_then_else(highest[h] > peak[h] + STEADY / factor, highest[h], peak[h])
            decay[h] = T.exp2((peak[h] - highest[h]) * factor)
            peak[h] = highest[h]
        for h, n in T.Parallel(HEADS, BLOCK):
            scores[h, n] = T.exp2(scores[h, n] * factor - peak[h] * factor)
        T.copy(scores, rounded)

    @T.macro
    def weigh(weights, keys, stage, decay, sums):
        if T.call_extern("int32", "fm_decays", decay.data) != 0:
            for h, d in T.Parallel(HEADS, HALF):
                sums[h, d] *= decay[h]
        T.wgmma_gemm(weights, keys[stage, :, :], sums)

    @T.macro
    def count(scores, added, decay, total):
        T.reduce_sum(scores, added, dim=1)
        for h in T.Parallel(HEADS):
            total[h] = total[h] * decay[h] + added[h]

    @T.macro
    def weigh_left(
        scores,
        highest,
        peak,
        decay,
        rounded,
        added,
        total,
        weights,
        decays,
        weights_free,
        weights_ready,
        keys,
        keys_free,
        n,
        sums,
    ):
        """What the first warpgroup does with the scores of block `n` of keys: it makes weights for both."""
        weights_of(scores, highest, peak, decay, rounded)
        T.barrier_wait(weights_free, n % 2 ^ 1)
        T.copy(rounded, weights)
        T.copy(decay, decays)
        T.fence_proxy_async()
        T.barrier_arrive(weights_ready)
        weigh(rounded, keys, n % 2, decay, sums)
        count(scores, added, decay, total)
        T.wait_wgmma(0)
        T.barrier_arrive(keys_free[n % 2])

    @T.macro
    def weigh_right(weights, decays, decay, weights_ready, weights_free, keys, keys_free, n, sums):
        """What the second warpgroup does with them: it takes the weights that the first one made."""
        T.barrier_wait(weights_ready, n % 2)
        T.copy(decays, decay)
        weigh(weights, keys, n % 2, decay, sums)
        T.wait_wgmma(0)
        T.barrier_arrive(weights_free)
        T.barrier_arrive(keys_free[n % 2])

    @T.macro
    def find_shares(shares, peaks, totals, sink, halves, thread):
        """Finds what the sums of each half of a row's keys count for in its output."""
        T.call_extern(
            "handle",
            "fm_shares",
            T.access_ptr(shares, "w"),
            T.access_ptr(peaks, "r"),
            T.access_ptr(totals, "r"),
            T.access_ptr(sink, "r"),
            T.float32(factor),
            halves,
            thread,
        )

    @T.macro
    def merge(sums, half, halves, others, shares, thread):
        """Weighs the sums of `half` and adds those of the other half, if there is one."""
        T.call_extern(
            "handle",
            "fm_weigh",
            sums.data,
            T.access_ptr(shares[half * HEADS], "r", HEADS),
            thread,
        )
        if halves == 2:
            T.call_extern(
                "handle",
                "fm_merge",
                sums.data,
                T.access_ptr(others, "r"),
                T.access_ptr(shares[(1 - half) * HEADS], "r", HEADS),
                thread,
            )

    @T.macro
    def turn_back(right, cos, sin, row, thread):
        T.call_extern(
            "handle",
            "fm_turn_back",
            right.data,
            T.access_ptr(cos[row, 0], "r", PAIRS),
            T.access_ptr(sin[row, 0], "r", PAIRS),
            thread,
        )

    @T.macro
    def write(sums, side, written, out, row, thread):
        """Writes left (side 0) or right (side 1) columns of a row's heads."""
        T.call_extern(
            "handle",
            "fm_write",
            sums.data,
            T.access_ptr(written[side, 0], "w", 2560),
            T.access_ptr(out[row, 0, side * HALF], "w", HEADS * WIDTH - side * HALF),
            thread,
        )

    return SimpleNamespace(
        fetch_window=fetch_window,
        fetch_kv=fetch_kv,
        begin_window=begin_window,
        end_window=end_window,
        begin_kv=begin_kv,
        end_kv=end_kv,
        turn_queries=turn_queries,
        score=score,
        weigh_left=weigh_left,
        weigh_right=weigh_right,
        find_shares=find_shares,
        merge=merge,
        turn_back=turn_back,
        write=write,
    )
