"""What a look into the index costs, and a claim in it, on a private server.

`index.lookup_round_trips` and `index.lookup_1m_tokens_ms`: a prompt of a million tokens, all of it
stored by four nodes, asked by a client that has seen nothing before. `index.bytes_per_block`: the
server's memory for a node's claims, made batch by batch as blocks come, over the number of blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis.asyncio

from flashmesh.bench.registry import Result, p50
from flashmesh.hashing import HASH_BYTES, BlockHash
from flashmesh.index import IndexReader, IndexWriter
from flashmesh.lifecycle import background
from flashmesh.redis_client import connect
from flashmesh.redis_server import private_redis
from flashmesh.runs import RUN_BLOCKS, place_run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

MESH = "bench"
PROMPT_BLOCKS = 7813
NODES = [(f"kvstore-{number}", "") for number in range(4)]
NUM_LOOKUPS = 51
NUM_CLAIMS = 100_000
CLAIMS_AT_ONCE = 500
MS_PER_S = 1000
MS_PER_US = 1e-3

num_steps = 2 + NUM_LOOKUPS


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Measures on a server of its own."""
    with tempfile.TemporaryDirectory() as name, private_redis(Path(name)) as url:
        yield from asyncio.run(measure(url, random.Random(0), advance))


async def measure(url: str, draw: random.Random, advance: Callable[[], None]) -> list[Result]:
    """Measures memory first, then lookups."""
    async with counted(url) as (client, traffic):
        bytes_per_block = await claim(client, draw, NUM_CLAIMS)
        advance()
        await client.flushall()
        hashes, owners = await publish_prompt(client, draw)
        advance()
        begin = await _server_us(client)
        round_trips, seconds = [], []
        for _ in range(NUM_LOOKUPS):
            traffic.num_round_trips = 0
            started = time.perf_counter()
            found = await IndexReader(client, MESH).longest_prefix(hashes, owners)
            seconds.append(time.perf_counter() - started)
            round_trips.append(traffic.num_round_trips)
            assert found == PROMPT_BLOCKS
            advance()
        server_ms = (await _server_us(client) - begin) / NUM_LOOKUPS * MS_PER_US
    return [
        Result("index.lookup_round_trips", max(round_trips), "", NUM_LOOKUPS),
        p50("index.lookup_1m_tokens_ms", "ms", [s * MS_PER_S for s in seconds]),
        Result("index.lookup_1m_tokens_server_ms", server_ms, "ms", NUM_LOOKUPS),
        Result("index.bytes_per_block", bytes_per_block, "B", NUM_CLAIMS),
    ]


async def claim(client: redis.asyncio.Redis, draw: random.Random, num_blocks: int) -> float:
    """Publishes as a node that fills up; returns the bytes that the server needs for a block."""
    stored: list[BlockHash] = []
    writer = IndexWriter(client, MESH, draw.randbytes(HASH_BYTES), lambda: stored)
    await client.ping()
    before = await _used_bytes(client)
    async with background(writer.run()):
        while len(stored) < num_blocks:
            for hash in draw_hashes(draw, CLAIMS_AT_ONCE):
                stored.append(hash)
                writer.publish(hash)
            await writer.written()
    return (await _used_bytes(client) - before) / num_blocks


async def publish_prompt(
    client: redis.asyncio.Redis, draw: random.Random
) -> tuple[list[BlockHash], list[str]]:
    """Stores a prompt's runs where they are placed; returns its blocks and the owners' epochs."""
    hashes = draw_hashes(draw, PROMPT_BLOCKS)
    epochs = {node: draw.randbytes(HASH_BYTES) for node in NODES}
    runs = range(0, PROMPT_BLOCKS, RUN_BLOCKS)
    owners = [epochs[place_run(hashes[first], NODES)] for first in runs]
    for epoch in epochs.values():
        share = [
            hash
            for first, owner in zip(runs, owners, strict=True)
            for hash in hashes[first : first + RUN_BLOCKS]
            if owner == epoch
        ]
        writer = IndexWriter(client, MESH, epoch, partial(list, share))
        async with background(writer.run()):
            await writer.written()
    return hashes, [owner.hex() for owner in owners]


def draw_hashes(draw: random.Random, count: int) -> list[BlockHash]:
    """Draws names: hashes are uniform, so nothing else about them matters here."""
    return [BlockHash(draw.randbytes(HASH_BYTES)) for _ in range(count)]


@dataclass(slots=True)
class Traffic:
    """What a client sent: how often, waiting for an answer each time, and how much."""

    num_round_trips: int = 0
    num_bytes: int = 0


class _CountedConnection(redis.asyncio.UnixDomainSocketConnection):
    def __init__(self, *, traffic: Traffic, **options: Any) -> None:
        super().__init__(**options)
        self._traffic = traffic

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        parts = [command] if isinstance(command, bytes | str) else list(command)
        self._traffic.num_round_trips += 1
        self._traffic.num_bytes += sum(map(len, parts))
        await super().send_packed_command(command, check_health)


@contextlib.asynccontextmanager
async def counted(url: str) -> AsyncIterator[tuple[redis.asyncio.Redis, Traffic]]:
    """Opens a client of a server on a Unix socket, and counts from its first command on."""
    traffic = Traffic()
    async with contextlib.aclosing(connect(url)) as client:
        client.connection_pool.connection_class = _CountedConnection
        client.connection_pool.connection_kwargs["traffic"] = traffic
        await client.ping()
        traffic.num_round_trips = traffic.num_bytes = 0
        yield client, traffic


async def _used_bytes(client: redis.asyncio.Redis) -> int:
    return int((await client.info("memory"))["used_memory"])


async def _server_us(client: redis.asyncio.Redis) -> float:
    return float((await client.info("commandstats")).get("cmdstat_eval", {"usec": 0})["usec"])
