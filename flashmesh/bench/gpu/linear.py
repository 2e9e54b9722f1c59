"""Products with F8 and bf16 weights, at V4.1-Flash's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.bench.gpu.case import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

DENSE = (
    "latents",
    "queries",
    "index_queries",
    "output_a",
    "output_b",
    "shared_up",
    "shared_down",
    "engram",
)
"""Weights by name; their shapes are the kernels'."""

PLAIN = {
    "compressor": (512, 5120, torch.float32),
    "gate": (384, 5120, torch.float32),
    "index_weights": (32, 5120, torch.float32),
    "index_key": (128, 512, torch.bfloat16),
    "head": (129280, 5120, torch.float32),
}
DECODE = (1, 16, 64)
PREFILL = (1024, 16384)
COLD_BYTES = 200 << 20
"""Weights in turn exceed the L2 cache several times over."""


def cases() -> Iterator[Case]:
    """Yields decode sizes with row-wise FP8 products as peer, and prefill sizes with bf16 ones."""
    from flashmesh.kernels.tilelang.dense import SHAPES

    for name in DENSE:
        rows, columns, groups = SHAPES[name]
        for tokens in DECODE + PREFILL:
            yield _dense(f"dense.{name}.{tokens}", rows, columns, groups, tokens)
    for name, (rows, columns, out_dtype) in PLAIN.items():
        for tokens in DECODE + (PREFILL if rows <= 1024 else ()):
            yield _plain(f"plain.{name}.{tokens}", rows, columns, out_dtype, tokens)


def _dense(name: str, rows: int, columns: int, groups: int, tokens: int) -> Case:
    from flashmesh.kernels.tilelang.dense import dense, prepare_dense

    turns = _turns(rows * columns)
    bits = torch.randint(0, 256, (turns, rows, columns), device="cuda", dtype=torch.uint8)
    codes = torch.where(bits & 0x7F == 0x7F, bits ^ 1, bits).view(torch.float8_e4m3fn)
    scales = torch.randint(108, 116, (rows // 32, columns // 32), device="cuda", dtype=torch.uint8)
    weights = [prepare_dense(c, scales, groups) for c in codes]
    x = torch.randn(tokens, groups * columns, device="cuda").bfloat16()
    peer, peer_name = None, ""
    if groups == 1 and tokens in PREFILL:
        peer, peer_name = _bf16_peer(x, codes[0].bfloat16()), "bf16 matmul"
    elif groups == 1 and tokens >= 16:
        peer, peer_name = _fp8_peer(x.to(torch.float8_e4m3fn), codes), "_scaled_mm"
    return Case(
        name,
        lambda call: dense(x, weights[call % turns]),
        num_bytes=rows * columns + scales.nbytes + x.nbytes + 2 * tokens * rows,
        num_flops=2 * tokens * rows * columns,
        peer=peer,
        peer_name=peer_name,
    )


def _plain(name: str, rows: int, columns: int, out_dtype: torch.dtype, tokens: int) -> Case:
    from flashmesh.kernels.tilelang.plain_linear import plain_linear

    turns = _turns(2 * rows * columns)
    weights = torch.randn(turns, rows, columns, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    return Case(
        name,
        lambda call: plain_linear(x, weights[call % turns], out_dtype),
        num_bytes=weights[0].nbytes + x.nbytes + out_dtype.itemsize * tokens * rows,
        num_flops=2 * tokens * rows * columns,
        peer=lambda call: x @ weights[call % turns].t(),
        peer_name="bf16 matmul",
    )


def _bf16_peer(x: Tensor, weight: Tensor) -> Callable[[int], object]:
    return lambda _: x @ weight.t()


def _fp8_peer(x: Tensor, codes: Tensor) -> Callable[[int], object]:
    ones = torch.ones(max(len(x), codes.shape[1]), device="cuda")
    return lambda call: torch._scaled_mm(
        x,
        codes[call % len(codes)].t(),
        scale_a=ones[: len(x), None],
        scale_b=ones[None, : codes.shape[1]],
        out_dtype=torch.bfloat16,
    )


def _turns(num_bytes: int) -> int:
    return min(max(2, -(-COLD_BYTES // num_bytes)), 32)
