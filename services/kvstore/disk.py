"""The disk tier: blocks are written behind, read back verified, and found again after a restart.

The event loop decides and the table accounts; threads only move bytes. One task takes the queue and
runs one job at a time on a writer thread, so what it decides between two jobs cannot be overtaken;
reads run on a few threads beside it. Whatever fails here is a miss, and memory goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import prometheus_client

from flashmesh.services.kvstore.disk_jobs import BATCH_BYTES, DiskJobs, Place, first_batch
from flashmesh.services.kvstore.segments import Files, SegmentLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from flashmesh.hashing import BlockHash
    from flashmesh.objects import StoredObject
    from flashmesh.services.kvstore.blocks import BlockTable
    from flashmesh.services.kvstore.segments import Record, Segment

log = logging.getLogger(__name__)

Argument = TypeVar("Argument")
Result = TypeVar("Result")

MAX_SEGMENT_BYTES = 64 * 1024 * 1024
MIN_SEGMENTS = 16
NUM_READERS = 4

WRITTEN = prometheus_client.Counter("flashmesh_kv_disk_written_total", "Blocks written to disk.")
SKIPPED = prometheus_client.Counter(
    "flashmesh_kv_disk_skipped_total", "Blocks that stayed in memory only.", ["reason"]
)
RESTORED = prometheus_client.Counter(
    "flashmesh_kv_disk_restored_total", "Blocks found on disk after a restart."
)
DAMAGED = prometheus_client.Counter(
    "flashmesh_kv_disk_damaged_total", "Records that could not be read or were not intact."
)
COMPACTED = prometheus_client.Counter(
    "flashmesh_kv_disk_compacted_total", "Blocks moved so that a segment could be deleted."
)
FILE_BYTES = prometheus_client.Gauge("flashmesh_kv_disk_file_bytes", "Bytes of all segments.")
FAILING = prometheus_client.Gauge("flashmesh_kv_disk_failing", "1 after a write that failed.")


def live_bytes_bound(disk_bytes: int) -> int:
    """Returns how many of `disk_bytes` may be live.

    The rest is dead records and the segment that compaction writes into. Three quarters: then the
    segment with the most dead bytes has a fifth of them or more, and few live bytes are moved.
    """
    return disk_bytes * 3 // 4


class Disk:
    """The disk tier of a table.

    Args:
        table: accounts for `live_bytes_bound(disk_bytes)`.
        folder: for the segments.
        disk_bytes: bound on the bytes of all segments.
        queue_bytes: bound on the bytes that wait to be written.
        on_restored: told every block that was found.
        files: how the file system is used.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self,
        table: BlockTable,
        folder: Path,
        *,
        disk_bytes: int,
        queue_bytes: int,
        on_restored: Callable[[Record], None],
        files: Files | None = None,
    ) -> None:
        self._table = table
        self._segment_bytes = min(MAX_SEGMENT_BYTES, disk_bytes // MIN_SEGMENTS)
        self._log = SegmentLog(folder, self._segment_bytes, files or Files())
        self._jobs = DiskJobs(self._log)
        self._disk_bytes = disk_bytes
        self._queue_bytes = queue_bytes
        self._on_restored = on_restored
        self._queue: deque[StoredObject] = deque()
        self._queued_bytes = 0
        self._unscanned = list(self._log.segments)
        self._failing = False
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-read")
        FILE_BYTES.set_function(lambda: self._log.num_bytes)

    @property
    def num_unscanned(self) -> int:
        """Segments of earlier processes whose blocks are still to be found."""
        return len(self._unscanned)

    @property
    def file_bytes(self) -> int:
        """Bytes of all segments."""
        return self._log.num_bytes

    def enqueue(self, item: StoredObject) -> None:
        """Has a block of the memory tier written, soon; where that cannot be, it stays there only."""
        num_bytes = len(item.data)
        if num_bytes > self._segment_bytes:
            SKIPPED.labels("size").inc()
        elif self._queued_bytes + num_bytes > self._queue_bytes:
            SKIPPED.labels("queue").inc()
        elif not self._table.queue(item):
            SKIPPED.labels("leases").inc()
        else:
            self._queue.append(item)
            self._queued_bytes += num_bytes
            self._flushed.clear()
            self._wake.set()

    async def flush(self) -> None:
        """Waits until nothing is queued."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Finds what earlier processes wrote and writes what is queued, until cancelled.

        New blocks are written between the segments of the scan, and served all the time.
        """
        num_segments = len(self._unscanned)
        while self._unscanned:
            await self._scan_next()
            await self._write_queued()
        num_blocks = self._table.stats().disk.num_blocks
        log.info("disk scanned", extra={"num_segments": num_segments, "num_blocks": num_blocks})
        await self._shrink()
        while True:
            await self._write_queued()
            await self._wake.wait()
            self._wake.clear()

    async def read(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, StoredObject]:
        """Returns blocks that are written, verified; those that cannot be read are given up."""
        found: dict[BlockHash, StoredObject] = {}
        wanted = self._places(hashes)
        while wanted:
            parts = [part for i in range(NUM_READERS) if (part := wanted[i::NUM_READERS])]
            jobs = [self._run(self._readers, self._jobs.read, part) for part in parts]
            moved = []
            for place, item in zip(
                itertools.chain(*parts), itertools.chain(*await asyncio.gather(*jobs)), strict=True
            ):
                if item is not None:
                    found[place.hash] = item
                elif self._is_there(place):
                    self._give_up(place)
                else:
                    moved.append(place.hash)
            wanted = self._places(moved)
        return found

    def close(self) -> None:
        """Ends the threads and lets another process have the folder; what is queued is lost."""
        self._writer.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        self._log.close()

    async def _write_queued(self) -> None:
        while self._queue:
            batch = []
            num_bytes = taken_bytes = 0
            while self._queue and num_bytes < min(BATCH_BYTES, self._segment_bytes):
                item = self._queue.popleft()
                taken_bytes += len(item.data)
                block = self._table.find(item.hash)
                if block is not None and block.queued is item:  # else it was evicted meanwhile
                    batch.append(item)
                    num_bytes += len(item.data)
            if batch:
                await self._write(batch, num_bytes)
            self._queued_bytes -= taken_bytes
        self._flushed.set()

    async def _write(self, batch: Sequence[StoredObject], num_bytes: int) -> None:
        try:
            await self._make_room(num_bytes)
            places, error = await self._run(self._writer, self._jobs.append, batch)
        except OSError as caught:
            places, error = [], caught
        for item, place in zip(batch, places, strict=False):
            self._table.written(item, place.segment, place.offset)
        for item in batch[len(places) :]:
            self._table.lose(item.hash, item)
        WRITTEN.inc(len(places))
        SKIPPED.labels("error").inc(len(batch) - len(places))
        self._note(error)

    async def _make_room(self, num_bytes: int) -> None:
        """Compacts until so many more bytes fit, with a segment to spare for the next compaction.

        There is always a segment with dead bytes to gain, for `num_bytes` is at most two segments,
        and with the spare one and what may be live that leaves one of sixteen.

        Raises:
            OSError: a file could not be written or deleted.
        """
        while self._log.num_bytes + num_bytes > self._disk_bytes - self._segment_bytes:
            if self._unscanned:
                await self._scan_next()
            else:
                await self._compact(max(self._log.segments, key=lambda item: item.dead_bytes))

    async def _shrink(self) -> None:
        """Obeys a bound that is smaller than it was in an earlier process."""
        try:
            await self._make_room(0)
        except OSError as error:
            self._note(error)

    async def _compact(self, segment: Segment) -> None:
        """Moves what is live in a segment behind the newest records, and deletes it."""
        self._log.seal(segment)
        places = self._places(sorted(segment.offsets, key=segment.offsets.__getitem__))
        while places:
            part = first_batch(places)
            copies, error = await self._run(self._writer, self._jobs.copy, part)
            for place, copy in zip(part, copies, strict=False):
                if copy is None:
                    self._give_up(place)
                else:
                    self._table.moved(place.hash, segment, copy.segment, copy.offset)
                    COMPACTED.inc()
            if error is not None:
                raise error
            places = places[len(part) :]
        await self._run(self._writer, self._jobs.remove, segment)

    async def _scan_next(self) -> None:
        """Finds the blocks of the newest segment that is left: of two copies the newer counts."""
        segment = self._unscanned[-1]
        records, num_damaged = await self._run(self._writer, self._jobs.scan, segment)
        DAMAGED.inc(num_damaged)
        for record in reversed(records):
            if self._table.restore(record, segment):
                RESTORED.inc()
                self._on_restored(record)
        self._unscanned.pop()

    def _places(self, hashes: Iterable[BlockHash]) -> list[Place]:
        blocks = [block for hash in hashes if (block := self._table.find(hash)) is not None]
        return [
            Place(block.hash, block.segment, block.segment.offsets[block.hash], block.num_bytes)
            for block in blocks
            if block.segment is not None
        ]

    def _is_there(self, place: Place) -> bool:
        block = self._table.find(place.hash)
        return block is not None and block.segment is place.segment

    def _give_up(self, place: Place) -> None:
        DAMAGED.inc()
        self._table.lose(place.hash, place.segment)

    def _note(self, error: OSError | None) -> None:
        """Says so once when writing begins to fail, and once when it works again."""
        if error is not None and not self._failing:
            log.warning("disk writes fail", extra={"error": str(error)})
        if error is None and self._failing:
            log.warning("disk writes work again")
        self._failing = error is not None
        FAILING.set(self._failing)

    def _run(
        self, pool: ThreadPoolExecutor, job: Callable[[Argument], Result], argument: Argument
    ) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(pool, job, argument)
