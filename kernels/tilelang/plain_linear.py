"""Products with bf16 weights; see `kernels.ops.linear`.

Most of these weights have few rows, so K is cut into parts as well, as many for a weight as its shape says. A cluster
of blocks sums them side by side for small batches, one block one after the other for large ones; both then add the
parts in the same order.
"""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.ops.linear import check_plain
from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.dense_device import SOURCE
from flashmesh.kernels.tilelang.dense_parts import PASS_CONFIGS, WORKERS, steps

SMALL_TILES = (16, 64)
"""Tokens for which the small-batch kernel is built."""

FEW_ROWS = 1024
"""Rows of a weight up to which K is cut."""


def _num_parts(rows: int, columns: int) -> int:
    if rows > FEW_ROWS:
        return 1
    return next(parts for parts in (8, 4, 2, 1) if columns // 64 % parts == 0)


def _small_batch(
    rows: int, columns: int, parts: int, tokens: int, warpgroups: int, out: str
) -> Any:
    """Builds the kernel for up to `tokens` rows of x at a time; a cluster's blocks take a part of K each."""
    import tilelang.language as T
    from tilelang.layout import make_wgmma_swizzled_layout

    num_rows = T.dynamic("num_rows")
    block_rows = 64 * warpgroups
    tiles = columns // 64 // parts
    stages = min((96 << 10) // (block_rows * 128 + tokens * 128), tiles)
    threads = 128 * warpgroups + 32

    @T.prim_func
    def plain_linear(
        x: T.Tensor((num_rows, columns), "bfloat16"),
        weight: T.Tensor((rows, columns), "bfloat16"),
        y: T.Tensor((num_rows, rows), out),
    ):
        with T.Kernel(
            parts,
            T.ceildiv(rows, block_rows),
            T.ceildiv(num_rows, tokens),
            threads=threads,
            prelude=SOURCE,
            cluster_dims=(parts, 1, 1),
        ) as (rank, block, tile):
            xs = T.alloc_shared((stages, tokens, 64), "bfloat16")
            ws = T.alloc_shared((stages, block_rows, 64), "bfloat16")
            part = T.alloc_shared((tokens, block_rows), "float32")
            sums = T.alloc_local((tokens // 2,), "float32")
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([warpgroups] * stages)
            T.annotate_layout(
                {xs: make_wgmma_swizzled_layout(xs), ws: make_wgmma_swizzled_layout(ws)}
            )
            tx = T.get_thread_binding()
            if tx >= 128 * warpgroups:
                for i in T.serial(tiles):
                    s = i % stages
                    at = (rank * tiles + i) * 64
                    T.mbarrier_wait_parity(empty[s], (i // stages + 1) % 2)
                    T.tma_copy(
                        weight[block * block_rows : (block + 1) * block_rows, at : at + 64],
                        ws[s, :, :],
                        barrier=full[s],
                        leader_scope_threads=32,
                    )
                    T.tma_copy(
                        x[tile * tokens : (tile + 1) * tokens, at : at + 64],
                        xs[s, :, :],
                        barrier=full[s],
                        leader_scope_threads=32,
                    )
                    if tx == 128 * warpgroups:
                        T.barrier_arrive(full[s])
            else:
                g = tx // 128
                for i in T.serial(tiles):
                    s = i % stages
                    T.mbarrier_wait_parity(full[s], (i // stages) % 2)
                    T.call_extern(
                        "handle",
                        f"product::multiply<{tokens}>",
                        T.address_of(sums[0]),
                        T.address_of(ws[s, g * 64, 0]),
                        T.address_of(xs[s, 0, 0]),
                        i > 0,
                    )
                    T.call_extern("handle", f"product::wait<1, {tokens}>", T.address_of(sums[0]))
                    if tx % 128 == 0 and i > 0:
                        T.barrier_arrive(empty[(i + stages - 1) % stages])
                T.call_extern("handle", f"product::wait<0, {tokens}>", T.address_of(sums[0]))
                T.call_extern(
                    "handle",
                    f"product::spill<{tokens}, {block_rows}>",
                    T.address_of(sums[0]),
                    T.address_of(part[0, 0]),
                )
            T.cluster_sync()
            T.call_extern(
                "handle",
                f"product::reduce<{parts}, {tokens}, {block_rows}, {threads}>",
                T.address_of(part[0, 0]),
                T.address_of(y[tile * tokens, block * block_rows]),
                rank,
                num_rows - tile * tokens,
                rows,
                rows - block * block_rows,
            )
            T.cluster_sync()  # nobody leaves while another block reads its part

    return plain_linear


def _large_batch(
    rows: int, columns: int, parts: int, tokens: int, warpgroups: int, out: str
) -> Any:
    """Builds the kernel for tiles of 64 * `warpgroups` rows of the weight by `tokens` rows of x, persistent blocks."""
    import tilelang.language as T
    from tilelang.layout import make_wgmma_swizzled_layout

    num_rows = T.dynamic("num_rows")
    block_rows = 64 * warpgroups
    tiles = columns // 64 // parts
    stages = min(6, (192 << 10) // (block_rows * 128 + tokens * 128))
    blocks = -(-rows // block_rows)
    do = steps(tokens, stages)

    @T.prim_func
    def plain_linear(
        x: T.Tensor((num_rows, columns), "bfloat16"),
        weight: T.Tensor((rows, columns), "bfloat16"),
        y: T.Tensor((num_rows, rows), out),
    ):
        with T.Kernel(WORKERS, threads=128 * warpgroups + 128, prelude=SOURCE) as worker:
            xs = T.alloc_shared((stages, tokens, 64), "bfloat16")
            ws = T.alloc_shared((stages, block_rows, 64), "bfloat16")
            turned = T.alloc_shared((warpgroups, 64 * 36), "float32")
            sums = T.alloc_local((tokens // 2,), "float32")
            total = T.alloc_local((tokens // 2,), "float32")
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([warpgroups] * stages)
            tile = T.alloc_var("int32")
            block = T.alloc_var("int32")
            height = T.alloc_var("int32")
            i = T.alloc_var("int32")
            T.annotate_layout(
                {xs: make_wgmma_swizzled_layout(xs), ws: make_wgmma_swizzled_layout(ws)}
            )
            tx = T.get_thread_binding()
            across = T.ceildiv(num_rows, tokens)
            i = 0
            if tx >= 128 * warpgroups:
                T.dec_max_nreg(24)
                if tx < 128 * warpgroups + 32:
                    for turn in T.serial(T.ceildiv(blocks * across - worker, WORKERS)):
                        do.find_tile(worker + turn * WORKERS, blocks, across, height, tile, block)
                        for j in T.serial(tiles * parts):
                            s = i % stages
                            T.mbarrier_wait_parity(empty[s], (i // stages + 1) % 2)
                            T.tma_copy(
                                weight[
                                    block * block_rows : (block + 1) * block_rows,
                                    j * 64 : (j + 1) * 64,
                                ],
                                ws[s, :, :],
                                barrier=full[s],
                                leader_scope_threads=32,
                            )
                            T.tma_copy(
                                x[tile * tokens : (tile + 1) * tokens, j * 64 : (j + 1) * 64],
                                xs[s, :, :],
                                barrier=full[s],
                                leader_scope_threads=32,
                            )
                            if tx == 128 * warpgroups:
                                T.barrier_arrive(full[s])
                            i = i + 1
            else:
                T.inc_max_nreg(240)
                g = tx // 128
                for turn in T.serial(T.ceildiv(blocks * across - worker, WORKERS)):
                    for p in T.serial(parts):
                        for j in T.serial(tiles):
                            s = i % stages
                            T.mbarrier_wait_parity(full[s], (i // stages) % 2)
                            T.call_extern(
                                "handle",
                                f"product::multiply<{tokens}>",
                                T.address_of(sums[0]),
                                T.address_of(ws[s, g * 64, 0]),
                                T.address_of(xs[s, 0, 0]),
                                j > 0,
                            )
                            do.free_before(sums, empty, i, 1, tx, j > 0)
                            i = i + 1
                        do.free_before(sums, empty, i, 0, tx, True)
                        if parts > 1:
                            for e in T.unroll(tokens // 2):
                                total[e] = T.Select(p == 0, sums[e], total[e] + sums[e])
                    do.find_tile(worker + turn * WORKERS, blocks, across, height, tile, block)
                    T.call_extern(
                        "handle",
                        f"product::drain<{tokens}>",
                        T.address_of(total[0] if parts > 1 else sums[0]),
                        T.address_of(turned[g, 0]),
                        T.address_of(y[tile * tokens, block * block_rows + g * 64]),
                        num_rows - tile * tokens,
                        rows,
                        rows - block * block_rows - g * 64,
                    )

    return plain_linear


for _builder in (_small_batch, _large_batch):
    # Totals start at a part's sums.
    _builder.pass_configs = {**PASS_CONFIGS, "tl.disable_buffer_init_check": True}


def _small_args(rows: int, columns: int, tokens: int, out: str) -> tuple[Any, ...]:
    parts = _num_parts(rows, columns)
    return rows, columns, parts, tokens, 1 if parts > 1 else 2, out


def _large_args(rows: int, columns: int, out: str) -> tuple[Any, ...]:
    parts = _num_parts(rows, columns)
    return rows, columns, parts, 128 if parts > 1 else 256, 1 if rows <= 64 else 2, out


def plain_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiplies rows with a bf16 weight; contract of `kernels.ops.linear.plain_linear`.

    Raises:
        ValueError: what the contract says; N is no multiple of 16, or K none of 64.
    """
    check_plain(x, weight, out_dtype)
    rows, columns = weight.shape
    if rows % 16 or columns % 64:
        raise ValueError(
            f"weight {rows} x {columns}: supported are rows in multiples of 16 and columns of 64"
        )
    y = torch.empty(len(x), rows, dtype=out_dtype, device=x.device)
    if not y.numel():
        return y
    out = "bfloat16" if out_dtype == torch.bfloat16 else "float32"
    tokens = next((t for t in SMALL_TILES if len(x) <= t), None)
    if tokens is None:
        build(_large_batch, *_large_args(rows, columns, out))(x, weight, y)
    else:
        build(_small_batch, *_small_args(rows, columns, tokens, out))(x, weight, y)
    return y


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: compressors, gate, index weights and keys, and both heads."""
    shapes = [
        ("compressor_pairs", 512, 5120, "float32"),
        ("compressor", 512, 5120, "bfloat16"),
        ("gate", 384, 5120, "float32"),
        ("index_weights", 32, 5120, "float32"),
        ("index_key", 128, 512, "bfloat16"),
        ("markov", 129280, 256, "float32"),
        ("head", 129280, 5120, "float32"),
    ]
    made = []
    for name, rows, columns, out in shapes:
        for tokens in SMALL_TILES:
            args = _small_args(rows, columns, tokens, out)
            made.append(Variant(f"plain_linear.{name}.{tokens}", _small_batch, args))
        args = _large_args(rows, columns, out)
        made.append(Variant(f"plain_linear.{name}.large", _large_batch, args))
    return made
