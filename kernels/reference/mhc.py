"""Single-pass manifold-constrained hyper-connections: how four residual streams mix around a sub-layer.

The coefficients of a sub-layer and the collapse of its input read the streams in one pass, because the collapse uses
what the sub-layer before produced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flashmesh.kernels.reference.basics import linear

if TYPE_CHECKING:
    from numpy.typing import NDArray


def coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the mixing coefficients of one sub-layer.

    Args:
        streams: fp32 `[R, 4, D]`.
        fn: `[24, 4 D]`; base: `[24]`; scale: `[3]`.
        iters: Sinkhorn iterations.
        eps: floor of every normalisation.

    Returns:
        pre `[R, 4]` (collapse of the next sub-layer's input), post `[R, 4]`, comb `[R, 4, 4]` from source to
        destination stream.
    """
    flat = streams.flatten(1)
    mixed = linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    steps = torch.cat((scale[0].expand(4), scale[1].expand(4), scale[2].expand(16)))
    z = base + mixed * steps
    pre = torch.sigmoid(z[:, :4]) + 1e-6
    post = 2 * torch.sigmoid(z[:, 4:8])
    return pre, post, sinkhorn(z[:, 8:], iters=iters, eps=eps)


def sinkhorn(z: Tensor, *, iters: int, eps: float) -> Tensor:
    """Turns logits `[R, 16]` into nearly doubly stochastic `[R, 4, 4]`, ending on columns.

    Works on `[4, 4, R]` with rows contiguous: the matrices are tiny and the iterations many, so the cost is the number
    of operations, and numpy's cost 0.5 us each where torch's cost 3. Sums of four are written out, which fixes their
    order.
    """
    c = z.t().contiguous().view(4, 4, -1)
    peak = torch.maximum(torch.maximum(c[:, 0], c[:, 1]), torch.maximum(c[:, 2], c[:, 3]))
    m = c.sub_(peak.unsqueeze(1)).exp_().numpy()
    floor = np.float32(eps)
    total = np.empty((4, m.shape[2]), dtype=np.float32)
    by_source = total[:, None]
    sources, destinations = list(m), [m[:, j] for j in range(4)]
    _sum_of_four(destinations, total)
    m /= by_source
    m += floor
    _sum_of_four(sources, total)
    total += floor
    m /= total
    for _ in range(iters - 1):
        _sum_of_four(destinations, total)
        total += floor
        m /= by_source
        _sum_of_four(sources, total)
        total += floor
        m /= total
    return torch.from_numpy(m).permute(2, 0, 1).contiguous()


def _sum_of_four(parts: list[NDArray[np.float32]], out: NDArray[np.float32]) -> None:
    np.add(parts[0], parts[1], out=out)
    out += parts[2]
    out += parts[3]


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Returns the weighted sum `[R, D]` of the streams."""
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1)


def spread(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Returns the streams `[R, 4, D]` after a sub-layer with output y `[R, D]`."""
    mixed = torch.bmm(comb.transpose(1, 2), streams)
    return mixed.addcmul_(post.unsqueeze(2), y.unsqueeze(1))
