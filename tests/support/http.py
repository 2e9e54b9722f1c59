"""The official clients of a mesh, and raw HTTP for what they cannot send."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import TYPE_CHECKING, Any

import anthropic
import openai

if TYPE_CHECKING:
    from collections.abc import Mapping

    from support.mesh import Mesh


def call(
    address: str,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Makes one request; returns status, headers with names in lower case, and the body."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    given = {"content-type": "application/json", **(headers or {})}
    connection = http.client.HTTPConnection(address, timeout=120)
    with contextlib.closing(connection):
        connection.request(method, path, body, given)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return response.status, names, response.read()


def openai_client(mesh: Mesh, key: str = "none") -> openai.OpenAI:
    """The official client of a mesh, which tries once; a context manager."""
    return openai.OpenAI(base_url=f"http://{mesh.http_address}/v1", api_key=key, max_retries=0)


def anthropic_client(mesh: Mesh, key: str = "none") -> anthropic.Anthropic:
    """The other provider's."""
    return anthropic.Anthropic(base_url=f"http://{mesh.http_address}", api_key=key, max_retries=0)
