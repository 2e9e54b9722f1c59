import pytest
import torch

from flashmesh.kernels.ops import engram as twin
from flashmesh.kernels.tilelang.engram_gate import engram_gate
from flashmesh.kernels.tilelang.engram_rows import engram_rows

D = 5120


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 700])
@pytest.mark.parametrize("columns", [24, 5])
def test_rows_equal_the_twins(random, num_tokens, columns):
    codes = torch.randint(0, 256, (9999, 256), device="cuda", generator=random).to(torch.uint8)
    codes[(codes & 127) == 127] = 0  # no NaN
    scales = torch.randint(110, 140, (9999, 8), device="cuda", generator=random).to(torch.uint8)
    scales[:100] = torch.randint(0, 255, (100, 8), device="cuda", generator=random).to(torch.uint8)
    rows = torch.randint(0, 9999, (num_tokens, columns), device="cuda", generator=random)
    rows[:, 0] %= 100
    codes = codes.view(torch.float8_e4m3fn)
    got = engram_rows(codes, scales, rows)
    assert torch.equal(got, twin.engram_rows(codes, scales, rows))


def gate_inputs(random, num_tokens, width=D):
    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=random).bfloat16()

    text = torch.rand(num_tokens, device="cuda", generator=random) < 0.8
    streams, kv = normal(num_tokens, 4, width) * 3, normal(num_tokens, 5 * width)
    # Streams that agree with their keys, or oppose them, so that gates of all sizes come up.
    keys = kv[:, : 4 * width].view(num_tokens, 4, width)
    lean = torch.randint(-1, 2, (num_tokens, 4, 1), device="cuda", generator=random)
    streams = streams + lean.bfloat16() * keys * 2
    return streams, kv, normal(4, width), normal(4, width), text


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 700])
@pytest.mark.parametrize("width", [256, D])
def test_gate(random, num_tokens, width):
    streams, kv, q, k, text = gate_inputs(random, num_tokens, width)
    if num_tokens > 1:
        streams[1] = 0
        kv[0, :width] = 0
    got = engram_gate(streams, kv, q, k, text).float()
    want = twin.engram_gate(streams.double().float(), kv, q, k, text).float()
    # One bf16 rounding of fp32 values that differ by a few units in the last place.
    assert torch.allclose(got, want, rtol=2**-7, atol=1e-6)
    assert num_tokens == 0 or (got == want).float().mean() > 0.99
    assert torch.equal(got[~text], streams[~text].float())


def test_gate_rows_do_not_depend_on_their_batch(random):
    streams, kv, q, k, text = gate_inputs(random, 1000)
    whole = engram_gate(streams, kv, q, k, text)
    for num_tokens in (1, 3, 17, 64):
        part = slice(1000 - num_tokens, 1000)
        got = engram_gate(streams[part], kv[part], q, k, text[part])
        assert torch.equal(got, whole[part])
