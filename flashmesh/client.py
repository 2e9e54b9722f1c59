"""Small clients of a router, blocking and asynchronous: for the command line, benchmarks, scripts and other services.

The mesh's own services use `flashmesh.rpc`. Errors come out as the classes of `flashmesh.errors`,
and leaving a stream early cancels the request, which frees everything it holds in the mesh.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flashmesh.answers import Part
from flashmesh.errors import from_rpc_error
from flashmesh.rpc import CHANNEL_OPTIONS, TOKEN_KEY, open_channel
from flashmesh.v1 import router_pb2, router_pb2_grpc, types_pb2
from flashmesh.wire import sampling_to_proto

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from flashmesh.tls import Tls
    from flashmesh.types import SamplingParams


def prompt_request(
    prompt: str | Sequence[int],
    params: SamplingParams,
    *,
    seed: int | None = None,
    stops: Sequence[str] = (),
) -> router_pb2.GenerateRequest:
    """Builds a request.

    Args:
        prompt: text, or token ids.
        params: how to draw; its `seed` is not looked at.
        seed: None lets the router draw one.
        stops: the text ends before the first of these strings.
    """
    sampling = sampling_to_proto(params)
    sampling.ClearField("seed")
    if seed is not None:
        sampling.seed = seed
    request = router_pb2.GenerateRequest(sampling=sampling, stop=stops)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(types_pb2.TokenIds(ids=prompt))
    return request


class RouterClient:
    """One channel to a router; a context manager.

    Args:
        address: host:port.
        token: the mesh's, where it has one.
        tls: certificates, where the mesh uses mutual TLS.
    """

    def __init__(self, address: str, token: str = "", tls: Tls | None = None) -> None:
        self.address = address
        self._metadata = ((TOKEN_KEY, f"Bearer {token}"),) if token else ()
        self._channel = _channel(address, tls)
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


class AsyncRouterClient:
    """One channel to a router inside an event loop; an async context manager.

    Args:
        address, token, tls: as for `RouterClient`.
    """

    def __init__(self, address: str, token: str = "", tls: Tls | None = None) -> None:
        self.address = address
        self._metadata = ((TOKEN_KEY, f"Bearer {token}"),) if token else ()
        self._channel = open_channel(address, tls)
        self._router = router_pb2_grpc.RouterStub(self._channel)

    async def __aenter__(self) -> AsyncRouterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def generate(
        self, request: router_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        """Streams an answer; closing the iterator cancels the request.

        Raises:
            FlashmeshError: what the router answered, or that it cannot be reached.
        """
        call = self._router.Generate(request, metadata=self._metadata, timeout=timeout_s)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"router {self.address}") from error
        finally:
            call.cancel()

    async def parts(
        self, request: router_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Part, None]:
        """Streams an answer like `generate`, free of protobuf."""
        async with contextlib.aclosing(self.generate(request, timeout_s=timeout_s)) as messages:
            async for message in messages:
                yield _part(message)

    async def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Encodes text as the router would."""
        request = router_pb2.TokenizeRequest(text=text, parse_special=parse_special)
        try:
            response = await self._router.Tokenize(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"router {self.address}") from error
        return list(response.token_ids)


def health_status(address: str, *, timeout_s: float = 5.0, tls: Tls | None = None) -> str:
    """Asks a service for its standard gRPC health.

    Args:
        address: host:port.
        timeout_s: longest wait.
        tls: certificates, where the mesh uses mutual TLS.

    Returns:
        "SERVING", "NOT_SERVING", or why there was no answer.
    """
    with contextlib.closing(_channel(address, tls)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(address: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, *tls.channel_options()]
    return grpc.secure_channel(address, tls.channel_credentials(), options=options)


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
        message.choice,
        message.stop,
    )
