"""A small blocking client: what command line, benchmarks and scripts need of a running mesh.

Services among themselves use `flashmesh.rpc`. Errors come out as the classes of `flashmesh.errors`,
and leaving a stream early cancels the request, which frees everything it holds in the mesh.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flashmesh.answers import Part
from flashmesh.errors import from_rpc_error
from flashmesh.rpc import CHANNEL_OPTIONS, TOKEN_KEY
from flashmesh.v1 import router_pb2, router_pb2_grpc, types_pb2

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from flashmesh.types import SamplingParams


def prompt_request(
    prompt: str | Sequence[int], params: SamplingParams, *, seed: int | None = None
) -> router_pb2.GenerateRequest:
    """Builds a request.

    Args:
        prompt: text, or token ids.
        params: how to draw; its `seed` is not looked at.
        seed: None lets the router draw one.
    """
    sampling = types_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        choice=params.choice,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
    )
    if isinstance(prompt, str):
        return router_pb2.GenerateRequest(text=prompt, sampling=sampling)
    return router_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=prompt), sampling=sampling)


class RouterClient:
    """One channel to a router; a context manager."""

    def __init__(self, address: str, token: str = "") -> None:
        self.address = address
        self._metadata = ((TOKEN_KEY, f"Bearer {token}"),) if token else ()
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._router = router_pb2_grpc.RouterStub(self._channel)

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def generate(
        self, request: router_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> Generator[router_pb2.GenerateResponse]:
        """Streams an answer; closing the iterator cancels the request.

        Raises:
            FlashmeshError: what the router answered, or that it cannot be reached.
        """
        call = self._router.Generate(request, metadata=self._metadata, timeout=timeout_s)
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"router {self.address}") from error
        finally:
            call.cancel()

    def parts(
        self, request: router_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> Generator[Part]:
        """Streams an answer like `generate`, free of protobuf."""
        with contextlib.closing(self.generate(request, timeout_s=timeout_s)) as messages:
            for message in messages:
                yield _part(message)

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Encodes text as the router would."""
        request = router_pb2.TokenizeRequest(text=text, parse_special=parse_special)
        try:
            return list(self._router.Tokenize(request, metadata=self._metadata).token_ids)
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"router {self.address}") from error


def health_status(address: str, *, timeout_s: float = 5.0) -> str:
    """Asks a service for its standard gRPC health.

    Returns:
        "SERVING", "NOT_SERVING", or why there was no answer.
    """
    with contextlib.closing(grpc.insecure_channel(address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _part(message: router_pb2.GenerateResponse) -> Part:
    reason = types_pb2.FinishReason.Name(message.finish_reason) if message.finish_reason else ""
    return Part(
        list(message.token_ids),
        message.text,
        list(message.logprobs),
        message.seed if message.HasField("seed") else None,
        reason.removeprefix("FINISH_REASON_").lower(),
        message.usage.prompt_tokens,
        message.usage.cached_tokens,
    )
