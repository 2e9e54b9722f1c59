"""Where a pass's rows stand: positions, caches, what each may see. All of it tensors, computed without the host.

A pass lists rows of any sequences, those of one sequence next to each other with rising positions. Its windows are
planned in one of two ways. A decode step stores its few rows into the rings and attends there. A prefill brings more
rows of one sequence than a ring holds, so it lays the rows before it and its own into a buffer and copies the last ones
back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from flashmesh.kernels.device.caches import DeviceCaches


@dataclass(slots=True)
class DeviceRows:
    """R rows of a pass over one half of the model.

    Attributes:
        ids: int64 `[R]` token ids.
        grams: int64 `[R, 4]`, see `EngramHash.rows`.
        pos: int32 `[R]` positions.
        sequence: int32 `[R]` row of `page_table`.
        slot: int32 `[R]` window slot.
        begin: bool `[R]`, the first row of its sequence in the pass.
        low: int32 `[R]`, first position whose window row may be seen.
        text: bool `[R]`, False in an image span.
        alive: bool `[R]`, False for rows that fill up a recorded step.
        page_table: int32 `[S, pages]`.
        num_tokens: no position reaches it; a multiple of 256.
    """

    ids: Tensor
    grams: Tensor
    pos: Tensor
    sequence: Tensor
    slot: Tensor
    begin: Tensor
    low: Tensor
    text: Tensor
    alive: Tensor
    page_table: Tensor
    num_tokens: int

    def select(self, keep: Tensor, begin: Tensor, low: Tensor) -> DeviceRows:
        """Returns the rows at `keep` int64 `[n]`, with `begin` and `low` of their own."""
        return DeviceRows(
            self.ids[keep],
            self.grams[keep],
            self.pos[keep],
            self.sequence[keep],
            self.slot[keep],
            begin,
            low,
            self.text[keep],
            self.alive[keep],
            self.page_table,
            self.num_tokens,
        )

    def to(self, device: torch.device) -> DeviceRows:
        """Returns the rows on a device."""
        moved = {name: getattr(self, name).to(device) for name in _TENSORS}
        return dataclasses.replace(self, **moved)

    def copy_(self, source: DeviceRows) -> None:
        """Takes over the rows of a pass of the same sizes, from wherever they lie."""
        for name in _TENSORS:
            getattr(self, name).copy_(getattr(source, name))

    def global_row(self, ratio: int) -> Tensor:
        """Returns int32 `[R]`, where the compressed row that ends here is stored; -1 where none does."""
        pos, per_page = self.pos.long(), BLOCK_TOKENS // ratio
        page = self.page_table[self.sequence.long(), pos // BLOCK_TOKENS]
        row = page * per_page + pos % BLOCK_TOKENS // ratio
        complete = self.alive & (pos % ratio == ratio - 1)
        return torch.where(complete, row, -1).int()


_TENSORS = [field.name for field in dataclasses.fields(DeviceRows) if field.name != "num_tokens"]


class WindowPlan(Protocol):
    """Where window rows are stored and found during a pass.

    Attributes:
        store: int32 `[R]`, row of the buffer that each row's key goes to; -1 for none.
        index: int32 `[R, W]`, rows of the buffer that each row sees, oldest first; -1 where there is none.
    """

    store: Tensor
    index: Tensor

    def buffer(self, layer: int) -> Tensor:
        """Returns the rows that `store` and `index` speak of, uint8 `[n, bytes]`."""

    def finish(self, layer: int) -> None:
        """Puts the pass's rows where the next pass finds them."""


class RingWindow:
    """Stores into the rings and attends there: at most `MAX_ROLLBACK` rows of a sequence.

    Args:
        rows: of the pass.
        caches: with the rings.
        window: W.
    """

    def __init__(self, rows: DeviceRows, caches: DeviceCaches, window: int) -> None:
        seen = rows.pos.unsqueeze(1) - _offsets(window, rows.pos.device)
        visible = (seen >= rows.low.unsqueeze(1)) & rows.alive.unsqueeze(1)
        self._caches = caches
        self.store = caches.ring_rows(rows.slot, rows.pos)
        self.index = torch.where(visible, caches.ring_rows(rows.slot.unsqueeze(1), seen), -1)

    def buffer(self, layer: int) -> Tensor:
        return self._caches.window[layer]

    def finish(self, layer: int) -> None:
        pass


class SpanWindow:
    """Attends in a buffer of the W rows before the pass and its own rows: any number of them, of one sequence.

    Args:
        rows: of the pass.
        caches: with the rings.
        window: W.
        pos: of the first row.
        slot: of the sequence.
    """

    def __init__(
        self, rows: DeviceRows, caches: DeviceCaches, window: int, *, pos: int, slot: int
    ) -> None:
        device, count = rows.pos.device, len(rows.pos)
        offsets = _offsets(window, device)
        seen = rows.pos.unsqueeze(1) - offsets
        self.store = window + torch.arange(count, dtype=torch.int32, device=device)
        at = self.store.unsqueeze(1) - offsets
        self.index = torch.where(seen >= rows.low.unsqueeze(1), at, -1)
        self._caches = caches
        width = caches.window[0].shape[1]
        self._buffer = torch.empty(window + count, width, dtype=torch.uint8, device=device)
        self._old = caches.ring_rows(slot, torch.arange(pos - window, pos, device=device))
        end, kept = pos + count, min(count, caches.ring)
        self._new = caches.ring_rows(slot, torch.arange(end - kept, end, device=device))

    def buffer(self, layer: int) -> Tensor:
        self._buffer[: len(self._old)] = self._caches.window[layer][self._old]
        return self._buffer

    def finish(self, layer: int) -> None:
        self._caches.window[layer][self._new] = self._buffer[-len(self._new) :]


def _offsets(window: int, device: torch.device) -> Tensor:
    return torch.arange(window - 1, -1, -1, dtype=torch.int32, device=device)
