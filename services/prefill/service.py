"""The prefill servicer: one request is fetch, step, put, progress.

Life of a request: it waits for blocks that another request computes already; then blocks of [0, hit) are fetched and
verified, the sequence joins the step loop, and every block that becomes final is put into the store before its progress
goes out. When the caller leaves, the sequence goes before the next step; what is stored stays.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import prometheus_client

from flashmesh.computations import Computations
from flashmesh.errors import InvalidRequest
from flashmesh.kernels.sequence import PrefillSequence
from flashmesh.rpc import within_deadline
from flashmesh.stored_chain import StoredChain
from flashmesh.types import BLOCK_TOKENS
from flashmesh.v1 import prefill_pb2, prefill_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    import grpc.aio

    from flashmesh.kernels.door import Engine
    from flashmesh.kv_client import KvClient
    from flashmesh.services.prefill.config import PrefillConfig
    from flashmesh.stepping import StepLoop

TOKENS = prometheus_client.Counter("flashmesh_prefill_tokens_total", "Prompt tokens computed.")
SHARED = prometheus_client.Counter(
    "flashmesh_prefill_blocks_shared_total", "Blocks that another request in work computed."
)
BLOCKS = prometheus_client.Counter("flashmesh_prefill_blocks_total", "Blocks put into the store.")


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves `Prefill`."""

    def __init__(
        self, engine: Engine, loop: StepLoop, client: KvClient, config: PrefillConfig
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._client = client
        self._config = config
        self._computations = Computations()

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillProgress]:
        """Computes and stores the blocks of [hit_tokens, len(token_ids))."""
        tokens = list(request.token_ids)
        check_span(request.hit_tokens, len(tokens))
        chain = StoredChain(self._client, request.chain, self._engine.info.layout_id, tokens)
        stored = request.hit_tokens // BLOCK_TOKENS
        yield prefill_pb2.PrefillProgress(stored_blocks=stored)
        async with contextlib.aclosing(
            self._computations.arrivals(chain.hashes, stored)
        ) as arrivals:
            async for arrived in arrivals:
                SHARED.inc(arrived - stored)
                stored = arrived
                yield prefill_pb2.PrefillProgress(stored_blocks=stored)
        if stored == len(chain.hashes):
            return
        with self._computations.claim(chain.hashes[stored:]) as computation:
            counts = self._compute(chain, tokens, stored, request.priority)
            first = stored
            async with contextlib.aclosing(counts):
                async for count in counts:
                    stored += count
                    computation.advance(stored - first)
                    yield prefill_pb2.PrefillProgress(stored_blocks=stored)

    async def _compute(
        self, chain: StoredChain, tokens: Sequence[int], num_hits: int, priority: int
    ) -> AsyncGenerator[int, None]:
        """Computes and stores the blocks after the hits; yields how many at a time."""
        hits = await chain.fetch(0, num_hits, within_deadline(self._config.fetch_timeout_s))
        sequence = PrefillSequence(
            self._engine,
            tokens,
            hit=num_hits * BLOCK_TOKENS,
            payloads=[item.payload for item in hits],
            priority=priority,
        )
        del hits
        with contextlib.closing(self._loop.submit(sequence)) as ticket:
            while events := await ticket.next():
                blocks = [block for event in events for block in event.blocks]
                if blocks:
                    await chain.put(blocks)
                    TOKENS.inc(len(blocks) * BLOCK_TOKENS)
                    BLOCKS.inc(len(blocks))
                    yield len(blocks)


def check_span(hit_tokens: int, num_tokens: int) -> None:
    """Refuses what is not a span of whole blocks.

    Raises:
        InvalidRequest: says what is wrong.
    """
    if not num_tokens or num_tokens % BLOCK_TOKENS or hit_tokens % BLOCK_TOKENS:
        raise InvalidRequest(f"[{hit_tokens}, {num_tokens}) is not a span of whole blocks")
    if hit_tokens >= num_tokens:
        raise InvalidRequest(f"nothing to compute: {hit_tokens} of {num_tokens} tokens are stored")
