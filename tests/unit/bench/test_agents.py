"""Why prompt tokens of an agent session do not come from the store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmesh.bench.agents import losses
from flashmesh.replay import plan_replay


@pytest.mark.parametrize(
    ("length", "known", "cached", "expected"),
    [
        # A long tool result: the last block of what is known is not full.
        (2000, 1300, 1280, {"new": 700, "grain": 20, "replay": 0, "lag": 0}),
        # A short one: the rule runs 140 rows at least again, from a block's start at 1280.
        (1450, 1440, 1280, {"new": 10, "grain": 32, "replay": 128, "lag": 0}),
        # Two blocks of the answer are not there yet.
        (2000, 1300, 1024, {"new": 700, "grain": 20, "replay": 0, "lag": 256}),
        # So short that decode computes everything.
        (390, 390, 0, {"new": 0, "grain": 6, "replay": 384, "lag": 0}),
    ],
)
def test_losses_have_reasons(length, known, cached, expected):
    assert losses(length, known, cached) == expected


@given(length=st.integers(1, 5000), data=st.data())
def test_losses_and_hits_are_the_whole_prompt(length, data):
    known = data.draw(st.integers(0, length))
    most = plan_replay(length, window=128, replay_tokens=140).num_stored_blocks
    cached = 128 * data.draw(st.integers(0, min(most, known // 128)))
    found = losses(length, known, cached)
    assert sum(found.values()) == length - cached
    assert min(found.values()) >= 0
