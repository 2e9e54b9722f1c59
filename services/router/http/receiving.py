"""The way in: headers and body of one ASGI request, each within its limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flashmesh.errors import InvalidRequest
from flashmesh.services.router.http.errors import ClientGoneError, HttpError

Receive = Callable[[], Awaitable[dict[str, Any]]]

BODY_TIMEOUT_S = 60.0
DISCARD_FACTOR = 4
"""A body above the limit is read on and dropped up to this multiple: who still sends does not read the answer."""

PRIORITY_HEADER = "x-flashmesh-priority"
DEADLINE_HEADER = "x-flashmesh-deadline-ms"
MAX_DEADLINE_MS = 24 * 3600 * 1000


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Returns the headers, names in lower case; of a repeated one the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def whole_number(headers: Mapping[str, str], name: str) -> int | None:
    """Returns a header's number, None where it is absent.

    Raises:
        InvalidRequest: it is not a whole number.
    """
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 12):
        raise InvalidRequest(f"{name} must be a whole number")
    return int(text)


def deadline_s(headers: Mapping[str, str]) -> float | None:
    """Returns how long the request may take, None for as long as it needs.

    Raises:
        InvalidRequest: the header is not in its range.
    """
    given = whole_number(headers, DEADLINE_HEADER)
    if given is None:
        return None
    if not 1 <= given <= MAX_DEADLINE_MS:
        raise InvalidRequest(f"{DEADLINE_HEADER} must be in [1, {MAX_DEADLINE_MS}], not {given}")
    return given / 1000


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """Reads a JSON body.

    Raises:
        HttpError: 408 too slow, 413 too long, 415 another media type.
        ClientGoneError: the connection ended first.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size <= limit:
                    parts.append(part)
                if not message.get("more_body") or size > DISCARD_FACTOR * limit:
                    break
    except TimeoutError as error:
        raise HttpError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from error
    if size > limit:
        raise HttpError(413, f"the body is longer than {limit} bytes", {"connection": "close"})
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"the body must be application/json, not {kind[:40]!r}")
    return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone; call it when the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
