"""Where a node keeps its blocks: ranges are taken and given back, and never overlap."""

import contextlib
import gc
import itertools
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmesh.services.kvstore import arena as arena_module
from flashmesh.services.kvstore.arena import Arena, FreeRanges, open_arena

CAPACITY_BYTES = 1 << 20
SIZE = 1000


@pytest.fixture
def arena(monkeypatch):
    monkeypatch.setattr(arena_module, "SLACK_BYTES", 0)
    return Arena(CAPACITY_BYTES)


def open_files():
    """Inodes of all files that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
    return found


@given(st.lists(st.one_of(st.integers(1, 40), st.just("free")), max_size=80), st.randoms())
def test_ranges_never_overlap_and_what_was_given_back_can_be_taken_whole(steps, draw):
    free, taken = FreeRanges(10, 210), {}
    for step in steps:
        if step == "free" and taken:
            begin = draw.choice(sorted(taken))
            free.give(begin, taken.pop(begin))
        elif step != "free" and (begin := free.take(step)) is not None:
            taken[begin] = step
            ends = sorted((begin, begin + size) for begin, size in taken.items())
            assert ends[0][0] >= 10
            assert ends[-1][1] <= 210
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    for begin, size in taken.items():
        free.give(begin, size)
    assert free.take(200) == 10


def test_a_full_list_of_ranges_says_no():
    free = FreeRanges(0, 100)
    assert [free.take(40), free.take(40), free.take(40), free.take(20)] == [0, 40, None, 80]


def test_a_copy_is_equal_read_only_and_independent(arena):
    source = bytearray(os.urandom(SIZE))
    kept = arena.keep(memoryview(source))
    assert bytes(kept) == source
    assert kept.readonly
    source[0] ^= 1
    assert bytes(kept) != source


def test_only_what_it_keeps_has_an_offset(arena):
    kept = arena.keep(bytes(SIZE))
    assert arena.offset(kept) is not None
    assert arena.offset(kept[:]) is None
    assert arena.offset(bytes(SIZE)) is None


def test_a_range_is_free_when_its_buffer_is_gone(arena):
    first, second = arena.keep(bytes(SIZE)), arena.keep(bytes(SIZE))
    place = arena.offset(first)
    assert arena.offset(second) != place
    del first
    third = arena.keep(bytes(SIZE))
    assert arena.offset(third) == place


def test_a_buffer_may_die_on_another_thread(arena):
    held = [arena.keep(bytes(SIZE))]
    place = arena.offset(held[0])
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert arena.offset(again := arena.keep(bytes(SIZE))) == place
    assert len(again) == SIZE


def test_where_nothing_is_free_a_block_is_kept_in_private_memory(arena):
    large = arena.keep(bytes(CAPACITY_BYTES - SIZE))
    kept = arena.keep(b"x" * 2 * SIZE)
    assert kept == b"x" * 2 * SIZE
    assert arena.offset(kept) is None
    del large
    assert arena.offset(arena.keep(bytes(SIZE))) is not None


def test_an_arena_that_is_dropped_closes_its_file():
    arena = Arena(CAPACITY_BYTES)
    file = os.fstat(arena.offer.fd).st_ino
    assert file in open_files()
    del arena
    gc.collect()
    assert file not in open_files()


@pytest.mark.parametrize("error", [OSError("no such seal"), AttributeError("memfd_create")])
def test_a_system_without_sealed_memory_files_has_no_arena(monkeypatch, error):
    def refuse(name, flags):
        raise error

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert open_arena(CAPACITY_BYTES) is None
