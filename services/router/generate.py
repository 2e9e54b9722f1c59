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
from typing import TYPE_CHECKING

import prometheus_client

from flashmesh.errors import (
    BlockNotFound,
    CorruptBlock,
    Overloaded,
    StaleEpoch,
    WorkerLost,
)
from flashmesh.replay import ReplayPlan, plan_replay
from flashmesh.rpc import Channels, remaining_s
from flashmesh.services.router.prefix import Call, Prefix
from flashmesh.services.router.replicas import Replicas, numerics_of
from flashmesh.services.router.streams import WorkerStream, read_beside
from flashmesh.types import BLOCK_TOKENS, FinishReason
from flashmesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)
from flashmesh.wire import finish_from_proto, sampling_to_proto

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from flashmesh.index import IndexReader
    from flashmesh.kv_client import KvClient
    from flashmesh.registry import WorkerRecord
    from flashmesh.services.router.config import RouterConfig
    from flashmesh.services.router.leases import Leases

log = logging.getLogger(__name__)

RETRIED = (WorkerLost, BlockNotFound, CorruptBlock, StaleEpoch, Overloaded)

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
    """What came out since the last one; `finish_reason` marks the last."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Mesh:
    """What a request needs of the mesh around it."""

    config: RouterConfig
    replicas: Replicas
    index: IndexReader
    leases: Leases
    client: KvClient
    channels: Channels


@dataclass(slots=True)
class Generation:
    """One request being served.

    Attributes:
        cached_tokens: tokens of the prompt that were stored when the first attempt began.
        emitted: tokens that the client has.
    """

    mesh: Mesh
    call: Call
    cached_tokens: int = 0
    emitted: list[int] = field(default_factory=list)
    _digest: bytes | None = None
    _numerics: str = ""
    _failed: set[str] = field(default_factory=set)

    async def run(self) -> AsyncGenerator[Tokens, None]:
        """Yields tokens until one carries a finish reason.

        Raises:
            FlashmeshError: no attempt is left, or the error is the caller's.
        """
        for attempt in range(self.mesh.config.max_attempts):
            last = attempt + 1 == self.mesh.config.max_attempts
            try:
                async with contextlib.aclosing(self._attempt(attempt)) as stream:
                    async for tokens in stream:
                        self.emitted += tokens.tokens
                        yield tokens
                        if tokens.finish_reason:
                            ATTEMPTS.labels("finished").inc()
                            return
                raise WorkerLost("decode ended the stream without a finish reason")
            except RETRIED as error:
                ATTEMPTS.labels(type(error).__name__).inc()
                log.warning(
                    "attempt failed",
                    extra={"attempt": attempt, "error": str(error), "emitted": len(self.emitted)},
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
        if attempt:  # the index has just been wrong, or is about to be
            hit = await prefix.count_present(self.mesh.client)
        else:
            hit = await prefix.count_indexed(self.mesh.index)
        if attempt == 0:
            self.cached_tokens = hit * BLOCK_TOKENS
        lease_id = f"{call.request_id}/{attempt}"
        async with (
            self.mesh.leases.hold(lease_id, prefix.places, prefix.hashes),
            contextlib.aclosing(self._stream(attempt, plan, hit, prefix.chain)) as stream,
        ):
            async for chunk in stream:
                self._check_digest(chunk)
                finish = finish_from_proto(chunk.finish_reason)
                if chunk.token_ids or finish:
                    yield Tokens(list(chunk.token_ids), list(chunk.logprobs), finish)

    async def _probe_nodes(self) -> None:
        """Finds kvstore nodes that the registry still lists and that do not answer any more."""
        for node in self.mesh.replicas.nodes():
            try:
                await self.mesh.client.have(node.address, [])
            except WorkerLost:
                self._failed.add(node.epoch)

    async def _stream(
        self, attempt: int, plan: ReplayPlan, hit: int, chain: types_pb2.BlockChain
    ) -> AsyncGenerator[decode_pb2.TokenChunk, None]:
        """Runs prefill where it pays and decode beside it; either one's failure ends both."""
        model = self.call.model
        missing = plan.start - hit * BLOCK_TOKENS if plan.num_stored_blocks else 0
        prefill = None
        if missing >= self.mesh.config.prefill_min_tokens:
            prefill = self.mesh.replicas.choose("prefill", model, missing, self._failed)
        prefilling: WorkerStream | None = None
        async with contextlib.AsyncExitStack() as stack:
            if prefill is not None:
                stack.enter_context(self.mesh.replicas.dispatched(prefill, missing))
                prefilling = await stack.enter_async_context(
                    self._open(prefill, self._prefill_request(attempt, plan, hit, chain))
                )
                await prefilling.read()  # decode is placed when prefill has begun
            decode = self._choose_decode()
            stack.enter_context(self.mesh.replicas.dispatched(decode, 1))
            decoding = await stack.enter_async_context(
                self._open(decode, self._decode_request(attempt, hit, chain, prefill is not None))
            )
            async with contextlib.aclosing(read_beside(decoding, prefilling)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _choose_decode(self) -> WorkerRecord:
        """Places the sequence; one that has emitted tokens stays on arithmetic that gives the same bits."""
        numerics = self._numerics if self.emitted else ""
        decode = self.mesh.replicas.choose("decode", self.call.model, 1, self._failed, numerics)
        if decode is None:
            raise WorkerLost("no decode worker is registered")
        if numerics and numerics_of(decode) != numerics:
            INEXACT.inc()
        self._numerics = numerics_of(decode)
        return decode

    def _open(
        self, worker: WorkerRecord, request: prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest
    ) -> WorkerStream:
        channel = self.mesh.channels.get(worker.address)
        method = (
            prefill_pb2_grpc.PrefillStub(channel).Prefill
            if isinstance(request, prefill_pb2.PrefillRequest)
            else decode_pb2_grpc.DecodeStub(channel).Decode
        )
        call = method(request, metadata=self.mesh.channels.metadata(), timeout=remaining_s())
        return WorkerStream(worker, call, self.mesh.config.stall_timeout_s, self._failed.add)

    def _prefill_request(
        self, attempt: int, plan: ReplayPlan, hit: int, chain: types_pb2.BlockChain
    ) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=self.call.request_id,
            attempt=attempt,
            token_ids=self.call.prompt[: plan.start],
            hit_tokens=hit * BLOCK_TOKENS,
            chain=chain,
        )

    def _decode_request(
        self, attempt: int, hit: int, chain: types_pb2.BlockChain, prefill_running: bool
    ) -> decode_pb2.DecodeRequest:
        return decode_pb2.DecodeRequest(
            request_id=self.call.request_id,
            attempt=attempt,
            prompt_token_ids=self.call.prompt,
            forced_token_ids=self.emitted,
            sampling=sampling_to_proto(self.call.params),
            chain=chain,
            hit_tokens=hit * BLOCK_TOKENS,
            prefill_running=prefill_running,
            replay_tokens=self.mesh.config.replay_tokens,
        )

    def _check_digest(self, chunk: decode_pb2.TokenChunk) -> None:
        """Counts a stream that goes on over other bytes than its first tokens came from."""
        if not chunk.prefix_digest:
            return
        if self.emitted and self._digest not in (None, chunk.prefix_digest):
            INEXACT.inc()
        self._digest = chunk.prefix_digest
