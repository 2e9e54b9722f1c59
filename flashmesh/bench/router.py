"""What the router adds to a request, how much one router process can do, and how it spreads a burst.

All on real processes with the simulated engine; for the first three, its steps take no time of their own:

* `router.added_ms`: time to the first token of a 4,000-token prompt, all of it stored, through the router,
  minus the same call sent straight to the same decode worker; pair by pair, either one first in turns. It
  holds validation, the hash chain, a look into Redis, a lease, placement and a second hop.
* `router.added_us_per_token`: the same for the mean time between tokens, where every token is a message.
* `router.requests_per_s`, `router.tokens_per_s`: such requests, and such tokens, over the CPU seconds that
  the router's process spent on them: what one core to itself serves. `wall_` beside them is what came
  through here, where client, router and workers share the machine.
* `router.decisions_per_s`: see `flashmesh.bench.decisions`.
* `balance.max_over_min`: 64 prompts of 32,000 tokens without a common prefix, all at once, over four
  prefill workers: tokens computed by the busiest one over those by the idlest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop

from flashmesh.bench import decisions
from flashmesh.bench.direct import DecodeWorker
from flashmesh.bench.load import Client, balance, percentile
from flashmesh.bench.registry import Result, p50
from flashmesh.bench.target import REPLAY_TOKENS, Target, Where, opened, scrape
from flashmesh.bench.trace_files import draw_tokens
from flashmesh.config import MeshConfig
from flashmesh.errors import WorkerLost
from flashmesh.rpc import Channels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flashmesh.bench.load import Outcome

    Advance = Callable[[], None]

ONE_WORKER = Where(
    num_prefill=0,
    num_decode=1,
    settings={
        "model": {"engine": "simulated"},
        "router": {"replay_tokens": REPLAY_TOKENS},
        "decode": {"num_drafts": 0, "num_pages": 8192, "num_slots": 64},
    },
)
FOUR_PREFILL = Where(
    num_prefill=4,
    num_decode=1,
    settings={
        # Slow enough that no worker is done before the burst is there.
        "model": {"engine": "simulated", "sim_row_ms": 0.02},
        "prefill": {"num_pages": 4096},
        "decode": {"num_pages": 32768},
    },
)
STORED_TOKENS = 4000
NUM_PAIRS = 200
WARM_UP_PAIRS = 20
STREAM_PROMPT_TOKENS = 300
"""So short that decode computes all of it: nothing is stored, fetched or leased."""

STREAM_TOKENS = 400
NUM_STREAM_PAIRS = 15
NUM_AT_ONCE = 16
NUM_LOAD_STREAMS = 32
NUM_BURST = 64
BURST_TOKENS = 32_000
MS_PER_S = 1000
US_PER_MS = 1000

NUM_PROMPTS = NUM_PAIRS + WARM_UP_PAIRS
num_steps = 2 * NUM_PROMPTS + NUM_STREAM_PAIRS + 3 + decisions.NUM_DECISIONS


def run(advance: Advance) -> Iterator[Result]:
    """Measures on meshes of its own."""
    with opened(ONE_WORKER) as target:
        yield from uvloop.run(hop(target, advance))
        yield from uvloop.run(decisions.measure(target.redis_url, advance))
    with opened(FOUR_PREFILL) as target:
        uvloop.run(burst(target, advance))
        yield from balance("balance", target, "prefill")


async def hop(target: Target, advance: Advance) -> list[Result]:
    """Measures what the router takes on the way to one decode worker."""
    async with Client(target) as client, contextlib.aclosing(Channels()) as channels:
        worker = await DecodeWorker.find(target.redis_url, MeshConfig().name, channels)
        ways = Ways(client, worker)
        return [
            *await added_to_requests(ways, advance),
            *await added_to_tokens(ways, advance),
            *await throughput(target, ways, advance),
        ]


@dataclass(frozen=True, slots=True)
class Ways:
    """The two ways to the same tokens."""

    client: Client
    worker: DecodeWorker

    async def through_router(self, prompt: Sequence[int], num_tokens: int) -> Outcome:
        """Has a prompt continued by the mesh."""
        return await answered(self.client, prompt, num_tokens)

    async def pair(
        self, number: int, prompt: Sequence[int], num_tokens: int
    ) -> tuple[Outcome, Outcome]:
        """Goes both ways, (router, direct), either one first in turns: drift of the machine hits both alike."""
        if number % 2:
            routed = await self.through_router(prompt, num_tokens)
            return routed, await self.worker.ask(prompt, num_tokens)
        direct = await self.worker.ask(prompt, num_tokens)
        return await self.through_router(prompt, num_tokens), direct


async def added_to_requests(ways: Ways, advance: Advance) -> list[Result]:
    """Compares times to the first token, on stored prompts that the router sees for the first time."""
    prompts = stored_prompts()
    for prompt in prompts:
        await ways.worker.ask(prompt, 1, is_stored=False)
        advance()
    added_ms = []
    for number, prompt in enumerate(prompts):
        routed, direct = await ways.pair(number, prompt, 1)
        added_ms.append(routed.ttft_ms - direct.ttft_ms)
        advance()
    kept = added_ms[WARM_UP_PAIRS:]
    return [
        p50("router.added_ms.p50", "ms", kept),
        Result("router.added_ms.p99", percentile(kept, 99), "ms", len(kept)),
    ]


async def added_to_tokens(ways: Ways, advance: Advance) -> list[Result]:
    """Compares times between tokens."""
    added_us = []
    for number in range(NUM_STREAM_PAIRS):
        prompt = draw_tokens(f"router/stream/{number}", STREAM_PROMPT_TOKENS)
        routed, direct = await ways.pair(number, prompt, STREAM_TOKENS)
        added_us.append(US_PER_MS * ((routed.itl_ms or 0.0) - (direct.itl_ms or 0.0)))
        advance()
    return [p50("router.added_us_per_token.p50", "us", added_us)]


async def throughput(target: Target, ways: Ways, advance: Advance) -> list[Result]:
    """Keeps a number of requests under way, then a number of streams."""
    stored = stored_prompts()
    requests = await spent(target, ways, stored, 1)
    advance()
    short = [
        draw_tokens(f"router/load/{number}", STREAM_PROMPT_TOKENS)
        for number in range(NUM_LOAD_STREAMS)
    ]
    streams = await spent(target, ways, short, STREAM_TOKENS)
    advance()
    return [
        *requests.rates("requests", len(stored)),
        *streams.rates("tokens", len(short) * STREAM_TOKENS),
    ]


@dataclass(frozen=True, slots=True)
class Spent:
    """What some work took.

    Attributes:
        router_s: CPU seconds of the router's process, all its threads.
        wall_s: seconds on the clock.
    """

    router_s: float
    wall_s: float

    def rates(self, unit: str, count: int) -> list[Result]:
        """Returns the work over both."""
        return [
            Result(f"router.{unit}_per_s", count / self.router_s, "1/s", count),
            Result(f"router.wall_{unit}_per_s", count / self.wall_s, "1/s", count),
        ]


async def spent(
    target: Target, ways: Ways, prompts: Sequence[Sequence[int]], num_tokens: int
) -> Spent:
    """Has prompts continued through the router, `NUM_AT_ONCE` at a time."""
    waiting = iter(prompts)

    async def client() -> None:
        for prompt in waiting:
            await ways.through_router(prompt, num_tokens)

    before_s, started = router_cpu_s(target), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(client())
    wall_s = time.perf_counter() - started
    return Spent(router_cpu_s(target) - before_s, wall_s)


async def burst(target: Target, advance: Advance) -> None:
    """Sends many prompts at once that nobody has computed."""
    async with Client(target) as client, asyncio.TaskGroup() as group:
        for number in range(NUM_BURST):
            prompt = draw_tokens(f"router/burst/{number}", BURST_TOKENS)
            group.create_task(answered(client, prompt, 1))
    advance()


async def answered(client: Client, prompt: Sequence[int], num_tokens: int) -> Outcome:
    """Has a prompt continued by the mesh.

    Raises:
        WorkerLost: it was not; a benchmark that goes on would measure something else.
    """
    outcome = await client.ask(prompt, num_tokens, time.perf_counter())
    if not outcome.ok:
        raise WorkerLost(f"the router answered {outcome.status}")
    return outcome


def stored_prompts() -> list[list[int]]:
    """Returns prompts that share no block."""
    return [draw_tokens(f"router/stored/{number}", STORED_TOKENS) for number in range(NUM_PROMPTS)]


def router_cpu_s(target: Target) -> float:
    """Returns the CPU seconds that the router's process has used."""
    return scrape(target.processes["router"].metrics_address, "process_cpu_seconds_total")
