"""How much of a bare stream's speed the block store keeps.

`kv.get_over_bare_grpc`: bytes a second of `KvClient.get` from a kvstore process, over those of a
plain grpc.aio stream of as many bytes from another process, in turns within one run; the median
of the pairs. Blocks have the size that V4.1-Flash gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashmesh.bench.bare_stream import BareStream, running_bare_stream
from flashmesh.bench.registry import Result, p50
from flashmesh.hashing import HASH_BYTES, BlockHash
from flashmesh.kv_client import KvClient
from flashmesh.launcher import MeshPlan, running_mesh
from flashmesh.objects import StoredObject, pack_block
from flashmesh.redis_server import private_redis
from flashmesh.rpc import Channels
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

NUM_PAIRS = 11
NUM_BLOCKS = 512
BLOCK_BYTES = 113_920
CHUNK_BLOCKS = 8
"""Bare chunks of 0.9 MiB: of sizes from 0.25 to 8 MiB, a bare stream is fastest near there."""

WARM_UP_PAIRS = 1
GRACE_S = 5.0
MEGA = 1e6

num_steps = 1 + 2 * (NUM_PAIRS + WARM_UP_PAIRS)


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Measures with one kvstore node and one bare server."""
    blocks = make_blocks(random.Random(0))
    with started(blocks) as (kvstore_address, bare):
        advance()
        rates = asyncio.run(measure(blocks, kvstore_address, bare, advance))
    yield p50("kv.get_over_bare_grpc", "x", [rate.store / rate.bare for rate in rates])
    yield p50("kv.get_mb_per_s", "MB/s", [rate.store / MEGA for rate in rates])


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of one pair."""

    store: float
    bare: float


def make_blocks(draw: random.Random) -> list[StoredObject]:
    """Makes the objects of one chain; names are drawn, as the node does not interpret them."""
    names = [BlockHash(draw.randbytes(HASH_BYTES)) for _ in range(NUM_BLOCKS)]
    return [
        pack_block(
            layout_id=bytes(16),
            hash=name,
            parent=names[index - 1] if index else bytes(HASH_BYTES),
            run=names[index - index % 64],
            index=index,
            tokens=[index] * BLOCK_TOKENS,
            payload=draw.randbytes(BLOCK_BYTES),
        )
        for index, name in enumerate(names)
    ]


@contextlib.contextmanager
def started(blocks: Sequence[StoredObject]) -> Iterator[tuple[str, BareStream]]:
    """Starts a kvstore node and a bare server of as many bytes."""
    # A mesh without workers: the node is the real program, found and watched like any other.
    settings = {"model": {"engine": "simulated"}}
    with (
        tempfile.TemporaryDirectory() as name,
        private_redis(Path(name) / "redis") as redis_url,
        running_mesh(
            MeshPlan(redis_url=redis_url, num_prefill=0, num_decode=0, settings=settings),
            Path(name),
            grace_s=GRACE_S,
        ) as mesh,
        running_bare_stream(
            Path(name),
            chunk_bytes=sum(len(item.data) for item in blocks[:CHUNK_BLOCKS]),
            num_chunks=NUM_BLOCKS // CHUNK_BLOCKS,
        ) as bare,
    ):
        yield mesh.processes["kvstore-0"].address, bare


async def measure(
    blocks: Sequence[StoredObject], address: str, bare: BareStream, advance: Callable[[], None]
) -> list[Rates]:
    """Reads everything from both, in turns."""
    num_bytes = sum(len(item.data) for item in blocks)
    names = [item.hash for item in blocks]
    rates = []
    async with contextlib.aclosing(Channels()) as channels:
        client = KvClient(channels)
        for begin in range(0, NUM_BLOCKS, 64):
            await client.put(address, blocks[begin : begin + 64])
        for _ in range(NUM_PAIRS + WARM_UP_PAIRS):
            bare_s = await timed(bare.read(channels), num_bytes)
            advance()
            store_s = await timed(sizes(client, address, names), num_bytes)
            advance()
            rates.append(Rates(store=num_bytes / store_s, bare=num_bytes / bare_s))
    return rates[WARM_UP_PAIRS:]


async def sizes(client: KvClient, address: str, names: Sequence[BlockHash]) -> AsyncIterator[int]:
    """Gets blocks and yields their sizes."""
    async for item in client.get(address, names, 0.0):
        yield len(item.data)


async def timed(chunks: AsyncIterator[int], expected_bytes: int) -> float:
    """Returns the seconds that reading took; both ways must bring the same bytes."""
    begin = time.perf_counter()
    total = 0
    async for size in chunks:
        total += size
    seconds = time.perf_counter() - begin
    assert total == expected_bytes
    return seconds
