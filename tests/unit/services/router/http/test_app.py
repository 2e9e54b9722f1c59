"""The application without a mesh: routes, what becomes of errors, and of clients that leave."""

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.recipe import codec

from flashmesh.services.router.config import RouterConfig
from flashmesh.services.router.door import Door
from flashmesh.services.router.http.app import MODEL_PATH, App
from flashmesh.services.router.http.keys import ApiKeys, Tenant, hash_key
from flashmesh.services.router.quota import Quota, Quotas

ROOT = Path(__file__).parents[5]
SECRET = "a sentence of the prompt"


@pytest.fixture
def app():
    mesh = SimpleNamespace(config=RouterConfig())
    return App(
        Door(mesh, codec(), Quotas(None, "test", Quota())),
        ApiKeys({hash_key("key"): Tenant("t", b"s" * 32)}),
    )


class Connection:
    """One request: `answer` runs it; the body comes first, and after `leave` the end of the connection."""

    def __init__(self, app, method="GET", path="/health", body=b"", headers=None):
        self._app = app
        names = {"x-api-key": "key", "content-type": "application/json"} | (headers or {})
        pairs = [(name.encode(), value.encode()) for name, value in names.items()]
        self._scope = {"type": "http", "method": method, "path": path, "headers": pairs}
        self._body = [body] if method == "POST" else []
        self._left = asyncio.Event()
        self.messages = []

    def leave(self):
        self._left.set()

    async def answer(self):
        await self._app(self._scope, self._receive, self._send)
        return self

    async def _receive(self):
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.messages.append(message)

    @property
    def status(self):
        return self.messages[0]["status"] if self.messages else None

    @property
    def error(self):
        return json.loads(self.messages[1]["body"])


def test_the_description_names_every_route_and_no_other(app):
    description = yaml.safe_load((ROOT / "docs" / "openapi.yaml").read_text())["paths"]
    described = {
        (path.replace("{model}", ""), method.upper())
        for path, methods in description.items()
        for method in methods
    }
    assert described == {
        (path, method) for path, methods in app.routes.items() for method in methods
    }


async def test_an_unexpected_error_tells_nothing_but_is_logged_under_its_id(app, caplog):
    async def endpoint(arrived):
        raise ZeroDivisionError("decode-0 at 10.0.0.1")

    app.routes["/health"]["GET"] = endpoint
    connection = await Connection(app).answer()
    assert connection.status == 500
    assert "10.0.0.1" not in json.dumps(connection.error)
    assert any(record.exc_info for record in caplog.records)
    headers = dict(connection.messages[0]["headers"])
    assert headers[b"x-request-id"] == headers[b"request-id"]


async def test_a_client_that_leaves_cancels_the_work(app):
    begun, cancelled = asyncio.Event(), []

    async def endpoint(arrived):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    app.routes["/health"]["GET"] = endpoint
    connection = Connection(app)
    answering = asyncio.ensure_future(connection.answer())
    await begun.wait()
    connection.leave()
    await answering
    assert cancelled == [True]
    assert connection.messages == []


async def test_a_client_that_leaves_with_its_whole_answer_lets_the_work_end(app):
    ended = []

    async def endpoint(arrived):
        await arrived.response.events(b"all", last=True)
        connection.leave()
        for _ in range(10):
            await asyncio.sleep(0)
        ended.append(True)

    app.routes["/health"]["GET"] = endpoint
    connection = Connection(app)
    await connection.answer()
    assert ended == [True]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/models", {"x-api-key": "wrong"}, 401),
        ("GET", "/v1/models/x", {"x-api-key": ""}, 401),
        ("GET", "/nowhere", {}, 404),
        ("PUT", "/health", {}, 405),
        ("POST", "/v1/messages", {"content-type": "text/plain"}, 415),
    ],
)
async def test_what_is_refused_before_any_endpoint(app, method, path, headers, status):
    assert (await Connection(app, method, path, headers=headers).answer()).status == status


@pytest.mark.parametrize(
    ("path", "headers", "anthropic"),
    [
        ("/v1/messages", {}, True),
        ("/v1/chat/completions", {}, False),
        (f"{MODEL_PATH}x", {"anthropic-version": "2023-06-01"}, True),
        (f"{MODEL_PATH}x", {}, False),
    ],
)
async def test_errors_have_the_shape_of_the_api_that_was_called(app, path, headers, anthropic):
    connection = await Connection(app, "PUT", path, headers=headers).answer()
    assert ("request_id" in connection.error) == anthropic


async def test_a_prompt_is_in_no_log_line(app, caplog):
    caplog.set_level(logging.DEBUG)
    body = json.dumps({"model": 5, "prompt": SECRET}).encode()
    connection = await Connection(app, "POST", "/v1/completions", body).answer()
    assert connection.status == 400
    assert SECRET not in caplog.text
