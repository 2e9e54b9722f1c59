"""What a real node still has after it, or Redis, or both were stopped or killed.

Payloads are small and memory holds 50 blocks, so nearly everything is read from disk.
"""

import asyncio
import contextlib
import random
import signal
import subprocess
import tempfile

import pytest
from support.kv import Chain, running_node
from support.waiting import wait_until

from flashmesh.errors import WorkerLost
from flashmesh.index import IndexReader
from flashmesh.kv_client import KvClient
from flashmesh.launcher import MeshPlan, Process
from flashmesh.objects import KIND_MISSING
from flashmesh.redis_client import connect
from flashmesh.redis_server import find_server
from flashmesh.registry import Registry
from flashmesh.rpc import Channels
from flashmesh.runs import RUN_BLOCKS, place_run
from flashmesh.services.kvstore.handover import hand_over

HANG_LIMIT_S = 60.0
PAYLOAD_BYTES = 64
OBJECT_BYTES = 120 + PAYLOAD_BYTES
NUM_SESSIONS = 500


class RedisServer:
    """A Redis that comes back at the same address, empty."""

    def __init__(self, folder):
        self.url = f"unix://{folder}/redis.sock"
        self._argv = [find_server(), "--port", "0", "--unixsocket", f"{folder}/redis.sock"]
        self._argv += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
        self.start()

    def start(self):
        self._process = subprocess.Popen(
            self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self):
        self._process.kill()
        self._process.wait()


class Node:
    """A kvstore process, and what others see of it."""

    def __init__(self, name, plan, folder, redis, channels):
        self.name = name
        self.process = Process(name, plan, folder)
        self.client = KvClient(channels)
        self._redis = redis

    def start(self):
        self.process.start()
        wait_until(self.process.healthy, f"{self.name} serves")

    def end(self, number):
        self.process.signal(number)
        return self.process.wait(HANG_LIMIT_S)

    async def record(self):
        """Waits for the registry to have this life's record."""
        registry = Registry(self._redis, "local")
        async with asyncio.timeout(HANG_LIMIT_S):
            while True:
                with contextlib.suppress(OSError, ConnectionError):
                    for record in await registry.list():
                        if record.address == self.process.address:
                            return record
                await asyncio.sleep(0.01)

    async def put(self, objects):
        return await self.client.put(self.process.address, objects)

    async def read(self, chain):
        """Returns how many blocks of a chain are there; each equals what was put."""
        wanted = {item.hash: item.data for item in chain.objects}
        hits = 0
        async for item in self.client.get(self.process.address, chain.hashes, 0):
            if item.kind != KIND_MISSING:
                assert bytes(item.data) == wanted[item.hash]
                hits += 1
        return hits

    async def scanned(self):
        """Waits until the disk has been read; a node serves before."""
        async with asyncio.timeout(HANG_LIMIT_S):
            log = self.process.log_path
            while log.read_text().count("disk scanned") < self.process.num_starts:
                await asyncio.sleep(0.01)

    async def is_found(self, chain):
        """Waits until the index sends a router to this life of the node for every block."""
        owners = [(await self.record()).epoch] * len(range(0, len(chain.hashes), RUN_BLOCKS))
        async with asyncio.timeout(HANG_LIMIT_S):
            while await self._longest_prefix(chain.hashes, owners) < len(chain.hashes):
                await asyncio.sleep(0.01)

    async def _longest_prefix(self, hashes, owners):
        return await IndexReader(self._redis, "local").longest_prefix(hashes, owners)


@contextlib.asynccontextmanager
async def two_nodes(folder, *, memory_blocks=50, **plan):
    """A Redis and two nodes, none of which has started."""
    settings = {
        "mesh": {"heartbeat_ttl_s": 30.0, "drain_grace_s": HANG_LIMIT_S},
        "kvstore": {"memory_bytes": memory_blocks * OBJECT_BYTES, "disk_bytes": 64 * 1024 * 1024},
        "kvstore-0": {"disk_path": folder / "disk-0"},
        "kvstore-1": {"disk_path": folder / "disk-1"},
    }
    # A socket's path may have about 100 bytes; test folders are longer.
    with tempfile.TemporaryDirectory(prefix="flashmesh-redis-") as short:
        redis = RedisServer(short)
        plan = MeshPlan(redis_url=redis.url, settings=settings, **plan)
        async with (
            contextlib.aclosing(connect(redis.url)) as client,
            contextlib.aclosing(Channels()) as channels,
        ):
            nodes = [Node(f"kvstore-{i}", plan, folder, client, channels) for i in range(2)]
            try:
                yield redis, *nodes
            finally:
                for node in nodes:
                    if node.process.alive:
                        node.end(signal.SIGKILL)
                redis.kill()


def session(num_blocks, seed):
    chain = Chain(num_blocks, seed=seed, payload_bytes=PAYLOAD_BYTES)
    del chain.tokens  # of all sessions together they would take gigabytes
    return chain


@pytest.mark.slow
async def test_sessions_are_read_right_or_missed_after_any_restart(tmp_path):
    draw = random.Random(4).random
    lengths = [1, 1025, *(round(1025 ** draw() ** 3) for _ in range(NUM_SESSIONS - 3)), 10]
    sessions = [session(length, seed) for seed, length in enumerate(lengths)]
    async with two_nodes(tmp_path) as (redis, node, _):
        node.start()
        for chain in sessions:
            await node.put(chain.objects)

        async def hits():
            return sum([await node.read(chain) for chain in sessions])

        assert await hits() > 50
        node.end(signal.SIGTERM)
        node.start()
        await node.scanned()
        after_stop = await hits()
        assert after_stop > 50
        await node.is_found(sessions[-1])
        redis.kill()
        redis.start()
        assert await hits() == after_stop
        await node.is_found(sessions[-1])
        node.end(signal.SIGKILL)
        redis.kill()
        redis.start()
        node.start()
        await node.scanned()
        assert await hits() == after_stop
        await node.is_found(sessions[-1])


async def test_a_node_killed_between_data_and_index_publishes_what_is_on_its_disk(tmp_path):
    chain = session(70, 0)
    async with two_nodes(tmp_path) as (redis, node, _):
        node.start()
        redis.kill()
        await node.put(chain.objects)
        wait_until(lambda: on_disk(tmp_path / "disk-0") == 70 * OBJECT_BYTES, "all is written")
        node.end(signal.SIGKILL)
        redis.start()
        node.start()
        await node.is_found(chain)
        assert await node.read(chain) == 70


async def test_a_node_killed_while_it_writes_has_whole_blocks_only(tmp_path):
    chain = session(5000, 0)
    async with two_nodes(tmp_path) as (_, node, _other):
        node.start()
        putting = asyncio.create_task(node.put(chain.objects))
        async with asyncio.timeout(HANG_LIMIT_S):
            while not on_disk(tmp_path / "disk-0"):
                await asyncio.sleep(0)
        node.end(signal.SIGKILL)
        with contextlib.suppress(WorkerLost):
            await putting
        node.start()
        await node.scanned()
        assert 0 < await node.read(chain) <= on_disk(tmp_path / "disk-0") // OBJECT_BYTES


def on_disk(folder):
    return sum(path.stat().st_size for path in folder.glob("*.blocks"))


async def test_a_restarted_node_does_not_know_its_leases_and_takes_them_again(tmp_path):
    chain = session(20, 0)
    async with two_nodes(tmp_path) as (_, node, _other):
        node.start()
        await node.put(chain.objects)
        await node.client.lease(node.process.address, "a", chain.hashes, 30)
        node.end(signal.SIGTERM)
        node.start()
        await node.scanned()
        assert await node.client.renew(node.process.address, ["a"], 30) == ["a"]
        await node.client.lease(node.process.address, "a", chain.hashes, 30)
        await node.put(session(300, 1).objects)
        assert await node.read(chain) == 20
        assert await node.client.renew(node.process.address, ["a"] * 10_000, 30) == []


async def test_a_node_that_stops_hands_its_leased_runs_to_the_next(tmp_path):
    chain, other = session(130, 0), session(1, 1)
    async with two_nodes(tmp_path, memory_blocks=400) as (_, first, second):
        first.start()
        second.start()
        await second.record()
        await first.put(chain.objects)
        await second.put(other.objects)  # it learns how large blocks are
        await first.client.lease(first.process.address, "a", chain.hashes[:100], 30)
        await first.client.lease(first.process.address, "b", chain.hashes[60:100], 30)
        assert first.end(signal.SIGTERM) == 0
        have = await second.client.have(second.process.address, chain.hashes)
        assert have == [True] * 100 + [False] * 30
        assert await second.read(chain) == 100
        assert await second.client.renew(second.process.address, ["a", "b"], 30) == []
        await second.put(session(500, 2).objects)
        assert await second.read(chain) == 100, "they are leased there"


async def test_a_lost_node_does_not_keep_the_others_from_their_share():
    chain = Chain(5 * RUN_BLOCKS)
    async with running_node() as node, running_node() as other:
        await node.put(chain.objects)
        await other.put(Chain(1, seed=1).objects)
        await node.client.lease(node.address, "a", chain.hashes, 30)
        nodes = [("lost", "127.0.0.1:1"), ("other", other.address)]
        await hand_over(node.store, node.client, nodes)
        assert await other.client.have(other.address, chain.hashes) == [
            place_run(item.run, nodes)[0] == "other" for item in chain.objects
        ]
        assert 0 < (await other.stat()).num_blocks < 1 + len(chain.hashes)


async def test_a_node_alone_stops_with_leases_and_finds_its_blocks_again(tmp_path):
    chain = session(20, 0)
    async with two_nodes(tmp_path) as (_, node, _other):
        node.start()
        await node.put(chain.objects)
        await node.client.lease(node.process.address, "a", chain.hashes, 30)
        assert node.end(signal.SIGTERM) == 0
        node.start()
        await node.scanned()
        assert await node.read(chain) == 20


async def test_a_node_without_a_name_keeps_the_one_it_drew(tmp_path):
    async with two_nodes(tmp_path, name_workers=False) as (_, node, other):
        ids = []
        for started in (node, other, node):
            started.start()
            ids.append((await started.record()).id)
            started.end(signal.SIGKILL)
    assert ids[0] == ids[2] != ids[1]
