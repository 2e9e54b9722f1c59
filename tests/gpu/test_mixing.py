"""Coefficients are compared with double precision. Rows and streams are bf16 results of fp32 sums in another order than
the twin's, so a value may fall on the other side of a tie: rare flips by one bf16 step are allowed.
"""

import pytest
import torch

from flashmesh.kernels.ops import mixing as twin
from flashmesh.kernels.quantize import fp8_32
from flashmesh.kernels.tilelang import mixing, spread

pytestmark = pytest.mark.usefixtures("poison")

ITERS, EPS, NORM_EPS = 20, 1e-6, 1e-20
D = 5120
ROWS = [0, 1, 3, 17, 64, 130, 1000]


def normal(random, *shape):
    return torch.randn(*shape, device="cuda", generator=random)


def uniform(random, *shape):
    return torch.rand(*shape, device="cuda", generator=random)


def inputs(random, rows, width=D):
    """Streams of many sizes, one of them zero throughout, and what the mixing takes besides."""
    streams = normal(random, rows, 4, width) * torch.exp2(4 * normal(random, rows, 4, 1))
    if rows > 2:
        streams[2] = 0
    return (
        streams.bfloat16(),
        normal(random, rows, width).bfloat16(),
        2 * uniform(random, rows, 4),
        uniform(random, rows, 4, 4) / 2,
        uniform(random, rows, 4),
    )


def projection(random, width=D):
    sizes = torch.exp2(normal(random, 24, 1).clamp(max=1))
    fn = normal(random, 24, 4 * width) * (4 * width) ** -0.5 * sizes
    return fn, normal(random, 24), uniform(random, 3) + 0.5


def nearly(ours, theirs, rtol=2**-7, atol=0.0):
    """Equal but for one value in two hundred, and those by one bf16 step (2^-7 of a power of two)."""
    ours, theirs = ours.float(), theirs.float()
    assert not ours.isnan().any()
    if ours.numel():
        assert (ours != theirs).float().mean().item() < 5e-3
    assert ((ours - theirs).abs() <= rtol * theirs.abs() + atol).all()


def check_normed(ours, streams, carried, norm):
    # The collapsed value is rounded to bf16 and the normed one again: two steps. The four terms of a collapsed value
    # may cancel, and then their rounding counts, not its own.
    terms = torch.einsum("ts,tsd->td", carried, streams.float().abs())
    u = torch.einsum("ts,tsd->td", carried, streams.float())
    factor = torch.rsqrt(u.square().mean(1, keepdim=True) + NORM_EPS)
    want = twin.collapse_norm(streams, carried, norm, NORM_EPS)
    nearly(ours, want, rtol=2**-6, atol=2**-20 * terms * factor * norm.abs())


def check_mixed(mixed, streams, carried, fn, base, scale, norm):
    exact = twin.coefficients(streams.double(), twin.prepare_mix(fn, base, scale), ITERS, EPS)
    for ours, theirs in zip(mixed[:3], exact, strict=True):
        # A logit sums 20480 exact products in fp32: some 1e-6 of its size, and the logits here are at most ten or so.
        # A coefficient moves by as much relative to itself; comb's, after 40 normalisations, not by more.
        assert not ours.isnan().any()
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-9)
    check_normed(mixed.x, streams, carried, norm)
    if mixed.x_rounded is not None:
        assert torch.equal(mixed.x_rounded, fp8_32(mixed.x.float()).bfloat16())


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("width", [512, D])
@pytest.mark.parametrize("rows", ROWS)
def test_spread_mix(random, rows, width, rounded):
    streams, y, post, comb, carried = inputs(random, rows, width)
    fn, base, scale = projection(random, width)
    norm = normal(random, width)
    weights = mixing.prepare_mix(fn, base, scale)
    args = carried, weights, norm, ITERS, EPS, NORM_EPS, rounded
    new, mixed = mixing.spread_mix(streams, y, post, comb, *args)
    # Sums of five terms may cancel: a step of the largest term, not of the result.
    terms = post.unsqueeze(2) * y.float().abs().unsqueeze(1) + torch.einsum(
        "tij,tid->tjd", comb, streams.float().abs()
    )
    nearly(new, twin.spread(streams, y, post, comb), atol=2**-20 * terms)
    assert torch.equal(new, spread.spread(streams, y, post, comb))
    check_mixed(mixed, new, carried, fn, base, scale, norm)
    alone = mixing.mix(new, *args)
    for ours, theirs in zip(mixed, alone, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", ROWS)
def test_collapse_norm(random, rows):
    streams, _, _, _, carried = inputs(random, rows)
    norm = normal(random, D)
    check_normed(spread.collapse_norm(streams, carried, norm, NORM_EPS), streams, carried, norm)


def test_large_logits_saturate(random):
    """Sinkhorn of matrices that are nearly permutations, gates that are nearly 0 or 1."""
    streams, _, _, _, carried = inputs(random, 40)
    fn, base, scale = projection(random)
    scale *= 30
    norm = normal(random, D)
    weights = mixing.prepare_mix(fn, base, scale)
    mixed = mixing.mix(streams, carried, weights, norm, ITERS, EPS, NORM_EPS, False)
    exact = twin.coefficients(streams.double(), twin.prepare_mix(fn, base, scale), ITERS, EPS)
    for ours, theirs in zip(mixed[:3], exact, strict=True):
        # Logits up to a few hundred carry an error of some 1e-4, entries near zero as much relative to themselves.
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-5)


def test_no_row_depends_on_the_others(random):
    streams, y, post, comb, carried = inputs(random, 1000)
    weights = mixing.prepare_mix(*projection(random))
    norm = normal(random, D)

    def run(begin, end):
        part = slice(begin, end)
        new, mixed = mixing.spread_mix(
            *(x[part] for x in (streams, y, post, comb, carried)),
            weights,
            norm,
            ITERS,
            EPS,
            NORM_EPS,
            True,
        )
        return new, *mixed

    whole = run(0, 1000)
    for begin, end in ((0, 1), (5, 8), (100, 117), (300, 364), (500, 700), (10, 900)):
        for ours, theirs in zip(run(begin, end), whole, strict=True):
            assert torch.equal(ours, theirs[begin:end])


def test_a_graph_replays(random):
    streams, y, post, comb, carried = inputs(random, 6)
    weights = mixing.prepare_mix(*projection(random))
    args = carried, weights, normal(random, D), ITERS, EPS, NORM_EPS, True
    want = mixing.spread_mix(streams, y, post, comb, *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new, mixed = mixing.spread_mix(streams, y, post, comb, *args)
    graph.replay()
    for ours, theirs in zip((new, *mixed), (want[0], *want[1]), strict=True):
        assert torch.equal(ours, theirs)


def test_what_kernels_do_not_take_is_refused(random):
    streams, y, post, comb, _ = inputs(random, 2)
    with pytest.raises(ValueError, match="multiple of 256"):
        spread.spread(streams[..., :100].contiguous(), y, post, comb)
    with pytest.raises(ValueError, match="y is"):
        spread.spread(streams, y[:1], post, comb)
    with pytest.raises(ValueError, match="24"):
        mixing.prepare_mix(torch.zeros(20, 4 * D), torch.zeros(24), torch.zeros(3))
