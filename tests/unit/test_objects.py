"""The stored object: its bytes, and what is refused."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kv import LAYOUT, Chain

from flashmesh.errors import CorruptBlock
from flashmesh.objects import (
    HEADER_BYTES,
    KIND_MISSING,
    check_is,
    pack_block,
    pack_missing,
    parse_objects,
    verify,
)

CHAIN = Chain(3, payload_bytes=40)

# docs/kvstore.md shows the same bytes with their meaning.
GOLDEN = (
    "464d4b56" "0100" "0100"
    "000102030405060708090a0b0c0d0e0f"
    "d19c887fa72403ad77f82d30318062df"
    "fe4f280a84242dbab78323f24bd0a9bc"
    "fe4f280a84242dbab78323f24bd0a9bc"
    "8000000000000000"
    "2b8692c857f877daffcc06091c9f273d"
    "0800000000000000"
    "d3a2e0b67ead7d0d043d3bfed7a345a9"
    "7061796c6f616421"
)  # fmt: skip


def wanted(index):
    return {
        "hash": CHAIN.hashes[index],
        "layout_id": LAYOUT,
        "index": index,
        "tokens": CHAIN.tokens[index * 128 : (index + 1) * 128],
    }


def test_the_bytes_of_an_object_have_not_changed():
    first = bytes.fromhex("fe4f280a84242dbab78323f24bd0a9bc")
    item = pack_block(
        layout_id=bytes(range(16)),
        hash=bytes.fromhex("d19c887fa72403ad77f82d30318062df"),
        parent=first,
        run=first,
        index=1,
        tokens=range(128, 256),
        payload=b"payload!",
    )
    assert item.data.hex() == GOLDEN
    assert len(item.data) == HEADER_BYTES + 8


def test_a_frame_gives_back_the_objects_that_went_in():
    frame = b"".join(item.data for item in CHAIN.objects)
    items = list(parse_objects(frame))
    assert [bytes(item.data) for item in items] == [item.data for item in CHAIN.objects]
    for index, item in enumerate(items):
        verify(item)
        check_is(item, **wanted(index))
        assert item.run == CHAIN.hashes[0]
        assert dataclasses.replace(item, data=b"") == dataclasses.replace(
            CHAIN.objects[index], data=b""
        )


def test_a_missing_block_is_an_object_without_payload():
    (item,) = parse_objects(pack_missing(CHAIN.hashes[1]))
    verify(item)
    assert (item.kind, item.hash, len(item.payload)) == (KIND_MISSING, CHAIN.hashes[1], 0)


@given(bit=st.integers(0, 8 * len(CHAIN.objects[0].data) - 1))
def test_any_flipped_bit_is_noticed(bit):
    data = bytearray(CHAIN.objects[0].data)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptBlock):
        for item in parse_objects(bytes(data)):
            verify(item)


@given(cut=st.integers(1, len(CHAIN.objects[0].data) - 1))
def test_a_frame_that_was_cut_off_is_refused(cut):
    with pytest.raises(CorruptBlock):
        list(parse_objects(CHAIN.objects[0].data[:cut]))


@given(junk=st.binary(min_size=1, max_size=300))
def test_junk_is_refused_and_nothing_else_happens(junk):
    with pytest.raises(CorruptBlock):
        list(parse_objects(junk))


@pytest.mark.parametrize("change", ["hash", "layout_id", "index", "tokens"])
def test_an_intact_block_that_is_another_one_is_refused(change):
    asked = wanted(0) | {change: wanted(1)[change] if change != "layout_id" else bytes(16)}
    with pytest.raises(CorruptBlock, match="foreign"):
        check_is(CHAIN.objects[0], **asked)


def test_a_payload_stays_out_of_logs():
    assert "data" not in repr(CHAIN.objects[0])
