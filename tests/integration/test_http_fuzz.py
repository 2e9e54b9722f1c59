"""Requests by chance, from the OpenAPI description and beyond it: no 5xx, no crash, nothing left held."""

import json
import random
import socket
from pathlib import Path

import hypothesis
import pytest
import schemathesis
import yaml
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance
from support.http import call
from support.mesh import start_mesh

from flashmesh.services.router.http.receiving import DEADLINE_HEADER

DESCRIPTION = yaml.safe_load((Path(__file__).parents[2] / "docs" / "openapi.yaml").read_text())
MODEL = "DeepSeek-V4.1-Flash-demo"
NUM_EXAMPLES = 12
NUM_SPOILED = 150
REACHABLE = {"model": MODEL, "max_tokens": 4, "max_output_tokens": 4}
"""Else most requests would end at an unknown model, and some would ask for 65,536 tokens."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    with start_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        yield mesh
        mesh.wait_idle()
        assert mesh.processes["router"].num_starts == 1
        assert mesh.processes["router"].alive
        assert '"failed"' not in mesh.log("router")


@pytest.fixture(scope="module")
def described(mesh):
    schema = schemathesis.openapi.from_dict(DESCRIPTION)
    schema.config.update(base_url=f"http://{mesh.http_address}")
    return schema


def test_bytes_by_chance_never_bring_the_router_down(mesh):
    """Whole requests with bytes changed, cut short, or repeated, straight onto the socket."""
    chance = random.Random(7)
    host, _, port = mesh.http_address.partition(":")
    body = json.dumps({"messages": [{"role": "user", "content": "é"}], **REACHABLE}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    )
    request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    for _ in range(NUM_SPOILED):
        data = bytearray(request)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        data = data[: chance.randrange(1, len(data) + 1)] * chance.randrange(1, 3)
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert not answer.startswith(b"HTTP/1.1 5"), (bytes(data), answer)
    assert call(mesh.http_address, "GET", "/health")[0] == 200


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(
    ("path", "method"),
    [
        (path, method)
        for path, methods in DESCRIPTION["paths"].items()
        for method, operation in methods.items()
        if "requestBody" in operation
    ],
)
def test_no_request_is_a_server_error(described, path, method, mode):
    @hypothesis.settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(described[path][method].as_strategy(generation_mode=mode))
    def check(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body |= REACHABLE
        case.headers.pop(DEADLINE_HEADER, None)  # a short one is answered with 504, as it should be
        response = case.call(timeout=60)
        case.validate_response(response, checks=(not_a_server_error, response_schema_conformance))

    check()
