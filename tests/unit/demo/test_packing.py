"""Packing: whole documents on the grain, nothing across their borders."""

import numpy as np
import torch

from tools.train_demo.batches import Supply
from tools.train_demo.network import DOCUMENT_GRAIN
from tools.train_demo.packing import COUNTED, Documents, Packer, Rows, alone, next_weights


def documents(*lengths):
    parts = [np.arange(1, length + 1, dtype=np.uint16) + 20 for length in lengths]
    return Documents(np.concatenate(parts), np.cumsum(lengths))


def test_every_document_comes_once_before_any_comes_again():
    found = documents(*range(5, 45))
    packer = Packer(found, 64, pad=2, seed=1)
    seen = []
    while len(seen) < len(found):
        _, start = packer.row()
        begins = [b for b in np.unique(start) if (start == b).sum() > 1]
        seen += [int((start == b).sum()) for b in begins]
    first = seen[: len(found) - 16]  # the last ones may mix with the next round
    assert len(set(first)) == len(first)


def test_documents_are_whole_and_begin_on_the_grain():
    packer = Packer(documents(10, 17, 33, 8, 21), 96, pad=2, seed=0)
    for _ in range(10):
        tokens, start = packer.row()
        for begin in np.unique(start):
            part = tokens[start == begin]
            if part[0] != 2:
                assert begin % DOCUMENT_GRAIN == 0
                assert part.tolist() == list(range(21, 21 + len(part)))
                assert len(part) in (10, 17, 33, 8, 21)


def test_a_document_that_is_too_long_is_cut():
    tokens, start = Packer(documents(100), 32, pad=2, seed=0).row()
    assert tokens.tolist() == list(range(21, 53))
    assert (start == 0).all()


def test_the_weight_of_a_token_stands_before_it_and_never_at_a_border():
    tokens = np.array([[30, 31 | COUNTED, 32 | COUNTED, 2, 40 | COUNTED, 41]], dtype=np.uint16)
    start = np.array([[0, 0, 0, 3, 4, 4]])
    weights = next_weights(Rows(tokens, start), uncounted=0.5)
    assert weights.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.5, 0.0]]


def test_a_document_alone_is_filled_with_padding_that_sees_nothing():
    rows = alone(np.array([30, 31, 32], dtype=np.uint16), 8, pad=2)
    assert rows.tokens.tolist() == [[30, 31, 32, 2, 2, 2, 2, 2]]
    assert rows.start.tolist() == [[0, 0, 0, 3, 4, 5, 6, 7]]


def test_engram_rows_do_not_look_back_over_a_border(model):
    tokens = np.array([[30, 31, 32, 33, 2, 2, 2, 2, 30, 31, 32, 33, 2, 2, 2, 2]], dtype=np.uint16)
    start = np.array([[0, 0, 0, 0, 4, 5, 6, 7, 8, 8, 8, 8, 12, 13, 14, 15]])
    batch = model.hasher.batch(Rows(tokens, start))
    for rows in batch.engram:
        assert torch.equal(rows[0, :4], rows[0, 8:12])


def test_equal_seeds_give_equal_batches_with_rows_of_every_source(model):
    sources = [(documents(9, 20, 30), 2), (documents(40, 50), 1)]
    supply = Supply(model.config, model.table, sources, num_tokens=128)
    first, second = next(supply.batches(5)), next(supply.batches(5))
    assert torch.equal(first.batch.ids, second.batch.ids)
    assert torch.equal(first.weights, second.weights)
    assert first.batch.ids.shape == (3, 128)
