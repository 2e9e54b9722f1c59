"""The three cache formats: fp32 values to codes and scales, to stored bytes, and back.

All act on the last axis in blocks. A cached row and a freshly computed one must be the same number,
so a row is quantised exactly once, when it is written, and only its dequantised value is used.
Values come back as fp32; each is a short code times a scale and so is exact in bf16 as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0

_E2M1_VALUES = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32
)
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
# A tie goes to the even code. Codes at and above an upper neighbour with an odd code need a strictly
# larger value, so those midpoints move up by one ulp; bucketize(right=True) counts midpoints <= x.
_STEPS = torch.where(
    torch.tensor([True, False] * 3 + [True]),
    torch.nextafter(_MIDPOINTS, torch.tensor(torch.inf)),
    _MIDPOINTS,
)


def fp8_32(x: Tensor) -> Tensor:
    """Rounds to FP8-32: e4m3 codes under one power-of-two scale for 32 values.

    Args:
        x: fp32 `[..., n]`, n a multiple of 32.

    Returns:
        fp32 `[..., n]`.
    """
    codes, scale = _fp8_32_blocks(x)
    return (codes.float() * scale).flatten(-2)


def fp8_32_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds as `fp8_32`; returns e4m3 codes uint8 `[..., n]` and E8M0 scale bytes uint8 `[..., n/32]`."""
    codes, scale = _fp8_32_blocks(x)
    return codes.view(torch.uint8).flatten(-2), _exponent_bytes(scale)


def _fp8_32_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, 32))
    peak = blocks.abs().amax(-1, keepdim=True).clamp_(min=1e-4)
    scale = _power_of_two_above(peak * (1 / E4M3_MAX))
    return (blocks / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def mxfp4_32(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds to MXFP4-32: e2m1 codes under one power-of-two scale for 32 values.

    Args:
        x: fp32 `[..., n]`, n a multiple of 32.

    Returns:
        packed codes uint8 `[..., n/2]`, E8M0 scale bytes uint8 `[..., n/32]`, values fp32 `[..., n]`.
    """
    blocks = x.unflatten(-1, (-1, 32))
    peak = blocks.abs().amax(-1, keepdim=True).clamp_(min=6 * 2.0**-126)
    scale = _power_of_two_above(peak * (1 / E2M1_MAX))
    codes = e2m1_codes(blocks / scale)
    values = (_E2M1_VALUES.to(x.device)[codes.long()] * scale).flatten(-2)
    return _pack_nibbles(codes.flatten(-2)), _exponent_bytes(scale), values


def nvfp4_16(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds to NVFP4-16: e2m1 codes under one e4m3 scale for 16 values.

    Args:
        x: fp32 `[..., n]`, n a multiple of 16.

    Returns:
        packed codes uint8 `[..., n/2]`, e4m3 scale bytes uint8 `[..., n/16]`, values fp32 `[..., n]`.
    """
    blocks = x.unflatten(-1, (-1, 16))
    peak = blocks.abs().amax(-1, keepdim=True).clamp_(min=6 * 2.0**-9)
    scale_code = (peak / E2M1_MAX).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    scale = scale_code.float()
    codes = e2m1_codes(blocks / scale)
    values = (_E2M1_VALUES.to(x.device)[codes.long()] * scale).flatten(-2)
    return _pack_nibbles(codes.flatten(-2)), scale_code.view(torch.uint8).squeeze(-1), values


def unpack_mxfp4_32(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `mxfp4_32`: uint8 `[..., n/2]` and `[..., n/32]` to fp32 `[..., n]`."""
    values = _E2M1_VALUES.to(codes.device)[_unpack_nibbles(codes)].unflatten(-1, (-1, 32))
    # Exponent byte 0 is 2^-127, a subnormal whose bits are not byte << 23.
    bits = torch.where(scales == 0, 1 << 22, scales.to(torch.int32) << 23)
    return (values * bits.view(torch.float32).unsqueeze(-1)).flatten(-2)


def unpack_nvfp4_16(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `nvfp4_16`: uint8 `[..., n/2]` and `[..., n/16]` to fp32 `[..., n]`."""
    values = _E2M1_VALUES.to(codes.device)[_unpack_nibbles(codes)].unflatten(-1, (-1, 16))
    scale = scales.contiguous().view(torch.float8_e4m3fn).float()
    return (values * scale.unsqueeze(-1)).flatten(-2)


def _power_of_two_above(x: Tensor) -> Tensor:
    """Rounds positive normal fp32 up to a power of two on the bits: a log() would misplace some."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _exponent_bytes(scale: Tensor) -> Tensor:
    """Returns E8M0 bytes `[..., n]` of powers of two `[..., n, 1]`."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).squeeze(-1)


def e2m1_codes(x: Tensor) -> Tensor:
    """Nearest e2m1 code of fp32 values, saturating; a negative value keeps its sign even at zero."""
    magnitude = torch.bucketize(x.abs(), _STEPS.to(x.device), out_int32=True, right=True)
    magnitude = magnitude.to(torch.uint8)
    return magnitude | (torch.signbit(x).to(torch.uint8) << 3)


def _pack_nibbles(codes: Tensor) -> Tensor:
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _unpack_nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
