"""A request inside a worker: which rows it runs next, and what a finished step gave it.

Prefill, decode and offline generation all advance these two classes, so the same prompt runs the same rows wherever
it runs. Everything here is synchronous and belongs to the device thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flashmesh.errors import InvalidRequest, PromptTooLong
from flashmesh.kernels.door import Engine, RowRun, RunResult, Session, SessionPlan
from flashmesh.kernels.sampler import SequenceSampler
from flashmesh.scheduling import Demand
from flashmesh.types import BLOCK_TOKENS, FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashmesh.kernels.sampler import GrammarState
    from flashmesh.kernels.sampling import Drawn
    from flashmesh.replay import ReplayPlan
    from flashmesh.types import SamplingParams


@dataclass(slots=True)
class Progress:
    """What a step gave one sequence.

    Attributes:
        blocks: (index, payload) of blocks that became final.
        drawn: tokens to emit.
        finish_reason: set when the sequence has emitted its last token.
        done: no rows are left to run.
        num_verified, num_accepted: drafts that were run as rows, and those of them that were right.
        num_drafted: drafts proposed for the next step.
    """

    blocks: list[tuple[int, bytes]] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    done: bool = False
    num_verified: int = 0
    num_accepted: int = 0
    num_drafted: int = 0

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens to emit."""
        return [drawn.token for drawn in self.drawn]


class PrefillSequence:
    """The encoder half over [hit, stop) of a prompt, after a replay of one window before the hit.

    Args:
        engine: where it runs.
        tokens: ids of [0, stop); `stop` is a multiple of the block size.
        hit: blocks of [0, hit) come from the store; a multiple of the block size.
        payloads: those blocks, in order.
        priority: lower goes first.
    """

    confidences: tuple[float, ...] = ()

    def __init__(
        self,
        engine: Engine,
        tokens: Sequence[int],
        *,
        hit: int,
        payloads: Sequence[bytes | memoryview],
        priority: int = 0,
    ) -> None:
        if len(tokens) % BLOCK_TOKENS or hit % BLOCK_TOKENS or not 0 <= hit <= len(tokens):
            raise InvalidRequest(f"prefill of [{hit}, {len(tokens)}) is not whole blocks")
        check_tokens(tokens, engine)
        self._engine = engine
        self._tokens = tokens
        self._payloads = payloads
        self._next_block = hit // BLOCK_TOKENS
        self._priority = priority
        self._plan = SessionPlan(
            first_pos=max(0, hit - engine.info.window),
            global_start=hit,
            decoder_start=None,
            max_tokens=len(tokens),
        )
        self._session: Session | None = None

    @property
    def demand(self) -> Demand:
        """What it is going to run."""
        return Demand(
            first_row=self._plan.first_pos,
            num_known=self.num_known,
            max_tokens=self.num_known,
            num_stored=self._plan.global_start,
            priority=self._priority,
        )

    @property
    def position(self) -> int:
        """Of the next row."""
        return self._session.num_tokens if self._session else self._plan.first_pos

    @property
    def num_known(self) -> int:
        """Tokens, each of which runs as a row."""
        return len(self._tokens)

    def open(self, leader: None = None) -> None:
        """Takes pages and a slot, and imports the stored blocks.

        Raises:
            NoFreeBlocks: there are not enough.
        """
        self._session = open_session(self._engine, self._plan, self._tokens, self._payloads)
        self._payloads = ()

    def rows(self, count: int, num_drafts: int = 0, *, propose: bool = False) -> RowRun:
        """Returns the next rows."""
        assert self._session is not None
        begin = self._session.num_tokens
        return RowRun(session=self._session, tokens=self._tokens[begin : begin + count])

    def commit(self, result: RunResult) -> Progress:
        """Takes the blocks that the step finished."""
        blocks = list(finished_blocks(self._session, self._next_block, self.num_known))
        self._next_block += len(blocks)
        return Progress(blocks=blocks, done=self.position == self.num_known)

    def suspend(self) -> None:
        """Gives slot and pages back, to be opened again and run every row again."""
        self._payloads = stored_payloads(self._session, self._plan)
        self.close()
        self._session = None

    def close(self) -> None:
        """Gives everything back."""
        if self._session is not None:
            self._session.close()


class DecodeSequence:
    """Replay of a prompt's suffix, then a token a step, and more where drafts turn out right.

    Args:
        engine: where it runs.
        prompt: ids of the prompt.
        forced: tokens already emitted elsewhere; they run as rows and count towards the limits.
        params: how to draw and when to stop.
        plan: the replay rule's numbers for the prompt.
        payloads: blocks of [0, plan.start), in order; none where `plan.num_stored_blocks` is 0.
        grammar: fresh state of the grammar that the output must obey.
        num_drafts: tokens proposed in each step, to be verified in the next; at most `Engine.max_drafts`.
        priority: lower goes first.
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
        grammar: GrammarState | None = None,
        num_drafts: int = 0,
        priority: int = 0,
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
        self._sampler = SequenceSampler(params, prompt, engine.info, grammar=grammar)
        self._sampler.accept(forced)
        self._payloads = payloads
        self._num_drafts = min(num_drafts, engine.max_drafts)
        self._drafts: list[int] = []
        self._confidences: list[float] = []
        self._num_verified = 0
        self._priority = priority
        self._plan = SessionPlan(
            first_pos=plan.replay_start,
            global_start=plan.global_start,
            decoder_start=plan.start,
            max_tokens=plan.global_start,
        )
        # The last token is emitted, not run, so it needs no row.
        self._max_rows = len(prompt) + params.max_tokens - 1
        self._next_block = plan.global_start // BLOCK_TOKENS
        self._session: Session | None = None

    @property
    def demand(self) -> Demand:
        """What it is going to run."""
        return Demand(
            first_row=self._plan.first_pos,
            num_known=self.num_known,
            max_tokens=self._max_rows,
            num_stored=self._plan.global_start,
            generates=True,
            max_drafts=self._num_drafts,
            priority=self._priority,
        )

    @property
    def position(self) -> int:
        """Of the next row."""
        return self._session.num_tokens if self._session else self._plan.first_pos

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output so far; the last one draws the next."""
        return len(self._tokens)

    @property
    def confidences(self) -> list[float]:
        """Of the drafts that still fit the limits."""
        return self._confidences[: self._max_rows - self.num_known]

    def open(self, leader: DecodeSequence | None = None) -> None:
        """Takes pages and a slot; imports the stored blocks, or copies a session over the same prompt.

        Args:
            leader: all rows of the prompt but the last have run in its session, and no others.

        Raises:
            NoFreeBlocks: there are not enough.
        """
        if leader is None:
            self._session = open_session(self._engine, self._plan, self._tokens, self._payloads)
        else:
            assert leader._session is not None
            self._session = leader._session.fork()
        self._payloads = ()

    def rows(self, count: int, num_drafts: int = 0, *, propose: bool = True) -> RowRun:
        """Returns the next known rows; the last known token's row draws the next, and drafts follow it."""
        assert self._session is not None
        begin = self._session.num_tokens
        tokens = [*self._tokens[begin : begin + count]]
        complete = begin + len(tokens) == len(self._tokens)
        self._num_verified = num_drafts
        tokens += self._drafts[:num_drafts]
        self._session.grow(begin + len(tokens))
        return RowRun(
            session=self._session,
            tokens=tokens,
            num_logits=1 + num_drafts if complete else 0,
            sampler=self._sampler if complete else None,
            num_drafts=self._num_drafts if complete and propose else 0,
        )

    def commit(self, result: RunResult) -> Progress:
        """Takes the drawn tokens and the blocks that the step finished."""
        if result.error is not None:
            raise result.error
        progress = Progress(
            num_verified=self._num_verified,
            num_accepted=max(0, len(result.drawn) - 1),
            num_drafted=len(result.drafts),
        )
        self._drafts, self._confidences = result.drafts, result.confidences
        for drawn in result.drawn:
            if drawn.token in self._sampler.ends:
                progress.finish_reason = FinishReason.STOP
                break
            self._sampler.accept([drawn.token])
            self._tokens.append(drawn.token)
            progress.drawn.append(drawn)
            if len(self._tokens) - self._num_prompt == self._params.max_tokens:
                progress.finish_reason = FinishReason.LENGTH
                break
        progress.blocks += finished_blocks(self._session, self._next_block, len(self._tokens))
        self._next_block += len(progress.blocks)
        progress.done = progress.finish_reason is not None
        return progress

    def suspend(self) -> None:
        """Gives slot and pages back, to be opened again and run every row again."""
        self._payloads = stored_payloads(self._session, self._plan)
        self.close()
        self._session = None
        self._drafts, self._confidences = [], []

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
    session = engine.open(replace(plan, max_tokens=len(tokens)), tokens[: plan.first_pos])
    try:
        for index, payload in enumerate(payloads):
            session.import_block(index, payload)
    except BaseException:
        session.close()
        raise
    return session


def stored_payloads(session: Session | None, plan: SessionPlan) -> list[bytes]:
    """Copies the blocks that a session imported; to fetch them again could give others."""
    assert session is not None
    return [session.export_block(index) for index in range(plan.global_start // BLOCK_TOKENS)]


def finished_blocks(
    session: Session | None, first: int, num_tokens: int
) -> Iterator[tuple[int, bytes]]:
    """Yields the blocks from `first` on whose rows have all run, and hold the first `num_tokens` tokens only."""
    assert session is not None
    for index in range(first, min(session.num_tokens, num_tokens) // BLOCK_TOKENS):
        yield index, session.export_block(index)
