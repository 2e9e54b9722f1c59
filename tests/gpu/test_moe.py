import pytest
import torch

from flashmesh.kernels.ops import moe as twin
from flashmesh.kernels.quantize import fp8_32
from flashmesh.kernels.tilelang import combine as combine_module
from flashmesh.kernels.tilelang import experts as experts_module
from flashmesh.kernels.tilelang import route as route_module
from flashmesh.kernels.tilelang.expert_layout import prepare_experts
from flashmesh.kernels.tilelang.expert_tiles import expert_tiles, most_tiles
from flashmesh.kernels.tilelang.route import route
from flashmesh.kernels.tilelang.swiglu import swiglu

D = 5120
ROWS = [1, 3, 17, 64, 256, 257, 1000]


def normal(random, *shape):
    return torch.randn(*shape, device="cuda", generator=random)


def router(random, num_experts, num_rows):
    x = normal(random, num_rows, D).bfloat16()
    gate = (normal(random, num_experts, D) / D**0.5 * 2).bfloat16()
    bias, bias_vl = (normal(random, num_experts) * 0.3 for _ in range(2))
    text = torch.rand(num_rows, device="cuda", generator=random) < 0.7
    return x, gate, bias, bias_vl, text


@pytest.mark.parametrize("num_rows", [0, *ROWS, 2048, 2050])
@pytest.mark.parametrize(("num_experts", "count"), [(384, 6), (128, 3)])
def test_route(random, poison, num_rows, num_experts, count):
    x, gate, bias, bias_vl, text = router(random, num_experts, num_rows)
    ids, weights = route(x, gate, bias, bias_vl, text, count, 1.5)
    scores = torch.nn.functional.softplus(x.double() @ gate.double().T).sqrt()
    keys = scores + torch.where(text.unsqueeze(1), bias, bias_vl).double()
    best = keys.topk(count, 1)
    # Sums of 5120 products of size 2 / 72 and a few units in total: fp32 leaves about 1e-5, and a choice that turns on
    # less may fall either way.
    picked = keys.gather(1, ids.long())
    assert torch.allclose(picked, best.values, atol=3e-5, rtol=0)
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    want = scores.gather(1, ids.long())
    want = 1.5 * want / want.sum(1, keepdim=True)
    assert torch.allclose(weights.double(), want, atol=1e-5, rtol=1e-5)
    twin_ids, twin_weights = twin.route(x, gate, bias, bias_vl, text, count, 1.5)
    same = (twin_ids == ids).all(1)
    assert same.float().mean() > 0.99 or num_rows < 100
    assert torch.allclose(weights[same], twin_weights[same], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [5, 300])
def test_route_breaks_ties_by_id(random, num_rows):
    # Whole numbers: sums are exact in any order, and many scores are equal.
    x = torch.randint(-1, 2, (num_rows, D), device="cuda", generator=random).bfloat16()
    x[:, 4:] = 0
    gate = torch.randint(-1, 2, (384, D), device="cuda", generator=random).bfloat16()
    zero = torch.zeros(384, device="cuda")
    text = torch.ones(num_rows, dtype=torch.bool, device="cuda")
    ids, weights = route(x, gate, zero, zero, text, 6, 1.5)
    twin_ids, twin_weights = twin.route(x, gate, zero, zero, text, 6, 1.5)
    assert torch.equal(ids, twin_ids)
    assert torch.allclose(weights, twin_weights, atol=1e-6)


def test_route_rows_do_not_depend_on_their_batch(random):
    x, gate, bias, bias_vl, text = router(random, 384, 2100)
    ids, weights = route(x, gate, bias, bias_vl, text, 6, 1.5)
    for num_rows in ROWS:
        for start in (0, 2100 - num_rows):
            part = slice(start, start + num_rows)
            got = route(x[part], gate, bias, bias_vl, text[part], 6, 1.5)
            assert torch.equal(got[0], ids[part]), num_rows
            assert torch.equal(got[1], weights[part]), num_rows


@pytest.mark.parametrize("num_rows", [3, 300])
def test_route_of_a_small_model(random, poison, num_rows):
    x, gate = normal(random, num_rows, 512).bfloat16(), (normal(random, 16, 512) / 20).bfloat16()
    zero = torch.zeros(16, device="cuda")
    text = torch.ones(num_rows, dtype=torch.bool, device="cuda")
    ids, weights = route(x, gate, zero, zero, text, 6, 1.5)
    twin_ids, twin_weights = twin.route(x, gate, zero, zero, text, 6, 1.5)
    assert (twin_ids == ids).float().mean() > 0.99
    assert torch.allclose(weights, twin_weights, atol=1e-5)


def test_route_refuses_other_sizes():
    x, gate = torch.zeros(2, 100), torch.zeros(384, 100)
    with pytest.raises(ValueError, match="multiple of"):
        route_module.route(x, gate, gate[:, 0], gate[:, 0], x[:, 0] > 0, 6, 1.5)


def slots(random, num_tokens, count, num_experts):
    """Distinct experts for every token, a few left out."""
    chance = torch.rand(num_tokens, num_experts, device="cuda", generator=random)
    ids = chance.topk(count, 1).indices.int()
    ids[torch.rand(ids.shape, device="cuda", generator=random) < 0.1] = -1
    return ids, torch.rand(ids.shape, device="cuda", generator=random)


@pytest.mark.parametrize("tile", [8, 128])
@pytest.mark.parametrize("num_tokens", [1, 64, 85, 86, 170, 171, 1000, 16384])
@pytest.mark.parametrize(("num_experts", "count"), [(384, 6), (128, 3)])
def test_tiles_hold_every_slot_once(random, poison, num_tokens, num_experts, count, tile):
    ids, weights = slots(random, num_tokens, count, num_experts)
    check_tiles(ids, weights, num_experts, tile)


@pytest.mark.parametrize("num_tokens", [5, 2000])
def test_tiles_of_one_expert_and_of_none(random, poison, num_tokens):
    ids, weights = slots(random, num_tokens, 6, 384)
    check_tiles(torch.full_like(ids, 383), weights, 384, 16)
    check_tiles(torch.full_like(ids, -1), weights, 384, 16)


def check_tiles(ids, weights, num_experts, tile):
    tiles, place = expert_tiles(ids, weights, num_experts, tile)
    assert tiles.top_k == ids.shape[1]
    assert len(tiles.expert) == most_tiles(ids.numel(), num_experts, tile)
    flat, place = ids.flatten().long().cpu(), place.flatten().cpu()
    rows, expert = tiles.rows.cpu(), tiles.expert.cpu()
    present = flat >= 0
    counts = flat[present].bincount(minlength=num_experts)
    want = torch.arange(num_experts).repeat_interleave((counts + tile - 1) // tile)
    assert torch.equal(expert[: len(want)].long(), want)
    assert (expert[len(want) :] == -1).all()
    rows = rows[: len(want) * tile]
    assert torch.equal(rows[place[present].long()].long(), present.nonzero().flatten())
    assert (rows >= 0).sum() == present.sum()
    assert (rows[rows < 0] == -1).all()
    assert torch.equal(want[place[present].long() // tile], flat[present])
    assert torch.equal(tiles.weights.cpu()[place[present].long()], weights.flatten().cpu()[present])
    order = place[present][flat[present].argsort(stable=True)]
    assert (order.diff() > 0).all()  # stable


@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("with_shared", [False, True])
def test_combine(random, poison, num_tokens, count, with_shared):
    y = normal(random, 2 * num_tokens * count + 3, D).bfloat16()
    ids, _ = slots(random, num_tokens, count, 384)
    if num_tokens > 1:
        ids[1] = -1
    place = torch.randint(0, len(y), ids.shape, device="cuda", generator=random).int()
    place[ids < 0] = -1
    shared = normal(random, num_tokens, D).bfloat16() if with_shared else None
    got = combine_module.combine(y, place, ids, shared)
    assert torch.equal(got, twin.combine(y, place, ids, shared))


@pytest.mark.parametrize("num_rows", [0, 1, 7, 300])
@pytest.mark.parametrize("round_output", [False, True])
@pytest.mark.parametrize("width", [256, 2304])
def test_swiglu(random, poison, num_rows, round_output, width):
    gu = (normal(random, num_rows, 2 * width) * 6).bfloat16()
    gu[:, :40] = 0
    got = swiglu(gu, 10.0, round_output)
    want = twin.swiglu(gu, 10.0, round_output=False).float()
    plain = swiglu(gu, 10.0, False)
    # The exponentials of the device and of torch differ in their last bits, and bf16 may fall to either side.
    assert torch.allclose(plain.float(), want, rtol=2**-7, atol=1e-30)
    assert num_rows == 0 or (plain == want).float().mean() > 0.99
    if round_output:
        assert torch.equal(got, fp8_32(plain.float()).bfloat16())


def stored_experts(random, num_experts, n, width):
    """w1, s1, w3, s3, w2, s2 as a checkpoint holds them."""
    parts = []
    for rows, columns in ((n, width), (n, width), (width, n)):
        for low, high, size in ((0, 256, columns // 2), (118, 123, columns // 32)):
            shape = num_experts, rows, size
            drawn = torch.randint(low, high, shape, device="cuda", generator=random)
            parts.append(drawn.to(torch.uint8))
    return parts


@pytest.mark.parametrize("tile_tokens", [None, 128])
def test_experts(random, poison, monkeypatch, tile_tokens):
    num_experts, n, width, count = 16, 256, 512, 3
    stored = stored_experts(random, num_experts, n, width)
    packed, plain = prepare_experts(*stored), twin.prepare_experts(*stored)
    if tile_tokens:
        monkeypatch.setattr(experts_module, "token_tile", lambda *_: tile_tokens)
    for num_tokens in (0, 1, 9, 200):
        x = fp8_32(normal(random, num_tokens, width)).bfloat16()
        ids, weights = slots(random, num_tokens, count, num_experts)
        shared = normal(random, num_tokens, width).bfloat16()
        for rounded in (False, True):
            for extra in (None, shared):
                got = experts_module.experts(x, ids, weights, packed, 10.0, rounded, extra).float()
                want = twin.experts(
                    x, ids, weights, plain, 10.0, round_activations=rounded, shared=extra
                ).float()
                # bf16 of g, u, a, y and the sum: 2^-8 each, and FP8's 2^-4 where a value turns on the order of a sum.
                scale = want.abs().mean() if num_tokens else 1
                assert (got - want).abs().max() <= scale * 0.1 if num_tokens else True
                if num_tokens:
                    assert (got - want).norm() <= 0.01 * want.norm()


def test_experts_rows_do_not_depend_on_their_batch(random):
    num_experts, n, width, count = 16, 256, 512, 3
    packed = prepare_experts(*stored_experts(random, num_experts, n, width))
    x = normal(random, 1000, width).bfloat16()
    ids, weights = slots(random, 1000, count, num_experts)
    whole = experts_module.experts(x, ids, weights, packed, 10.0, True)
    for num_rows in (1, 3, 17, 64):
        part = slice(1000 - num_rows, 1000)
        got = experts_module.experts(x[part], ids[part], weights[part], packed, 10.0, True)
        assert torch.equal(got, whole[part]), num_rows


@pytest.mark.parametrize("num_rows", [5, 300])
def test_a_captured_graph_gives_the_same(random, num_rows):
    x, gate, bias, bias_vl, text = router(random, 384, num_rows)
    other = normal(random, num_rows, D).bfloat16()

    def run(rows):
        ids, weights = route(rows, gate, bias, bias_vl, text, 6, 1.5)
        tiles, place = expert_tiles(ids, weights, 384, 8)
        return ids, weights, tiles.expert, place

    want = run(other)
    run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(x)
    x.copy_(other)
    for _ in range(3):
        for out in got:
            out.fill_(-7)
        graph.replay()
        for out, expected in zip(got, want, strict=True):
            assert torch.equal(out, expected)
