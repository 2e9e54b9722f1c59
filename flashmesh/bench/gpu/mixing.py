"""Hyper-connections: coefficients, collapse and spread of the residual streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.bench.gpu.case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN = 5120
ARGS = 20, 1e-6, 1e-20, True


def cases() -> Iterator[Case]:
    """Yields decode and prefill sizes."""
    for rows in (1, 64, 16384):
        yield from _cases(rows, 2 if rows > 1000 else 8)


def _cases(rows: int, sets: int) -> Iterator[Case]:
    from flashmesh.kernels.tilelang import mixing, spread

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    fn = normal(24, 4 * HIDDEN) / 64
    weights = mixing.prepare_mix(fn, normal(24), normal(3))
    norm = normal(HIDDEN)
    streams = normal(sets, rows, 4, HIDDEN).bfloat16()
    y = normal(sets, rows, HIDDEN).bfloat16()
    post, comb, carried = normal(rows, 4).abs(), normal(rows, 4, 4).abs(), normal(rows, 4).abs()
    read, row = streams[0].nbytes, y[0].nbytes
    yield Case(
        f"mix.{rows}",
        lambda call: mixing.mix(streams[call % sets], carried, weights, norm, *ARGS),
        num_bytes=read + 2 * row + fn.nbytes,
    )
    yield Case(
        f"spread_mix.{rows}",
        lambda call: mixing.spread_mix(
            streams[call % sets], y[call % sets], post, comb, carried, weights, norm, *ARGS
        ),
        num_bytes=2 * read + 3 * row + fn.nbytes,
    )
    yield Case(
        f"spread.{rows}",
        lambda call: spread.spread(streams[call % sets], y[call % sets], post, comb),
        num_bytes=2 * read + row,
    )
    yield Case(
        f"collapse_norm.{rows}",
        lambda call: spread.collapse_norm(streams[call % sets], carried, norm, ARGS[2]),
        num_bytes=read + row,
    )
