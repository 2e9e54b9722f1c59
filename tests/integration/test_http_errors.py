"""What goes wrong over HTTP: every status in the provider's shape, and nothing left held."""

import contextlib
import http.client
import json
import signal
import socket

import anthropic
import openai
import pytest
from support.http import anthropic_client, call, openai_client
from support.mesh import start_mesh
from support.waiting import wait_until

from flashmesh.services.router.http.keys import draw_key

MODEL = "DeepSeek-V4.1-Flash-demo"
USER = [{"role": "user", "content": "hello"}]
MAX_BODY = 4_000_000
LONG = 60_000
NUM_REQUESTS = 6
MEGABYTE = " incrementaldecoder" * 55_000  # of the longest tokens, so that the store can lease it
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    settings = {
        "decode": {"num_pages": 2048},
        "router": {
            "http_max_body_bytes": MAX_BODY,
            "http_keep_alive_s": 0.1,
            "max_requests": NUM_REQUESTS,
            "worker_wait_s": 0.2,
        },
        "model": {"sim_step_ms": 2.0},
    }
    with start_mesh(tmp_path_factory.mktemp("mesh"), overrides=settings) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def _nothing_stays_held(mesh):
    yield
    mesh.wait_idle()


@pytest.fixture
def client(mesh):
    with openai_client(mesh) as client:
        yield client


@pytest.fixture
def claude(mesh):
    with anthropic_client(mesh) as client:
        yield client


def chat(client, **fields):
    fields = {"model": MODEL, "messages": USER, "max_tokens": 4} | fields
    return client.chat.completions.create(**fields)


def message(claude, **fields):
    fields = {"model": MODEL, "messages": USER, "max_tokens": 4} | fields
    return claude.messages.create(**fields)


def test_an_unknown_model_is_404_for_both_clients(client, claude):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="other")
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id
    with pytest.raises(anthropic.NotFoundError) as caught:
        message(claude, model="other")
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 7},
        {"top_p": 0},
        {"messages": []},
        {"n": 0},
        {"logprobs": False, "top_logprobs": 2},
        {"max_tokens": -1},
        {"extra_body": {"regex": 5}},
        {"extra_headers": {"x-flashmesh-priority": "high"}},
        {"extra_headers": {"x-flashmesh-priority": "101"}},
        {"extra_headers": {"x-flashmesh-deadline-ms": "0"}},
    ],
)
def test_bad_parameters_are_400(client, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.type == "invalid_request_error"


def test_bad_parameters_are_400_in_messages_too(claude):
    with pytest.raises(anthropic.BadRequestError) as caught:
        message(claude, extra_body={"top_k": -5})
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_a_prompt_beyond_the_context_is_named(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=2**30)
    assert caught.value.code == "context_length_exceeded"


def test_a_body_above_the_limit_is_413_for_both_clients(client, claude):
    big = [{"role": "user", "content": "x" * (MAX_BODY + 1)}]
    with pytest.raises(openai.APIStatusError) as caught:
        chat(client, messages=big)
    assert caught.value.status_code == 413
    with pytest.raises(anthropic.RequestTooLargeError):
        message(claude, messages=big)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models/x", 405),
        ("GET", "/v1/models/x", 404),
        ("GET", "/health", 200),
    ],
)
def test_routes_and_methods(mesh, method, path, status):
    found, headers, body = call(mesh.http_address, method, path)
    assert found == status
    assert ("allow" in headers) == (status == 405)
    assert ("error" in json.loads(body)) == (status != 200)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {}, 400),
        (b"{", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"[]", {}, 400),
        (b'{"model": 5}', {}, 400),
        (b'{"a": ' + b"[" * 200_000, {}, 400),
        (b'{"a": "\\ud800"}', {}, 400),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_what_is_not_a_request_is_refused(mesh, path, body, headers, status):
    found, _, answer = call(mesh.http_address, "POST", path, body, headers)
    assert found == status
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "text", ["👩‍🚀 漢字 ‮ é", "a\x00b", "￿\U0010ffff", "<｜Assistant｜></think>", MEGABYTE]
)
def test_any_text_is_a_prompt(client, claude, text):
    messages = [{"role": "user", "content": text}]
    assert chat(client, messages=messages, max_tokens=1).usage.completion_tokens == 1
    assert message(claude, messages=messages, max_tokens=1).usage.output_tokens == 1
    completion = client.completions.create(model=MODEL, prompt=text, max_tokens=1)
    assert completion.usage.completion_tokens == 1


def test_a_client_that_leaves_mid_stream_frees_everything(mesh, client):
    stream = chat(client, max_tokens=LONG, stream=True)
    next(stream)
    assert mesh.held()
    stream.close()
    mesh.wait_idle()


def test_a_client_that_leaves_before_the_answer_frees_everything(mesh):
    connection = http.client.HTTPConnection(mesh.http_address, timeout=60)
    with contextlib.closing(connection):
        body = json.dumps({"model": MODEL, "messages": USER, "max_tokens": LONG})
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        wait_until(lambda: bool(mesh.held()), "the request runs")
    mesh.wait_idle()


def test_too_many_requests_are_429_with_a_delay(mesh, client, claude):
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_REQUESTS):
            stream = stack.enter_context(chat(client, max_tokens=LONG, stream=True))
            next(stream)
        with pytest.raises(openai.RateLimitError) as caught:
            chat(client)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(anthropic.RateLimitError):
            message(claude)


def test_a_deadline_before_the_first_event_is_504(client):
    with pytest.raises(openai.InternalServerError) as caught:
        chat(client, max_tokens=LONG, extra_headers={"x-flashmesh-deadline-ms": "100"})
    assert caught.value.status_code == 504


@pytest.mark.parametrize(
    ("path", "fields", "event"),
    [
        (CHAT, {"messages": USER, "max_tokens": LONG}, None),
        ("/v1/completions", {"prompt": "x", "max_tokens": LONG, "ignore_eos": True}, None),
        ("/v1/messages", {"messages": USER, "max_tokens": LONG}, "error"),
        ("/v1/responses", {"input": "x", "max_output_tokens": LONG}, "error"),
    ],
)
def test_a_deadline_inside_a_stream_ends_it_with_the_apis_error_event(mesh, path, fields, event):
    body = {"model": MODEL, "stream": True, "min_tokens": 1000, **fields}
    headers = {"x-flashmesh-deadline-ms": "700"}
    status, _, data = call(mesh.http_address, "POST", path, body, headers)
    assert status == 200
    lines = dict(line.split(": ", 1) for line in data.decode().split("\n\n")[-2].split("\n"))
    assert lines.get("event") == event
    error = json.loads(lines["data"])
    assert "deadline" in error.get("error", error)["message"]


def test_silence_is_filled_with_comments_that_the_client_does_not_see(mesh, client):
    """A step that takes long: nothing is said before the first token but comments."""
    mesh.suspend("decode-0")
    connection = http.client.HTTPConnection(mesh.http_address, timeout=60)
    with contextlib.closing(connection):
        body = {"model": MODEL, "messages": USER, "max_tokens": 4, "stream": True}
        try:
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.readline() == b": keep-alive\n"
        finally:
            mesh.resume("decode-0")
        rest = response.read()
    assert rest.rstrip().endswith(b"data: [DONE]")


def test_the_prompt_is_in_no_log(mesh, client):
    chat(client, messages=[{"role": "user", "content": "a very secret sentence"}])
    with pytest.raises(openai.BadRequestError):
        chat(client, extra_body={"response_format": {"type": "a very secret sentence"}})
    assert all("a very secret sentence" not in mesh.log(name) for name in mesh.processes)


def test_the_request_id_of_the_answer_is_in_the_logs(mesh, client):
    request_id = chat(client)._request_id
    wait_until(lambda: request_id in mesh.log("decode-0"), "decode logs the id")
    assert request_id in mesh.log("router")


def test_without_a_decode_worker_it_is_503_with_a_delay(mesh, client, claude):
    mesh.terminate("decode-0")
    try:
        wait_until(lambda: call(mesh.http_address, "GET", "/health")[0] == 503, "it is gone")
        with pytest.raises(openai.InternalServerError) as caught:
            chat(client)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert "decode" not in str(caught.value.body)
        with pytest.raises(anthropic.APIStatusError) as caught:
            message(claude)
        assert caught.value.status_code == 503
    finally:
        mesh.restart("decode-0")
    wait_until(lambda: call(mesh.http_address, "GET", "/health")[0] == 200, "it is back")


def test_a_router_that_is_told_to_stop_finishes_its_streams_and_takes_no_more(mesh, client):
    router = mesh.processes["router"]
    address = mesh.http_address
    try:
        stream = chat(client, stream=True, max_tokens=400, extra_body={"min_tokens": 400})
        next(stream)
        router.signal(signal.SIGTERM)
        wait_until(lambda: refuses(address), "no connection is taken")
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert router.wait(60) == 0
    finally:
        mesh.kill("router")
        mesh.restart("router")


def refuses(address):
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_key_that_has_used_up_its_quota_is_told_when_to_come_again(tmp_path):
    keys, tables = zip(*(draw_key(name) for name in ("a", "b")), strict=True)
    (tmp_path / "keys.toml").write_text("".join(tables))
    settings = {
        "router": {
            "api_keys_file": tmp_path / "keys.toml",
            "key_requests_per_min": 100,
            "key_tokens_per_min": 60,
        }
    }
    with start_mesh(tmp_path / "mesh", overrides=settings) as mesh:
        with openai_client(mesh, keys[0]) as client:
            used = chat(client, max_tokens=50).usage.total_tokens
            assert used > 60
            with pytest.raises(openai.RateLimitError, match="the key's quota is used up") as caught:
                chat(client)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        with openai_client(mesh, keys[1]) as client:
            chat(client)


def test_keys_are_needed_where_there_are_any_and_tenants_share_no_block(tmp_path):
    keys, tables = zip(*(draw_key(name) for name in ("a", "b")), strict=True)
    (tmp_path / "keys.toml").write_text("".join(tables))
    settings = {"router": {"api_keys_file": tmp_path / "keys.toml"}}
    story = [{"role": "user", "content": "a long story " * 400}]
    with start_mesh(tmp_path / "mesh", overrides=settings) as mesh:
        assert call(mesh.http_address, "GET", "/health")[0] == 200
        for key in ("wrong", keys[0][:-1]):
            with (
                openai_client(mesh, key) as client,
                pytest.raises(openai.AuthenticationError) as caught,
            ):
                chat(client)
            assert caught.value.code == "invalid_api_key"
        with (
            anthropic_client(mesh, "wrong") as claude,
            pytest.raises(anthropic.AuthenticationError),
        ):
            message(claude)
        cached = []
        for key in (keys[0], keys[0], keys[1]):
            with openai_client(mesh, key) as client:
                usage = chat(client, messages=story, max_tokens=2).usage
            cached.append(usage.prompt_tokens_details.cached_tokens)
        assert cached[0] == cached[2] == 0
        assert cached[1] >= 768
        log = mesh.log("router")
        assert not any(key in log for key in keys)
