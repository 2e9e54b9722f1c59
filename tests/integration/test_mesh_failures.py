"""Workers that die or stop while they serve: the same tokens, or a named error."""

import threading

import pytest
import redis
from support.mesh import start_mesh
from support.prompts import mesh_answer, offline_tokens, random_prompt
from support.waiting import wait_until

from flashmesh import errors
from flashmesh.client import prompt_request
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.types import SamplingParams

PARAMS = SamplingParams(max_tokens=400, temperature=1.0, seed=3)


@pytest.mark.parametrize("how", ["kill", "suspend", "terminate"])
def test_a_decode_worker_lost_mid_stream_costs_a_pause_not_a_token(tmp_path, how):
    settings = {
        "model": {"sim_step_ms": 5.0},
        "router": {"stall_timeout_s": 2.0},
        "mesh": {"drain_grace_s": 0.2},
    }
    prompt = random_prompt(700, seed=1)
    with (
        start_mesh(tmp_path, num_decode=2, overrides=settings) as mesh,
        mesh.client() as client,
    ):
        stream = client.generate(prompt_request(prompt, PARAMS, seed=PARAMS.seed))
        tokens = list(next(stream).token_ids)
        getattr(mesh, how)(mesh.busy_decode())
        for response in stream:
            tokens += response.token_ids
        inexact = mesh.metrics("router")["flashmesh_router_failover_inexact_total"]
    assert tokens == offline_tokens(SimulatedEngine(), prompt, PARAMS)
    assert inexact == 0


def test_the_only_decode_worker_may_restart_in_the_middle_of_a_stream(tmp_path):
    prompt = random_prompt(700, seed=6)
    settings = {"model": {"sim_step_ms": 5.0}, "router": {"worker_wait_s": 60.0}}
    with start_mesh(tmp_path, overrides=settings) as mesh, mesh.client() as client:
        stream = client.generate(prompt_request(prompt, PARAMS, seed=PARAMS.seed))
        tokens = list(next(stream).token_ids)
        mesh.kill("decode-0")
        mesh.restart("decode-0")
        for response in stream:
            tokens += response.token_ids
    assert tokens == offline_tokens(SimulatedEngine(), prompt, PARAMS)


def test_a_prefill_worker_that_dies_is_replaced_by_another(tmp_path):
    settings = {
        "model": {"sim_step_ms": 50.0},
        "prefill": {"chunk_tokens": 128},
        "decode": {"store_generated": False},
    }
    prompt = random_prompt(4000, seed=2)
    params = SamplingParams(max_tokens=3)
    with (
        start_mesh(tmp_path, num_prefill=2, overrides=settings) as mesh,
        mesh.client() as client,
    ):
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(mesh_answer(client, prompt, params)[0])
        )
        thread.start()
        busy = []

        def one_is_busy():
            busy[:] = [
                name
                for name in mesh.names("prefill")
                if mesh.metrics(name)["flashmesh_prefill_blocks_total"] >= 3
            ]
            return bool(busy)

        wait_until(one_is_busy, "a prefill worker has stored three blocks")
        mesh.kill(busy[0])
        thread.join()
        other = next(name for name in mesh.names("prefill") if name != busy[0])
        stored_by_other = mesh.metrics(other)["flashmesh_prefill_blocks_total"]
    assert answers == [offline_tokens(SimulatedEngine(), prompt, params)]
    assert 0 < stored_by_other <= 30 - 3  # it went on from the stored blocks


def test_without_prefill_workers_decode_computes_the_prompt_itself(tmp_path):
    prompt, params = random_prompt(1000, seed=3), SamplingParams(max_tokens=5)
    with start_mesh(tmp_path, num_prefill=0) as mesh, mesh.client() as client:
        assert mesh_answer(client, prompt, params)[0] == offline_tokens(
            SimulatedEngine(), prompt, params
        )
        _, usage = mesh_answer(client, prompt, params)
        assert usage.cached_tokens == 768


def test_without_decode_workers_the_error_says_so(tmp_path):
    settings = {"router": {"worker_wait_s": 0.2}}
    request = prompt_request([5], SamplingParams(max_tokens=1), seed=1)
    with (
        start_mesh(tmp_path, num_decode=0, overrides=settings) as mesh,
        mesh.client() as client,
        pytest.raises(errors.WorkerLost, match="no decode worker"),
    ):
        list(client.generate(request))


def test_a_kvstore_node_that_dies_costs_its_blocks_and_no_request(tmp_path):
    prompt, params = random_prompt(1000, seed=4), SamplingParams(max_tokens=5)
    expected = offline_tokens(SimulatedEngine(), prompt, params)
    with start_mesh(tmp_path, num_kvstore=2) as mesh, mesh.client() as client:
        assert mesh_answer(client, prompt, params)[0] == expected
        (owner,) = (
            name for name in mesh.names("kvstore") if mesh.metrics(name)["flashmesh_kv_blocks"]
        )
        mesh.kill(owner)
        assert mesh_answer(client, prompt, params)[0] == expected
        (other,) = (name for name in mesh.names("kvstore") if name != owner)
        assert mesh.metrics(other)["flashmesh_kv_blocks"] >= 6


def test_without_redis_requests_go_on_with_the_workers_last_known(tmp_path):
    prompt, params = random_prompt(1000, seed=5), SamplingParams(max_tokens=5)
    expected = offline_tokens(SimulatedEngine(), prompt, params)
    with start_mesh(tmp_path) as mesh, mesh.client() as client:
        assert mesh_answer(client, prompt, params)[0] == expected
        with redis.Redis.from_url(mesh.redis_url) as server:
            server.shutdown(nosave=True)
        tokens, usage = mesh_answer(client, prompt, params)
        _, unseen = mesh_answer(client, random_prompt(1000, seed=6), params)
    assert tokens == expected
    assert usage.cached_tokens == 768, "the router remembers what it has seen a moment ago"
    assert unseen.cached_tokens == 0
