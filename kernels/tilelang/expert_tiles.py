"""Sorts token slots by expert, into tiles of one expert each.

A counting sort, stable, so that its result never depends on timing. Threads that hold slots of one expert find each
other in their warp (`match_any`), warps of a block and blocks of the grid by prefix sums.
"""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.expert_layout import ExpertTiles

THREADS = (512, 1024)
"""Of a block, which holds as many slots; the smaller where it suffices. No more experts than the larger."""


def _count_slots(num_experts: int) -> Any:
    import tilelang.language as T

    num_slots, num_blocks = T.dynamic("num_slots"), T.dynamic("num_blocks")
    threads = THREADS[-1]

    @T.prim_func
    def count_slots(
        ids: T.Tensor((num_slots,), "int32"),
        counts: T.Tensor((num_blocks, num_experts), "int32"),
    ):
        with T.Kernel(num_blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            held = T.alloc_shared((num_experts,), "int32")
            expert = T.alloc_var("int32", -1)
            if thread < num_experts:
                held[thread] = 0
            if block * threads + thread < num_slots:
                expert = ids[block * threads + thread]
            T.sync_threads()
            if expert >= 0:
                T.atomic_add(held[expert], 1)
            T.sync_threads()
            if thread < num_experts:
                counts[block, thread] = held[thread]

    return count_slots


def _place_slots(num_experts: int, threads: int, one_block: bool) -> Any:
    import tilelang.language as T

    num_slots, num_blocks = T.dynamic("num_slots"), T.dynamic("num_blocks")
    max_tiles, num_places = T.dynamic("max_tiles"), T.dynamic("num_places")
    warps = threads // 32

    @T.prim_func
    def place_slots(
        ids: T.Tensor((num_slots,), "int32"),
        weights: T.Tensor((num_slots,), "float32"),
        counts: T.Tensor((num_blocks, num_experts), "int32"),
        place: T.Tensor((num_slots,), "int32"),
        rows: T.Tensor((num_places,), "int32"),
        sorted_weights: T.Tensor((num_places,), "float32"),
        tile_expert: T.Tensor((max_tiles,), "int32"),
        token_tile: T.int32,
    ):
        with T.Kernel(num_blocks, threads=threads) as block:
            thread = T.get_thread_binding()
            slot = block * threads + thread
            warp = thread // 32
            lane = thread % 32
            held = T.alloc_shared((warps, num_experts), "int32")
            first = T.alloc_shared((num_experts,), "int32")
            sums = T.alloc_shared((warps,), "int32")
            here = T.alloc_local((warps,), "int32")
            expert = T.alloc_var("int32", -1)
            peers = T.alloc_var("uint32")
            rank = T.alloc_var("int32", 0)
            weight = T.alloc_var("float32", 0)
            before = T.alloc_var("int32", 0)
            total = T.alloc_var("int32", 0)
            tiles = T.alloc_var("int32", 0)
            scan = T.alloc_var("int32", 0)
            other = T.alloc_var("int32", 0)
            all_tiles = T.alloc_var("int32", 0)

            if slot < num_slots:
                expert = ids[slot]
                weight = weights[slot]
            for i in T.unroll(-(-warps * num_experts // threads)):
                if i * threads + thread < warps * num_experts:
                    held[
                        (i * threads + thread) // num_experts, (i * threads + thread) % num_experts
                    ] = 0
            # Slots of the same expert in lanes below mine.
            peers = T.match_any_sync(expert)
            rank = T.popcount(
                peers & ((T.Cast("uint32", 1) << T.Cast("uint32", lane)) - T.Cast("uint32", 1))
            )
            T.sync_threads()
            if expert >= 0 and rank == 0:
                held[warp, expert] = T.popcount(peers)
            T.sync_threads()
            if thread < num_experts:
                if not one_block:
                    for b in T.serial(num_blocks):
                        other = counts[b, thread]
                        if b < block:
                            before += other
                        total += other
                for w in T.unroll(warps):
                    here[w] = held[w, thread]
                other = 0
                for w in T.unroll(warps):
                    held[w, thread] = other
                    other += here[w]
                if one_block:
                    total = other
            tiles = T.ceildiv(total, token_tile)
            # Sum of tiles up to this thread: over lanes, then over warps.
            scan = tiles
            for step in T.unroll(5):
                other = T.shfl_up(scan, 1 << step)
                if lane >= 1 << step:
                    scan += other
            if lane == 31:
                sums[warp] = scan
            T.sync_threads()
            for w in T.unroll(warps):
                if w < warp:
                    scan += sums[w]
                all_tiles += sums[w]
            if thread < num_experts:
                first[thread] = (scan - tiles) * token_tile + before
                # Blocks share out what is to write once for an expert.
                if thread % num_blocks == block:
                    for i in T.serial(tiles):
                        tile_expert[scan - tiles + i] = thread
                    for i in T.serial(tiles * token_tile - total):
                        rows[(scan - tiles) * token_tile + total + i] = -1
            if block == 0:
                for i in T.serial(T.ceildiv(max_tiles - all_tiles, threads)):
                    if all_tiles + i * threads + thread < max_tiles:
                        tile_expert[all_tiles + i * threads + thread] = -1
            T.sync_threads()
            if slot < num_slots:
                if expert >= 0:
                    other = first[expert] + held[warp, expert] + rank
                    place[slot] = other
                    rows[other] = slot
                    sorted_weights[other] = weight
                else:
                    place[slot] = -1

    return place_slots


def most_tiles(num_slots: int, num_experts: int, token_tile: int) -> int:
    """Returns the most tiles that any choice of experts fills: all but a row of a tile may be lost on every expert."""
    return (num_slots + min(num_slots, num_experts) * (token_tile - 1)) // token_tile


def expert_tiles(
    ids: Tensor, weights: Tensor, num_experts: int, token_tile: int
) -> tuple[ExpertTiles, Tensor]:
    """Sorts slots by expert, then by slot, and pads every expert's to tiles of `token_tile`.

    Args:
        ids: int32 `[T, count]` below `num_experts`; -1 leaves the slot out.
        weights: fp32 `[T, count]`.
        num_experts: M.
        token_tile: rows of a tile.

    Returns:
        The tiles, and the sorted place int32 `[T, count]` of every slot (-1 where left out).

    Raises:
        ValueError: more than 1024 experts, or shapes or types differ.
    """
    if num_experts > THREADS[-1]:
        raise ValueError(f"{num_experts} experts: at most {THREADS[-1]}")
    if weights.shape != ids.shape:
        raise ValueError("expert_tiles: ids and weights are [T, count]")
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"ids are {ids.dtype} and weights {weights.dtype}, not int32 and fp32")
    num_slots, device = ids.numel(), ids.device
    max_tiles = most_tiles(num_slots, num_experts, token_tile)
    place = torch.empty_like(ids)
    tile_expert = torch.empty(max_tiles, dtype=torch.int32, device=device)
    rows = torch.empty(max_tiles * token_tile, dtype=torch.int32, device=device)
    sorted_weights = torch.empty(len(rows), dtype=torch.float32, device=device)
    if num_slots:
        fits = max(num_slots, num_experts) <= THREADS[0]
        threads = THREADS[0] if fits else THREADS[1]
        blocks = -(-num_slots // threads)
        counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=device)
        flat = ids.view(-1)
        if blocks > 1:
            build(_count_slots, num_experts)(flat, counts)
        build(_place_slots, num_experts, threads, blocks == 1)(
            flat,
            weights.view(-1),
            counts,
            place.view(-1),
            rows,
            sorted_weights,
            tile_expert,
            token_tile,
        )
    return ExpertTiles(rows, sorted_weights, tile_expert, ids.shape[1]), place


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash."""
    kernels = []
    for num_experts in (384, 128):
        kernels.append(Variant(f"count_slots.{num_experts}", _count_slots, (num_experts,)))
        for threads, one_block in ((512, True), (1024, True), (1024, False)):
            name = f"place_slots.{num_experts}.{threads}.{'one' if one_block else 'many'}"
            kernels.append(Variant(name, _place_slots, (num_experts, threads, one_block)))
    return kernels
