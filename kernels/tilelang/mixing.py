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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmesh.kernels.ops.mixing import Mixed
from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.mixing_finish import CHUNKS, SUMS, coefficient_rows, finish_rows
from flashmesh.kernels.tilelang.spread import check, collapse_norm

__all__ = ["MixWeights", "collapse_norm", "mix", "prepare_mix", "spread_mix", "variants"]

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
        build(coefficient_rows, width, iters)(
            partial, weights.base, weights.scale, eps, *coefficients
        )
    build(finish_rows, width, count // CHUNKS, iters, rounded)(
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
    found = [Variant("mix_coefficients", coefficient_rows, (5120, 20))]
    for few in (True, False):
        size = ".few" if few else ""
        for spreads in (False, True):
            name = f"mix_sums{'.spread' if spreads else ''}{size}"
            found.append(Variant(name, _sums, _shape(few, 5120, spreads)))
        for rounded in (False, True):
            name = f"mix_finish{'.rounded' if rounded else ''}{size}"
            found.append(Variant(name, finish_rows, (5120, 20 if few else 1, 20, rounded)))
    return found
