"""Products with a weight: F8 weights, which stay codes and scales, and bf16 ones.

The input of an F8 product was rounded to FP8-32 before (`ops.rounding`), or comes as it is where the model rounds
nothing: either way it is a bf16 tensor, and a weight's e4m3 code times its power of two is exact in bf16 as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.formats import expand

if TYPE_CHECKING:
    from torch import Tensor

SCALE_BYTES = (16, 134)
"""E8M0 bytes that every backend takes: 2^-111 to 2^7. Within them no step of the expansion to bf16 can round."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A prepared F8 weight.

    Attributes:
        values: bf16 `[N, K]`.
        groups: blocks of rows, each with its own columns of the input.
    """

    values: Tensor
    groups: int


def prepare_dense(codes: Tensor, scales: Tensor, groups: int = 1) -> DenseWeight:
    """Lays an F8 weight out for `dense`; done once, when it is loaded.

    Args:
        codes: e4m3 `[N, K]`.
        scales: uint8 E8M0 `[N/32, K/32]`, rounded up.
        groups: G; rows `g * N/G` up to `(g + 1) * N/G` take columns `g * K` up to `(g + 1) * K` of the input.

    Raises:
        ValueError: shapes or dtypes do not fit, or a scale is outside `SCALE_BYTES`.
    """
    check_dense(codes, scales, groups)
    values = expand("F8", codes, scales.view(torch.float8_e8m0fnu))
    return DenseWeight(values.bfloat16(), groups)


def check_dense(codes: Tensor, scales: Tensor, groups: int) -> None:
    """Refuses what `prepare_dense` must; one synchronisation for the range of the scales.

    Raises:
        ValueError: see `prepare_dense`.
    """
    if codes.dim() != 2 or codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes: expected e4m3 [N, K], got {codes.dtype} {list(codes.shape)}")
    tiles = [-(-extent // 32) for extent in codes.shape]
    if scales.dtype != torch.uint8 or list(scales.shape) != tiles:
        raise ValueError(f"scales: expected uint8 {tiles}, got {scales.dtype} {list(scales.shape)}")
    if groups < 1 or codes.shape[0] % groups:
        raise ValueError(f"{codes.shape[0]} rows do not make {groups} groups")
    if scales.numel():
        low, high = torch.stack(scales.aminmax()).tolist()
        if low < SCALE_BYTES[0] or high > SCALE_BYTES[1]:
            raise ValueError(f"scales: bytes {low} to {high}, supported are {SCALE_BYTES}")


def dense(x: Tensor, weight: DenseWeight) -> Tensor:
    """Multiplies rows with an F8 weight, `x @ W.T`, or block by block where the weight has groups.

    Args:
        x: bf16 `[T, G * K]`.
        weight: from `prepare_dense`, `[N, K]` with G groups.

    Returns:
        bf16 `[T, N]`: sums in fp32, rounded once.
    """
    check_input(x, weight.groups * weight.values.shape[1])
    blocks = weight.values.float().chunk(weight.groups)
    parts = x.float().chunk(weight.groups, dim=1)
    return torch.cat([p @ b.T for p, b in zip(parts, blocks, strict=True)], dim=1).bfloat16()


def plain_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiplies rows with a bf16 weight, `x @ weight.T`.

    Args:
        x: bf16 `[T, K]`.
        weight: bf16 `[N, K]`.
        out_dtype: bf16 or fp32.

    Returns:
        `[T, N]`: sums in fp32, rounded once for bf16.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_plain(x, weight, out_dtype)
    return (x.float() @ weight.float().T).to(out_dtype)


def check_input(x: Tensor, width: int) -> None:
    """Refuses an input that is not bf16 `[T, width]`.

    Raises:
        ValueError: names what it is.
    """
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"x: expected bfloat16 [T, {width}], got {x.dtype} {list(x.shape)}")


def check_plain(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> None:
    """Refuses what `plain_linear` must.

    Raises:
        ValueError: see `plain_linear`.
    """
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        raise ValueError(
            f"weight: expected bfloat16 [N, K], got {weight.dtype} {list(weight.shape)}"
        )
    check_input(x, weight.shape[1])
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype: expected bfloat16 or float32, got {out_dtype}")
