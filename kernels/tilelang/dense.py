"""Products with F8 weights; see `kernels.ops.linear`.

Codes become bf16 in registers, as first operand of the tensor cores: exact. One kernel reads a weight once for a small
batch, the other one keeps tensor cores busy with a large one. Both run an output's sums in the same order, 16 columns
at a time, so which of them ran cannot be told from bits: `mma` and `wgmma` add the same way.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.ops.linear import check_dense, check_input
from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.dense_device import SOURCE
from flashmesh.kernels.tilelang.dense_parts import PASS_CONFIGS, WORKERS, steps

BLOCK = 128
"""Rows of a weight that a block of either kernel takes."""

SMALL_TILES = (16, 32, 64)
"""Tokens for which the small-batch kernel is built."""

LARGE_TILES = (128, 256)
"""Tokens for which the large-batch kernel is built."""

FEWEST_BLOCKS = 72
"""Of the small-batch kernel, where the weight has as many: fewer and larger ones were faster down to this."""

STAGE_BYTES = 96 << 10
"""Shared memory for stages in flight in the small-batch kernel: two blocks fit an SM."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A prepared F8 weight.

    Attributes:
        codes: int32 `[N/64, K/64, 1024]`: tiles of 64 by 64 codes in the order in which threads take them.
        scales: int32 `[N/32, K/64]`: two bf16 numbers, 2^120 times the scale of 32 by 32 codes.
        groups: blocks of rows, each with its own columns of the input.
    """

    codes: Tensor
    scales: Tensor
    groups: int


def prepare_dense(codes: Tensor, scales: Tensor, groups: int = 1) -> DenseWeight:
    """Lays an F8 weight out; contract of `kernels.ops.linear.prepare_dense`.

    A tile holds a kilobyte for each of four warps. Of columns 16 s up to 16 s + 16, lane l takes those of rows l / 4
    and 8 below it, at 2 (l % 4), one after it, and both 8 further: the first operand of `wgmma` and `mma` alike. Two
    steps make 16 bytes, so that a warp reads 512 in one piece. In a word, codes of the lower row come first: see
    `expand_high`.

    Raises:
        ValueError: what the contract says; rows of a group are no multiple of 128, or K none of 256.
    """
    check_dense(codes, scales, groups)
    rows, columns = codes.shape
    if rows % (BLOCK * groups) or columns % 256:
        raise ValueError(
            f"weight {rows} x {columns} in {groups} groups: "
            f"supported are rows in multiples of {BLOCK} a group and columns in multiples of 256"
        )
    tiles = codes.view(torch.uint8).view(rows // 64, 4, 2, 8, columns // 64, 2, 2, 2, 4, 2)
    # Axes: tile, warp, upper or lower, l / 4; tile, 32 columns, step, 8 further or not, l % 4, one after or not.
    words = tiles.permute(0, 4, 1, 5, 3, 8, 6, 7, 9, 2).flip(-1).contiguous()
    factors = (scales.to(torch.int32) + 120 << 7).to(torch.int16)
    return DenseWeight(
        words.flatten().view(torch.int32).view(rows // 64, columns // 64, 1024),
        factors.view(torch.int32),
        groups,
    )


def _small_batch(
    rows: int, columns: int, groups: int, tokens: int, warps: int, per_stage: int
) -> Any:
    """Builds the kernel for up to `tokens` rows of x at a time.

    Each of a block's warps takes 16 rows of the weight. Products are `mma.sync`, which needs no 64 rows at a time, so
    that a weight of few rows makes enough blocks without a split of K.
    """
    import tilelang.language as T
    from tilelang.layout import make_wgmma_swizzled_layout

    num_rows = T.dynamic("num_rows")
    block_rows = 16 * warps
    tiles = columns // 64
    steps = tiles // per_stage
    stages = min(STAGE_BYTES // (per_stage * (block_rows * 64 + tokens * 128)), steps)
    threads = 32 * warps + 32
    group_blocks = rows // groups // block_rows
    # A block takes whole tiles of 64 rows, or a run within each.
    deep, run = max(1, warps // 4), min(warps, 4) * 256
    scale_rows = max(1, warps // 2)
    pitch = block_rows * 2 + 16

    @T.prim_func
    def dense(
        x: T.Tensor((num_rows, groups * columns), "bfloat16"),
        codes: T.Tensor((rows // 64, tiles, 1024), "int32"),
        scales: T.Tensor((rows // 32, tiles), "int32"),
        y: T.Tensor((num_rows, rows), "bfloat16"),
    ):
        with T.Kernel(
            rows // block_rows, T.ceildiv(num_rows, tokens), threads=threads, prelude=SOURCE
        ) as (block, tile):
            T.annotate_min_blocks_per_sm(2)
            xs = T.alloc_shared((stages, per_stage, tokens, 64), "bfloat16")
            ws = T.alloc_shared((stages, deep, per_stage, run), "int32")
            factors = T.alloc_shared((scale_rows, tiles), "int32")
            turned = T.alloc_shared((tokens * pitch,), "uint8")
            sums = T.alloc_local((tokens // 2,), "float32")
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([warps] * stages)
            scaled = T.alloc_barrier([1])
            T.annotate_layout({xs: make_wgmma_swizzled_layout(xs)})
            tx = T.get_thread_binding()
            column = block // group_blocks * columns
            if tx >= 32 * warps:
                T.call_extern(
                    "handle",
                    "product::fill",
                    T.address_of(factors[0, 0]),
                    T.address_of(scales[block * warps // 2, 0]),
                    T.address_of(scaled[0]),
                    1,
                    scale_rows * tiles * 4,
                    0,
                )
                if tx == 32 * warps:
                    T.barrier_arrive(scaled[0])
                for i in T.serial(steps):
                    s = i % stages
                    T.mbarrier_wait_parity(empty[s], (i // stages + 1) % 2)
                    if warps >= 4:
                        T.call_extern(
                            "handle",
                            "product::fill",
                            T.address_of(ws[s, 0, 0, 0]),
                            T.address_of(codes[block * deep, i * per_stage, 0]),
                            T.address_of(full[s]),
                            deep,
                            per_stage * 4096,
                            tiles * 4096,
                        )
                    else:
                        T.call_extern(
                            "handle",
                            "product::fill",
                            T.address_of(ws[s, 0, 0, 0]),
                            T.address_of(
                                codes[block * warps // 4, i * per_stage, block * warps % 4 * 256]
                            ),
                            T.address_of(full[s]),
                            per_stage,
                            run * 4,
                            4096,
                        )
                    for j in T.unroll(per_stage):
                        at = column + (i * per_stage + j) * 64
                        T.tma_copy(
                            x[tile * tokens : (tile + 1) * tokens, at : at + 64],
                            xs[s, j, :, :],
                            barrier=full[s],
                            leader_scope_threads=32,
                        )
                    if tx == 32 * warps:
                        T.barrier_arrive(full[s])
            else:
                g = tx // 32
                T.call_extern("handle", f"product::zero<{tokens}>", T.address_of(sums[0]))
                T.mbarrier_wait_parity(scaled[0], 0)
                for i in T.serial(steps):
                    s = i % stages
                    T.mbarrier_wait_parity(full[s], (i // stages) % 2)
                    T.call_extern(
                        "handle",
                        f"product::multiply_warp<{tokens}, {per_stage}, {run * 4}>",
                        T.address_of(sums[0]),
                        T.address_of(ws[s, g // 4, 0, g % 4 * 256]),
                        T.address_of(factors[g // 2, i * per_stage]),
                        T.address_of(xs[s, 0, 0, 0]),
                    )
                    T.sync_warp()
                    if tx % 32 == 0:
                        T.barrier_arrive(empty[s])
                T.call_extern(
                    "handle",
                    f"product::drain_warp<{tokens}, {pitch}>",
                    T.address_of(sums[0]),
                    T.address_of(turned[0]),
                    T.address_of(y[tile * tokens, block * block_rows + g * 16]),
                    num_rows - tile * tokens,
                    rows,
                )

    return dense


def _large_batch(rows: int, columns: int, groups: int, tokens: int) -> Any:
    """Builds the kernel for tiles of 128 rows of the weight by `tokens` rows of x.

    Persistent blocks: a warp loads the next tile while two warpgroups still write the last one. Neighbours in order
    share rows of x and of the weight in L2.
    """
    import tilelang.language as T
    from tilelang.layout import make_wgmma_swizzled_layout

    num_rows = T.dynamic("num_rows")
    tiles = columns // 64
    stages = min(8, (180 << 10) // (8192 + tokens * 128))
    blocks = rows // BLOCK
    group_blocks = blocks // groups
    # Registers of one step's codes are still read while the next one's are made: two sets, by name.
    unroll = 2 if tiles % 2 == 0 else 1
    do = steps(tokens, stages)

    @T.prim_func
    def dense(
        x: T.Tensor((num_rows, groups * columns), "bfloat16"),
        codes: T.Tensor((rows // 64, tiles, 1024), "int32"),
        scales: T.Tensor((rows // 32, tiles), "int32"),
        y: T.Tensor((num_rows, rows), "bfloat16"),
    ):
        with T.Kernel(WORKERS, threads=384, prelude=SOURCE) as worker:
            xs = T.alloc_shared((stages, tokens, 64), "bfloat16")
            ws = T.alloc_shared((stages, 2, 1024), "int32")
            factors = T.alloc_shared((2, 4, tiles), "int32")
            turned = T.alloc_shared((2, 64 * 36), "float32")
            sums = T.alloc_local((tokens // 2,), "float32")
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([2] * stages)
            scaled = T.alloc_barrier([1] * 2)
            unscaled = T.alloc_barrier([2] * 2)
            tile = T.alloc_var("int32")
            block = T.alloc_var("int32")
            height = T.alloc_var("int32")
            i = T.alloc_var("int32")
            T.annotate_layout({xs: make_wgmma_swizzled_layout(xs)})
            tx = T.get_thread_binding()
            across = T.ceildiv(num_rows, tokens)
            i = 0
            if tx >= 256:
                T.dec_max_nreg(24)
                if tx < 288:
                    for turn in T.serial(T.ceildiv(blocks * across - worker, WORKERS)):
                        do.find_tile(worker + turn * WORKERS, blocks, across, height, tile, block)
                        column = block // group_blocks * columns
                        T.mbarrier_wait_parity(unscaled[turn % 2], (turn // 2 + 1) % 2)
                        T.call_extern(
                            "handle",
                            "product::fill",
                            T.address_of(factors[turn % 2, 0, 0]),
                            T.address_of(scales[block * 4, 0]),
                            T.address_of(scaled[turn % 2]),
                            1,
                            tiles * 16,
                            0,
                        )
                        if tx == 256:
                            T.barrier_arrive(scaled[turn % 2])
                        for j in T.serial(tiles):
                            s = i % stages
                            T.mbarrier_wait_parity(empty[s], (i // stages + 1) % 2)
                            T.tma_copy(
                                x[
                                    tile * tokens : (tile + 1) * tokens,
                                    column + j * 64 : column + (j + 1) * 64,
                                ],
                                xs[s, :, :],
                                barrier=full[s],
                                leader_scope_threads=32,
                            )
                            T.call_extern(
                                "handle",
                                "product::fill",
                                T.address_of(ws[s, 0, 0]),
                                T.address_of(codes[block * 2, j, 0]),
                                T.address_of(full[s]),
                                2,
                                4096,
                                tiles * 4096,
                            )
                            if tx == 256:
                                T.barrier_arrive(full[s])
                            i = i + 1
            else:
                T.inc_max_nreg(240)
                g = tx // 128
                for turn in T.serial(T.ceildiv(blocks * across - worker, WORKERS)):
                    T.mbarrier_wait_parity(scaled[turn % 2], (turn // 2) % 2)
                    for pair in T.serial(tiles // unroll):
                        for h in T.unroll(unroll):
                            s = i % stages
                            later = T.Or(pair > 0, h > 0)
                            T.mbarrier_wait_parity(full[s], (i // stages) % 2)
                            T.call_extern(
                                "handle",
                                f"product::multiply_codes<{tokens}>",
                                T.address_of(sums[0]),
                                T.address_of(ws[s, g, 0]),
                                T.address_of(factors[turn % 2, tx // 64, pair * unroll + h]),
                                T.address_of(xs[s, 0, 0]),
                                later,
                            )
                            do.free_before(sums, empty, i, 1, tx, later)
                            i = i + 1
                    do.free_before(sums, empty, i, 0, tx, True)
                    if tx % 128 == 0:
                        T.barrier_arrive(unscaled[turn % 2])
                    do.find_tile(worker + turn * WORKERS, blocks, across, height, tile, block)
                    T.call_extern(
                        "handle",
                        f"product::drain<{tokens}>",
                        T.address_of(sums[0]),
                        T.address_of(turned[g, 0]),
                        T.address_of(y[tile * tokens, block * BLOCK + g * 64]),
                        num_rows - tile * tokens,
                        rows,
                        64,
                    )

    return dense


_builder: Any
for _builder in (_small_batch, _large_batch):
    _builder.pass_configs = PASS_CONFIGS


def _small_args(rows: int, columns: int, groups: int, tokens: int) -> tuple[Any, ...]:
    """Many warps a block read x less often, many blocks fill more SMs: more than half of them are enough."""
    warps = next((w for w in (8, 4, 2) if rows // (16 * w) >= FEWEST_BLOCKS), 1)
    return rows, columns, groups, tokens, warps, 4 if warps < 8 and tokens == 16 else 2


def _large_tile(rows: int, num_rows: int) -> int:
    """Returns the tile that should end first: rounds of tiles, by the time of one, which grows with its tokens.

    The constant is from times of both tiles on an H200.
    """
    blocks = rows // BLOCK
    return min(
        LARGE_TILES, key=lambda tile: -(-blocks * -(-num_rows // tile) // WORKERS) * (tile + 90)
    )


def dense(x: Tensor, weight: DenseWeight) -> Tensor:
    """Multiplies rows with an F8 weight; contract of `kernels.ops.linear.dense`.

    Raises:
        ValueError: x does not fit the weight.
    """
    rows, columns = weight.codes.shape[0] * 64, weight.codes.shape[1] * 64
    check_input(x, weight.groups * columns)
    y = torch.empty(len(x), rows, dtype=torch.bfloat16, device=x.device)
    if not len(x):
        return y
    shape = rows, columns, weight.groups
    tokens = next((t for t in SMALL_TILES if len(x) <= t), None)
    if tokens is None:
        kernel = build(_large_batch, *shape, _large_tile(rows, len(x)))
    else:
        kernel = build(_small_batch, *_small_args(*shape, tokens))
    kernel(x, weight.codes, weight.scales, y)
    return y


SHAPES = {
    "latents": (1792, 5120, 1),
    "queries": (32768, 1280, 1),
    "index_queries": (4096, 1280, 1),
    "output_a": (8192, 4096, 8),
    "output_b": (5120, 8192, 1),
    "shared_up": (4608, 5120, 1),
    "shared_down": (5120, 2304, 1),
    "engram": (25600, 6144, 1),
    "draft": (5120, 15360, 1),
}
"""Rows, columns and groups of V4.1-Flash's weights: attention, index, shared experts, Engram, draft."""


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash."""
    small = [
        Variant(f"dense.{name}.{tokens}", _small_batch, _small_args(*shape, tokens))
        for name, shape in SHAPES.items()
        for tokens in SMALL_TILES
    ]
    large = [
        Variant(f"dense.{name}.{tokens}", _large_batch, (*shape, tokens))
        for name, shape in SHAPES.items()
        for tokens in LARGE_TILES
    ]
    return small + large
