"""Wiring of a kvstore node: `python -m flashmesh.services.kvstore --config FILE`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from flashmesh import config
from flashmesh.config import MeshConfig
from flashmesh.index import IndexWriter
from flashmesh.lifecycle import Running, background, run, service_main
from flashmesh.membership import new_record, registered
from flashmesh.redis_client import connect
from flashmesh.services.kvstore.config import KvstoreConfig
from flashmesh.services.kvstore.service import KvStoreServicer
from flashmesh.services.kvstore.store import Store
from flashmesh.services.kvstore.transfer import Transfer
from flashmesh.v1 import kvstore_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


def main(path: Path | None) -> None:
    """Runs a kvstore node until it is told to stop."""
    sections = config.load(path, {"mesh": MeshConfig, "kvstore": KvstoreConfig})
    mesh, kvstore = sections["mesh"], sections["kvstore"]

    @contextlib.asynccontextmanager
    async def start(running: Running) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        record = new_record("kvstore", kvstore, running)
        epoch = bytes.fromhex(record.epoch)
        store = Store(kvstore)
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(
            KvStoreServicer(store, record.id, epoch, kvstore), running.server
        )
        Transfer(store, kvstore.max_wait_s).add_to(running.server)
        running.service_names.append("flashmesh.v1.KvStore")
        async with contextlib.aclosing(connect(mesh.redis())) as redis:
            index = IndexWriter(redis, mesh.name, epoch, store.inventory)
            store.index = index
            async with (
                background(index.run(), store.expire_leases()),
                registered(
                    mesh, record, running, lambda: {"num_blocks": store.table.stats().num_blocks}
                ) as leave,
            ):

                async def drain() -> None:
                    await leave()
                    # Else the waiting Gets would sit out the grace and end as cancelled calls.
                    store.stop_waiting()

                yield drain
            # Not earlier: the writer would take the gap for a loss and publish all again.
            await index.withdraw()

    run("kvstore", mesh, kvstore, start)


if __name__ == "__main__":
    service_main(main)
