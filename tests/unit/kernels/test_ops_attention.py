"""Sparse attention on stored bytes, against a loop over keys written down from the formula."""

import math

import pytest
import torch

from flashmesh.kernels.ops.attention import sparse_attention, unpack_kv, unpack_window
from flashmesh.kernels.quantize import fp8_32, nvfp4_16

HEADS, WIDTH, PAIRS = 3, 64, 8


@pytest.fixture
def inputs():
    """Arguments of `sparse_attention` by name: 5 rows, 12 window keys, 8 selected, some of either absent."""
    torch.manual_seed(5)
    angle = torch.rand(5, PAIRS) * 6
    codes = torch.randn(20, WIDTH).mul(40).to(torch.float8_e4m3fn).view(torch.uint8)
    exponents = torch.randint(118, 124, (20, WIDTH // 32), dtype=torch.uint8)
    pairs, scales, _ = nvfp4_16(torch.randn(30, WIDTH))
    window_index = torch.randint(20, (5, 12), dtype=torch.int32)
    kv_index = torch.randint(30, (5, 8), dtype=torch.int32)
    window_index[torch.rand(5, 12) < 0.3] = -1
    kv_index[torch.rand(5, 8) < 0.3] = -1
    return {
        "q": torch.randn(5, HEADS, WIDTH).mul(2).bfloat16(),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "window": torch.cat((codes, exponents), 1),
        "window_index": window_index,
        "kv": torch.cat((pairs, scales), 1),
        "kv_index": kv_index,
        "sink": torch.randn(HEADS),
        "scale": WIDTH**-0.5,
    }


def turned(values, cos, sin):
    """A head's list of numbers with its last pairs turned."""
    values = list(values)
    for pair in range(PAIRS):
        at = WIDTH - 2 * PAIRS + 2 * pair
        x, y = values[at], values[at + 1]
        values[at] = x * cos[pair] - y * sin[pair]
        values[at + 1] = x * sin[pair] + y * cos[pair]
    return torch.tensor(values)


def head(inputs, row, head):
    """One output head, key by key, in double precision."""
    keys = [unpack_window(inputs["window"])[i] for i in inputs["window_index"][row] if i >= 0]
    keys += [unpack_kv(inputs["kv"])[i] for i in inputs["kv_index"][row] if i >= 0]
    cos, sin = inputs["cos"][row].tolist(), inputs["sin"][row].tolist()
    query = turned(inputs["q"][row, head].tolist(), cos, sin).bfloat16().double()
    weights = [math.exp(float(query @ key.double()) * inputs["scale"]) for key in keys]
    total = sum(weights) + math.exp(float(inputs["sink"][head]))
    result = sum(w / total * key.double() for w, key in zip(weights, keys, strict=True))
    return turned(result.tolist(), cos, [-s for s in sin])


def test_rows_equal_the_formula(inputs):
    out = sparse_attention(**inputs)
    for row in range(5):
        for h in range(HEADS):
            # The result is bf16: half of 2^-8, and as much again for a neighbour it may round to.
            torch.testing.assert_close(
                out[row, h].float(), head(inputs, row, h), rtol=2**-8, atol=1e-6
            )


def test_rows_without_keys_are_zero_and_others_do_not_notice(inputs):
    before = sparse_attention(**inputs)
    inputs["window_index"][1] = inputs["kv_index"][1] = -1
    after = sparse_attention(**inputs)
    assert torch.equal(after[1], torch.zeros_like(after[1]))
    rest = torch.tensor([0, 2, 3, 4])
    assert torch.equal(after[rest], before[rest])


def test_only_a_window(inputs):
    inputs["kv_index"][:] = -1
    all_absent = sparse_attention(**inputs)
    inputs["kv_index"] = inputs["kv_index"][:, :0]
    inputs["kv"] = inputs["kv"][:0]
    torch.testing.assert_close(sparse_attention(**inputs), all_absent)


def test_a_dominant_key_comes_back_unrotated(inputs):
    inputs["sink"][:] = -1e4
    inputs["window_index"][:] = -1
    inputs["kv_index"][:] = -1
    inputs["window_index"][:, 7] = 3
    out = sparse_attention(**inputs)
    key = unpack_window(inputs["window"])[3]
    for row in range(5):
        cos, sin = inputs["cos"][row].tolist(), inputs["sin"][row].tolist()
        want = turned(key.tolist(), cos, [-s for s in sin])
        torch.testing.assert_close(out[row, 0].float(), want, rtol=2**-8, atol=1e-5)


def test_no_rows(inputs):
    for name in ("q", "cos", "sin", "window_index", "kv_index"):
        inputs[name] = inputs[name][:0]
    assert sparse_attention(**inputs).shape == (0, HEADS, WIDTH)


def test_window_rows_hold_the_values_of_fp8_32():
    x = torch.randn(7, 96) * 3
    values = fp8_32(x)
    peak = x.unflatten(-1, (-1, 32)).abs().amax(-1)
    exponent = torch.ceil(torch.log2(peak / 448)).int()
    codes = (values.unflatten(-1, (-1, 32)) / torch.exp2(exponent.float()).unsqueeze(-1)).flatten(1)
    stored = torch.cat(
        (codes.to(torch.float8_e4m3fn).view(torch.uint8), (exponent + 127).to(torch.uint8)), 1
    )
    assert torch.equal(unpack_window(stored), values)


def test_compressed_rows_hold_the_values_of_nvfp4_16():
    pairs, scales, values = nvfp4_16(torch.randn(7, 96))
    assert torch.equal(unpack_kv(torch.cat((pairs, scales), 1)), values)
