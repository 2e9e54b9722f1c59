"""Blocks read out of a node's memory: which way they go, and everything that ends or spoils it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest
from prometheus_client import REGISTRY
from support.kv import Chain, running_node, until
from support.waiting import wait_until

from flashmesh.errors import WorkerLost
from flashmesh.kv_client import KvClient
from flashmesh.launcher import MeshPlan, Process
from flashmesh.objects import KIND_MISSING
from flashmesh.redis_server import private_redis
from flashmesh.rpc import Channels
from flashmesh.shared_memory import FILE_NAME, Offer, SharedMemory

HANG_LIMIT_S = 60.0
OBJECT_BYTES = 1120


@pytest.fixture
async def node():
    async with running_node(memory_bytes=100 * OBJECT_BYTES) as node:
        yield node


def count(name, way):
    return REGISTRY.get_sample_value(f"flashmesh_kv_client_{name}_total", {"way": way}) or 0


class Ways:
    """How many blocks came which way since it was made."""

    def __init__(self):
        self._before = self._now()

    def _now(self):
        names = [("blocks", "shared"), ("blocks", "stream"), ("damaged", "shared")]
        return [count(*name) for name in names]

    def counts(self):
        """(through shared memory, through the stream, torn)."""
        return tuple(now - old for now, old in zip(self._now(), self._before, strict=True))


async def open_memory(node):
    """The first Get of a client is answered over gRPC and brings the offer."""
    await node.get([bytes(16)])


async def test_after_the_first_get_blocks_come_through_shared_memory(node):
    chain = Chain(5)
    await node.put(chain.objects[:4])
    ways = Ways()
    assert len(await node.get(chain.hashes)) == 5
    assert ways.counts() == (0, 5, 0)
    items = await node.get(chain.hashes)
    assert ways.counts() == (4, 6, 0), "the block that is missing is named in the stream"
    for item in chain.objects[:4]:
        assert bytes(items[item.hash].data) == item.data


async def test_blocks_that_arrive_during_a_wait_come_through_shared_memory(node):
    chain = Chain(3)
    await open_memory(node)
    ways = Ways()
    async with asyncio.timeout(HANG_LIMIT_S):
        stream = node.client.get(node.address, chain.hashes, HANG_LIMIT_S)
        for index in (1, 0, 2):
            await node.put(chain.objects[index : index + 1])
            assert (await anext(stream)).hash == chain.hashes[index]
        assert [item async for item in stream] == []
    assert ways.counts() == (3, 0, 0)


async def test_what_the_reader_has_does_not_change_when_the_node_evicts(node):
    chain = Chain(100)
    await open_memory(node)
    await node.put(chain.objects)
    items = await node.get(chain.hashes)
    await node.put(Chain(100, seed=1).objects)
    assert not any(await node.client.have(node.address, chain.hashes))
    for item in chain.objects:
        assert bytes(items[item.hash].data) == item.data


async def test_a_range_that_was_filled_anew_is_read_again_over_grpc(node, monkeypatch):
    """The node evicts between its answer and the copy: the worst moment there is."""
    chain = Chain(4)
    await open_memory(node)
    await node.put(chain.objects)
    copy, overwritten = SharedMemory.copy, []

    def copy_late(self, hash, offset, num_bytes):
        if not overwritten:
            overwritten.append(chain.hashes[0])
            node.store.table.evict(chain.hashes[:1])
            node.store.put(Chain(1, seed=1).objects[0])
            node.store.put(chain.objects[0])
        return copy(self, hash, offset, num_bytes)

    monkeypatch.setattr(SharedMemory, "copy", copy_late)
    ways = Ways()
    items = await node.get(chain.hashes)
    assert ways.counts() == (3, 1, 1)
    for item in chain.objects:
        assert bytes(items[item.hash].data) == item.data


async def test_a_range_whose_block_is_gone_is_a_miss(node, monkeypatch):
    chain = Chain(2)
    await open_memory(node)
    await node.put(chain.objects)
    copy = SharedMemory.copy

    def copy_late(self, hash, offset, num_bytes):
        node.store.table.evict(chain.hashes[:1])
        node.store.put(Chain(1, seed=1).objects[0])
        return copy(self, hash, offset, num_bytes)

    monkeypatch.setattr(SharedMemory, "copy", copy_late)
    items = await node.get(chain.hashes)
    assert [items[hash].kind == KIND_MISSING for hash in chain.hashes] == [True, False]


async def test_a_memory_that_cannot_be_opened_means_grpc_for_good(node, monkeypatch):
    chain = Chain(2)
    await node.put(chain.objects)
    refused = []

    def refuse(self, offer):
        refused.append(offer)
        raise PermissionError("of another user")

    monkeypatch.setattr(SharedMemory, "__init__", refuse)
    ways = Ways()
    for _ in range(3):
        items = await node.get(chain.hashes)
        assert all(bytes(items[item.hash].data) == item.data for item in chain.objects)
    assert ways.counts() == (0, 6, 0)
    assert len(refused) == 1, "a node is tried once"


async def test_an_offer_of_another_start_is_not_taken_for_this_one(node):
    """Process and descriptor numbers come again: the token tells."""
    chain = Chain(2)
    await node.put(chain.objects)
    arena = node.transfer.arena
    arena.offer = Offer(arena.offer.pid, arena.offer.fd, arena.offer.num_bytes, bytes(16))
    ways = Ways()
    for _ in range(2):
        assert len(await node.get(chain.hashes)) == 2
    assert ways.counts() == (0, 4, 0)


async def test_a_client_may_do_without(node):
    chain = Chain(2)
    await node.put(chain.objects)
    async with contextlib.aclosing(Channels()) as channels:
        client = KvClient(channels, shared_memory=False)
        ways = Ways()
        for _ in range(2):
            assert len([item async for item in client.get(node.address, chain.hashes, 0)]) == 2
        assert ways.counts() == (0, 4, 0)


async def test_blocks_outside_the_arena_come_beside_those_in_it(node, monkeypatch):
    chain = Chain(6)
    await open_memory(node)
    await node.put(chain.objects[:3])
    monkeypatch.setattr(node.transfer.arena, "_free", FullRanges())
    await node.put(chain.objects[3:])
    ways = Ways()
    items = await node.get(chain.hashes)
    assert ways.counts() == (3, 3, 0)
    assert all(bytes(items[item.hash].data) == item.data for item in chain.objects)


class FullRanges:
    def take(self, size):
        return None

    def give(self, begin, size):
        pass


class Mesh:
    """A node in a process of its own, on a port that stays."""

    def __init__(self, process):
        self.process = process

    def start(self):
        self.process.start()
        wait_until(self.process.healthy, "the node serves")

    @property
    def address(self):
        return self.process.address

    def kill(self):
        self.process.signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def mesh(tmp_path):
    with private_redis(tmp_path / "redis") as url:
        mesh = Mesh(Process("kvstore-0", MeshPlan(redis_url=url), tmp_path))
        mesh.start()
        try:
            yield mesh
        finally:
            mesh.kill()


def memory_of(pid):
    """Inode of a node's memory file."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        if FILE_NAME in os.readlink(path):
            return os.stat(path).st_ino
    pytest.fail(f"process {pid} has no such file")


def is_mapped(inode):
    """Says whether this process has a node's memory mapped."""
    with open("/proc/self/maps") as maps:
        return any(int(line.split()[4]) == inode for line in maps if FILE_NAME in line)


async def get_all(client, address, chain):
    return {item.hash: item async for item in client.get(address, chain.hashes, 0)}


async def test_a_node_that_is_killed_leaves_no_memory_behind(mesh):
    chain = Chain(10)
    memory, files = memory_of(mesh.process.pid), set(os.listdir("/dev/shm"))
    async with contextlib.aclosing(Channels()) as channels:
        client = KvClient(channels)
        await client.put(mesh.address, chain.objects)
        await get_all(client, mesh.address, chain)
        ways = Ways()
        items = await get_all(client, mesh.address, chain)
        assert ways.counts() == (10, 0, 0)
        assert is_mapped(memory)
        mesh.kill()
        async with asyncio.timeout(HANG_LIMIT_S):
            await until(lambda: not is_mapped(memory))
        assert all(bytes(items[item.hash].data) == item.data for item in chain.objects)
        with pytest.raises(WorkerLost):
            await get_all(client, mesh.address, chain)
    assert set(os.listdir("/dev/shm")) == files


async def test_the_successor_of_a_node_offers_its_own_memory(mesh):
    chain = Chain(3)
    async with contextlib.aclosing(Channels()) as channels:
        client = KvClient(channels)
        for _ in range(2):
            ways = Ways()
            await client.put(mesh.address, chain.objects)
            await get_all(client, mesh.address, chain)
            items = await get_all(client, mesh.address, chain)
            assert ways.counts() == (3, 3, 0)
            assert all(bytes(items[item.hash].data) == item.data for item in chain.objects)
            mesh.kill()
            mesh.start()


READER = """
import asyncio, sys
from support.kv import Chain
from flashmesh.kv_client import KvClient, READ
from flashmesh.rpc import Channels

async def main():
    chain, client = Chain(10), KvClient(Channels())
    for _ in range(2):
        stream = client.get(sys.argv[1], chain.hashes, 0)
        assert len([item async for item in stream]) == 10
    stream = client.get(sys.argv[1], chain.hashes, 0)
    await anext(stream)
    print(READ.labels("shared")._value.get(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_client_that_is_killed_costs_the_node_nothing(mesh):
    chain = Chain(10)
    async with contextlib.aclosing(Channels()) as channels:
        client = KvClient(channels)
        await client.put(mesh.address, chain.objects)
        files = len(os.listdir(f"/proc/{mesh.process.pid}/fd"))
        argv = [sys.executable, "-c", READER, mesh.address]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        reader = subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment)
        try:
            assert float(await asyncio.to_thread(reader.stdout.readline)) == 20
        finally:
            reader.kill()
            reader.wait()
            reader.stdout.close()
        async with asyncio.timeout(HANG_LIMIT_S):
            while len(os.listdir(f"/proc/{mesh.process.pid}/fd")) > files:
                await asyncio.sleep(0.01)
        assert len(await get_all(client, mesh.address, chain)) == 10
