"""What the engine gives its users: tokens a second, what a step's time goes to, what drafts save.

All in this process, on the built-in checkpoint and the step loop of the services, but for `failover.pause_ms`, which
needs a mesh.

Prompts of `spec.*` are held-out conversations of the built-in checkpoint, the others are random.
`engine.decode_tokens_per_s.bN`: N streams at once, without drafts. `engine.step_share.*`: of the time that N = 32
streams take: making plans, the model, drawing tokens, handing them out. `spec.time_per_token_ratio`: time a token with
drafts over without, one stream, in turns. `spec.accepted_per_round`: drafts that were right, of five a round, at
temperature 1, with the coupled acceptance that is served; `spec.rejection_per_round`: what ordinary rejection sampling
would have accepted on the same rows. `grammar.step_overhead`: time a token under a JSON grammar over without one.
`prefill.tokens_per_s`: prompt tokens through the encoder half. `replay.stall_ms`: the longest pause of eight streams
while the replay of 4,000 forced tokens joins them. `failover.pause_ms`: the longest pause of a stream whose decode
worker is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmesh.bench.registry import Result, p50
from flashmesh.bench.target import scrape
from flashmesh.client import RouterClient, prompt_request
from flashmesh.config import ModelSection
from flashmesh.errors import WorkerLost
from flashmesh.launcher import MeshPlan, running_mesh
from flashmesh.redis_server import private_redis
from flashmesh.replay import plan_replay
from flashmesh.scheduling import Limits
from flashmesh.stepping import STEP_SECONDS, StepLoop
from flashmesh.types import BLOCK_TOKENS, GrammarKind, GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from flashmesh.kernels.door import Engine, RunResult
    from flashmesh.kernels.grammar import Matcher
    from flashmesh.kernels.sequence import DecodeSequence
    from flashmesh.launcher import Mesh, Process
    from flashmesh.ticket import Ticket

NUM_PAGES = 512
NUM_SLOTS = 40
BATCHES = (1, 8, 32)
NUM_TOKENS = 48
PROMPT_TOKENS = 40
NUM_PAIRS = 5
NUM_ROUNDS = 60
MIN_ANSWER_TOKENS = 24
REPLAY_TOKENS = 140
PREFILL_TOKENS = 4096
FORCED_TOKENS = 4000
NUM_STREAMS = 8
STEP_ROWS = 256
MAX_STEP_S = 0.25
NUM_KILLS = 3
LONG_ARRAY = '{"type": "array", "items": {"type": "string"}, "minItems": 100}'
GRACE_S = 5.0

num_steps = len(BATCHES) + 4 * NUM_PAIRS + 1 + 1 + 1 + NUM_KILLS


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Measures one thing after the other."""
    from flashmesh.kernels.load import open_engine

    engine = open_engine(ModelSection(), "all", num_pages=NUM_PAGES, num_slots=NUM_SLOTS)
    bench = Bench(engine, advance)
    yield from asyncio.run(bench.throughput())
    yield asyncio.run(bench.speedup())
    yield asyncio.run(bench.grammar_overhead())
    yield from bench.acceptance()
    yield bench.prefill_rate()
    yield asyncio.run(bench.replay_stall())
    yield from failover(advance)


@dataclasses.dataclass
class Bench:
    """Everything that one loaded engine is asked."""

    engine: Engine
    advance: Callable[[], None]
    draw: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))

    def sequence(
        self,
        params: SamplingParams,
        prompt: Sequence[int] | None = None,
        *,
        num_drafts: int = 0,
        forced: Sequence[int] = (),
        grammar: Matcher | None = None,
    ) -> DecodeSequence:
        """A fresh sequence over a prompt, by default a random one, short enough to need no prefill."""
        from flashmesh.kernels.sequence import DecodeSequence

        prompt = prompt or self.tokens(PROMPT_TOKENS)
        window = self.engine.info.window
        return DecodeSequence(
            self.engine,
            prompt,
            params,
            plan_replay(len(prompt), window=window, replay_tokens=REPLAY_TOKENS),
            num_drafts=num_drafts,
            forced=forced,
            grammar=grammar,
        )

    def tokens(self, count: int) -> list[int]:
        """Random ordinary ids."""
        return [self.draw.randrange(64, self.engine.info.vocab_size) for _ in range(count)]

    @contextlib.asynccontextmanager
    async def loop(self) -> AsyncIterator[StepLoop]:
        """A step loop that runs."""
        limits = Limits(
            num_pages=NUM_PAGES,
            num_slots=NUM_SLOTS,
            max_rows=STEP_ROWS,
            max_waiting=NUM_SLOTS,
            max_step_s=MAX_STEP_S,
        )
        loop = StepLoop(self.engine.step, limits)
        task = asyncio.ensure_future(loop.run())
        try:
            yield loop
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def throughput(self) -> list[Result]:
        """Streams without drafts, at several batch sizes; where the time goes at the largest."""
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True)
        results = []
        for count in BATCHES:
            parts, sampled = step_seconds(), self.sample_s()
            async with self.loop() as loop:
                tickets = [loop.submit(self.sequence(params)) for _ in range(count)]
                begin = time.perf_counter()
                times = await asyncio.gather(*map(arrivals, tickets))
                seconds = time.perf_counter() - begin
            self.advance()
            # The first token of each is the prompts' work.
            rest = max(map(max, times)) - max(map(min, times))
            rate = count * (NUM_TOKENS - 1) / rest
            results.append(Result(f"engine.decode_tokens_per_s.b{count}", rate, "tokens/s", 1))
        parts = {part: value - parts[part] for part, value in step_seconds().items()}
        sample_s = self.sample_s() - sampled
        shares = {
            "plan": parts["plan"],
            "forward": parts["step"] - sample_s,
            "sample": sample_s,
            "stream": parts["stream"],
        }
        return results + [
            Result(f"engine.step_share.{part}", 100 * spent / seconds, "%", 1)
            for part, spent in shares.items()
        ]

    def sample_s(self) -> float:
        """Seconds that the engine has spent drawing tokens."""
        return float(getattr(self.engine, "sample_s", 0.0))

    async def speedup(self) -> Result:
        """One stream with drafts and without, in turns, greedily."""
        params = SamplingParams(max_tokens=NUM_TOKENS)
        ratios = []
        async with self.loop() as loop:
            for pair, prompt in zip(range(NUM_PAIRS), conversations(), strict=False):
                took: dict[int, float] = {}
                for num_drafts in (0, 5) if pair % 2 else (5, 0):
                    ticket = loop.submit(self.sequence(params, prompt, num_drafts=num_drafts))
                    times = await arrivals(ticket)
                    took[num_drafts] = times[-1] - times[0]
                    self.advance()
                ratios.append(took[5] / took[0])
        return p50("spec.time_per_token_ratio", "x", ratios)

    async def grammar_overhead(self) -> Result:
        """One stream that must be a long JSON array and one that is free, in turns."""
        from flashmesh.kernels.grammar import compile_grammar
        from flashmesh.kernels.load import load_vocabulary

        vocabulary = load_vocabulary(ModelSection(), self.engine.info)
        grammar = compile_grammar(
            GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=LONG_ARRAY), vocabulary
        )
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0)
        ratios = []
        async with self.loop() as loop:
            for pair in range(NUM_PAIRS):
                took: dict[bool, float] = {}
                for governed in (True, False) if pair % 2 else (False, True):
                    free = dataclasses.replace(params, ignore_eos=not governed)
                    matcher = grammar.start() if governed else None
                    times = await arrivals(loop.submit(self.sequence(free, grammar=matcher)))
                    took[governed] = (times[-1] - times[0]) / (len(times) - 1)
                    self.advance()
                ratios.append(took[True] / took[False])
        return p50("grammar.step_overhead", "x", ratios)

    def acceptance(self) -> Iterator[Result]:
        """Verifies all drafts of every round, and looks at both distributions."""
        coupled: list[int] = []
        rejection: list[float] = []
        draft_logits: list[Any] = []
        model = getattr(self.engine, "model")  # noqa: B009 (only the reference engine has one)

        def observe(name: str, layer: int, value: Any) -> None:
            if name == "draft_logits":
                draft_logits.append(value[0].clone())

        usual, model.observe = model.observe, observe
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0)
        try:
            for prompt in conversations():
                if len(coupled) >= NUM_ROUNDS:
                    break
                sequence = self.sequence(params, prompt, num_drafts=5)
                with contextlib.closing(sequence):
                    sequence.open(None)
                    done = False
                    while not done:
                        count = len(sequence.confidences)
                        rows = sequence.rows(len(prompt), count)
                        rows.keep_logits = True
                        proposed = draft_logits[-5:]
                        draft_logits.clear()
                        (result,) = self.engine.step([rows])
                        if count == 5:
                            coupled.append(len(result.drawn) - 1)
                            rejection.append(rejection_accepts(result, proposed))
                        done = sequence.commit(result).done
        finally:
            model.observe = usual
        self.advance()
        number = len(coupled)
        yield Result("spec.accepted_per_round", statistics.fmean(coupled), "drafts", number)
        yield Result("spec.rejection_per_round", statistics.fmean(rejection), "drafts", number)

    def prefill_rate(self) -> Result:
        """The encoder half over a long prompt, in chunks of a worker's size."""
        from flashmesh.kernels.sequence import PrefillSequence

        chunk = 1024
        sequence = PrefillSequence(self.engine, self.tokens(PREFILL_TOKENS), hit=0, payloads=())
        with contextlib.closing(sequence):
            sequence.open()
            begin = time.perf_counter()
            while not sequence.commit(self.engine.step([sequence.rows(chunk)])[0]).done:
                pass
            seconds = time.perf_counter() - begin
        self.advance()
        return Result("prefill.tokens_per_s", PREFILL_TOKENS / seconds, "tokens/s", 1)

    async def replay_stall(self) -> Result:
        """Streams go on while a sequence with many forced tokens catches up beside them."""
        endless = SamplingParams(max_tokens=2000, ignore_eos=True)
        params = SamplingParams(max_tokens=FORCED_TOKENS + 1, ignore_eos=True)
        async with self.loop() as loop:
            streams = [loop.submit(self.sequence(endless)) for _ in range(NUM_STREAMS)]
            for ticket in streams:
                await ticket.next()  # past its own prompt
            times: list[list[float]] = [[] for _ in streams]
            reading = [
                asyncio.ensure_future(arrivals(ticket, into))
                for ticket, into in zip(streams, times, strict=True)
            ]
            begin = time.perf_counter()
            joined = loop.submit(self.sequence(params, forced=self.tokens(FORCED_TOKENS)))
            await arrivals(joined)
            for ticket in streams:
                ticket.close()
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        self.advance()
        gaps = [
            after - before
            for stamps in times
            for before, after in itertools.pairwise(stamps)
            if after > begin
        ]
        return Result("replay.stall_ms", 1000 * max(gaps), "ms", len(gaps))


def conversations() -> Iterator[list[int]]:
    """Yields prompts of the built-in checkpoint's held-out set whose answers are not too short."""
    from flashmesh.bench.demo_chats import Conversations
    from flashmesh.data import demo_folder

    for chat in Conversations(demo_folder()).chats:
        if len(chat.prompt) < 2 * BLOCK_TOKENS and len(chat.answer_ids) >= MIN_ANSWER_TOKENS:
            yield chat.prompt


def step_seconds() -> dict[str, float]:
    """Seconds by part since the process began."""
    return {
        part: STEP_SECONDS.labels(part)._value.get()  # the one reader in this process
        for part in ("plan", "step", "stream")
    }


async def arrivals(ticket: Ticket, times: list[float] | None = None) -> list[float]:
    """Reads a sequence to its end; returns when each token came."""
    times = [] if times is None else times
    while events := await ticket.next():
        now = time.perf_counter()
        times += [now for event in events for _ in event.tokens]
    return times


def rejection_accepts(result: RunResult, draft_logits: Sequence[Any]) -> float:
    """How many drafts rejection sampling is expected to accept (Leviathan et al. 2023), given the drafts.

    Draft i is accepted with probability sum over tokens of min(p_i, q_i), once all before it are.
    """
    chance, total = 1.0, 0.0
    for target, draft in zip(result.logits, draft_logits, strict=False):
        chance *= float(target.softmax(-1).minimum(draft.softmax(-1)).sum())
        total += chance
    return total


def failover(advance: Callable[[], None]) -> Iterator[Result]:
    """Kills the decode worker of a running stream; another one goes on."""
    pauses = []
    prompt = [random.Random(1).randrange(64, 4096) for _ in range(600)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for _ in range(NUM_KILLS):
        with tempfile.TemporaryDirectory() as name, private_redis(Path(name) / "redis") as url:
            plan = MeshPlan(redis_url=url, num_decode=2)
            with (
                running_mesh(plan, Path(name), grace_s=GRACE_S) as mesh,
                RouterClient(mesh.router_address) as client,
            ):
                stamps = []
                for part in client.parts(prompt_request(prompt, params), timeout_s=300):
                    stamps += [time.perf_counter()] * bool(part.token_ids)
                    if len(stamps) == 10:
                        busy_decode(mesh).signal(signal.SIGKILL)
        gaps = [after - before for before, after in itertools.pairwise(stamps)]
        pauses.append(1000 * (max(gaps) - statistics.median(gaps)))
        advance()
    yield p50("failover.pause_ms", "ms", pauses)


def busy_decode(mesh: Mesh) -> Process:
    """Finds the decode worker that serves the one request there is."""
    for process in mesh.processes.values():
        if process.service == "decode" and scrape(
            process.metrics_address, "flashmesh_decode_requests"
        ):
            return process
    raise WorkerLost("no decode worker serves the request")
