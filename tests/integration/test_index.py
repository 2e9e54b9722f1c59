"""The index against a real server: what nodes claim, and what readers believe."""

import asyncio
import contextlib
import hashlib
import itertools
import logging

import pytest
import redis.exceptions
from support.kv import Chain, running_node, until
from support.redis import claimed, claims_of, running_server

from flashmesh import index as index_module
from flashmesh.bench.index import counted
from flashmesh.errors import WorkerLost
from flashmesh.index import IndexReader, IndexWriter, claims_key
from flashmesh.index_sweep import sweep
from flashmesh.lifecycle import background
from flashmesh.recent_blocks import RecentBlocks
from flashmesh.redis_client import connect
from flashmesh.registry import Registry, WorkerRecord

OBJECT_BYTES = 1120
EPOCHS = [bytes([number]) * 16 for number in range(4)]


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch):
    monkeypatch.setattr(index_module, "CHECK_INTERVAL_S", 0.01)


async def found(client, hashes, *owners):
    """Asks as a client that has seen nothing; the last owner has the remaining runs, too."""
    owners = [*owners, *[owners[-1]] * len(hashes)][: len(hashes)]
    return await IndexReader(client, "test").longest_prefix(hashes, [o.hex() for o in owners])


async def eventually(client, chain, epoch, count):
    """Waits until the index claims exactly so many leading blocks."""
    async with asyncio.timeout(30):
        while await found(client, chain.hashes, epoch) != count:
            await asyncio.sleep(0.01)


async def equals(client, epoch, inventory):
    """Waits until what a node claims is what it has."""
    async with asyncio.timeout(30):
        while await claimed(client, "test", epoch) != claims_of(inventory()):
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def writing(client, epoch, inventory):
    """Runs a writer over an inventory that the test changes."""
    writer = IndexWriter(client, "test", epoch, lambda: list(inventory))
    async with background(writer.run()):
        yield writer


async def test_stored_blocks_are_found_and_evicted_ones_are_not(client):
    chain = Chain(10)
    async with running_node(client, memory_bytes=10 * OBJECT_BYTES) as node:
        await node.put(chain.objects)
        await eventually(client, chain, node.epoch, 10)
        await node.put(Chain(4, seed=1).objects)
        await eventually(client, chain, node.epoch, 6)
        await equals(client, node.epoch, node.store.inventory)


async def test_a_prefix_ends_at_the_first_gap(client):
    chain = Chain(5)
    async with running_node(client) as node:
        await node.put([chain.objects[i] for i in (0, 1, 3, 4)])
        await eventually(client, chain, node.epoch, 2)


@pytest.mark.parametrize("num_stored", [1, 63, 64, 65, 128, 200, 256])
async def test_a_prefix_may_end_anywhere_in_any_run(client, num_stored):
    hashes = Chain(256).hashes
    async with writing(client, EPOCHS[0], hashes[:num_stored]):
        await equals(client, EPOCHS[0], lambda: hashes[:num_stored])
    assert await found(client, hashes, EPOCHS[0]) == num_stored


async def test_every_run_is_asked_of_the_node_it_is_placed_on_and_of_no_other(client):
    hashes = Chain(192).hashes
    one, two, silent = EPOCHS[:3]
    for epoch, held in ((one, [*hashes[:64], *hashes[128:]]), (two, hashes[64:128])):
        async with writing(client, epoch, held):
            await equals(client, epoch, lambda held=held: held)
    assert await found(client, hashes, one, two, one) == 192
    assert await found(client, hashes, one, one, one) == 64
    assert await found(client, hashes, two, two, one) == 0
    assert await found(client, hashes, one, two, silent) == 128


async def test_a_prompt_of_a_million_tokens_is_one_round_trip(redis_url, client):
    hashes = Chain(7813, payload_bytes=4).hashes
    async with writing(client, EPOCHS[0], hashes) as writer:
        await writer.written()
    async with counted(redis_url) as (counted_client, traffic):
        assert await found(counted_client, hashes, EPOCHS[0]) == 7813
    assert traffic.num_round_trips == 1


async def test_a_growing_conversation_asks_only_for_what_is_new(redis_url, client):
    hashes = Chain(200).hashes
    owners = [EPOCHS[0].hex()] * 4
    async with (
        writing(client, EPOCHS[0], hashes) as writer,
        counted(redis_url) as (counted_client, traffic),
    ):
        await writer.written()
        reader = IndexReader(counted_client, "test")
        assert await reader.longest_prefix(hashes[:150], owners) == 150
        assert await reader.longest_prefix(hashes[:150], owners) == 150
        assert traffic.num_round_trips == 1
        before = traffic.num_bytes
        assert await reader.longest_prefix(hashes, owners) == 200
        assert traffic.num_round_trips == 2
        assert traffic.num_bytes - before < before, "the first two runs were asked again"


async def test_what_a_node_did_not_have_is_asked_again(client):
    chain = Chain(3)
    owners = [EPOCHS[0].hex()]
    reader = IndexReader(client, "test")
    inventory = [*chain.hashes]
    async with writing(client, EPOCHS[0], inventory) as writer:
        await equals(client, EPOCHS[0], lambda: inventory)
        assert await reader.longest_prefix(chain.hashes, owners) == 3
        writer.unpublish(inventory.pop())
        await equals(client, EPOCHS[0], lambda: inventory)
        assert await reader.longest_prefix(chain.hashes, owners) == 3, "it may claim too much"
        reader.forget(chain.hashes)
        assert await reader.longest_prefix(chain.hashes, owners) == 2


async def test_a_restarted_node_is_asked_even_for_what_was_seen_a_moment_ago(client):
    hashes = Chain(3).hashes
    reader = IndexReader(client, "test", RecentBlocks())
    async with writing(client, EPOCHS[0], hashes):
        await equals(client, EPOCHS[0], lambda: hashes)
        assert await reader.longest_prefix(hashes, [EPOCHS[0].hex()]) == 3
    assert await reader.longest_prefix(hashes, [EPOCHS[1].hex()]) == 0


async def test_late_writes_of_an_old_epoch_change_nothing(client):
    """A node restarts under its name while its former self still has writes to make."""
    chain = Chain(100)
    former, present = EPOCHS[:2]
    async with writing(client, former, chain.hashes) as late:
        await equals(client, former, lambda: chain.hashes)
        async with writing(client, present, []):
            await equals(client, present, list)
            assert await found(client, chain.hashes, present) == 0
            for hash in chain.hashes[:50]:
                late.unpublish(hash)
            late.publish(Chain(1, seed=1).hashes[0])
            await until(lambda: not late._changes)
            assert await claimed(client, "test", present) == set()
            assert await found(client, chain.hashes, present) == 0


async def test_more_blocks_take_more_buckets_and_readers_never_see_a_gap(client):
    inventory = Chain(1, payload_bytes=4).hashes
    counts = []
    async with writing(client, EPOCHS[0], inventory) as writer:
        await equals(client, EPOCHS[0], lambda: inventory)
        for number in range(40):
            for place in range(200):
                hash = hashlib.sha256(b"%d %d" % (number, place)).digest()[:16]
                inventory.append(hash)
                writer.publish(hash)
            counts.append(await found(client, inventory[:1], EPOCHS[0]))
        await equals(client, EPOCHS[0], lambda: inventory)
    assert counts == [1] * 40
    await writer._write_all()  # the growth may have been cut short behind its last write
    keys = [key async for key in client.scan_iter(f"{claims_key('test', EPOCHS[0].hex())}:*")]
    assert {key.split(b":")[-2] for key in keys} == {b"64"}, "former buckets were left"
    assert {await client.object("encoding", key) for key in keys} == {b"intset"}


async def test_a_wiped_redis_is_filled_again(client):
    chain = Chain(100)
    async with running_node(client) as node:
        await node.put(chain.objects)
        await eventually(client, chain, node.epoch, 100)
        await client.flushall()
        await equals(client, node.epoch, node.store.inventory)


async def test_a_wipe_in_the_middle_of_publishing_is_noticed(client, monkeypatch):
    """Whatever has been written before it is written again, not only what comes after."""
    inventory = Chain(40).hashes
    writer = IndexWriter(client, "test", EPOCHS[0], lambda: inventory)
    monkeypatch.setattr(index_module, "WRITE_BUCKETS", 1)
    write, countdown = writer._write, itertools.count(5, -1)

    async def wipe_before_the_fifth(commands):
        if next(countdown) == 0:
            await client.flushall()
        await write(commands)

    monkeypatch.setattr(writer, "_write", wipe_before_the_fifth)
    async with background(writer.run()):
        await equals(client, EPOCHS[0], lambda: inventory)
    assert writer._num_claims == 40


async def test_a_redis_that_comes_back_with_an_older_state_is_brought_up_to_date(client):
    """As after a restart from a snapshot, or a failover that lost the last writes."""
    inventory = Chain(60).hashes[:30]
    key = claims_key("test", EPOCHS[0].hex())
    async with writing(client, EPOCHS[0], inventory) as writer:
        await equals(client, EPOCHS[0], lambda: inventory)
        keys = [key.encode(), *[key async for key in client.scan_iter(f"{key}:*")]]
        snapshot = {key: await client.dump(key) for key in keys}
        for hash in Chain(60).hashes[30:]:
            inventory.append(hash)
            writer.publish(hash)
        writer.unpublish(inventory.pop(0))
        await equals(client, EPOCHS[0], lambda: inventory)
        async with client.pipeline(transaction=True) as pipe:
            pipe.flushall()
            for key, value in snapshot.items():
                pipe.restore(key, 0, value)
            await pipe.execute()
        await equals(client, EPOCHS[0], lambda: inventory)


async def test_a_write_whose_answer_was_lost_is_made_again_without_publishing_all(client):
    inventory = Chain(10).hashes[:5]
    republished = index_module.REPUBLISHED
    async with writing(client, EPOCHS[0], inventory) as writer:
        await equals(client, EPOCHS[0], lambda: inventory)
        before, check = republished._value.get(), writer._check

        def lose_the_answer(state):
            writer._check = check
            raise redis.exceptions.ConnectionError("the answer was lost")

        writer._check = lose_the_answer
        for hash in Chain(10).hashes[5:]:
            inventory.append(hash)
            writer.publish(hash)
        await equals(client, EPOCHS[0], lambda: inventory)
        await until(lambda: not writer._changes)
    assert republished._value.get() == before


async def test_a_node_takes_back_only_its_own_claims(client):
    hashes = Chain(2).hashes
    for epoch in EPOCHS[:2]:
        async with writing(client, epoch, hashes) as writer:
            await equals(client, epoch, lambda: hashes)
    await writer.withdraw()
    assert await found(client, hashes, EPOCHS[0]) == 2
    assert [key async for key in client.scan_iter(f"*{EPOCHS[1].hex()}*")] == []


async def test_a_put_does_not_wait_for_redis_and_nothing_is_lost(client, redis_url, caplog):
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
        await eventually(client, chain, node.epoch, 3)
    assert caplog.messages.count("index unreachable") == 1


async def test_changes_that_no_longer_fit_the_queue_are_made_up_for(client, monkeypatch):
    monkeypatch.setattr(index_module, "MAX_QUEUED", 4)
    async with running_node(client) as node:
        await node.put(Chain(50).objects)
        await equals(client, node.epoch, node.store.inventory)
        assert len(node.store.inventory()) == 50


async def test_a_redis_that_cannot_be_asked_is_a_clear_error():
    async with contextlib.aclosing(connect("unix:///nowhere/redis.sock")) as broken:
        with pytest.raises(WorkerLost, match="index"):
            await found(broken, Chain(1).hashes, EPOCHS[0])


async def test_what_was_used_a_moment_ago_is_known_before_and_without_redis(client):
    hashes, owners = Chain(100).hashes, [EPOCHS[0].hex()] * 2
    async with contextlib.aclosing(connect("unix:///nowhere/redis.sock")) as broken:
        for server in (client, broken):
            reader = IndexReader(server, "test")
            reader.confirm(hashes[:70], owners)
            assert await reader.longest_prefix(hashes, owners) == 70


async def test_an_empty_prompt_needs_no_answer():
    async with contextlib.aclosing(connect("unix:///nowhere/redis.sock")) as broken:
        assert await IndexReader(broken, "test").longest_prefix([], [EPOCHS[0].hex()]) == 0


async def test_a_mesh_lives_in_one_slot_of_a_cluster():
    """A server in cluster mode refuses scripts and transactions that cross slots."""
    hashes = Chain(100).hashes
    record = WorkerRecord(id="n0", epoch=EPOCHS[0].hex(), role="kvstore", address="127.0.0.1:1")
    with running_server("--cluster-enabled", "yes") as server:
        async with contextlib.aclosing(connect(server.url)) as client:
            await client.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
            async with asyncio.timeout(30):
                while (await client.cluster("info"))["cluster_state"] != "ok":
                    await asyncio.sleep(0.01)
            registry = Registry(client, "test")
            await registry.heartbeat(record, 60)
            assert await registry.list() == [record]
            async with writing(client, EPOCHS[0], hashes) as writer:
                await equals(client, EPOCHS[0], lambda: hashes)
            assert await found(client, hashes, EPOCHS[0]) == 100
            assert await sweep(client, "test", {EPOCHS[0].hex()}) == 0
            await writer.withdraw()
            await registry.remove(record)
            keys = [key async for key in client.scan_iter("*")]
            assert keys == [b"{flashmesh:test}:generation"]
