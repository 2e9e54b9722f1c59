"""The simulated engine: the door of a real one without tensors, so that a wrong block is a wrong token.

A block's payload is a digest chained over its tokens. The next token is a hash of everything the session knows: the
payload digests of [0, global_start) *as read back from the imported blocks*, and the tokens it ran itself. A stale,
foreign, missing or misplaced block therefore changes every later token, and a test that compares tokens sees it. Of
the sampling parameters it obeys seed and choice (at a temperature above 0), the grammar and what ends an output. Step
times follow a small cost model. Tests of services, failures and scale run on this engine.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import numpy as np

from flashmesh.errors import (
    CorruptBlock,
    FlashmeshError,
    Incompatible,
    InvalidRequest,
    NoFreeBlocks,
)
from flashmesh.hashing import token_bytes
from flashmesh.kernels.door import EngineStats, RowRun, RunResult, SessionPlan
from flashmesh.kernels.sampling import Drawn
from flashmesh.types import BLOCK_TOKENS, ModelInfo, pages_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from flashmesh.kernels.sampling import RowContext
    from flashmesh.types import SamplingParams

DIGEST_BYTES = 32
MAX_DRAFTS = 5
MAX_ROLLBACK = 8


class SimulatedSession:
    """One simulated sequence: digests of whole blocks, and the tokens since the last of them."""

    def __init__(self, engine: SimulatedEngine, plan: SessionPlan, num_pages: int) -> None:
        self.plan = plan
        self.num_pages = num_pages
        self._engine = engine
        self._position = plan.first_pos
        self._digests: dict[int, bytes] = {}
        self._tail: list[int] = []
        self._history: hashlib._Hash | None = None
        self._undo: deque[tuple[hashlib._Hash, list[int]]] = deque(maxlen=MAX_ROLLBACK)

    @property
    def num_tokens(self) -> int:
        """Position of the next row."""
        return self._position

    def import_block(self, index: int, payload: bytes | memoryview) -> None:
        """Takes the digest of block `index` from its payload."""
        if len(payload) != self._engine.info.block_bytes:
            raise CorruptBlock(
                f"a payload has {len(payload)} bytes, the layout {self._engine.info.block_bytes}"
            )
        self._digests[index] = bytes(payload[:DIGEST_BYTES])

    def export_block(self, index: int) -> bytes:
        """Returns the payload of block `index`."""
        return self._digests[index].ljust(self._engine.info.block_bytes, b"\0")

    def add_image(self, start: int, pixels: NDArray[np.uint8]) -> range:
        """Refuses: no tensors, no images."""
        raise InvalidRequest("the simulated engine takes no images")

    def run(self, run: RowRun) -> RunResult:
        """Runs rows one by one; each logits row draws the next token from the history."""
        result = RunResult()
        first_logits = len(run.tokens) - run.num_logits
        if self._history is None:
            self._history = self._imported_history()
        contexts: list[RowContext] = []
        if run.sampler and run.num_logits:
            first_pos = self._position + first_logits + 1
            contexts = run.sampler.rows(first_pos, run.tokens[first_logits + 1 :])
        drawn: list[Drawn | FlashmeshError] = []
        for row, token in enumerate(run.tokens):
            self._append(token)
            if first_logits <= row < first_logits + len(contexts):
                drawn.append(self._draw(contexts[row - first_logits]))
        self.rollback(result.take(drawn, run.tokens[first_logits + 1 :]) if contexts else 0)
        if run.num_drafts and run.sampler and result.drawn:
            anchor = result.drawn[-1].token
            result.drafts = self._proposals(anchor, run.sampler.params, run.num_drafts)
            result.confidences = [0.8] * run.num_drafts
        return result

    def rollback(self, count: int) -> None:
        """Takes back the last `count` rows."""
        if not 0 <= count <= len(self._undo):
            raise InvalidRequest(f"{count} rows cannot be taken back, {len(self._undo)} can")
        for _ in range(count):
            self._history, self._tail = self._undo.pop()
            self._position -= 1

    def grow(self, max_tokens: int) -> None:
        """Holds more pages."""
        more = pages_for(max_tokens) - self.num_pages
        if more > 0:
            self._engine.check_room(more, 0)
            self.num_pages += more
        self.plan = replace(self.plan, max_tokens=max(max_tokens, self.plan.max_tokens))

    def fork(self) -> SimulatedSession:
        """Opens a copy."""
        self._engine.check_room(self.num_pages, 1)
        twin = SimulatedSession(self._engine, self.plan, self.num_pages)
        twin._position = self._position
        twin._digests = dict(self._digests)
        twin._tail = list(self._tail)
        twin._history = self._history and self._history.copy()
        twin._undo = self._undo.copy()
        self._engine.hold(twin)
        return twin

    def close(self) -> None:
        """Gives pages and slot back."""
        self._engine.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _imported_history(self) -> hashlib._Hash:
        history = hashlib.sha256()
        for index in range(self.plan.global_start // BLOCK_TOKENS):
            if index not in self._digests:
                raise CorruptBlock(f"block {index} was never imported")
            history.update(self._digests[index])
        return history

    def _append(self, token: int) -> None:
        assert self._history is not None
        self._undo.append((self._history.copy(), list(self._tail)))
        if self._position >= self.plan.global_start:
            self._tail.append(token)
            if len(self._tail) == BLOCK_TOKENS:
                index = self._position // BLOCK_TOKENS
                parent = self._digests.get(index - 1, b"")
                digest = hashlib.sha256(parent + token_bytes(self._tail)).digest()
                self._digests[index] = digest
                self._history.update(digest)
                self._tail.clear()
        self._position += 1

    def _proposals(self, anchor: int, params: SamplingParams, count: int) -> list[int]:
        """Looks ahead: proposes the true continuation, except that about one token in five is wrong."""
        assert self._history is not None
        before = self._history.copy(), list(self._tail), self._position
        undo = self._undo.copy()
        tokens, token = [], anchor
        for _ in range(count):
            self._append(token)
            token = self._next_token(params)
            tokens.append(token if token % 5 else token ^ 2)
        self._history, self._tail, self._position = before
        self._undo = undo
        return tokens

    def _draw(self, context: RowContext) -> Drawn | FlashmeshError:
        """Takes the hash's token, or the next one above it, around the end, that grammar and minimum length admit."""
        if context.failure is not None:
            return context.failure
        vocab = self._engine.info.vocab_size
        token = self._next_token(context.params)
        if context.allowed is not None or context.excluded:
            admitted = np.ones(vocab, bool) if context.allowed is None else context.allowed.copy()
            ends = admitted.copy()
            admitted[list(context.excluded)] = False
            choices = np.flatnonzero(admitted if admitted.any() else ends)
            if not len(choices):
                return FlashmeshError(f"no token is allowed at position {context.position}")
            token = int(choices[np.searchsorted(choices, token) % len(choices)])
        drawn = Drawn(token, 0.0, 0.0)
        if context.params.top_logprobs:
            drawn.top_ids, drawn.top_logprobs = [token], [0.0]
        return drawn

    def _next_token(self, params: SamplingParams) -> int:
        assert self._history is not None
        history = self._history.copy()
        history.update(token_bytes(self._tail))
        if params.temperature > 0:
            history.update(f"{params.seed}/{params.choice}".encode())
        number = int.from_bytes(history.digest()[:8], "little")
        vocab, eos = self._engine.info.vocab_size, self._engine.info.eos_token_id
        token = number % (vocab - 1)
        return token + 1 if token >= eos else token  # never the end: tests choose lengths


class SimulatedEngine:
    """An engine without weights.

    Args:
        name: the served model's name.
        num_pages, num_slots: what sessions share.
        step_s, row_s: a step takes `step_s + row_s * rows` of wall time.
        block_bytes: payload bytes of a block, at least 32.
    """

    def __init__(
        self,
        *,
        name: str = "simulated",
        num_pages: int = 1024,
        num_slots: int = 64,
        step_s: float = 0.0,
        row_s: float = 0.0,
        block_bytes: int = 1024,
        max_context_tokens: int = 1 << 20,
    ) -> None:
        self.info = ModelInfo(
            name=name,
            fingerprint=hashlib.sha256(b"simulated").digest(),
            layout_id=hashlib.sha256(f"simulated/{block_bytes}".encode()).digest()[:16],
            numerics_id="simulated",
            block_bytes=block_bytes,
            window=128,
            vocab_size=4096,
            max_context_tokens=max_context_tokens,
            eos_token_id=1,
        )
        self.num_steps = 0
        self._num_pages, self._num_slots = num_pages, num_slots
        self._step_s, self._row_s = step_s, row_s
        self._open: set[SimulatedSession] = set()

    @property
    def max_drafts(self) -> int:
        """Most tokens proposed after a drawn one."""
        return MAX_DRAFTS

    def open(self, plan: SessionPlan, prefix_tokens: Sequence[int]) -> SimulatedSession:
        """Opens a session; see `door.Engine.open`."""
        if len(prefix_tokens) != plan.first_pos:
            raise InvalidRequest(
                f"{len(prefix_tokens)} prefix tokens for first_pos {plan.first_pos}"
            )
        if plan.global_start % BLOCK_TOKENS:
            raise Incompatible(f"global_start {plan.global_start} is inside a block")
        pages = pages_for(plan.max_tokens)
        self.check_room(pages, 1)
        session = SimulatedSession(self, plan, pages)
        self.hold(session)
        return session

    def check_room(self, pages: int, slots: int) -> None:
        """Refuses what does not fit.

        Raises:
            NoFreeBlocks: says what is needed and what is free.
        """
        stats = self.stats()
        if pages > stats.num_free_pages or slots > stats.num_free_slots:
            raise NoFreeBlocks(
                f"{pages} pages and {slots} slots needed, {stats.num_free_pages} and "
                f"{stats.num_free_slots} free"
            )

    def hold(self, session: SimulatedSession) -> None:
        """Counts a session's pages and slot as taken."""
        self._open.add(session)

    def step(self, batch: Sequence[RowRun]) -> list[RunResult]:
        """Runs a batch; see `door.Engine.step`."""
        self.num_steps += 1
        rows = sum(len(run.tokens) for run in batch)
        if delay := self._step_s + self._row_s * rows:
            time.sleep(delay)
        return [self._run(run) for run in batch]

    def stats(self) -> EngineStats:
        """Counts pages and slots."""
        used = sum(session.num_pages for session in self._open)
        return EngineStats(
            self._num_pages,
            self._num_pages - used,
            self._num_slots,
            self._num_slots - len(self._open),
        )

    def _run(self, run: RowRun) -> RunResult:
        session = run.session
        assert isinstance(session, SimulatedSession)
        if session not in self._open:
            raise InvalidRequest("the session is closed")
        if session.num_tokens + len(run.tokens) > session.plan.max_tokens:
            raise InvalidRequest("the run goes past the session's pages")
        if run.num_logits and session.plan.decoder_start is None:
            raise Incompatible("a prefill session has no logits")
        if any(not 0 <= token < self.info.vocab_size for token in run.tokens):
            raise InvalidRequest("a token id is out of range")
        return session.run(run)

    def release(self, session: SimulatedSession) -> None:
        """Counts them as free; a second call does nothing."""
        self._open.discard(session)
