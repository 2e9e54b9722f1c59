"""What an endpoint makes of a request: a prompt and its parameters, and who words the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from flashmesh.services.router.generate import Tokens
    from flashmesh.services.router.http.errors import Problem
    from flashmesh.types import SamplingParams


class Reply(Protocol):
    """Words one answer, as server-sent events or as one body.

    Calls come in the order `start`, `push`..., `finish`, `body`; or `failure` instead of what is left.

    Attributes:
        stream: the client wants events.
    """

    stream: bool

    def start(self, cached_tokens: int) -> bytes:
        """Begins the answer and returns its first events."""

    def push(self, tokens: Tokens) -> tuple[bytes, int | None]:
        """Adds tokens of a choice.

        Returns:
            Events, and where a stop string has ended the choice how many of the tokens came after it.
        """

    def finish(self) -> bytes:
        """Returns the last events."""

    def body(self) -> bytes:
        """Returns the whole answer as JSON, where no events were wanted."""

    def failure(self, problem: Problem) -> bytes:
        """Returns the event that ends a stream which cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request that has been read.

    Attributes:
        prompt: token ids.
        params: how to sample; without a seed of its own where `seed` is None.
        seed: as the client gave it.
        cache_salt: as the client gave it.
        reply: words the answer.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int | None
    cache_salt: bytes
    reply: Reply


def frame(data: bytes, name: str | None = None) -> bytes:
    """Returns one server-sent event; JSON text has no line breaks of its own."""
    if name:
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
    return b"data: %s\n\n" % data
