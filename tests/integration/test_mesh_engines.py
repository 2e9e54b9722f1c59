"""What prefill and decode promise beside tokens: choices, sharing, refusals, failover at any token."""

import asyncio
import concurrent.futures
import os
import random

import grpc
import pytest
from support.mesh import start_mesh
from support.prompts import mesh_answer, offline_tokens, random_prompt

from flashmesh import errors
from flashmesh.client import prompt_request
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.types import GrammarKind, GrammarSpec, SamplingParams
from flashmesh.v1 import router_pb2_grpc

NUM_SEEDS = int(os.environ.get("FLASHMESH_SEEDS", "3"))
"""`make soak` sets more."""


def answers(client, prompt, params):
    """Tokens by choice, and the usage."""
    tokens, usage = {}, None
    for response in client.generate(prompt_request(prompt, params, seed=params.seed)):
        tokens.setdefault(response.choice, []).extend(response.token_ids)
        if response.HasField("usage"):
            assert usage is None
            usage = response.usage
    return tokens, usage


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    settings = {
        "decode": {"num_pages": 64, "num_slots": 6, "step_rows": 64},
        "prefill": {"chunk_tokens": 256},
        "model": {"sim_step_ms": 1.0},
    }
    with start_mesh(tmp_path_factory.mktemp("mesh"), overrides=settings) as mesh:
        yield mesh
        mesh.wait_idle()


@pytest.mark.parametrize("length", [1, 300, 900])
def test_choices_are_different_answers_to_one_prompt_that_is_run_once(mesh, length):
    prompt = random_prompt(length, seed=7)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, num_choices=4)
    rows = mesh.metrics("decode-0")["flashmesh_rows_total"]
    with mesh.client() as client:
        tokens, usage = answers(client, prompt, params)
    mesh.wait_idle()
    rows = mesh.metrics("decode-0")["flashmesh_rows_total"] - rows
    assert tokens == {
        choice: offline_tokens(
            SimulatedEngine(),
            prompt,
            SamplingParams(max_tokens=12, temperature=1.0, seed=5, choice=choice),
        )
        for choice in range(4)
    }
    assert (usage.prompt_tokens, usage.completion_tokens) == (length, 48)
    drafts = 4 * 12 * 5  # at most so many rows were run and taken back
    assert rows <= min(length, 268) - 1 + 4 * 12 + drafts < 4 * min(length, 268) + 4 * 12 + drafts


def test_requests_with_one_prefix_compute_it_once(mesh):
    shared = random_prompt(2560, seed=8)
    prompts = [shared + random_prompt(300, seed=20 + i) for i in range(6)]
    params = SamplingParams(max_tokens=3)
    before = mesh.metrics("prefill-0")
    with mesh.client() as client, concurrent.futures.ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda prompt: mesh_answer(client, prompt, params)[0], prompts))
    after = mesh.metrics("prefill-0")
    assert results == [offline_tokens(SimulatedEngine(), prompt, params) for prompt in prompts]
    computed = after["flashmesh_prefill_blocks_total"] - before["flashmesh_prefill_blocks_total"]
    stored = (len(prompts[0]) - 140) // 128
    assert computed == 20 + 6 * (stored - 20)


def test_one_token_is_one_token(mesh):
    prompt = random_prompt(700, seed=9)
    with mesh.client() as client:
        for _ in range(2):
            tokens, usage = mesh_answer(client, prompt, SamplingParams(max_tokens=1))
            assert len(tokens) == usage.completion_tokens == 1
            assert usage.cached_tokens <= usage.prompt_tokens
    assert usage.cached_tokens == (700 - 140) // 128 * 128


async def test_requests_refused_or_aborted_leave_nothing_behind(mesh):
    """Half cannot be admitted (their grammar of limits is impossible), the others leave as they end."""
    rng = random.Random(4)
    async with mesh.router_channel() as channel:
        stub = router_pb2_grpc.RouterStub(channel)

        async def refused(index):
            params = SamplingParams(max_tokens=100 * 128)  # more pages than a worker has
            call = stub.Generate(prompt_request([index + 5], params, seed=1), timeout=30)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        async def aborted(index):
            count = rng.randint(1, 12)
            params = SamplingParams(max_tokens=count)
            prompt = random_prompt(rng.choice([3, 200, 500]), seed=index)
            call = stub.Generate(prompt_request(prompt, params, seed=1), timeout=60)
            received = 0
            try:
                async for response in call:
                    received += len(response.token_ids)
                    if received >= count - 1:
                        call.cancel()
            except asyncio.CancelledError:
                assert call.cancelled()

        await asyncio.gather(
            *(refused(i) if i % 2 else aborted(i) for i in range(200)), return_exceptions=False
        )
    mesh.wait_idle()
    for name in ("router", "prefill-0", "decode-0"):
        assert "Traceback" not in mesh.log(name)


GRAMMAR = GrammarSpec(
    kind=GrammarKind.JSON_SCHEMA,
    text='{"type": "array", "items": {"type": "integer"}, "minItems": 90, "maxItems": 90}',
)


def test_a_decode_worker_killed_at_any_token_changes_none(tmp_path):
    settings = {"model": {"sim_step_ms": 4.0}, "router": {"max_attempts": 6}}
    with start_mesh(tmp_path, num_decode=2, overrides=settings) as mesh, mesh.client() as client:
        for seed in range(NUM_SEEDS):
            rng = random.Random(seed)
            prompt = random_prompt(rng.choice([5, 300, 1000]), seed=seed)
            params = SamplingParams(
                max_tokens=120,
                temperature=rng.choice([0.0, 1.0]),
                seed=seed,
                num_choices=rng.choice([1, 2]),
                grammar=GRAMMAR if seed % 2 else None,
            )
            wanted, usage = answers(client, prompt, params)
            stop_at, killed, tokens = rng.randint(1, 60), None, {}
            for response in client.generate(prompt_request(prompt, params, seed=seed)):
                tokens.setdefault(response.choice, []).extend(response.token_ids)
                if killed is None and sum(map(len, tokens.values())) >= stop_at:
                    killed = mesh.busy_decode()
                    mesh.kill(killed)
            assert killed
            assert tokens == wanted, f"seed {seed}"
            assert response.usage.completion_tokens == usage.completion_tokens
            assert all(len(given) <= 120 for given in tokens.values())
            mesh.restart(killed)
        assert mesh.metrics("router")["flashmesh_router_failover_inexact_total"] == 0
        mesh.wait_idle()


def test_a_failover_after_the_prompts_blocks_are_lost_goes_on_and_is_counted(tmp_path):
    """Blocks computed after a hit differ in bits from the same blocks computed cold, and the digest tells."""
    prompt = random_prompt(900, seed=3)
    params = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True)
    settings = {"router": {"worker_wait_s": 60.0, "max_attempts": 9}}
    with (
        start_mesh(tmp_path, engine="reference", num_decode=2, overrides=settings) as mesh,
        mesh.client() as client,
    ):
        mesh_answer(
            client, prompt[:520], SamplingParams(max_tokens=1)
        )  # leaves a prefix in the store
        stream = client.generate(prompt_request(prompt, params, seed=1))
        tokens = list(next(stream).token_ids)
        mesh.kill("kvstore-0")
        mesh.restart("kvstore-0")
        mesh.kill(mesh.busy_decode())
        for response in stream:
            tokens += response.token_ids
        assert len(tokens) == response.usage.completion_tokens == 60
        assert mesh.metrics("router")["flashmesh_router_failover_inexact_total"] == 1


def test_a_full_worker_refuses_at_once(tmp_path):
    settings = {
        "decode": {"max_requests": 2},
        "router": {"max_attempts": 1},
        "model": {"sim_step_ms": 20.0},
    }
    with start_mesh(tmp_path, overrides=settings) as mesh, mesh.client() as client:
        params = SamplingParams(max_tokens=200)
        held = [client.generate(prompt_request([5 + i], params, seed=1)) for i in range(2)]
        for stream in held:
            next(stream)
        with pytest.raises(errors.Overloaded, match="2 requests are here already"):
            next(client.generate(prompt_request([9], params, seed=1)))
        for stream in held:
            stream.close()
