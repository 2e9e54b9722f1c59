import pytest
import torch

from flashmesh.kernels.formats import expand
from flashmesh.kernels.ops import moe
from flashmesh.kernels.quantize import fp8_32

D, N, M = 64, 32, 6


def random_experts(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    return moe.prepare_experts(
        draw(0, 256, M, N, D // 2),
        draw(120, 125, M, N, D // 32),
        draw(0, 256, M, N, D // 2),
        draw(120, 125, M, N, D // 32),
        draw(0, 256, M, D, N // 2),
        draw(120, 125, M, D, N // 32),
    )


def test_route_follows_the_formula_row_by_row():
    x, gate = torch.randn(20, D).bfloat16(), torch.randn(M, D).bfloat16() / 4
    bias, bias_vl = torch.randn(M), torch.randn(M)
    text = torch.rand(20) < 0.5
    ids, weights = moe.route(x, gate, bias, bias_vl, text, 3, 1.5)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    for row in range(20):
        score = (1 + (gate.double() @ x[row].double()).exp()).log().sqrt()
        key = score + (bias if text[row] else bias_vl)
        want = key.sort(descending=True).indices[:3]
        assert ids[row].tolist() == want.tolist()
        assert torch.allclose(weights[row].double(), 1.5 * score[want] / score[want].sum())


def test_route_breaks_ties_by_id():
    gate = torch.zeros(M, D).bfloat16()
    bias = torch.tensor([0.0, 1, 0, 1, 0, 1])
    text = torch.tensor([True, False])
    ids, weights = moe.route(torch.ones(2, D).bfloat16(), gate, bias, -bias, text, 4, 2.0)
    assert ids.tolist() == [[1, 3, 5, 0], [0, 2, 4, 1]]
    assert torch.allclose(weights, torch.full((2, 4), 0.5))


@pytest.mark.parametrize("round_activations", [False, True])
def test_experts_round_where_the_model_does(round_activations):
    w = random_experts()
    x = fp8_32(torch.randn(9, D)).bfloat16()
    ids = torch.stack([torch.randperm(M)[:3] for _ in range(9)]).int()
    ids[2, 1] = ids[3] = -1
    weights, shared = torch.rand(9, 3), torch.randn(9, D).bfloat16()
    got = moe.experts(x, ids, weights, w, 10.0, round_activations=round_activations, shared=shared)
    assert got.dtype == torch.bfloat16
    for row in range(9):
        total = torch.zeros(D)
        for slot in range(3):
            expert = int(ids[row, slot])
            if expert < 0:
                continue
            w1 = expand("F4", w.w1[expert], w.s1[expert])
            w2 = expand("F4", w.w2[expert], w.s2[expert])
            w3 = expand("F4", w.w3[expert], w.s3[expert])
            g = (w1 @ x[row].float()).bfloat16().float().clamp(max=10)
            u = (w3 @ x[row].float()).bfloat16().float().clamp(-10, 10)
            a = (g * torch.sigmoid(g) * u * weights[row, slot]).bfloat16().float()
            total += (w2 @ (fp8_32(a) if round_activations else a)).bfloat16().float()
        want = (total.bfloat16() + shared[row]).float()
        # fp32 sums in another order may turn single roundings.
        assert (got[row].float() - want).norm() <= 0.02 * want.norm() + 1e-6
    assert torch.equal(got[3], shared[3])


def test_experts_of_no_rows():
    x, ids = torch.zeros(0, D).bfloat16(), torch.zeros(0, 3, dtype=torch.int32)
    got = moe.experts(x, ids, torch.zeros(0, 3), random_experts(), 10.0, round_activations=True)
    assert got.shape == (0, D)


def test_combine_adds_in_slot_order_and_skips_the_absent():
    y = torch.tensor([[256.0], [1.0], [1.0], [torch.nan]]).bfloat16()
    place = torch.tensor([[0, 1, 2], [1, 9, 2], [-1, 3, 3]], dtype=torch.int32)
    ids = torch.tensor([[5, 6, 7], [5, -1, 7], [-1, -1, -1]], dtype=torch.int32)
    assert moe.combine(y, place, ids).flatten().tolist() == [258, 2, 0]
    shared = torch.tensor([[1.0], [0.5], [-3.0]]).bfloat16()
    # bf16 has 8 significant bits: 258 + 1 is a tie, and falls to the even one.
    assert moe.combine(y, place, ids, shared).flatten().tolist() == [260, 2.5, -3]


def test_swiglu_clamps_the_gate_above_only():
    gu = torch.tensor([[20.0, -20.0, 2.0, 2.0, 3.0, 3.0, 30.0, -30.0]]).bfloat16()
    got = moe.swiglu(gu, 10.0, round_output=False).float()
    g, u = torch.tensor([10.0, -20, 2, 2]), torch.tensor([3.0, 3, 10, -10])
    assert torch.allclose(got, (g * torch.sigmoid(g) * u).unsqueeze(0), rtol=2**-8)


def test_swiglu_rounds_to_fp8_after_bf16():
    gu = torch.randn(5, 128).bfloat16() * 4
    plain = moe.swiglu(gu, 10.0, round_output=False)
    rounded = moe.swiglu(gu, 10.0, round_output=True)
    assert torch.equal(rounded, fp8_32(plain.float()).bfloat16())
