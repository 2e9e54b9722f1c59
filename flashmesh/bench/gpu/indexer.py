"""The indexer: scores of cached keys and selections from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashmesh.bench.gpu.case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator


HEADS, WIDTH = 32, 128
KEY_BYTES = WIDTH // 2 + WIDTH // 32
PAGE_ROWS = 64
L2_BYTES = 60 << 20


def _cache(sequences: int, context: int, rows: int, sets: int) -> Any:
    """Sets of arguments of `index_scores`: one pool, in which every set has pages of its own."""
    pages = context // PAGE_ROWS
    total = sets * sequences * pages
    ik = torch.randint(0, 256, (total, PAGE_ROWS * KEY_BYTES), dtype=torch.uint8, device="cuda")
    # Scales of 2^-3 to 2^4.
    ik[:, PAGE_ROWS * WIDTH // 2 :].remainder_(8).add_(124)
    tables = torch.randperm(total, device="cuda").int().view(sets, sequences, pages)
    count = sequences * rows
    iq = torch.randn(count, HEADS, WIDTH, device="cuda").bfloat16()
    iw = torch.randn(count, HEADS, device="cuda")
    sequence = torch.arange(sequences, device="cuda").repeat_interleave(rows).int()
    visible = torch.full((count,), context, dtype=torch.int32, device="cuda")
    return [(iq, iw, ik, table, sequence, visible) for table in tables.contiguous()]


def cases() -> Iterator[Case]:
    """Yields decode (sequences, rows of each, keys) and prefill (one sequence) sizes."""
    yield from _index_scores()
    yield from _candidate_scores()
    yield from _selections()


def _index_scores() -> Iterator[Case]:
    from flashmesh.kernels.tilelang.index_scores import index_scores

    for sequences, rows, context in (
        (1, 1, 1 << 20),
        (64, 1, 4096),
        (64, 1, 131072),
        (64, 6, 32768),
        (1, 2048, 65536),
    ):
        size = sequences * context * KEY_BYTES
        sets = _cache(sequences, context, rows, max(1, min(8, 2 * L2_BYTES // size)))
        yield Case(
            f"index_scores.{sequences}x{rows}x{context}",
            lambda call, sets=sets, context=context: index_scores(
                *sets[call % len(sets)], num_columns=context
            ),
            num_bytes=size + sequences * rows * (4 * context + sets[0][0][0].nbytes),
            num_flops=2 * sequences * rows * context * HEADS * WIDTH,
        )
        del sets


def _candidate_scores() -> Iterator[Case]:
    from flashmesh.kernels.tilelang.candidate import candidate_scores

    for rows in (64, 384):
        sets = _cache(64, 131072, rows // 64, 1)
        blocks = torch.stack(
            [torch.randperm(131072 // 8, device="cuda")[:2048].sort().values for _ in range(rows)]
        ).int()
        yield Case(
            f"candidate_scores.{rows}",
            lambda _, sets=sets, blocks=blocks: candidate_scores(*sets[0], blocks),
            num_bytes=rows * 16384 * (KEY_BYTES + 4) + blocks.nbytes + sets[0][0].nbytes,
            num_flops=2 * rows * 16384 * HEADS * WIDTH,
        )
        del sets, blocks


def _selections() -> Iterator[Case]:
    from flashmesh.kernels.tilelang.top_rows import top_blocks, top_rows

    for rows, columns in ((64, 16384), (64, 131072), (16, 1 << 20), (2048, 65536)):
        count = max(1, min(8, 2 * L2_BYTES // (rows * columns * 4)))
        scores = torch.randn(count, rows, columns, device="cuda")
        visible = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
        yield Case(
            f"top_rows.{rows}x{columns}",
            lambda call, s=scores, v=visible: top_rows(s[call % len(s)], v, 512),
            num_bytes=scores[0].nbytes + rows * 512 * 4,
            peer=lambda call, s=scores: torch.topk(s[call % len(s)], 512),
            peer_name="topk",
        )
        if columns > 16384:
            yield Case(
                f"top_blocks.{rows}x{columns}",
                lambda call, s=scores, v=visible: top_blocks(s[call % len(s)], v),
                num_bytes=scores[0].nbytes + rows * 2048 * 4,
            )
        del scores, visible
