"""Wiring of a router: `python -m flashmesh.services.router --config FILE`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from flashmesh import config
from flashmesh.config import MeshConfig, ModelSection
from flashmesh.index import IndexReader
from flashmesh.kv_client import KvClient
from flashmesh.lifecycle import Running, background, run, service_main
from flashmesh.membership import new_record, registered
from flashmesh.redis_client import connect
from flashmesh.registry import Registry, RegistryView
from flashmesh.rpc import Channels
from flashmesh.services.router.config import RouterConfig
from flashmesh.services.router.generate import Mesh
from flashmesh.services.router.leases import Leases
from flashmesh.services.router.replicas import Replicas
from flashmesh.services.router.service import RouterServicer
from flashmesh.services.router.text import load_codec
from flashmesh.v1 import router_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


def main(path: Path | None) -> None:
    """Runs a router until it is told to stop."""
    sections = config.load(
        path, {"mesh": MeshConfig, "model": ModelSection, "router": RouterConfig}
    )
    mesh, model, router = sections["mesh"], sections["model"], sections["router"]

    @contextlib.asynccontextmanager
    async def start(running: Running) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        codec = load_codec(model)
        redis = connect(mesh.redis())
        view = RegistryView(Registry(redis, mesh.name))
        channels = Channels(mesh.secret())
        client = KvClient(channels)
        leases = Leases(client, router.lease_ttl_s)
        servicer = RouterServicer(
            Mesh(
                router,
                Replicas(view, router.worker_wait_s),
                IndexReader(redis, mesh.name),
                leases,
                client,
                channels,
            ),
            codec,
        )
        router_pb2_grpc.add_RouterServicer_to_server(servicer, running.server)
        running.service_names.append("flashmesh.v1.Router")
        record = new_record("router", router, running)
        async with (
            contextlib.aclosing(redis),
            contextlib.aclosing(channels),
            background(view.run(), leases.run()),
            registered(
                mesh, record, running, lambda: {"num_sequences": servicer.num_requests}
            ) as leave,
        ):
            yield leave

    run("router", mesh, router, start)


if __name__ == "__main__":
    service_main(main)
