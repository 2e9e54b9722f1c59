"""The cache formats: rounding by hand, stored bytes, and laws of a round trip."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashmesh.kernels.quantize import (
    fp8_32,
    mxfp4_32,
    nvfp4_16,
    unpack_mxfp4_32,
    unpack_nvfp4_16,
)

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
ROUNDED = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]

# One e4m3 scale of 448 reaches 2688; cached rows are normed and stay far below it.
numbers = st.floats(-2600, 2600, width=32)


def bits(x):
    return x.contiguous().view(torch.int32)


def test_ties_go_to_the_even_code_and_zero_keeps_its_sign():
    x = torch.tensor((TIES + [-tie for tie in TIES]) * 2)
    codes, scales, values = mxfp4_32(x)
    assert torch.equal(bits(values), bits(torch.tensor((ROUNDED + [-r for r in ROUNDED]) * 2)))
    assert scales.tolist() == [127]
    # 0 and 1 have codes 0 and 2, and the even element is in the low nibble.
    assert codes[0] == 0x20
    assert codes[4] == 0xA8  # -0 and -1


def test_power_of_two_scales_are_the_next_exponent_up():
    for peak, exponent in ((6.0, 127), (6.000001, 128), (3.0, 126), (0.0, 1)):
        x = torch.zeros(32)
        x[7] = peak
        assert mxfp4_32(x)[1].tolist() == [exponent]


def test_fp8_breaks_ties_to_the_even_code_under_a_scale_of_one():
    x = torch.zeros(32)
    x[0], x[1] = 448, 100  # 100 lies between 96 and 104, and 96 has the even code
    assert fp8_32(x)[:2].tolist() == [448, 96]


def test_nvfp4_scales_are_ordinary_e4m3_numbers():
    x = torch.zeros(16)
    x[3] = 10  # 10 / 6 = 1.667 rounds to 1.625, and 10 / 1.625 saturates at 6
    _, scales, values = nvfp4_16(x)
    assert scales.view(torch.float8_e4m3fn).float().tolist() == [1.625]
    assert values[3] == 9.75
    assert nvfp4_16(torch.zeros(16))[1].view(torch.float8_e4m3fn).float().tolist() == [2.0**-9]


@pytest.mark.parametrize(
    ("pack", "unpack", "block"),
    [(mxfp4_32, unpack_mxfp4_32, 32), (nvfp4_16, unpack_nvfp4_16, 16)],
)
@given(data=st.data())
def test_stored_bytes_give_the_values_back_and_keep_them(pack, unpack, block, data):
    x = torch.tensor(data.draw(st.lists(numbers, min_size=64, max_size=64))).view(2, 32)
    codes, scales, values = pack(x)
    assert codes.shape == (2, 16)
    assert scales.shape == (2, 32 // block)
    assert torch.equal(bits(unpack(codes, scales)), bits(values))
    assert torch.equal(values.bfloat16().float(), values)


@given(st.lists(numbers, min_size=32, max_size=32))
def test_rounding_to_fp8_is_idempotent_and_close(row):
    x = torch.tensor(row)
    once = fp8_32(x)
    assert torch.equal(bits(fp8_32(once)), bits(once))
    assert ((once - x).abs() <= x.abs().amax().clamp(min=1e-4) / 16).all()


def test_rows_do_not_depend_on_their_neighbours():
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    for pack in (mxfp4_32, nvfp4_16):
        for whole, alone in zip(pack(x), pack(x[5:6]), strict=True):
            assert torch.equal(whole[5:6], alone)
    assert torch.equal(fp8_32(x)[5:6], fp8_32(x[5:6]))
