"""What a client remembers of the index: bounded in number, time and trust."""

from __future__ import annotations

import pytest

from flashmesh.recent_blocks import BELIEVED_S, RecentBlocks
from flashmesh.runs import RUN_BLOCKS

HASHES = [number.to_bytes(16) for number in range(3 * RUN_BLOCKS)]
OWNERS = ["one", "two", "one"]


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_leading_blocks_are_counted_up_to_the_first_unknown_one(clock):
    recent = RecentBlocks(clock)
    recent.confirm(HASHES[:100], OWNERS)
    assert recent.count(HASHES, OWNERS) == 100
    recent.forget(HASHES[70:71])
    assert recent.count(HASHES, OWNERS) == 70
    assert recent.count([], OWNERS) == 0


def test_a_run_that_moved_or_whose_node_restarted_is_unknown(clock):
    recent = RecentBlocks(clock)
    recent.confirm(HASHES, OWNERS)
    assert recent.count(HASHES, ["one", "three", "one"]) == RUN_BLOCKS
    assert recent.count(HASHES, ["new", "two", "one"]) == 0


def test_nothing_is_believed_for_long(clock):
    recent = RecentBlocks(clock)
    recent.confirm(HASHES[:2], OWNERS)
    clock.now_s += BELIEVED_S / 2
    recent.confirm(HASHES[:1], OWNERS)
    clock.now_s += BELIEVED_S / 2
    assert recent.count(HASHES, OWNERS) == 1
    clock.now_s += BELIEVED_S / 2
    assert recent.count(HASHES, OWNERS) == 0


def test_the_block_confirmed_longest_ago_is_forgotten_first(clock):
    recent = RecentBlocks(clock, max_blocks=4)
    recent.confirm(HASHES[:4], OWNERS)
    recent.confirm(HASHES[:2], OWNERS)
    recent.confirm([b"another of one run"], OWNERS)
    assert recent.count(HASHES, OWNERS) == 2
    assert recent.count(HASHES[3:], OWNERS) == 1
