"""The way out: one ASGI response, as a body or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flashmesh.services.router.http.errors import ClientGoneError

Send = Callable[[dict[str, Any]], Awaitable[None]]

KEEP_ALIVE = b": keep-alive\n\n"
EVENT_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx gathers events
}


class Response:
    """One response; its headers go out with the first bytes, so that an error before them keeps its own status.

    Args:
        send: of ASGI.
        headers: of every response to this request.
        timeout_s: longest wait for a client to read.

    Attributes:
        status: what was sent; None while nothing was.
        complete: the last byte was sent.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], timeout_s: float) -> None:
        self.status: int | None = None
        self.complete = False
        self._send = send
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._last_write = time.monotonic()
        # A keep-alive must not come between the headers and the first bytes.
        self._turn = asyncio.Lock()

    async def whole(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a JSON body and ends the response."""
        more = {"content-type": "application/json", "content-length": str(len(body))}
        await self._begin(status, more | dict(headers or {}))
        await self._write(body, more=False)

    async def events(self, data: bytes, *, last: bool = False) -> None:
        """Sends server-sent events, and ends the response with the last ones.

        Raises:
            ClientGoneError: the client has not read for too long.
        """
        async with self._turn:
            if not data or self.complete:
                return
            if self.status is None:
                await self._begin(200, EVENT_HEADERS)
            self._last_write = time.monotonic()
            await self._write(data, more=not last)

    async def keep_alive(self, interval_s: float) -> None:
        """Sends a comment whenever nothing else was sent for so long; runs until cancelled."""
        while True:
            await asyncio.sleep(max(0.0, self._last_write + interval_s - time.monotonic()))
            if time.monotonic() >= self._last_write + interval_s:
                await self.events(KEEP_ALIVE)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        pairs = [(k.encode(), v.encode()) for k, v in (self._headers | dict(headers)).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, body: bytes, *, more: bool) -> None:
        self.complete = not more
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as error:
            raise ClientGoneError from error
