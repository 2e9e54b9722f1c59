"""Dataclasses to protobuf and back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmesh.errors import InvalidRequest
from flashmesh.types import FinishReason, GrammarKind, GrammarSpec, SamplingParams
from flashmesh.v1 import types_pb2
from flashmesh.wire import (
    finish_from_proto,
    finish_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)

kinds = st.sampled_from([kind for kind in GrammarKind if kind is not GrammarKind.JSON_OBJECT])
start_after = st.none() | st.integers(0, 2**32 - 1)
grammars = st.builds(
    GrammarSpec, kind=kinds, text=st.text(min_size=1), start_after=start_after
) | st.builds(GrammarSpec, kind=st.just(GrammarKind.JSON_OBJECT), start_after=start_after)

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(8, 2**31 - 1),
    min_tokens=st.integers(0, 8),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100), max_size=3).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    num_choices=st.integers(1, 128),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    top_logprobs=st.none() | st.integers(0, 20),
)
# One or the other: a grammar's end is the end token.
params = params.flatmap(
    lambda value: (
        st.builds(replace, st.just(value), ignore_eos=st.booleans())
        | st.builds(replace, st.just(value), grammar=grammars)
    )
)


@given(params)
def test_sampling_parameters_survive_the_wire_bit_for_bit(value):
    data = sampling_to_proto(value).SerializeToString()
    assert sampling_from_proto(types_pb2.SamplingParams.FromString(data)) == value


def test_absent_fields_take_their_defaults():
    assert sampling_from_proto(types_pb2.SamplingParams()) == SamplingParams()


def test_every_problem_of_a_request_is_reported_at_once():
    with pytest.raises(InvalidRequest, match="max_tokens.*temperature.*top_p"):
        sampling_from_proto(types_pb2.SamplingParams(max_tokens=-5, temperature=-1, top_p=2))


def test_every_problem_of_the_newer_parameters_is_named_too():
    message = types_pb2.SamplingParams(
        max_tokens=4,
        min_tokens=5,
        presence_penalty=2.1,
        frequency_penalty=-3,
        repetition_penalty=0,
        logit_bias={7: 101.0},
        num_choices=129,
        top_logprobs=21,
        ignore_eos=True,
        grammar=types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_JSON_OBJECT),
    )
    names = (
        "min_tokens presence_penalty frequency_penalty repetition_penalty logit_bias num_choices"
    )
    with pytest.raises(InvalidRequest, match=".*".join(names.split()) + ".*top_log.*ignore_eos"):
        sampling_from_proto(message)


def test_counts_that_the_wire_has_no_room_for_are_refused():
    with pytest.raises(InvalidRequest, match="max_tokens must be at most.*top_k.*choice"):
        SamplingParams(max_tokens=2**31, top_k=2**31, choice=2**31)


def test_a_biased_token_may_be_named_once():
    with pytest.raises(InvalidRequest, match="distinct tokens by ascending id"):
        SamplingParams(logit_bias=((3, 1.0), (3, 2.0)))


def test_an_unknown_kind_of_grammar_is_refused():
    message = types_pb2.SamplingParams(grammar=types_pb2.Grammar(text="a"))
    with pytest.raises(InvalidRequest, match="grammar kind 0 is not known"):
        sampling_from_proto(message)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_survive_the_wire(reason):
    assert finish_from_proto(finish_to_proto(reason)) is reason
