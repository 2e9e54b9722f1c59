"""An HTTP server inside the router's process and event loop (uvicorn; docs/log.md has the figures behind the choice).

It stops with the router: the listening socket closes when the router begins to drain, running answers may end within
the grace, the rest is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from flashmesh.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator

KEEP_ALIVE_S = 75
"""How long a connection may stay open between requests: longer than the usual pools and balancers keep theirs."""

BACKLOG = 1024


class _Server(uvicorn.Server):
    """Leaves the signals to the router."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class HttpServer:
    """A server that accepts connections.

    Attributes:
        port: the bound one.
    """

    def __init__(self, server: _Server, port: int) -> None:
        self._server = server
        self.port = port

    def begin_drain(self) -> None:
        """Accepts no more connections, and closes those without a request."""
        self._server.should_exit = True


@contextlib.asynccontextmanager
async def listening(
    app: Callable[[Any, Any, Any], Awaitable[None]], bind: str, grace_s: float
) -> AsyncIterator[HttpServer]:
    """Serves an ASGI application while the body runs.

    Args:
        app: what answers.
        bind: host:port; port 0 takes a free one.
        grace_s: how long running answers may take to end at the stop.

    Raises:
        ConfigError: the address cannot be bound.
    """
    sock = _bound(bind)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(grace_s)),
        backlog=BACKLOG,
    )
    server = _Server(config)
    port = sock.getsockname()[1]
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        yield HttpServer(server, port)
    finally:
        server.should_exit = True
        await serving


def _bound(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except (OSError, ValueError) as error:
        raise ConfigError(f"router.http_bind = {bind}: {error}") from error
    return sock
