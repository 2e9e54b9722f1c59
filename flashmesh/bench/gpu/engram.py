"""Engram: look-up and gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.bench.gpu.case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

D, STREAMS, COLUMNS, WIDTH = 5120, 4, 24, 256
TABLE_ROWS = 40_000_000
SETS = 4


def cases() -> Iterator[Case]:
    """Yields decode and prefill sizes; the table is a tenth of the model's."""
    yield from _rows()
    torch.cuda.empty_cache()
    yield from _gate()


def _rows() -> Iterator[Case]:
    from flashmesh.kernels.tilelang.engram_rows import engram_rows

    codes = torch.empty(TABLE_ROWS, WIDTH, dtype=torch.uint8, device="cuda").random_(0, 120)
    codes = codes.view(torch.float8_e4m3fn)
    scales = torch.empty(TABLE_ROWS, WIDTH // 32, dtype=torch.uint8, device="cuda")
    scales.random_(120, 130)
    for tokens in (64, 16384):
        rows = [torch.randint(0, TABLE_ROWS, (tokens, COLUMNS), device="cuda") for _ in range(SETS)]
        yield Case(
            f"engram_rows.{tokens}",
            lambda call, rows=rows: engram_rows(codes, scales, rows[call % SETS]),
            num_bytes=tokens * COLUMNS * (8 + WIDTH + WIDTH // 32 + 2 * WIDTH),
        )


def _gate() -> Iterator[Case]:
    from flashmesh.kernels.tilelang.engram_gate import engram_gate

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    q, k = normal(STREAMS, D), normal(STREAMS, D)
    for tokens in (64, 16384):
        streams = [normal(tokens, STREAMS, D) for _ in range(SETS)]
        kv = [normal(tokens, (STREAMS + 1) * D) for _ in range(SETS)]
        text = torch.ones(tokens, dtype=torch.bool, device="cuda")
        yield Case(
            f"engram_gate.{tokens}",
            lambda call, streams=streams, kv=kv, text=text: engram_gate(
                streams[call % SETS], kv[call % SETS], q, k, text
            ),
            num_bytes=2 * streams[0].nbytes + kv[0].nbytes + q.nbytes + k.nbytes + tokens,
        )
