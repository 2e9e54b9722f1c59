"""The life of a service process: start, serve, drain, stop, in the same order everywhere.

Start: logs, secrets, safe bind, metrics, gRPC server with health (NOT_SERVING), then the service's own start-up, then
its record in the registry, then SERVING. SIGTERM or SIGINT: NOT_SERVING, the service leaves the registry and takes no
new work, running calls finish within the grace, the rest is cancelled. A second signal ends the process at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from flashmesh import telemetry
from flashmesh.config import MeshConfig, ServiceConfig, is_loopback
from flashmesh.errors import ConfigError, FlashmeshError
from flashmesh.rpc import SERVER_OPTIONS, Interceptor

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Running:
    """A service that is up, as its own start-up code sees it.

    Attributes:
        server: add the servicers here before returning.
        service_names: full gRPC names, for health and reflection.
        further_ports: name to port of what else the service listens on, for its port file.
        address: host:port that others reach it by.
        serving: set when calls are answered.
        announced: set when the registry has been told so, or could not be.
        stopping: set when the process has been told to stop.
    """

    server: grpc.aio.Server
    address: str
    service_names: list[str] = field(default_factory=list)
    further_ports: dict[str, int] = field(default_factory=dict)
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


Start = Callable[[Running], AbstractAsyncContextManager[Callable[[], Awaitable[None]]]]
"""A service's start-up: adds servicers, yields its drain function, and on exit closes what it opened."""


def run(name: str, mesh: MeshConfig, config: ServiceConfig, start: Start) -> None:
    """Runs a service until it is told to stop.

    Raises:
        ConfigError: the bind address needs credentials that are not configured.
        FlashmeshError: what else ended the start-up or a loop of the service.
    """
    import uvloop

    telemetry.setup_logging(name, mesh.log_level)
    expected: FlashmeshError | None = None
    try:
        uvloop.run(_serve(name, mesh, config, start))
    except* FlashmeshError as group:  # out of task groups it comes wrapped
        expected = _first(group)
    if expected is not None:
        raise expected


def service_main(main: Callable[[Path | None], None]) -> None:
    """Runs a service module as a program: `--config FILE`, one clear line for every expected error."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; see docs/running.md")
    try:
        main(parser.parse_args().config)
    except FlashmeshError as error:
        sys.exit(f"flashmesh: {error}")


def _first(group: BaseExceptionGroup[FlashmeshError]) -> FlashmeshError:
    error: FlashmeshError | BaseExceptionGroup[FlashmeshError] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _serve(name: str, mesh: MeshConfig, config: ServiceConfig, start: Start) -> None:
    host, _, port = config.bind.rpartition(":")
    token, tls = mesh.secret(), mesh.tls()
    if not is_loopback(host) and not (token or tls):
        raise ConfigError(
            f"{name}.bind = {config.bind}: off loopback the mesh needs a token (mesh.token_file) or "
            "mutual TLS (mesh.tls_ca_file, tls_cert_file, tls_key_file)"
        )
    server = grpc.aio.server(interceptors=[Interceptor(token)], options=SERVER_OPTIONS)
    address = f"{host}:{port}"
    bound = (
        server.add_secure_port(address, tls.server_credentials())
        if tls
        else server.add_insecure_port(address)
    )
    health_servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    running = Running(server, config.advertise or _advertised(host, bound))
    _stop_on_signals(running.stopping)
    with _metrics(host, config.metrics_port) as metrics_port:
        async with start(running) as drain:
            if is_loopback(host):  # elsewhere the descriptors are nobody's business
                reflection.enable_server_reflection(
                    [*running.service_names, reflection.SERVICE_NAME], server
                )
            await server.start()
            running.serving.set()
            await running.announced.wait()  # who sees SERVING may count on being sent work
            await _set_health(health_servicer, running.service_names, serving=True)
            ports = {"port": bound, "metrics_port": metrics_port, **running.further_ports}
            _write_ports(config.port_file, ports)
            log.info("serving", extra={"address": running.address, "metrics_port": metrics_port})
            await running.stopping.wait()
            log.info("draining")
            await _set_health(health_servicer, running.service_names, serving=False)
            await drain()
            await server.stop(mesh.drain_grace_s)
    log.info("stopped")


def _advertised(host: str, port: int) -> str:
    if host in ("0.0.0.0", "[::]", "::", ""):
        return f"{socket.gethostname()}:{port}"
    return f"{host}:{port}"


def _stop_on_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(1)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


@contextlib.contextmanager
def _metrics(host: str, port: int) -> Iterator[int | None]:
    if port < 0:
        yield None
        return
    server, bound = telemetry.start_metrics(host, port)
    try:
        yield bound
    finally:
        server.shutdown()
        server.server_close()


async def _set_health(
    servicer: health.HealthServicer, names: Sequence[str], *, serving: bool
) -> None:
    status = health_pb2.HealthCheckResponse
    for name in ("", *names):
        await servicer.set(name, status.SERVING if serving else status.NOT_SERVING)


def _write_ports(path: str, ports: dict[str, int | None]) -> None:
    if path:
        target = Path(path)
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(ports))
        temporary.replace(target)


@contextlib.asynccontextmanager
async def background(*tasks: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs loops beside the body; a loop that dies takes the body with it, and the body's end cancels the loops."""
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(task) for task in tasks]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
