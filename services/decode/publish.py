"""Blocks of prompt tails and outputs into the store, off the path of the tokens.

One task owns a bounded queue. A store that is slow, full or gone loses blocks, never a token: what is lost is counted
and computed again by whoever needs it.
"""

from __future__ import annotations

import asyncio
import logging

import prometheus_client

from flashmesh.errors import FlashmeshError
from flashmesh.stored_chain import StoredChain

log = logging.getLogger(__name__)

UNSTORED = prometheus_client.Counter(
    "flashmesh_decode_blocks_unstored_total", "Generated blocks that the store did not take."
)

Blocks = list[tuple[int, bytes]]


class Publisher:
    """Puts finished blocks, (index, payload) each, one batch after the other.

    Args:
        max_queued: most batches waiting; one more is dropped.
    """

    def __init__(self, *, max_queued: int = 256) -> None:
        self._queue = asyncio.Queue[tuple[StoredChain, Blocks]](max_queued)

    def offer(self, chain: StoredChain, blocks: Blocks) -> None:
        """Queues blocks; never waits."""
        try:
            self._queue.put_nowait((chain, blocks))
        except asyncio.QueueFull:
            UNSTORED.inc(len(blocks))

    async def flush(self) -> None:
        """Waits until everything queued was put or dropped."""
        await self._queue.join()

    async def run(self) -> None:
        """Puts until cancelled."""
        while True:
            chain, blocks = await self._queue.get()
            try:
                await chain.put(blocks)
            except FlashmeshError as error:
                UNSTORED.inc(len(blocks))
                log.warning("blocks not stored", extra={"error": str(error)})
            finally:
                self._queue.task_done()
