"""What the mesh costs and what its cache gives.

`mesh.ttft_added_ms`, `mesh.itl_added_ms`: time to the first token and mean time between tokens
through a mesh on the built-in checkpoint, minus the same rows run by an engine in this process,
pair by pair on the same prompt; the median. Every prompt is new, so the mesh computes, stores,
fetches and replays. `mesh.sim_ttft_added_ms`, `mesh.sim_itl_added_ms`: the same on the simulated
engine, whose steps take a fixed time; these are steadier, and blind to what an engine's computing
costs the rest of its process. `mesh.hit_speedup`: time to the first token of a long prompt, first
time over second time, on the built-in checkpoint; the median over prompts.
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

ONE_ROW_A_STEP = "[decode]\nnum_drafts = 0\n"
"""Both sides run the same rows; drafts are measured elsewhere."""

REFERENCE = f'[model]\npath = "demo"\nengine = "reference"\n{ONE_ROW_A_STEP}'
SIMULATED = f'[model]\nengine = "simulated"\nsim_step_ms = 2.0\nsim_row_ms = 0.05\n{ONE_ROW_A_STEP}'
NUM_PAIRS = 25
PAIR_PROMPT_TOKENS = 400
PAIR_PARAMS = SamplingParams(max_tokens=17, ignore_eos=True)
WARM_UP_PAIRS = 2
NUM_LONG_PROMPTS = 5
LONG_PROMPT_TOKENS = 4_000
LONG_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)
GRACE_S = 5.0
ANSWER_TIMEOUT_S = 300.0

num_steps = 4 * (NUM_PAIRS + WARM_UP_PAIRS) + 2 * NUM_LONG_PROMPTS


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Measures on meshes of one process for each service."""
    for prefix, config in (("mesh.", REFERENCE), ("mesh.sim_", SIMULATED)):
        with started(config) as (client, offline):
            yield from added(prefix, client, offline, advance)
            if config == REFERENCE:
                yield from hit_speedup(client, offline, advance)


@contextlib.contextmanager
def started(config: str) -> Iterator[tuple[RouterClient, Offline]]:
    """Starts a mesh with a private Redis, and opens the same model in this process."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        path = folder / "bench.toml"
        path.write_text(config)
        max_tokens = PAIR_PROMPT_TOKENS + PAIR_PARAMS.max_tokens
        offline = Offline.open(path, max_tokens=max_tokens)
        redis_url = stack.enter_context(private_redis(folder / "redis"))
        plan = MeshPlan(redis_url=redis_url, config=path)
        mesh = stack.enter_context(running_mesh(plan, folder, grace_s=GRACE_S))
        yield stack.enter_context(RouterClient(mesh.router_address)), offline


def prompts(offline: Offline, num_tokens: int) -> Iterator[list[int]]:
    """Draws prompts that share no block."""
    draw = random.Random(num_tokens)
    while True:
        yield [draw.randrange(offline.engine.info.vocab_size) for _ in range(num_tokens)]


def added(
    prefix: str, client: RouterClient, offline: Offline, advance: Callable[[], None]
) -> Iterator[Result]:
    """Measures pairs, either one first in turns, so that drift of the machine hits both alike."""
    first_ms, between_ms = [], []
    source = prompts(offline, PAIR_PROMPT_TOKENS)
    for pair in range(NUM_PAIRS + WARM_UP_PAIRS):
        prompt = next(source)
        answers: dict[bool, Answer] = {}
        for through_mesh in (pair % 2 == 0, pair % 2 == 1):
            if through_mesh:
                answers[True] = ask(client, prompt, PAIR_PARAMS)
            else:
                answers[False] = read(offline.parts(prompt, PAIR_PARAMS))
            advance()
        if pair >= WARM_UP_PAIRS:
            first_ms.append(1000 * (first_s(answers[True]) - first_s(answers[False])))
            between_ms.append(1000 * (between_s(answers[True]) - between_s(answers[False])))
    yield p50(f"{prefix}ttft_added_ms", "ms", first_ms)
    yield p50(f"{prefix}itl_added_ms", "ms", between_ms)


def hit_speedup(
    client: RouterClient, offline: Offline, advance: Callable[[], None]
) -> Iterator[Result]:
    """Asks each prompt twice."""
    ratios = []
    source = prompts(offline, LONG_PROMPT_TOKENS)
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
