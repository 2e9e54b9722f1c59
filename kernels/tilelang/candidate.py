"""Index scores of the candidate blocks; see `kernels.ops.indexer.candidate_scores`.

As `index_scores` does it for one row, but every warp of a tile takes its keys from two blocks, which may lie on
different pages.
"""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.index_scores import (
    HEADS,
    KEY_WORDS,
    SCALE_PAIR,
    TILE,
    WIDTH,
    check_inputs,
    macros,
)

BLOCK = 8
CHUNK = 1024
"""Columns of a block of threads."""


def _candidate_scores(page_rows: int, num_blocks: int) -> Any:
    import tilelang.language as T

    put_query, unpack_multiply, _, head_sum = macros(1, 4)
    num_rows, num_pages = T.dynamic("num_rows"), T.dynamic("num_pages")
    num_sequences, max_pages = T.dynamic("num_sequences"), T.dynamic("max_pages")
    num_columns = num_blocks * BLOCK
    chunk = min(CHUNK, num_columns)
    places_of_tile = TILE // BLOCK

    @T.macro
    def fetch(ik, firsts, places, end, tile, pair, key, quarter, codes, scales):
        for half in T.unroll(2):
            i = tile * places_of_tile + pair + half
            if firsts[i] < end:
                page = places[i] // page_rows
                base = places[i] % page_rows + key
                for v in T.vectorized(4):
                    codes[half * 4 + v] = ik[page, base * KEY_WORDS + quarter * 4 + v]
                scales[half] = ik[page, page_rows * KEY_WORDS + base]

    @T.prim_func
    def candidate_scores(
        iq: T.Tensor((num_rows, HEADS, WIDTH // 2), "uint32"),
        iw: T.Tensor((num_rows, HEADS), "float32"),
        ik: T.Tensor((num_pages, page_rows * (KEY_WORDS + 1)), "uint32"),
        page_table: T.Tensor((num_sequences, max_pages), "int32"),
        sequence: T.Tensor((num_rows,), "int32"),
        visible: T.Tensor((num_rows,), "int32"),
        blocks: T.Tensor((num_rows, num_blocks), "int32"),
        scores: T.Tensor((num_rows, num_columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_columns, chunk), num_rows, threads=128) as (bx, row):
            T.import_source(SCALE_PAIR)
            T.annotate_min_blocks_per_sm(6)
            queries = T.alloc_shared((HEADS * WIDTH // 2,), "uint32")
            weights = T.alloc_shared((HEADS,), "float32")
            firsts = T.alloc_shared((chunk // BLOCK,), "int32")
            places = T.alloc_shared((chunk // BLOCK,), "int32")
            codes = T.alloc_local((8,), "uint32")
            scales = T.alloc_local((2,), "uint32")
            scale = T.alloc_local((2,), "uint32")
            a = T.alloc_local((32,), "uint32")
            acc = T.alloc_local((16,), "float32")
            total = T.alloc_local((2,), "float32")
            desc = T.alloc_wgmma_desc()
            thread = T.get_thread_binding()
            quarter = thread % 4
            pair = thread // 32 * 2  # this warp's first block of a tile
            key = thread % 32 // 4
            end = visible[row]
            tiles = T.min(chunk, num_columns - bx * chunk) // TILE

            for step in T.serial(T.ceildiv(chunk // BLOCK, 128)):
                i = step * 128 + thread
                if i < tiles * places_of_tile:
                    block = blocks[row, bx * (chunk // BLOCK) + i]
                    firsts[i] = T.if_then_else(block < 0, end, block * BLOCK)
                    if firsts[i] < end:
                        page = page_table[sequence[row], firsts[i] // page_rows]
                        places[i] = page * page_rows + firsts[i] % page_rows
            put_query(iq, row, queries, 0, thread, 128)
            if thread < HEADS:
                weights[thread] = iw[row, thread] * T.float32(2.0**31)
            for i in T.unroll(8):
                codes[i] = 0
            for half in T.unroll(2):
                scales[half] = 0
            T.fence_proxy_async()
            T.sync_threads()
            T.initialize_wgmma_descriptor(desc, T.access_ptr(queries[0], "r"), 1, 1, 64)

            fetch(ik, firsts, places, end, 0, pair, key, quarter, codes, scales)
            for tile in T.serial(tiles):
                if firsts[tile * places_of_tile] < end:  # what is absent stands last
                    unpack_multiply(codes, scales, 0, quarter, desc, 0, scale, a, acc)
                    if tile + 1 < tiles:
                        fetch(ik, firsts, places, end, tile + 1, pair, key, quarter, codes, scales)
                    head_sum(a, acc, weights, 0, quarter, total)
                if quarter < 2:
                    at = tile * places_of_tile + pair + quarter
                    scores[row, bx * chunk + at * BLOCK + key] = T.if_then_else(
                        firsts[at] + key < end, total[0], -T.infinity("float32")
                    )

    return candidate_scores


_candidate_scores.pass_configs = {
    "tl.disable_safe_memory_legalize": True,  # every access is in bounds
    "tl.disable_thread_storage_sync": True,  # the one barrier stands where it is needed
}


def candidate_scores(
    iq: Tensor,
    iw: Tensor,
    ik: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    visible: Tensor,
    blocks: Tensor,
    *,
    block: int = 8,
) -> Tensor:
    """Scores candidates; contract of `kernels.ops.indexer.candidate_scores`.

    Raises:
        ValueError: see `index_scores`; or blocks are not of 8 keys, or their number is no multiple of 8.
    """
    page_rows = check_inputs(iq, iw, ik, sequence, visible)
    num_rows, num_blocks = blocks.shape
    if block != BLOCK or num_blocks % (TILE // BLOCK) or num_rows != len(iq):
        raise ValueError(
            f"{num_blocks} blocks of {block} keys for {num_rows} rows: needs a multiple of 8 blocks of 8 keys for"
            f" {len(iq)} rows"
        )
    scores = torch.empty(num_rows, num_blocks * block, dtype=torch.float32, device=iq.device)
    if num_rows and num_blocks:
        words = iq.view(torch.uint32), iw, ik.view(torch.uint32)
        kernel = build(_candidate_scores, page_rows, num_blocks)
        kernel(*words, page_table, sequence, visible, blocks, scores)
    return scores


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: 2048 blocks; keys of two tokens or of one."""
    return [
        Variant(f"candidate_scores.{rows}", _candidate_scores, (rows, 2048)) for rows in (64, 128)
    ]
