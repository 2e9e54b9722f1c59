"""The asynchronous gRPC client against a real mesh: what the blocking one says, and the same errors."""

import asyncio
import contextlib

import pytest
from support.mesh import start_mesh

from flashmesh import errors
from flashmesh.answers import Answer
from flashmesh.client import AsyncRouterClient, prompt_request
from flashmesh.types import SamplingParams


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    settings = {"model": {"sim_step_ms": 1.0}, "mesh": {"token": "secret"}}
    with start_mesh(tmp_path_factory.mktemp("mesh"), overrides=settings) as mesh:
        yield mesh


def request(max_tokens=12):
    return prompt_request("hello", SamplingParams(max_tokens=max_tokens, temperature=1.0), seed=3)


async def test_many_answers_at_once_are_those_of_the_blocking_client(mesh):
    with mesh.client("secret") as blocking:
        expected = Answer().read(blocking.parts(request())).whole

    async with AsyncRouterClient(mesh.router_address, "secret") as client:

        async def ask():
            return [token async for part in client.parts(request()) for token in part.token_ids]

        assert await asyncio.gather(*(ask() for _ in range(5))) == [expected.token_ids] * 5
        assert await client.tokenize("hello") == await client.tokenize("hello", parse_special=True)


async def test_leaving_early_frees_everything(mesh):
    async with (
        AsyncRouterClient(mesh.router_address, "secret") as client,
        contextlib.aclosing(client.parts(request(50_000))) as parts,
    ):
        await anext(parts)
        assert mesh.held()
    mesh.wait_idle()


@pytest.mark.parametrize(
    ("address", "token", "error"),
    [
        (None, "wrong", errors.Unauthenticated),
        ("127.0.0.1:1", "secret", errors.WorkerLost),
    ],
)
async def test_errors_are_named(mesh, address, token, error):
    async with AsyncRouterClient(address or mesh.router_address, token) as client:
        with pytest.raises(error):
            await client.tokenize("x")
        with pytest.raises(error):
            await anext(client.parts(request()))


async def test_a_deadline_is_an_error_of_its_own(mesh):
    async with AsyncRouterClient(mesh.router_address, "secret") as client:
        with pytest.raises(errors.DeadlineExceeded):
            async for _ in client.parts(request(50_000), timeout_s=0.5):
                pass
    mesh.wait_idle()
