import pytest
import torch

from flashmesh.kernels.quantize import fp8_32
from flashmesh.kernels.tilelang import expert_gemm
from flashmesh.kernels.tilelang.expert_layout import (
    ExpertTiles,
    prepare_experts,
    unpack_experts,
)

LIMIT = 10.0
TILES = sorted(expert_gemm.SHAPES)


def _experts(random, num_experts, n, d):
    """Random codes under scales that give sums of about 1, and the weights in fp32."""

    def draw(rows, columns):
        # Codes have a mean square of 8.6, so values of 2^(byte - 127) sqrt(8.6) sqrt(columns) sum up.
        middle = 127 - round(torch.tensor(8.6 * columns).log2().item() / 2)
        codes = torch.randint(
            256, (num_experts, rows, columns // 2), device="cuda", generator=random
        )
        scales = torch.randint(
            middle - 2,
            middle + 2,
            (num_experts, rows, columns // 32),
            device="cuda",
            generator=random,
        )
        return codes.to(torch.uint8), scales.to(torch.uint8)

    weights = prepare_experts(*draw(n, d), *draw(n, d), *draw(d, n))
    return weights, unpack_experts(weights)


def _deal(ids, weights, num_experts, token_tile, spare=0):
    """Tiles of slots, and for each slot its place; `spare` unused tiles stand between the experts."""
    slots = ids.flatten()
    rows, slot_weights, experts, place = [], [], [], torch.zeros_like(slots)
    for expert in range(num_experts):
        mine = (slots == expert).nonzero().flatten()
        size = -(-len(mine) // token_tile) * token_tile
        place[mine] = len(rows) + torch.arange(len(mine), device=ids.device)
        padding = [-1] * (size - len(mine))
        rows += mine.tolist() + padding
        slot_weights += weights.flatten()[mine].tolist() + [0.0] * len(padding)
        experts += [expert] * (size // token_tile)
        rows += [-1] * (spare * token_tile)
        slot_weights += [0.0] * (spare * token_tile)
        experts += [-1] * spare
    tiles = ExpertTiles(
        torch.tensor(rows, dtype=torch.int32, device="cuda"),
        torch.tensor(slot_weights, device="cuda"),
        torch.tensor(experts, dtype=torch.int32, device="cuda"),
        ids.shape[1],
    )
    return tiles, place


def _route(random, num_tokens, num_experts, top_k):
    scores = torch.rand(num_tokens, num_experts, device="cuda", generator=random)
    return scores.topk(top_k).indices, torch.rand(
        num_tokens, top_k, device="cuda", generator=random
    ) + 0.5


def _draw(random, *shape):
    return fp8_32(torch.randn(shape, device="cuda", generator=random)).bfloat16()


def _gate_up_exactly(x, ids, weights, w1, w3):
    """Gates, linear parts and products of every slot, fp64 sums rounded to bf16."""
    slots, top_k = ids.flatten(), ids.shape[1]
    out = torch.empty(len(slots), w1.shape[1], device="cuda")
    for expert in slots.unique().tolist():
        mine = (slots == expert).nonzero().flatten()
        rows = x[mine // top_k].double()
        g = (rows @ w1[expert].double().T).bfloat16().float().clamp(max=LIMIT)
        u = (rows @ w3[expert].double().T).bfloat16().float().clamp(-LIMIT, LIMIT)
        out[mine] = torch.nn.functional.silu(g) * u * weights.flatten()[mine].unsqueeze(1)
    return out


@pytest.mark.parametrize(
    ("num_experts", "n", "d", "token_tile"),
    [(16, 256, 512, tile) for tile in TILES]
    + [(7, 192, 768, tile) for tile in (8, 128)]
    + [(5, 2304, 5120, tile) for tile in (8, 64, 128)],
)
def test_products_are_those_of_exact_sums(random, poison, num_experts, n, d, token_tile):
    weights, (w1, w3, w2) = _experts(random, num_experts, n, d)
    ids, slot_weights = _route(random, 83, num_experts, 3)
    x = _draw(random, 83, d)
    tiles, place = _deal(ids, slot_weights, num_experts, token_tile, spare=1)
    a = expert_gemm.gate_up(x, tiles, weights, LIMIT, False, token_tile)[place]
    want = _gate_up_exactly(x, ids, slot_weights, w1, w3)
    # fp32 sums of n terms in the tensor core's order move g and u by far less than a bf16 step, but can move them
    # across a rounding boundary: one step (2^-8 relative) of each, and one of the result.
    assert ((a.float() - want).abs() <= 3 * 2.0**-8 * want.abs() + 2e-3).all()
    assert (a.float() - want).norm() <= 2.5e-3 * want.norm()

    rounded = torch.empty(len(tiles.rows), n, device="cuda", dtype=torch.bfloat16)
    rounded[place] = _draw(random, len(place), n)
    y = expert_gemm.down(rounded, tiles, weights, token_tile)[place]
    slots = ids.flatten()
    want = torch.stack(
        [w2[e].double() @ row.double() for e, row in zip(slots, rounded[place], strict=True)]
    )
    # One rounding to bf16 (2^-9 relative), and sums whose terms cancel: 2^-20 of the terms' size, about 1.
    assert ((y.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-4).all()


def test_rounded_output_is_the_plain_one_rounded(random):
    weights, _ = _experts(random, 6, 256, 512)
    ids, slot_weights = _route(random, 50, 6, 2)
    x = _draw(random, 50, 512)
    x[7] = 0
    for token_tile in TILES:
        tiles, place = _deal(ids, slot_weights, 6, token_tile)
        plain = expert_gemm.gate_up(x, tiles, weights, LIMIT, False, token_tile)[place]
        rounded = expert_gemm.gate_up(x, tiles, weights, LIMIT, True, token_tile)[place]
        assert torch.equal(rounded, fp8_32(plain.float()).bfloat16())


@pytest.mark.parametrize(("num_experts", "n", "d"), [(8, 256, 512), (3, 2304, 5120)])
def test_bits_of_a_row_depend_on_nothing_else(random, num_experts, n, d):
    weights, _ = _experts(random, num_experts, n, d)
    ids, slot_weights = _route(random, 1000, num_experts, 2)
    x = _draw(random, 1000, d)
    seen = None
    for token_tile in TILES:
        for count in (1000, 64, 17, 3, 1):
            tiles, place = _deal(ids[:count], slot_weights[:count], num_experts, token_tile)
            a = expert_gemm.gate_up(x[:count], tiles, weights, LIMIT, True, token_tile)
            y = expert_gemm.down(a, tiles, weights, token_tile)
            got = torch.cat((a[place], y[place]), 1)
            seen = got if seen is None else seen
            assert torch.equal(got, seen[: len(got)]), (token_tile, count)


def test_extreme_scales_are_exact(random):
    """The smallest and largest scales, where widening passes through subnormal numbers."""
    n, d = 256, 512
    codes = torch.randint(256, (1, d, n // 2), device="cuda", generator=random).to(torch.uint8)
    choices = torch.tensor([0, 1, 2, 126, 127, 128], dtype=torch.uint8, device="cuda")
    picked = torch.randint(6, (1, d, n // 32), device="cuda", generator=random)
    other = torch.zeros(1, n, d // 2, dtype=torch.uint8, device="cuda")
    ones = torch.full((1, n, d // 32), 127, dtype=torch.uint8, device="cuda")
    weights = prepare_experts(other, ones, other, ones, codes, choices[picked])
    w2 = unpack_experts(weights)[2][0]
    for token_tile in TILES:
        ids = torch.zeros(n, 1, dtype=torch.int64, device="cuda")
        tiles, place = _deal(ids, ids.float(), 1, token_tile)
        # One column at a time, times 64: each output is one weight.
        a = torch.zeros(len(tiles.rows), n, dtype=torch.bfloat16, device="cuda")
        a[place] = torch.eye(n, device="cuda").bfloat16() * 64
        assert torch.equal(
            expert_gemm.down(a, tiles, weights, token_tile)[place].float(), 64 * w2.T
        )


def test_no_rows(random):
    weights, _ = _experts(random, 2, 64, 256)
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    tiles = ExpertTiles(none, none.float(), none, 2)
    x = torch.empty(0, 256, dtype=torch.bfloat16, device="cuda")
    a = expert_gemm.gate_up(x, tiles, weights, LIMIT, True, 8)
    assert a.shape == (0, 64)
    assert expert_gemm.down(a, tiles, weights, 8).shape == (0, 256)


def test_refuses_what_it_has_no_kernel_for(random):
    weights, _ = _experts(random, 2, 64, 256)
    ids = torch.zeros(4, 1, dtype=torch.int64, device="cuda")
    tiles, _ = _deal(ids, ids.float(), 2, 8)
    x = torch.zeros(4, 256, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="tiles of 24 tokens"):
        expert_gemm.gate_up(x, tiles, weights, LIMIT, True, 24)
    with pytest.raises(ValueError, match="slots in"):
        expert_gemm.gate_up(x, tiles, weights, LIMIT, True, 16)
    with pytest.raises(ValueError, match="bf16"):
        expert_gemm.gate_up(x.float(), tiles, weights, LIMIT, True, 8)
    with pytest.raises(ValueError, match="bf16"):
        expert_gemm.down(x, tiles, weights, 8)
