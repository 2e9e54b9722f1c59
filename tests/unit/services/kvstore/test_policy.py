"""The eviction policy: a block earns its horizon by being used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kv import Chain

from flashmesh.services.kvstore.blocks import BlockTable
from flashmesh.services.kvstore.policy import Usage, priority

clocks = st.integers(1, 10**9)


def usage(num_uses, last_use):
    return Usage(num_uses=num_uses, last_use=last_use, previous_use=0, position=0)


@pytest.mark.parametrize(
    ("num_uses", "expected"), [(1, 940.0), (2, 980.0), (3, 1000.0), (50, 1000.0)]
)
def test_each_use_is_worth_two_fifths_of_the_horizon(num_uses, expected):
    assert priority(usage(num_uses, last_use=1000), floor=900.0) == pytest.approx(expected)


@given(num_uses=st.integers(1, 100), last_use=clocks, share=st.floats(0, 1))
def test_a_used_block_stands_between_the_floor_and_now_and_a_use_more_never_lowers_it(
    num_uses, last_use, share
):
    floor = share * last_use
    value = priority(usage(num_uses, last_use), floor)
    assert floor <= value <= last_use * (1 + 1e-12)
    assert value <= priority(usage(num_uses + 1, last_use), floor)


@given(num_uses=st.integers(1, 100), last_use=clocks, share=st.floats(0, 1), scale=clocks)
def test_only_the_ratio_of_times_matters(num_uses, last_use, share, scale):
    """So one constant serves every load and capacity."""
    value = priority(usage(num_uses, last_use), share * last_use)
    scaled = priority(usage(num_uses, last_use * scale), share * last_use * scale)
    assert scaled == pytest.approx(value * scale)


def test_what_is_asked_for_again_outlives_a_stream_of_what_is_not():
    """Least recently used would have kept the ten latest, and lost the prompt used three times."""
    asked, *stream = (Chain(1, seed=seed).objects[0] for seed in range(40))
    num_bytes = len(asked.data)
    table = BlockTable(memory_bytes=10 * num_bytes, max_leased_share=0.5, clock=lambda: 0.0)
    for item in stream[:15]:
        table.put(item)
    for _ in range(3):
        table.put(asked)
    for item in stream[15:27]:
        table.put(item)
    assert asked.hash in table
    for item in stream[27:]:
        table.put(item)
    assert asked.hash not in table, "but it does not stay for ever"


def test_a_block_that_comes_back_soon_after_it_went_keeps_its_count():
    again, *stream = (Chain(1, seed=seed).objects[0] for seed in range(30))
    table = BlockTable(memory_bytes=5 * len(again.data), max_leased_share=0.5, clock=lambda: 0.0)
    for _ in range(2):
        table.put(again)
    for item in stream:
        table.put(item)
    assert again.hash not in table
    table.put(again)
    assert table.find(again.hash).usage.num_uses == 3
