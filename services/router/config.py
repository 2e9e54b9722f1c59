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
        http_bind: host:port of the HTTP server; port 0 takes a free one, empty turns it off. Off loopback it needs API
            keys or a mesh token.
        api_keys_file: TOML file that `flashmesh keys` writes; without it every client on this host is admitted, or
            those with the mesh token where there is one.
        key_requests_per_min: requests that each API key may make, over all routers; 0 for no limit.
        key_tokens_per_min: tokens of prompts and answers that each may take; 0 for no limit.
        http_max_body_bytes: longest request body.
        http_keep_alive_s: a stream without events gets a comment after so long.
        http_send_timeout_s: a client that does not read for so long counts as gone.
    """

    bind: str = "127.0.0.1:7100"
    replay_tokens: int = limits(140, 128, 1 << 16)
    prefill_min_tokens: int = limits(128, 1, 1 << 24)
    max_requests: int = limits(256, 1, 1 << 16)
    max_attempts: int = limits(4, 1, 16)
    lease_ttl_s: float = limits(30.0, 1, 300)
    worker_wait_s: float = limits(5.0, 0, 600)
    stall_timeout_s: float = limits(60.0, 1, 3600)
    http_bind: str = "127.0.0.1:7180"
    api_keys_file: str = ""
    key_requests_per_min: int = limits(0, 0, 1 << 31)
    key_tokens_per_min: int = limits(0, 0, 1 << 40)
    http_max_body_bytes: int = limits(16 * 1024 * 1024, 1024, 1 << 30)
    http_keep_alive_s: float = limits(10.0, 0.01, 600)
    http_send_timeout_s: float = limits(60.0, 1, 3600)
