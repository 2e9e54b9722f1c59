"""How a service joins the registry once it serves, and leaves it before it stops."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from flashmesh.lifecycle import Running, background
from flashmesh.redis_client import connect
from flashmesh.registry import Heartbeat, Registry, WorkerRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from flashmesh.config import MeshConfig, ServiceConfig
    from flashmesh.types import ModelInfo


def new_record(
    role: str,
    config: ServiceConfig,
    running: Running,
    *,
    model: ModelInfo | None = None,
    capacity: Mapping[str, float] | None = None,
) -> WorkerRecord:
    """Makes the record of a process that starts now, under an epoch of its own."""
    return WorkerRecord(
        id=config.id or f"{role}-{secrets.token_hex(4)}",
        epoch=secrets.token_hex(16),
        role=role,
        address=running.address,
        model=model,
        capacity=capacity or {},
    )


@contextlib.asynccontextmanager
async def registered(
    mesh: MeshConfig,
    record: WorkerRecord,
    running: Running,
    load: Callable[[], Mapping[str, float]],
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Keeps a record in the registry from the moment that calls are answered.

    Yields:
        A function that leaves the registry; leaving the context does too.
    """
    async with contextlib.aclosing(connect(mesh.redis())) as client:
        heartbeat = Heartbeat(
            Registry(client, mesh.name),
            record,
            load,
            interval_s=mesh.heartbeat_interval_s,
            ttl_s=mesh.heartbeat_ttl_s,
        )

        async def beat() -> None:
            await running.serving.wait()
            await heartbeat.run()

        async with background(beat()):
            try:
                yield heartbeat.leave
            finally:
                await heartbeat.leave()
