"""The n-gram baseline, the optimiser's matrices and the rounding that a gradient passes."""

import math

import numpy as np
import torch

from tools.train_demo.ngram import NGram
from tools.train_demo.optimiser import is_matrix, orthogonalise
from tools.train_demo.packing import COUNTED, Documents
from tools.train_demo.rounding import stored_weight, window_row


def counted(tokens):
    return Documents(np.array(tokens, dtype=np.uint16) | COUNTED, np.array([len(tokens)]))


def test_the_baseline_gives_each_context_a_distribution():
    train = counted([20, 21, 22, 20, 21, 23, 20, 21, 22, 24] * 3)
    model = NGram([train], 1000)
    total = sum(math.exp(-last_loss(model, [20, 21, token])) for token in range(4096))
    assert abs(total - 1) < 1e-6
    assert last_loss(model, [20, 21, 22]) < last_loss(model, [20, 21, 23]) < math.log(4096)


def last_loss(model, tokens):
    documents = counted(tokens)
    documents.tokens[:-1] &= COUNTED - 1
    return model.loss(documents)


def test_the_baseline_knows_a_repeated_text_by_heart_and_keeps_to_its_size():
    text = np.random.default_rng(0).integers(20, 200, 400).tolist()
    assert NGram([counted(text * 20)], 100_000).loss(counted(text)) < 0.6
    assert NGram([counted(text * 20)], 200).loss(counted(text)) > 2


def test_orthogonalised_matrices_have_singular_values_near_one():
    draw = torch.Generator().manual_seed(0)
    for shape in ((2, 16, 48), (1, 48, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=draw)))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_muon_takes_products_and_leaves_lookups_and_indexers():
    assert is_matrix("layers.0.ffn.experts.w1.weight")
    assert is_matrix("layers.1.engram.wkv.weight")
    for name in (
        "embed.weight",
        "layers.1.engram.embed.weight",
        "layers.1.attn.indexer.wq_b.weight",
    ):
        assert not is_matrix(name)


def test_rounding_changes_values_and_passes_gradients():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for rounded in (window_row(x), stored_weight("F8", x), stored_weight("F4", x)):
        assert not torch.equal(rounded, x)
        (gradient,) = torch.autograd.grad(rounded.sum(), x)
        assert torch.equal(gradient, torch.ones_like(x))


def test_a_stack_of_experts_is_rounded_matrix_by_matrix():
    stack = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(2))
    together = stored_weight("F4", stack)
    for matrix, rounded in zip(stack, together, strict=True):
        assert torch.equal(stored_weight("F4", matrix), rounded)
