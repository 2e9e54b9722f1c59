"""What a selection means: keys of candidate columns, and rows of the page pool; see `kernels.ops.indexer`."""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build

THREADS = 256


def _gather_columns(count: int, num_blocks: int, block: int) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")

    @T.prim_func
    def gather_columns(
        columns: T.Tensor((num_rows, count), "int32"),
        blocks: T.Tensor((num_rows, num_blocks), "int32"),
        keys: T.Tensor((num_rows, count), "int32"),
    ):
        with T.Kernel(num_rows, threads=THREADS) as row:
            for i in T.Parallel(count):
                column = columns[row, i]
                keys[row, i] = T.if_then_else(
                    column < 0, -1, blocks[row, T.max(column, 0) // block] * block + column % block
                )

    return gather_columns


def gather_columns(columns: Tensor, blocks: Tensor, *, block: int = 8) -> Tensor:
    """Maps columns to keys; contract of `kernels.ops.indexer.gather_columns`."""
    keys = torch.empty_like(columns)
    if len(columns):
        kernel = build(_gather_columns, columns.shape[1], blocks.shape[1], block)
        kernel(columns, blocks, keys)
    return keys


def _physical_rows(count: int, rows_per_page: int) -> Any:
    import tilelang.language as T

    num_rows = T.dynamic("num_rows")
    num_sequences, max_pages = T.dynamic("num_sequences"), T.dynamic("max_pages")

    @T.prim_func
    def physical_rows(
        selected: T.Tensor((num_rows, count), "int32"),
        page_table: T.Tensor((num_sequences, max_pages), "int32"),
        sequence: T.Tensor((num_rows,), "int32"),
        rows: T.Tensor((num_rows, count), "int32"),
    ):
        with T.Kernel(num_rows, threads=THREADS) as row:
            for i in T.Parallel(count):
                key = selected[row, i]
                page = page_table[sequence[row], T.max(key, 0) // rows_per_page]
                rows[row, i] = T.if_then_else(
                    key < 0, -1, page * rows_per_page + key % rows_per_page
                )

    return physical_rows


def physical_rows(
    selected: Tensor, page_table: Tensor, sequence: Tensor, rows_per_page: int
) -> Tensor:
    """Maps keys to rows of the page pool; contract of `kernels.ops.indexer.physical_rows`."""
    rows = torch.empty_like(selected)
    if len(selected):
        kernel = build(_physical_rows, selected.shape[1], rows_per_page)
        kernel(selected, page_table, sequence, rows)
    return rows


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: 512 selected, 2048 candidate blocks, pools of 64 and 128 rows a page."""
    return [
        Variant("gather_columns", _gather_columns, (512, 2048, 8)),
        *(Variant(f"physical_rows.{n}", _physical_rows, (512, n)) for n in (64, 128)),
    ]
