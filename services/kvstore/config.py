"""The `[kvstore]` section."""

from __future__ import annotations

from dataclasses import dataclass

from flashmesh.config import ServiceConfig, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class KvstoreConfig(ServiceConfig):
    """Configuration of a kvstore node.

    Attributes:
        memory_bytes: bound on the bytes of objects in memory, headers included.
        disk_path: folder of the disk tier, this node's alone; empty means memory only.
        disk_bytes: bound on the bytes of its files; three quarters of them hold blocks.
        disk_queue_bytes: bound on the bytes that wait to be written; blocks beyond it stay in memory only.
        max_leased_share: leases may hold this share of each tier, blocks that are still to come included in memory's.
        max_lease_ttl_s: longest life of a lease without renewal.
        max_wait_s: longest wait of a Get.
    """

    memory_bytes: int = limits(512 * 1024 * 1024, 1024, 1 << 46)
    disk_path: str = ""
    disk_bytes: int = limits(16 * 1024 * 1024 * 1024, 16 * 1024, 1 << 50)
    disk_queue_bytes: int = limits(64 * 1024 * 1024, 1024, 1 << 40)
    max_leased_share: float = limits(0.9, 0.0, 1.0)
    max_lease_ttl_s: float = limits(300.0, 1, 3600)
    max_wait_s: float = limits(600.0, 0, 3600)
