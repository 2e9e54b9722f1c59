"""Traces through a whole mesh: requests at the times, and of the lengths and reuse, that were recorded.

`trace.NAME.hit_over_unlimited`: prompt tokens that the mesh took from its store, over those that an
unlimited store at the same grain would have found in the same requests. What it misses: the replay rule
leaves at least `replay_tokens` at a prompt's end, and blocks may still be on their way into the store.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import uvloop

from flashmesh.bench.load import (
    WORK,
    Client,
    Objectives,
    Outcome,
    balance,
    cached_tokens,
    figures,
)
from flashmesh.bench.registry import Result
from flashmesh.bench.target import Target, Where, opened
from flashmesh.bench.trace_files import bundled, cacheable_tokens, read_trace, trace_name
from flashmesh.errors import InvalidRequest
from flashmesh.types import raise_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from flashmesh.bench.trace_files import TraceRequest

NAMES = ("conversation", "synthetic")
LIMIT = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a trace is sent.

    Attributes:
        speed: times as fast as it was recorded.
        limit: first requests to send; None sends all.
        max_in_flight: requests that run at once; those that are due then wait, and that time counts.
    """

    speed: float = 1.0
    limit: int | None = None
    max_in_flight: int = 64

    def __post_init__(self) -> None:
        raise_problems(
            (self.speed > 0, f"the speed must be above 0, not {self.speed:g}"),
            (
                self.limit is None or self.limit >= 1,
                f"at least 1 request must be sent, not {self.limit}",
            ),
            (
                self.max_in_flight >= 1,
                f"at least 1 request must be in flight, not {self.max_in_flight}",
            ),
        )


class Replayed:
    """A benchmark of one trace.

    Args:
        name: of the trace.
        requests: in order of arrival.
        pace, where, objectives: how, to which mesh, and what is good.
    """

    def __init__(
        self,
        name: str,
        requests: Sequence[TraceRequest],
        pace: Pace,
        where: Where,
        objectives: Objectives,
    ) -> None:
        self._name = f"trace.{name}"
        self._requests = requests[: pace.limit]
        self._pace = pace
        self._where = where
        self._objectives = objectives
        self.num_steps = len(self._requests)

    def run(self, advance: Callable[[], None]) -> Iterator[Result]:
        """Sends the trace; after Ctrl-C, reports what has ended until then."""
        with opened(self._where) as target:
            sending = Sending(target, self._requests, self._pace)
            interrupted = False
            try:
                uvloop.run(sending.run(advance))
            except KeyboardInterrupt:
                interrupted = True
            yield from self._results(sending)
            for service in WORK:
                yield from balance(f"{self._name}.balance.{service}", target, service)
        if interrupted:
            raise KeyboardInterrupt

    def _results(self, sending: Sending) -> Iterator[Result]:
        ended = sorted(sending.ended.items())
        outcomes = [outcome for _, outcome in ended]
        yield from figures(self._name, outcomes, sending.elapsed_s, self._objectives)
        answered = [self._requests[place] for place, outcome in ended if outcome.ok]
        if unlimited := cacheable_tokens(answered):
            ratio = cached_tokens(outcomes) / unlimited
            yield Result(f"{self._name}.hit_over_unlimited", ratio, "x", len(answered))


@dataclass(slots=True)
class Sending:
    """A trace being sent.

    Attributes:
        ended: outcomes by the request's place in the trace.
        elapsed_s: from the first request to the end of the last one that ended.
    """

    target: Target
    requests: Sequence[TraceRequest]
    pace: Pace
    ended: dict[int, Outcome] = field(default_factory=dict)
    elapsed_s: float = 0.0

    async def run(self, advance: Callable[[], None]) -> None:
        """Sends every request when it is due and a place is free; cancelled, it cancels what runs."""
        start_s = time.perf_counter()
        places = asyncio.Semaphore(self.pace.max_in_flight)

        async def send(place: int, due_s: float) -> None:
            request = self.requests[place]
            try:
                outcome = await client.ask(request.prompt(), request.num_output_tokens, due_s)
            finally:
                places.release()
            self.ended[place] = outcome
            self.elapsed_s = time.perf_counter() - start_s
            advance()

        async with Client(self.target) as client, asyncio.TaskGroup() as group:
            for place, request in enumerate(self.requests):
                due_s = start_s + (request.at_s - self.requests[0].at_s) / self.pace.speed
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                await places.acquire()
                group.create_task(send(place, due_s))


def of_file(path: Path, pace: Pace, where: Where, objectives: Objectives) -> Replayed:
    """Makes the benchmark of a trace file, or of a trace that comes with flashmesh.

    Raises:
        InvalidRequest: there is no such trace, or it is of no known format.
    """
    traces = bundled()
    if not path.exists() and str(path) not in traces:
        names = ", ".join(traces)
        raise InvalidRequest(f"no file {path}, and no such trace comes along; there are: {names}")
    source = path if path.exists() else traces[str(path)]
    return Replayed(trace_name(source.name), read_trace(source), pace, where, objectives)


num_steps = len(NAMES) * LIMIT


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Sends the first requests of both Mooncake traces, each to a mesh of its own."""
    for name in NAMES:
        requests = read_trace(bundled()[name])
        yield from Replayed(name, requests, Pace(limit=LIMIT), Where(), Objectives()).run(advance)
