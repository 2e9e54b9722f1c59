"""The device sampler's contract: what it takes from tensors is what `kernels.sampling` is given."""

import math

import numpy as np
import pytest
import torch

from flashmesh.kernels import sampling
from flashmesh.kernels.ops.sampler import Lists, SampleParams, sample, top_logprobs
from flashmesh.types import SamplingParams

VOCAB = 96


def params(rows, **changes):
    """Rows at temperature 1 that keep everything."""
    floats = ("temperature", "top_p", "repetition_penalty")
    longs = {"seed": torch.int64}
    ints = ("top_k", "choice", "position")
    tensors = {}
    for name in SampleParams._fields[:10]:
        value = changes.pop(name, 1.0 if name in floats else 0)
        dtype = longs.get(name, torch.int32 if name in ints else torch.float32)
        tensors[name] = torch.as_tensor(value, dtype=dtype).expand(rows).clone()
    return SampleParams(**tensors, **changes)


def lists(*rows, dtype=None):
    """Makes `Lists` of rows that are dicts or lists of ids."""
    ids = [token for row in rows for token in row]
    values = None
    if dtype is not None:
        values = torch.tensor([row[token] for row in rows for token in row], dtype=dtype)
    ends = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int32)
    return Lists(ends, torch.tensor(ids, dtype=torch.int32), values)


@pytest.fixture
def logits():
    return torch.randn(6, VOCAB) * 2


def test_numbers_reach_their_rows(logits):
    given = params(
        6,
        temperature=torch.tensor([0.0, 0.5, 1, 2, 1, 1]),
        top_k=torch.tensor([0, 7, 0, 5, 0, 1]),
        top_p=torch.tensor([1, 1, 0.5, 0.75, 1, 1]),
        min_p=torch.tensor([0, 0, 0, 0, 0.25, 0]),
        seed=torch.tensor([1, 2**63 - 1, -1, 4, 5, 6]),
        choice=torch.arange(6),
        position=torch.arange(100, 106),
    )
    drawn = sample(logits, given)
    for row in range(6):
        one = SamplingParams(
            temperature=float(given.temperature[row]),
            top_k=int(given.top_k[row]),
            top_p=float(given.top_p[row]),
            min_p=float(given.min_p[row]),
            seed=int(given.seed[row]) % 2**64,
            choice=row,
        )
        context = sampling.RowContext(params=one, position=100 + row)
        (want,) = sampling.sample(logits[row : row + 1], [context])
        assert drawn.token[row] == want.token
        assert drawn.logprob[row].item() == pytest.approx(want.logprob, abs=1e-6)
        assert drawn.processed_logprob[row].item() == pytest.approx(
            want.processed_logprob, abs=1e-6
        )
    assert [part.dtype for part in drawn] == [torch.int32, torch.float32, torch.float32]


def test_edits_change_which_token_is_largest():
    logits = torch.zeros(4, VOCAB)
    logits[:, 40] = 4
    logits[:, 41] = 3
    given = params(
        4,
        temperature=0.0,
        repetition_penalty=torch.tensor([2.0, 1, 1, 1]),
        frequency_penalty=torch.tensor([0, 0.75, 0, 0]),
        presence_penalty=torch.tensor([0, 0, 2.0, 0]),
        counts=lists({40: 0}, {40: 2, 41: 0}, {40: 1}, {40: 9}, dtype=torch.int32),
    )
    assert sample(logits, given).token.tolist() == [41, 41, 41, 40]
    biased = params(
        4, temperature=0.0, bias=lists({}, {5: 9.0}, {40: -2.0}, {3: 1.0}, dtype=torch.float32)
    )
    assert sample(logits, biased).token.tolist() == [40, 5, 41, 40]
    excluded = params(4, temperature=0.0, excluded=lists([40], [], [40, 41], [0]))
    assert sample(logits, excluded).token.tolist() == [41, 40, 0, 40]


def test_a_bit_of_the_mask_is_a_token():
    logits = torch.zeros(VOCAB, VOCAB)
    allowed = torch.zeros(VOCAB, VOCAB // 32, dtype=torch.int32)
    for token in range(VOCAB):
        allowed[token, token // 32] = (1 << token % 32) if token % 32 < 31 else -(2**31)
    drawn = sample(logits, params(VOCAB, allowed=allowed))
    assert drawn.token.tolist() == list(range(VOCAB))
    assert drawn.processed_logprob.abs().max() == 0
    torch.testing.assert_close(drawn.logprob, torch.full((VOCAB,), -math.log(VOCAB)))


def test_rows_that_cannot_be_drawn_have_no_token():
    logits = torch.zeros(4, VOCAB)
    logits[0, 3] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    allowed = torch.full((4, VOCAB // 32), -1, dtype=torch.int32)
    allowed[3] = 0
    drawn = sample(logits, params(4, allowed=allowed))
    assert drawn.token.tolist() == [-1] * 4
    assert drawn.logprob.isnan().all()
    assert drawn.processed_logprob.isnan().all()


def test_an_excluded_token_is_drawn_where_nothing_else_is_admitted():
    allowed = torch.zeros(1, VOCAB // 32, dtype=torch.int32)
    allowed[0, 1] = 1 << 6
    drawn = sample(torch.zeros(1, VOCAB), params(1, allowed=allowed, excluded=lists([38, 39])))
    assert drawn.token.tolist() == [38]


def test_zero_rows():
    drawn = sample(torch.zeros(0, VOCAB), params(0))
    assert [tuple(part.shape) for part in drawn] == [(0,)] * 3


def test_top_logprobs_rank_equal_values_by_id():
    logits = torch.tensor([[1.0, 3, 3, 0], [0, 0, 0, 0]])
    ids, logprobs = top_logprobs(logits, 3)
    assert ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    assert ids.dtype == torch.int32
    want = torch.log_softmax(logits, dim=1).gather(1, ids.long())
    torch.testing.assert_close(logprobs, want)
