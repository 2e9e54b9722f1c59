"""Random requests at the gRPC door: refused or answered, never an internal error, and nothing is left held."""

import asyncio
import random

import grpc.aio
import pytest
from support.mesh import start_mesh
from support.waiting import wait_until

from flashmesh.v1 import router_pb2, router_pb2_grpc, types_pb2

NUM_REQUESTS = 300
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}
NUMBERS = (-(2**31), -1, 0, 1, 2, 5, 127, 128, 4095, 4096, 2**31 - 1)
FLOATS = (-1e308, -3.0, -0.0, 0.0, 1e-300, 0.5, 1.0, 2.0, 1e308, float("inf"), float("nan"))
TEXTS = ("", "a", "\0", "é" * 300, "</think>", "\U0001f600", "x" * 20_000)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    with start_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        yield mesh


def random_sampling(rng):
    message = types_pb2.SamplingParams(max_tokens=rng.choice((1, 3, 8)))
    for field in message.DESCRIPTOR.fields:
        if rng.random() > 0.15 or (field.name == "max_tokens" and rng.random() > 0.1):
            continue
        match field.name:
            case "logit_bias":
                message.logit_bias[rng.choice((0, 5, 4095, 2**32 - 1))] = rng.choice(FLOATS)
            case "stop_token_ids":
                message.stop_token_ids.append(rng.choice((0, 7, 2**32 - 1)))
            case "grammar":
                message.grammar.kind = rng.choice((0, 1, 2, 3, 4, 5, 99))
                message.grammar.text = rng.choice((*TEXTS, "[0-9]+", "{}", '{"type": "object"}'))
            case _ if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
                setattr(message, field.name, rng.choice(FLOATS))
            case _ if field.cpp_type == field.CPPTYPE_BOOL:
                setattr(message, field.name, True)
            case _:
                signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
                setattr(message, field.name, rng.choice([n for n in NUMBERS if signed or n >= 0]))
    return message


def random_request(rng):
    request = router_pb2.GenerateRequest(
        sampling=random_sampling(rng),
        model=rng.choice(("", "", "", "nobody")),
        cache_salt=rng.choice((b"", b"", b"salt", b"x" * 300)),
        priority=rng.choice((0, 0, 0, 100, -101, 2**31 - 1)),
        stop=rng.choice(((), (), ("a",), ("",), ("x" * 300,), ("a",) * 20)),
    )
    match rng.randrange(4):
        case 0:
            request.text = rng.choice(TEXTS)
        case 1:
            ids = [rng.choice((0, 1, 64, 4095, 4096, 2**32 - 1)) for _ in range(rng.randrange(40))]
            request.token_ids.CopyFrom(types_pb2.TokenIds(ids=ids))
        case 2:
            for _ in range(rng.randrange(4)):
                request.conversation.turns.add(
                    role=rng.choice(("user", "assistant", "system", "tool", "", "x")),
                    content=rng.choice(TEXTS),
                    tool_calls_json=rng.choice(("", "", "[]", "{", "[1]", "null")),
                )
            request.conversation.tools_json = rng.choice(("", "", "[]", "{}", "[{}]", "[" * 5000))
    return request


async def test_no_request_is_an_internal_error(mesh):
    rng = random.Random(11)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    raw = [rng.randbytes(rng.randrange(1, 200)) for _ in range(50)]
    room = asyncio.Semaphore(16)
    async with mesh.router_channel() as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        bare = channel.unary_stream("/flashmesh.v1.Router/Generate")

        async def ask(method, request):
            async with room:
                call = method(request, timeout=20)
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError:
                    pass
                return await call.code(), await call.details()

        answers = await asyncio.gather(
            *(ask(stub.Generate, request) for request in requests),
            *(ask(bare, data) for data in raw),
        )
    for request, (code, details) in zip([*requests, *raw], answers, strict=True):
        assert code in EXPECTED, (code, details, str(request)[:500])
    codes = {code for code, _ in answers}
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= codes
    wait_until(lambda: not mesh.metrics("router")["flashmesh_router_requests"], "all have ended")
    wait_until(lambda: not mesh.metrics("kvstore-0")["flashmesh_kv_leases"], "no lease is held")
    for name in ("router", "prefill-0", "decode-0"):
        assert "Traceback" not in mesh.log(name)
