"""The mixture of experts: routing, routed experts on packed weights, the shared expert's SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.formats import expand
from flashmesh.kernels.ops.rounding import round_rows
from flashmesh.kernels.quantize import fp8_32
from flashmesh.kernels.reference import moe
from flashmesh.kernels.reference.basics import linear

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Routed experts of one layer as a checkpoint stores them: two e2m1 codes a byte, an E8M0 scale byte for each row
    and 32 columns.

    Attributes:
        w1, w3: uint8 `[M, n, D/2]`.
        s1, s3: uint8 `[M, n, D/32]`.
        w2: uint8 `[M, D, n/2]`.
        s2: uint8 `[M, D, n/32]`.
    """

    w1: Tensor
    s1: Tensor
    w3: Tensor
    s3: Tensor
    w2: Tensor
    s2: Tensor

    def __getitem__(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Expands w1, w2 and w3 of an expert to fp32, exactly."""
        return (
            expand("F4", self.w1[expert], self.s1[expert]),
            expand("F4", self.w2[expert], self.s2[expert]),
            expand("F4", self.w3[expert], self.s3[expert]),
        )


def prepare_experts(
    w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor, w2: Tensor, s2: Tensor
) -> ExpertWeights:
    """Takes the experts of a layer as stored; the twin keeps them so, a kernel's counterpart rearranges them."""
    return ExpertWeights(w1, s1, w3, s3, w2, s2)


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    bias_vl: Tensor,
    text: Tensor,
    count: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Chooses experts by `sqrt(softplus(x . gate)) + bias`, and weighs them by that score without the bias.

    Scores are fp32 from exact products of bf16 values. The order is total: score descending, then id ascending.

    Args:
        x: bf16 `[T, D]`.
        gate: bf16 `[M, D]`.
        bias, bias_vl: fp32 `[M]`, of text tokens and of tokens in an image span.
        text: bool `[T]`.
        count: experts of a token, at most M.
        scaling: sum of a token's weights.

    Returns:
        Expert ids int32 and weights fp32, both `[T, count]`, best first.
    """
    chosen_bias = torch.where(text.unsqueeze(1), bias, bias_vl)
    ids, weights = moe.route(x.float(), gate.float(), chosen_bias, count, scaling)
    return ids.int(), weights


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights,
    limit: float,
    round_activations: bool,
    shared: Tensor | None = None,
) -> Tensor:
    """Runs every token through its experts and adds up, in slot order.

    Of an expert: g and u `[n]` are bf16 products with w1 and w3; `silu(min(g, limit)) * clamp(u, +-limit) * weight` in
    fp32 is rounded to bf16, then maybe to FP8-32; its product with w2 is bf16. The fp32 sum over slots is bf16 again.

    Args:
        x: bf16 `[T, D]`, rounded to FP8-32 before where activations are.
        ids: int32 `[T, count]`; -1 skips the slot, any number of them.
        weights: fp32 `[T, count]`.
        w: from `prepare_experts`.
        limit: of the clamps.
        round_activations: whether inputs of F4 products are rounded to FP8-32.
        shared: bf16 `[T, D]`, added to the rounded sum, or None.

    Returns:
        bf16 `[T, D]`.
    """

    def gemm(a: Tensor, weight: Tensor) -> Tensor:
        a = a.bfloat16().float()
        # x was rounded before; rounding it again changes nothing.
        return linear(fp8_32(a) if round_activations else a, weight).bfloat16().float()

    if not len(x):
        return torch.empty_like(x)
    total = moe.routed(x.float(), ids, weights, w, limit, gemm).bfloat16()
    return total if shared is None else total + shared


def combine(y: Tensor, place: Tensor, ids: Tensor, shared: Tensor | None = None) -> Tensor:
    """Adds up what a token's experts gave, in slot order, in fp32.

    Args:
        y: bf16 `[P, D]`, rows in the order in which experts ran.
        place: int32 `[T, count]`, the row of every slot; any number where the id is -1.
        ids: int32 `[T, count]`; -1 skips the slot.
        shared: bf16 `[T, D]`, added to the rounded sum, or None.

    Returns:
        bf16 `[T, D]`.
    """
    total = torch.zeros(len(ids), y.shape[1], device=y.device)
    for slot in range(ids.shape[1]):
        present = ids[:, slot] >= 0
        rows = y[place[:, slot].long().masked_fill(~present, 0)].float()
        total += torch.where(present.unsqueeze(1), rows, 0)
    total = total.bfloat16()
    return total if shared is None else total + shared


def swiglu(gu: Tensor, limit: float, round_output: bool) -> Tensor:
    """The shared expert between its products: `silu(min(g, limit)) * clamp(u, +-limit)`.

    Args:
        gu: bf16 `[T, 2n]`: n columns of g (from w1), then n of u (from w3).
        limit: of the clamps.
        round_output: whether to round to FP8-32 after bf16; n is a multiple of 32 then.

    Returns:
        bf16 `[T, n]`.
    """
    g, u = gu.float().chunk(2, 1)
    a = torch.nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)
    a = a.bfloat16()
    return round_rows(a) if round_output else a
