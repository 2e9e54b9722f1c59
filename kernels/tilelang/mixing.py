"""Hyper-connections: one kernel over the streams, one or two over rows; see `kernels.ops.mixing`.

The first spreads (if asked), collapses, and multiplies with the projection `fn` on the tensor cores. The others add up
the sums, make the coefficients, and norm the collapsed row.

`fn` is fp32, the streams bf16. It is split into three bf16 parts whose sum is exact, so the tensor cores' products are
exact too, and sums are fp32. A warpgroup takes 64 rows and 32 columns of all four streams at a time, a group; a group's
sums start from zero. They are added in order within an eighth of the columns, a chunk, and then over chunks. Few rows
are spread over the device by groups, many by chunks: both add the same numbers in the same order.

A thread holds, of each of its two rows, eight neighbouring columns, since these are one load. The tensor core's order
of the columns in a product is a matter of naming, and `fn` is packed in the order in which threads hold columns.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmesh.kernels.ops.mixing import Mixed
from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.row_parts import parts
from flashmesh.kernels.tilelang.spread import check, collapse_norm

__all__ = ["MixWeights", "collapse_norm", "mix", "prepare_mix", "spread_mix", "variants"]

CHUNKS = 8
SUMS = 32
"""Numbers of a row and part: 24 products, squares of the streams, squares of the collapsed row; padded to 128 bytes."""

STEPS = 8
"""Products of 16 columns in a group: two for each stream."""

STEP_VALUES = 16 * 72
GROUP_VALUES = STEPS * STEP_VALUES
"""bf16 values of `fn` in a step and in a group: 16 columns by 24 outputs in three parts."""


class MixWeights(NamedTuple):
    """Projection of one sub-layer's coefficients.

    Attributes:
        packed: bf16 `[D/32, 9216]`: of every group, steps (stream, half of eight columns), and in a step the tensor
            core's tiles of eight outputs by eight columns, as it reads them from shared memory.
        base, scale: fp32 `[24]` and `[3]`.
    """

    packed: Tensor
    base: Tensor
    scale: Tensor


def prepare_mix(fn: Tensor, base: Tensor, scale: Tensor) -> MixWeights:
    """Packs mixing weights; contract of `kernels.ops.mixing.prepare_mix`.

    Raises:
        ValueError: not fp32 `[24, 4 D]` with D a multiple of 256, `[24]` and `[3]`.
    """
    if fn.dim() != 2 or fn.shape[0] != 24 or fn.shape[1] % 1024 or fn.dtype != torch.float32:
        raise ValueError(f"fn is fp32 [24, 4 D], D a multiple of 256; got {tuple(fn.shape)}")
    if base.shape != (24,) or scale.shape != (3,):
        raise ValueError(
            f"base has 24 values and scale 3; got {tuple(base.shape)}, {tuple(scale.shape)}"
        )
    rest, split = fn, []
    for _ in range(3):
        split.append(rest.bfloat16())
        rest = rest - split[-1].float()
    # part, eight outputs, output, stream, group, lane of four, step, half of the step, pair
    named = torch.stack(split).view(3, 3, 8, 4, -1, 4, 2, 2, 2)
    packed = named.permute(4, 3, 6, 7, 0, 1, 2, 5, 8).reshape(-1, GROUP_VALUES)
    return MixWeights(packed.contiguous(), base.float(), scale.float())


def _sums(
    width: int, spreads: bool, block_groups: int, warps: int, stages: int, ahead: int, depth: int
) -> Any:
    """First kernel: a block takes 16 rows a warp and `block_groups` groups.

    Rows stand in `stages` stages and are loaded `ahead` groups early; results go back the way rows came, from where
    they stood. Weights have `depth` stages of their own.
    """
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    groups = width // 32
    tile = 16 * warps
    boxes = 5 if spreads else 4
    # The collapsed row takes the place of the sub-layer's output, or of a stream that all have read.
    out_box = 4 if spreads else 0

    @T.macro
    def fetch(streams, y, ours, full, stage, top, group):
        for s in T.unroll(4):
            T.tma_copy(
                streams[top : top + tile, s, group * 32 : group * 32 + 32],
                ours[stage, s, :, :],
                barrier=full[stage],
            )
        if spreads:
            T.tma_copy(
                y[top : top + tile, group * 32 : group * 32 + 32],
                ours[stage, 4, :, :],
                barrier=full[stage],
            )
        if T.get_thread_binding() == 0:
            T.barrier_arrive(full[stage])

    @T.macro
    def fetch_weights(packed, theirs, ready, stage, group):
        T.tma_copy(packed[group, :], theirs[stage, :], barrier=ready[stage])
        if T.get_thread_binding() == 0:
            T.barrier_arrive(ready[stage])

    @T.prim_func
    def sums(
        streams: T.Tensor((num_rows, 4, width), "bfloat16"),
        y: T.Tensor((num_rows, width), "bfloat16"),
        post: T.Tensor((num_rows, 4), "float32"),
        comb: T.Tensor((num_rows, 16), "float32"),
        carried: T.Tensor((num_rows, 4), "float32"),
        packed: T.Tensor((groups, GROUP_VALUES), "bfloat16"),
        spread_streams: T.Tensor((num_rows, 4, width), "bfloat16"),
        collapsed: T.Tensor((num_rows, width), "bfloat16"),
        partial: T.Tensor((num_rows, groups // block_groups, SUMS), "float32"),
    ):
        with T.Kernel(groups // block_groups, T.ceildiv(num_rows, tile), threads=32 * warps) as (
            block,
            row_tile,
        ):
            thread = T.get_thread_binding()
            lane = thread % 32
            top = row_tile * tile
            mine = thread // 32 * 16 + lane // 4
            first = top + mine
            start = block * block_groups
            piece = lane % 4 * 8
            ours = T.alloc_shared((stages, boxes, tile, 32), "bfloat16")
            theirs = T.alloc_shared((depth, GROUP_VALUES), "bfloat16")
            full = T.alloc_barrier([1] * stages)
            ready = T.alloc_barrier([1] * depth)
            posts = T.alloc_local((2, 4), "float32")
            combs = T.alloc_local((2, 16), "float32")
            weights = T.alloc_local((2, 4), "float32")
            raw = T.alloc_local((8,), "bfloat16")
            added = T.alloc_local((8,), "float32")
            xs = T.alloc_local((4, 8), "float32")
            values = T.alloc_local((8,), "float32")
            u = T.alloc_local((8,), "float32")
            squared = T.alloc_local((8,), "float32")
            squares = T.alloc_local((2, 2), "float32")
            totals = T.alloc_local((2, 2), "float32")
            # Of every step, what the tensor core takes from this thread: its two rows by turns, a pair of columns each.
            a = T.alloc_local((64,), "bfloat16")
            acc = T.alloc_local((36,), "float32")
            total = T.alloc_local((12,), "float32")
            desc = T.alloc_wgmma_desc()
            # Tiles of eight by eight, 128 bytes each: neighbours along outputs, nine of them apart along columns.
            T.initialize_wgmma_descriptor(desc, T.access_ptr(theirs[0, 0], "r"), 0, 72, 8)
            for k in T.unroll(max(depth - 1, 1)):
                if k < block_groups:
                    fetch_weights(packed, theirs, ready, k, start + k)
            for k in T.unroll(ahead):
                if k < block_groups:
                    fetch(streams, y, ours, full, k, top, start + k)
            for r in T.unroll(2):
                row = T.min(first + 8 * r, num_rows - 1)
                for i in T.vectorized(4):
                    weights[r, i] = carried[row, i]
                if spreads:
                    for i in T.vectorized(4):
                        posts[r, i] = post[row, i]
                    for k in T.unroll(4):
                        for i in T.vectorized(4):
                            combs[r, k * 4 + i] = comb[row, k * 4 + i]
            for i in T.unroll(12):
                total[i] = 0.0
            for r in T.unroll(2):
                for i in T.unroll(2):
                    totals[r, i] = 0.0
            for g in T.serial(block_groups):
                stage = g % stages
                T.mbarrier_wait_parity(full[stage], g // stages % 2)
                for r in T.unroll(2):
                    for s in T.unroll(4):
                        for i in T.vectorized(8):
                            raw[i] = ours[stage, s, mine + 8 * r, piece + i]
                        for i in T.vectorized(8):
                            xs[s, i] = T.Cast("float32", raw[i])
                        if not spreads:
                            for h in T.unroll(4):
                                for i in T.vectorized(2):
                                    a[(s * 2 + h // 2) * 8 + h % 2 * 4 + r * 2 + i] = raw[h * 2 + i]
                    if spreads:
                        for i in T.vectorized(8):
                            raw[i] = ours[stage, 4, mine + 8 * r, piece + i]
                        for i in T.vectorized(8):
                            added[i] = T.Cast("float32", raw[i])
                    for i in T.unroll(8):
                        u[i] = 0.0
                        squared[i] = 0.0
                    for j in T.unroll(4):
                        if spreads:
                            for i in T.unroll(8):
                                values[i] = posts[r, j] * added[i]
                            for s in T.unroll(4):
                                for i in T.unroll(8):
                                    values[i] = T.ieee_fmaf(
                                        combs[r, s * 4 + j], xs[s, i], values[i]
                                    )
                            for i in T.vectorized(8):
                                raw[i] = T.Cast("bfloat16", values[i])
                            for i in T.vectorized(8):
                                ours[stage, j, mine + 8 * r, piece + i] = raw[i]
                            for h in T.unroll(4):
                                for i in T.vectorized(2):
                                    a[(j * 2 + h // 2) * 8 + h % 2 * 4 + r * 2 + i] = raw[h * 2 + i]
                            for i in T.vectorized(8):
                                values[i] = T.Cast("float32", raw[i])
                        else:
                            for i in T.unroll(8):
                                values[i] = xs[j, i]
                        for i in T.unroll(8):
                            u[i] = T.ieee_fmaf(weights[r, j], values[i], u[i])
                            squared[i] = T.ieee_fmaf(values[i], values[i], squared[i])
                    squares[r, 0] = ((squared[0] + squared[1]) + (squared[2] + squared[3])) + (
                        (squared[4] + squared[5]) + (squared[6] + squared[7])
                    )
                    for i in T.vectorized(8):
                        raw[i] = T.Cast("bfloat16", u[i])
                    for i in T.vectorized(8):
                        ours[stage, out_box, mine + 8 * r, piece + i] = raw[i]
                    for i in T.vectorized(8):
                        u[i] = T.Cast("float32", raw[i])
                    for i in T.unroll(8):
                        u[i] = T.ieee_mul(u[i], u[i])
                    squares[r, 1] = ((u[0] + u[1]) + (u[2] + u[3])) + (
                        (u[4] + u[5]) + (u[6] + u[7])
                    )
                T.mbarrier_wait_parity(ready[g % depth], g // depth % 2)
                T.warpgroup_fence_operand(a, num_regs=32)
                T.warpgroup_fence_operand(acc, num_regs=36)
                T.warpgroup_arrive()
                for k in T.unroll(STEPS):
                    T.ptx_wgmma_rs(
                        "float32",
                        "m64n72k16",
                        True,
                        "bf16",
                        "bf16",
                        "fp32",
                        a.data,
                        k * 8,
                        desc.data,
                        (g % depth * GROUP_VALUES + k * STEP_VALUES) // 8,
                        acc.data,
                        0,
                        T.Select(k != 0, 1, 0),
                        1,
                        1,
                    )
                T.warpgroup_commit_batch()
                # The copy engine reads shared memory past ordinary stores. The barrier also says that every warp has
                # done with the stages of the group before.
                T.fence_proxy_async()
                T.sync_threads()
                if depth > 1 and g + depth - 1 < block_groups:
                    fetch_weights(
                        packed, theirs, ready, (g + depth - 1) % depth, start + g + depth - 1
                    )
                if spreads:
                    for s in T.unroll(4):
                        T.tma_copy(
                            ours[stage, s, :, :],
                            spread_streams[
                                top : top + tile, s, (start + g) * 32 : (start + g) * 32 + 32
                            ],
                        )
                T.tma_copy(
                    ours[stage, out_box, :, :],
                    collapsed[top : top + tile, (start + g) * 32 : (start + g) * 32 + 32],
                )
                if g + ahead < block_groups:
                    T.tma_store_wait((stages - ahead) * (5 if spreads else 1), True)
                    fetch(streams, y, ours, full, (g + ahead) % stages, top, start + g + ahead)
                for r in T.unroll(2):
                    for k in T.unroll(2):
                        squares[r, k] += T.shfl_xor(squares[r, k], 1)
                        squares[r, k] += T.shfl_xor(squares[r, k], 2)
                        totals[r, k] += squares[r, k]
                T.warpgroup_wait(0)
                T.warpgroup_fence_operand(acc, num_regs=36)
                for i in T.unroll(12):
                    total[i] += (acc[i] + acc[12 + i]) + acc[24 + i]
            T.tma_store_wait(0, True)
            T.pdl_trigger()
            for r in T.unroll(2):
                if first + 8 * r < num_rows:
                    for e in T.unroll(3):
                        for i in T.vectorized(2):
                            partial[first + 8 * r, block, e * 8 + lane % 4 * 2 + i] = total[
                                e * 4 + r * 2 + i
                            ]
                    if lane % 4 == 0:
                        for i in T.vectorized(2):
                            partial[first + 8 * r, block, 24 + i] = totals[r, i]

    return sums


# Rows are clamped by hand or by the copy engine, and the one barrier that is needed stands in the code. The compiler
# does not see that the tensor core reads weights, and would give their place to rows.
_sums.pass_configs = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}


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


def _coefficients(width: int, iters: int) -> Any:
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


def _finish(width: int, chunk_parts: int, iters: int, rounded: bool) -> Any:
    """Last kernel: a block norms a row.

    `chunk_parts` partial sums make a chunk. Where a chunk is one part, rows are many, and `_coefficients` has made
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


FEW = 768
"""Up to this many rows, a block of the first kernel takes a group; else a chunk."""


def _shape(few: bool, width: int, spreads: bool) -> tuple[int, bool, int, int, int, int, int]:
    """Arguments of `_sums`."""
    if few:
        return width, spreads, 1, 4, 1, 1, 1
    return width, spreads, width // 32 // CHUNKS, 8, 3, 2, 4


def _mix(
    streams: Tensor,
    spreading: tuple[Tensor, Tensor, Tensor] | None,
    carried: Tensor,
    weights: MixWeights,
    norm: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
    rounded: bool,
) -> tuple[Tensor, Mixed]:
    rows, _, width = streams.shape
    few = rows <= FEW
    count = width // 32 if few else CHUNKS

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=streams.device)

    def bf16(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=streams.device)

    new = bf16(rows, 4, width) if spreading else streams
    x_rounded = bf16(rows, width) if rounded else None
    mixed = Mixed(fp32(rows, 4), fp32(rows, 4), fp32(rows, 4, 4), bf16(rows, width), x_rounded)
    if not rows:
        return new, mixed
    collapsed, partial = bf16(rows, width), fp32(rows, count, SUMS)
    # A kernel that does not spread reads none of the three.
    y, post, comb = spreading or (collapsed, carried, mixed.comb)
    build(_sums, *_shape(few, width, spreading is not None))(
        streams, y, post, comb.view(rows, 16), carried, weights.packed, new, collapsed, partial
    )
    coefficients = mixed.pre, mixed.post, mixed.comb.view(rows, 16)
    if count == CHUNKS:
        build(_coefficients, width, iters)(partial, weights.base, weights.scale, eps, *coefficients)
    build(_finish, width, count // CHUNKS, iters, rounded)(
        partial,
        collapsed,
        weights.base,
        weights.scale,
        norm,
        eps,
        norm_eps,
        *coefficients,
        mixed.x,
        mixed.x if x_rounded is None else x_rounded,
    )
    return new, mixed


def mix(
    streams: Tensor,
    carried: Tensor,
    weights: MixWeights,
    norm: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
    rounded: bool,
) -> Mixed:
    """Computes coefficients and input of a sub-layer; contract of `kernels.ops.mixing.mix`.

    Raises:
        ValueError: the width is no multiple of 256, or shapes or dtypes do not fit together.
    """
    check(streams, carried=carried, norm=norm)
    return _mix(streams, None, carried, weights, norm, iters, eps, norm_eps, rounded)[1]


def spread_mix(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    carried: Tensor,
    weights: MixWeights,
    norm: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
    rounded: bool,
) -> tuple[Tensor, Mixed]:
    """Spreads, then mixes the new streams; contract of `kernels.ops.mixing.spread_mix`.

    Raises:
        ValueError: as `mix`.
    """
    check(streams, y=y, post=post, comb=comb, carried=carried, norm=norm)
    spreading = y, post, comb
    return _mix(streams, spreading, carried, weights, norm, iters, eps, norm_eps, rounded)


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: with and without spreading, for few rows and for many."""
    found = [Variant("mix_coefficients", _coefficients, (5120, 20))]
    for few in (True, False):
        size = ".few" if few else ""
        for spreads in (False, True):
            name = f"mix_sums{'.spread' if spreads else ''}{size}"
            found.append(Variant(name, _sums, _shape(few, 5120, spreads)))
        for rounded in (False, True):
            name = f"mix_finish{'.rounded' if rounded else ''}{size}"
            found.append(Variant(name, _finish, (5120, 20 if few else 1, 20, rounded)))
    return found
