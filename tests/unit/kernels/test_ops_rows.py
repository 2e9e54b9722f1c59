"""Twins of the row ops against the runtime's own pieces and against formulas in double precision."""

import itertools

import pytest
import torch

from flashmesh.kernels.ops import rows
from flashmesh.kernels.quantize import (
    fp8_32,
    mxfp4_32,
    nvfp4_16,
    unpack_mxfp4_32,
    unpack_nvfp4_16,
)
from flashmesh.kernels.reference.basics import rotate_

EPS = 1e-20


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


def angles(count, half):
    theta = torch.randn(count, half) * 100
    return theta.cos(), theta.sin()


def rotated(x, cos, sin):
    """Independent of the twin: complex numbers, as the runtime rotates."""
    return rotate_(x.float().contiguous().clone(), torch.complex(cos, sin)).bfloat16()


def window_values(stored, width):
    codes = stored[:, :width].contiguous().view(torch.float8_e4m3fn).float()
    scales = torch.exp2(stored[:, width:].float() - 127)
    return (codes.unflatten(1, (-1, 32)) * scales.unsqueeze(2)).flatten(1)


def test_norm_is_rounded_once_and_then_to_fp8():
    x, weight = torch.randn(5, 96).bfloat16(), torch.randn(96)
    y, rounded = rows.rms_norm(x, weight, EPS, True)
    exact = x.double() / x.double().square().mean(1, keepdim=True).sqrt() * weight.double()
    assert torch.equal(y, exact.bfloat16())
    assert torch.equal(rounded, fp8_32(y.float()).bfloat16())
    assert torch.equal(rows.rms_norm(x, weight, EPS, False), y)


def test_stored_window_rows_hold_what_the_runtime_computes():
    qkv, q_norm, kv_norm = torch.randn(4, 96 + 64).bfloat16(), torch.randn(96), torch.randn(64)
    cos, sin = angles(4, 16)
    window = torch.full((9, 66), 255, dtype=torch.uint8)
    row = torch.tensor([3, -1, 0, 8]).int()
    latent, latent_rounded = rows.query_latent_and_window(
        qkv, q_norm, kv_norm, cos, sin, window, row, EPS
    )
    want, want_rounded = rows.rms_norm(qkv[:, :96], q_norm, EPS, True)
    assert torch.equal(latent, want)
    assert torch.equal(latent_rounded, want_rounded)
    kv = fp8_32(rotated(rows.rms_norm(qkv[:, 96:], kv_norm, EPS, False), cos, sin).float())
    assert torch.equal(window_values(window[[3, 0, 8]], 64), kv[[0, 2, 3]])
    assert (window[[1, 2, 4, 5, 6, 7]] == 255).all()


def test_compressed_rows_unpack_to_their_rounded_values():
    latent = torch.randn(3, 64).bfloat16()
    cos, sin = angles(3, 16)
    kv = torch.zeros(5, 36, dtype=torch.uint8)
    rows.store_compressed(latent, cos, sin, kv, torch.tensor([4, -1, 1]).int())
    want = nvfp4_16(rotated(latent, cos, sin).float())[2]
    assert torch.equal(unpack_nvfp4_16(kv[:, :32], kv[:, 32:])[[4, 1]], want[[0, 2]])
    assert not kv[[0, 2, 3]].any()


def test_index_keys_lie_in_pages_of_codes_then_scales():
    key, k_norm = torch.randn(3, 64).bfloat16(), torch.randn(64)
    cos, sin = angles(3, 8)
    ik = torch.zeros(3, 4 * 34, dtype=torch.uint8)
    rows.store_index_key(key, k_norm, cos, sin, ik, torch.tensor([5, -1, 11]).int(), EPS)
    want = mxfp4_32(rotated(rows.rms_norm(key, k_norm, EPS, False), cos, sin).float())[2]
    codes, scales = ik[:, :128].reshape(12, 32), ik[:, 128:].reshape(12, 2)
    assert torch.equal(unpack_mxfp4_32(codes, scales)[[5, 11]], want[[0, 2]])
    assert not codes[[0, 1, 2, 3, 4, 6, 7, 8, 9, 10]].any()


def test_index_queries_turn_every_head_by_the_same_angles():
    iq = torch.randn(2, 3 * 64).bfloat16()
    cos, sin = angles(2, 16)
    out = rows.index_queries(iq, cos, sin, 64)
    for head in range(3):
        alone = rotated(iq[:, head * 64 : head * 64 + 64], cos, sin)
        assert torch.equal(out[:, head].float(), mxfp4_32(alone.float())[2])


def test_pairs_do_not_depend_on_how_rows_fall_into_calls():
    value, gate = torch.randn(25, 32), torch.randn(25, 32)
    ring, pos = 5, torch.arange(25).int()
    slot = torch.full((25,), 2).int()

    def run(cuts):
        open_pair, parts = torch.zeros(4, ring, 2, 32), []
        for begin, end in itertools.pairwise(cuts):
            rows_ = slice(begin, end)
            first = torch.arange(begin, end) == begin
            parts.append(
                rows.join_pairs(
                    value[rows_], gate[rows_], open_pair, slot[rows_], pos[rows_], first
                )
            )
        return torch.cat(parts), open_pair

    whole, kept = run([0, 25])
    for cuts in ([0, 1, 25], [0, 3, 4, 6, 20, 25], list(range(26))):
        joined, other = run(cuts)
        assert torch.equal(joined, whole)
        assert torch.equal(other[2], kept[2])
    e = torch.softmax(torch.stack((gate[:-1], gate[1:])).double(), 0)
    want = e[0] * value[:-1].double() + e[1] * value[1:].double()
    assert (whole[1:].double() - want).abs().max() < 2**-7
    for at in range(20, 25):
        assert torch.equal(kept[2, at % ring], torch.stack((value[at], gate[at])))


def test_pairs_of_neighbouring_sequences_stay_apart():
    value, gate = torch.randn(4, 32), torch.randn(4, 32)
    open_pair = torch.randn(3, 5, 2, 32)
    before = open_pair.clone()
    slot, pos = torch.tensor([0, 0, 2, 1]).int(), torch.tensor([6, 7, 11, 3]).int()
    begin = torch.tensor([True, False, True, True])
    out = rows.join_pairs(value, gate, open_pair, slot, pos, begin)
    for row, (s, p) in enumerate(((0, 5), (None, None), (2, 10), (1, 2))):
        old = torch.stack((value[0], gate[0])) if s is None else before[s, p % 5]
        weight = torch.softmax(torch.stack((old[1], gate[row])), 0)
        want = (weight * torch.stack((old[0], value[row]))).sum(0)
        assert (out[row].float() - want).abs().max() < 2**-6
        assert torch.equal(open_pair[slot[row].long(), pos[row] % 5, 0], value[row])
