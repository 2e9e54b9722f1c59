"""Twins of the mixing ops against the runtime's hyper-connections and against double precision."""

import torch

from flashmesh.kernels.ops import mixing
from flashmesh.kernels.quantize import fp8_32
from flashmesh.kernels.reference import mhc
from flashmesh.kernels.tilelang.mixing import prepare_mix

ITERS, EPS, NORM_EPS = 20, 1e-6, 1e-20


def inputs(rows=5, width=64):
    torch.manual_seed(3)
    streams, y = torch.randn(rows, 4, width).bfloat16(), torch.randn(rows, width).bfloat16()
    weights = mixing.prepare_mix(
        torch.randn(24, 4 * width) / 16, torch.randn(24), torch.rand(3) + 0.5
    )
    return streams, y, weights, torch.rand(rows, 4), torch.randn(width)


def test_coefficients_are_the_runtimes():
    streams, _, weights, carried, norm = inputs()
    mixed = mixing.mix(streams, carried, weights, norm, ITERS, EPS, NORM_EPS, False)
    want = mhc.coefficients(streams.float(), *weights, iters=ITERS, eps=EPS)
    exact = mixing.coefficients(streams.double(), weights, ITERS, EPS)
    for ours, theirs, double in zip(mixed[:3], want, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ours.double(), double, rtol=1e-5, atol=1e-7)
    assert mixed.x_rounded is None


def test_combinations_are_nearly_doubly_stochastic():
    streams, _, weights, carried, norm = inputs()
    comb = mixing.mix(streams, carried, weights, norm, ITERS, EPS, NORM_EPS, False).comb
    assert (comb.sum(1) - 1).abs().max() < 1e-5
    assert (comb.sum(2) - 1).abs().max() < 1e-2


def test_the_input_is_collapsed_with_what_was_carried():
    streams, _, weights, carried, norm = inputs()
    mixed = mixing.mix(streams, carried, weights, norm, ITERS, EPS, NORM_EPS, True)
    u = mhc.collapse(streams.float(), carried).bfloat16().double()
    want = u / u.square().mean(1, keepdim=True).sqrt() * norm.double()
    torch.testing.assert_close(mixed.x.double(), want, rtol=2**-7, atol=1e-6)
    assert torch.equal(mixed.x, mixing.collapse_norm(streams, carried, norm, NORM_EPS))
    assert torch.equal(mixed.x_rounded, fp8_32(mixed.x.float()).bfloat16())


def test_spreading_goes_from_source_to_destination():
    streams, y, _, _, _ = inputs()
    post, comb = torch.rand(5, 4), torch.rand(5, 4, 4)
    want = mhc.spread(streams.float(), y.float(), post, comb)
    torch.testing.assert_close(
        mixing.spread(streams, y, post, comb).float(), want, rtol=2**-8, atol=1e-6
    )
    one = torch.zeros(5, 4, 4)
    one[:, 2, 1] = 1
    moved = mixing.spread(streams, y, torch.zeros(5, 4), one)
    assert torch.equal(moved[:, 1], streams[:, 2])
    assert not moved[:, [0, 2, 3]].any()


def test_the_fused_op_is_both_in_turn():
    streams, y, weights, carried, norm = inputs()
    post, comb = torch.rand(5, 4), torch.rand(5, 4, 4)
    args = carried, weights, norm, ITERS, EPS, NORM_EPS, True
    new, mixed = mixing.spread_mix(streams, y, post, comb, *args)
    assert torch.equal(new, mixing.spread(streams, y, post, comb))
    for ours, theirs in zip(mixed, mixing.mix(new, *args), strict=True):
        assert torch.equal(ours, theirs)


def test_the_three_parts_of_packed_weights_add_up_exactly():
    width = 256
    fn = torch.randn(24, 4 * width) * torch.exp2(torch.randint(-20, 3, (24, 4 * width)))
    packed = prepare_mix(fn, torch.zeros(24), torch.zeros(3)).packed
    # group, stream, step, half, part, eight, output, lane, pair
    total = packed.double().view(width // 32, 4, 2, 2, 3, 3, 8, 4, 2).sum(4)
    assert torch.equal(total.permute(4, 5, 1, 0, 6, 2, 3, 7).reshape(24, -1), fn.double())
