"""The mixture of experts: routing by sqrt(softplus), SwiGLU experts, sums in slot order."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flashmesh.kernels.reference.basics import Gemm, linear
from flashmesh.kernels.reference.select import top_sorted
from flashmesh.kernels.shapes import pad_up


class Experts(Protocol):
    """Weights of one layer's experts, asked for only where a row goes there."""

    def __getitem__(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns w1 `[n, D]`, w2 `[D, n]` and w3 `[n, D]` of an expert, fp32."""


def route(
    x: Tensor, gate: Tensor, bias: Tensor, count: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Chooses experts and their weights.

    Args:
        x: fp32 `[R, D]`.
        gate: `[M, D]`.
        bias: `[R, M]` or `[M]`; moves the choice, never the weights.
        count: experts of a row.
        scaling: of the weights, which sum to it.

    Returns:
        Expert ids int64 and weights fp32, both `[R, count]`, best first.
    """
    scores = torch.nn.functional.softplus(linear(x, gate)).sqrt()
    chosen = top_sorted(scores + bias, count)
    picked = scores.gather(1, chosen)
    total = picked[:, 0:1].clone()
    for slot in range(1, count):
        total += picked[:, slot : slot + 1]
    return chosen, scaling * picked / (total + 1e-20)


def swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    limit: float,
    weight: Tensor | None,
    gemm: Gemm = linear,
) -> Tensor:
    """One expert: x `[R, D]` to `[R, D]`; `weight` `[R, 1]` scales before w2, `gemm` multiplies."""
    g = gemm(x, w1).clamp_(max=limit)
    u = gemm(x, w3).clamp_(-limit, limit)
    a = torch.nn.functional.silu(g).mul_(u)
    if weight is not None:
        a *= weight
    return gemm(a, w2)


def routed(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Experts,
    limit: float,
    gemm: Gemm = linear,
) -> Tensor:
    """Sums the chosen experts of every row, in slot order.

    Args:
        x: fp32 `[R, D]`.
        chosen, weights: `[R, count]`; an id of -1 skips the slot.
        experts: of this layer.
        limit: of the SwiGLU clamps.
        gemm: how experts multiply.

    Returns:
        fp32 `[R, D]`.
    """
    num_rows, count = chosen.shape
    flat = chosen.flatten()
    slots = torch.zeros(num_rows * count, x.shape[1], device=x.device)
    order = flat.argsort(stable=True)
    ids, counts = torch.unique_consecutive(flat[order], return_counts=True)
    begin = 0
    for expert, size in zip(ids.tolist(), counts.tolist(), strict=True):
        places = order[begin : begin + size]
        begin += size
        if expert < 0:
            continue
        # A tile of rows at least, filled up with copies of the first: see `shapes.TILE`.
        padded = torch.cat((places, places[:1].expand(pad_up(size) - size)))
        out = swiglu(
            x[padded // count],
            *experts[expert],
            limit,
            weights.flatten()[padded].unsqueeze(1),
            gemm,
        )
        slots[places] = out[:size]
    slots = slots.view(num_rows, count, -1)
    total = slots[:, 0].clone()
    for slot in range(1, count):
        total += slots[:, slot]
    return total
