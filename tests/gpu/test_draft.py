import pytest
import torch

from flashmesh.kernels.ops import draft as twin
from flashmesh.kernels.tilelang.draft_head import confidence, markov_logits


def normal(random, *shape):
    return torch.randn(*shape, device="cuda", generator=random)


@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 64, 65, 130])
@pytest.mark.parametrize("vocab", [129280, 256])
def test_markov_logits(random, num_rows, vocab):
    base = normal(random, num_rows, vocab) * 5
    embedded = normal(random, num_rows, 256).bfloat16()
    head = (normal(random, vocab, 256) / 16).bfloat16()
    got = markov_logits(base, embedded, head)
    want = base.double() + embedded.double() @ head.double().T
    # 256 products of size 1/16, added up in fp32: the sum is of size 1.
    assert torch.allclose(got.double(), want, atol=2e-5, rtol=1e-6)
    assert torch.allclose(got, twin.markov_logits(base, embedded, head), atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
def test_confidence(random, num_rows):
    state = normal(random, num_rows, 5120).bfloat16() * 10
    embedded = normal(random, num_rows, 256).bfloat16()
    weight = (normal(random, 5376) / 70).bfloat16()
    got = confidence(state, embedded, weight)
    want = torch.cat((state, embedded), 1).double() @ weight.double()
    # 5376 products of size 1/7, a sum of size 10.
    assert torch.allclose(got.double(), want, atol=1e-4)


def test_rows_do_not_depend_on_their_batch(random):
    base, embedded = normal(random, 150, 512), normal(random, 150, 256).bfloat16()
    head, state = normal(random, 512, 256).bfloat16(), normal(random, 150, 5120).bfloat16()
    weight = normal(random, 5376).bfloat16()
    logits, rating = markov_logits(base, embedded, head), confidence(state, embedded, weight)
    for num_rows in (1, 3, 8, 16, 17, 64, 65):
        part = slice(150 - num_rows, 150)
        assert torch.equal(markov_logits(base[part], embedded[part], head), logits[part])
        assert torch.equal(confidence(state[part], embedded[part], weight), rating[part])
