"""What the node knows of a block, and one tier's account of the blocks that it holds.

A tier counts bytes by state and names the evictable block that goes first. Its order is a heap that
is put right only at the top: priorities only rise, so an entry that has fallen behind is too low,
and is moved down when it surfaces.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashmesh.hashing import BlockHash
    from flashmesh.objects import StoredObject
    from flashmesh.services.kvstore.policy import Usage
    from flashmesh.services.kvstore.segments import Segment

UNUSED = -math.inf
"""Priority of a block that has not been used since it came, nor any descendant."""

MAX_STALE_ENTRIES = 64
"""Heap entries beyond twice the number of blocks before the heap is made anew."""


@dataclass(slots=True, eq=False)
class Block:
    """A block that some tier holds.

    Attributes:
        hash, run, parent, position: as in its header.
        num_bytes: of the object, header included.
        usage: how it has been used.
        priority: of its latest use or a descendant's; it never falls.
        memory: the object, while the memory tier holds it.
        queued: the object, while the disk tier holds it and has still to write it.
        segment: where it is written, while the disk tier holds it.
    """

    hash: BlockHash
    run: BlockHash
    parent: bytes
    position: int
    num_bytes: int
    usage: Usage
    priority: float = UNUSED
    memory: StoredObject | None = None
    queued: StoredObject | None = None
    segment: Segment | None = None

    @property
    def in_memory(self) -> bool:
        """The memory tier holds it."""
        return self.memory is not None

    @property
    def on_disk(self) -> bool:
        """The disk tier holds it, written or still queued."""
        return self.segment is not None or self.queued is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Bytes of one tier by state, and the number of its blocks."""

    capacity_bytes: int
    leased_bytes: int
    evictable_bytes: int
    num_blocks: int

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing occupies."""
        return self.capacity_bytes - self.leased_bytes - self.evictable_bytes


class Tier:
    """One tier's account.

    Args:
        capacity_bytes: bound on all bytes.
        max_leased_bytes: bound on leased bytes.
        is_evictable: says whether this tier holds a block and may let it go.
    """

    def __init__(
        self,
        capacity_bytes: int,
        max_leased_bytes: int,
        is_evictable: Callable[[Block], bool],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_leased_bytes = max_leased_bytes
        self.leased_bytes = 0
        self._evictable_bytes = 0
        self._num_blocks = 0
        self._is_evictable = is_evictable
        self._heap: list[tuple[float, int, int, Block]] = []
        self._serial = itertools.count()

    def add(self, block: Block, *, leased: bool) -> None:
        """Counts a block that has come, in a state that `is_evictable` agrees with."""
        self._num_blocks += 1
        if leased:
            self.leased_bytes += block.num_bytes
        else:
            self._evictable_bytes += block.num_bytes
            self._push(block)

    def remove(self, block: Block, *, leased: bool) -> None:
        """Counts a block that has gone."""
        self._num_blocks -= 1
        if leased:
            self.leased_bytes -= block.num_bytes
        else:
            self._evictable_bytes -= block.num_bytes

    def pin(self, block: Block) -> None:
        """Counts a block that became leased."""
        self._evictable_bytes -= block.num_bytes
        self.leased_bytes += block.num_bytes

    def unpin(self, block: Block) -> None:
        """Counts a block that is leased no more."""
        self.leased_bytes -= block.num_bytes
        self._evictable_bytes += block.num_bytes
        self._push(block)

    def limit_bytes(self, *, leased: bool) -> int:
        """The bound on leased bytes with a new block, which may be leased itself."""
        return self.max_leased_bytes if leased else self.capacity_bytes

    def may_fit(self, num_bytes: int, *, leased: bool) -> bool:
        """Says whether evictions can make room."""
        return self.leased_bytes + num_bytes <= self.limit_bytes(leased=leased)

    def fits(self, num_bytes: int) -> bool:
        """Says whether there is room now."""
        return self.leased_bytes + self._evictable_bytes + num_bytes <= self.capacity_bytes

    def lowest(self) -> Block:
        """Returns the evictable block of lowest priority; of equal ones the last in its prompt.

        Raises:
            IndexError: nothing is evictable.
        """
        while True:
            priority, _, _, block = self._heap[0]
            if not self._is_evictable(block):
                heapq.heappop(self._heap)
            elif block.priority > priority:
                heapq.heapreplace(self._heap, self._entry(block))
            else:
                return block

    def stats(self) -> TierStats:
        """Counts bytes and blocks."""
        return TierStats(
            capacity_bytes=self.capacity_bytes,
            leased_bytes=self.leased_bytes,
            evictable_bytes=self._evictable_bytes,
            num_blocks=self._num_blocks,
        )

    def _push(self, block: Block) -> None:
        # A block that was leased and released meanwhile has two entries; either will do.
        if len(self._heap) > 2 * self._num_blocks + MAX_STALE_ENTRIES:
            blocks = dict.fromkeys(entry[-1] for entry in self._heap)
            self._heap = [self._entry(b) for b in blocks if self._is_evictable(b)]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, self._entry(block))

    def _entry(self, block: Block) -> tuple[float, int, int, Block]:
        return block.priority, -block.position, next(self._serial), block
