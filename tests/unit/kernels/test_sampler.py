"""The state of one sequence: a look ahead over drafts equals having accepted them, and leaves no trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmesh.errors import FlashmeshError, InvalidRequest
from flashmesh.kernels.sampler import SequenceSampler
from flashmesh.types import GrammarKind, GrammarSpec, ModelInfo, SamplingParams

EOS = 1

INFO = ModelInfo(
    name="model",
    fingerprint=b"",
    layout_id=b"",
    numerics_id="",
    block_bytes=1,
    window=128,
    vocab_size=16,
    max_context_tokens=1 << 20,
    eos_token_id=EOS,
)

PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}

tokens = st.integers(2, 9)


class Climbing:
    """A grammar whose tokens must not fall; 9 breaks it."""

    def __init__(self, path=(), start_after=None):
        self.path = list(path)
        self.start_after = start_after

    @property
    def may_end(self):
        return self.start_after is None or self.start_after in self.path

    def accept(self, token):
        if token == 9:
            raise InvalidRequest("the grammar broke")
        admitted = not self.path or token >= self.path[-1]
        if admitted:
            self.path.append(token)
        return admitted

    def rollback(self, count):
        del self.path[len(self.path) - count :]

    def mask(self):
        return np.arange(16) >= (self.path[-1] if self.path else 0)

    def fork(self):
        return Climbing(self.path, self.start_after)


def described(context):
    """A context as plain values."""
    counts = context.counts
    return (
        context.position,
        counts and dict(zip(counts.ids.tolist(), counts.in_output.tolist(), strict=True)),
        None if context.allowed is None else context.allowed.tolist(),
        context.excluded,
        str(context.failure),
    )


def new_sampler(prompt, grammar=None, **params):
    return SequenceSampler(SamplingParams(**params), prompt, INFO, grammar=grammar)


@settings(deadline=None)
@given(
    prompt=st.lists(tokens, max_size=5),
    output=st.lists(tokens, max_size=5),
    drafts=st.lists(tokens, max_size=5),
    min_tokens=st.integers(0, 8),
)
def test_looking_ahead_over_drafts_equals_accepting_them(prompt, output, drafts, min_tokens):
    params = {**PENALTIES, "min_tokens": min_tokens, "stop_token_ids": (0,)}
    sampler = new_sampler(prompt, **params)
    sampler.accept(output)
    ahead = sampler.rows(sampler.position, drafts)
    assert len(ahead) == len(drafts) + 1
    for count, context in enumerate(ahead):
        other = new_sampler(prompt, **params)
        other.accept([*output, *drafts[:count]])
        (expected,) = other.rows(other.position)
        assert described(context) == described(expected)
    (again,) = sampler.rows(sampler.position)
    assert described(again) == described(ahead[0])


@given(output=st.lists(st.integers(2, 8), max_size=4), drafts=st.lists(tokens, max_size=5))
def test_a_look_ahead_ends_where_the_grammar_does(output, drafts):
    grammar = Climbing()
    sampler = new_sampler([5], grammar)
    sampler.accept(sorted(output))
    path = list(grammar.path)
    ahead = sampler.rows(sampler.position, drafts)
    assert grammar.path == path
    for count, context in enumerate(ahead):
        if count and drafts[count - 1] == 9:
            assert str(context.failure) == "the grammar broke"
            assert count == len(ahead) - 1
            continue
        assert context.failure is None
        lowest = ([0, *path, *drafts[:count]])[-1]
        assert context.allowed.tolist() == [token >= lowest for token in range(16)]
    if len(ahead) <= len(drafts) and ahead[-1].failure is None:
        assert not ahead[-1].allowed[drafts[len(ahead) - 1]]


def test_counts_are_of_the_output_and_repetition_also_sees_the_prompt():
    sampler = new_sampler([3, 3, 7], **PENALTIES)
    sampler.accept([7, 5, 7])
    first, second = sampler.rows(6, [3])
    assert described(first)[1] == {3: 0, 5: 1, 7: 2}
    assert described(second)[1] == {3: 1, 5: 1, 7: 2}
    frequency = new_sampler([3, 3, 7], frequency_penalty=1.0)
    frequency.accept([5])
    assert described(frequency.rows(4)[0])[1] == {5: 1}
    assert new_sampler([3]).rows(1)[0].counts is None


def test_ends_are_excluded_until_the_minimum_length():
    sampler = new_sampler([4], min_tokens=2, stop_token_ids=(9, 8))
    sampler.accept([5])
    first, second, third = sampler.rows(2, [6, 7])
    assert first.excluded == (EOS, 8, 9)
    assert second.excluded == third.excluded == ()
    unending = new_sampler([4], min_tokens=2, stop_token_ids=(9,), ignore_eos=True)
    assert unending.rows(1)[0].excluded == (9,)


def test_no_row_follows_a_draft_that_ends_the_output():
    sampler = new_sampler([4], stop_token_ids=(9,))
    assert len(sampler.rows(1, [5, 9, 5])) == 2
    assert len(sampler.rows(1, [EOS, 5])) == 1
    assert len(new_sampler([4], ignore_eos=True).rows(1, [EOS, 5])) == 3


def test_the_end_waits_until_the_grammar_governs():
    sampler = new_sampler([4], Climbing(start_after=6))
    before, after = sampler.rows(1, [6])
    assert before.excluded == (EOS,)
    assert after.excluded == ()


def test_forced_tokens_rebuild_the_state_of_a_sequence_that_died():
    first = new_sampler([3, 4], Climbing(), min_tokens=3, **PENALTIES)
    for token in (2, 5, 5):
        first.accept([token])
    second = new_sampler([3, 4], Climbing(), min_tokens=3, **PENALTIES)
    second.accept([2, 5, 5])
    assert (
        (second.position, second.num_generated) == (first.position, first.num_generated) == (5, 3)
    )
    assert described(second.rows(5)[0]) == described(first.rows(5)[0])


def test_a_fork_goes_its_own_way():
    sampler = new_sampler([3], Climbing(), **PENALTIES)
    sampler.accept([4])
    twin = sampler.fork(SamplingParams(choice=1, **PENALTIES))
    twin.accept([7])
    assert twin.params.choice == 1
    assert described(twin.rows(3)[0])[1] == {3: 0, 4: 1, 7: 1}
    assert described(sampler.rows(2)[0])[:2] == (2, {3: 0, 4: 1})
    assert sampler.rows(2)[0].allowed[4]
    assert not twin.rows(3)[0].allowed[4]


def test_tokens_that_the_grammar_refuses_are_not_this_requests():
    sampler = new_sampler([3], Climbing())
    with pytest.raises(InvalidRequest, match="token 2 at position 2"):
        sampler.accept([5, 2])


def test_rows_of_another_position_are_refused():
    with pytest.raises(FlashmeshError, match="position 4 meet a sampler at position 2"):
        new_sampler([3, 3]).rows(4)


def test_tokens_outside_the_vocabulary_are_all_named():
    params = SamplingParams(
        stop_token_ids=(16, 3),
        logit_bias=((17, 1.0),),
        grammar=GrammarSpec(kind=GrammarKind.JSON_OBJECT, start_after=18),
    )
    with pytest.raises(InvalidRequest, match="stop token id 16.*logit_bias.*17.*start_after 18"):
        SequenceSampler(params, [3], INFO)
