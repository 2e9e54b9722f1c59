"""Sampling: total orders, supports, distribution, and noise that nothing but its key moves."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmesh.errors import FlashmeshError
from flashmesh.kernels.sampling import (
    RowContext,
    TokenCounts,
    gumbel,
    philox,
    process,
    propose,
    sample,
    support,
)
from flashmesh.types import SamplingParams

REAL_VOCAB = 129_280


def draw(row, position=0, counts=None, allowed=None, excluded=(), **params):
    """Draws from one row of numbers."""
    context = RowContext(
        params=SamplingParams(**params),
        position=position,
        counts=counts,
        allowed=allowed,
        excluded=excluded,
    )
    return sample(torch.as_tensor(row, dtype=torch.float32).unsqueeze(0), [context])[0]


def one(row, position=0, **params):
    return draw(row, position, **params).token


def kept(row, **params):
    ids, _ = support(np.asarray(row, dtype=np.float32), SamplingParams(temperature=1, **params))
    return ids.tolist()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_published_known_answers(counter, key, expected):
    words = np.array([[int(word, 16)] for word in counter.split()], dtype=np.uint64)
    low, high = (int(word, 16) for word in key.split())
    got = philox(words, (low, high))[:, 0]
    assert [f"{word:08x}" for word in got.tolist()] == expected.split()


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked():
    everything = gumbel(7, 0, 5, np.arange(1000))
    some = np.array([0, 1, 6, 7, 500, 998])
    assert np.array_equal(gumbel(7, 0, 5, some), everything[some])


def test_noise_depends_on_seed_choice_and_position():
    ids = np.arange(64)
    base = gumbel(1, 2, 3, ids)
    for other in (gumbel(2, 2, 3, ids), gumbel(1, 3, 3, ids), gumbel(1, 2, 4, ids)):
        assert not (other == base).any()
    assert not (gumbel(1 + (1 << 32), 2, 3, ids) == base).any()  # the high word counts too
    assert np.array_equal(gumbel(1, 2, 3, ids), base)


def test_noise_is_gumbel_distributed():
    values = gumbel(3, 0, 0, np.arange(REAL_VOCAB))
    # Standard errors of mean and variance at this count are 0.0036 and 0.012.
    assert abs(values.mean() - np.euler_gamma) < 0.015
    assert abs(values.var() - math.pi**2 / 6) < 0.05


def test_temperature_zero_takes_the_argmax_and_the_lowest_index_among_equals():
    row = torch.zeros(REAL_VOCAB)
    row[[70_000, 70_001, 129_279]] = 2.0
    assert one(row) == 70_000


def test_minus_zero_equals_plus_zero():
    assert one([-1.0, -0.0, 0.0]) == 1
    assert one([-1.0, 0.0, -0.0]) == 1
    assert kept([-1.0, -0.0, 0.0], top_k=1) == [1]
    assert kept([-1.0, -0.0, 0.0], top_p=0.1) == [1]


def test_top_k_takes_the_lowest_indices_among_forced_ties():
    row = np.zeros(REAL_VOCAB, dtype=np.float32)
    row[100_000:] = 1.0
    assert kept(row, top_k=5) == list(range(100_000, 100_005))
    row[50] = 2.0
    assert kept(row, top_k=3) == [50, 100_000, 100_001]


def test_top_p_takes_the_lowest_indices_among_forced_ties():
    row = np.full(REAL_VOCAB, -np.inf, dtype=np.float32)
    row[1000:1010] = 0.5
    assert kept(row, top_p=0.25) == [1000, 1001, 1002]


def test_top_p_keeps_the_token_that_reaches_the_mass():
    row = np.log([0.5, 0.25, 0.125, 0.125])
    assert kept(row, top_p=0.4) == [0]
    assert kept(row, top_p=0.7) == [0, 1]
    assert kept(row, top_p=0.76) == [0, 1, 2]
    assert kept(row, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_counts_mass_after_top_k_has_renormalised():
    row = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(row, top_p=0.55) == [0, 1]
    assert kept(row, top_k=2, top_p=0.55) == [0]  # 0.4 of 0.7 reaches it


def test_min_p_is_a_share_of_the_likeliest():
    row = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(row, min_p=0.45) == [0, 1, 2]
    assert kept(row, min_p=1.0) == [0]


@settings(deadline=None, max_examples=150)
@given(
    row=st.lists(st.sampled_from([-np.inf, -2.0, -0.5, -0.0, 0.0, 0.25, 3.0]), min_size=1),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.6, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_the_support_is_that_of_a_plain_reading_of_the_rules(row, top_k, top_p, min_p, temperature):
    if max(row) == -np.inf:
        row = [*row, 0.0]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, _ = support(np.asarray(row, dtype=np.float32), params)
    assert ids.tolist() == plain_support(row, params)


def plain_support(row, params):
    order = sorted((v for v in range(len(row)) if row[v] > -np.inf), key=lambda v: (-row[v], v))
    order = order[: params.top_k or None]
    weights = [math.exp((row[v] - max(row)) / params.temperature) for v in order]
    count, mass = 0, 0.0
    while count < len(order) and (params.top_p == 1 or mass < params.top_p - 1e-12):
        mass += weights[count] / sum(weights)
        count += 1
    return sorted(
        v for v, w in zip(order[:count], weights, strict=False) if w / weights[0] >= params.min_p
    )


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 5),
    position=st.integers(0, 2**20),
    num_rows=st.integers(1, 9),
)
def test_a_row_gives_the_same_token_and_logprob_whatever_shares_the_call(
    seed, choice, position, num_rows
):
    rows = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(seed % 997))
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=seed, choice=choice)
    contexts = [RowContext(params=params, position=position + i) for i in range(num_rows)]
    together = sample(rows, contexts)
    for index in range(num_rows):
        assert sample(rows[index : index + 1], contexts[index : index + 1]) == [together[index]]


def test_rows_of_the_real_vocabulary_do_not_depend_on_their_number():
    rows = torch.randn(8, REAL_VOCAB, generator=torch.Generator().manual_seed(0))
    rows[:, ::2] = 0.0  # ties
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=1.0, top_k=50, seed=4, top_logprobs=20),
        SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, seed=5),
    ] * 2
    contexts = [RowContext(params=params, position=i) for i, params in enumerate(kinds)]
    together = sample(rows, contexts)
    alone = [sample(rows[i : i + 1], contexts[i : i + 1])[0] for i in range(8)]
    assert together == alone


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax(temperature):
    logits = np.array([1.2, 0.3, -0.4, 0.9, -1.5, 0.0])
    draws = 2000
    params = SamplingParams(temperature=temperature, seed=11)
    rows = torch.tensor(logits, dtype=torch.float32).expand(draws, -1)
    drawn = sample(rows, [RowContext(params=params, position=i) for i in range(draws)])
    tokens = [item.token for item in drawn]
    weights = np.exp(logits / temperature)
    expected = draws * weights / weights.sum()
    statistic = ((np.bincount(tokens, minlength=6) - expected) ** 2 / expected).sum()
    assert statistic < 20.5  # chi-square, 5 degrees of freedom: p = 0.001


def test_equal_seeds_draw_equal_tokens_and_other_choices_draw_others():
    row = torch.zeros(REAL_VOCAB)
    first = one(row, 9, temperature=1.0, seed=5)
    assert one(row, 9, temperature=1.0, seed=5) == first
    others = {
        one(row, 9, temperature=1.0, seed=5, choice=1),
        one(row, 9, temperature=1.0, seed=6),
        one(row, 10, temperature=1.0, seed=5),
    }
    assert first not in others
    assert len(others) == 3


def test_the_logprob_is_that_of_the_raw_distribution():
    row = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    drawn = draw(row, temperature=0.3, top_k=4, seed=2)
    assert drawn.logprob == pytest.approx(
        row.double().log_softmax(0)[drawn.token].item(), abs=1e-12
    )


def test_an_excluded_token_is_never_drawn():
    row = torch.full((64,), -math.inf)
    row[[3, 40]] = 0.0
    drawn = {one(row, p, temperature=5.0) for p in range(40)}
    assert drawn == {3, 40}


def test_extreme_temperatures_still_draw():
    row = torch.tensor([0.0, 1.0, 0.5])
    assert one(row, temperature=1e-300) == 1
    assert {one(row, p, temperature=1e300) for p in range(40)} == {0, 1, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_of_no_numbers_fails_alone(bad):
    contexts = [RowContext(params=SamplingParams(), position=p) for p in (7, 8, 9)]
    first, second, third = sample(torch.tensor([[0.0, 1.0], [bad, 0.0], [3.0, 0.0]]), contexts)
    assert (first.token, third.token) == (1, 0)
    assert isinstance(second, FlashmeshError)
    assert "position 8" in str(second)


def test_a_row_that_admits_no_token_fails():
    assert isinstance(draw([-math.inf, -math.inf]), FlashmeshError)
    nothing = np.zeros(2, dtype=bool)
    assert "no token is allowed" in str(draw([1.0, 2.0], allowed=nothing))


def test_the_minimum_length_yields_where_only_the_end_is_left():
    only_end = np.array([False, True, False])
    assert draw([3.0, 1.0, 2.0], allowed=only_end, excluded=(1,)).token == 1
    assert draw([3.0, 1.0, 2.0], allowed=~only_end, excluded=(0,)).token == 2


def test_a_failure_known_before_stands_for_the_row():
    failure = FlashmeshError("the grammar broke")
    context = RowContext(params=SamplingParams(), position=1, failure=failure)
    assert sample(torch.tensor([[1.0, 2.0]]), [context]) == [failure]
    assert propose(torch.tensor([[1.0, 2.0]]), [context]) == [0]


def test_penalties_follow_their_formulas():
    counts = TokenCounts(np.array([0, 1, 2]), np.array([0, 1, 3], dtype=np.int32))
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    row = np.array([3.0, -1.0, 4.0, 5.0], dtype=np.float32)
    context = RowContext(params=params, position=0, counts=counts)
    assert process(row, context).tolist() == [1.5, -2.75, 0.75, 5.0]
    assert row.tolist() == [3.0, -1.0, 4.0, 5.0]


def test_bias_moves_a_logit_and_raw_figures_do_not_move():
    biased = draw([1.0, 0.0], logit_bias=((1, 100.0),), top_logprobs=2)
    assert biased.token == 1
    assert biased.logprob == pytest.approx(-1 - math.log(1 + math.exp(-1)))
    assert biased.top_ids == [0, 1]


def test_the_likeliest_tokens_are_reported_with_ties_by_index():
    row = np.zeros(REAL_VOCAB)
    row[[9, 100_000, 5]] = [1.0, 3.0, 1.0]
    drawn = draw(row, top_logprobs=4)
    assert drawn.top_ids == [100_000, 5, 9, 0]
    assert drawn.top_logprobs[0] == drawn.logprob
    assert drawn.top_logprobs[1] == drawn.top_logprobs[0] - 2


def test_no_rows_give_an_empty_list():
    assert sample(torch.empty(0, 16), []) == []
