"""The indexer of CSA2 attention: scores of cached keys, and the selections made from them.

A selection is exact under one total order (score descending, then column ascending, -0 equal to +0; see
`kernels.reference.select`), so it depends neither on the batch nor on columns beyond the visible ones. Entries of
-inf are never selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmesh.kernels.quantize import unpack_mxfp4_32
from flashmesh.kernels.reference import select

_MAX_PRODUCTS = 1 << 24
"""Products of a head with a key held at once; bounds memory."""


def index_scores(
    iq: Tensor,
    iw: Tensor,
    ik: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    visible: Tensor,
    num_columns: int,
) -> Tensor:
    """Scores the keys of every row's sequence: the sum over index heads of relu(q . k) * w.

    Key j of a sequence is row `j % rows` of page `page_table[sequence, j // rows]`. A page of `rows` keys holds their
    e2m1 codes first (F/2 bytes a key, the even dimension in the low half), then their E8M0 scales (F/32 bytes a key).

    Args:
        iq: bf16 `[T, I, F]`, MXFP4-32 values. Rows of one sequence are adjacent.
        iw: fp32 `[T, I]`.
        ik: uint8 `[pages, rows * (F/2 + F/32)]`.
        page_table: int32 `[S, max_pages]`; entries beyond the visible keys may be anything.
        sequence: int32 `[T]`, row of the page table.
        visible: int32 `[T]`: keys below it are scored; at most `num_columns` and what the page table spans.
        num_columns: J, a multiple of 128.

    Returns:
        fp32 `[T, J]`, -inf at columns that are not visible.
    """
    scores = torch.full((len(iq), num_columns), -torch.inf, device=iq.device)
    for index in sequence.unique().tolist():
        rows = (sequence == index).nonzero().squeeze(1)
        most = int(visible[rows].max())
        columns = torch.arange(most, device=iq.device).expand(1, -1)
        keys = _keys(ik, iq.shape[2], page_table[index : index + 1], columns).squeeze(0)
        step = max(1, _MAX_PRODUCTS // max(1, iq.shape[1] * most))
        for part in rows.split(step):
            found = _scores(iq[part], iw[part], keys.expand(len(part), -1, -1))
            scores[part, :most] = found.masked_fill_(columns >= visible[part, None], -torch.inf)
    return scores


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
    """Scores the candidates only: column i is key `blocks[i // block] * block + i % block`.

    A key's score is the one of `index_scores`, bit for bit.

    Args:
        iq, iw, ik, page_table, sequence, visible: see `index_scores`.
        blocks: int32 `[T, B]`, block ids, -1 where there is none.
        block: keys of a block; a page holds whole blocks.

    Returns:
        fp32 `[T, B * block]`, -inf where there is no block or the key is not visible.
    """
    columns = expand_blocks(blocks, block)
    present = (columns >= 0) & (columns < visible[:, None])
    columns = torch.where(present, columns, 0)
    scores = torch.full(columns.shape, -torch.inf, device=iq.device)
    step = max(1, _MAX_PRODUCTS // max(1, iq.shape[1] * columns.shape[1]))
    for part in torch.arange(len(iq), device=iq.device).split(step):
        tables = page_table[sequence[part].long()]
        # Without a visible key the table may hold anything.
        used = torch.where(present[part].any(1, keepdim=True), tables, 0)
        keys = _keys(ik, iq.shape[2], used, columns[part])
        scores[part] = _scores(iq[part], iw[part], keys).masked_fill_(~present[part], -torch.inf)
    return scores


def top_rows(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Selects the best `count` visible columns of every row.

    Args:
        scores: fp32 `[T, J]`, without NaN; columns that are not visible may hold anything.
        visible: int32 `[T]`: columns below it may be selected, unless they hold -inf.
        count: a multiple of 16, at most 4096.

    Returns:
        int32 `[T, count]`, columns ascending, then -1.
    """
    column = torch.arange(scores.shape[1], device=scores.device)
    allowed = (column < visible[:, None]) & (scores != -torch.inf)
    return select.top_rows(scores, allowed, count).int()


def top_blocks(scores: Tensor, visible: Tensor, *, block: int = 8, count: int = 2048) -> Tensor:
    """Selects the candidate pool: the blocks of columns with the best maxima.

    The block of the last visible column always stays.

    Args:
        scores: fp32 `[T, J]`, J a multiple of `block`, without NaN; visible columns are finite.
        visible: int32 `[T]`.
        block: columns of a block.
        count: blocks of a pool.

    Returns:
        int32 `[T, count]`, ids of blocks that have visible columns, ascending, then -1.
    """
    seen = torch.arange(scores.shape[1], device=scores.device) < visible[:, None]
    return select.candidate_blocks(scores, seen, block=block, count=count).int()


def gather_columns(columns: Tensor, blocks: Tensor, *, block: int = 8) -> Tensor:
    """Maps columns of `candidate_scores` back to keys.

    Args:
        columns: int32 `[T, K]`, ascending, then -1.
        blocks: int32 `[T, B]`, the candidates.
        block: keys of a block.

    Returns:
        int32 `[T, K]`, keys ascending, then -1.
    """
    found = blocks.gather(1, (columns.clamp(min=0) // block).long()) * block + columns % block
    return torch.where(columns < 0, -1, found)


def physical_rows(
    selected: Tensor, page_table: Tensor, sequence: Tensor, rows_per_page: int
) -> Tensor:
    """Maps keys of a sequence to rows of the page pool.

    Args:
        selected: int32 `[T, K]`, -1 where there is none.
        page_table: int32 `[S, max_pages]`.
        sequence: int32 `[T]`.
        rows_per_page: of the pool that the rows are read from.

    Returns:
        int32 `[T, K]`: `page_table[sequence, j // rows_per_page] * rows_per_page + j % rows_per_page`, or -1.
    """
    kept = selected.clamp(min=0)
    pages = page_table[sequence.long()].gather(1, (kept // rows_per_page).long())
    return torch.where(selected < 0, -1, pages * rows_per_page + kept % rows_per_page)


def expand_blocks(blocks: Tensor, block: int) -> Tensor:
    """Returns the keys `[T, B * block]` of blocks, -1 where there is no block."""
    keys = blocks[:, :, None] * block + torch.arange(
        block, device=blocks.device, dtype=blocks.dtype
    )
    return torch.where(blocks[:, :, None] < 0, -1, keys).flatten(1)


def _keys(ik: Tensor, width: int, tables: Tensor, columns: Tensor) -> Tensor:
    """Gathers and unpacks keys: fp32 `[R, n, F]` for tables `[R, max_pages]` and columns `[R, n]`."""
    rows = ik.shape[1] // (width // 2 + width // 32)
    codes = ik[:, : rows * (width // 2)].unflatten(1, (rows, -1))
    scales = ik[:, rows * (width // 2) :].unflatten(1, (rows, -1))
    columns = columns.long()
    pages = tables.long().gather(1, columns // rows)
    return unpack_mxfp4_32(codes[pages, columns % rows], scales[pages, columns % rows])


def _scores(iq: Tensor, iw: Tensor, keys: Tensor) -> Tensor:
    """fp32 `[R, n]` for keys `[R, n, F]`; heads are added one after the other."""
    # In fp64 these dots are exact unless scales lie 2^40 apart, and so the same whatever stands beside a key.
    dots = torch.bmm(iq.double(), keys.double().transpose(1, 2)).float().relu_()
    scores = dots[:, 0] * iw[:, 0:1]
    for head in range(1, iq.shape[1]):
        scores.addcmul_(dots[:, head], iw[:, head : head + 1])
    return scores
