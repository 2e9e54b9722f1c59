"""Hyper-connections: the coefficients by which four residual streams mix around a sub-layer, and the mixing itself.

The input of a sub-layer is collapsed with weights that the sub-layer before produced (`carried`), so coefficients and
collapse read the streams in one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashmesh.kernels.ops.rounding import round_rows
from flashmesh.kernels.reference.basics import rms_norm

if TYPE_CHECKING:
    from torch import Tensor


class MixWeights(NamedTuple):
    """Projection of one sub-layer's coefficients: fp32 fn `[24, 4 D]`, base `[24]`, scale `[3]`."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class Mixed(NamedTuple):
    """What a sub-layer needs of the streams before it.

    Attributes:
        pre: fp32 `[T, 4]`, the next sub-layer's `carried`.
        post: fp32 `[T, 4]`, weights of the sub-layer's output in the streams.
        comb: fp32 `[T, 4, 4]`, from source to destination stream.
        x: bf16 `[T, D]`, the sub-layer's normed input.
        x_rounded: its FP8-32 values, bf16 `[T, D]`, if asked for.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor
    x: Tensor
    x_rounded: Tensor | None


def prepare_mix(fn: Tensor, base: Tensor, scale: Tensor) -> MixWeights:
    """Brings a sub-layer's mixing weights, fp32 `[24, 4 D]`, `[24]` and `[3]`, into the backend's layout."""
    return MixWeights(fn, base, scale)


def mix(
    streams: Tensor,
    carried: Tensor,
    weights: MixWeights,
    norm: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
    rounded: bool,
) -> Mixed:
    """Computes a sub-layer's coefficients and its input.

    Args:
        streams: bf16 `[T, 4, D]`.
        carried: fp32 `[T, 4]`, weights of the streams in the input.
        weights: from `prepare_mix`.
        norm: fp32 `[D]`, weight of the input's RMSNorm.
        iters: Sinkhorn iterations.
        eps: floor of every Sinkhorn normalisation.
        norm_eps: of the RMSNorm.
        rounded: whether `x_rounded` is needed.
    """
    pre, post, comb = coefficients(streams.float(), weights, iters, eps)
    x = collapse_norm(streams, carried, norm, norm_eps)
    return Mixed(pre, post, comb, x, round_rows(x) if rounded else None)


def spread(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Adds a sub-layer's output to the streams.

    Args:
        streams: bf16 `[T, 4, D]`.
        y: bf16 `[T, D]`.
        post, comb: fp32 `[T, 4]` and `[T, 4, 4]`.

    Returns:
        bf16 `[T, 4, D]`: stream j is post_j y + sum over i of comb_ij X_i.
    """
    x = streams.float()
    total = post.unsqueeze(2) * y.float().unsqueeze(1)
    for source in range(x.shape[1]):
        total += comb[:, source].unsqueeze(2) * x[:, source : source + 1]
    return total.bfloat16()


def spread_mix(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    carried: Tensor,
    weights: MixWeights,
    norm: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
    rounded: bool,
) -> tuple[Tensor, Mixed]:
    """`spread`, then `mix` of the new streams, in one pass over memory; arguments as theirs."""
    new = spread(streams, y, post, comb)
    return new, mix(new, carried, weights, norm, iters, eps, norm_eps, rounded)


def collapse_norm(streams: Tensor, carried: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Returns RMSNorm(bf16(sum over s of carried_s X_s)), bf16 `[T, D]`; arguments as `mix`'s."""
    u = streams[:, 0].float() * carried[:, 0:1]
    for stream in range(1, streams.shape[1]):
        u += streams[:, stream].float() * carried[:, stream : stream + 1]
    return rms_norm(u.bfloat16().float(), norm, eps).bfloat16()


def coefficients(
    streams: Tensor, weights: MixWeights, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns pre, post and comb in the dtype of `streams` `[T, 4, D]`, fp32 or, for tests, fp64."""
    flat = streams.flatten(1)
    fn, base, scale = (w.to(flat.dtype) for w in weights)
    m = torch.nn.functional.linear(flat, fn)
    m = m * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    z = base + m * torch.cat((scale[0].expand(4), scale[1].expand(4), scale[2].expand(16)))
    c = torch.softmax(z[:, 8:].view(-1, 4, 4), 2) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    return torch.sigmoid(z[:, :4]) + 1e-6, 2 * torch.sigmoid(z[:, 4:8]), c
