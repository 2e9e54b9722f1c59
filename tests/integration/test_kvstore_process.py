"""A kvstore node as a process of its own: what is left when it stops, and when it is killed."""

import asyncio
import contextlib
import dataclasses
import signal

import pytest
from support.kv import Chain
from support.waiting import wait_until

from flashmesh.index import IndexReader
from flashmesh.kv_client import KvClient
from flashmesh.launcher import MeshPlan, Process
from flashmesh.objects import KIND_MISSING
from flashmesh.redis_client import connect
from flashmesh.redis_server import private_redis
from flashmesh.registry import Registry
from flashmesh.rpc import Channels

CHAIN = Chain(100)
HANG_LIMIT_S = 60.0


class Mesh:
    """One node, and what others learn of it through Redis."""

    def __init__(self, process, redis, channels):
        self.process = process
        self.redis = redis
        self.client = KvClient(channels)
        self.registry = Registry(redis, "local")

    def start(self):
        self.process.start()
        wait_until(self.process.healthy, "the node serves")

    async def record(self):
        """Waits for the node's record in the registry."""
        async with asyncio.timeout(HANG_LIMIT_S):
            while not (records := await self.registry.list()):
                await asyncio.sleep(0.01)
        return records[0]

    async def found(self, record):
        """How many leading blocks the index confirms for the node's epoch."""
        owners = [record.epoch] * len(CHAIN.hashes)
        return await IndexReader(self.redis, "local").longest_prefix(CHAIN.hashes, owners)

    async def keys_of(self, record):
        """What Redis holds of the node's claims."""
        return [key async for key in self.redis.scan_iter(f"*:claims:{record.epoch}*")]

    async def put_and_publish(self, record):
        await self.client.put(record.address, CHAIN.objects)
        async with asyncio.timeout(HANG_LIMIT_S):
            while await self.found(record) < len(CHAIN.hashes):
                await asyncio.sleep(0.01)


@pytest.fixture
async def mesh(tmp_path):
    settings = {"mesh": {"heartbeat_ttl_s": 30.0, "drain_grace_s": HANG_LIMIT_S}}
    with private_redis(tmp_path / "redis") as url:
        process = Process("kvstore-0", MeshPlan(redis_url=url, settings=settings), tmp_path)
        async with (
            contextlib.aclosing(connect(url)) as redis,
            contextlib.aclosing(Channels()) as channels,
        ):
            mesh = Mesh(process, redis, channels)
            mesh.start()
            try:
                yield mesh
            finally:
                process.signal(signal.SIGKILL)
                process.wait()


async def test_a_node_that_stops_takes_record_and_claims_with_it_and_ends_its_waits(mesh):
    record = await mesh.record()
    await mesh.put_and_publish(record)
    absent = Chain(1, seed=1).hashes
    stream = mesh.client.get(record.address, [CHAIN.hashes[0], *absent], HANG_LIMIT_S)
    assert (await anext(stream)).hash == CHAIN.hashes[0]
    mesh.process.signal(signal.SIGTERM)
    assert [item.kind async for item in stream] == [KIND_MISSING]
    assert await asyncio.to_thread(mesh.process.wait, HANG_LIMIT_S / 2) == 0
    assert await mesh.registry.list() == []
    assert await mesh.keys_of(record) == []


async def test_what_a_killed_node_claimed_is_not_believed_of_its_successor(mesh):
    old = await mesh.record()
    await mesh.put_and_publish(old)
    mesh.process.signal(signal.SIGKILL)
    mesh.process.wait()
    mesh.start()
    async with asyncio.timeout(HANG_LIMIT_S):
        while (new := await mesh.record()).epoch == old.epoch:
            await asyncio.sleep(0.01)
    assert new.id == old.id
    assert await mesh.found(new) == 0
    assert await mesh.client.have(new.address, CHAIN.hashes) == [False] * 100
    await mesh.put_and_publish(new)
    # The next walk is due within a minute: at the next turn, if nobody has just walked.
    await mesh.redis.delete("{flashmesh:local}:sweep")
    async with asyncio.timeout(HANG_LIMIT_S):
        while await mesh.keys_of(old):
            await asyncio.sleep(0.01)
    assert await mesh.found(old) == 0
    assert await mesh.found(new) == 100


async def test_a_process_that_names_blocks_otherwise_does_not_start(mesh, tmp_path):
    record = dataclasses.replace(await mesh.record(), id="other", scheme="another")
    await mesh.registry.heartbeat(record, HANG_LIMIT_S)
    mesh.process.signal(signal.SIGKILL)
    mesh.process.wait()
    mesh.process.start()
    assert await asyncio.to_thread(mesh.process.wait, HANG_LIMIT_S) == 1
    assert mesh.process.log_tail(1).startswith("flashmesh: other names blocks by 'another'")
