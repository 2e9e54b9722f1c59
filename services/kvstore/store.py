"""The node's state as its handlers see it: the block table, the disk, who waits, and the index.

Owned by the event loop: what is synchronous is short, so nothing changes between two awaits of a
handler. Only what may have to read the disk is asynchronous.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import prometheus_client

from flashmesh.errors import CorruptBlock, Overloaded
from flashmesh.objects import KIND_BLOCK, StoredObject, parse_objects, verify
from flashmesh.services.kvstore.blocks import BlockTable
from flashmesh.services.kvstore.disk import Disk, live_bytes_bound

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

    from flashmesh.hashing import BlockHash
    from flashmesh.index import IndexWriter
    from flashmesh.services.kvstore.config import KvstoreConfig
    from flashmesh.services.kvstore.segments import Files, Record
    from flashmesh.services.kvstore.tier import Block, TierStats

MAX_WAITING = 4096
"""Gets at once; each holds its hashes, so their number is bounded."""

HITS = prometheus_client.Counter("flashmesh_kv_hits_total", "Blocks found by Get.")
MISSES = prometheus_client.Counter(
    "flashmesh_kv_misses_total", "Blocks that Get did not find.", ["reason"]
)
STORED = prometheus_client.Counter("flashmesh_kv_stored_total", "Blocks that were new.")
KNOWN = prometheus_client.Counter("flashmesh_kv_known_total", "Blocks put again.")
EVICTED = prometheus_client.Counter("flashmesh_kv_evicted_total", "Blocks that left the node.")
BAD = prometheus_client.Counter(
    "flashmesh_kv_verify_failures_total", "Objects that failed verification.", ["where"]
)
EXPIRED = prometheus_client.Counter("flashmesh_kv_leases_expired_total", "Leases that ran out.")
BYTES = prometheus_client.Gauge("flashmesh_kv_bytes", "Bytes by state.", ["tier", "state"])
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
        config: bounds, and where the disk tier is.
        keep: makes the memory tier's own copy of an object's bytes.
        files: how the disk tier uses the file system, for tests.
        clock: seconds, for tests.

    Attributes:
        table: which blocks are here.
        disk: what is behind the table, if there is a disk tier.
        index: where blocks are published, once it is known.

    Raises:
        ConfigError: the folder of the disk tier cannot be used.
    """

    def __init__(
        self,
        config: KvstoreConfig,
        keep: Callable[[bytes | memoryview], bytes | memoryview] = bytes,
        *,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep = keep
        self.table = BlockTable(
            memory_bytes=config.memory_bytes,
            disk_bytes=live_bytes_bound(config.disk_bytes) if config.disk_path else 0,
            max_leased_share=config.max_leased_share,
            clock=clock,
            on_gone=self._gone,
        )
        self.disk: Disk | None = None
        if config.disk_path:
            self.disk = Disk(
                self.table,
                Path(config.disk_path).expanduser(),
                disk_bytes=config.disk_bytes,
                queue_bytes=config.disk_queue_bytes,
                on_restored=self._arrived,
                files=files,
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

    def inventory(self) -> list[BlockHash]:
        """Returns the names of everything stored."""
        return self.table.hashes()

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

    def put(self, item: StoredObject, *, same_request: bool = False) -> bool:
        """Verifies and stores an object; says whether it is new.

        Args:
            item: the object; its bytes are copied.
            same_request: see `BlockTable.put`.

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
        item = item.held_in(self._keep(item.data))
        self.table.put(item, same_request=same_request)
        STORED.inc()
        self._arrived(item)
        if self.disk is not None:
            self.disk.enqueue(item)
        return True

    async def read(
        self, hashes: Iterable[BlockHash], max_bytes: int
    ) -> AsyncGenerator[list[StoredObject], None]:
        """Yields what is stored of these blocks, in their order, in batches.

        A batch is put together when it is asked for: a slow reader costs one. What has to come from
        disk is verified and kept in memory where there is room. Reading does not count as a use (see
        `BlockTable.touch`).

        Args:
            hashes: absent blocks are left out.
            max_bytes: bound on a batch; an object that is larger comes alone.
        """
        batch: list[BlockHash] = []
        num_bytes = 0
        for hash in hashes:
            block = self.table.find(hash)
            if block is None:
                continue
            if batch and num_bytes + block.num_bytes > max_bytes:
                if objects := await self._load(batch):
                    yield objects
                batch, num_bytes = [], 0
            batch.append(hash)
            num_bytes += block.num_bytes
        if objects := await self._load(batch):
            yield objects

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

    async def quarantine(self, hash: BlockHash, where: str = "report") -> bool:
        """Checks this node's copies of a block; says whether one was bad and is gone.

        Args:
            hash: unknown ones are not bad.
            where: who doubts it, a label of the metric.
        """
        bad = self.table.quarantine(hash)
        block = self.table.find(hash)
        if self.disk is not None and block is not None and block.segment is not None:
            bad = hash not in await self.disk.read([hash])
        if bad:
            BAD.labels(where).inc()
        elif where == "report":
            BAD.labels("false_report").inc()
        return bad

    async def run(self) -> None:
        """Lets leases run out and works for the disk tier, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.expire_leases())
            if self.disk is not None:
                group.create_task(self.disk.run())

    async def flush(self) -> None:
        """Waits until everything that can be on disk is."""
        if self.disk is not None:
            await self.disk.flush()

    async def aclose(self) -> None:
        """Lets another process have the disk tier's folder."""
        if self.disk is not None:
            self.disk.close()

    async def expire_leases(self) -> None:
        """Lets leases run out, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            EXPIRED.inc(self.table.expire())

    async def _load(self, hashes: Sequence[BlockHash]) -> list[StoredObject]:
        """Returns what is left of these blocks, from memory or disk; does not wait without need."""
        objects = [self.table.get(hash) for hash in hashes]
        absent = [hash for hash, item in zip(hashes, objects, strict=True) if item is None]
        if absent and self.disk is not None:
            found = await self.disk.read(absent)
            for place, hash in enumerate(hashes):
                if hash in found:
                    objects[place] = self._promote(found[hash])
        return [item for item in objects if item is not None]

    def _promote(self, item: StoredObject) -> StoredObject:
        kept = item.held_in(self._keep(item.data))
        self.table.keep(kept)
        return kept

    def _arrived(self, item: StoredObject | Record) -> None:
        if self.index is not None:
            self.index.publish(item.hash)
        for arrivals in self._waiting.get(item.hash, ()):
            arrivals.add(item.hash)

    def _gone(self, block: Block) -> None:
        EVICTED.inc()
        if self.index is not None:
            self.index.unpublish(block.hash)

    def _export(self) -> None:
        stats = self.table.stats
        _export_tier("memory", lambda: stats().memory)
        _export_tier("disk", lambda: stats().disk)
        BLOCKS.set_function(lambda: stats().num_blocks)
        LEASES.set_function(lambda: stats().num_leases)
        WAITING.set_function(lambda: self.num_waiting)


def _export_tier(name: str, stats: Callable[[], TierStats]) -> None:
    BYTES.labels(name, "leased").set_function(lambda: stats().leased_bytes)
    BYTES.labels(name, "evictable").set_function(lambda: stats().evictable_bytes)
    BYTES.labels(name, "free").set_function(lambda: stats().free_bytes)
