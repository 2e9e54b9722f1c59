"""Documents packed into rows of equal length, and the batches that a network takes.

A document is token ids and, for each, whether predicting it counts. Documents begin at multiples of the grain; between
two of them stand padding tokens, which see nothing and count nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from flashmesh.kernels.engram import BLOCKED, LOOK_BACK, EngramHash
from tools.train_demo.network import DOCUMENT_GRAIN, Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flashmesh.kernels.config import ModelConfig

LOOK_AHEAD = 16
"""Documents that are tried for what is left of a row."""

COUNTED = 1 << 15
"""Bit of a stored token: predicting it counts. Ids stay below it."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Many documents in one array.

    Attributes:
        tokens: uint16 `[n]`, ids with `COUNTED`.
        ends: int64 `[documents]`, where each ends.
    """

    tokens: NDArray[np.uint16]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def document(self, index: int) -> NDArray[np.uint16]:
        """Returns the stored tokens of one document."""
        begin = int(self.ends[index - 1]) if index else 0
        return self.tokens[begin : int(self.ends[index])]


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows: stored tokens uint16 `[B, T]` and document starts int64 `[B, T]`."""

    tokens: NDArray[np.uint16]
    start: NDArray[np.int64]


class Packer:
    """Fills rows with documents in an endless random order.

    Args:
        documents: to draw from; each is drawn once before any is drawn again.
        num_tokens: of a row; a longer document is cut.
        pad: id of padding.
        seed: of the order.
    """

    def __init__(self, documents: Documents, num_tokens: int, *, pad: int, seed: int) -> None:
        self._documents = documents
        self._num_tokens = num_tokens
        self._pad = pad
        self._draw = np.random.default_rng(seed)
        self._order: list[int] = []

    def row(self) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Packs one row."""
        tokens = np.full(self._num_tokens, self._pad, dtype=np.uint16)
        start = np.arange(self._num_tokens)
        begin = 0
        while (document := self._next(self._num_tokens - begin)) is not None:
            end = begin + len(document)
            tokens[begin:end] = document
            start[begin:end] = begin
            begin = end + -end % DOCUMENT_GRAIN
        return tokens, start

    def rows(self, count: int) -> Rows:
        """Packs a batch."""
        tokens, start = zip(*(self.row() for _ in range(count)), strict=True)
        return Rows(np.stack(tokens), np.stack(start))

    def _next(self, room: int) -> NDArray[np.uint16] | None:
        """Takes the first of the next few documents that fits; a row that is empty takes any, cut to its length."""
        while len(self._order) < LOOK_AHEAD:
            self._order = [*self._draw.permutation(len(self._documents)).tolist(), *self._order]
        for place in range(len(self._order) - 1, len(self._order) - 1 - LOOK_AHEAD, -1):
            document = self._documents.document(self._order[place])
            if len(document) <= room or room == self._num_tokens:
                del self._order[place]
                return document[:room]
        return None


def alone(document: NDArray[np.uint16], grain: int, *, pad: int) -> Rows:
    """Puts one document into a row of its own, filled up to a multiple of `grain`."""
    length = len(document)
    padding = -length % grain
    tokens = np.pad(document, (0, padding), constant_values=pad)
    start = np.where(np.arange(length + padding) < length, 0, np.arange(length + padding))
    return Rows(tokens[None], start[None])


class Hasher:
    """Turns packed rows into a network's batch: looks up which Engram rows every token reads."""

    def __init__(self, config: ModelConfig, token_map: torch.Tensor) -> None:
        self._layers = config.engram_layer_ids
        self._hashes = EngramHash(config, token_map)

    def batch(self, rows: Rows) -> Batch:
        """Returns the batch on the CPU."""
        ids = torch.from_numpy(rows.tokens.astype(np.int64) & (COUNTED - 1))
        start = torch.from_numpy(rows.start)
        place = torch.arange(ids.shape[1])
        grams = torch.stack(
            [
                torch.where(place - back >= start, ids.roll(back, 1), BLOCKED)
                for back in range(LOOK_BACK + 1)
            ],
            -1,
        )
        flat = grams.flatten(0, 1)
        engram = [self._hashes.rows(layer, flat).unflatten(0, ids.shape) for layer in self._layers]
        return Batch(ids, start, engram)


def next_weights(rows: Rows, uncounted: float) -> torch.Tensor:
    """Weighs the prediction of the token after each one.

    Args:
        rows: packed rows.
        uncounted: weight of a token that does not count but is no padding.

    Returns:
        fp32 `[B, T]`; 0 where the next token is padding or another document's.
    """
    stored = torch.from_numpy(rows.tokens.astype(np.int64))
    start = torch.from_numpy(rows.start)
    weights = torch.zeros(stored.shape)
    same = start[:, 1:] == start[:, :-1]
    weights[:, :-1] = torch.where(stored[:, 1:] >= COUNTED, 1.0, uncounted) * same
    return weights
