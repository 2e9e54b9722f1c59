"""The door between services and a runtime: what an engine takes and what it gives back.

Two implementations stand behind it: `flashmesh.kernels.engine` (the model) and `flashmesh.kernels.simulated` (no
tensors, wrong blocks give wrong tokens). Calls block; a service makes them on one dedicated thread.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from flashmesh.errors import FlashmeshError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from flashmesh.kernels.sampler import SequenceSampler
    from flashmesh.kernels.sampling import Drawn
    from flashmesh.types import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """Which rows a session runs, and how far each half of the model sees.

    Attributes:
        first_pos: position of the first row; the windows are empty before it.
        global_start: global rows of [0, global_start) are imported as blocks and never written here; rows at or
            after it write theirs. A multiple of the block size.
        decoder_start: rows at or after it run all layers and see no decoder window row before it; None means that
            no row does (a prefill), so the session can give no logits.
        max_tokens: pages are held for positions [0, max_tokens) at first; see `Session.grow`.
    """

    first_pos: int
    global_start: int
    decoder_start: int | None
    max_tokens: int


class Session(Protocol):
    """One sequence inside an engine: its pages, its window slot, its position."""

    plan: SessionPlan

    @property
    def num_tokens(self) -> int:
        """Position of the next row (starts at `plan.first_pos`)."""

    def add_image(self, start: int, pixels: NDArray[np.uint8]) -> range:
        """Puts an image into the sequence, before any row at or after its start has run.

        Args:
            start: position of the first token of its span; may lie before `plan.first_pos`.
            pixels: uint8 `[height, width, 3]`, RGB.

        Returns:
            The positions of its span, at all of which the sequence must hold the image token.

        Raises:
            InvalidRequest: the engine takes no images, or this one does not fit the sequence.
        """

    def import_block(self, index: int, payload: bytes | memoryview) -> None:
        """Copies a stored block's global rows into this session's pages.

        Raises:
            CorruptBlock: the payload has the wrong size.
        """

    def export_block(self, index: int) -> bytes:
        """Returns a copy of a block's payload; all its rows must have been run or imported."""

    def grow(self, max_tokens: int) -> None:
        """Holds pages for positions [0, max_tokens) from now on; fewer than are held changes nothing.

        Raises:
            NoFreeBlocks: they are used up; nothing has changed.
            InvalidRequest: more than the model's context.
        """

    def fork(self) -> Self:
        """Opens an independent copy, with pages and a slot of its own.

        Raises:
            NoFreeBlocks: pages or slots are used up.
        """

    def rollback(self, count: int) -> None:
        """Takes back the last `count` rows, at most a round's drafts: what they wrote is never read again.

        Raises:
            InvalidRequest: more rows than were run here, or than the rings have room for.
        """

    def close(self) -> None:
        """Gives pages and slot back; a second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@dataclass(slots=True, kw_only=True)
class RowRun:
    """Consecutive rows of one session in a step.

    Attributes:
        session: whose rows.
        tokens: ids at positions [session.num_tokens, session.num_tokens + len(tokens)).
        num_logits: the last so many rows give logits. With `sampler`, the first of them draws a token and those
            after it run drafts: as long as the draft is the token drawn before it, its row stays and draws the next;
            the other rows are taken back.
        sampler: of the sequence, where it stood before the first drawn token; None draws nothing.
        num_drafts: propose so many tokens after the last drawn one, at most `Engine.max_drafts`.
        keep_logits: return the logits too (tests and tools; services never ask).
    """

    session: Session
    tokens: Sequence[int]
    num_logits: int = 0
    sampler: SequenceSampler | None = None
    num_drafts: int = 0
    keep_logits: bool = False


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What a row run gave.

    Attributes:
        drawn: the tokens that follow: the accepted drafts and one more.
        error: why the row after those in `drawn` gave no token; the sequence cannot go on.
        drafts: proposed tokens after the last drawn one.
        confidences: estimated probability that each draft is accepted if those before it are.
        logits: fp32 tensor `[num_logits, vocab]` when asked for, else None.
    """

    drawn: list[Drawn] = field(default_factory=list)
    error: FlashmeshError | None = None
    drafts: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    logits: Any = None

    @property
    def tokens(self) -> list[int]:
        """Ids of what was drawn."""
        return [drawn.token for drawn in self.drawn]

    def take(self, items: Iterable[Drawn | FlashmeshError], drafts: Sequence[int]) -> int:
        """Takes drawn tokens up to the first that differs from the draft in its place, or failed.

        Returns:
            How many drafts are wrong, or come after a wrong one.
        """
        for item, draft in itertools.zip_longest(items, drafts):
            if isinstance(item, FlashmeshError):
                self.error = item
                break
            if (
                item is None
            ):  # a draft that can be no part of the answer: nothing was drawn after it
                break
            self.drawn.append(item)
            if item.token != draft:
                break
        return len(drafts) - max(0, len(self.drawn) - 1)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Pages (one holds the global rows of a block) and slots (one holds a session's windows)."""

    num_pages: int
    num_free_pages: int
    num_slots: int
    num_free_slots: int

    @property
    def idle(self) -> bool:
        """Nothing is held by any session."""
        return self.num_free_pages == self.num_pages and self.num_free_slots == self.num_slots


class Engine(Protocol):
    """A loaded model."""

    info: ModelInfo

    @property
    def max_drafts(self) -> int:
        """Most tokens that a run may ask to have proposed; 0 without a draft module."""

    def open(self, plan: SessionPlan, prefix_tokens: Sequence[int]) -> Session:
        """Opens a session.

        Args:
            plan: which rows it will run.
            prefix_tokens: ids of [0, plan.first_pos); n-gram look-back reads the last of them.

        Raises:
            NoFreeBlocks: pages or slots are used up.
            Incompatible: this engine was loaded without the half of the model that the plan needs.
        """

    def step(self, batch: Sequence[RowRun]) -> list[RunResult]:
        """Runs rows of any sessions together; results do not depend on which rows share the step."""

    def stats(self) -> EngineStats:
        """Counts pages and slots."""
