"""Sparse attention for many rows: a block of threads an SM, which goes from row to row.

Keys and queries of the next row are fetched as a row ends. Where `attention_step` gives halves of a row's keys to two
blocks, this one does them in turn, and keeps the first half's sums in memory meanwhile; they stay in the L2 cache.
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

KEPT = 2 * 128 * 128
"""Floats that a block keeps of a row's first half."""


def attend_rows(
    num_window: int, num_selected: int, halves: int, factor: float, num_blocks: int
) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    num_window_rows = T.dynamic("num_window_rows")
    num_kv_rows = T.dynamic("num_kv_rows")
    num_keys = num_window + num_selected
    per_row = num_keys // BLOCK
    first_half = -(-per_row // halves)
    window_blocks = num_window // BLOCK
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
        kept: T.Tensor((num_blocks, 2, KEPT // 2), "float32"),
        out: T.Tensor((num_rows, HEADS, WIDTH), "bfloat16"),
    ):
        with T.Kernel(num_blocks, threads=384, prelude=SOURCE) as sm:
            q_left = T.alloc_shared((HEADS, HALF), "bfloat16")
            q_right = T.alloc_shared((HEADS, HALF), "bfloat16")
            k_left = T.alloc_shared((2, BLOCK, HALF), "bfloat16")
            k_right = T.alloc_shared((2, BLOCK, HALF), "bfloat16")
            weights = T.alloc_shared((HEADS, BLOCK), "bfloat16")
            written = T.alloc_shared((2, 2560), "bfloat16")
            index = T.alloc_shared((3 * num_keys,), "int32")
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
            next_index = T.alloc_local((-(-num_keys // 128),), "int32")

            q_loaded = T.alloc_barrier(128)
            q_ready = T.alloc_barrier(128)
            q_free = T.alloc_barrier(128)
            k_ready = T.alloc_barrier([128, 128])
            k_free = T.alloc_barrier([256, 256])
            weights_ready = T.alloc_barrier(128)
            weights_free = T.alloc_barrier(128)
            shares_ready = T.alloc_barrier(128)

            t = T.get_thread_binding()
            own_rows = (num_rows - sm + num_blocks - 1) // num_blocks

            if t < 128:
                T.set_max_nreg(224, 1)
                for turn in T.serial(own_rows):
                    row = turn * num_blocks + sm
                    T.barrier_wait(q_ready, turn % 2)
                    for half in T.unroll(halves):
                        T.fill(left, 0)
                        T.fill(total, 0)
                        T.fill(peak, LOWEST)
                        for j in T.serial(first_half if half == 0 else per_row - first_half):
                            i = half * first_half + j
                            n = turn * per_row + i
                            T.barrier_wait(k_ready[n % 2], n // 2 % 2)
                            do.score(
                                q_left,
                                q_right,
                                k_left,
                                k_right,
                                n % 2,
                                index,
                                turn % 3 * num_keys + i * BLOCK,
                                t,
                                scores,
                            )
                            if i == per_row - 1:
                                T.barrier_arrive(q_free)
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
                                n,
                                left,
                            )
                        T.copy(peak, peaks[half, :])
                        T.copy(total, totals[half, :])
                        if half == 0 and halves == 2:
                            T.call_extern(
                                "handle",
                                "fm_keep",
                                left.data,
                                T.access_ptr(kept[sm, 0, 0], "w", KEPT // 2),
                                t,
                            )
                    T.sync_threads(3, 128)
                    do.find_shares(shares, peaks, totals, sink, halves, t)
                    T.barrier_arrive(shares_ready)
                    T.barrier_wait(shares_ready, turn % 2)
                    if halves == 2:
                        T.call_extern(
                            "handle",
                            "fm_merge_into_kept",
                            left.data,
                            T.access_ptr(kept[sm, 0, 0], "r", KEPT // 2),
                            T.access_ptr(shares, "r"),
                            t,
                        )
                    else:
                        T.call_extern(
                            "handle",
                            "fm_weigh",
                            left.data,
                            T.access_ptr(shares, "r"),
                            t,
                        )
                    do.write(left, 0, written, out, row, t)
            elif t < 256:
                T.set_max_nreg(168, 1)
                for turn in T.serial(own_rows):
                    row = turn * num_blocks + sm
                    for half in T.unroll(halves):
                        T.fill(right, 0)
                        for j in T.serial(first_half if half == 0 else per_row - first_half):
                            n = turn * per_row + half * first_half + j
                            do.weigh_right(
                                weights,
                                decays,
                                decay_right,
                                weights_ready,
                                weights_free,
                                k_right,
                                k_free,
                                n,
                                right,
                            )
                        if half == 0 and halves == 2:
                            T.call_extern(
                                "handle",
                                "fm_keep",
                                right.data,
                                T.access_ptr(kept[sm, 1, 0], "w", KEPT // 2),
                                t - 128,
                            )
                    T.barrier_wait(shares_ready, turn % 2)
                    do.merge(right, halves - 1, halves, kept[sm, 1, :], shares, t - 128)
                    do.turn_back(right, cos, sin, row, t - 128)
                    do.write(right, 1, written, out, row, t - 128)
            else:
                T.set_max_nreg(104, 0)
                if own_rows > 0:
                    for j in T.unroll(-(-num_keys // 128)):
                        key = j * 128 + t - 256
                        if key < num_window:
                            index[key] = window_index[sm, key]
                        elif key < num_keys:
                            index[key] = kv_index[sm, key - num_window]
                    T.tma_copy(q[sm, :, 0:HALF], q_left, barrier=q_loaded[0])
                    T.tma_copy(q[sm, :, HALF:WIDTH], q_right, barrier=q_loaded[0])
                    T.barrier_arrive(q_loaded[0])
                    T.sync_threads(5, 128)
                    do.fetch_window(window, index, codes, scales, 0, t - 256)
                for turn in T.serial(own_rows):
                    row = turn * num_blocks + sm
                    after = row + num_blocks
                    this = turn % 3 * num_keys
                    other = (turn + 1) % 3 * num_keys
                    if after < num_rows:
                        for j in T.unroll(-(-num_keys // 128)):
                            key = j * 128 + t - 256
                            if key < num_window:
                                next_index[j] = window_index[after, key]
                            elif key < num_keys:
                                next_index[j] = kv_index[after, key - num_window]
                    for i in T.serial(window_blocks):
                        n = turn * per_row + i
                        T.barrier_wait(k_free[n % 2], n // 2 % 2 ^ 1)
                        here = this + i * BLOCK
                        do.begin_window(
                            window, index, codes, scales, values, k_left, k_right, n, here, t - 256
                        )
                        if i + 1 < window_blocks:
                            do.fetch_window(window, index, codes, scales, here + BLOCK, t - 256)
                        elif num_selected > 0:
                            do.fetch_kv(kv, index, codes, scales, here + BLOCK, t - 256)
                        elif after < num_rows:
                            do.fetch_window(window, index, codes, scales, other, t - 256)
                        do.end_window(codes, scales, values, k_right, k_ready, n, t - 256)
                        if i == 0:
                            # By now no one needs the row before the last one: this one's first keys have replaced
                            # keys of the last one.
                            if after < num_rows:
                                for j in T.unroll(-(-num_keys // 128)):
                                    if j * 128 + t - 256 < num_keys:
                                        index[other + j * 128 + t - 256] = next_index[j]
                            T.sync_threads(5, 128)
                            if turn > 0:
                                T.barrier_wait(q_free, (turn - 1) % 2)
                                T.tma_copy(q[row, :, 0:HALF], q_left, barrier=q_loaded[0])
                                T.tma_copy(q[row, :, HALF:WIDTH], q_right, barrier=q_loaded[0])
                                T.barrier_arrive(q_loaded[0])
                        if i == 1:
                            T.barrier_wait(q_loaded, turn % 2)
                            do.turn_queries(q_right, pair, cos, sin, row, t - 256, 128)
                            T.fence_proxy_async()
                            T.barrier_arrive(q_ready)
                    for i in T.serial(num_selected // BLOCK):
                        n = turn * per_row + window_blocks + i
                        T.barrier_wait(k_free[n % 2], n // 2 % 2 ^ 1)
                        here = this + num_window + i * BLOCK
                        do.begin_kv(
                            kv, index, codes, scales, values, k_left, k_right, n, here, t - 256
                        )
                        if i + 1 < num_selected // BLOCK:
                            do.fetch_kv(kv, index, codes, scales, here + BLOCK, t - 256)
                        elif after < num_rows:
                            do.fetch_window(window, index, codes, scales, other, t - 256)
                        do.end_kv(codes, scales, values, k_left, k_right, k_ready, n, t - 256)

    return attend


attend_rows.pass_configs = PASS_CONFIGS
