"""FP8-32 rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.bench.gpu.case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator


def cases() -> Iterator[Case]:
    """Yields decode and prefill sizes."""
    from flashmesh.kernels.tilelang.rounding import round_rows

    for rows in (64, 16384):
        x = torch.randn(4, rows, 8192, device="cuda").bfloat16()
        yield Case(
            f"round_rows.{rows}",
            lambda call, x=x: round_rows(x[call % 4]),
            num_bytes=2 * x[0].nbytes,
        )
