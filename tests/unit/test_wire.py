"""Dataclasses to protobuf and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmesh.errors import InvalidRequest
from flashmesh.types import FinishReason, SamplingParams
from flashmesh.v1 import types_pb2
from flashmesh.wire import (
    finish_from_proto,
    finish_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 100),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
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


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_survive_the_wire(reason):
    assert finish_from_proto(finish_to_proto(reason)) is reason
