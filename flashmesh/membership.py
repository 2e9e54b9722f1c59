"""How a service joins the registry once it serves, and leaves it before it stops."""

from __future__ import annotations

import contextlib
import logging
import secrets
from typing import TYPE_CHECKING

import redis.exceptions

from flashmesh import hashing
from flashmesh.lifecycle import Running, background
from flashmesh.redis_client import connect
from flashmesh.registry import Heartbeat, Registry, WorkerRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from flashmesh.config import MeshConfig, ServiceConfig
    from flashmesh.types import ModelInfo

log = logging.getLogger(__name__)


def new_record(
    role: str,
    config: ServiceConfig,
    running: Running,
    *,
    model: ModelInfo | None = None,
    capacity: Mapping[str, float] | None = None,
) -> WorkerRecord:
    """Makes the record of a process that starts now, under an epoch of its own.

    Raises:
        Incompatible: this build does not name blocks as it should.
    """
    hashing.check_scheme()
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

    Raises:
        Incompatible: the processes of this mesh name blocks otherwise.
    """
    async with contextlib.aclosing(connect(mesh.redis())) as client:
        registry = Registry(client, mesh.name)
        try:
            await registry.check_scheme(record)
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("hashing schemes not compared", extra={"error": str(error)})
        heartbeat = Heartbeat(
            registry,
            record,
            load,
            interval_s=mesh.heartbeat_interval_s,
            ttl_s=mesh.heartbeat_ttl_s,
            announced=running.announced,
        )

        async def beat() -> None:
            await running.serving.wait()
            await heartbeat.run()

        async with background(beat()):
            try:
                yield heartbeat.leave
            finally:
                await heartbeat.leave()
