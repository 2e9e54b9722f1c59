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
from flashmesh.services.router.door import Door
from flashmesh.services.router.generate import Mesh
from flashmesh.services.router.http.app import App
from flashmesh.services.router.http.keys import load_keys
from flashmesh.services.router.http.server import HttpServer, listening
from flashmesh.services.router.leases import Leases
from flashmesh.services.router.quota import Quota, Quotas
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
        channels = Channels(mesh.secret(), mesh.tls())
        client = KvClient(channels)
        leases = Leases(client, router.lease_ttl_s)
        door = Door(
            Mesh(
                router,
                Replicas(view, router.worker_wait_s),
                IndexReader(redis, mesh.name),
                leases,
                client,
                channels,
            ),
            codec,
            Quotas(
                redis,
                mesh.name,
                Quota(
                    requests_per_min=router.key_requests_per_min,
                    tokens_per_min=router.key_tokens_per_min,
                ),
            ),
        )
        router_pb2_grpc.add_RouterServicer_to_server(RouterServicer(door), running.server)
        running.service_names.append("flashmesh.v1.Router")
        record = new_record("router", router, running)
        async with (
            contextlib.aclosing(redis),
            contextlib.aclosing(channels),
            background(view.run(), leases.run()),
            registered(
                mesh, record, running, lambda: {"num_sequences": door.num_requests}
            ) as leave,
            http_door(door, mesh, running) as http,
        ):

            async def drain() -> None:
                if http is not None:
                    http.begin_drain()
                await leave()

            await view.polled.wait()  # the first request is to find everybody who is there
            yield drain

    run("router", mesh, router, start)


@contextlib.asynccontextmanager
async def http_door(
    door: Door, mesh: MeshConfig, running: Running
) -> AsyncIterator[HttpServer | None]:
    """Serves HTTP while the body runs, where that is configured.

    Raises:
        ConfigError: the address needs keys or cannot be bound, or the file of keys is not usable.
    """
    config = door.mesh.config
    if not config.http_bind:
        yield None
        return
    keys = load_keys(config, mesh.secret())
    async with listening(App(door, keys), config.http_bind, mesh.drain_grace_s) as server:
        running.further_ports["http_port"] = server.port
        yield server


if __name__ == "__main__":
    service_main(main)
