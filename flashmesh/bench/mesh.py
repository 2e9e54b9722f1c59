"""What the mesh costs and what its cache gives, on the built-in checkpoint.

`mesh.ttft_added_ms`, `mesh.itl_added_ms`: time to the first token and mean time between tokens
through a mesh, minus the same rows run by an engine in this process, pair by pair on the same
prompt; the median. Every prompt is new, so the mesh computes, stores, fetches and replays.
`mesh.hit_speedup`: time to the first token of a long prompt, first time over second time; the
median over prompts.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from flashmesh.answers import Answer, Part
from flashmesh.bench.registry import Result, p50
from flashmesh.client import RouterClient, prompt_request
from flashmesh.launcher import MeshPlan, running_mesh
from flashmesh.offline import Offline
from flashmesh.redis_server import private_redis
from flashmesh.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

NUM_PAIRS = 9
PAIR_PROMPT_TOKENS = 1_000
PAIR_PARAMS = SamplingParams(max_tokens=33, ignore_eos=True)
NUM_LONG_PROMPTS = 5
LONG_PROMPT_TOKENS = 4_000
LONG_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)
GRACE_S = 5.0
ANSWER_TIMEOUT_S = 300.0

num_steps = 1 + 2 * (NUM_PAIRS + 1) + 2 * NUM_LONG_PROMPTS


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Measures on a mesh of one process for each service."""
    max_tokens = PAIR_PROMPT_TOKENS + PAIR_PARAMS.max_tokens
    offline = Offline.open(None, max_tokens=max_tokens)
    draw = random.Random(0)
    vocab = offline.engine.info.vocab_size
    with started_mesh() as client:
        advance()
        yield from added(client, offline, prompts(draw, vocab, PAIR_PROMPT_TOKENS), advance)
        yield from hit_speedup(client, prompts(draw, vocab, LONG_PROMPT_TOKENS), advance)


@contextlib.contextmanager
def started_mesh() -> Iterator[RouterClient]:
    """Starts a mesh with a private Redis and yields a client of its router."""
    with (
        tempfile.TemporaryDirectory() as name,
        private_redis(Path(name) / "redis") as redis_url,
        running_mesh(MeshPlan(redis_url=redis_url), Path(name), grace_s=GRACE_S) as mesh,
        RouterClient(mesh.router_address) as client,
    ):
        yield client


def prompts(draw: random.Random, vocab_size: int, num_tokens: int) -> Iterator[list[int]]:
    """Draws prompts that share no block."""
    while True:
        yield [draw.randrange(vocab_size) for _ in range(num_tokens)]


def added(
    client: RouterClient, offline: Offline, source: Iterator[list[int]], advance: Callable[[], None]
) -> Iterator[Result]:
    """Measures pairs, in turns so that drift of the machine hits both alike."""
    first_ms, between_ms = [], []
    for pair in range(NUM_PAIRS + 1):
        prompt = next(source)
        alone = read(offline.parts(prompt, PAIR_PARAMS))
        advance()
        meshed = ask(client, prompt, PAIR_PARAMS)
        advance()
        if pair > 0:  # the first one warms both up
            first_ms.append(1000 * (first_s(meshed) - first_s(alone)))
            between_ms.append(1000 * (between_s(meshed) - between_s(alone)))
    yield p50("mesh.ttft_added_ms", "ms", first_ms)
    yield p50("mesh.itl_added_ms", "ms", between_ms)


def hit_speedup(
    client: RouterClient, source: Iterator[list[int]], advance: Callable[[], None]
) -> Iterator[Result]:
    """Asks each prompt twice."""
    ratios = []
    for _ in range(NUM_LONG_PROMPTS):
        prompt = next(source)
        times = []
        for _ in range(2):
            times.append(first_s(ask(client, prompt, LONG_PARAMS)))
            advance()
        ratios.append(times[0] / times[1])
    yield p50("mesh.hit_speedup", "x", ratios)


def ask(client: RouterClient, prompt: list[int], params: SamplingParams) -> Answer:
    """One answer through the mesh."""
    return read(client.parts(prompt_request(prompt, params), timeout_s=ANSWER_TIMEOUT_S))


def read(parts: Iterable[Part]) -> Answer:
    """Times an answer: generators begin to work when first read, so the clock starts here."""
    return Answer().read(parts)


def first_s(answer: Answer) -> float:
    """Seconds to the first token."""
    return answer.token_times_s[0]


def between_s(answer: Answer) -> float:
    """Mean seconds between tokens; a mean, as one message may bring several tokens."""
    times = answer.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1)
