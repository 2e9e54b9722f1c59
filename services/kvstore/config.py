"""The `[kvstore]` section."""

from __future__ import annotations

from dataclasses import dataclass

from flashmesh.config import ServiceConfig, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class KvstoreConfig(ServiceConfig):
    """Configuration of a kvstore node.

    Attributes:
        memory_bytes: bound on the bytes of stored objects, headers included.
        max_leased_share: leases may hold this share of it, blocks that are still to come included.
        max_lease_ttl_s: longest life of a lease without renewal.
        max_wait_s: longest wait of a Get.
    """

    memory_bytes: int = limits(512 * 1024 * 1024, 1024, 1 << 46)
    max_leased_share: float = limits(0.9, 0.0, 1.0)
    max_lease_ttl_s: float = limits(300.0, 1, 3600)
    max_wait_s: float = limits(600.0, 0, 3600)
