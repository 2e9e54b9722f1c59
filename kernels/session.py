"""A session of the reference engine: what one sequence holds, and what its next rows need to know of the last ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

import torch

from flashmesh.errors import CorruptBlock, InvalidRequest
from flashmesh.kernels.engram import BLOCKED, LOOK_BACK
from flashmesh.kernels.pages import MAX_ROLLBACK
from flashmesh.types import BLOCK_TOKENS, pages_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from flashmesh.kernels.door import SessionPlan
    from flashmesh.kernels.engine import ReferenceEngine


class ReferenceSession:
    """One sequence: its pages, its slot, its position; see `door.Session`."""

    def __init__(
        self, engine: ReferenceEngine, plan: SessionPlan, prefix_tokens: Sequence[int]
    ) -> None:
        self.plan = plan
        self.images: Mapping[int, Tensor] = {}
        """Embedding rows of image positions, whole spans; `add_image` fills it."""
        self._engine = engine
        self._prefix = prefix_tokens
        self._pages = engine.pages.free.take(pages_for(plan.max_tokens))
        try:
            (self.slot,) = engine.slots.free.take(1)
        except BaseException:
            engine.pages.free.give(self._pages)
            raise
        self.page_table = torch.tensor(self._pages)
        self.tail = [*[BLOCKED] * LOOK_BACK, *prefix_tokens[-LOOK_BACK:]]
        """Look-back tokens, and the last ones that may be taken back."""
        self._num_fresh = 0
        self.num_tokens = plan.first_pos
        self.closed = False
        self._imported: set[int] = set()

    def add_image(self, start: int, pixels: NDArray[np.uint8]) -> range:
        """Puts an image into the sequence, whose rows are computed here, alone; see `door.Session`.

        It may lie before `plan.first_pos`, as long as no row has run: a replay may begin inside an image, and
        look-back must know of one just before it.
        """
        tower = self._engine.vision
        if tower is None:
            raise InvalidRequest("this engine was loaded without a vision tower")
        span = range(start, start + tower.num_tokens(pixels))
        self._check_span(span)
        self.images = {**self.images, **dict(zip(span, tower.embed(pixels), strict=True))}
        first = self.plan.first_pos
        for back in range(1, min(LOOK_BACK, first) + 1):
            if first - back in span:
                self.tail[-back] = BLOCKED
        return span

    def _check_span(self, span: range) -> None:
        first, text = self.plan.first_pos, f"image of [{span.start}, {span.stop})"
        if self.closed:
            raise InvalidRequest("the session is closed")
        if span.start < 0 or span.stop > self.plan.max_tokens:
            raise InvalidRequest(f"{text} is not within [0, {self.plan.max_tokens})")
        if span.start < self.num_tokens != first:
            raise InvalidRequest(f"{text} comes too late, rows up to {self.num_tokens} have run")
        if any(position in self.images for position in span):
            raise InvalidRequest(f"{text} overlaps another")
        for position in range(span.start, min(span.stop, first)):
            self._engine.check_image_token(position, self._prefix[position])

    def import_block(self, index: int, payload: bytes | memoryview) -> None:
        """Copies a stored block into this session's pages; see `door.Session`."""
        if index * BLOCK_TOKENS >= self.plan.global_start:
            raise InvalidRequest(f"block {index} is this session's own to write")
        self._engine.pages.load(self._page(index), payload)
        self._imported.add(index)

    def export_block(self, index: int) -> bytes:
        """Returns a copy of a block's payload; see `door.Session`."""
        begin, end = index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS
        written = begin >= self.plan.global_start and end <= self.num_tokens
        if not written and index not in self._imported:
            raise InvalidRequest(f"block {index} has rows that were neither run nor imported")
        return self._engine.pages.payload(self._page(index))

    def check_imports(self) -> None:
        """Refuses to run over global rows that nobody supplied.

        Raises:
            CorruptBlock: names the first block that is missing.
        """
        needed = pages_for(self.plan.global_start)
        if len(self._imported) < needed:
            missing = next(index for index in range(needed) if index not in self._imported)
            raise CorruptBlock(f"block {missing} was never imported")

    def _page(self, index: int) -> int:
        # After close the page may already be another session's.
        if self.closed or not 0 <= index < len(self._pages):
            raise InvalidRequest(f"this session holds no page for block {index}")
        return self._pages[index]

    def advance(self, tokens: Sequence[int]) -> None:
        """Counts rows that were run."""
        self.tail = [*self.tail, *self.seen(tokens)][-LOOK_BACK - MAX_ROLLBACK :]
        self.num_tokens += len(tokens)
        self._num_fresh = min(MAX_ROLLBACK, self._num_fresh + len(tokens))

    def seen(self, tokens: Sequence[int]) -> list[int]:
        """Returns the next tokens as look-back sees them: an image is not there."""
        if not self.images:
            return list(tokens)
        first = self.num_tokens
        return [BLOCKED if first + i in self.images else token for i, token in enumerate(tokens)]

    def grow(self, max_tokens: int) -> None:
        """Holds more pages; see `door.Session`."""
        limit = self._engine.info.max_context_tokens
        if max_tokens > limit:
            raise InvalidRequest(f"{max_tokens} tokens exceed the context of {limit}")
        if max_tokens <= self.plan.max_tokens:
            return
        self._pages += self._engine.pages.free.take(pages_for(max_tokens) - len(self._pages))
        self.page_table = torch.tensor(self._pages)
        self.plan = replace(self.plan, max_tokens=max_tokens)

    def fork(self) -> ReferenceSession:
        """Opens a copy; see `door.Session`."""
        twin = ReferenceSession(self._engine, self.plan, self._prefix)
        self._engine.copy_rows(self, twin)
        twin.images = self.images
        twin.tail = list(self.tail)
        twin.num_tokens = self.num_tokens
        twin._num_fresh = self._num_fresh
        twin._imported = set(self._imported)
        return twin

    def rollback(self, count: int) -> None:
        """Takes back the last `count` rows; see `door.Session`."""
        if not 0 <= count <= self._num_fresh:
            raise InvalidRequest(f"{count} rows cannot be taken back, {self._num_fresh} can")
        if count:
            self.num_tokens -= count
            self._num_fresh -= count
            del self.tail[-count:]

    def close(self) -> None:
        """Gives pages and slot back."""
        if not self.closed:
            self.closed = True
            self._engine.pages.free.give(self._pages)
            self._engine.slots.free.give([self.slot])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
