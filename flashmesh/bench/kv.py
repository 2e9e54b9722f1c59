"""How much of what the machine can do the block store keeps.

Every figure is taken from a kvstore process, verification included, and compared in turns with a
yardstick of the same run; the median of the pairs. Blocks have the size that V4.1-Flash gives.

`kv.get_over_bare_grpc`, `kv.put_over_bare_grpc`: bytes a second of `KvClient.get` and `put` over
gRPC, over those of a plain grpc.aio stream of as many bytes in frames of its best size.
`kv.get_shm_over_memcpy`: `KvClient.get` through shared memory, 64 blocks at a time, over copying as
many blocks from memory to fresh memory; `_all` is one Get of 512. `kv.block_p50_us`,
`kv.block_p99_us`: a Get of one block over gRPC, from asking for it to having verified it.
`kv.tcp_mb_per_s` is context: a TCP stream of the same bytes into one buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flashmesh.bench.bare_stream import BareStream, running_bare_stream
from flashmesh.bench.registry import Result, p50
from flashmesh.hashing import HASH_BYTES, BlockHash
from flashmesh.kv_admin import KvAdmin
from flashmesh.kv_client import KvClient
from flashmesh.launcher import Mesh, MeshPlan
from flashmesh.objects import StoredObject, pack_block
from flashmesh.redis_server import private_redis
from flashmesh.rpc import Channels
from flashmesh.runs import RUN_BLOCKS
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

NUM_PAIRS = 11
NUM_BLOCKS = 512
NUM_SINGLE = 1000
BLOCK_BYTES = 113_920
CHUNK_BLOCKS = 8
"""Bare chunks of 0.9 MiB: of sizes from 0.25 to 8 MiB, a bare stream is fastest near there."""

WARM_UP_PAIRS = 2
GRACE_S = 5.0
SETTLE_S = 0.1
"""For the node to tell its index of an eviction, which is no part of the Put after it."""

MEGA = 1e6

num_steps = 1 + 4 * (NUM_PAIRS + WARM_UP_PAIRS) + 1


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Measures with one kvstore node and one bare server."""
    import uvloop

    blocks = make_blocks(random.Random(0))
    with started(blocks) as (address, bare):
        advance()
        # uvloop, as in every worker that reads and writes blocks.
        yield from uvloop.run(measure(blocks, address, bare, advance))


def make_blocks(draw: random.Random) -> list[StoredObject]:
    """Makes the objects of one chain; names are drawn, as nobody here interprets them."""
    names = [BlockHash(draw.randbytes(HASH_BYTES)) for _ in range(NUM_BLOCKS)]
    return [
        pack_block(
            layout_id=bytes(16),
            hash=name,
            parent=names[index - 1] if index else bytes(HASH_BYTES),
            run=names[index - index % RUN_BLOCKS],
            index=index,
            tokens=[index] * BLOCK_TOKENS,
            payload=draw.randbytes(BLOCK_BYTES),
        )
        for index, name in enumerate(names)
    ]


@contextlib.contextmanager
def started(blocks: Sequence[StoredObject]) -> Iterator[tuple[str, BareStream]]:
    """Starts a kvstore node and a bare server of as many bytes."""
    chunk_bytes = sum(len(item.data) for item in blocks[:CHUNK_BLOCKS])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_url = stack.enter_context(private_redis(folder / "redis"))
        # Of a mesh only the node: it is the real program, found and watched like any other.
        mesh = Mesh(MeshPlan(redis_url=redis_url), folder)
        stack.callback(mesh.stop, GRACE_S)
        mesh.start_process("kvstore-0")
        mesh.wait_healthy(["kvstore-0"])
        bare = stack.enter_context(
            running_bare_stream(
                folder, chunk_bytes=chunk_bytes, num_chunks=len(blocks) // CHUNK_BLOCKS
            )
        )
        yield mesh.processes["kvstore-0"].address, bare


async def measure(
    blocks: Sequence[StoredObject], address: str, bare: BareStream, advance: Callable[[], None]
) -> list[Result]:
    """Takes all figures."""
    async with contextlib.aclosing(Channels()) as channels:
        remote = Node(KvClient(channels, shared_memory=False), address, blocks)
        local = Node(KvClient(channels), address, blocks)
        results = await puts(remote, channels, bare, advance)
        results += await gets(remote, channels, bare, advance)
        results += await shared_gets(local, advance)
        results += await single_gets(remote, advance)
    tcp = [bare.num_bytes / timed_sync(bare.read_tcp) / MEGA for _ in range(NUM_PAIRS)]
    return [*results, p50("kv.tcp_mb_per_s", "MB/s", tcp)]


class Node:
    """A node as a client sees it, and the blocks that it holds or is to hold."""

    def __init__(self, client: KvClient, address: str, blocks: Sequence[StoredObject]) -> None:
        self.address = address
        self.blocks = blocks
        self.num_bytes = sum(len(item.data) for item in blocks)
        self._client = client
        self._hashes = [item.hash for item in blocks]

    async def put(self) -> None:
        """Puts all blocks, which must be new."""
        summary = await self._client.put(self.address, self.blocks)
        assert summary.num_stored == NUM_BLOCKS

    async def read(self, first: int, stop: int) -> None:
        """Reads blocks and keeps none."""
        num_bytes = 0
        async for item in self._client.get(self.address, self._hashes[first:stop], 0.0):
            num_bytes += len(item.data)
        assert num_bytes == (stop - first) * len(self.blocks[0].data)

    async def fetch(self, first: int, stop: int) -> list[StoredObject]:
        """Reads blocks and keeps them."""
        items = self._client.get(self.address, self._hashes[first:stop], 0.0)
        return [item async for item in items]


async def puts(
    remote: Node, channels: Channels, bare: BareStream, advance: Callable[[], None]
) -> list[Result]:
    """Puts everything, in turns with a bare stream; leaves the blocks stored."""
    objects = [item.data for item in remote.blocks]
    chunks = [
        b"".join(objects[begin : begin + CHUNK_BLOCKS])
        for begin in range(0, NUM_BLOCKS, CHUNK_BLOCKS)
    ]
    ratios, rates = [], []
    for _ in range(NUM_PAIRS + WARM_UP_PAIRS):
        await KvAdmin(channels).evict(remote.address, everything=True)
        await asyncio.sleep(SETTLE_S)
        bare_s = await timed(bare.write(channels, chunks))
        store_s = await timed(remote.put())
        ratios.append(bare_s / store_s)
        rates.append(remote.num_bytes / store_s / MEGA)
        advance()
    return [
        p50("kv.put_over_bare_grpc", "x", ratios[WARM_UP_PAIRS:]),
        p50("kv.put_mb_per_s", "MB/s", rates[WARM_UP_PAIRS:]),
    ]


async def gets(
    remote: Node, channels: Channels, bare: BareStream, advance: Callable[[], None]
) -> list[Result]:
    """Reads everything over gRPC, in turns with a bare stream."""
    ratios, rates = [], []
    for _ in range(NUM_PAIRS + WARM_UP_PAIRS):
        bare_s = await timed(bare.read(channels))
        store_s = await timed(remote.read(0, NUM_BLOCKS))
        ratios.append(bare_s / store_s)
        rates.append(remote.num_bytes / store_s / MEGA)
        advance()
    return [
        p50("kv.get_over_bare_grpc", "x", ratios[WARM_UP_PAIRS:]),
        p50("kv.get_mb_per_s", "MB/s", rates[WARM_UP_PAIRS:]),
    ]


async def shared_gets(local: Node, advance: Callable[[], None]) -> list[Result]:
    """Reads through shared memory, run by run and all at once, in turns with plain copies."""
    objects = [item.data for item in local.blocks]
    by_run, at_once, rates = [], [], []
    for _ in range(NUM_PAIRS + WARM_UP_PAIRS):
        ratios = []
        for begin in range(0, NUM_BLOCKS, RUN_BLOCKS):
            stop = begin + RUN_BLOCKS
            copy_s = timed_sync(partial(copied, objects[begin:stop]))
            ratios.append(copy_s / await timed(local.fetch(begin, stop)))
        by_run.append(statistics.median(ratios))
        advance()
        copy_s = timed_sync(partial(copied, objects))
        shared_s = await timed(local.fetch(0, NUM_BLOCKS))
        at_once.append(copy_s / shared_s)
        rates.append(local.num_bytes / shared_s / MEGA)
        advance()
    return [
        p50("kv.get_shm_over_memcpy", "x", by_run[WARM_UP_PAIRS:]),
        p50("kv.get_shm_over_memcpy_all", "x", at_once[WARM_UP_PAIRS:]),
        p50("kv.get_shm_mb_per_s", "MB/s", rates[WARM_UP_PAIRS:]),
    ]


async def single_gets(remote: Node, advance: Callable[[], None]) -> list[Result]:
    """Reads one block at a time over gRPC."""
    times_us = []
    for call in range(NUM_SINGLE):
        index = call % NUM_BLOCKS
        times_us.append(await timed(remote.read(index, index + 1)) * MEGA)
    advance()
    return [
        p50("kv.block_p50_us", "us", times_us),
        Result("kv.block_p99_us", statistics.quantiles(times_us, n=100)[98], "us", len(times_us)),
    ]


def copied(objects: Sequence[bytes | memoryview]) -> list[bytes]:
    """Copies objects one by one, as a reader has to."""
    return [bytes(memoryview(item)) for item in objects]


async def timed(work: Awaitable[object]) -> float:
    """Returns the seconds that something took."""
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin


def timed_sync(work: Callable[[], object]) -> float:
    """Returns the seconds that something took."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
