"""Blocks of a chain, from all the nodes that hold them at once.

A chain's runs lie on several nodes. Each node gets one call for all its blocks; a few calls run at a time and hand over
through a bounded queue, so a slow reader holds all nodes back. Every block is checked to be the one that was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import prometheus_client

from flashmesh.errors import BlockNotFound, CorruptBlock, FlashmeshError
from flashmesh.objects import KIND_MISSING, StoredObject, check_is
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from flashmesh.hashing import BlockHash
    from flashmesh.kv_client import KvClient
    from flashmesh.runs import Place

FOREIGN = prometheus_client.Counter(
    "flashmesh_kv_client_foreign_total", "Intact blocks that were not the ones asked for."
)
Indexed = tuple[int, StoredObject]

MAX_NODES = 8
"""Nodes that are read at a time."""

MAX_QUEUED = 16
"""Blocks that wait for the reader beside those in the nodes' own streams."""


class BlockMissing(BlockNotFound):
    """A block did not come; `index` is its place in the chain."""

    def __init__(self, index: int, node_id: str) -> None:
        super().__init__(f"block {index} of the prompt is not on kvstore node {node_id}")
        self.index = index


async def fetch_blocks(
    client: KvClient,
    places: Sequence[Place],
    hashes: Sequence[BlockHash],
    tokens: Sequence[int],
    layout_id: bytes,
    first: int,
    stop: int,
    wait_s: float,
) -> AsyncGenerator[tuple[int, StoredObject], None]:
    """Yields verified blocks [first, stop) of a chain in any order.

    Args:
        client: the way to the nodes.
        places: where the chain's blocks live.
        hashes, tokens: of the whole chain.
        layout_id: that the payloads must have.
        first, stop: block indices.
        wait_s: how long to wait in all for blocks that are not stored yet.

    Raises:
        BlockMissing: names the first block that did not come, when all others have.
        CorruptBlock: a block is not what it claims; it was reported to its node.
    """
    deadline = asyncio.get_running_loop().time() + wait_s

    async def of_node(address: str, indices: list[int]) -> AsyncGenerator[Indexed, None]:
        index_of = {hashes[index]: index for index in indices}
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        async with contextlib.aclosing(client.get(address, list(index_of), left_s)) as items:
            async for item in items:
                index = index_of[item.hash]
                if item.kind != KIND_MISSING:
                    block = tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                    try:
                        check_is(
                            item,
                            hash=hashes[index],
                            layout_id=layout_id,
                            index=index,
                            tokens=block,
                        )
                    except CorruptBlock as error:
                        FOREIGN.inc()
                        with contextlib.suppress(FlashmeshError):
                            await client.report(address, item.hash, str(error))
                        raise
                yield index, item

    nodes = _indices_by_address(places, first, stop)
    missing = []
    streams = [of_node(address, indices) for address, indices in nodes.items()]
    # One node is the usual case, and a queue would cost it a tenth of its speed.
    merged = streams[0] if len(streams) == 1 else _merged(streams)
    async with contextlib.aclosing(merged) as blocks:
        async for index, item in blocks:
            if item.kind == KIND_MISSING:
                missing.append(index)
            else:
                yield index, item
    if missing:
        index = min(missing)
        raise BlockMissing(index, _place_of(index, places).node_id)


def _indices_by_address(places: Sequence[Place], first: int, stop: int) -> dict[str, list[int]]:
    indices: dict[str, list[int]] = {}
    for place in places:
        begin, end = max(first, place.first_block), min(stop, place.first_block + place.num_blocks)
        if begin < end:
            indices.setdefault(place.address, []).extend(range(begin, end))
    return indices


def _place_of(index: int, places: Sequence[Place]) -> Place:
    return next(p for p in places if p.first_block <= index < p.first_block + p.num_blocks)


async def _merged(
    streams: Sequence[AsyncGenerator[Indexed, None]],
) -> AsyncGenerator[Indexed, None]:
    """Yields what the streams yield, as it comes; the first failure of one ends them all."""
    queue = asyncio.Queue[Indexed | Exception | None](MAX_QUEUED)
    free = asyncio.Semaphore(MAX_NODES)

    async def read(stream: AsyncGenerator[Indexed, None]) -> None:
        try:
            async with free, contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    readers = [asyncio.ensure_future(read(stream)) for stream in streams]
    try:
        num_open = len(readers)
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case item:
                    yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
