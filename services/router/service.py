"""The router's gRPC door: a message becomes a validated `Call`, tokens become messages."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from typing import TYPE_CHECKING

import prometheus_client

from flashmesh.errors import InvalidRequest, Overloaded, PromptTooLong
from flashmesh.services.router.generate import Generation, Mesh
from flashmesh.services.router.prefix import Call
from flashmesh.telemetry import request_id
from flashmesh.v1 import router_pb2, router_pb2_grpc, types_pb2
from flashmesh.wire import finish_to_proto, sampling_from_proto

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import grpc.aio

    from flashmesh.services.router.text import TextCodec
    from flashmesh.types import ModelInfo, SamplingParams

REQUESTS = prometheus_client.Gauge("flashmesh_router_requests", "Requests being served.")
TTFT = prometheus_client.Histogram(
    "flashmesh_router_first_token_seconds",
    "Time to the first token.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
PROMPT_TOKENS = prometheus_client.Counter("flashmesh_router_prompt_tokens_total", "Prompt tokens.")
CACHED_TOKENS = prometheus_client.Counter(
    "flashmesh_router_cached_tokens_total", "Prompt tokens whose global rows were stored."
)
MAX_SALT_BYTES = 256
MAX_ID_CHARS = 128


class RouterServicer(router_pb2_grpc.RouterServicer):
    """Serves `Generate` and `Tokenize`."""

    def __init__(self, mesh: Mesh, codec: TextCodec) -> None:
        self._mesh = mesh
        self._codec = codec
        self._num_requests = 0

    @property
    def num_requests(self) -> int:
        """Requests being served."""
        return self._num_requests

    async def Generate(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Continues a prompt."""
        with self._admitted():
            call = self._validate(request, await self._mesh.replicas.wait_model(request.model))
            generation = Generation(self._mesh, call)
            async for response in self._respond(generation, call):
                yield response

    async def Tokenize(  # noqa: N802
        self, request: router_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> router_pb2.TokenizeResponse:
        """Encodes text as `Generate` would."""
        ids = self._codec.encode(request.text, parse_special=request.parse_special)
        return router_pb2.TokenizeResponse(token_ids=ids)

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._num_requests >= self._mesh.config.max_requests:
            raise Overloaded(f"{self._num_requests} requests are here already; try again later")
        request_id.set(checked_request_id(request_id.get()))
        self._num_requests += 1
        REQUESTS.set(self._num_requests)
        try:
            yield
        finally:
            self._num_requests -= 1
            REQUESTS.set(self._num_requests)

    def _validate(self, request: router_pb2.GenerateRequest, model: ModelInfo) -> Call:
        match request.WhichOneof("prompt"):
            case "text":
                prompt = self._codec.encode(request.text)
            case "token_ids":
                prompt = list(request.token_ids.ids)
            case _:
                raise InvalidRequest("the request has no prompt")
        params = with_seed(request.sampling)
        check_prompt(prompt, params, model)
        if len(request.cache_salt) > MAX_SALT_BYTES:
            raise InvalidRequest(f"cache_salt is longer than {MAX_SALT_BYTES} bytes")
        return Call(
            request_id=request_id.get(),
            model=model,
            prompt=prompt,
            params=params,
            cache_salt=request.cache_salt,
        )

    async def _respond(
        self, generation: Generation, call: Call
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        started = time.monotonic()
        text = self._codec.stream()
        first = True
        async with contextlib.aclosing(generation.run()) as stream:
            async for tokens in stream:
                response = router_pb2.GenerateResponse(
                    request_id=call.request_id,
                    token_ids=tokens.tokens,
                    logprobs=tokens.logprobs,
                    text=text.push(tokens.tokens),
                )
                if first:
                    TTFT.observe(time.monotonic() - started)
                    response.seed = call.params.seed
                    first = False
                if tokens.finish_reason:
                    response.text += text.finish()
                    response.finish_reason = finish_to_proto(tokens.finish_reason)
                    response.usage.CopyFrom(usage(generation, call))
                yield response


def checked_request_id(given: str) -> str:
    """Returns the caller's request id, or a new one where it gave none.

    Raises:
        InvalidRequest: it is too long to be a lease's name.
    """
    if len(given) > MAX_ID_CHARS:
        raise InvalidRequest(f"the request id is longer than {MAX_ID_CHARS} characters")
    return given or f"req-{secrets.token_hex(8)}"


def with_seed(message: types_pb2.SamplingParams) -> SamplingParams:
    """Unpacks sampling parameters; a missing seed is drawn here, so that every attempt shares it.

    Raises:
        InvalidRequest: a value is out of range.
    """
    params = sampling_from_proto(message)
    if message.HasField("seed"):
        return params
    return dataclasses.replace(params, seed=secrets.randbits(64))


def check_prompt(prompt: list[int], params: SamplingParams, model: ModelInfo) -> None:
    """Refuses what the model cannot run, before any worker sees it.

    Raises:
        InvalidRequest, PromptTooLong: say what is wrong.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    bad = next((place for place, token in enumerate(prompt) if token >= model.vocab_size), None)
    if bad is not None:
        raise InvalidRequest(
            f"token id {prompt[bad]} at position {bad} is not in [0, {model.vocab_size})"
        )
    bad_stop = next((t for t in params.stop_token_ids if t >= model.vocab_size), None)
    if bad_stop is not None:
        raise InvalidRequest(f"stop token id {bad_stop} is not in [0, {model.vocab_size})")
    if len(prompt) + params.max_tokens > model.max_context_tokens:
        raise PromptTooLong(
            f"prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} exceed the context "
            f"of {model.max_context_tokens}"
        )


def usage(generation: Generation, call: Call) -> types_pb2.Usage:
    """Counts a finished request."""
    PROMPT_TOKENS.inc(len(call.prompt))
    CACHED_TOKENS.inc(generation.cached_tokens)
    return types_pb2.Usage(
        prompt_tokens=len(call.prompt),
        cached_tokens=generation.cached_tokens,
        completion_tokens=len(generation.emitted),
    )
