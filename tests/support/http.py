"""Raw HTTP for what the official clients cannot send."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import TYPE_CHECKING, Any

from support.waiting import wait_until

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


def wait_idle(mesh: Mesh) -> None:
    """Waits until no page, slot, request, lease or waiting Get is held anywhere."""
    wait_until(lambda: not held(mesh), "nothing is held in the mesh")


def held(mesh: Mesh) -> dict[str, float]:
    """What is held, by the name of its metric."""
    found: dict[str, float] = {}
    for name in (*mesh.names("prefill"), *mesh.names("decode")):
        values = mesh.metrics(name)
        found[f"{name} pages"] = values['flashmesh_pages{state="used"}']
        found[f"{name} slots"] = values['flashmesh_slots{state="used"}']
    for name in mesh.names("kvstore"):
        values = mesh.metrics(name)
        found[f"{name} leases"] = values["flashmesh_kv_leases"]
        found[f"{name} gets"] = values["flashmesh_kv_waiting_gets"]
    router = mesh.metrics("router")
    found["requests"] = router["flashmesh_router_requests"]
    found["leases"] = router["flashmesh_router_leases"]
    return {name: value for name, value in found.items() if value}
