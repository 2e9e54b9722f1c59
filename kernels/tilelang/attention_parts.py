"""Steps that both attention kernels consist of, as TileLang macros: a row's bits are the same in both."""

from types import SimpleNamespace

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


def steps(factor: float) -> SimpleNamespace:
    """Returns the macros.

    Args:
        factor: of logits of unscaled queries and keys as they stand in shared memory, for powers of two.
    """
    import tilelang.language as T

    @T.macro
    def load_window(window, index, codes, scales, unit, side, key, piece):
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
    def load_kv(kv, index, codes, scales, unit, key, piece):
        at = T.max(index[key], 0)
        for b in T.unroll(4):
            for v in T.vectorized(4):
                codes[unit, b, v] = kv[at, (b * 4 + piece) * 4 + v]
            scales[unit, b] = kv[at, 64 + b * 2 + piece // 2]

    @T.macro
    def convert_window(codes, scales, values, keys, unit, stage, key, piece):
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
    def convert_kv(codes, scales, values, k_left, k_right, unit, stage, key, piece):
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
    def write_right(right, cos, sin, written, out, row, thread):
        """Turns the right half of a row's heads back and writes it."""
        T.call_extern(
            "handle",
            "fm_turn_back",
            right.data,
            T.access_ptr(cos[row, 0], "r", PAIRS),
            T.access_ptr(sin[row, 0], "r", PAIRS),
            thread,
        )
        T.call_extern(
            "handle",
            "fm_write",
            right.data,
            T.access_ptr(written[1, 0], "w", 2560),
            T.access_ptr(out[row, 0, HALF], "w", HEADS * WIDTH - HALF),
            thread,
        )

    return SimpleNamespace(
        load_window=load_window,
        load_kv=load_kv,
        convert_window=convert_window,
        convert_kv=convert_kv,
        turn_queries=turn_queries,
        score=score,
        weigh_left=weigh_left,
        weigh_right=weigh_right,
        write_right=write_right,
    )
