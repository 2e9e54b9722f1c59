"""Norm, rotary embedding and linear maps, in fp32.

Every function takes a number of rows that is a multiple of `shapes.TILE`: then the bits of a row do not depend on the
others. Source of the formulas: the released model's configuration and inference rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashmesh.kernels.quantize import fp8_32

if TYPE_CHECKING:
    from flashmesh.kernels.config import ModelConfig


Gemm = Callable[["Tensor", "Tensor"], "Tensor"]
"""`linear`, or `quantized_linear`."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x @ weight.T`; x `[..., n]`, weight `[m, n]`."""
    return torch.nn.functional.linear(x, weight)


def quantized_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Like `linear`, with the input rounded to FP8-32 first, as the released kernels do for F8 and F4 weights."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -width % 32))
    return linear(fp8_32(padded)[..., :width], weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales rows `[..., n]` to unit root mean square, then by `weight` `[n]`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def frequencies(config: ModelConfig, *, compressed: bool) -> Tensor:
    """Returns the rotary frequencies `[P/2]` of window-only layers, or of compressed ones (YaRN, no scaling of size).

    Source: Peng et al., "YaRN", 2023, for the interpolation ramp.
    """
    dims = config.qk_rope_head_dim
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    if not compressed:
        return 1.0 / config.rope_theta**exponents
    scaling, theta = config.rope_scaling, config.compress_rope_theta
    base = 1.0 / theta**exponents
    low = _corner(scaling.beta_fast, dims, theta, scaling.original_max_position_embeddings)
    high = _corner(scaling.beta_slow, dims, theta, scaling.original_max_position_embeddings)
    first = max(math.floor(low), 0)
    last = min(math.ceil(high), dims - 1)
    steps = torch.arange(dims // 2, dtype=torch.float32) - first
    ramp = (steps / max(last - first, 1e-3)).clamp(0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)


def _corner(turns: float, dims: int, theta: float, length: int) -> float:
    """Index of the pair that makes `turns` turns over the original context."""
    return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def angles(positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines `[R, P/2]` of what rotates rows at integer positions `[R]`."""
    theta = positions.float().unsqueeze(1) * frequency
    return theta.cos(), theta.sin()


def turns(positions: Tensor, frequency: Tensor) -> Tensor:
    """Returns the unit complex numbers `[R, P/2]` that rotate rows at positions int64 `[R]`."""
    return torch.complex(*angles(positions, frequency))


def rotate_(x: Tensor, turn: Tensor) -> Tensor:
    """Rotates the last P values of every row in place, as adjacent pairs; the values before them stay.

    Args:
        x: fp32 `[R, n]` or `[R, heads, n]`, contiguous.
        turn: `[R, P/2]` from `turns`; its conjugate rotates back.

    Returns:
        x.
    """
    half = turn.shape[-1]
    pairs = torch.view_as_complex(x[..., x.shape[-1] - 2 * half :].unflatten(-1, (half, 2)))
    pairs.mul_(turn if x.dim() == 2 else turn.unsqueeze(1))
    return x
