"""Sparse attention for few rows: two blocks of threads share a row, each with half of its keys.

They are a cluster: as they end, one sends its sums of the left columns to the other and gets those of the right ones,
and each finishes its own. A row without selected keys has one block.
"""

from typing import Any

from flashmesh.kernels.tilelang.attention_device import SOURCE
from flashmesh.kernels.tilelang.attention_parts import (
    BLOCK,
    HALF,
    HEADS,
    LOWEST,
    PAIRS,
    PASS_CONFIGS,
    WIDTH,
    steps,
)


def attend_rows(num_window: int, num_selected: int, halves: int, factor: float) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    num_window_rows = T.dynamic("num_window_rows")
    num_kv_rows = T.dynamic("num_kv_rows")
    per_row = (num_window + num_selected) // BLOCK
    first_half = -(-per_row // halves)
    do = steps(factor)

    @T.prim_func
    def attend(
        q: T.Tensor((num_rows, HEADS, WIDTH), "bfloat16"),
        cos: T.Tensor((num_rows, PAIRS), "float32"),
        sin: T.Tensor((num_rows, PAIRS), "float32"),
        window: T.Tensor((num_window_rows, 132), "uint32"),
        window_index: T.Tensor((num_rows, num_window), "int32"),
        kv: T.Tensor((num_kv_rows, 72), "uint32"),
        kv_index: T.Tensor((num_rows, num_selected), "int32"),
        sink: T.Tensor((HEADS,), "float32"),
        out: T.Tensor((num_rows, HEADS, WIDTH), "bfloat16"),
    ):
        with T.Kernel(
            halves, num_rows, threads=384, cluster_dims=(halves, 1, 1), prelude=SOURCE
        ) as (half, row):
            q_left = T.alloc_shared((HEADS, HALF), "bfloat16")
            q_right = T.alloc_shared((HEADS, HALF), "bfloat16")
            k_left = T.alloc_shared((2, BLOCK, HALF), "bfloat16")
            k_right = T.alloc_shared((2, BLOCK, HALF), "bfloat16")
            weights = T.alloc_shared((HEADS, BLOCK), "bfloat16")
            written = T.alloc_shared((2, 2560), "bfloat16")
            index = T.alloc_shared((first_half * BLOCK,), "int32")
            decays = T.alloc_shared((HEADS,), "float32")
            peaks = T.alloc_shared((2, HEADS), "float32")
            totals = T.alloc_shared((2, HEADS), "float32")
            shares = T.alloc_shared((2 * HEADS,), "float32")

            left = T.alloc_fragment((HEADS, HALF), "float32")
            right = T.alloc_fragment((HEADS, HALF), "float32")
            scores = T.alloc_fragment((HEADS, BLOCK), "float32")
            rounded = T.alloc_fragment((HEADS, BLOCK), "bfloat16")
            peak = T.alloc_fragment((HEADS,), "float32")
            highest = T.alloc_fragment((HEADS,), "float32")
            decay = T.alloc_fragment((HEADS,), "float32")
            total = T.alloc_fragment((HEADS,), "float32")
            added = T.alloc_fragment((HEADS,), "float32")
            decay_right = T.alloc_fragment((HEADS,), "float32")
            codes = T.alloc_local((2, 4, 4), "uint32")
            scales = T.alloc_local((2, 4), "uint32")
            values = T.alloc_local((2, 2, 8), "bfloat16")
            pair = T.alloc_local((2,), "bfloat16")

            q_loaded = T.alloc_barrier([128, 128])
            q_ready = T.alloc_barrier(128)
            k_ready = T.alloc_barrier([128, 128])
            k_free = T.alloc_barrier([256, 256])
            weights_ready = T.alloc_barrier(128)
            weights_free = T.alloc_barrier(128)

            t = T.get_thread_binding()
            first = half * first_half
            blocks = T.min(first_half, per_row - first)
            # Half 0 finishes the left columns, the last half the right ones.

            if t < 128:
                T.set_max_nreg(224, 1)
                T.tma_copy(q[row, :, 0:HALF], q_left, barrier=q_loaded[0])
                T.barrier_arrive(q_loaded[0])
                T.fill(left, 0)
                T.fill(total, 0)
                T.fill(peak, LOWEST)
                T.barrier_wait(q_loaded[0], 0)
                T.barrier_wait(q_ready, 0)
                for i in T.serial(blocks):
                    T.barrier_wait(k_ready[i % 2], i // 2 % 2)
                    do.score(q_left, q_right, k_left, k_right, i % 2, index, i * BLOCK, t, scores)
                    do.weigh_left(
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
                        k_left,
                        k_free,
                        i,
                        left,
                    )
                T.copy(peak, peaks[half, :])
                T.copy(total, totals[half, :])
                T.cluster_sync()
                if half == 0:
                    if halves == 2:
                        T.call_extern(
                            "handle", "fm_fetch", T.access_ptr(peaks[1, 0], "w", 64), 1, t
                        )
                        T.call_extern(
                            "handle", "fm_fetch", T.access_ptr(totals[1, 0], "w", 64), 1, t
                        )
                    do.find_shares(shares, peaks, totals, sink, halves, t)
                else:
                    T.call_extern("handle", "fm_send", left.data, T.access_ptr(k_left, "w"), 0, t)
                T.cluster_sync()
                if half == 0:
                    do.merge(left, 0, halves, k_left, shares, t)
                    do.write(left, 0, written, out, row, t)
            elif t < 256:
                T.set_max_nreg(168, 1)
                T.tma_copy(q[row, :, HALF:WIDTH], q_right, barrier=q_loaded[1])
                T.barrier_arrive(q_loaded[1])
                T.fill(right, 0)
                T.barrier_wait(q_loaded[1], 0)
                do.turn_queries(q_right, pair, cos, sin, row, t - 128, 128)
                T.fence_proxy_async()
                T.barrier_arrive(q_ready)
                for i in T.serial(blocks):
                    do.weigh_right(
                        weights,
                        decays,
                        decay_right,
                        weights_ready,
                        weights_free,
                        k_right,
                        k_free,
                        i,
                        right,
                    )
                T.cluster_sync()
                if half == halves - 1:
                    if halves == 2:
                        T.call_extern("handle", "fm_fetch", T.access_ptr(peaks, "w"), 0, t - 128)
                        T.call_extern("handle", "fm_fetch", T.access_ptr(totals, "w"), 0, t - 128)
                        do.find_shares(shares, peaks, totals, sink, halves, t - 128)
                else:
                    T.call_extern(
                        "handle", "fm_send", right.data, T.access_ptr(k_right, "w"), 1, t - 128
                    )
                T.cluster_sync()
                if half == halves - 1:
                    do.merge(right, halves - 1, halves, k_right, shares, t - 128)
                    do.turn_back(right, cos, sin, row, t - 128)
                    do.write(right, 1, written, out, row, t - 128)
            else:
                T.set_max_nreg(104, 0)
                for j in T.unroll(-(-first_half // 2)):
                    n = j * 128 + t - 256
                    if n < blocks * BLOCK:
                        if first * BLOCK + n < num_window:
                            index[n] = window_index[row, first * BLOCK + n]
                        else:
                            index[n] = kv_index[row, first * BLOCK + n - num_window]
                T.sync_threads(5, 128)
                window_blocks = T.max(0, T.min(blocks, num_window // BLOCK - first))
                if window_blocks > 0:
                    do.fetch_window(window, index, codes, scales, 0, t - 256)
                else:
                    do.fetch_kv(kv, index, codes, scales, 0, t - 256)
                for i in T.serial(window_blocks):
                    here = i * BLOCK
                    T.barrier_wait(k_free[i % 2], i // 2 % 2 ^ 1)
                    do.begin_window(
                        window, index, codes, scales, values, k_left, k_right, i, here, t - 256
                    )
                    if i + 1 < window_blocks:
                        do.fetch_window(window, index, codes, scales, here + BLOCK, t - 256)
                    elif i + 1 < blocks:
                        do.fetch_kv(kv, index, codes, scales, here + BLOCK, t - 256)
                    do.end_window(codes, scales, values, k_right, k_ready, i, t - 256)
                for j in T.serial(blocks - window_blocks):
                    i = window_blocks + j
                    here = i * BLOCK
                    T.barrier_wait(k_free[i % 2], i // 2 % 2 ^ 1)
                    do.begin_kv(kv, index, codes, scales, values, k_left, k_right, i, here, t - 256)
                    if i + 1 < blocks:
                        do.fetch_kv(kv, index, codes, scales, here + BLOCK, t - 256)
                    do.end_kv(codes, scales, values, k_left, k_right, k_ready, i, t - 256)
                T.cluster_sync()
                T.cluster_sync()

    return attend


attend_rows.pass_configs = PASS_CONFIGS
