"""A small blocking client of the router's Chat Completions, for the terminal; programs use the `openai` client.

Errors come out as the classes of `flashmesh.errors`, and leaving a stream early closes its connection, which frees
everything that the answer holds in the mesh.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashmesh.errors import (
    DeadlineExceeded,
    FlashmeshError,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    WorkerLost,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

_BY_STATUS: dict[int, type[FlashmeshError]] = {
    401: Unauthenticated,
    429: Overloaded,
    503: WorkerLost,
    504: DeadlineExceeded,
}


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to an answer.

    Attributes:
        finish_reason: set by the last one.
        usage: set by the last one: the counts as the API reports them.
    """

    thinking: str = ""
    content: str = ""
    finish_reason: str = ""
    usage: Mapping[str, Any] | None = None


class ChatClient:
    """Calls one router.

    Args:
        address: host:port of its HTTP server.
        key: API key or mesh token; empty for none.
        timeout_s: longest silence.
    """

    def __init__(self, address: str, key: str = "", *, timeout_s: float = 300.0) -> None:
        self.address = address
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s

    def models(self) -> list[str]:
        """Returns the names of the served models.

        Raises:
            FlashmeshError: what the router answered, or that there is none.
        """
        with contextlib.closing(self._connection()) as connection:
            listing = json.loads(self._send(connection, "GET", "/v1/models").read())
        return [card["id"] for card in listing["data"]]

    def stream(self, request: Mapping[str, Any]) -> Generator[Delta]:
        """Streams an answer.

        Args:
            request: a Chat Completions body; `stream` is set here.

        Raises:
            FlashmeshError: what the router answered, at once or in the middle, or that there is none.
        """
        body = json.dumps({**request, "stream": True}).encode()
        with contextlib.closing(self._connection()) as connection:
            response = self._send(connection, "POST", "/v1/chat/completions", body)
            for data in _events(response, self.address):
                yield _delta(json.loads(data))

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=self._timeout_s)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None = None,
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise WorkerLost(f"no router answers at http://{self.address}: {error}") from error
        kind = _BY_STATUS.get(response.status, InvalidRequest)
        raise kind(f"router {self.address}: {_message(text) or response.reason}")


def _events(response: http.client.HTTPResponse, address: str) -> Generator[bytes]:
    """Yields the data of server-sent events up to the end mark; comments keep the connection alive and say nothing."""
    try:
        for line in response:
            if line.startswith(b"data: "):
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                yield data
    except (OSError, http.client.HTTPException) as error:
        raise WorkerLost(f"router {address}: the stream broke: {error}") from error
    raise WorkerLost(f"router {address}: the stream ended in the middle")


def _delta(chunk: dict[str, Any]) -> Delta:
    if error := chunk.get("error"):
        raise WorkerLost(str(error["message"]))
    choice = chunk["choices"][0]
    delta = choice["delta"]
    return Delta(
        delta.get("reasoning_content") or "",
        delta.get("content") or "",
        choice["finish_reason"] or "",
        chunk.get("usage"),
    )


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
