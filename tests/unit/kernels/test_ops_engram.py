import math

import torch

from flashmesh.kernels.engram import inject
from flashmesh.kernels.ops import engram


def test_rows_are_codes_times_their_scale():
    codes = torch.randint(0, 120, (10, 64)).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.randint(110, 140, (10, 2)).to(torch.uint8)
    rows = torch.randint(0, 10, (7, 3))
    got = engram.engram_rows(codes, scales, rows)
    assert got.dtype == torch.bfloat16
    for token in range(7):
        for column, row in enumerate(rows[token].tolist()):
            for i in range(64):
                want = codes[row, i].item() * 2.0 ** (int(scales[row, i // 32]) - 127)
                assert got[token, column * 64 + i].item() == want


def test_rows_of_no_tokens():
    codes = torch.zeros(4, 32).to(torch.float8_e4m3fn)
    scales = torch.zeros(4, 1, dtype=torch.uint8)
    rows = torch.zeros(0, 3, dtype=torch.int64)
    assert engram.engram_rows(codes, scales, rows).shape == (0, 96)


def test_gate_is_the_references_injection():
    streams, kv = torch.randn(6, 4, 32).bfloat16(), torch.randn(6, 160).bfloat16()
    q, k = torch.randn(4, 32).bfloat16(), torch.randn(4, 32).bfloat16()
    text = torch.tensor([True, False, True, True, False, True])
    got = engram.engram_gate(streams, kv, q, k, text)
    want = inject(
        streams.float(), kv.float(), torch.eye(160), q.float(), k.float(), text
    ).bfloat16()
    assert torch.allclose(got.float(), want.float(), rtol=2**-7, atol=1e-6)
    assert torch.equal(got[~text], streams[~text])


def test_gate_of_one_value_by_hand():
    streams = torch.tensor([[[2.0]]]).bfloat16()
    kv = torch.tensor([[-3.0, 4.0]]).bfloat16()
    one = torch.ones(1, 1).bfloat16()
    got = engram.engram_gate(streams, kv, one, one, torch.tensor([True]))
    gate = 1 / (1 + math.exp(1))  # d = 2 * -3 / (2 * 3) = -1
    assert got.item() == torch.tensor(2 + 4 * gate).bfloat16().item()
