"""One request from first byte to last token, with the retry rule.

An attempt: longest stored prefix, lease, prefill if enough is missing, decode from prefill's first progress message
on. When a worker dies, hangs or drains, or a block turns out to be missing or bad, the next attempt plans again from
what is stored by then, on other workers where there are any; tokens that the client already has are forced, so the
stream goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import prometheus_client

from flashmesh.computations import Computations
from flashmesh.errors import (
    BlockNotFound,
    CorruptBlock,
    Overloaded,
    StaleEpoch,
    WorkerFailed,
    WorkerLost,
)
from flashmesh.replay import ReplayPlan, plan_replay
from flashmesh.rpc import Channels, remaining_s
from flashmesh.services.router.prefix import Call, Prefix
from flashmesh.services.router.replicas import Replicas, numerics_of
from flashmesh.services.router.streams import WorkerStream, read_beside
from flashmesh.types import BLOCK_TOKENS, FinishReason, pages_for
from flashmesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)
from flashmesh.wire import finish_from_proto, sampling_to_proto

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from flashmesh.index import IndexReader
    from flashmesh.kv_client import KvClient
    from flashmesh.registry import WorkerRecord
    from flashmesh.services.router.config import RouterConfig
    from flashmesh.services.router.leases import Leases

log = logging.getLogger(__name__)

RETRIED = (WorkerLost, WorkerFailed, BlockNotFound, CorruptBlock, StaleEpoch, Overloaded)

BACKOFF_S = 0.05

ATTEMPTS = prometheus_client.Counter(
    "flashmesh_router_attempts_total", "Attempts by how they ended.", ["outcome"]
)
INEXACT = prometheus_client.Counter(
    "flashmesh_router_failover_inexact_total",
    "Streams that went on over other bytes, or on other arithmetic, than they began with.",
)


@dataclass(slots=True)
class Tokens:
    """What came out of one choice since the last one; `finish_reason` marks its last.

    Attributes:
        chunk: as the decode worker sent it.
    """

    chunk: decode_pb2.TokenChunk
    finish_reason: FinishReason | None = None

    @property
    def choice(self) -> int:
        """Which answer these belong to."""
        return self.chunk.choice

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""
        return list(self.chunk.token_ids)


@dataclass(slots=True)
class Mesh:
    """What a request needs of the mesh around it."""

    config: RouterConfig
    replicas: Replicas
    index: IndexReader
    leases: Leases
    client: KvClient
    channels: Channels
    computations: Computations = field(default_factory=Computations)


@dataclass(slots=True)
class Generation:
    """One request being served.

    Attributes:
        cached_tokens: tokens of the prompt that were stored when the first attempt began.
        emitted: tokens that the client has, by choice.
        unfinished: choices that go on.
    """

    mesh: Mesh
    call: Call
    cached_tokens: int = 0
    emitted: dict[int, list[int]] = field(init=False)
    unfinished: set[int] = field(init=False)
    _digest: bytes | None = None
    _numerics: str = ""
    _failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        first = self.call.params.choice
        self.unfinished = set(range(first, first + self.call.params.num_choices))
        self.emitted = {choice: [] for choice in self.unfinished}

    @property
    def num_emitted(self) -> int:
        """Tokens that the client has, all choices together."""
        return sum(map(len, self.emitted.values()))

    def end(self, choice: int, num_overrun: int) -> None:
        """Ends a choice where decode has not: its last tokens are an overrun that the client does not get."""
        self.unfinished.discard(choice)
        if num_overrun:
            del self.emitted[choice][-num_overrun:]

    async def run(self) -> AsyncGenerator[Tokens, None]:
        """Yields tokens until every choice has had a finish reason.

        Raises:
            FlashmeshError: no attempt is left, or the error is the caller's.
        """
        for attempt in range(self.mesh.config.max_attempts):
            last = attempt + 1 == self.mesh.config.max_attempts
            try:
                async with contextlib.aclosing(self._attempt(attempt)) as stream:
                    async for tokens in stream:
                        if tokens.choice not in self.unfinished:
                            continue  # a stop string has ended it, which decode does not know
                        self.emitted[tokens.choice] += tokens.token_ids
                        if tokens.finish_reason:
                            self.unfinished.discard(tokens.choice)
                        yield tokens
                        if not self.unfinished:
                            ATTEMPTS.labels("finished").inc()
                            return
                raise WorkerLost("decode ended the stream without a finish reason")
            except RETRIED as error:
                ATTEMPTS.labels(type(error).__name__).inc()
                log.warning(
                    "attempt failed",
                    extra={"attempt": attempt, "error": str(error), "emitted": self.num_emitted},
                )
                if last:
                    raise
                await asyncio.sleep(BACKOFF_S * 2**attempt)
                if isinstance(error, WorkerLost):
                    await self.mesh.replicas.wait_fresh(
                        "decode", self._failed, self.mesh.config.worker_wait_s
                    )

    async def _attempt(self, attempt: int) -> AsyncGenerator[Tokens, None]:
        call, config = self.call, self.mesh.config
        plan = plan_replay(
            len(call.prompt), window=call.model.window, replay_tokens=config.replay_tokens
        )
        if attempt:
            await self._probe_nodes()
        nodes = self.mesh.replicas.nodes()
        answering = [node for node in nodes if node.epoch not in self._failed]
        prefix = Prefix(call, plan.num_stored_blocks, answering or nodes)
        lease_id = f"{call.request_id}/{attempt}"
        async with self.mesh.leases.hold(lease_id, prefix.places, prefix.hashes):
            if attempt:  # the index has just been wrong, or is about to be
                hit = await prefix.count_present(self.mesh.client)
                self.mesh.index.forget(prefix.hashes)
            else:
                hit = await prefix.count_indexed(self.mesh.index)
            # Nothing is awaited between what is known to be stored, or computed, and this request's own claim.
            async for arrived in self.mesh.computations.arrivals(prefix.hashes, hit):
                hit = arrived
            if attempt == 0:
                self.cached_tokens = hit * BLOCK_TOKENS
            async with contextlib.aclosing(self._stream(attempt, plan, hit, prefix)) as stream:
                async for chunk in stream:
                    if chunk.prefix_digest:  # decode has read all of them
                        self._check_digest(chunk.prefix_digest)
                        prefix.confirm(self.mesh.index)
                    finish = finish_from_proto(chunk.finish_reason)
                    if chunk.token_ids or finish:
                        yield Tokens(chunk, finish)

    async def _probe_nodes(self) -> None:
        """Finds kvstore nodes that the registry still lists and that do not answer any more."""
        for node in self.mesh.replicas.nodes():
            try:
                await self.mesh.client.have(node.address, [])
            except WorkerLost:
                self._failed.add(node.epoch)

    async def _stream(
        self, attempt: int, plan: ReplayPlan, hit: int, prefix: Prefix
    ) -> AsyncGenerator[decode_pb2.TokenChunk, None]:
        """Runs prefill where it pays and decode beside it; either one's failure ends both."""
        chain, model = prefix.chain, self.call.model
        missing = plan.start - hit * BLOCK_TOKENS if plan.num_stored_blocks else 0
        prefill = None
        if missing >= self.mesh.config.prefill_min_tokens:
            prefill = self.mesh.replicas.choose_prefill(model, missing, self._failed)
        prefilling: WorkerStream | None = None
        async with contextlib.AsyncExitStack() as stack:
            if prefill is not None:
                stack.enter_context(self.mesh.replicas.dispatched(prefill, missing))
                claiming = stack.enter_context(contextlib.ExitStack())
                claim = claiming.enter_context(self.mesh.computations.claim(prefix.hashes[hit:]))

                def watch(progress: prefill_pb2.PrefillProgress | None) -> None:
                    if progress is None:
                        prefix.confirm(self.mesh.index)  # before others stop waiting for the blocks
                        claiming.close()
                    else:
                        claim.advance(progress.stored_blocks - hit)

                prefilling = await stack.enter_async_context(
                    self._open(prefill, self._prefill_request(attempt, plan, hit, chain), watch)
                )
                await prefilling.read()  # decode is placed when prefill has begun
            decode = self._choose_decode()
            stack.enter_context(
                self.mesh.replicas.dispatched(decode, len(self.unfinished), self._num_pages())
            )
            decoding = await stack.enter_async_context(
                self._open(decode, self._decode_request(attempt, hit, chain, prefill is not None))
            )
            async with contextlib.aclosing(read_beside(decoding, prefilling)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _num_pages(self) -> int:
        """Pages that the sequences hold when they start."""
        length = len(self.call.prompt)
        return sum(pages_for(length + len(self.emitted[choice])) for choice in self.unfinished)

    def _choose_decode(self) -> WorkerRecord:
        """Places the sequence; one that has emitted tokens stays on arithmetic that gives the same bits."""
        numerics = self._numerics if self.num_emitted else ""
        decode = self.mesh.replicas.choose_decode(
            self.call.model, self._num_pages(), len(self.unfinished), self._failed, numerics
        )
        if decode is None:
            raise WorkerLost("no decode worker is registered")
        if numerics and numerics_of(decode) != numerics:
            INEXACT.inc()
        self._numerics = numerics_of(decode)
        return decode

    def _open(
        self,
        worker: WorkerRecord,
        request: prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest,
        watch: Callable[[Any], None] = lambda message: None,
    ) -> WorkerStream:
        channel = self.mesh.channels.get(worker.address)
        method = (
            prefill_pb2_grpc.PrefillStub(channel).Prefill
            if isinstance(request, prefill_pb2.PrefillRequest)
            else decode_pb2_grpc.DecodeStub(channel).Decode
        )
        call = method(request, metadata=self.mesh.channels.metadata(), timeout=remaining_s())
        stall_s = self.mesh.config.stall_timeout_s
        return WorkerStream(worker, call, stall_s, self._failed.add, watch)

    def _prefill_request(
        self, attempt: int, plan: ReplayPlan, hit: int, chain: types_pb2.BlockChain
    ) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=self.call.request_id,
            attempt=attempt,
            token_ids=self.call.prompt[: plan.start],
            hit_tokens=hit * BLOCK_TOKENS,
            chain=chain,
            priority=self.call.priority,
        )

    def _decode_request(
        self, attempt: int, hit: int, chain: types_pb2.BlockChain, prefill_running: bool
    ) -> decode_pb2.DecodeRequest:
        return decode_pb2.DecodeRequest(
            request_id=self.call.request_id,
            attempt=attempt,
            prompt_token_ids=self.call.prompt,
            choices=[
                decode_pb2.Choice(choice=choice, forced_token_ids=self.emitted[choice])
                for choice in sorted(self.unfinished)
            ],
            sampling=sampling_to_proto(self.call.params),
            chain=chain,
            hit_tokens=hit * BLOCK_TOKENS,
            prefill_running=prefill_running,
            replay_tokens=self.mesh.config.replay_tokens,
            priority=self.call.priority,
        )

    def _check_digest(self, digest: bytes) -> None:
        """Counts a stream that goes on over other bytes than its first tokens came from."""
        if self.num_emitted and self._digest not in (None, digest):
            INEXACT.inc()
        self._digest = digest
