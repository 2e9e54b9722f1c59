"""gRPC plumbing: what wraps every handler, and the channels that calls go out on.

Handlers raise `FlashmeshError`; the interceptor turns it into a status, checks the mesh token, restores the request
id and the deadline, counts, and logs. Outgoing calls carry request id, token and the time that remains.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from flashmesh.errors import DeadlineExceeded, FlashmeshError, InvalidRequest, Unauthenticated
from flashmesh.telemetry import RPC_SECONDS, RPCS, request_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from flashmesh.tls import Tls

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
REQUEST_ID_KEY = "flashmesh-request-id"
TOKEN_KEY = "authorization"
LOGGED_METHODS = tuple(
    f"/flashmesh.v1.{method}" for method in ("Router/Generate", "Prefill/Prefill", "Decode/Decode")
)
OPEN_METHODS = ("/grpc.health.v1.Health/",)

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # Clients ping idle streams to notice a dead peer; the default server calls that abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A restarted worker must be reachable within a heartbeat, not after gRPC's 2-minute backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


def remaining_s() -> float | None:
    """Returns what is left of the current call's deadline, None where it has none.

    Raises:
        DeadlineExceeded: nothing is left.
    """
    deadline = _deadline.get()
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the deadline has passed")
    return left


def within_deadline(limit_s: float) -> float:
    """Returns a limit, or what is left of the current call's deadline where that is less.

    Raises:
        DeadlineExceeded: nothing is left.
    """
    left = remaining_s()
    return limit_s if left is None else min(limit_s, left)


def start_deadline(left_s: float | None) -> None:
    """Begins a call that has so much time; None for one without a deadline."""
    _deadline.set(None if left_s is None else time.monotonic() + left_s)


def open_channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    """Opens a channel to `host:port`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, *tls.channel_options()]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


class Channels:
    """Outgoing channels, one for each address, and the metadata that every call carries.

    Args:
        token: the mesh's.
        tls: the mesh's certificates; None calls in the clear.
    """

    def __init__(self, token: str = "", tls: Tls | None = None) -> None:
        self._token = token
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """Returns the channel to `host:port`, opening it on first use."""
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._tls)
        return self._channels[address]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns what a call made now should carry."""
        pairs = []
        if current := request_id.get():
            pairs.append((REQUEST_ID_KEY, current))
        if self._token:
            pairs.append((TOKEN_KEY, f"Bearer {self._token}"))
        return tuple(pairs)

    async def aclose(self) -> None:
        """Closes every channel."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()


class Interceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server."""

    def __init__(self, token: str = "") -> None:
        self._token = f"Bearer {token}" if token else ""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Replaces the handler by a wrapped one that also parses the request itself.

        gRPC answers INTERNAL when a deserializer fails; a malformed message is the caller's fault.
        """
        handler = await continuation(details)
        if handler is None:
            return None
        call = _Call(details, handler, self._token)
        kind = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        behaviour = call.stream if handler.response_streaming else call.unary
        return kind(behaviour, None, handler.response_serializer)


class _Call:
    """One call being handled."""

    def __init__(
        self, details: grpc.HandlerCallDetails, handler: grpc.RpcMethodHandler, token: str
    ) -> None:
        self._method = details.method
        self._metadata = dict(details.invocation_metadata or ())
        self._handler = handler
        self._token = token
        self._status = grpc.StatusCode.OK
        self._started = time.monotonic()

    async def unary(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        behaviour = self._handler.stream_unary or self._handler.unary_unary
        try:
            self._enter(context)
            return await behaviour(self._parse(request), context)
        except BaseException as error:
            await self._fail(error, context)
        finally:
            self._count()

    async def stream(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        behaviour = self._handler.stream_stream or self._handler.unary_stream
        try:
            self._enter(context)
            responses = behaviour(self._parse(request), context)
            if not hasattr(responses, "__aiter__"):  # health and reflection write by themselves
                await responses
                return
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response
        except BaseException as error:
            await self._fail(error, context)
        finally:
            self._count()

    def _enter(self, context: grpc.aio.ServicerContext) -> None:
        request_id.set(str(self._metadata.get(REQUEST_ID_KEY, "")))
        start_deadline(context.time_remaining())
        if self._token and not self._method.startswith(OPEN_METHODS):
            given = str(self._metadata.get(TOKEN_KEY, ""))
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                raise Unauthenticated("the mesh token is missing or wrong")

    def _parse(self, request: Any) -> Any:
        parse = self._handler.request_deserializer
        if parse is None:
            return request
        if self._handler.request_streaming:
            return (self._parse_one(parse, item) async for item in request)
        return self._parse_one(parse, request)

    def _parse_one(self, parse: Callable[[bytes], Any], data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise InvalidRequest(f"{self._method}: the message cannot be parsed") from error

    async def _fail(self, error: BaseException, context: grpc.aio.ServicerContext) -> NoReturn:
        """Ends the call with the error's status; what is not an error of ours goes on up."""
        if isinstance(error, FlashmeshError):
            self._status = error.status
            log.info("refused", extra={"method": self._method, "error": str(error)})
            await context.abort(error.status, str(error))
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            self._status = grpc.StatusCode.INTERNAL
            log.error("failed", exc_info=error, extra={"method": self._method})
            await context.abort(self._status, "internal error; see the service's log")
        self._status = grpc.StatusCode.CANCELLED
        raise error

    def _count(self) -> None:
        seconds = time.monotonic() - self._started
        RPCS.labels(self._method, self._status.name).inc()
        RPC_SECONDS.labels(self._method).observe(seconds)
        # One line a request on every hop; the many short calls of health checks and leases are for debugging.
        level = logging.INFO if self._method in LOGGED_METHODS else logging.DEBUG
        details = {"method": self._method, "status": self._status.name, "ms": round(seconds * 1e3)}
        log.log(level, "call ended", extra=details)
