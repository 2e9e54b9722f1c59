"""What dead nodes leave in the index, and who deletes it, against a real server."""

import asyncio

import pytest
from support.kv import Chain
from support.redis import claimed, claims_of

from flashmesh import index, index_sweep
from flashmesh.index import IndexWriter, claims_key
from flashmesh.index_sweep import keep_swept, sweep
from flashmesh.lifecycle import background
from flashmesh.registry import Registry, WorkerRecord

LIVING, KILLED = b"1" * 16, b"2" * 16
CHAIN = Chain(100)


@pytest.fixture(autouse=True)
def quick_turns(monkeypatch):
    monkeypatch.setattr(index, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(index_sweep, "TURN_INTERVAL_S", 0.01)


async def register(client, epoch, mesh="test"):
    record = WorkerRecord(id="kvstore-0", epoch=epoch.hex(), role="kvstore", address="127.0.0.1:1")
    await Registry(client, mesh).heartbeat(record, 60)


async def publish(client, epoch, mesh="test"):
    """Leaves claims as a node that is killed does."""
    writer = IndexWriter(client, mesh, epoch, lambda: CHAIN.hashes)
    async with background(writer.run()):
        await eventually(client, epoch, claims_of(CHAIN.hashes), mesh)


async def eventually(client, epoch, claims, mesh="test"):
    async with asyncio.timeout(30):
        while await claimed(client, mesh, epoch) != claims:
            await asyncio.sleep(0.01)


async def keys_of(client, epoch, mesh="test"):
    return [key async for key in client.scan_iter(f"{claims_key(mesh, epoch.hex())}*")]


async def test_a_sweep_deletes_all_of_the_dead_and_nothing_of_the_living(client):
    for epoch in (LIVING, KILLED):
        await publish(client, epoch)
    left = await keys_of(client, KILLED)
    assert await sweep(client, "test", {LIVING.hex()}) == len(left)
    assert await keys_of(client, KILLED) == []
    assert await claimed(client, "test", LIVING) == claims_of(CHAIN.hashes)
    assert await sweep(client, "test", {LIVING.hex()}) == 0


@pytest.mark.parametrize("mesh", ["test", "test*", "test?"])
async def test_a_sweep_leaves_other_meshes_alone(client, mesh):
    await publish(client, KILLED, mesh="test2")
    await client.set("somebody else's", 1)
    assert await sweep(client, mesh, set()) == 0
    assert await claimed(client, "test2", KILLED) == claims_of(CHAIN.hashes)


async def test_a_mesh_that_is_named_like_a_pattern_is_swept_like_others(client):
    await publish(client, KILLED, mesh="[a-z]?\\*")
    assert await sweep(client, "[a-z]?\\*", set()) > 0
    assert await claimed(client, "[a-z]?\\*", KILLED) is None


async def test_the_successor_of_a_killed_node_deletes_what_that_left(client):
    await register(client, KILLED)
    await publish(client, KILLED)
    await register(client, LIVING)
    async with background(keep_swept(client, "test", LIVING.hex())):
        async with asyncio.timeout(30):
            while await keys_of(client, KILLED):
                await asyncio.sleep(0.01)


async def test_one_node_sweeps_at_a_time(client):
    await register(client, LIVING)
    await client.set("{flashmesh:test}:sweep", "another", ex=60)
    await publish(client, KILLED)
    turns = asyncio.Semaphore(0)
    listed = Registry.list

    async def counted(registry):
        turns.release()
        return await listed(registry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "list", counted)
        async with background(keep_swept(client, "test", LIVING.hex())):
            for _ in range(3):
                await turns.acquire()
            assert await claimed(client, "test", KILLED) == claims_of(CHAIN.hashes)
            await client.delete("{flashmesh:test}:sweep")
            await eventually(client, KILLED, None)
    assert 0 < await client.ttl("{flashmesh:test}:sweep") <= index_sweep.SWEEP_INTERVAL_S


async def test_who_is_not_registered_itself_believes_nobody_dead(client):
    """As right after Redis came back empty: whoever has not beaten yet is not dead."""
    await publish(client, KILLED)
    registered = asyncio.Event()
    listed = Registry.list

    async def register_after_the_first_look(registry):
        records = await listed(registry)
        if not registered.is_set():
            assert await claimed(client, "test", KILLED) == claims_of(CHAIN.hashes)
            await register(client, LIVING)
            registered.set()
        return records

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "list", register_after_the_first_look)
        async with background(keep_swept(client, "test", LIVING.hex())):
            await registered.wait()
            await eventually(client, KILLED, None)


async def test_a_node_that_was_only_away_publishes_again(client):
    writer = IndexWriter(client, "test", KILLED, lambda: CHAIN.hashes)
    async with background(writer.run()):
        await eventually(client, KILLED, claims_of(CHAIN.hashes))
        await sweep(client, "test", {LIVING.hex()})
        await eventually(client, KILLED, claims_of(CHAIN.hashes))
