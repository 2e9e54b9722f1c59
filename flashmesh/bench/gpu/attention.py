"""Sparse attention: decode steps of 1 to 384 rows, chunks of prompts, and layers with only a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashmesh.bench.gpu.case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

DECODE_CONTEXT = 8192
"""Compressed rows of a decoding sequence, of which 512 are selected at random."""


def cases() -> Iterator[Case]:
    """Yields rows of different sequences, then rows of one prompt."""
    for rows in (1, 64, 192, 384):
        yield _case(f"sparse_attention.{rows}", rows, 512, decode=True)
    yield _case("sparse_attention.16384", 16384, 512, decode=False)
    yield _case("sparse_attention.window.64", 64, 0, decode=True)
    yield _case("sparse_attention.window.16384", 16384, 0, decode=False)


def _case(name: str, rows: int, selected: int, *, decode: bool) -> Case:
    from flashmesh.kernels.tilelang.attention import sparse_attention

    sets = [_inputs(rows, selected, decode=decode) for _ in range(4 if decode else 1)]
    q, cos, sin, _, window_index, _, kv_index, sink = sets[0]
    unique = [torch.unique(index[index >= 0]).numel() for index in (window_index, kv_index)]
    gathered = unique[0] * 528 + unique[1] * 288
    small = sum(x.nbytes for x in (cos, sin, window_index, kv_index, sink))
    return Case(
        name,
        lambda call: sparse_attention(*sets[call % len(sets)], scale=512**-0.5),
        num_bytes=2 * q.nbytes + small + gathered,
        num_flops=rows * 64 * (128 + selected) * 512 * 4,
    )


def _inputs(rows: int, selected: int, *, decode: bool) -> Any:
    """Arguments without the scale; rows of decode have keys of their own, those of a prompt share them."""

    def random_bytes(count: int, width: int) -> Tensor:
        return torch.randint(0, 256, (count, width), dtype=torch.uint8, device="cuda")

    sequences = rows if decode else 1
    per_sequence = DECODE_CONTEXT if decode else max(rows // 2, 512)
    # Finite codes, and scales near one.
    window = random_bytes(sequences * 128 + (0 if decode else rows), 528) & 0xBF
    window[:, 512:] = 120
    kv = random_bytes(sequences * per_sequence if selected else 0, 288)
    kv[:, 256:] = 0x38 + kv[:, 256:] % 8
    at = torch.arange(rows, device="cuda").unsqueeze(1)
    window_index = at * (128 if decode else 1) + torch.arange(128, device="cuda")
    if selected:
        picked = [
            torch.randperm(per_sequence, device="cuda")[:selected] for _ in range(min(rows, 384))
        ]
        kv_index = torch.stack(picked).repeat(-(-rows // len(picked)), 1)[:rows]
        kv_index = kv_index + (at * per_sequence if decode else 0)
    else:
        kv_index = torch.empty(rows, 0, device="cuda")
    angle = torch.rand(rows, 32, device="cuda") * 6
    return (
        torch.randn(rows, 64, 512, device="cuda").bfloat16(),
        angle.cos(),
        angle.sin(),
        window,
        window_index.int(),
        kv,
        kv_index.int().contiguous(),
        torch.randn(64, device="cuda"),
    )
