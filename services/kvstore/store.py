"""The node's state as its handlers see it: the block table, who waits, and the index behind them.

Owned by the event loop: every method is synchronous and short, so nothing changes between two
awaits of a handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import prometheus_client

from flashmesh.errors import CorruptBlock, Overloaded
from flashmesh.objects import KIND_BLOCK, StoredObject, parse_objects, verify
from flashmesh.services.kvstore.blocks import BlockTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashmesh.hashing import BlockHash
    from flashmesh.index import IndexWriter
    from flashmesh.services.kvstore.config import KvstoreConfig

MAX_WAITING = 4096
"""Gets at once; each holds its hashes, so their number is bounded."""

HITS = prometheus_client.Counter("flashmesh_kv_hits_total", "Blocks found by Get.")
MISSES = prometheus_client.Counter("flashmesh_kv_misses_total", "Blocks that Get did not find.")
STORED = prometheus_client.Counter("flashmesh_kv_stored_total", "Blocks that were new.")
KNOWN = prometheus_client.Counter("flashmesh_kv_known_total", "Blocks put again.")
EVICTED = prometheus_client.Counter("flashmesh_kv_evicted_total", "Blocks evicted or dropped.")
BAD = prometheus_client.Counter(
    "flashmesh_kv_verify_failures_total", "Objects that failed verification.", ["where"]
)
EXPIRED = prometheus_client.Counter("flashmesh_kv_leases_expired_total", "Leases that ran out.")
BYTES = prometheus_client.Gauge("flashmesh_kv_bytes", "Bytes by state.", ["state"])
BLOCKS = prometheus_client.Gauge("flashmesh_kv_blocks", "Stored blocks.")
LEASES = prometheus_client.Gauge("flashmesh_kv_leases", "Leases held.")
WAITING = prometheus_client.Gauge("flashmesh_kv_waiting_gets", "Gets that wait for a block.")


class Arrivals:
    """Blocks that came while somebody waited for them."""

    def __init__(self) -> None:
        self._hashes: list[BlockHash] = []
        self._event = asyncio.Event()
        self._stopped = False

    def add(self, hash: BlockHash) -> None:
        """Tells of a block."""
        self._hashes.append(hash)
        self._event.set()

    def stop(self) -> None:
        """Ends the wait, now and from now on."""
        self._stopped = True
        self._event.set()

    async def next(self, deadline: float) -> list[BlockHash]:
        """Waits for blocks and returns all that came since the last call; none at the end.

        Args:
            deadline: on the event loop's clock.
        """
        if self._stopped:
            return []
        try:
            async with asyncio.timeout_at(deadline):
                await self._event.wait()
        except TimeoutError:
            return []
        self._event.clear()
        hashes, self._hashes = self._hashes, []
        return hashes


class Store:
    """Blocks, waiters and claims of one node.

    Args:
        config: bounds.
    """

    def __init__(self, config: KvstoreConfig) -> None:
        self.table = BlockTable(
            capacity_bytes=config.memory_bytes,
            max_leased_bytes=int(config.memory_bytes * config.max_leased_share),
            clock=time.monotonic,
            on_evict=self._evicted,
        )
        self.index: IndexWriter | None = None
        self._waiting: defaultdict[BlockHash, set[Arrivals]] = defaultdict(set)
        self._all_waiting: set[Arrivals] = set()
        self._stopped = False
        self._export()

    @property
    def num_waiting(self) -> int:
        """Gets that wait."""
        return len(self._all_waiting)

    def inventory(self) -> Iterator[tuple[BlockHash, BlockHash]]:
        """Yields (run, block) of everything stored."""
        return iter([(item.run, item.hash) for item in self.table])

    def parse(self, frame: bytes) -> Iterator[StoredObject]:
        """Yields the objects of a frame.

        Raises:
            CorruptBlock: the frame is not a whole number of objects.
        """
        try:
            yield from parse_objects(frame)
        except CorruptBlock:
            BAD.labels("frame").inc()
            raise

    def put(self, item: StoredObject) -> bool:
        """Verifies and stores an object; says whether it is new.

        Raises:
            CorruptBlock: it is not intact, or no block.
            NoFreeBlocks: the node is full of leased blocks.
        """
        try:
            if item.kind != KIND_BLOCK:
                raise CorruptBlock(f"objects of kind {item.kind} cannot be stored")
            verify(item)
        except CorruptBlock:
            BAD.labels("put").inc()
            raise
        if item.hash in self.table:
            KNOWN.inc()
            return False
        # A copy: the frame that it came in holds other objects too.
        self.table.put(replace(item, data=bytes(item.data)))
        STORED.inc()
        if self.index is not None:
            self.index.publish(item.run, item.hash)
        for arrivals in self._waiting.get(item.hash, ()):
            arrivals.add(item.hash)
        return True

    @contextlib.contextmanager
    def waiting(self, hashes: Sequence[BlockHash]) -> Iterator[Arrivals]:
        """Collects arrivals of these blocks while the body runs.

        Raises:
            Overloaded: as many as may wait do.
        """
        if len(self._all_waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} Gets are waiting already")
        arrivals = Arrivals()
        if self._stopped:
            arrivals.stop()
        self._all_waiting.add(arrivals)
        for hash in hashes:
            self._waiting[hash].add(arrivals)
        try:
            yield arrivals
        finally:
            self._all_waiting.discard(arrivals)
            for hash in hashes:
                self._waiting[hash].discard(arrivals)
                if not self._waiting[hash]:
                    del self._waiting[hash]

    def stop_waiting(self) -> None:
        """Ends every wait, now and from now on: a block that is not here will not come here."""
        self._stopped = True
        for arrivals in self._all_waiting:
            arrivals.stop()

    def quarantine(self, hash: BlockHash) -> bool:
        """Checks a reported block; says whether it was bad and is gone."""
        bad = self.table.quarantine(hash)
        BAD.labels("report" if bad else "false_report").inc()
        return bad

    async def expire_leases(self) -> None:
        """Lets leases run out, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            EXPIRED.inc(self.table.expire())

    def _evicted(self, item: StoredObject) -> None:
        EVICTED.inc()
        if self.index is not None:
            self.index.unpublish(item.run, item.hash)

    def _export(self) -> None:
        stats = self.table.stats
        BYTES.labels("leased").set_function(lambda: stats().leased_bytes)
        BYTES.labels("evictable").set_function(lambda: stats().evictable_bytes)
        BYTES.labels("free").set_function(lambda: stats().free_bytes)
        BLOCKS.set_function(lambda: stats().num_blocks)
        LEASES.set_function(lambda: stats().num_leases)
        WAITING.set_function(lambda: self.num_waiting)
