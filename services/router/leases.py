"""The router's leases: taken before blocks are needed, renewed in one call a node, released when the request ends.

One task renews and releases. Release never waits: it is queued, and expiry stands behind it. A node that restarted
does not know its leases any more and is given them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import prometheus_client

from flashmesh.errors import FlashmeshError, WorkerLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from flashmesh.hashing import BlockHash
    from flashmesh.kv_client import KvClient
    from flashmesh.runs import Place

log = logging.getLogger(__name__)

HELD = prometheus_client.Gauge("flashmesh_router_leases", "Leases that this router holds.")


@dataclass(frozen=True, slots=True)
class _Lease:
    lease_id: str
    address: str
    hashes: tuple[BlockHash, ...]


class Leases:
    """Leases by id and node.

    Args:
        client: the way to the nodes.
        ttl_s: how long a lease outlives its last renewal.
    """

    def __init__(self, client: KvClient, ttl_s: float) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._held: dict[tuple[str, str], _Lease] = {}
        self._released: list[_Lease] = []
        self._wake = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(
        self, lease_id: str, places: Sequence[Place], hashes: Sequence[BlockHash]
    ) -> AsyncIterator[None]:
        """Keeps blocks, stored or not yet, from eviction while the body runs.

        A node that cannot be reached is left out: a lease saves work, the request does not depend on it.

        Raises:
            Overloaded: a node holds as many leased bytes as it may.
        """
        by_address: defaultdict[str, list[BlockHash]] = defaultdict(list)
        for place in places:
            part = hashes[place.first_block : place.first_block + place.num_blocks]
            by_address[place.address] += part
        leases = [
            _Lease(lease_id, address, tuple(part)) for address, part in by_address.items() if part
        ]
        try:
            for lease in leases:
                self._held[lease.lease_id, lease.address] = lease
                await self._take(lease)
            HELD.set(len(self._held))
            yield
        finally:
            for lease in leases:
                if self._held.pop((lease.lease_id, lease.address), None):
                    self._released.append(lease)
            HELD.set(len(self._held))
            self._wake.set()

    async def run(self) -> None:
        """Renews and releases until cancelled, then releases the rest."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._ttl_s / 3):
                        await self._wake.wait()
                if self._wake.is_set():
                    self._wake.clear()
                    await self._release()
                else:
                    await self._renew()
        finally:
            self._released += self._held.values()
            await asyncio.shield(self._release())

    async def _take(self, lease: _Lease) -> None:
        with contextlib.suppress(WorkerLost):
            await self._client.lease(lease.address, lease.lease_id, lease.hashes, self._ttl_s)

    async def _release(self) -> None:
        by_address = defaultdict(list)
        for lease in self._released:
            by_address[lease.address].append(lease.lease_id)
        self._released.clear()
        for address, lease_ids in by_address.items():
            try:
                await self._client.release(address, lease_ids)
            except FlashmeshError as error:
                log.warning("leases left to expire", extra={"node": address, "error": str(error)})

    async def _renew(self) -> None:
        by_address = defaultdict(list)
        for lease in self._held.values():
            by_address[lease.address].append(lease.lease_id)
        for address, lease_ids in by_address.items():
            try:
                for lease_id in await self._client.renew(address, lease_ids, self._ttl_s):
                    if lost := self._held.get((lease_id, address)):
                        await self._take(lost)
            except FlashmeshError as error:
                log.warning("leases not renewed", extra={"node": address, "error": str(error)})
