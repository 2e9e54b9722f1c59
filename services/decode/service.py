"""The decode servicer: blocks in, tokens out.

Life of a request: it waits in a bounded list while its blocks arrive; what nobody prefills is computed here by the
same function; then a sequence for each choice joins the step loop, the first one replays, the others copy it, and all
stream. Tokens of several steps share a message when the reader is slower than the steps. Whole blocks of accepted
tokens go back into the store on the side.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import prometheus_client

from flashmesh.errors import InvalidRequest, Overloaded
from flashmesh.kernels.sequence import DecodeSequence, PrefillSequence, check_tokens
from flashmesh.replay import ReplayPlan, plan_replay
from flashmesh.rpc import within_deadline
from flashmesh.stored_chain import StoredChain, prefix_digest
from flashmesh.types import BLOCK_TOKENS
from flashmesh.v1 import decode_pb2, decode_pb2_grpc
from flashmesh.wire import finish_to_proto, sampling_from_proto

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    import grpc.aio

    from flashmesh.kernels.door import Engine
    from flashmesh.kernels.sequence import Progress
    from flashmesh.kv_client import KvClient
    from flashmesh.objects import StoredObject
    from flashmesh.services.decode.config import DecodeConfig
    from flashmesh.services.decode.grammars import Grammars
    from flashmesh.services.decode.publish import Publisher
    from flashmesh.stepping import StepLoop
    from flashmesh.ticket import Ticket

TOKENS = prometheus_client.Counter("flashmesh_decode_tokens_total", "Tokens emitted.")
FETCHED = prometheus_client.Counter("flashmesh_decode_blocks_fetched_total", "Blocks fetched.")
LOCAL = prometheus_client.Counter(
    "flashmesh_decode_blocks_computed_total", "Blocks of [0, start) computed here."
)
REQUESTS = prometheus_client.Gauge("flashmesh_decode_requests", "Requests in this worker.")


@dataclass(frozen=True, slots=True)
class _Answer:
    """One choice of a request: its sequence, and the blocks that it will have filled."""

    choice: int
    num_forced: int
    sequence: DecodeSequence
    chain: StoredChain


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves `Decode`."""

    def __init__(
        self,
        engine: Engine,
        loop: StepLoop,
        client: KvClient,
        publisher: Publisher,
        grammars: Grammars,
        config: DecodeConfig,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._client = client
        self._publisher = publisher
        self._grammars = grammars
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
            prompt = list(request.prompt_token_ids)
            check_tokens(prompt, self._engine)
            check_choices(request.choices)
            params = sampling_from_proto(request.sampling)
            spec = params.grammar
            grammar = await self._grammars.compile(spec) if spec else None
            info = self._engine.info
            plan = plan_replay(len(prompt), window=info.window, replay_tokens=request.replay_tokens)
            chain = StoredChain(self._client, request.chain, info.layout_id, prompt)
            blocks = await self._prefix_blocks(request, prompt, plan, chain)
            answers = [
                _Answer(
                    choice.choice,
                    len(choice.forced_token_ids),
                    DecodeSequence(
                        self._engine,
                        prompt,
                        dataclasses.replace(params, choice=choice.choice, num_choices=1),
                        plan,
                        forced=list(choice.forced_token_ids),
                        payloads=[item.payload for item in blocks],
                        grammar=grammar.start(spec.start_after) if grammar and spec else None,
                        num_drafts=self._config.num_drafts,
                        priority=request.priority,
                    ),
                    chain.fork(choice.forced_token_ids),
                )
                for choice in request.choices
            ]
            yield decode_pb2.TokenChunk(
                attempt=request.attempt, prefix_digest=prefix_digest(blocks)
            )
            del blocks
            with self._submitted(answers) as tickets:
                async for place, events in merged(tickets):
                    chunk = self._chunk(answers[place], events)
                    if chunk.token_ids or chunk.finish_reason:
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
        blocks = await chain.fetch(0, available, within_deadline(self._config.fetch_timeout_s))
        FETCHED.inc(len(blocks))
        if available < wanted:
            await self._compute(prompt[: plan.start], blocks, chain, request.priority)
            # Whoever stored a block first decides its bytes, so everyone reads them back.
            blocks += await chain.fetch(
                available, wanted, within_deadline(self._config.fetch_timeout_s)
            )
        return blocks

    @contextlib.contextmanager
    def _submitted(self, answers: Sequence[_Answer]) -> Iterator[list[Ticket]]:
        """Submits all answers; unless they go on from different tokens, the others copy the first one's replay."""
        share = len(answers) > 1 and not any(answer.num_forced for answer in answers)
        with contextlib.ExitStack() as stack:
            tickets: list[Ticket] = []
            for answer in answers:
                ticket = self._loop.submit(
                    answer.sequence,
                    leads=share and not tickets,
                    leader=tickets[0] if share and tickets else None,
                )
                stack.callback(ticket.close)
                tickets.append(ticket)
            yield tickets

    async def _compute(
        self,
        tokens: Sequence[int],
        hits: Sequence[StoredObject],
        chain: StoredChain,
        priority: int,
    ) -> None:
        sequence = PrefillSequence(
            self._engine,
            tokens,
            hit=len(hits) * BLOCK_TOKENS,
            payloads=[item.payload for item in hits],
            priority=priority,
        )
        with contextlib.closing(self._loop.submit(sequence)) as ticket:
            while events := await ticket.next():
                blocks = [block for event in events for block in event.blocks]
                await chain.put(blocks)
                LOCAL.inc(len(blocks))

    def _chunk(self, answer: _Answer, events: Sequence[Progress]) -> decode_pb2.TokenChunk:
        """Packs progress for the router, and blocks for the store."""
        chunk = decode_pb2.TokenChunk(choice=answer.choice)
        for event in events:
            answer.chain.extend(event.tokens)
            for drawn in event.drawn:
                chunk.token_ids.append(drawn.token)
                chunk.logprobs.append(drawn.logprob)
                chunk.processed_logprobs.append(drawn.processed_logprob)
                if drawn.top_ids:
                    chunk.top_logprobs.add(token_ids=drawn.top_ids, logprobs=drawn.top_logprobs)
            chunk.finish_reason = finish_to_proto(event.finish_reason)
            if event.blocks and self._config.store_generated:
                self._publisher.offer(answer.chain, event.blocks)
        TOKENS.inc(len(chunk.token_ids))
        return chunk


def check_choices(choices: Sequence[decode_pb2.Choice]) -> None:
    """Refuses a request for no answer, or for the same one twice.

    Raises:
        InvalidRequest: says which.
    """
    numbers = [choice.choice for choice in choices]
    if not numbers or len(set(numbers)) < len(numbers):
        raise InvalidRequest(f"choices must be distinct and at least one, not {numbers}")


async def merged(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, list[Progress]]]:
    """Yields (place, progress) of several sequences as it comes, until all have ended.

    Raises:
        FlashmeshError: one of them could not go on.
    """
    reading = {asyncio.ensure_future(ticket.next()): place for place, ticket in enumerate(tickets)}
    try:
        while reading:
            ready, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in ready:
                place = reading.pop(task)
                if events := task.result():
                    reading[asyncio.ensure_future(tickets[place].next())] = place
                    yield place, events
    finally:
        for task in reading:
            task.cancel()
