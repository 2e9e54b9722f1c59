"""One kvstore node behind its gRPC server: bytes in, bytes out, and everything that goes wrong."""

import asyncio
import contextlib
import dataclasses

import grpc
import pytest
from prometheus_client import REGISTRY
from support.kv import Chain, running_node, until

from flashmesh.errors import (
    BlockNotFound,
    CorruptBlock,
    InvalidRequest,
    NoFreeBlocks,
    Overloaded,
    WorkerLost,
)
from flashmesh.kv_admin import KvAdmin
from flashmesh.kv_client import FRAME_BYTES
from flashmesh.kv_fetch import FOREIGN, fetch_blocks
from flashmesh.objects import KIND_MISSING, pack_missing, verify
from flashmesh.rpc import MAX_MESSAGE_BYTES, Channels
from flashmesh.services.kvstore import store as store_module
from flashmesh.v1 import kvstore_pb2

HANG_LIMIT_S = 30.0
OBJECT_BYTES = 1120


@pytest.fixture
async def node():
    async with running_node() as node:
        yield node


@pytest.fixture
async def admin():
    async with contextlib.aclosing(Channels()) as channels:
        yield KvAdmin(channels)


def bad(where):
    labels = {"where": where}
    return REGISTRY.get_sample_value("flashmesh_kv_verify_failures_total", labels) or 0


async def fetch(node, chain, first=0, stop=None, wait_s=0.0, **changes):
    arguments = {
        "places": chain.places(node),
        "hashes": chain.hashes,
        "tokens": chain.tokens,
        "layout_id": chain.objects[0].layout_id,
    } | changes
    stop = len(chain.hashes) if stop is None else stop
    blocks = fetch_blocks(node.client, **arguments, first=first, stop=stop, wait_s=wait_s)
    return {index: bytes(item.payload) async for index, item in blocks}


async def test_what_was_put_comes_back_and_the_rest_is_named_missing(node):
    chain = Chain(5)
    summary = await node.put(chain.objects[:3])
    assert (summary.num_stored, summary.num_known) == (3, 0)
    items = await node.get(chain.hashes)
    assert [items[hash].kind == KIND_MISSING for hash in chain.hashes] == [False] * 3 + [True] * 2
    for item in chain.objects[:3]:
        verify(items[item.hash])
        assert bytes(items[item.hash].data) == item.data
    assert await node.client.have(node.address, chain.hashes) == [True] * 3 + [False] * 2


async def test_the_first_writer_of_a_block_wins(node):
    chain, other = Chain(2), Chain(2, payload_bytes=400)
    await node.put(chain.objects[:1])
    summary = await node.put(other.objects)
    assert (summary.num_stored, summary.num_known) == (1, 1)
    items = await node.get(chain.hashes)
    assert bytes(items[chain.hashes[0]].data) == chain.objects[0].data
    assert bytes(items[chain.hashes[1]].data) == other.objects[1].data


async def test_a_hash_that_is_asked_for_twice_is_sent_once(node):
    chain = Chain(1)
    await node.put(chain.objects)
    sent = [item async for item in node.client.get(node.address, chain.hashes * 3, 0)]
    assert [item.hash for item in sent] == chain.hashes


async def test_blocks_larger_than_a_frame_together_arrive_in_several(node):
    chain = Chain(12, payload_bytes=300_000)
    await node.put(chain.objects)
    method = node.channel.unary_stream(
        "/flashmesh.v1.KvTransfer/Get",
        request_serializer=kvstore_pb2.GetRequest.SerializeToString,
    )
    frames = [frame async for frame in method(kvstore_pb2.GetRequest(hashes=chain.hashes))]
    assert len(frames) == 4
    assert all(len(frame) <= FRAME_BYTES for frame in frames)
    assert b"".join(frames) == b"".join(item.data for item in chain.objects)


async def test_a_waiting_get_sends_blocks_as_they_arrive(node):
    chain = Chain(4)
    await node.put(chain.objects[:1])
    async with asyncio.timeout(HANG_LIMIT_S):
        stream = node.client.get(node.address, chain.hashes, HANG_LIMIT_S)
        assert (await anext(stream)).hash == chain.hashes[0]
        for index in (2, 1, 3):  # the order of arrival, not of the request
            await node.put(chain.objects[index : index + 1])
            assert (await anext(stream)).hash == chain.hashes[index]
        assert [item async for item in stream] == []


async def test_a_get_that_waits_in_vain_names_what_did_not_come(node):
    chain = Chain(3)
    await node.put(chain.objects[:1])
    items = await node.get(chain.hashes, wait_s=0.05)
    assert [items[hash].kind == KIND_MISSING for hash in chain.hashes] == [False, True, True]
    assert (await node.stat()).num_waiting_gets == 0


async def test_a_client_that_leaves_mid_wait_leaves_nothing_behind(node):
    chain = Chain(2)
    task = asyncio.create_task(node.get(chain.hashes, HANG_LIMIT_S))
    await until(lambda: node.store.num_waiting == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: node.store.num_waiting == 0)
    assert not node.store._waiting


async def test_a_node_that_stops_ends_its_waits_at_once(node):
    chain = Chain(2)
    task = asyncio.create_task(node.get(chain.hashes, HANG_LIMIT_S))
    await until(lambda: node.store.num_waiting == 1)
    node.store.stop_waiting()
    async with asyncio.timeout(HANG_LIMIT_S / 2):
        items = await task
        assert all(item.kind == KIND_MISSING for item in items.values())
        assert len(await node.get(chain.hashes, HANG_LIMIT_S)) == 2


async def test_the_number_of_waiting_gets_is_bounded(node, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_WAITING", 1)
    chain = Chain(1)
    task = asyncio.create_task(node.get(chain.hashes, HANG_LIMIT_S))
    await until(lambda: node.store.num_waiting == 1)
    with pytest.raises(Overloaded):
        await node.get(chain.hashes, HANG_LIMIT_S)
    await node.put(chain.objects)
    assert chain.hashes[0] in await task


async def test_corrupt_blocks_are_refused_and_counted_and_those_before_them_stay(node):
    chain = Chain(2)
    damaged = chain.objects[1].data[:-1] + b"\xff"
    before = bad("put")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.put_frames(chain.objects[0].data + damaged)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert bad("put") == before + 1
    assert await node.client.have(node.address, chain.hashes) == [True, False]


@pytest.mark.parametrize("junk", [b"junk", b"x" * 500, b"FMKV" + bytes(200)])
async def test_frames_that_hold_no_objects_are_refused_and_counted(node, junk):
    before = bad("frame")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.put_frames(junk)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert bad("frame") == before + 1


async def test_the_reply_for_a_missing_block_cannot_be_stored(node):
    with pytest.raises(grpc.aio.AioRpcError):
        await node.put_frames(pack_missing(Chain(1).hashes[0]))
    assert (await node.stat()).num_blocks == 0


async def test_fetched_blocks_are_verified_and_come_with_their_index(node):
    chain = Chain(5)
    await node.put(chain.objects)
    assert await fetch(node, chain, 1, 4) == {
        index: bytes(chain.objects[index].payload) for index in (1, 2, 3)
    }


async def test_a_fetch_spans_nodes(node):
    chain = Chain(5)
    async with running_node() as other:
        await node.put(chain.objects[:3])
        await other.put(chain.objects[3:])
        blocks = await fetch(node, chain, places=chain.places(node, other))
    assert sorted(blocks) == [0, 1, 2, 3, 4]


async def test_a_fetch_names_the_first_block_that_is_missing(node):
    chain = Chain(5)
    await node.put([chain.objects[i] for i in (0, 1, 3)])
    with pytest.raises(BlockNotFound) as caught:
        await fetch(node, chain)
    assert caught.value.index == 2


async def test_a_stored_block_that_rots_is_found_by_the_reader_and_dropped(node):
    chain = Chain(1)
    await node.put(chain.objects)
    block = node.store.table.find(chain.hashes[0])
    block.memory = dataclasses.replace(block.memory, data=bytes(block.memory.data)[:-1] + b"\xff")
    before = bad("report")
    with pytest.raises(CorruptBlock):
        await fetch(node, chain)
    assert bad("report") == before + 1
    assert (await node.put(chain.objects)).num_stored == 1
    assert await fetch(node, chain)


@pytest.mark.parametrize("change", ["tokens", "layout_id"])
async def test_an_intact_block_of_something_else_is_refused_by_the_reader(node, change):
    chain = Chain(1)
    await node.put(chain.objects)
    other = {"tokens": Chain(1, seed=1).tokens, "layout_id": bytes(16)}[change]
    before = FOREIGN._value.get()
    with pytest.raises(CorruptBlock, match="foreign"):
        await fetch(node, chain, **{change: other})
    assert FOREIGN._value.get() == before + 1
    assert await fetch(node, chain), "a false report must not cost the good block"


async def test_a_dead_node_is_a_lost_worker():
    chain = Chain(1)
    async with running_node() as node, running_node() as other:
        gone = dataclasses.replace(chain.places(other)[0], address="127.0.0.1:1")
        with pytest.raises(WorkerLost):
            await fetch(node, chain, places=[gone])


async def test_leased_blocks_outlive_a_flood_and_released_ones_do_not():
    kept, flood = Chain(3, seed=1), Chain(20, seed=2)
    async with running_node(memory_bytes=10 * OBJECT_BYTES) as node:
        await node.put(flood.objects[:1])  # the node learns how large blocks are
        await node.client.lease(node.address, "a", kept.hashes, 30)
        await node.put(kept.objects)
        await node.put(flood.objects)
        assert all(await node.client.have(node.address, kept.hashes))
        assert (await node.stat()).tiers[0].leased_bytes == 3 * OBJECT_BYTES
        await node.client.release(node.address, ["a", "a", "unknown"])
        await node.put(Chain(20, seed=3).objects)
        assert not any(await node.client.have(node.address, kept.hashes))


async def test_a_node_full_of_leased_blocks_refuses_more():
    chain = Chain(4)
    async with running_node(memory_bytes=4 * OBJECT_BYTES, max_leased_share=1.0) as node:
        await node.put(chain.objects)
        await node.client.lease(node.address, "a", chain.hashes, 30)
        with pytest.raises(Overloaded):
            await node.client.lease(node.address, "b", Chain(1, seed=1).hashes, 30)
        with pytest.raises(Overloaded):
            await node.put(Chain(1, seed=1).objects)
        assert (await node.stat()).tiers[0].leased_bytes == 4 * OBJECT_BYTES
    assert issubclass(NoFreeBlocks, Overloaded)


async def test_renewing_names_the_leases_that_the_node_does_not_hold(node):
    await node.client.lease(node.address, "a", [], 30)
    assert await node.client.renew(node.address, ["a", "b"], 30) == ["b"]


@pytest.mark.parametrize("length", [0, 15, 17, 32])
async def test_hashes_of_a_wrong_length_are_refused_everywhere(node, length):
    wrong = bytes(length)
    for call in (
        node.client.have(node.address, [wrong]),
        node.client.lease(node.address, "a", [wrong], 30),
        node.client.report(node.address, wrong, ""),
        node.get([wrong]),
    ):
        with pytest.raises(InvalidRequest):
            await call


async def test_times_to_live_and_ids_out_of_range_are_refused(node):
    for ttl_s in (0, 301):
        with pytest.raises(InvalidRequest):
            await node.client.lease(node.address, "a", [], ttl_s)
        with pytest.raises(InvalidRequest):
            await node.client.renew(node.address, [], ttl_s)
    for lease_id in ("", "x" * 300):
        with pytest.raises(InvalidRequest):
            await node.client.lease(node.address, lease_id, [], 30)


@pytest.mark.parametrize(
    "method",
    [
        "/flashmesh.v1.KvTransfer/Get",
        "/flashmesh.v1.KvStore/Lease",
        "/flashmesh.v1.KvStore/Have",
    ],
)
async def test_a_malformed_message_is_the_callers_fault(node, method):
    kind = node.channel.unary_stream if method.endswith("Get") else node.channel.unary_unary
    call = kind(method)(b"\xff\xff\xff\xff")
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_of_100_mb_is_refused_and_the_node_serves_on(node):
    chain = Chain(1)
    assert MAX_MESSAGE_BYTES < 100_000_000
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.put_frames(bytes(100_000_000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await node.put(chain.objects)).num_stored == 1
    assert (await node.stat()).num_blocks == 1


async def test_a_request_for_thousands_of_hashes_is_answered(node):
    chain = Chain(1)
    await node.put(chain.objects)
    absent = [index.to_bytes(16, "big") for index in range(20_000)]
    items = await node.get([*absent, *chain.hashes])
    assert len(items) == 20_001
    assert sum(item.kind == KIND_MISSING for item in items.values()) == 20_000


async def test_a_slow_reader_holds_back_the_node():
    """Frames are built when the reader takes them, so what is evicted meanwhile is missing."""
    chain = Chain(40, payload_bytes=1_000_000)
    async with running_node(memory_bytes=64_000_000) as node:
        await node.put(chain.objects)
        stream = node.client.get(node.address, chain.hashes, 0)
        first = await anext(stream)
        await node.put(Chain(62, seed=1, payload_bytes=1_000_000).objects)
        rest = [item async for item in stream]
    assert first.kind != KIND_MISSING
    assert len(rest) == 39
    assert sum(item.kind == KIND_MISSING for item in rest) > 0


async def test_verify_finds_what_rots_in_memory_and_drops_it(node, admin):
    chain = Chain(3)
    await node.put(chain.objects)
    block = node.store.table.find(chain.hashes[1])
    block.memory = dataclasses.replace(block.memory, data=bytes(block.memory.data)[:-1] + b"\xff")
    before = bad("scrub")
    steps = [step async for step in admin.verify(node.address)]
    assert [list(step.bad_hashes) for step in steps] == [[chain.hashes[1]]]
    assert (steps[-1].num_checked, steps[-1].num_total) == (3, 3)
    assert bad("scrub") == before + 1
    assert await node.client.have(node.address, chain.hashes) == [True, False, True]


async def test_verify_tells_how_far_it_is(admin):
    chain = Chain(12, payload_bytes=1_000_000)
    async with running_node(memory_bytes=20_000_000) as node:
        await node.put(chain.objects)
        stream = admin.verify(node.address, bytes_per_s=1 << 40)
        steps = [(step.num_checked, step.num_total, step.num_bytes) async for step in stream]
    size = len(chain.objects[0].data)
    assert steps == [(number, 12, number * size) for number in (5, 10, 12)]


async def test_verify_of_an_empty_node_says_so(node, admin):
    (step,) = [step async for step in admin.verify(node.address)]
    assert (step.num_checked, step.num_total, step.num_bytes) == (0, 0, 0)


async def test_evict_wants_hashes_or_everything(node, admin):
    for request in ({}, {"hashes": Chain(1).hashes, "everything": True}, {"hashes": [b"short"]}):
        with pytest.raises(InvalidRequest):
            await admin.evict(node.address, **request)


async def test_a_hash_that_is_named_twice_is_evicted_once(node, admin):
    chain = Chain(1)
    await node.put(chain.objects)
    answer = await admin.evict(node.address, chain.hashes * 2)
    assert (answer.num_evicted, answer.num_leased, answer.num_absent) == (1, 0, 0)


def metric(name, **labels):
    return REGISTRY.get_sample_value(f"flashmesh_kv_{name}", labels) or 0


async def test_hits_and_misses_are_counted_by_reason(node):
    chain = Chain(4)
    await node.put(chain.objects[:2])
    names = [
        ("hits_total", {}),
        ("misses_total", {"reason": "absent"}),
        ("misses_total", {"reason": "timeout"}),
        ("transfer_seconds_count", {"kind": "get"}),
        ("transfer_seconds_count", {"kind": "waiting_get"}),
        ("transfer_seconds_count", {"kind": "put"}),
    ]
    before = [metric(name, **labels) for name, labels in names]
    await node.get(chain.hashes)
    await node.get(chain.hashes[1:], wait_s=0.01)
    await node.put(chain.objects)
    after = [metric(name, **labels) for name, labels in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [3, 2, 2, 1, 1, 1]
