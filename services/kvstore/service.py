"""The control servicer of a kvstore node: who may keep what, and how it stands."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from flashmesh.errors import InvalidRequest
from flashmesh.services.kvstore.scrub import scrub
from flashmesh.services.kvstore.transfer import check_hashes
from flashmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    import grpc.aio

    from flashmesh.services.kvstore.config import KvstoreConfig
    from flashmesh.services.kvstore.store import Store

MAX_ID_BYTES = 256
PAGE_BLOCKS = 256
"""Blocks of one message of List."""


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServicer):
    """Serves `KvStore`."""

    def __init__(self, store: Store, node_id: str, epoch: bytes, config: KvstoreConfig) -> None:
        self._store = store
        self._node_id = node_id
        self._epoch = epoch
        self._config = config

    async def Have(  # noqa: N802
        self, request: kvstore_pb2.HaveRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.HaveResponse:
        """Says which blocks are readable now."""
        hashes = check_hashes(request.hashes)
        return kvstore_pb2.HaveResponse(present=[hash in self._store.table for hash in hashes])

    async def Lease(  # noqa: N802
        self, request: kvstore_pb2.LeaseRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.LeaseResponse:
        """Keeps blocks, stored or still to come."""
        check_lease_ids([request.lease_id])
        self._store.table.lease(
            request.lease_id, check_hashes(request.hashes), self._ttl_s(request.ttl_ms)
        )
        return kvstore_pb2.LeaseResponse(epoch=self._epoch)

    async def Renew(  # noqa: N802
        self, request: kvstore_pb2.RenewRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.RenewResponse:
        """Extends leases."""
        check_lease_ids(request.lease_ids)
        unknown = self._store.table.renew(request.lease_ids, self._ttl_s(request.ttl_ms))
        return kvstore_pb2.RenewResponse(unknown_lease_ids=unknown, epoch=self._epoch)

    async def Release(  # noqa: N802
        self, request: kvstore_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.ReleaseResponse:
        """Gives leases back."""
        self._store.table.release(request.lease_ids)
        return kvstore_pb2.ReleaseResponse()

    async def Report(  # noqa: N802
        self, request: kvstore_pb2.ReportRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.ReportResponse:
        """Checks a block that a reader found bad."""
        (hash,) = check_hashes([request.hash])
        return kvstore_pb2.ReportResponse(quarantined=await self._store.quarantine(hash))

    async def Stat(  # noqa: N802
        self, request: kvstore_pb2.StatRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.StatResponse:
        """Counts bytes, blocks and leases."""
        stats = self._store.table.stats()
        return kvstore_pb2.StatResponse(
            node_id=self._node_id,
            epoch=self._epoch,
            num_blocks=stats.num_blocks,
            num_leases=stats.num_leases,
            num_waiting_gets=self._store.num_waiting,
            tiers=[
                kvstore_pb2.TierStat(
                    tier=name,
                    num_blocks=tier.num_blocks,
                    leased_bytes=tier.leased_bytes,
                    evictable_bytes=tier.evictable_bytes,
                    capacity_bytes=tier.capacity_bytes,
                )
                for name, tier in (("memory", stats.memory), ("disk", stats.disk))
                if tier.capacity_bytes or name == "memory"
            ],
        )

    async def List(  # noqa: N802
        self, request: kvstore_pb2.ListRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[kvstore_pb2.ListResponse]:
        """Names the blocks that are stored now and still are when their page's turn comes."""
        hashes = self._store.table.hashes()
        for begin in range(0, len(hashes), PAGE_BLOCKS):
            page = map(self._store.table.info, hashes[begin : begin + PAGE_BLOCKS])
            yield kvstore_pb2.ListResponse(
                blocks=[
                    kvstore_pb2.BlockInfo(
                        hash=block.hash,
                        run=block.run,
                        position=block.position,
                        num_bytes=block.num_bytes,
                        in_memory=block.in_memory,
                        on_disk=block.on_disk,
                        leased=block.leased,
                    )
                    for block in page
                    if block is not None
                ]
            )

    async def Verify(  # noqa: N802
        self, request: kvstore_pb2.VerifyRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[kvstore_pb2.VerifyProgress]:
        """Checks everything, drops what is bad, and tells how far it is."""
        async with contextlib.aclosing(scrub(self._store, request.bytes_per_s)) as steps:
            async for progress in steps:
                yield progress

    async def Evict(  # noqa: N802
        self, request: kvstore_pb2.EvictRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.EvictResponse:
        """Drops blocks that are not leased."""
        if request.all == bool(request.hashes):
            raise InvalidRequest("either name hashes or ask for all blocks")
        table = self._store.table
        hashes = table.hashes() if request.all else dict.fromkeys(check_hashes(request.hashes))
        found = [block for hash in hashes if (block := table.info(hash)) is not None]
        return kvstore_pb2.EvictResponse(
            num_evicted=table.evict(block.hash for block in found),
            num_leased=sum(block.leased for block in found),
            num_absent=len(hashes) - len(found),
        )

    def _ttl_s(self, ttl_ms: int) -> float:
        longest = self._config.max_lease_ttl_s
        if not 0 < ttl_ms <= longest * 1000:
            raise InvalidRequest(f"ttl_ms must be in [1, {longest * 1000:.0f}], not {ttl_ms}")
        return ttl_ms / 1000


def check_lease_ids(lease_ids: Iterable[str]) -> None:
    """Refuses empty and oversized ids.

    Raises:
        InvalidRequest: says what is wrong.
    """
    if not all(0 < len(lease_id.encode()) <= MAX_ID_BYTES for lease_id in lease_ids):
        raise InvalidRequest(f"a lease id must have 1 to {MAX_ID_BYTES} bytes")
