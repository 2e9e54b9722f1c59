"""What the threads of the disk tier do: batches of reads and writes. Nothing here knows the table."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, NamedTuple

from flashmesh.errors import CorruptBlock
from flashmesh.services.kvstore.segments import Record, Segment, SegmentLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashmesh.hashing import BlockHash
    from flashmesh.objects import StoredObject

log = logging.getLogger(__name__)

BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of one job, or barely more."""


class Place(NamedTuple):
    """Where a record lies."""

    hash: BlockHash
    segment: Segment
    offset: int
    num_bytes: int


class DiskJobs:
    """Jobs on one log; all but `read` for a single thread."""

    def __init__(self, segments: SegmentLog) -> None:
        self._log = segments

    def append(self, batch: Sequence[StoredObject]) -> tuple[list[Place], OSError | None]:
        """Writes objects until one fails; returns where they are, and why it ended early."""
        places: list[Place] = []
        for item in batch:
            try:
                segment, offset = self._log.append(item.data)
            except OSError as error:
                return places, error
            places.append(Place(item.hash, segment, offset, len(item.data)))
        return places, None

    def read(self, places: Sequence[Place]) -> list[StoredObject | None]:
        """Reads records; None for one that cannot be read or is not intact."""
        return [self._read(place) for place in places]

    def copy(self, places: Sequence[Place]) -> tuple[list[Place | None], OSError | None]:
        """Copies records to the end until a write fails; None for one that cannot be read."""
        copies: list[Place | None] = []
        for place in places:
            item = self._read(place)
            written, error = self.append([] if item is None else [item])
            if error is not None:
                return copies, error
            copies.append(written[0] if written else None)
        return copies, None

    def scan(self, segment: Segment) -> tuple[list[Record], int]:
        """Returns the intact records of a segment, and how many faults there are beside them."""
        records: list[Record] = []
        num_damaged = 0
        try:
            for found in self._log.scan(segment):
                if isinstance(found, Record):
                    records.append(found)
                else:
                    num_damaged += 1
        except OSError as error:
            log.warning("unreadable segment", extra={"error": str(error)})
            num_damaged += 1
        return records, num_damaged

    def remove(self, segment: Segment) -> None:
        """Deletes a segment.

        Raises:
            OSError: it is still there.
        """
        self._log.remove(segment)

    def _read(self, place: Place) -> StoredObject | None:
        try:
            return self._log.read(place.segment, place.hash, place.offset, place.num_bytes)
        except (OSError, CorruptBlock) as error:
            log.warning("unreadable record", extra={"error": str(error)})
            return None


def first_batch(places: Sequence[Place]) -> list[Place]:
    """Returns the first records that make up a job."""
    ends = itertools.accumulate(place.num_bytes for place in places)
    return [
        place
        for place, end in zip(places, ends, strict=True)
        if end - place.num_bytes < BATCH_BYTES
    ]
