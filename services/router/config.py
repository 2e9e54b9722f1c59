"""The `[router]` section."""

from __future__ import annotations

from dataclasses import dataclass

from flashmesh.config import ServiceConfig, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ServiceConfig):
    """Configuration of a router.

    Attributes:
        replay_tokens: rows that all layers run at least at a prompt's end; the same for every router of a mesh.
        prefill_min_tokens: shorter uncached parts are computed by decode itself.
        max_requests: most requests at once; one more is refused.
        max_attempts: tries of one request over all failures.
        lease_ttl_s: how long blocks outlive a router that died.
        worker_wait_s: how long a request waits for a worker to register.
        stall_timeout_s: a worker that sends nothing for so long counts as lost.
    """

    bind: str = "127.0.0.1:7100"
    replay_tokens: int = limits(140, 128, 1 << 16)
    prefill_min_tokens: int = limits(128, 1, 1 << 24)
    max_requests: int = limits(256, 1, 1 << 16)
    max_attempts: int = limits(4, 1, 16)
    lease_ttl_s: float = limits(30.0, 1, 300)
    worker_wait_s: float = limits(5.0, 0, 600)
    stall_timeout_s: float = limits(60.0, 1, 3600)
