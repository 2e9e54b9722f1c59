"""The two ends of one ASGI request, without a server."""

import asyncio

import pytest

from flashmesh.errors import InvalidRequest
from flashmesh.services.router.http.errors import ClientGoneError, HttpError
from flashmesh.services.router.http.receiving import deadline_s, read_body
from flashmesh.services.router.http.sending import KEEP_ALIVE, Response


class Client:
    """Takes what is sent; `blocked` keeps it from reading."""

    def __init__(self):
        self.messages = []
        self.sent = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def __call__(self, message):
        await self.reads.wait()
        self.messages.append(message)
        self.sent.set()

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.messages)


def body_in(*parts, gone=False):
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if gone:
        messages.append({"type": "http.disconnect"})
    else:
        messages[-1]["more_body"] = False
    taken = []

    async def receive():
        taken.append(messages[len(taken)])
        return taken[-1]

    receive.taken = taken
    return receive


async def test_a_body_comes_in_parts():
    assert await read_body(body_in(b"{", b"}"), {}, 2) == b"{}"


async def test_a_body_above_the_limit_is_read_to_its_end_and_refused():
    receive = body_in(b"aa", b"aa")
    with pytest.raises(HttpError) as caught:
        await read_body(receive, {}, 3)
    assert caught.value.status == 413
    assert len(receive.taken) == 2


async def test_a_body_without_end_is_not_read_on():
    receive = body_in(*[b"aaaa"] * 100)
    with pytest.raises(HttpError):
        await read_body(receive, {}, 4)
    assert len(receive.taken) < 10


async def test_another_media_type_is_refused():
    with pytest.raises(HttpError, match="application/json, not 'text/plain'"):
        await read_body(body_in(b"{}"), {"content-type": "text/plain; charset=x"}, 9)


async def test_a_client_that_leaves_in_the_body_is_gone():
    with pytest.raises(ClientGoneError):
        await read_body(body_in(b"{", gone=True), {}, 9)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "", "９", "1" * 30])
def test_a_bad_deadline_is_refused(value):
    with pytest.raises(InvalidRequest, match="x-flashmesh-deadline-ms"):
        deadline_s({"x-flashmesh-deadline-ms": value})


def test_a_deadline_is_in_milliseconds():
    assert deadline_s({"x-flashmesh-deadline-ms": "1500"}) == 1.5


async def test_headers_wait_for_the_first_event_and_the_last_one_ends_the_response():
    client = Client()
    response = Response(client, {"x-request-id": "1"}, 9)
    await response.events(b"")
    assert client.messages == []
    await response.events(b"one")
    await response.events(b"two", last=True)
    await response.events(b"late")
    assert client.messages[0]["type"] == "http.response.start"
    assert client.body == b"onetwo"
    assert [message.get("more_body") for message in client.messages] == [None, True, False]
    assert response.complete


async def test_silence_is_filled_with_comments_and_makes_the_response_begin():
    client = Client()
    response = Response(client, {}, 9)
    task = asyncio.ensure_future(response.keep_alive(0.01))
    await client.sent.wait()
    while KEEP_ALIVE not in client.body:
        await asyncio.sleep(0)
    task.cancel()
    await response.events(b"data", last=True)
    assert client.body.startswith(KEEP_ALIVE)
    assert client.body.endswith(b"data")
    assert sum(message["type"] == "http.response.start" for message in client.messages) == 1


async def test_a_client_that_does_not_read_counts_as_gone():
    client = Client()
    response = Response(client, {}, 0.01)
    await response.events(b"one")
    client.reads.clear()
    with pytest.raises(ClientGoneError):
        await response.events(b"two")
