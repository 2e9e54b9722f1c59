"""Compiled grammars of a decode worker: cached, and made in processes that may be killed.

A regular expression of twenty characters can take hours or gigabytes to compile. So a grammar is compiled in a process
of its own under limits of time and memory; what exceeds them is the request's fault and nobody else's. A process that
was killed is replaced at once. The first grammar starts the processes: a worker that never gets one pays nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmesh.errors import Draining, FlashmeshError, Overloaded
from flashmesh.services.decode.compile_process import CompileProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashmesh.kernels.grammar import Grammar, Vocabulary
    from flashmesh.types import GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What compiling may cost.

    Attributes:
        num_processes: grammars compiled at once.
        timeout_s: longest compilation of one.
        memory_bytes: most memory of one, beyond what its process has when idle.
        max_waiting: grammars that wait; one more is refused.
        cache_bytes: compiled grammars kept; the least recently used go first.
    """

    num_processes: int = 1
    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30
    max_waiting: int = 64
    cache_bytes: int = 1 << 28


@dataclass(slots=True, eq=False)
class _Job:
    """One grammar that somebody waits for."""

    spec: GrammarSpec
    key: bytes
    outcome: asyncio.Future[Grammar | FlashmeshError]
    num_waiters: int = 0


class Grammars:
    """Owner of the cache and of the compiling processes, one task each.

    Args:
        load: reads the model's vocabulary; called on a thread, for the first grammar.
        limits: of compiling.
    """

    def __init__(self, load: Callable[[], Vocabulary], limits: GrammarLimits) -> None:
        self._load = load
        self._limits = limits
        self._vocabulary: Vocabulary | None = None
        self._cache = GrammarCache(limits.cache_bytes)
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._by_key: dict[bytes, _Job] = {}

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """Returns the compiled grammar, from the cache or from a process.

        Raises:
            InvalidRequest: it is not usable, or exceeds a limit.
            Overloaded: too many wait.
            Incompatible: this installation has no grammars.
        """
        key = spec_key(spec)
        if (known := self._cache.get(key)) is not None:
            return known
        job = self._by_key.get(key) or self._enqueue(spec, key)
        job.num_waiters += 1
        try:
            outcome = await asyncio.shield(job.outcome)
        finally:
            job.num_waiters -= 1
        if isinstance(outcome, FlashmeshError):
            raise outcome
        return outcome

    async def run(self) -> None:
        """Compiles until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._limits.num_processes):
                    group.create_task(self._work())
        finally:
            for job in self._by_key.values():
                job.outcome.set_result(Draining("this worker has stopped"))

    def _enqueue(self, spec: GrammarSpec, key: bytes) -> _Job:
        if self._jobs.qsize() >= self._limits.max_waiting:
            raise Overloaded(f"{self._jobs.qsize()} grammars are waiting to be compiled")
        job = _Job(spec, key, asyncio.get_running_loop().create_future())
        self._by_key[key] = job
        self._jobs.put_nowait(job)
        return job

    async def _work(self) -> None:
        limits = self._limits
        process = CompileProcess(timeout_s=limits.timeout_s, memory_bytes=limits.memory_bytes)
        try:
            while True:
                job = await self._jobs.get()
                outcome = await self._outcome(job, process)
                del self._by_key[job.key]
                job.outcome.set_result(outcome)
                if self._vocabulary is not None and not process.running:
                    # Now, so that the next grammar need not wait for it; a failure is told to that one.
                    with contextlib.suppress(FlashmeshError):
                        await process.start(self._vocabulary)
        finally:
            await process.stop()

    async def _outcome(self, job: _Job, process: CompileProcess) -> Grammar | FlashmeshError:
        if not job.num_waiters:
            return FlashmeshError("nobody waits for this grammar")
        try:
            if self._vocabulary is None:
                self._vocabulary = await asyncio.to_thread(self._load)
            packed = await process.compile(job.spec, self._vocabulary)
        except FlashmeshError as error:
            return error
        from flashmesh.kernels.grammar import (
            Grammar,
        )  # here, as not every installation has xgrammar

        grammar = await asyncio.to_thread(Grammar.unpack, packed, job.spec, self._vocabulary)
        self._cache.put(job.key, grammar)
        return grammar


class GrammarCache:
    """Grammars up to a total size.

    Args:
        capacity_bytes: a grammar that is larger by itself is not kept.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._num_bytes = 0
        self._grammars: OrderedDict[bytes, Grammar] = OrderedDict()

    def get(self, key: bytes) -> Grammar | None:
        """Returns a grammar, which counts as used now, or None."""
        if key in self._grammars:
            self._grammars.move_to_end(key)
        return self._grammars.get(key)

    def put(self, key: bytes, grammar: Grammar) -> None:
        """Adds a grammar that is not there, and drops the least recently used ones that no longer fit."""
        self._grammars[key] = grammar
        self._num_bytes += grammar.num_bytes
        while self._num_bytes > self._capacity_bytes:
            _, dropped = self._grammars.popitem(last=False)
            self._num_bytes -= dropped.num_bytes


def spec_key(spec: GrammarSpec) -> bytes:
    """Names what is compiled: where an output starts to be governed is not part of it."""
    return hashlib.sha256(f"{spec.kind.value}\0{spec.text}".encode()).digest()
