"""The twins of the products: against the formats by hand, and what they refuse."""

import pytest
import torch

from flashmesh.kernels.formats import quantise
from flashmesh.kernels.ops.linear import dense, plain_linear, prepare_dense


def quantised(rows, columns):
    """Codes, scale bytes and the fp64 values they stand for."""
    codes, scale = quantise("F8", torch.randn(rows, columns))
    scales = scale.view(torch.uint8)
    factors = torch.exp2(scales.double() - 127)
    tiled = factors.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    return codes, scales, codes.double() * tiled


@pytest.mark.parametrize(("rows", "columns"), [(64, 96), (40, 64), (32, 20)])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_dense_is_the_product_with_codes_times_scales(rows, columns, tokens):
    codes, scales, values = quantised(rows, columns)
    x = torch.randn(tokens, columns).bfloat16()
    y = dense(x, prepare_dense(codes, scales))
    expected = x.double() @ values.T
    assert y.dtype == torch.bfloat16
    # Half a step of bf16 is 2^-9; fp32 sums of so few products add far less than as much again.
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)


def test_every_group_sees_its_own_columns():
    codes, scales, values = quantised(128, 64)
    x = torch.randn(3, 4 * 64).bfloat16()
    y = dense(x, prepare_dense(codes, scales, 4))
    for group in range(4):
        part = x[:, 64 * group : 64 * (group + 1)].double()
        expected = part @ values[32 * group : 32 * (group + 1)].T
        torch.testing.assert_close(
            y[:, 32 * group : 32 * (group + 1)].double(), expected, rtol=2**-8, atol=1e-5
        )


@pytest.mark.parametrize(("byte", "fits"), [(15, False), (16, True), (134, True), (135, False)])
def test_scales_out_of_range_are_refused(byte, fits):
    codes = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    scales = torch.full((2, 2), 127, dtype=torch.uint8)
    scales[1, 0] = byte
    if fits:
        assert not prepare_dense(codes, scales).values.any()
        return
    with pytest.raises(ValueError, match="supported"):
        prepare_dense(codes, scales)


def test_the_smallest_and_largest_values_survive_in_bf16():
    codes = torch.tensor([[1, 0x7E, 0x81, 0x08] * 8] * 32, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    for byte in (16, 134):
        scales = torch.full((1, 1), byte, dtype=torch.uint8)
        values = prepare_dense(codes, scales).values
        assert torch.equal(values.double(), codes.double() * 2.0 ** (byte - 127))


def test_shapes_and_dtypes_are_refused():
    codes, scales, _ = quantised(64, 64)
    with pytest.raises(ValueError, match="e4m3"):
        prepare_dense(codes.float(), scales)
    with pytest.raises(ValueError, match="scales"):
        prepare_dense(codes, scales[:1])
    with pytest.raises(ValueError, match="groups"):
        prepare_dense(codes, scales, 3)
    weight = prepare_dense(codes, scales)
    with pytest.raises(ValueError, match=r"\[T, 64\]"):
        dense(torch.zeros(2, 32).bfloat16(), weight)
    with pytest.raises(ValueError, match="bfloat16"):
        dense(torch.zeros(2, 64), weight)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_plain_products_keep_fp32_sums(out_dtype):
    x, weight = torch.randn(5, 48).bfloat16(), torch.randn(32, 48).bfloat16()
    y = plain_linear(x, weight, out_dtype)
    assert y.dtype == out_dtype
    rtol = 2**-8 if out_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=rtol, atol=1e-5)


def test_plain_products_refuse_other_dtypes():
    x, weight = torch.zeros(2, 32).bfloat16(), torch.zeros(8, 32).bfloat16()
    with pytest.raises(ValueError, match="out_dtype"):
        plain_linear(x, weight, torch.float16)
    with pytest.raises(ValueError, match="weight"):
        plain_linear(x, weight.float())
    with pytest.raises(ValueError, match="x:"):
        plain_linear(x[:, :16], weight)
