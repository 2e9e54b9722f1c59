"""The step loop over the simulated engine: nothing lost, nothing leaked, tokens as if alone."""

import asyncio
import contextlib

import pytest

from flashmesh.errors import NoFreeBlocks, Overloaded
from flashmesh.kernels.generate import generate_offline
from flashmesh.kernels.sequence import DecodeSequence
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.replay import plan_replay
from flashmesh.stepping import StepLoop, plan_rows
from flashmesh.types import FinishReason, SamplingParams


def sequence(engine, prompt, max_tokens):
    plan = plan_replay(len(prompt), window=128, replay_tokens=140)
    return DecodeSequence(engine, prompt, SamplingParams(max_tokens=max_tokens), plan)


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
async def running(engine, **limits):
    loop = StepLoop(engine.step, **{"max_rows": 64, "max_waiting": 100} | limits)
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
        huge = loop.submit(sequence(engine, [1], 10_000))
        small = loop.submit(sequence(engine, [2], 3))
        with pytest.raises(NoFreeBlocks):
            await collect(huge)
        assert await collect(small) == alone([2], 3)


async def test_a_full_queue_refuses_at_once():
    engine = SimulatedEngine()
    loop = StepLoop(engine.step, max_rows=64, max_waiting=1)
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


class Stub:
    def __init__(self, num_pending, generating):
        self.num_pending = num_pending
        self.generating = generating


def test_a_long_prompt_takes_only_what_generating_sequences_leave():
    plan = plan_rows([Stub(1000, False), Stub(1, True), Stub(1, True), Stub(5, False)], 16)
    assert plan == [(1, 1), (2, 1), (0, 14)]
