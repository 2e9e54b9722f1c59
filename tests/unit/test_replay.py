"""The replay rule, with the design's own numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmesh.errors import InvalidRequest
from flashmesh.replay import plan_replay
from flashmesh.types import BLOCK_TOKENS


@pytest.mark.parametrize(
    ("length", "start", "replay_start", "encoder_only", "all_layers"),
    [
        (1, 0, 0, 0, 1),
        (127, 0, 0, 0, 127),
        (128, 0, 0, 0, 128),
        (129, 0, 0, 0, 129),
        (269, 128, 0, 128, 141),
        (395, 128, 0, 128, 267),
        (396, 256, 128, 128, 140),
        (400, 256, 128, 128, 144),
        (1000, 768, 640, 128, 232),
    ],
)
def test_the_plan_follows_from_the_length_alone(
    length, start, replay_start, encoder_only, all_layers
):
    plan = plan_replay(length, window=128, replay_tokens=140)
    assert (plan.start, plan.replay_start) == (start, replay_start)
    assert plan.start - plan.replay_start == encoder_only
    assert length - plan.start == all_layers


def test_a_prompt_below_396_tokens_takes_nothing_from_the_store():
    assert plan_replay(395, window=128, replay_tokens=140).num_stored_blocks == 0
    assert plan_replay(395, window=128, replay_tokens=140).global_start == 0
    assert plan_replay(396, window=128, replay_tokens=140).num_stored_blocks == 2


@given(length=st.integers(1, 10_000), window=st.integers(1, 300), replay=st.integers(1, 500))
def test_plans_are_well_formed(length, window, replay):
    plan = plan_replay(length, window=window, replay_tokens=replay)
    assert 0 <= plan.replay_start <= plan.start < length
    assert plan.start % BLOCK_TOKENS == 0
    assert plan.start == 0 or length - plan.start >= replay
    assert plan.start - plan.replay_start <= window
    assert plan.num_stored_blocks * BLOCK_TOKENS == plan.global_start


@pytest.mark.parametrize(("length", "replay"), [(0, 140), (-1, 140), (5, 0)])
def test_senseless_numbers_are_refused(length, replay):
    with pytest.raises(InvalidRequest):
        plan_replay(length, window=128, replay_tokens=replay)
