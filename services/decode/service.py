"""The decode servicer: blocks in, tokens out.

Life of a request: it waits in a bounded list while its blocks arrive; what nobody prefills is computed here by the
same function; then the sequence joins the step loop, replays, and streams. Tokens of several steps share a message
when the reader is slower than the steps. Whole blocks of accepted tokens go back into the store on the side.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import prometheus_client

from flashmesh.errors import Overloaded
from flashmesh.kernels.sequence import DecodeSequence, PrefillSequence, check_tokens
from flashmesh.replay import ReplayPlan, plan_replay
from flashmesh.rpc import remaining_s
from flashmesh.stored_chain import StoredChain, prefix_digest
from flashmesh.types import BLOCK_TOKENS
from flashmesh.v1 import decode_pb2, decode_pb2_grpc
from flashmesh.wire import finish_to_proto, sampling_from_proto

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    import grpc.aio

    from flashmesh.kernels.door import Engine
    from flashmesh.kv_client import KvClient
    from flashmesh.objects import StoredObject
    from flashmesh.services.decode.config import DecodeConfig
    from flashmesh.services.decode.publish import Publisher
    from flashmesh.stepping import StepLoop, Ticket

TOKENS = prometheus_client.Counter("flashmesh_decode_tokens_total", "Tokens emitted.")
FETCHED = prometheus_client.Counter("flashmesh_decode_blocks_fetched_total", "Blocks fetched.")
LOCAL = prometheus_client.Counter(
    "flashmesh_decode_blocks_computed_total", "Blocks of [0, start) computed here."
)
REQUESTS = prometheus_client.Gauge("flashmesh_decode_requests", "Requests in this worker.")


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves `Decode`."""

    def __init__(
        self,
        engine: Engine,
        loop: StepLoop,
        client: KvClient,
        publisher: Publisher,
        config: DecodeConfig,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._client = client
        self._publisher = publisher
        self._config = config
        self._num_requests = 0

    @property
    def num_requests(self) -> int:
        """Requests in this worker, those that wait for blocks included."""
        return self._num_requests

    async def Decode(  # noqa: N802
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.TokenChunk]:
        """Fetches, replays, samples, streams."""
        with self._admitted():
            prompt, forced = list(request.prompt_token_ids), list(request.forced_token_ids)
            check_tokens(prompt, self._engine)
            params = sampling_from_proto(request.sampling)
            info = self._engine.info
            plan = plan_replay(len(prompt), window=info.window, replay_tokens=request.replay_tokens)
            chain = StoredChain(self._client, request.chain, info.layout_id, [*prompt, *forced])
            blocks = await self._prefix_blocks(request, prompt, plan, chain)
            sequence = DecodeSequence(
                self._engine,
                prompt,
                params,
                plan,
                forced=forced,
                payloads=[item.payload for item in blocks],
            )
            yield decode_pb2.TokenChunk(
                attempt=request.attempt, prefix_digest=prefix_digest(blocks)
            )
            del blocks
            with contextlib.closing(self._loop.submit(sequence)) as ticket:
                async for chunk in self._stream(ticket, chain):
                    chunk.attempt = request.attempt
                    yield chunk

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._num_requests >= self._config.max_requests:
            raise Overloaded(f"{self._num_requests} requests are here already")
        self._num_requests += 1
        REQUESTS.set(self._num_requests)
        try:
            yield
        finally:
            self._num_requests -= 1
            REQUESTS.set(self._num_requests)

    async def _prefix_blocks(
        self,
        request: decode_pb2.DecodeRequest,
        prompt: Sequence[int],
        plan: ReplayPlan,
        chain: StoredChain,
    ) -> list[StoredObject]:
        """Returns the blocks of [0, start): stored, awaited, or computed here and then stored."""
        wanted = plan.num_stored_blocks
        hit = min(request.hit_tokens // BLOCK_TOKENS, wanted)
        available = wanted if request.prefill_running else hit
        blocks = await chain.fetch(0, available, self._wait_s())
        FETCHED.inc(len(blocks))
        if available < wanted:
            await self._compute(prompt[: plan.start], blocks, chain)
            # Whoever stored a block first decides its bytes, so everyone reads them back.
            blocks += await chain.fetch(available, wanted, self._wait_s())
        return blocks

    async def _compute(
        self, tokens: Sequence[int], hits: Sequence[StoredObject], chain: StoredChain
    ) -> None:
        sequence = PrefillSequence(
            self._engine,
            tokens,
            hit=len(hits) * BLOCK_TOKENS,
            payloads=[item.payload for item in hits],
        )
        with contextlib.closing(self._loop.submit(sequence)) as ticket:
            while events := await ticket.next():
                blocks = [block for event in events for block in event.blocks]
                await chain.put(blocks)
                LOCAL.inc(len(blocks))

    async def _stream(
        self, ticket: Ticket, chain: StoredChain
    ) -> AsyncIterator[decode_pb2.TokenChunk]:
        while events := await ticket.next():
            chunk = decode_pb2.TokenChunk()
            for event in events:
                chain.extend(event.tokens)
                chunk.token_ids.extend(event.tokens)
                chunk.logprobs.extend(event.logprobs)
                chunk.finish_reason = finish_to_proto(event.finish_reason)
                if event.blocks and self._config.store_generated:
                    self._publisher.offer(chain, event.blocks)
            TOKENS.inc(len(chunk.token_ids))
            if chunk.token_ids or chunk.finish_reason:
                yield chunk

    def _wait_s(self) -> float:
        left = remaining_s()
        limit = self._config.fetch_timeout_s
        return limit if left is None else min(limit, left)
