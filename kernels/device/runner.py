"""Sequences on a device: prefill in chunks, decode steps as recorded graphs.

A decode step's rows are filled up to a recorded size, and its page table to a recorded length, with rows that belong to
nobody. On a device without graphs the same step runs directly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from flashmesh.errors import InvalidRequest
from flashmesh.kernels.device.inputs import DeviceRows, RingWindow, SpanWindow
from flashmesh.kernels.engram import BLOCKED, LOOK_BACK, grams_of
from flashmesh.kernels.pages import MAX_ROLLBACK, FreeList
from flashmesh.types import BLOCK_TOKENS, pages_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flashmesh.kernels.device.draft import DeviceDrafter
    from flashmesh.kernels.device.model import DeviceModel, HalfPass

REPLAY_ROWS = 140
"""Last rows of a prompt that run the decoder half: the window, and room to take back 12."""

CHUNK_ROWS = 16384
MIN_TOKENS = 4096
"""Shortest context that decode steps are recorded for; longer ones double."""


@dataclass(slots=True)
class DeviceSequence:
    """One sequence: where its rows lie, and the tokens that have been run.

    Attributes:
        page_table: int32 `[pages]`, on the host.
        low: first position whose window rows of the decoder half exist.
    """

    slot: int
    page_table: Tensor
    tokens: list[int] = field(default_factory=list)
    low: int = 0
    _num_fresh: int = field(default=0, init=False)

    def advance(self, tokens: Sequence[int]) -> None:
        """Counts tokens that were run."""
        self.tokens += tokens
        self._num_fresh = min(MAX_ROLLBACK, self._num_fresh + len(tokens))

    def rollback(self, count: int) -> None:
        """Takes the last tokens back, such as drafts that were wrong; rows that follow overwrite theirs.

        Raises:
            InvalidRequest: more than the rings have room for, with those taken back before, or than there are.
        """
        if not 0 <= count <= self._num_fresh:
            raise InvalidRequest(f"{count} of {len(self.tokens)} tokens cannot be taken back")
        if count:
            del self.tokens[-count:]
            self._num_fresh -= count


@dataclass(slots=True)
class _Recorded:
    """A decode step of fixed sizes: buffers that it reads, and the logits it leaves."""

    rows: DeviceRows
    logits: Tensor
    graph: torch.cuda.CUDAGraph


class DeviceRunner:
    """Steps sequences through a device model.

    Args:
        model: with its caches.
        max_tokens: of a sequence.
        drafter: gets the context rows of every token that runs the decoder half.
        use_graphs: record decode steps; needs a CUDA device.
    """

    def __init__(
        self,
        model: DeviceModel,
        max_tokens: int,
        drafter: DeviceDrafter | None = None,
        *,
        use_graphs: bool,
    ) -> None:
        self.model = model
        self.drafter = drafter
        self._max_tokens = max_tokens
        self._use_graphs = use_graphs
        caches = model.caches
        self._slots = FreeList(caches.num_slots, "slots")
        self._pages = FreeList(caches.num_pages, "pages")
        self._device = caches.device
        self._recorded: dict[tuple[int, int, int], _Recorded] = {}

    def open(self, num_tokens: int) -> DeviceSequence:
        """Starts a sequence of at most `num_tokens` tokens.

        Raises:
            InvalidRequest: more tokens than this runner takes.
            NoFreeBlocks: no slot, or too few pages, are free.
        """
        if num_tokens > self._max_tokens:
            raise InvalidRequest(f"{num_tokens} tokens, a sequence has {self._max_tokens} at most")
        (slot,) = self._slots.take(1)
        try:
            pages = self._pages.take(pages_for(num_tokens))
        except BaseException:
            self._slots.give([slot])
            raise
        return DeviceSequence(slot, torch.tensor(pages, dtype=torch.int32))

    def close(self, sequence: DeviceSequence) -> None:
        """Gives a sequence's slot and pages back."""
        self._slots.give([sequence.slot])
        self._pages.give(sequence.page_table.tolist())

    @torch.inference_mode()
    def prefill(
        self,
        sequence: DeviceSequence,
        tokens: Sequence[int],
        *,
        decoder_rows: int = REPLAY_ROWS,
        chunk_rows: int = CHUNK_ROWS,
    ) -> Tensor:
        """Runs a prompt: the encoder half over all of it, the decoder half over its last rows.

        Args:
            sequence: without tokens so far.
            tokens: at least one.
            decoder_rows: how many rows run the decoder half.
            chunk_rows: most rows of a pass.

        Returns:
            Logits fp32 `[V]` of the last row.

        Raises:
            InvalidRequest: too few decoder rows for a full window, and room to take rows back.
        """
        if decoder_rows < self.model.config.sliding_window + MAX_ROLLBACK:
            raise InvalidRequest(
                f"{decoder_rows} rows of the decoder half do not fill a window that may be rolled back"
            )
        sequence.low = max(0, len(tokens) - decoder_rows)
        logits: Tensor | None = None
        for begin in range(0, len(tokens), chunk_rows):
            part = list(tokens[begin : begin + chunk_rows])
            logits = self._prefill_pass(sequence, part)
            sequence.advance(part)
        assert logits is not None
        return logits[0]

    def _prefill_pass(self, sequence: DeviceSequence, tokens: list[int]) -> Tensor | None:
        first, count = len(sequence.tokens), len(tokens)
        model, slot, window = self.model, sequence.slot, self.model.config.sliding_window
        rows = self._rows([(sequence, tokens)], count, _num_tokens(first + count), 1)
        rows = rows.to(self._device)
        plan = SpanWindow(rows, model.caches, window, pos=first, slot=slot)
        encoder = model.begin(rows, plan)
        kept = max(0, sequence.low - first)
        if kept >= count:
            model.forward(encoder, None, None)
            return None
        keep = torch.arange(kept, count, device=self._device)
        low = torch.full_like(rows.low[kept:], sequence.low)
        half = rows.select(keep, keep == kept, low)
        plan = SpanWindow(half, model.caches, window, pos=first + kept, slot=slot)
        decoder = model.begin(half, plan)
        logits = model.forward(encoder, decoder, keep, keep[-1:] - kept)
        self._remember(decoder)
        return logits

    @torch.inference_mode()
    def decode(self, batch: Sequence[tuple[DeviceSequence, Sequence[int]]]) -> list[Tensor]:
        """Runs one step.

        Args:
            batch: sequences, each with the tokens to run: one, or one and the drafts to verify.

        Returns:
            For each, logits fp32 `[tokens, V]`; they are overwritten by the next step.

        Raises:
            InvalidRequest: a sequence brings no token, too many, or more than it has pages for.
        """
        for sequence, tokens in batch:
            end = len(sequence.tokens) + len(tokens)
            if not 0 < len(tokens) <= MAX_ROLLBACK or end > len(sequence.page_table) * BLOCK_TOKENS:
                raise InvalidRequest(f"{len(tokens)} tokens up to {end} in a decode step")
        total = sum(len(tokens) for _, tokens in batch)
        longest = max(len(sequence.tokens) + len(tokens) for sequence, tokens in batch)
        sizes = _bucket(total), _num_tokens(longest), _bucket(len(batch))
        logits = self._run(sizes, self._rows(batch, *sizes))
        for sequence, tokens in batch:
            sequence.advance(tokens)
        return list(logits[:total].split([len(tokens) for _, tokens in batch]))

    def _run(self, sizes: tuple[int, int, int], rows: DeviceRows) -> Tensor:
        """Runs a step: the recorded one of its sizes, where the device has graphs."""
        if not self._use_graphs:
            return self._step(rows.to(self._device))
        step = self._recorded.get(sizes)
        if step is None:
            step = self._recorded[sizes] = self._record(rows.to(self._device))
        else:
            step.rows.copy_(rows)
        step.graph.replay()
        return step.logits

    def _record(self, rows: DeviceRows) -> _Recorded:
        # Kernels are built and libraries set up outside the recording.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(rows)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._step(rows)
        return _Recorded(rows, logits, graph)

    def _step(self, rows: DeviceRows) -> Tensor:
        model = self.model
        state = model.begin(rows, RingWindow(rows, model.caches, model.config.sliding_window))
        logits = model.forward(state, state, None)
        assert logits is not None
        self._remember(state)
        return logits

    def _remember(self, half: HalfPass) -> None:
        if self.drafter is not None:
            features = torch.cat(half.features, 1)
            self.drafter.remember(half.rows, features, half.angles[False])

    def _rows(
        self,
        batch: Sequence[tuple[DeviceSequence, Sequence[int]]],
        num_rows: int,
        num_tokens: int,
        num_sequences: int,
    ) -> DeviceRows:
        """Lays rows out one after the other, filled up with rows that belong to nobody; on the host."""
        caches = self.model.caches
        ids = torch.zeros(num_rows, dtype=torch.int64)
        grams = torch.full((num_rows, LOOK_BACK + 1), BLOCKED)
        pos = torch.zeros(num_rows, dtype=torch.int32)
        owner = torch.full_like(pos, num_sequences - 1)
        slots = torch.full_like(pos, caches.num_slots)
        begin = torch.ones(num_rows, dtype=torch.bool)
        shape = (num_sequences, num_tokens // BLOCK_TOKENS)
        table = torch.full(shape, caches.num_pages, dtype=torch.int32)
        end = 0
        for place, (sequence, tokens) in enumerate(batch):
            part = slice(end, end + len(tokens))
            end += len(tokens)
            ids[part] = torch.tensor(tokens)
            grams[part] = grams_of(sequence.tokens, tokens)
            first = len(sequence.tokens)
            pos[part] = torch.arange(first, first + len(tokens))
            owner[part] = place
            slots[part] = sequence.slot
            begin[part.start + 1 : part.stop] = False
            pages = sequence.page_table[: table.shape[1]]
            table[place, : len(pages)] = pages
        return DeviceRows(
            ids=ids,
            grams=grams,
            pos=pos,
            sequence=owner,
            slot=slots,
            begin=begin,
            low=torch.zeros(num_rows, dtype=torch.int32),
            text=torch.ones(num_rows, dtype=torch.bool),
            alive=torch.arange(num_rows) < end,
            page_table=table,
            num_tokens=num_tokens,
        )


def _num_tokens(count: int) -> int:
    """The recorded context length that holds `count` tokens."""
    return max(MIN_TOKENS, 1 << (count - 1).bit_length())


def _bucket(count: int) -> int:
    """Rows of the recorded step that holds `count`: powers of two, then multiples of 8."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
