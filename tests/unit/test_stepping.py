"""The step loop over the simulated engine: nothing lost, nothing leaked, tokens as if alone."""

import asyncio
import contextlib
import random

import pytest

from flashmesh.errors import NoFreeBlocks, Overloaded
from flashmesh.kernels.generate import generate_offline, prefill_offline
from flashmesh.kernels.sequence import DecodeSequence
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.replay import plan_replay
from flashmesh.scheduling import Limits
from flashmesh.stepping import PREEMPTED, StepLoop
from flashmesh.types import FinishReason, SamplingParams


def sequence(engine, prompt, max_tokens, **more):
    plan = plan_replay(len(prompt), window=128, replay_tokens=140)
    return DecodeSequence(engine, prompt, SamplingParams(max_tokens=max_tokens), plan, **more)


def alone(prompt, max_tokens):
    items = list(generate_offline(SimulatedEngine(), prompt, SamplingParams(max_tokens=max_tokens)))
    assert items.pop() is FinishReason.LENGTH
    return [item.token for item in items]


async def collect(ticket):
    tokens = []
    while events := await ticket.next():
        for event in events:
            tokens += event.tokens
    return tokens


@contextlib.asynccontextmanager
async def running(engine, depth=1, *, scheduled=True, **limits):
    stats = engine.stats()
    sizes = {"num_pages": stats.num_pages, "num_slots": stats.num_slots}
    limits = Limits(**sizes | {"max_rows": 64, "max_waiting": 100} | limits)
    loop = StepLoop(engine.step, limits, depth=depth, scheduled=scheduled)
    task = asyncio.ensure_future(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.stats().idle


async def test_eight_sequences_in_one_batch_give_what_each_gives_alone():
    engine = SimulatedEngine()
    prompts = [[7 * i + j for j in range(1, 40 * i + 2)] for i in range(8)]
    async with running(engine) as loop:
        tickets = [loop.submit(sequence(engine, prompt, 20)) for prompt in prompts]
        results = await asyncio.gather(*map(collect, tickets))
    assert results == [alone(prompt, 20) for prompt in prompts]
    assert engine.num_steps < 60  # 8 * 20 tokens shared their steps


async def test_more_sequences_than_slots_wait_their_turn():
    engine = SimulatedEngine(num_slots=2)
    async with running(engine) as loop:
        tickets = [loop.submit(sequence(engine, [i + 1], 5)) for i in range(6)]
        results = await asyncio.gather(*map(collect, tickets))
    assert results == [alone([i + 1], 5) for i in range(6)]


async def test_a_cancelled_sequence_gives_its_pages_back_and_the_others_go_on():
    engine = SimulatedEngine(num_slots=2)
    async with running(engine) as loop:
        endless = loop.submit(sequence(engine, [1], 100_000))
        short = loop.submit(sequence(engine, [2], 3))
        assert await endless.next()
        endless.close()
        endless.close()
        assert await collect(short) == alone([2], 3)
        after = loop.submit(sequence(engine, [3], 3))
        assert await collect(after) == alone([3], 3)


async def test_a_sequence_that_can_never_fit_is_refused_and_does_not_block_the_queue():
    engine = SimulatedEngine(num_pages=4)
    async with running(engine) as loop:
        with pytest.raises(NoFreeBlocks, match="10000 tokens need 79 pages, this worker has 4"):
            loop.submit(sequence(engine, [1], 10_000))
        assert await collect(loop.submit(sequence(engine, [2], 3))) == alone([2], 3)


async def test_a_full_queue_refuses_at_once():
    engine = SimulatedEngine()
    async with running(engine, max_waiting=1) as loop:
        loop.submit(sequence(engine, [1], 1))
        with pytest.raises(Overloaded):
            loop.submit(sequence(engine, [1], 1))


async def test_a_failing_step_ends_its_sequences_and_the_loop_goes_on():
    engine = SimulatedEngine()
    real, failures = engine.step, iter([True])

    def step(batch):
        if next(failures, False):
            raise RuntimeError("device fault")
        return real(batch)

    async with running(engine) as loop:
        loop._step = step
        with pytest.raises(RuntimeError, match="device fault"):
            await collect(loop.submit(sequence(engine, [1], 3)))
        assert await collect(loop.submit(sequence(engine, [2], 3))) == alone([2], 3)


def stored(prompt):
    """Payloads that a prefill of the prompt would have stored."""
    plan = plan_replay(len(prompt), window=128, replay_tokens=140)
    tokens = prompt[: plan.start] if plan.num_stored_blocks else ()
    return prefill_offline(SimulatedEngine(), tokens, chunk_tokens=1024)


async def test_tokens_are_the_same_whatever_happens_around_a_sequence():
    """Laws 1 and 2: arrivals, cancels, preemption, pipeline, drafts and their schedule change nothing."""
    for seed in range(16):
        rng = random.Random(seed)
        depth, num_drafts = rng.choice([1, 2]), rng.choice([0, 1, 3, 5])
        scheduled = rng.random() < 0.5
        engine = SimulatedEngine(num_pages=10, num_slots=3)
        rows = rng.choice([8, 40])
        async with running(engine, depth, scheduled=scheduled, max_rows=rows) as loop:
            wanted, given, cancelled = [], [], []
            for _ in range(12):
                prompt = [rng.randrange(2, 4000) for _ in range(rng.choice([1, 60, 128, 290, 500]))]
                count = rng.randint(1, 150)
                ticket = loop.submit(
                    sequence(
                        engine,
                        prompt,
                        count,
                        payloads=stored(prompt),
                        num_drafts=num_drafts,
                        priority=rng.choice([0, 0, 1]),
                    )
                )
                if rng.random() < 0.2:
                    cancelled.append(ticket)
                else:
                    wanted.append(alone(prompt, count))
                    given.append(asyncio.ensure_future(collect(ticket)))
                for _ in range(rng.randint(0, 20)):
                    await asyncio.sleep(0)
                if cancelled and rng.random() < 0.5:
                    cancelled.pop().close()
            for ticket in cancelled:
                ticket.close()
            assert await asyncio.gather(*given) == wanted, f"seed {seed}"


async def test_a_sequence_loses_its_pages_and_goes_on_where_it_was():
    engine = SimulatedEngine(num_pages=4)
    before = PREEMPTED._value.get()
    prompts = [[7], [8], [9]]
    async with running(engine) as loop:
        tickets = [loop.submit(sequence(engine, prompt, 300)) for prompt in prompts]
        results = await asyncio.gather(*map(collect, tickets))
    assert results == [alone(prompt, 300) for prompt in prompts]
    assert PREEMPTED._value.get() > before


@pytest.mark.parametrize("length", [1, 2, 100, 500])
async def test_choices_share_one_replay(length):
    engine = SimulatedEngine()
    prompt = [(3 * place + 5) % 4000 for place in range(length)]
    params = [SamplingParams(max_tokens=9, temperature=1.0, seed=3, choice=c) for c in range(4)]
    plan = plan_replay(length, window=128, replay_tokens=140)
    rows = 0

    def step(batch):
        nonlocal rows
        rows += sum(len(run.tokens) for run in batch)
        return SimulatedEngine.step(engine, batch)

    async with running(engine) as loop:
        loop._step = step
        first = DecodeSequence(engine, prompt, params[0], plan, payloads=stored(prompt))
        tickets = [loop.submit(first, leads=True)]
        tickets += [
            loop.submit(
                DecodeSequence(engine, prompt, each, plan, payloads=stored(prompt)),
                leader=tickets[0],
            )
            for each in params[1:]
        ]
        results = await asyncio.gather(*map(collect, tickets))
    assert len({tuple(result) for result in results}) == 4
    for each, result in zip(params, results, strict=True):
        items = list(generate_offline(SimulatedEngine(), prompt, each))
        assert [item.token for item in items[:-1]] == result
    # All but the last row of the prompt once; then nine rows for each choice.
    assert rows == length - 1 - plan.replay_start + 4 * 9
