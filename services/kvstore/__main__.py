"""Wiring of a kvstore node: `python -m flashmesh.services.kvstore --config FILE`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from flashmesh import config
from flashmesh.config import MeshConfig
from flashmesh.index import IndexWriter
from flashmesh.index_sweep import keep_swept
from flashmesh.kv_client import KvClient
from flashmesh.lifecycle import Running, background, run, service_main
from flashmesh.membership import new_record, registered
from flashmesh.redis_client import connect
from flashmesh.registry import Registry
from flashmesh.rpc import Channels
from flashmesh.services.kvstore.arena import open_arena
from flashmesh.services.kvstore.config import KvstoreConfig
from flashmesh.services.kvstore.handover import hand_over
from flashmesh.services.kvstore.kept_id import with_kept_id
from flashmesh.services.kvstore.service import KvStoreServicer
from flashmesh.services.kvstore.store import Store
from flashmesh.services.kvstore.transfer import Transfer
from flashmesh.v1 import kvstore_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from redis.asyncio import Redis

log = logging.getLogger(__name__)


def main(path: Path | None) -> None:
    """Runs a kvstore node until it is told to stop."""
    sections = config.load(path, {"mesh": MeshConfig, "kvstore": KvstoreConfig})
    mesh, kvstore = sections["mesh"], sections["kvstore"]

    @contextlib.asynccontextmanager
    async def start(running: Running) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        arena = open_arena(kvstore.memory_bytes)
        store = Store(kvstore, arena.keep if arena else bytes)
        record = new_record("kvstore", with_kept_id(kvstore), running)
        epoch = bytes.fromhex(record.epoch)
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(
            KvStoreServicer(store, record.id, epoch, kvstore), running.server
        )
        Transfer(store, kvstore.max_wait_s, arena).add_to(running.server)
        running.service_names.append("flashmesh.v1.KvStore")
        async with (
            contextlib.aclosing(store),
            contextlib.aclosing(connect(mesh.redis())) as redis,
        ):
            index = IndexWriter(redis, mesh.name, epoch, store.inventory)
            store.index = index
            async with (
                background(index.run(), keep_swept(redis, mesh.name, record.epoch), store.run()),
                registered(
                    mesh, record, running, lambda: {"num_blocks": store.table.stats().num_blocks}
                ) as leave,
            ):

                async def drain() -> None:
                    await leave()
                    # Else the waiting Gets would sit out the grace and end as cancelled calls.
                    store.stop_waiting()
                    try:
                        async with asyncio.timeout(mesh.drain_grace_s):
                            await asyncio.gather(
                                store.flush(), _leave_to_others(store, redis, mesh)
                            )
                    except TimeoutError:
                        log.warning("drain cut short", extra={"grace_s": mesh.drain_grace_s})

                yield drain
            # Not earlier: the writer would take the gap for a loss and publish all again.
            await index.withdraw()

    run("kvstore", mesh, kvstore, start)


async def _leave_to_others(store: Store, redis: Redis, mesh: MeshConfig) -> None:
    """Hands over to the nodes of the registry, which this one has left."""
    try:
        records = await Registry(redis, mesh.name).list()
    except (RedisError, OSError) as error:
        log.warning("nobody known to hand over to", extra={"error": str(error)})
        return
    nodes = [(record.id, record.address) for record in records if record.role == "kvstore"]
    async with contextlib.aclosing(Channels(mesh.secret(), mesh.tls())) as channels:
        await hand_over(store, KvClient(channels), nodes)


if __name__ == "__main__":
    service_main(main)
