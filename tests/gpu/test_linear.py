"""Products with F8 and bf16 weights: against fp64, and row by row bit for bit across batch shapes."""

import pytest
import torch

from flashmesh.kernels.ops import linear as twin
from flashmesh.kernels.tilelang import dense as kernels
from flashmesh.kernels.tilelang.plain_linear import plain_linear

pytestmark = pytest.mark.usefixtures("poison")

SAMPLED = ("latents", "index_queries", "shared_down", "output_a", "queries")
WEIGHTS = [
    *(kernels.SHAPES[name] for name in SAMPLED),
    # A small model's.
    (768, 512, 1),
    (1024, 4096, 8),
]
PLAIN = [
    (512, 5120, torch.bfloat16),
    (384, 5120, torch.float32),
    (32, 5120, torch.float32),
    (128, 512, torch.bfloat16),
    # K whole, and few rows.
    (2048, 192, torch.bfloat16),
    (48, 192, torch.float32),
]
ROWS = [1, 3, 16, 17, 33, 64, 65, 130, 257, 1000]


def weight(random, rows, columns, low=108, high=116):
    codes = torch.randint(
        0, 256, (rows, columns), device="cuda", generator=random, dtype=torch.uint8
    )
    codes = torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes).view(torch.float8_e4m3fn)
    scales = torch.randint(
        low, high, (rows // 32, columns // 32), device="cuda", generator=random, dtype=torch.uint8
    )
    return codes, scales


def normal(random, *shape):
    return torch.randn(*shape, device="cuda", generator=random).bfloat16()


def assert_close(y, x, values):
    """Compares with fp64; the error of fp32 sums is bounded by the sum of magnitudes.

    A product of two bf16 is exact in fp32. Tensor cores add k of them to a sum with a relative error of at most 2^-22
    of the largest term at a step (they cut where fp32 would round): below k * 2^-22 of the sum of magnitudes, and for
    random terms below a tenth of that. One rounding to bf16 adds 2^-9 of the result.
    """
    expected = x.double() @ values.double().T
    magnitudes = x.double().abs() @ values.double().abs().T
    bound = magnitudes * (x.shape[1] * 2.0**-22 / 10 + 2.0**-22)
    if y.dtype == torch.bfloat16:
        bound += expected.abs() * 2.0**-8
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("rows", "columns", "groups"), WEIGHTS)
@pytest.mark.parametrize("tokens", [1, 16, 30, 64, 100, 700])
def test_dense(random, rows, columns, groups, tokens):
    codes, scales = weight(random, rows, columns)
    values = twin.prepare_dense(codes, scales).values
    x = normal(random, tokens, groups * columns)
    y = kernels.dense(x, kernels.prepare_dense(codes, scales, groups))
    assert y.shape == (tokens, rows)
    for part, block, got in zip(
        x.chunk(groups, 1), values.chunk(groups), y.chunk(groups, 1), strict=True
    ):
        assert_close(got, part, block)


@pytest.mark.parametrize(("rows", "columns", "groups"), WEIGHTS)
def test_bits_of_a_row_depend_on_no_other_row(random, rows, columns, groups):
    prepared = kernels.prepare_dense(*weight(random, rows, columns), groups)
    x = normal(random, max(ROWS), groups * columns)
    whole = kernels.dense(x, prepared)
    for tokens in ROWS:
        start = max(ROWS) - tokens
        assert torch.equal(kernels.dense(x[start:], prepared), whole[start:]), tokens


@pytest.mark.parametrize("byte", twin.SCALE_BYTES)
def test_the_ends_of_the_range_of_scales(random, byte):
    codes, scales = weight(random, 128, 256, byte, byte + 1)
    codes.view(torch.uint8)[:32] = 1  # the smallest e4m3, a subnormal
    # One input a row: the product is exact, and so are its bits.
    x = torch.eye(256, device="cuda").bfloat16()
    y = kernels.dense(x, kernels.prepare_dense(codes, scales))
    assert torch.equal(y, twin.prepare_dense(codes, scales).values.T)


def test_refusals(random):
    codes, scales = weight(random, 128, 128)
    with pytest.raises(ValueError, match="multiple"):
        kernels.prepare_dense(codes[:96], scales[:3])
    with pytest.raises(ValueError, match="multiple"):
        kernels.prepare_dense(codes[:, :96].contiguous(), scales[:, :3].contiguous())
    scales[1, 1] = 15
    with pytest.raises(ValueError, match="supported"):
        kernels.prepare_dense(codes, scales)


@pytest.mark.parametrize(("rows", "columns", "out_dtype"), PLAIN)
def test_plain_linear(random, rows, columns, out_dtype):
    w = normal(random, rows, columns) / columns**0.5
    for tokens in (1, 16, 40, 100, 300):
        x = normal(random, tokens, columns)
        y = plain_linear(x, w, out_dtype)
        assert y.shape == (tokens, rows)
        assert y.dtype == out_dtype
        assert_close(y, x, w)


@pytest.mark.parametrize(("rows", "columns", "out_dtype"), PLAIN)
def test_plain_bits_of_a_row_depend_on_no_other_row(random, rows, columns, out_dtype):
    w = normal(random, rows, columns)
    x = normal(random, max(ROWS), columns)
    whole = plain_linear(x, w, out_dtype)
    for tokens in ROWS:
        start = max(ROWS) - tokens
        assert torch.equal(plain_linear(x[start:], w, out_dtype), whole[start:]), tokens


def test_zero_rows(random):
    prepared = kernels.prepare_dense(*weight(random, 128, 256))
    x = torch.empty(0, 256, device="cuda", dtype=torch.bfloat16)
    assert kernels.dense(x, prepared).shape == (0, 128)
    assert plain_linear(x, normal(random, 32, 256)).shape == (0, 32)


def test_products_are_captured_in_a_graph(random):
    prepared = kernels.prepare_dense(*weight(random, 1792, 5120))
    plain = normal(random, 384, 5120)
    x = normal(random, 20, 5120)
    expected = kernels.dense(x, prepared), plain_linear(x, plain, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.dense(x, prepared), plain_linear(x, plain, torch.float32)
    for y in captured:
        y.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
