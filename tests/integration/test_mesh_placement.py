"""Where the router sends work: bursts spread, shared prefixes are computed once, whichever workers serve."""

import asyncio
import contextlib

import grpc.aio
import openai
from support.mesh import start_mesh
from support.prompts import offline_tokens, random_prompt

from flashmesh.client import prompt_request
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.kv_client import KvClient
from flashmesh.redis_client import connect
from flashmesh.registry import Registry
from flashmesh.rpc import Channels
from flashmesh.services.router.prefix import Call, Prefix
from flashmesh.types import SamplingParams
from flashmesh.v1 import router_pb2_grpc

ONE = SamplingParams(max_tokens=1)
MODEL = "DeepSeek-V4.1-Flash-demo"


async def burst(address, prompts):
    """Sends all at once; returns each one's tokens."""

    async def ask(stub, prompt):
        call = stub.Generate(prompt_request(prompt, ONE, seed=1), timeout=120)
        return [token async for response in call for token in response.token_ids]

    async with grpc.aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        return await asyncio.gather(*(ask(stub, prompt) for prompt in prompts))


async def http_burst(address, prompts):
    """The same over HTTP; returns how many prompt tokens each was."""
    async with openai.AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key="none", max_retries=0
    ) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, timeout=120)
                for prompt in prompts
            )
        )
    return [answer.usage.prompt_tokens for answer in answers]


async def wait_stored(mesh, prompts):
    """Waits until every prompt's first block is on the node where the whole mesh places it."""
    async with (
        contextlib.aclosing(connect(mesh.redis_url)) as client,
        contextlib.aclosing(Channels()) as channels,
        asyncio.timeout(60),
    ):
        records = await Registry(client, "local").list()
        nodes = [record for record in records if record.role == "kvstore"]
        assert len(nodes) == len(mesh.names("kvstore"))
        model = next(record.model for record in records if record.model)
        calls = [Call(request_id="", model=model, prompt=p, params=ONE) for p in prompts]
        for prefix in [Prefix(call, 1, nodes) for call in calls]:
            while await prefix.count_present(KvClient(channels)) < 1:
                await asyncio.sleep(0.01)


def blocks_by_worker(mesh):
    return {
        name: mesh.metrics(name)["flashmesh_prefill_blocks_total"] for name in mesh.names("prefill")
    }


async def test_a_mesh_that_is_up_places_its_first_requests_on_all_its_nodes(tmp_path):
    prompts = [random_prompt(300, seed=seed) for seed in range(16)]
    with start_mesh(tmp_path, num_kvstore=4) as mesh:
        await burst(mesh.router_address, prompts)
        await wait_stored(mesh, prompts)


async def test_a_burst_spreads_over_the_workers_and_a_shared_prefix_does_not(tmp_path):
    settings = {
        "model": {"sim_row_ms": 0.02},
        "prefill": {"max_waiting": 64},
        "decode": {"max_requests": 256},
        "router": {"max_requests": 256, "stall_timeout_s": 60.0},
    }
    with start_mesh(tmp_path, num_prefill=4, overrides=settings) as mesh:
        before = blocks_by_worker(mesh)
        different = [random_prompt(4000, seed=seed) for seed in range(64)]
        results = await burst(mesh.router_address, different)
        spread = [after - before[name] for name, after in blocks_by_worker(mesh).items()]
        assert sum(spread) == 64 * 30
        assert max(spread) / min(spread) <= 1.5, spread
        for prompt in different[:3]:
            expected = offline_tokens(SimulatedEngine(), prompt, ONE)
            assert expected == results[different.index(prompt)]

        before = blocks_by_worker(mesh)
        others = [random_prompt(2000, seed=seed) for seed in range(500, 564)]
        assert await http_burst(mesh.http_address, others) == [2000] * 64
        spread = [after - before[name] for name, after in blocks_by_worker(mesh).items()]
        assert max(spread) / min(spread) <= 1.5, spread

        before = blocks_by_worker(mesh)
        system = random_prompt(128 * 100, seed=1000)
        sessions = [system + random_prompt(200, seed=seed) for seed in range(64)]
        results = await burst(mesh.router_address, sessions)
        computed = sum(blocks_by_worker(mesh).values()) - sum(before.values())
        assert computed == 100
        assert results[7] == offline_tokens(SimulatedEngine(), sessions[7], ONE)
