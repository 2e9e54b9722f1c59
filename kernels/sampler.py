"""What one decode sequence knows for drawing: how often each token came, where its grammar stands, what is left.

A `SequenceSampler` belongs to one sequence and moves on only by `accept`, with tokens that were emitted. For a step
that verifies drafts it makes one `RowContext` a row, as if the drafts before that row had been accepted, and leaves
itself unchanged. Rebuilding one from prompt and forced tokens gives the same state, which is what failover needs.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Protocol

import numpy as np

from flashmesh.errors import FlashmeshError, InvalidRequest
from flashmesh.kernels.sampling import RowContext, TokenCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from flashmesh.kernels.sampling import Ids
    from flashmesh.types import ModelInfo, SamplingParams


class GrammarState(Protocol):
    """Where an output stands in its grammar (`flashmesh.kernels.grammar`)."""

    @property
    def may_end(self) -> bool:
        """The end token is not excluded here: the part that the grammar governs has begun."""

    def accept(self, token: int) -> bool:
        """Moves on by a token; False, and no change, where the grammar does not admit it.

        Raises:
            InvalidRequest: the grammar cannot go on; nothing has changed. `mask` may raise it too.
        """

    def rollback(self, count: int) -> None:
        """Takes back the last `count` accepted tokens."""

    def mask(self) -> NDArray[np.bool_] | None:
        """Returns `[vocab]` which tokens may come next, None for all."""

    def fork(self) -> GrammarState:
        """Returns an independent copy."""


class SequenceSampler:
    """The sampling state of one sequence.

    Args:
        params: how to draw and when to stop.
        prompt: its ids.
        info: of the model.
        grammar: fresh state of the grammar that the output must obey.

    Raises:
        InvalidRequest: a stop token or a biased token is not in the vocabulary.

    Attributes:
        position: of the next token.
        num_generated: tokens of the output so far, forced ones included.
        ends: ids that end the output, and are not part of it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        info: ModelInfo,
        *,
        grammar: GrammarState | None = None,
    ) -> None:
        params.check_vocab(info.vocab_size)
        self.params = params
        self.position = len(prompt)
        self.num_generated = 0
        self.ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.ends |= {info.eos_token_id}
        self._eos = info.eos_token_id
        self._grammar = grammar
        self._history: _History | None = None
        if params.has_penalties:
            # Only repetition looks at the prompt.
            self._history = _History(prompt if params.repetition_penalty != 1 else ())

    def rows(self, first_pos: int, drafts: Sequence[int] = ()) -> list[RowContext]:
        """Makes the contexts of a step's rows; nothing is accepted.

        Args:
            first_pos: position of the first drawn token; must be `position`.
            drafts: tokens at first_pos and after it that the step runs as rows.

        Returns:
            Row i's context after drafts 0 to i-1. The list ends early, at the first draft that the grammar refuses or
            that ends the output, as no row after it can give a token of the answer; and at the first row where the
            grammar fails, whose context has the failure.
        """
        if first_pos != self.position:
            raise FlashmeshError(
                f"rows that draw from position {first_pos} meet a sampler at position {self.position}"
            )
        contexts: list[RowContext] = []
        taken = 0
        try:
            contexts.append(self._context(()))
            for count, draft in enumerate(drafts, 1):
                if draft in self.ends:
                    break
                if self._grammar is not None:
                    allowed = contexts[-1].allowed
                    if not (allowed is None or allowed[draft]) or not self._grammar.accept(draft):
                        break
                    taken = count
                contexts.append(self._context(drafts[:count]))
        except InvalidRequest as error:
            position = first_pos + len(contexts)
            contexts.append(RowContext(params=self.params, position=position, failure=error))
        finally:
            if self._grammar is not None:
                self._grammar.rollback(taken)
        return contexts

    def accept(self, tokens: Iterable[int]) -> None:
        """Moves on by emitted tokens: drawn ones, or forced ones after the prompt.

        Raises:
            InvalidRequest: the grammar does not admit one, so these tokens are not of this request.
        """
        for token in tokens:
            if self._grammar is not None and not self._grammar.accept(token):
                raise InvalidRequest(
                    f"token {token} at position {self.position} is not what the grammar admits"
                )
            if self._history is not None:
                self._history.add(token)
            self.position += 1
            self.num_generated += 1

    def fork(self, params: SamplingParams) -> SequenceSampler:
        """Copies the state for another choice of the same request."""
        twin = copy.copy(self)
        twin.params = params
        twin._grammar = self._grammar and self._grammar.fork()
        twin._history = copy.copy(self._history)
        return twin

    def _context(self, drafts: Sequence[int]) -> RowContext:
        """Makes the context after some drafts, which the grammar has accepted."""
        excluded: set[int] = set()
        if self.num_generated + len(drafts) < self.params.min_tokens:
            excluded |= self.ends
        if self._grammar is not None and not self._grammar.may_end:
            excluded.add(self._eos)
        return RowContext(
            params=self.params,
            position=self.position + len(drafts),
            counts=self._history.counts(drafts) if self._history else None,
            allowed=self._grammar.mask() if self._grammar else None,
            excluded=tuple(sorted(excluded)),
        )


class _History:
    """Distinct tokens of prompt and output, and how often the output has each. A shallow copy is independent."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._ids: Ids = np.unique(np.array(prompt, dtype=np.int64))
        self._in_output = np.zeros(len(self._ids), dtype=np.int32)

    def add(self, token: int) -> None:
        after = self.counts([token])
        self._ids, self._in_output = after.ids, after.in_output

    def counts(self, more: Sequence[int]) -> TokenCounts:
        """Counts as they are after some more tokens of output."""
        ids, in_output = self._ids, self._in_output.copy()
        for token in more:
            place = int(np.searchsorted(ids, token))
            if place == len(ids) or ids[place] != token:
                ids, in_output = np.insert(ids, place, token), np.insert(in_output, place, 0)
            in_output[place] += 1
        return TokenCounts(ids, in_output)
