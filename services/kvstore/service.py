"""The control servicer of a kvstore node: who may keep what, and how it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmesh.errors import InvalidRequest
from flashmesh.services.kvstore.transfer import check_hashes
from flashmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc.aio

    from flashmesh.services.kvstore.config import KvstoreConfig
    from flashmesh.services.kvstore.store import Store

MAX_ID_BYTES = 256


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
        return kvstore_pb2.ReportResponse(quarantined=self._store.quarantine(hash))

    async def Stat(  # noqa: N802
        self, request: kvstore_pb2.StatRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.StatResponse:
        """Counts bytes, blocks and leases."""
        stats = self._store.table.stats()
        return kvstore_pb2.StatResponse(
            node_id=self._node_id,
            epoch=self._epoch,
            num_blocks=stats.num_blocks,
            capacity_bytes=stats.capacity_bytes,
            leased_bytes=stats.leased_bytes,
            evictable_bytes=stats.evictable_bytes,
            num_leases=stats.num_leases,
            num_waiting_gets=self._store.num_waiting,
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
