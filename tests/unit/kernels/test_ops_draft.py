import torch

from flashmesh.kernels.ops import draft


def test_markov_logits_add_a_low_rank_term():
    base = torch.randn(3, 40)
    embedded, head = torch.randn(3, 8).bfloat16(), torch.randn(40, 8).bfloat16()
    got = draft.markov_logits(base, embedded, head)
    want = base.double() + embedded.double() @ head.double().T
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), want, atol=1e-5)


def test_confidence_weighs_state_then_embedding():
    state, embedded = torch.randn(3, 16).bfloat16(), torch.randn(3, 8).bfloat16()
    weight = torch.randn(24).bfloat16()
    got = draft.confidence(state, embedded, weight)
    want = state.double() @ weight[:16].double() + embedded.double() @ weight[16:].double()
    assert got.shape == (3,)
    assert torch.allclose(got.double(), want, atol=1e-5)


def test_no_rows():
    none = torch.zeros(0, 8).bfloat16()
    assert draft.markov_logits(torch.zeros(0, 40), none, torch.zeros(40, 8).bfloat16()).shape == (
        0,
        40,
    )
    assert draft.confidence(none, none, torch.zeros(16).bfloat16()).shape == (0,)
