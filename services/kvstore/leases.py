"""Who keeps which blocks, and for how long: leases by id, and how many of them name a block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashmesh.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from flashmesh.hashing import BlockHash

MAX_LEASES = 1 << 16
"""A lease may name nothing and still takes memory, so their number is bounded too."""


@dataclass(slots=True)
class Lease:
    """A lease.

    Attributes:
        hashes: in chain order.
        ttl_s, deadline: of the latest call that named it; the deadline on the table's clock.
    """

    hashes: dict[BlockHash, None] = field(default_factory=dict)
    ttl_s: float = 0.0
    deadline: float = 0.0


class Leases:
    """Leases of one node.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._num_holders: Counter[BlockHash] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, hash: object) -> bool:
        """Says whether any lease names a block."""
        return hash in self._num_holders

    def items(self) -> Iterator[tuple[str, Lease]]:
        """Yields every lease with its id."""
        return iter(self._leases.items())

    def check_new(self, lease_id: str) -> None:
        """Refuses one lease too many.

        Raises:
            Overloaded: as many as may be are held.
        """
        if lease_id not in self._leases and len(self._leases) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} leases are held already")

    def missing(self, lease_id: str, hashes: Iterable[BlockHash]) -> dict[BlockHash, None]:
        """Returns, in order and once each, the blocks that a lease does not name yet."""
        held = self._leases.get(lease_id, Lease()).hashes
        return dict.fromkeys(hash for hash in hashes if hash not in held)

    def extend(self, lease_id: str, hashes: dict[BlockHash, None], ttl_s: float) -> list[BlockHash]:
        """Adds missing blocks to a lease; returns those that no other names."""
        lease = self._leases.setdefault(lease_id, Lease())
        lease.hashes |= hashes
        self._prolong(lease, ttl_s)
        fresh = [hash for hash in hashes if hash not in self._num_holders]
        self._num_holders.update(hashes.keys())
        return fresh

    def renew(self, lease_ids: Iterable[str], ttl_s: float) -> list[str]:
        """Extends leases in time; returns those that are not held."""
        unknown = []
        for lease_id in lease_ids:
            if lease := self._leases.get(lease_id):
                self._prolong(lease, ttl_s)
            else:
                unknown.append(lease_id)
        return unknown

    def release(self, lease_id: str) -> tuple[list[BlockHash], list[BlockHash]]:
        """Gives a lease back; returns its blocks, and of these the ones that none names any more."""
        hashes = list(self._leases.pop(lease_id, Lease()).hashes)
        self._num_holders.subtract(hashes)
        free = [hash for hash in hashes if not self._num_holders[hash]]
        for hash in free:
            del self._num_holders[hash]
        return hashes, free

    def overdue(self) -> list[str]:
        """Returns the leases whose time is over."""
        now = self._clock()
        return [lease_id for lease_id, lease in self._leases.items() if lease.deadline <= now]

    def _prolong(self, lease: Lease, ttl_s: float) -> None:
        lease.ttl_s = ttl_s
        lease.deadline = self._clock() + ttl_s
