"""Sends requests to a router, and what their clients saw of the answers, as figures.

Times are a client's: to the first token from the moment that the request was due, so that a request
which had to wait for its turn counts what it waited; between tokens as the mean over the rest, as one
message may bring several. A request that ends with an error counts in `errors`, and in no time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from flashmesh.bench.registry import Result
from flashmesh.client import prompt_request
from flashmesh.rpc import TOKEN_KEY, open_channel
from flashmesh.types import SamplingParams
from flashmesh.v1 import router_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from flashmesh.bench.target import Target

OK = "OK"
ANSWER_TIMEOUT_S = 600.0
MS_PER_S = 1000
PERCENTILES = (50, 90, 99)
WORK = {"prefill": "flashmesh_prefill_tokens_total", "decode": "flashmesh_decode_tokens_total"}
"""What a service's processes count their work by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What an answer must meet to count as good.

    Attributes:
        ttft_ms: most time to the first token.
        itl_ms: most mean time between tokens.
    """

    ttft_ms: float = 2000.0
    itl_ms: float = 100.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request, as its client saw it.

    Attributes:
        status: name of the gRPC status; "OK" is the only one with figures.
        token_ids: the answer.
        num_prompt_tokens, num_cached_tokens: as the router counts them.
        due_s, first_s, last_s: `time.perf_counter` when it was due, and at its first and last token.
    """

    status: str = OK
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    due_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def ok(self) -> bool:
        """It was answered in full."""
        return self.status == OK

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return MS_PER_S * (self.first_s - self.due_s)

    @property
    def itl_ms(self) -> float | None:
        """Mean time between tokens; None for fewer than two."""
        gaps = len(self.token_ids) - 1
        return MS_PER_S * (self.last_s - self.first_s) / gaps if gaps > 0 else None

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes what a message brings, now; it may bring none."""
        if token_ids:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
            self.token_ids += token_ids

    def meets(self, objectives: Objectives) -> bool:
        """Says whether it was answered, and fast enough."""
        return (
            self.ok
            and self.ttft_ms <= objectives.ttft_ms
            and (self.itl_ms or 0.0) <= objectives.itl_ms
        )


class Client:
    """One channel to a router, for many requests at once; an async context manager."""

    def __init__(self, target: Target) -> None:
        self._channel = open_channel(target.address, None)
        self._stub = router_pb2_grpc.RouterStub(self._channel)
        self._metadata = ((TOKEN_KEY, f"Bearer {target.token}"),) if target.token else ()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def ask(self, prompt: Sequence[int], num_tokens: int, due_s: float) -> Outcome:
        """Has a prompt continued by exactly so many tokens; an error is an outcome too.

        Args:
            prompt: token ids.
            num_tokens: to draw greedily, whatever they are.
            due_s: `time.perf_counter` from which the client waits.
        """
        outcome = Outcome(due_s=due_s)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        call = self._stub.Generate(
            prompt_request(prompt, params), metadata=self._metadata, timeout=ANSWER_TIMEOUT_S
        )
        try:
            async for response in call:
                outcome.add(response.token_ids)
                outcome.num_prompt_tokens = response.usage.prompt_tokens
                outcome.num_cached_tokens = response.usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            outcome.status = error.code().name
        finally:
            call.cancel()
        return outcome


def cached_tokens(outcomes: Iterable[Outcome]) -> int:
    """Counts prompt tokens that came from the store."""
    return sum(outcome.num_cached_tokens for outcome in outcomes)


def prompt_tokens(outcomes: Iterable[Outcome]) -> int:
    """Counts prompt tokens of the requests that were answered."""
    return sum(outcome.num_prompt_tokens for outcome in outcomes)


def figures(
    name: str, outcomes: Sequence[Outcome], elapsed_s: float, objectives: Objectives
) -> Iterator[Result]:
    """Yields hit ratio, times, goodput and errors; no ratio and no time where nothing was answered.

    Args:
        name: what every metric's name begins with.
        outcomes: of all requests that ended.
        elapsed_s: from the first request to the end of the last.
        objectives: that goodput asks for.
    """
    answered = [outcome for outcome in outcomes if outcome.ok]
    if answered:
        ratio = cached_tokens(answered) / prompt_tokens(answered)
        yield Result(f"{name}.hit_ratio", ratio, "x", len(answered))
    first_ms = [outcome.ttft_ms for outcome in answered]
    between_ms = [outcome.itl_ms for outcome in answered if outcome.itl_ms is not None]
    for metric, times in (("ttft_ms", first_ms), ("itl_ms", between_ms)):
        for percent in PERCENTILES if times else ():
            value = percentile(times, percent)
            yield Result(f"{name}.{metric}.p{percent}", value, "ms", len(times))
    good = sum(outcome.meets(objectives) for outcome in outcomes)
    yield Result(f"{name}.goodput_per_s", good / elapsed_s, "1/s", len(outcomes))
    yield Result(f"{name}.answered_per_s", len(answered) / elapsed_s, "1/s", len(outcomes))
    yield Result(f"{name}.errors", len(outcomes) - len(answered), "", len(outcomes))
    for status, count in sorted(Counter(o.status for o in outcomes if not o.ok).items()):
        yield Result(f"{name}.errors.{status}", count, "", len(outcomes))


def balance(name: str, target: Target, service: str) -> Iterator[Result]:
    """Yields the work of a service's busiest process over that of its idlest one.

    Work is prompt tokens computed by prefill, tokens emitted by decode, since the processes started; one
    that did nothing counts as one that did one token. Nothing for a single process, or on somebody else's
    mesh.
    """
    work = target.totals(service, WORK[service]).values()
    if len(work) > 1:
        yield Result(f"{name}.max_over_min", max(work) / max(1.0, min(work)), "x", len(work))


def percentile(values: Sequence[float], percent: int) -> float:
    """Returns the smallest value that so many percent of all do not exceed."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]
