"""Four real processes on the simulated engine, where any wrong block is a wrong token."""

import signal
import subprocess
import sys
import threading

import grpc
import pytest
from support.mesh import start_mesh
from support.prompts import mesh_answer, offline_tokens, random_prompt
from support.waiting import wait_until

from flashmesh import errors
from flashmesh.client import RouterClient, prompt_request
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.types import SamplingParams
from flashmesh.v1 import router_pb2

LENGTHS = (1, 127, 128, 129, 269, 396, 400, 1000, 3000)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    settings = {
        "decode": {"num_pages": 512, "num_slots": 16},
        "prefill": {"chunk_tokens": 256},
        "router": {"max_attempts": 2},
        "model": {"sim_step_ms": 1.0},
    }
    with start_mesh(tmp_path_factory.mktemp("mesh"), num_decode=2, overrides=settings) as mesh:
        yield mesh


@pytest.fixture
def client(mesh):
    with mesh.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_stays_held(mesh):
    yield
    mesh.wait_idle()


@pytest.mark.parametrize("length", LENGTHS)
def test_cold_and_resent_give_the_tokens_of_one_process(client, length):
    prompt = random_prompt(length, seed=1)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    expected = offline_tokens(SimulatedEngine(), prompt, params)
    cold, cold_usage = mesh_answer(client, prompt, params)
    again, again_usage = mesh_answer(client, prompt, params)
    assert cold == again == expected
    assert cold_usage.cached_tokens == 0
    start = max(0, (length - 140) // 128 * 128)
    assert again_usage.cached_tokens == (start if start > 128 else 0)
    assert again_usage.completion_tokens == 12
    assert again_usage.prompt_tokens == length


def test_a_resent_prompt_takes_six_blocks_from_the_store_and_runs_no_prefill(mesh, client):
    prompt, params = random_prompt(1000, seed=2), SamplingParams(max_tokens=4)

    def counts():
        fetched = sum(
            mesh.metrics(name)["flashmesh_decode_blocks_fetched_total"]
            for name in mesh.names("decode")
        )
        computed = sum(
            mesh.metrics(name)["flashmesh_decode_blocks_computed_total"]
            for name in mesh.names("decode")
        )
        prefilled = mesh.metrics("prefill-0")["flashmesh_prefill_blocks_total"]
        return fetched, computed, prefilled

    before = counts()
    _, usage = mesh_answer(client, prompt, params)
    middle = counts()
    assert usage.cached_tokens == 0
    assert [b - a for a, b in zip(before, middle, strict=True)] == [6, 0, 6]
    _, usage = mesh_answer(client, prompt, params)
    assert usage.cached_tokens == 768
    assert [b - a for a, b in zip(middle, counts(), strict=True)] == [6, 0, 0]


def test_a_longer_prompt_continues_from_the_blocks_of_a_shorter_one(client):
    params = SamplingParams(max_tokens=4)
    prompt = random_prompt(2000, seed=3)
    mesh_answer(client, prompt[:1000], params)
    tokens, usage = mesh_answer(client, prompt, params)
    assert usage.cached_tokens >= 768
    assert tokens == offline_tokens(SimulatedEngine(), prompt, params)


def test_a_conversation_grows_over_the_blocks_that_decode_stored(mesh, client):
    params = SamplingParams(max_tokens=300)
    prompt = random_prompt(500, seed=4)
    answer, _ = mesh_answer(client, prompt, params)
    longer = [*prompt, *answer, *random_prompt(200, seed=5)]
    wanted = (len(longer) - 140) // 128 * 128
    tokens, usage = mesh_answer(client, longer, params)
    assert usage.cached_tokens >= 500 // 128 * 128
    assert usage.cached_tokens <= wanted
    assert tokens == offline_tokens(SimulatedEngine(), longer, params)


def test_prompts_with_different_cache_salts_share_nothing(client):
    prompt, params = random_prompt(1000, seed=6), SamplingParams(max_tokens=2)
    mesh_answer(client, prompt, params)
    request = prompt_request(prompt, params, seed=0)
    request.cache_salt = b"another"
    last = list(client.generate(request))[-1]
    assert last.usage.cached_tokens == 0


def test_many_requests_at_once_give_what_each_gives_alone(mesh):
    prompts = [random_prompt(50 + 90 * i, seed=7) for i in range(8)]
    params = SamplingParams(max_tokens=20)
    results = [None] * len(prompts)

    def ask(place):
        with mesh.client() as client:
            results[place], _ = mesh_answer(client, prompts[place], params)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine = SimulatedEngine()
    assert results == [offline_tokens(engine, prompt, params) for prompt in prompts]
    for name in mesh.names("decode"):  # load is counted at dispatch, so both took some
        assert mesh.metrics(name)["flashmesh_decode_tokens_total"] > 0


def test_a_client_killed_mid_stream_leaves_nothing_held_and_the_blocks_stored(mesh, client):
    prompt = random_prompt(1000, seed=8)
    ids = ",".join(map(str, prompt))
    code = (
        "import sys; from flashmesh.client import RouterClient, prompt_request;"
        "from flashmesh.types import SamplingParams;"
        f"request = prompt_request([{ids}], SamplingParams(max_tokens=50_000), seed=1);"
        f"client = RouterClient('{mesh.router_address}');"
        "[print(len(r.token_ids), flush=True) for r in client.generate(request)]"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout.readline()  # it streams
    assert mesh.held()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    mesh.wait_idle()
    _, usage = mesh_answer(client, prompt, SamplingParams(max_tokens=2))
    assert usage.cached_tokens == 768


def test_a_deadline_ends_the_request_everywhere(client):
    request = prompt_request(random_prompt(600, seed=9), SamplingParams(max_tokens=50_000), seed=1)
    with pytest.raises(errors.DeadlineExceeded):
        list(client.generate(request, timeout_s=0.5))


BAD_REQUESTS = {
    "empty prompt": ({"prompt": []}, "no prompt|prompt is empty"),
    "empty text": ({"prompt": ""}, "prompt is empty"),
    "token out of range": ({"prompt": [1, VOCAB_END := 4096]}, "4096 at position 1"),
    "negative max_tokens": ({"prompt": [5], "max_tokens": -1}, "max_tokens must be at least 1"),
    "zero max_tokens": ({"prompt": [5], "max_tokens": 0}, "max_tokens must be at least 1"),
    "temperature": ({"prompt": [5], "temperature": -0.5}, "temperature"),
    "nan": ({"prompt": [5], "temperature": float("nan")}, "temperature"),
    "top_p": ({"prompt": [5], "top_p": 0.0}, "top_p"),
    "stop token": ({"prompt": [5], "stop_token_ids": [VOCAB_END]}, "stop token id 4096"),
    "unknown model": ({"prompt": [5], "model": "other"}, "'other' is not served"),
    "too long": ({"prompt": [5] * 10, "max_tokens": 2**31 - 1}, "exceed the context"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_input_is_refused_with_its_reason(client, name):
    fields, text = BAD_REQUESTS[name]
    request = build(**fields)
    with pytest.raises(errors.InvalidRequest, match=text):
        list(client.generate(request))


def build(*, prompt, model="", **sampling):
    request = router_pb2.GenerateRequest(model=model)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)
    stops = sampling.pop("stop_token_ids", [])
    for key, value in sampling.items():
        setattr(request.sampling, key, value)
    request.sampling.stop_token_ids.extend(stops)
    return request


def raw_generate(mesh, data):
    with grpc.insecure_channel(
        mesh.router_address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        return list(channel.unary_stream("/flashmesh.v1.Router/Generate")(data, timeout=60))


def test_a_malformed_message_is_the_callers_fault(mesh):
    with pytest.raises(grpc.RpcError) as caught:
        raw_generate(mesh, b"\xff\xff\xff not protobuf")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be parsed" in caught.value.details()


def test_a_message_of_100_mb_is_refused(mesh):
    with pytest.raises(grpc.RpcError) as caught:
        raw_generate(mesh, bytes(100_000_000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_request_id_is_on_every_hop_and_the_prompt_on_none(mesh, client):
    request = prompt_request("a secret prompt", SamplingParams(max_tokens=2), seed=1)
    request_id = next(iter(client.generate(request))).request_id
    prompt = random_prompt(1000, seed=10)
    responses = list(client.generate(prompt_request(prompt, SamplingParams(max_tokens=2), seed=1)))
    long_id = responses[0].request_id
    wait_until(lambda: f'"{long_id}"' in mesh.log("prefill-0"), "prefill logs the id")
    wait_until(
        lambda: any(f'"{request_id}"' in mesh.log(name) for name in mesh.names("decode")),
        "decode logs the id",
    )
    assert f'"{long_id}"' in mesh.log("router")
    assert all("a secret prompt" not in mesh.log(name) for name in mesh.processes)


def test_every_service_answers_health_reflection_and_metrics(mesh):
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    from flashmesh.client import health_status

    for name in mesh.processes:
        assert health_status(mesh.address(name)) == "SERVING"
        assert "flashmesh_rpcs_total" in mesh.metrics(name)
        with grpc.insecure_channel(mesh.address(name)) as channel:
            services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert any(service.startswith("flashmesh.v1.") for service in services)


def test_unary_calls_work_beside_streams(client):
    ids = client.tokenize("Hello, world")
    assert ids
    assert isinstance(client, RouterClient)
