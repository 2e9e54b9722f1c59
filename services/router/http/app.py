"""The HTTP application: routes, keys, and what becomes of errors.

The client's leaving, its deadline and the router's stop cancel a request wherever it is, and with it all that it holds
in the mesh. Errors come in the shape of the API that was called. Of prompts, answers and unexpected errors nothing is
logged but the request's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

import prometheus_client

from flashmesh.services.router.http.endpoints import Arrived, Endpoints
from flashmesh.services.router.http.errors import ClientGoneError, HttpError, describe
from flashmesh.services.router.http.receiving import disconnected, headers_of, read_body
from flashmesh.services.router.http.sending import Response
from flashmesh.telemetry import request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from flashmesh.services.router.door import Door
    from flashmesh.services.router.http.keys import ApiKeys
    from flashmesh.services.router.http.receiving import Receive
    from flashmesh.services.router.http.sending import Send

    Endpoint = Callable[[Arrived], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)

REQUESTS = prometheus_client.Counter(
    "flashmesh_http_requests_total",
    "Finished HTTP requests; status 499 is a client that left.",
    ["route", "status"],
)
CLIENT_LEFT = 499
MODEL_PATH = "/v1/models/"
OPEN_PATHS = ("/health",)


class App:
    """The ASGI application.

    Args:
        door: the way to the mesh.
        keys: who may call.

    Attributes:
        routes: path to method to endpoint; `MODEL_PATH` is followed by a name.
    """

    def __init__(self, door: Door, keys: ApiKeys) -> None:
        self._config = door.mesh.config
        self._keys = keys
        self._endpoints = Endpoints(door)
        self.routes: dict[str, dict[str, Endpoint]] = {
            "/v1/chat/completions": {"POST": self._endpoints.chat},
            "/v1/completions": {"POST": self._endpoints.completion},
            "/v1/responses": {"POST": self._endpoints.responses},
            "/v1/messages": {"POST": self._endpoints.messages},
            "/v1/messages/count_tokens": {"POST": self._endpoints.count_tokens},
            "/v1/models": {"GET": self._endpoints.models},
            MODEL_PATH: {"GET": self._endpoints.model},
            "/health": {"GET": self._endpoints.health},
        }

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request."""
        started = time.monotonic()
        request_id.set(f"req-{secrets.token_hex(8)}")
        path = scope["path"]
        route = MODEL_PATH if path.startswith(MODEL_PATH) else path
        route = route if route in self.routes else "unknown"
        ids = {"x-request-id": request_id.get(), "request-id": request_id.get()}
        response = Response(send, ids, self._config.http_send_timeout_s)
        status: int | None = CLIENT_LEFT
        try:
            await self._answer(scope, receive, response, route)
            status = response.status
        except ClientGoneError:
            pass
        except Exception as error:
            status = await _refuse(error, scope, response)
        finally:
            REQUESTS.labels(route, str(status)).inc()
            seconds = time.monotonic() - started
            details = {"route": route, "status": status, "ms": round(seconds * 1e3)}
            log.info("http request ended", extra=details)

    async def _answer(
        self, scope: dict[str, Any], receive: Receive, response: Response, route: str
    ) -> None:
        endpoint = self._find(route, scope["method"])
        headers = headers_of(scope)
        tenant = None if route in OPEN_PATHS else self._keys.authenticate(headers)
        body = b""
        if scope["method"] == "POST":
            body = await read_body(receive, headers, self._config.http_max_body_bytes)
        name = scope["path"].removeprefix(MODEL_PATH)
        work = endpoint(Arrived(headers, body, name, tenant, response))
        await _while_connected(receive, response, work)

    def _find(self, route: str, method: str) -> Endpoint:
        methods = self.routes.get(route)
        if methods is None:
            raise HttpError(404, "there is no such route")
        if method not in methods:
            allowed = ", ".join(methods)
            raise HttpError(405, f"the method must be {allowed}", {"allow": allowed})
        return methods[method]


async def _while_connected(
    receive: Receive, response: Response, work: Coroutine[Any, Any, None]
) -> None:
    """Runs the work, unless the client leaves first.

    Raises:
        ClientGoneError: it did; the work was cancelled and has ended.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not response.complete:
            raise ClientGoneError
        await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _refuse(error: Exception, scope: Mapping[str, Any], response: Response) -> int:
    """Answers with an error, unless its stream has already ended with one; returns its status."""
    problem = describe(error)
    if problem.status == 500:
        log.error("failed", exc_info=error)
    if response.status is None:
        anthropic = scope["path"].startswith("/v1/messages") or any(
            name == b"anthropic-version" for name, _ in scope["headers"]
        )
        body = problem.body(anthropic=anthropic, request_id=request_id.get())
        with contextlib.suppress(ClientGoneError):
            await response.whole(problem.status, body, problem.headers)
    return problem.status
