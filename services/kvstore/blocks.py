"""Which blocks this node holds, in memory and on disk, under which leases, and who goes first.

Plain synchronous state. In each tier every byte is free, leased or evictable, always. A leased block
leaves no tier that holds it; of the others the lowest priority goes first. A block that no tier holds
any more is gone from the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmesh.errors import CorruptBlock, NoFreeBlocks, Overloaded
from flashmesh.objects import StoredObject, verify
from flashmesh.services.kvstore.leases import Leases
from flashmesh.services.kvstore.policy import Usage
from flashmesh.services.kvstore.tier import UNUSED, Block, Tier, TierStats
from flashmesh.services.kvstore.uses import Uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from flashmesh.hashing import BlockHash
    from flashmesh.services.kvstore.leases import Lease
    from flashmesh.services.kvstore.segments import Record, Segment

DEFAULT_OBJECT_BYTES = 128 * 1024
"""What a block that is still to come is taken for, before the first one has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStats:
    """Bytes by tier and state, and counts; `num_expected` blocks are leased and not stored."""

    memory: TierStats
    disk: TierStats
    num_blocks: int
    num_leases: int
    num_expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """A stored block, for people and tools."""

    hash: BlockHash
    run: BlockHash
    position: int
    num_bytes: int
    in_memory: bool
    on_disk: bool
    leased: bool


class BlockTable:
    """The blocks of one node.

    Args:
        memory_bytes: bound on bytes in memory; 0 or more.
        disk_bytes: bound on live bytes on disk; 0 without a disk tier.
        max_leased_share: leases may hold this share of each, expected blocks included in memory's.
        clock: seconds.
        on_gone: told every block that leaves the node.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        disk_bytes: int = 0,
        max_leased_share: float,
        clock: Callable[[], float],
        on_gone: Callable[[Block], None] = lambda block: None,
    ) -> None:
        self._on_gone = on_gone
        self._blocks: dict[BlockHash, Block] = {}
        self._uses = Uses(self._blocks)
        self._leases = Leases(clock)
        self._memory = Tier(
            memory_bytes,
            int(memory_bytes * max_leased_share),
            lambda block: block.in_memory and block.hash not in self._leases,
        )
        self._disk = Tier(
            disk_bytes,
            int(disk_bytes * max_leased_share),
            lambda block: block.on_disk and block.hash not in self._leases,
        )
        self._num_expected = 0
        self._object_bytes = DEFAULT_OBJECT_BYTES

    def __contains__(self, hash: object) -> bool:
        return hash in self._blocks

    def find(self, hash: BlockHash) -> Block | None:
        """Returns a block; the caller must not change it."""
        return self._blocks.get(hash)

    def get(self, hash: BlockHash) -> StoredObject | None:
        """Returns an object whose bytes are in this process; not counted as a use (see `touch`)."""
        block = self._blocks.get(hash)
        return None if block is None else block.memory or block.queued

    def blocks(self) -> Iterator[BlockInfo]:
        """Yields all blocks; the table must not change meanwhile."""
        for block in self._blocks.values():
            yield self._info(block)

    def hashes(self) -> list[BlockHash]:
        """Returns the names of all blocks, oldest first."""
        return list(self._blocks)

    def info(self, hash: BlockHash) -> BlockInfo | None:
        """Describes a block; None if it is not stored."""
        block = self._blocks.get(hash)
        return None if block is None else self._info(block)

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Counts a use of blocks by one request."""
        self._uses.count(hashes)

    def put(self, item: StoredObject, *, same_request: bool = False) -> bool:
        """Stores a verified object in memory if the node has it nowhere; says whether it is new.

        Args:
            item: the object.
            same_request: it belongs to the request of the call before; a request is one tick of the
                clock, and in one tick a chain's blocks need not raise their ancestors again.

        Raises:
            NoFreeBlocks: everything that would have to go is leased, or the block itself is and
                leases hold all that they may.
        """
        known = item.hash in self._blocks
        if not known:
            num_bytes = len(item.data)
            self._make_room_in_memory(num_bytes, leased=item.hash in self._leases)
            block = _new_block(item, num_bytes)
            block.memory = item
            self._begin(block, self._memory)
        self._uses.count([item.hash], same_request=same_request)
        return not known

    def keep(self, item: StoredObject) -> None:
        """Takes a verified object from disk into memory too, where room can be made."""
        block = self._blocks.get(item.hash)
        leased = item.hash in self._leases
        if block is None or block.in_memory:
            return
        if not self._memory.may_fit(block.num_bytes, leased=leased):
            return
        self._make_room_in_memory(block.num_bytes, leased=leased)
        block.memory = item
        self._memory.add(block, leased=leased)

    def lease(self, lease_id: str, hashes: Iterable[BlockHash], ttl_s: float) -> None:
        """Keeps blocks, stored or still to come; a lease that is held gets them in addition.

        In addition, because one request may name the runs of a node one by one, and because a call
        whose answer was lost is made again.

        Raises:
            Overloaded: leases would hold more than they may; nothing has changed then.
        """
        self._leases.check_new(lease_id)
        missing = self._leases.missing(lease_id, hashes)
        self._check_room_for_lease(missing)
        for hash in self._leases.extend(lease_id, missing, ttl_s):
            block = self._blocks.get(hash)
            if block is None:
                self._num_expected += 1
                continue
            for tier in self._tiers_of(block):
                tier.pin(block)

    def renew(self, lease_ids: Iterable[str], ttl_s: float) -> list[str]:
        """Extends leases; returns those that are not held."""
        return self._leases.renew(lease_ids, ttl_s)

    def release(self, lease_ids: Iterable[str]) -> None:
        """Gives leases back; unknown ones are no error."""
        for lease_id in lease_ids:
            hashes, free = self._leases.release(lease_id)
            for hash in free:
                block = self._blocks.get(hash)
                if block is None:
                    self._num_expected -= 1
                    continue
                for tier in self._tiers_of(block):
                    tier.unpin(block)
            self._uses.prolong(hashes)

    def expire(self) -> int:
        """Releases leases whose time is over; returns how many."""
        overdue = self._leases.overdue()
        self.release(overdue)
        return len(overdue)

    def leases(self) -> Iterator[tuple[str, Lease]]:
        """Yields every lease with its id."""
        return self._leases.items()

    def quarantine(self, hash: BlockHash) -> bool:
        """Checks the copy in memory and drops the block if that is bad; says whether it did.

        A lease goes on and waits for a good copy.
        """
        item = self.get(hash)
        if item is None:
            return False
        try:
            verify(item)
        except CorruptBlock:
            self._drop(self._blocks[hash])
            return True
        return False

    def evict(self, hashes: Iterable[BlockHash]) -> int:
        """Drops blocks that are not leased from all tiers; returns how many."""
        found = [self._blocks[hash] for hash in dict.fromkeys(hashes) if hash in self._blocks]
        unleased = [block for block in found if block.hash not in self._leases]
        for block in unleased:
            self._drop(block)
        return len(unleased)

    def queue(self, item: StoredObject) -> bool:
        """Takes a block of the memory tier into the disk tier, to be written; says whether it did.

        The room is taken at once, so that what is queued always fits. False where leases leave none.
        """
        block = self._blocks[item.hash]
        leased = block.hash in self._leases
        if not self._disk.may_fit(block.num_bytes, leased=leased):
            return False
        while not self._disk.fits(block.num_bytes):
            self._leave_disk(self._disk.lowest())
        block.queued = item
        self._disk.add(block, leased=leased)
        return True

    def written(self, item: StoredObject, segment: Segment, offset: int) -> None:
        """Notes where a queued object lies now; one that was dropped meanwhile is dead there."""
        block = self._blocks.get(item.hash)
        if block is not None and block.queued is item:
            block.queued = None
            block.segment = segment
            segment.add(block.hash, offset, block.num_bytes)

    def moved(self, hash: BlockHash, old: Segment, new: Segment, offset: int) -> None:
        """Notes that a record was copied into another segment."""
        block = self._blocks.get(hash)
        if block is not None and block.segment is old:
            old.remove(hash, block.num_bytes)
            new.add(hash, offset, block.num_bytes)
            block.segment = new

    def restore(self, record: Record, segment: Segment) -> bool:
        """Takes a verified record of an earlier process into the disk tier; says whether it did.

        Not where the block is stored already, nor at the cost of one that has been used since. How
        blocks were used before is not known, and dead records come back too: where room is short the
        block that comes later in its prompt goes, for it is of no use without those before it.
        """
        leased = record.hash in self._leases
        if record.hash in self._blocks or not self._disk.may_fit(record.num_bytes, leased=leased):
            return False
        while not self._disk.fits(record.num_bytes):
            lowest = self._disk.lowest()
            if lowest.priority > UNUSED or lowest.position <= record.position:
                return False
            self._leave_disk(lowest)
        block = _new_block(record, record.num_bytes)
        block.segment = segment
        segment.add(record.hash, record.offset, record.num_bytes)
        self._begin(block, self._disk)
        return True

    def lose(self, hash: BlockHash, at: Segment | StoredObject) -> None:
        """Gives up a copy in the disk tier that cannot be written, read or verified.

        Args:
            hash: of the block.
            at: where it was; one that has moved since stays.
        """
        block = self._blocks.get(hash)
        if block is not None and (at is block.segment or at is block.queued):
            self._leave_disk(block)

    def stats(self) -> BlockStats:
        """Counts bytes, blocks and leases."""
        return BlockStats(
            memory=self._memory.stats(),
            disk=self._disk.stats(),
            num_blocks=len(self._blocks),
            num_leases=len(self._leases),
            num_expected=self._num_expected,
        )

    def _info(self, block: Block) -> BlockInfo:
        return BlockInfo(
            hash=block.hash,
            run=block.run,
            position=block.position,
            num_bytes=block.num_bytes,
            in_memory=block.in_memory,
            on_disk=block.on_disk,
            leased=block.hash in self._leases,
        )

    def _tiers_of(self, block: Block) -> list[Tier]:
        tiers = ((self._memory, block.in_memory), (self._disk, block.on_disk))
        return [tier for tier, holds_it in tiers if holds_it]

    def _check_room_for_lease(self, hashes: Iterable[BlockHash]) -> None:
        fresh = [hash for hash in hashes if hash not in self._leases]
        stored = [block for hash in fresh if (block := self._blocks.get(hash)) is not None]
        num_expected = self._num_expected + len(fresh) - len(stored)
        wanted = {self._memory: num_expected * self._object_bytes, self._disk: 0}
        for block in stored:
            for tier in self._tiers_of(block):
                wanted[tier] += block.num_bytes
        for tier, num_bytes in wanted.items():
            if not tier.may_fit(num_bytes, leased=True):
                raise Overloaded(
                    f"{tier.leased_bytes} of at most {tier.max_leased_bytes} bytes are leased; "
                    f"{len(fresh)} more blocks do not fit"
                )

    def _make_room_in_memory(self, num_bytes: int, *, leased: bool) -> None:
        if not self._memory.may_fit(num_bytes, leased=leased):
            raise NoFreeBlocks(
                f"{num_bytes} bytes do not fit beside {self._memory.leased_bytes} leased ones in "
                f"{self._memory.limit_bytes(leased=leased)}"
            )
        while not self._memory.fits(num_bytes):
            self._evict_from_memory(self._memory.lowest())

    def _evict_from_memory(self, block: Block) -> None:
        self._uses.evicted(block)
        if not block.on_disk:
            self._drop(block)
            return
        block.memory = None
        self._memory.remove(block, leased=False)

    def _leave_disk(self, block: Block) -> None:
        if not block.in_memory:
            self._drop(block)
            return
        self._disk.remove(block, leased=block.hash in self._leases)
        _forget_place(block)

    def _begin(self, block: Block, tier: Tier) -> None:
        leased = block.hash in self._leases
        self._num_expected -= leased
        self._object_bytes = max(block.num_bytes, 1)
        self._blocks[block.hash] = block
        self._uses.begin(block)
        tier.add(block, leased=leased)

    def _drop(self, block: Block) -> None:
        leased = block.hash in self._leases
        for tier in self._tiers_of(block):
            tier.remove(block, leased=leased)
        block.memory = None
        _forget_place(block)
        self._num_expected += leased
        del self._blocks[block.hash]
        self._uses.end(block)
        self._on_gone(block)


def _new_block(header: StoredObject | Record, num_bytes: int) -> Block:
    return Block(
        hash=header.hash,
        run=header.run,
        parent=header.parent,
        position=header.position,
        num_bytes=num_bytes,
        usage=Usage(num_uses=0, last_use=0, previous_use=0, position=header.position),
    )


def _forget_place(block: Block) -> None:
    if block.segment is not None:
        block.segment.remove(block.hash, block.num_bytes)
    block.segment = block.queued = None
