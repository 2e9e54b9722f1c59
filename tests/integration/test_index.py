"""The index against a real server: what nodes claim, and what readers believe."""

import asyncio
import contextlib
import logging

import pytest
from support.kv import Chain, running_node, until

from flashmesh import index as index_module
from flashmesh.errors import WorkerLost
from flashmesh.index import IndexReader, IndexWriter
from flashmesh.lifecycle import background
from flashmesh.redis_client import connect

OBJECT_BYTES = 1120


@pytest.fixture
def reader(client):
    return IndexReader(client, "test")


async def eventually(reader, chain, epochs, count):
    """Waits until the index claims exactly so many leading blocks."""
    async with asyncio.timeout(30):
        while len(await reader.longest_prefix(chain.hashes, epochs)) != count:
            await asyncio.sleep(0.01)


async def test_stored_blocks_are_found_and_evicted_ones_are_not(client, reader):
    chain = Chain(10)
    async with running_node(client, memory_bytes=10 * OBJECT_BYTES) as node:
        known = {node.epoch[:8]}
        await node.put(chain.objects)
        await eventually(reader, chain, known, 10)
        assert await reader.longest_prefix(chain.hashes, known) == [node.epoch[:8]] * 10
        await node.put(Chain(4, seed=1).objects)
        await eventually(reader, chain, known, 6)


async def test_a_prefix_ends_at_the_first_gap(client, reader):
    chain = Chain(5)
    async with running_node(client) as node:
        await node.put([chain.objects[i] for i in (0, 1, 3, 4)])
        await eventually(reader, chain, {node.epoch[:8]}, 2)


async def test_a_prompt_of_a_million_tokens_is_one_round_trip(client, reader):
    hashes = [index.to_bytes(16, "big") for index in range(8192)]
    owner = b"12345678"
    async with client.pipeline(transaction=False) as pipe:
        for first in range(0, 8192, 64):
            fields = dict.fromkeys(hashes[first : first + 64], owner)
            pipe.hset(f"{{flashmesh:test}}:run:{hashes[first].hex()}", mapping=fields)
        await pipe.execute()
    calls = await client.info("commandstats")
    assert await reader.longest_prefix(hashes, {owner}) == [owner] * 8192
    after = await client.info("commandstats")
    assert after["cmdstat_hmget"]["calls"] - calls.get("cmdstat_hmget", {"calls": 0})["calls"] == (
        128
    )
    assert set(after) <= set(calls) | {"cmdstat_hmget", "cmdstat_info"}


async def test_entries_of_an_epoch_that_nobody_confirms_are_invisible(client, reader):
    """What a node claimed before it restarted says nothing about what it holds now."""
    chain = Chain(4)
    async with running_node(client) as node:
        await node.put(chain.objects)
        await eventually(reader, chain, {node.epoch[:8]}, 4)
        old = node.epoch[:8]
    async with running_node(client) as restarted:
        new = restarted.epoch[:8]
        assert await reader.longest_prefix(chain.hashes, {new}) == []
        await restarted.put(chain.objects[:2])
        await eventually(reader, chain, {new}, 2)
        assert await reader.longest_prefix(chain.hashes, {old}) == []


async def test_a_wiped_redis_is_filled_again(client, reader, monkeypatch):
    monkeypatch.setattr(index_module, "CHECK_INTERVAL_S", 0.01)
    chain = Chain(100)
    async with running_node(client) as node:
        await node.put(chain.objects)
        await eventually(reader, chain, {node.epoch[:8]}, 100)
        await client.flushall()
        await eventually(reader, chain, {node.epoch[:8]}, 100)


async def test_a_node_takes_back_only_its_own_claims(client, reader):
    chain = Chain(2)
    run = chain.hashes[0]
    one = IndexWriter(client, "test", b"1" * 16, lambda: [(run, hash) for hash in chain.hashes])
    two = IndexWriter(client, "test", b"2" * 16, lambda: [(run, chain.hashes[1])])
    for writer in (one, two):
        async with background(writer.run()):
            while not await client.exists(writer._sentinel):
                await asyncio.sleep(0)
    await one.withdraw()
    assert await client.hgetall(f"{{flashmesh:test}}:run:{run.hex()}") == {
        chain.hashes[1]: b"2" * 8
    }
    assert not await client.exists(one._sentinel)


async def test_a_put_does_not_wait_for_redis_and_nothing_is_lost(
    client, reader, redis_url, monkeypatch, caplog
):
    monkeypatch.setattr(index_module, "CHECK_INTERVAL_S", 0.01)
    chain = Chain(3)
    async with (
        contextlib.aclosing(connect(redis_url)) as control,
        contextlib.aclosing(connect("unix:///nowhere/redis.sock")) as broken,
        running_node(broken) as node,
    ):
        with caplog.at_level(logging.WARNING):
            assert (await node.put(chain.objects)).num_stored == 3
            await until(lambda: "index unreachable" in caplog.messages)
        node.store.index._client = control  # the server is there now
        await eventually(reader, chain, {node.epoch[:8]}, 3)
    assert caplog.messages.count("index unreachable") == 1


async def test_changes_that_no_longer_fit_the_queue_are_made_up_for(client, reader, monkeypatch):
    monkeypatch.setattr(index_module, "MAX_QUEUED", 4)
    chain = Chain(50)
    async with running_node(client) as node:
        await node.put(chain.objects)
        await eventually(reader, chain, {node.epoch[:8]}, 50)


async def test_a_redis_that_cannot_be_asked_is_a_clear_error():
    async with contextlib.aclosing(connect("unix:///nowhere/redis.sock")) as broken:
        with pytest.raises(WorkerLost, match="index"):
            await IndexReader(broken, "test").longest_prefix(Chain(1).hashes, set())


async def test_an_empty_prompt_needs_no_answer(reader):
    assert await reader.longest_prefix([], {b"12345678"}) == []
