"""A request inside a worker: which rows it runs next, and what a finished step gave it.

Prefill, decode and offline generation all advance these two classes, so the same prompt runs the same rows wherever
it runs. Everything here is synchronous and belongs to the device thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashmesh.errors import InvalidRequest, PromptTooLong
from flashmesh.kernels.door import Engine, RowRun, RunResult, Session, SessionPlan
from flashmesh.types import BLOCK_TOKENS, FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashmesh.replay import ReplayPlan


@dataclass(slots=True)
class Progress:
    """What a step gave one sequence.

    Attributes:
        blocks: (index, payload) of blocks that became final.
        tokens, logprobs: tokens to emit.
        finish_reason: set when the sequence has emitted its last token.
        done: no rows are left to run.
    """

    blocks: list[tuple[int, bytes]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    done: bool = False


class PrefillSequence:
    """The encoder half over [hit, stop) of a prompt, after a replay of one window before the hit.

    Args:
        engine: where it runs.
        tokens: ids of [0, stop); `stop` is a multiple of the block size.
        hit: blocks of [0, hit) come from the store; a multiple of the block size.
        payloads: those blocks, in order.
    """

    generating = False

    def __init__(
        self,
        engine: Engine,
        tokens: Sequence[int],
        *,
        hit: int,
        payloads: Sequence[bytes | memoryview],
    ) -> None:
        if len(tokens) % BLOCK_TOKENS or hit % BLOCK_TOKENS or not 0 <= hit <= len(tokens):
            raise InvalidRequest(f"prefill of [{hit}, {len(tokens)}) is not whole blocks")
        check_tokens(tokens, engine)
        self._engine = engine
        self._tokens = tokens
        self._payloads = payloads
        self._next_block = hit // BLOCK_TOKENS
        self._plan = SessionPlan(
            first_pos=max(0, hit - engine.info.window),
            global_start=hit,
            decoder_start=None,
            max_tokens=len(tokens),
        )
        self._session: Session | None = None

    @property
    def num_pending(self) -> int:
        """Rows left to run."""
        position = self._session.num_tokens if self._session else self._plan.first_pos
        return len(self._tokens) - position

    def open(self) -> None:
        """Takes pages and a slot, and imports the stored blocks.

        Raises:
            NoFreeBlocks: try again when something has closed.
        """
        self._session = open_session(self._engine, self._plan, self._tokens, self._payloads)
        self._payloads = ()

    def rows(self, budget: int) -> RowRun:
        """Returns the next rows, at most `budget`."""
        assert self._session is not None
        begin = self._session.num_tokens
        return RowRun(session=self._session, tokens=self._tokens[begin : begin + budget])

    def commit(self, result: RunResult) -> Progress:
        """Takes the blocks that the step finished."""
        blocks = list(finished_blocks(self._session, self._next_block))
        self._next_block += len(blocks)
        return Progress(blocks=blocks, done=self.num_pending == 0)

    def close(self) -> None:
        """Gives everything back."""
        if self._session is not None:
            self._session.close()


class DecodeSequence:
    """Replay of a prompt's suffix, then one token a step.

    Args:
        engine: where it runs.
        prompt: ids of the prompt.
        forced: tokens already emitted elsewhere; they run as rows and count towards the limits.
        params: how to draw and when to stop.
        plan: the replay rule's numbers for the prompt.
        payloads: blocks of [0, plan.start), in order; none where `plan.num_stored_blocks` is 0.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        params: SamplingParams,
        plan: ReplayPlan,
        *,
        forced: Sequence[int] = (),
        payloads: Sequence[bytes | memoryview] = (),
    ) -> None:
        if len(forced) >= params.max_tokens:
            raise InvalidRequest(f"{len(forced)} forced tokens leave none of {params.max_tokens}")
        check_tokens(prompt, engine)
        check_tokens(forced, engine)
        limit = engine.info.max_context_tokens
        if len(prompt) + params.max_tokens > limit:
            raise PromptTooLong(
                f"prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} exceed the "
                f"context of {limit}"
            )
        self._engine = engine
        self._tokens = [*prompt, *forced]
        self._num_prompt = len(prompt)
        self._params = params
        self._stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            self._stops.add(engine.info.eos_token_id)
        self._payloads = payloads
        self._plan = SessionPlan(
            first_pos=plan.replay_start,
            global_start=plan.global_start,
            decoder_start=plan.start,
            # The last token is emitted, not run, so it needs no row.
            max_tokens=len(prompt) + params.max_tokens - 1,
        )
        self._next_block = plan.global_start // BLOCK_TOKENS
        self._session: Session | None = None

    @property
    def num_pending(self) -> int:
        """Rows that can run now."""
        position = self._session.num_tokens if self._session else self._plan.first_pos
        return len(self._tokens) - position

    @property
    def generating(self) -> bool:
        """Past the prompt: one row a step."""
        return self.num_pending == 1 and len(self._tokens) > self._num_prompt

    def open(self) -> None:
        """Takes pages and a slot, and imports the stored blocks.

        Raises:
            NoFreeBlocks: try again when something has closed.
        """
        self._session = open_session(self._engine, self._plan, self._tokens, self._payloads)
        self._payloads = ()

    def rows(self, budget: int) -> RowRun:
        """Returns the next rows, at most `budget`; the last one of the known tokens draws the next token."""
        assert self._session is not None
        begin = self._session.num_tokens
        tokens = self._tokens[begin : begin + budget]
        complete = begin + len(tokens) == len(self._tokens)
        return RowRun(
            session=self._session,
            tokens=tokens,
            num_logits=int(complete),
            sampling=self._params if complete else None,
        )

    def commit(self, result: RunResult) -> Progress:
        """Takes the drawn token, if there was one, and the blocks that the step finished."""
        progress = Progress(blocks=list(finished_blocks(self._session, self._next_block)))
        self._next_block += len(progress.blocks)
        for token, logprob in zip(result.tokens, result.logprobs, strict=True):
            if token in self._stops:
                progress.finish_reason = FinishReason.STOP
                break
            self._tokens.append(token)
            progress.tokens.append(token)
            progress.logprobs.append(logprob)
            if len(self._tokens) - self._num_prompt == self._params.max_tokens:
                progress.finish_reason = FinishReason.LENGTH
                break
        progress.done = progress.finish_reason is not None
        return progress

    def close(self) -> None:
        """Gives everything back."""
        if self._session is not None:
            self._session.close()


def check_tokens(tokens: Sequence[int], engine: Engine) -> None:
    """Refuses ids that the model does not have.

    Raises:
        InvalidRequest: names the first bad id.
    """
    vocab = engine.info.vocab_size
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
        place = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab)
        raise InvalidRequest(f"token id {tokens[place]} at position {place} is not in [0, {vocab})")


def open_session(
    engine: Engine, plan: SessionPlan, tokens: Sequence[int], payloads: Sequence[bytes | memoryview]
) -> Session:
    """Opens a session and imports its stored blocks; nothing stays open on failure."""
    session = engine.open(plan, tokens[: plan.first_pos])
    try:
        for index, payload in enumerate(payloads):
            session.import_block(index, payload)
    except BaseException:
        session.close()
        raise
    return session


def finished_blocks(session: Session | None, first: int) -> Iterator[tuple[int, bytes]]:
    """Yields the blocks from `first` on whose rows have all run."""
    assert session is not None
    for index in range(first, session.num_tokens // BLOCK_TOKENS):
        yield index, session.export_block(index)
