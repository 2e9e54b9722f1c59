"""What the gRPC and the HTTP door share: admission, validation, and counting.

A door reads a request in its own words and writes the answer in its own; in between, both go through here, so that a
limit, a check or a figure cannot differ between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from typing import TYPE_CHECKING, TypeVar

import prometheus_client

from flashmesh.errors import InvalidRequest, Overloaded, PromptTooLong
from flashmesh.services.router.generate import Generation, Mesh
from flashmesh.services.router.prefix import Call
from flashmesh.telemetry import request_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from flashmesh.services.router.generate import Tokens
    from flashmesh.services.router.quota import Quotas
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
MAX_PRIORITY = 100
INLINE_CHARS = 16 * 1024

T = TypeVar("T")


class Door:
    """The way from a request that has been read to its tokens.

    Args:
        mesh: what serves it.
        codec: the served model's tokenizer.
        quotas: what tenants may take.
    """

    def __init__(self, mesh: Mesh, codec: TextCodec, quotas: Quotas) -> None:
        self.mesh = mesh
        self.codec = codec
        self.quotas = quotas
        self.num_requests = 0

    @contextlib.contextmanager
    def admitted(self) -> Iterator[str]:
        """Counts a request while the body runs, and yields the id under which it runs.

        Raises:
            Overloaded: there are as many as there may be.
            InvalidRequest: the caller's request id cannot be used.
        """
        if self.num_requests >= self.mesh.config.max_requests:
            raise Overloaded(f"{self.num_requests} requests are here already; try again later")
        request_id.set(checked_request_id(request_id.get()))
        self.num_requests += 1
        REQUESTS.set(self.num_requests)
        try:
            yield request_id.get()
        finally:
            self.num_requests -= 1
            REQUESTS.set(self.num_requests)

    def start(
        self,
        model: ModelInfo,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None,
        cache_salt: bytes = b"",
        tenant_salt: bytes = b"",
        priority: int = 0,
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> Generation:
        """Validates a request; nothing is sent before the first token is asked for.

        Args:
            model: the served one.
            prompt: token ids.
            params: how to draw; `seed` replaces theirs.
            seed: None draws one, here and once, so that every attempt shares it.
            cache_salt: requests with different ones share no cached block.
            tenant_salt: likewise, of the caller's key.
            priority: lower goes first.
            stops: checked strings that end a text.
            include_stop: keep them in the text.

        Raises:
            InvalidRequest, PromptTooLong: say what is wrong.
        """
        params = dataclasses.replace(params, seed=secrets.randbits(64) if seed is None else seed)
        check_prompt(prompt, params, model)
        if abs(priority) > MAX_PRIORITY:
            raise InvalidRequest(
                f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], not {priority}"
            )
        if len(cache_salt) > MAX_SALT_BYTES:
            raise InvalidRequest(f"cache_salt is longer than {MAX_SALT_BYTES} bytes")
        call = Call(
            request_id=request_id.get(),
            model=model,
            prompt=prompt,
            params=params,
            cache_salt=cache_salt,
            tenant_salt=tenant_salt,
            priority=priority,
            stops=tuple(stops),
            include_stop=include_stop,
        )
        return Generation(self.mesh, call)


async def counted(generation: Generation) -> AsyncGenerator[Tokens, None]:
    """Yields a request's tokens, and counts what it was once they begin."""
    started = time.monotonic()
    first = True
    async with contextlib.aclosing(generation.run()) as stream:
        async for tokens in stream:
            if first:
                first = False
                TTFT.observe(time.monotonic() - started)
                PROMPT_TOKENS.inc(len(generation.call.prompt))
                CACHED_TOKENS.inc(generation.cached_tokens)
            yield tokens


async def off_loop(size: int, function: Callable[[], T]) -> T:
    """Calls a function that takes time with the size of a text: on a thread where that is long.

    The event loop also carries everybody's tokens; a hop to a thread is not worth it for a short text.
    """
    return function() if size <= INLINE_CHARS else await asyncio.to_thread(function)


def checked_request_id(given: str) -> str:
    """Returns the caller's request id, or a new one where it gave none.

    Raises:
        InvalidRequest: it is too long to be a lease's name.
    """
    if len(given) > MAX_ID_CHARS:
        raise InvalidRequest(f"the request id is longer than {MAX_ID_CHARS} characters")
    return given or f"req-{secrets.token_hex(8)}"


def check_prompt(prompt: Sequence[int], params: SamplingParams, model: ModelInfo) -> None:
    """Refuses what the model cannot run, before any worker sees it.

    Raises:
        InvalidRequest, PromptTooLong: say what is wrong.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    if max(prompt) >= model.vocab_size:
        bad = next(place for place, token in enumerate(prompt) if token >= model.vocab_size)
        raise InvalidRequest(
            f"token id {prompt[bad]} at position {bad} is not in [0, {model.vocab_size})"
        )
    params.check_vocab(model.vocab_size)
    if len(prompt) + params.max_tokens > model.max_context_tokens:
        raise PromptTooLong(
            f"prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} exceed the context "
            f"of {model.max_context_tokens}"
        )
