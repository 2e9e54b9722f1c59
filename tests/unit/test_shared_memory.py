"""Frames about a node's memory, and what is not taken for one."""

import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kv import Chain

from flashmesh.errors import CorruptBlock
from flashmesh.services.kvstore.arena import Arena
from flashmesh.shared_memory import (
    FILE_NAME,
    OFFER_MAGIC,
    REFERENCES_MAGIC,
    Offer,
    SharedMemory,
    pack_references,
    parse_references,
)

CAPACITY_BYTES = 100_000


@pytest.fixture
def arena():
    return Arena(CAPACITY_BYTES)


def test_an_offer_comes_through():
    offer = Offer(pid=12, fd=7, num_bytes=1 << 40, token=bytes(range(16)))
    assert offer.pack().startswith(OFFER_MAGIC)
    assert Offer.parse(offer.pack()) == offer


@given(
    st.lists(
        st.tuples(
            st.binary(min_size=16, max_size=16),
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**32 - 1),
        )
    )
)
def test_references_come_through(references):
    frame = pack_references(references)
    assert frame.startswith(REFERENCES_MAGIC)
    assert list(parse_references(frame)) == references


def test_frames_that_were_cut_off_are_refused():
    with pytest.raises(CorruptBlock):
        Offer.parse(Offer(1, 2, 3, bytes(16)).pack()[:-1])
    with pytest.raises(CorruptBlock):
        list(parse_references(pack_references([(bytes(16), 0, 0)])[:-1]))


def test_a_block_is_copied_and_verified(arena):
    (item,) = Chain(1).objects
    kept = arena.keep(item.data)
    memory = SharedMemory(arena.offer)
    copy = memory.copy(item.hash, arena.offset(kept), len(kept))
    assert copy == dataclasses.replace(item, data=copy.data)
    assert bytes(copy.data) == item.data
    del kept
    other = Chain(1, seed=1).objects[0]
    arena.keep(other.data)  # takes the place of the first
    assert bytes(copy.data) == item.data, "a copy does not change with the node's memory"


@pytest.mark.parametrize(("move", "shrink"), [(1, 0), (0, 1), (0, -1), (1 << 40, 0)], ids=str)
def test_a_range_that_does_not_hold_the_block_gives_nothing(arena, move, shrink):
    chain = Chain(2)
    kept = [arena.keep(item.data) for item in chain.objects]
    memory = SharedMemory(arena.offer)
    begin, size = arena.offset(kept[0]), len(kept[0])
    assert memory.copy(chain.hashes[0], begin, size) is not None
    assert memory.copy(chain.hashes[0], begin + move, size - shrink) is None
    assert memory.copy(chain.hashes[0], arena.offset(kept[1]), size) is None


def test_a_range_of_two_blocks_or_none_gives_nothing(arena):
    first, second = Chain(2, payload_bytes=64 * 3 - 120).objects
    kept = arena.keep(first.data + second.data)
    memory = SharedMemory(arena.offer)
    assert memory.copy(first.hash, arena.offset(kept), len(kept)) is None
    assert memory.copy(first.hash, arena.offset(kept), 0) is None


@pytest.mark.parametrize(
    "change",
    [{"token": bytes(16)}, {"num_bytes": 4096}, {"pid": 2**22 + 1}, {"fd": 1 << 20}],
    ids=lambda change: next(iter(change)),
)
def test_what_was_not_offered_is_not_opened(arena, change):
    SharedMemory(arena.offer)
    with pytest.raises(OSError, match=r"/proc/"):
        SharedMemory(dataclasses.replace(arena.offer, **change))


def test_another_kind_of_file_is_not_even_opened():
    """Opening the reading end of a pipe would block."""
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(FileNotFoundError, match="not a node's memory"):
            SharedMemory(Offer(os.getpid(), read_end, 0, bytes(16)))
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_reader_cannot_write(arena):
    path = f"/proc/self/fd/{arena.offer.fd}"
    assert FILE_NAME in os.readlink(path)
    fd = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        for size in (0, arena.offer.num_bytes + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)
