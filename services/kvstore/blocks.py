"""Which blocks this node holds: payload bytes within a bound, leases, and who goes first.

Plain synchronous state. Every byte is free, leased or evictable, always. A block with a lease is
never evicted; of the others the one used least recently goes, and using a block counts as using its
ancestors after it, so that within a run the leaf goes before what it depends on.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashmesh.errors import CorruptBlock, NoFreeBlocks, Overloaded
from flashmesh.hashing import BlockHash
from flashmesh.objects import StoredObject, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

DEFAULT_OBJECT_BYTES = 128 * 1024
"""What a block that is still to come is taken for, before the first one has arrived."""

MAX_LEASES = 1 << 16
"""A lease may name nothing and still takes memory, so their number is bounded too."""


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Bytes by state, and counts; `num_expected` blocks are leased and not stored."""

    capacity_bytes: int
    leased_bytes: int
    evictable_bytes: int
    num_blocks: int
    num_leases: int
    num_expected: int

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing occupies."""
        return self.capacity_bytes - self.leased_bytes - self.evictable_bytes


@dataclass(slots=True)
class _Lease:
    hashes: dict[BlockHash, None] = field(default_factory=dict)  # in chain order
    deadline: float = 0.0


class BlockTable:
    """The memory tier.

    Args:
        capacity_bytes: bound on stored bytes.
        max_leased_bytes: bound on leased bytes, expected ones included.
        clock: seconds.
        on_evict: told every object that is evicted or dropped.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        max_leased_bytes: int,
        clock: Callable[[], float],
        on_evict: Callable[[StoredObject], None] = lambda item: None,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._max_leased_bytes = max_leased_bytes
        self._clock = clock
        self._on_evict = on_evict
        self._objects: dict[BlockHash, StoredObject] = {}
        self._evictable: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first
        self._pins: Counter[BlockHash] = Counter()
        self._leases: dict[str, _Lease] = {}
        self._leased_bytes = 0
        self._evictable_bytes = 0
        self._num_expected = 0
        self._object_bytes = DEFAULT_OBJECT_BYTES

    def __contains__(self, hash: object) -> bool:
        return hash in self._objects

    def __iter__(self) -> Iterator[StoredObject]:
        return iter(self._objects.values())

    def get(self, hash: BlockHash) -> StoredObject | None:
        """Returns an object without counting as a use (see `touch`)."""
        return self._objects.get(hash)

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Counts a use of blocks, in any order, and of what comes before them in their runs."""
        family: dict[BlockHash, StoredObject] = {}
        for hash in hashes:
            item = self._objects.get(hash)
            # Parents are the writer's claim and might form a ring.
            while item is not None and item.hash not in family:
                family[item.hash] = item
                item = self._objects.get(BlockHash(item.parent)) if item.hash != item.run else None
        for item in sorted(family.values(), key=lambda item: item.position, reverse=True):
            if item.hash in self._evictable:
                self._evictable.move_to_end(item.hash)

    def put(self, item: StoredObject) -> bool:
        """Stores a verified object if nobody has; says whether it is new.

        Raises:
            NoFreeBlocks: everything that would have to go is leased, or the block itself is and
                leases hold all that they may.
        """
        if item.hash in self._objects:
            self.touch([item.hash])
            return False
        size = len(item.data)
        self._make_room(size, leased=item.hash in self._pins)
        self._object_bytes = max(size, 1)
        self._objects[item.hash] = item
        if item.hash in self._pins:
            self._num_expected -= 1
            self._leased_bytes += size
        else:
            self._evictable[item.hash] = None
            self._evictable_bytes += size
        self.touch([item.hash])
        return True

    def lease(self, lease_id: str, hashes: Iterable[BlockHash], ttl_s: float) -> None:
        """Keeps blocks, stored or still to come; a lease that is held gets them in addition.

        In addition, because one request may name the runs of a node one by one, and because a call
        whose answer was lost is made again.

        Raises:
            Overloaded: leases would hold more than they may; nothing has changed then.
        """
        lease = self._leases.get(lease_id) or _Lease()
        wanted = dict.fromkeys(hash for hash in hashes if hash not in lease.hashes)
        self._check_room_for_lease(lease_id, wanted)
        for hash in wanted:
            self._pin(hash)
        lease.hashes |= wanted
        lease.deadline = self._clock() + ttl_s
        self._leases[lease_id] = lease

    def renew(self, lease_ids: Iterable[str], ttl_s: float) -> list[str]:
        """Extends leases; returns those that are not held."""
        deadline = self._clock() + ttl_s
        unknown = []
        for lease_id in lease_ids:
            if lease := self._leases.get(lease_id):
                lease.deadline = deadline
            else:
                unknown.append(lease_id)
        return unknown

    def release(self, lease_ids: Iterable[str]) -> None:
        """Gives leases back; unknown ones are no error."""
        for lease_id in lease_ids:
            lease = self._leases.pop(lease_id, _Lease())
            for hash in lease.hashes:
                self._unpin(hash)
            self.touch(lease.hashes)

    def expire(self) -> int:
        """Releases leases whose time is over; returns how many."""
        now = self._clock()
        over = [lease_id for lease_id, lease in self._leases.items() if lease.deadline <= now]
        self.release(over)
        return len(over)

    def quarantine(self, hash: BlockHash) -> bool:
        """Checks a block that a reader found bad and drops it if it is; says whether it did."""
        item = self._objects.get(hash)
        if item is None:
            return False
        try:
            verify(item)
        except CorruptBlock:
            self._drop(item)
            return True
        return False

    def stats(self) -> BlockStats:
        """Counts bytes, blocks and leases."""
        return BlockStats(
            self._capacity_bytes,
            self._leased_bytes,
            self._evictable_bytes,
            len(self._objects),
            len(self._leases),
            self._num_expected,
        )

    def _check_room_for_lease(self, lease_id: str, wanted: Iterable[BlockHash]) -> None:
        if lease_id not in self._leases and len(self._leases) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} leases are held already")
        fresh = [hash for hash in wanted if hash not in self._pins]
        stored = sum(len(self._objects[hash].data) for hash in fresh if hash in self._objects)
        absent = sum(hash not in self._objects for hash in fresh)
        expected = (self._num_expected + absent) * self._object_bytes
        if self._leased_bytes + stored + expected > self._max_leased_bytes:
            raise Overloaded(
                f"{self._leased_bytes} of at most {self._max_leased_bytes} bytes are leased; "
                f"{len(fresh)} more blocks do not fit"
            )

    def _make_room(self, size: int, *, leased: bool) -> None:
        limit = self._max_leased_bytes if leased else self._capacity_bytes
        if self._leased_bytes + size > limit:
            raise NoFreeBlocks(
                f"{size} bytes do not fit beside {self._leased_bytes} leased ones in {limit}"
            )
        while self._leased_bytes + self._evictable_bytes + size > self._capacity_bytes:
            self._drop(self._objects[next(iter(self._evictable))])

    def _drop(self, item: StoredObject) -> None:
        del self._objects[item.hash]
        if item.hash in self._evictable:
            del self._evictable[item.hash]
            self._evictable_bytes -= len(item.data)
        else:  # leased: the lease goes on and waits for a good copy
            self._leased_bytes -= len(item.data)
            self._num_expected += 1
        self._on_evict(item)

    def _pin(self, hash: BlockHash) -> None:
        self._pins[hash] += 1
        if self._pins[hash] > 1:
            return
        if hash in self._evictable:
            del self._evictable[hash]
            self._evictable_bytes -= len(self._objects[hash].data)
            self._leased_bytes += len(self._objects[hash].data)
        else:
            self._num_expected += 1

    def _unpin(self, hash: BlockHash) -> None:
        self._pins[hash] -= 1
        if self._pins[hash]:
            return
        del self._pins[hash]
        if hash in self._objects:
            self._evictable[hash] = None
            self._leased_bytes -= len(self._objects[hash].data)
            self._evictable_bytes += len(self._objects[hash].data)
        else:
            self._num_expected -= 1
