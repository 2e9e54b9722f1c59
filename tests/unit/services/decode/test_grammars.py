"""Compiling in processes: limits hold, a killed process is replaced, and nothing is compiled twice."""

import asyncio
import contextlib
import threading

import pytest

from flashmesh.config import ModelSection
from flashmesh.errors import Draining, FlashmeshError, InvalidRequest, Overloaded
from flashmesh.kernels.load import load_vocabulary
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.services.decode.compile_process import CompileProcess
from flashmesh.services.decode.grammars import GrammarCache, GrammarLimits, Grammars
from flashmesh.types import GrammarKind, GrammarSpec

MEGABYTE_EBNF = "root ::= " + " | ".join(f'"{number:08x}"' for number in range(80_000))


def load():
    return load_vocabulary(ModelSection(engine="simulated"), SimulatedEngine().info)


def regex(text):
    return GrammarSpec(kind=GrammarKind.REGEX, text=text)


def new(**limits):
    return Grammars(load, GrammarLimits(**limits))


@contextlib.asynccontextmanager
async def running(grammars):
    task = asyncio.create_task(grammars.run())
    try:
        yield grammars
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.slow
async def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_compiles():
    async with running(new(timeout_s=2.0, memory_bytes=1 << 40)) as grammars:
        with pytest.raises(InvalidRequest, match="ebnf grammar takes longer than 2 s to compile"):
            await grammars.compile(GrammarSpec(kind=GrammarKind.EBNF, text=MEGABYTE_EBNF))
        assert (await grammars.compile(regex("a+"))).start().mask().any()


@pytest.mark.slow
async def test_a_grammar_that_takes_too_much_memory_is_refused_and_the_next_one_compiles():
    async with running(new(timeout_s=120.0, memory_bytes=1 << 27)) as grammars:
        nested = '{"type":"array","items":' * 3000 + '{"type":"string"}' + "}" * 3000
        with pytest.raises(InvalidRequest, match="takes more than 128 MiB to compile"):
            await grammars.compile(GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=nested))
        with pytest.raises(InvalidRequest, match="too ambiguous"):
            await grammars.compile(regex("((-*)*)*b"))
        with pytest.raises(InvalidRequest, match="parenthesis is not closed"):
            await grammars.compile(regex("(a"))
        assert (await grammars.compile(regex("a+"))).start().mask().any()


@pytest.mark.slow
async def test_a_process_that_dies_is_the_requests_fault_and_is_replaced():
    process, vocabulary = CompileProcess(timeout_s=60, memory_bytes=1 << 30), load()
    try:
        await process.start(vocabulary)
        process._process.kill()
        with pytest.raises(InvalidRequest, match="more than the compiler can take"):
            await process.compile(regex("a"), vocabulary)
        assert not process.running
        assert await process.compile(regex("a"), vocabulary)
    finally:
        await process.stop()


@pytest.mark.slow
async def test_equal_grammars_are_compiled_once_whoever_leaves():
    async with running(new()) as grammars:
        gone = asyncio.create_task(grammars.compile(regex("a")))
        others = [asyncio.create_task(grammars.compile(regex("a"))) for _ in range(3)]
        await asyncio.sleep(0)
        gone.cancel()
        first, *rest = await asyncio.gather(*others)
        assert all(grammar is first for grammar in rest)
        assert await grammars.compile(regex("a")) is first
        spec = GrammarSpec(kind=GrammarKind.REGEX, text="a", start_after=16)
        assert await grammars.compile(spec) is first


async def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled():
    loads = []

    def refuse():
        loads.append(1)
        raise FlashmeshError("no vocabulary")

    grammars = Grammars(refuse, GrammarLimits())
    gone = asyncio.create_task(grammars.compile(regex("a")))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    async with running(grammars):
        with pytest.raises(FlashmeshError, match="no vocabulary"):
            await grammars.compile(regex("b"))
    assert len(loads) == 1


async def test_one_grammar_too_many_is_refused_at_once():
    grammars = new(max_waiting=1)  # nobody runs it
    first = asyncio.create_task(grammars.compile(regex("a")))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 grammars are waiting"):
        await grammars.compile(regex("b"))
    first.cancel()


async def test_who_waits_is_told_when_the_worker_stops():
    loading = threading.Event()

    def slow_load():
        loading.wait(60)
        raise FlashmeshError("no vocabulary")

    grammars = Grammars(slow_load, GrammarLimits())
    async with running(grammars):
        waiting = [asyncio.create_task(grammars.compile(regex(text))) for text in "ab"]
        await asyncio.sleep(0)
    loading.set()
    for task in waiting:
        with pytest.raises(Draining, match="this worker has stopped"):
            await task


class Sized:
    """A grammar as the cache sees it."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes


def test_the_cache_drops_what_was_not_used_for_longest():
    cache, a, b, c = GrammarCache(10), Sized(4), Sized(5), Sized(3)
    cache.put(b"a", a)
    cache.put(b"b", b)
    assert cache.get(b"a") is a
    cache.put(b"c", c)
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == [a, None, c]
    cache.put(b"d", Sized(11))
    assert [cache.get(key) for key in (b"a", b"c", b"d")] == [None] * 3
