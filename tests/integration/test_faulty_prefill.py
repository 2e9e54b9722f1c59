"""Prefill workers that answer INTERNAL, hang or drop the connection: somebody else does it, nothing is left behind."""

import asyncio
import contextlib
import dataclasses

import grpc
import grpc.aio
import pytest
from support.mesh import start_mesh
from support.prompts import offline_tokens, random_prompt
from support.waiting import wait_until

from flashmesh.client import prompt_request
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.redis_client import connect
from flashmesh.registry import Registry
from flashmesh.types import SamplingParams
from flashmesh.v1 import prefill_pb2, prefill_pb2_grpc, router_pb2_grpc

PARAMS = SamplingParams(max_tokens=4)
SETTINGS = {"router": {"stall_timeout_s": 1.5, "max_attempts": 3}}


class Faulty(prefill_pb2_grpc.PrefillServicer):
    """A worker of the right protocol that never does its work."""

    def __init__(self, how):
        self.how = how
        self.attempts = []
        self.ended = asyncio.Event()

    async def Prefill(self, request, context):
        self.attempts.append(request.attempt)
        try:
            yield prefill_pb2.PrefillProgress(stored_blocks=request.hit_tokens // 128)
            if self.how == "internal":
                await context.abort(grpc.StatusCode.INTERNAL, "a bug")
            elif self.how == "reset":
                raise ConnectionResetError("gone")
            else:
                await asyncio.Event().wait()
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def registered(mesh, servicer):
    """Puts the faulty worker into the mesh's registry, as the one that is always tried first."""
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with contextlib.aclosing(connect(mesh.redis_url)) as redis:
        registry = Registry(redis, "local")
        decode = next(record for record in await registry.list() if record.role == "decode")
        record = dataclasses.replace(
            decode,
            id="a-faulty-one",
            epoch="0" * 32,
            role="prefill",
            address=f"127.0.0.1:{port}",
            load={"rows_per_s": 1e9},
        )
        await registry.heartbeat(record, 600)
        try:
            yield
        finally:
            await registry.remove(record)
            await server.stop(None)


async def ask(mesh, prompt):
    async with mesh.router_channel() as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        call = stub.Generate(prompt_request(prompt, PARAMS, seed=1), timeout=60)
        return [token async for response in call for token in response.token_ids]


async def tried(mesh, servicer, seeds):
    """Asks new prompts until the router has learned of the faulty worker and tried it."""
    for seed in seeds:
        prompt = random_prompt(1000, seed=seed)
        assert await ask(mesh, prompt) == offline_tokens(SimulatedEngine(), prompt, PARAMS)
        if servicer.attempts:
            return
    raise AssertionError("it was never tried")


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("how", ["internal", "reset", "hang"])
async def test_a_faulty_prefill_worker_costs_time_only(tmp_path, how, num_prefill):
    servicer = Faulty(how)
    with start_mesh(tmp_path, num_prefill=num_prefill, overrides=SETTINGS) as mesh:
        async with registered(mesh, servicer):
            await tried(mesh, servicer, range(100, 160))
            assert servicer.attempts == [0]  # the second attempt went elsewhere
            attempts = mesh.metrics("router")
            failed = "WorkerLost" if how == "hang" else "WorkerFailed"
            assert attempts[f'flashmesh_router_attempts_total{{outcome="{failed}"}}'] == 1
            await asyncio.wait_for(servicer.ended.wait(), 60)  # also the hanging call
            wait_until(lambda: not mesh.metrics("kvstore-0")["flashmesh_kv_leases"], "no lease")


async def test_no_more_attempts_are_made_than_configured(tmp_path):
    servicer, refusals = Faulty("internal"), []
    with start_mesh(tmp_path, num_prefill=0, overrides={"router": {"max_attempts": 1}}) as mesh:
        async with registered(mesh, servicer):
            for seed in range(100, 160):
                try:
                    await ask(mesh, random_prompt(1000, seed=seed))
                except grpc.aio.AioRpcError as error:
                    refusals.append((error.code(), error.details()))
                    break
    assert servicer.attempts == [0]
    assert refusals == [(grpc.StatusCode.INTERNAL, "prefill a-faulty-one: a bug")]
