"""What follows the sums over the streams, row by row: coefficients by Sinkhorn, and the collapsed row's norm.

The kernels that make the sums, and all wrappers, are in `mixing`.
"""

import functools
from types import SimpleNamespace
from typing import Any

from flashmesh.kernels.tilelang.row_parts import parts

CHUNKS = 8
SUMS = 32
"""Numbers of a row and part: 24 products, squares of the streams, squares of the collapsed row; padded to 128 bytes."""


@functools.cache
def _coefficient_parts() -> SimpleNamespace:
    import tilelang.language as T

    @T.macro
    def sigmoid(z, out):
        out[0] = T.fast_rcp(1.0 + T.exp(-z))

    @T.macro
    def sinkhorn(c, iters, eps):
        """Turns logits c[0..15] into a nearly doubly stochastic matrix.

        The matrix is r_i K_ij c_j throughout with K from the row softmax, so an iteration only moves r and c: dividing
        by a row's sum plus eps makes r_i = 1 / (sum over j of K_ij c_j + eps / r_i).
        """
        row = T.alloc_local((4,), "float32")
        column = T.alloc_local((4,), "float32")
        row_inverse = T.alloc_local((4,), "float32")
        column_inverse = T.alloc_local((4,), "float32")
        for i in T.unroll(4):
            row[0] = T.max(T.max(c[4 * i], c[4 * i + 1]), T.max(c[4 * i + 2], c[4 * i + 3]))
            for j in T.unroll(4):
                c[4 * i + j] = T.exp(c[4 * i + j] - row[0])
            row[0] = T.fast_rcp((c[4 * i] + c[4 * i + 1]) + (c[4 * i + 2] + c[4 * i + 3]))
            for j in T.unroll(4):
                c[4 * i + j] = T.ieee_fmaf(c[4 * i + j], row[0], eps)
        for i in T.unroll(4):
            row[i] = 1.0
            column[i] = 1.0
            row_inverse[i] = 1.0
            column_inverse[i] = 1.0
        for k in T.serial(iters):
            if k > 0:
                for i in T.unroll(4):
                    row_inverse[i] *= eps
                    for j in T.unroll(4):
                        row_inverse[i] = T.ieee_fmaf(c[4 * i + j], column[j], row_inverse[i])
                    row[i] = T.fast_rcp(row_inverse[i])
            for j in T.unroll(4):
                column_inverse[j] *= eps
                for i in T.unroll(4):
                    column_inverse[j] = T.ieee_fmaf(c[4 * i + j], row[i], column_inverse[j])
                column[j] = T.fast_rcp(column_inverse[j])
        for i in T.unroll(4):
            for j in T.unroll(4):
                c[4 * i + j] = T.ieee_mul(T.ieee_mul(c[4 * i + j], row[i]), column[j])

    return SimpleNamespace(sigmoid=sigmoid, sinkhorn=sinkhorn)


def coefficient_rows(width: int, iters: int) -> Any:
    """Second kernel of many rows: a thread takes a row's chunks."""
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    threads = 64
    q = _coefficient_parts()

    @T.prim_func
    def coefficients(
        partial: T.Tensor((num_rows, CHUNKS, SUMS), "float32"),
        base: T.Tensor((24,), "float32"),
        scale: T.Tensor((3,), "float32"),
        eps: T.float32,
        pre: T.Tensor((num_rows, 4), "float32"),
        post: T.Tensor((num_rows, 4), "float32"),
        comb: T.Tensor((num_rows, 16), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_rows, threads), threads=threads) as block:
            row = block * threads + T.get_thread_binding()
            total = T.alloc_local((28,), "float32")
            some = T.alloc_local((4,), "float32")
            out = T.alloc_local((1,), "float32")
            c = T.alloc_local((16,), "float32")
            if row < num_rows:
                for k in T.unroll(CHUNKS):
                    for v in T.unroll(7):
                        for i in T.vectorized(4):
                            some[i] = partial[row, k, v * 4 + i]
                        for i in T.unroll(4):
                            if k == 0:
                                total[v * 4 + i] = some[i]
                            else:
                                total[v * 4 + i] += some[i]
                total[24] = T.rsqrt(total[24] / T.float32(4 * width) + 1e-20)
                for i in T.unroll(24):
                    total[i] = T.ieee_fmaf(
                        T.ieee_mul(total[i], total[24]), scale[T.min(i // 4, 2)], base[i]
                    )
                for i in T.unroll(4):
                    q.sigmoid(total[i], out)
                    some[i] = out[0] + 1e-6
                for i in T.vectorized(4):
                    pre[row, i] = some[i]
                for i in T.unroll(4):
                    q.sigmoid(total[4 + i], out)
                    some[i] = 2.0 * out[0]
                for i in T.vectorized(4):
                    post[row, i] = some[i]
                for i in T.unroll(16):
                    c[i] = total[8 + i]
                q.sinkhorn(c, iters, eps)
                for i in T.unroll(4):
                    for j in T.vectorized(4):
                        comb[row, 4 * i + j] = c[4 * i + j]

    return coefficients


THREADS = 320


def finish_rows(width: int, chunk_parts: int, iters: int, rounded: bool) -> Any:
    """Last kernel: a block norms a row.

    `chunk_parts` partial sums make a chunk. Where a chunk is one part, rows are many, and `coefficient_rows` has made
    their coefficients; else one warp makes them here beside the norm.
    """
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    vectors = -(-width // 8 // THREADS)
    p, q = parts(), _coefficient_parts()

    @T.prim_func
    def finish(
        partial: T.Tensor((num_rows, CHUNKS * chunk_parts, SUMS), "float32"),
        collapsed: T.Tensor((num_rows, width), "bfloat16"),
        base: T.Tensor((24,), "float32"),
        scale: T.Tensor((3,), "float32"),
        norm: T.Tensor((width,), "float32"),
        eps: T.float32,
        norm_eps: T.float32,
        pre: T.Tensor((num_rows, 4), "float32"),
        post: T.Tensor((num_rows, 4), "float32"),
        comb: T.Tensor((num_rows, 16), "float32"),
        x: T.Tensor((num_rows, width), "bfloat16"),
        x_rounded: T.Tensor((num_rows, width), "bfloat16"),
    ):
        with T.Kernel(num_rows, threads=THREADS) as row:
            thread = T.get_thread_binding()
            lane = thread % 32
            raw = T.alloc_local((vectors * 8,), "bfloat16")
            values = T.alloc_local((8,), "float32")
            powers = T.alloc_local((2,), "float32")
            total = T.alloc_local((1,), "float32")
            square = T.alloc_local((1,), "float32")
            out = T.alloc_local((1,), "float32")
            c = T.alloc_local((16,), "float32")
            chunk_sums = T.alloc_shared((CHUNKS, SUMS), "float32")
            logits = T.alloc_shared((SUMS,), "float32")
            # Launched while the kernel before ends.
            T.pdl_sync()
            for v in T.unroll(vectors):
                if (v * THREADS + thread) * 8 < width:
                    for i in T.vectorized(8):
                        raw[v * 8 + i] = collapsed[row, (v * THREADS + thread) * 8 + i]
            if chunk_parts > 1:
                if thread < CHUNKS * SUMS:
                    total[0] = partial[row, thread // 32 * chunk_parts, lane]
                    for k in T.unroll(chunk_parts - 1):
                        total[0] += partial[row, thread // 32 * chunk_parts + 1 + k, lane]
                    chunk_sums[thread // 32, lane] = total[0]
                T.sync_threads()
                total[0] = chunk_sums[0, 25]
                for k in T.unroll(CHUNKS - 1):
                    total[0] += chunk_sums[1 + k, 25]
            else:
                total[0] = partial[row, 0, 25]
                for k in T.unroll(CHUNKS - 1):
                    total[0] += partial[row, 1 + k, 25]
            if chunk_parts > 1 and thread >= THREADS - 32:
                square[0] = chunk_sums[0, 24]
                out[0] = chunk_sums[0, lane]
                for k in T.unroll(CHUNKS - 1):
                    square[0] += chunk_sums[1 + k, 24]
                    out[0] += chunk_sums[1 + k, lane]
                square[0] = T.rsqrt(square[0] / T.float32(4 * width) + 1e-20)
                if lane < 24:
                    out[0] = T.ieee_fmaf(
                        T.ieee_mul(out[0], square[0]), scale[T.min(lane // 4, 2)], base[lane]
                    )
                    logits[lane] = out[0]
                T.sync_warp()
                if lane < 8:
                    q.sigmoid(logits[lane], out)
                    if lane < 4:
                        pre[row, lane] = out[0] + 1e-6
                    else:
                        post[row, lane - 4] = 2.0 * out[0]
                # Every lane works on the whole matrix: sums need no exchange then.
                for i in T.unroll(16):
                    c[i] = logits[8 + i]
                q.sinkhorn(c, iters, eps)
                if lane == 0:
                    for i in T.unroll(4):
                        for j in T.vectorized(4):
                            comb[row, 4 * i + j] = c[4 * i + j]
            total[0] = T.rsqrt(total[0] / T.float32(width) + norm_eps)
            for v in T.unroll(vectors):
                if (v * THREADS + thread) * 8 < width:
                    for i in T.vectorized(8):
                        values[i] = T.Cast("float32", raw[v * 8 + i])
                    p.normed(values, total[0], norm, (v * THREADS + thread) * 8)
                    p.store(values, x, row, (v * THREADS + thread) * 8)
                    if rounded:
                        p.fp8_round(values, powers)
                        p.store(values, x_rounded, row, (v * THREADS + thread) * 8)

    return finish
