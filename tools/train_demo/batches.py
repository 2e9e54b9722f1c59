"""An endless supply of training batches, made ahead of time in threads."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tools.train_demo.packing import Hasher, Packer, Rows, next_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from flashmesh.kernels.config import ModelConfig
    from tools.train_demo.network import Batch
    from tools.train_demo.packing import Documents

PROMPT_WEIGHT = 0.1
"""Of what the user and tools say: worth modelling, but not what an answer is made of."""
NUM_THREADS = 4


@dataclass(slots=True)
class Work:
    """One step's data: a batch and the weight of every next token, fp32 `[B, T]`."""

    batch: Batch
    weights: Tensor

    def to(self, device: str) -> Work:
        """Returns a copy on a device."""
        return Work(self.batch.to(device), self.weights.to(device))


class Supply:
    """Mixes conversations and source code.

    Args:
        config: of the model.
        token_map: of its tokenizer.
        sources: kinds of documents, each with its number of rows in a batch.
        num_tokens: of a row.
    """

    def __init__(
        self,
        config: ModelConfig,
        token_map: torch.Tensor,
        sources: list[tuple[Documents, int]],
        num_tokens: int,
    ) -> None:
        self._hasher = Hasher(config, token_map)
        self._sources = sources
        self._num_tokens = num_tokens
        self._pad = config.pad_token_id

    def batches(self, seed: int) -> Iterator[Work]:
        """Yields batches without end; equal seeds give equal ones."""
        packers = [
            (Packer(documents, self._num_tokens, pad=self._pad, seed=seed), count)
            for documents, count in self._sources
        ]
        while True:
            parts = [packer.rows(count) for packer, count in packers]
            rows = Rows(
                np.concatenate([part.tokens for part in parts]),
                np.concatenate([part.start for part in parts]),
            )
            yield Work(self._hasher.batch(rows), next_weights(rows, PROMPT_WEIGHT))

    def ahead(self, seed: int) -> Iterator[Work]:
        """Yields batches that threads have made, each thread its own sequence, in turn."""
        queues: list[queue.Queue[Work]] = [queue.Queue(4) for _ in range(NUM_THREADS)]
        for number, waiting in enumerate(queues):
            threading.Thread(
                target=_fill, args=(self.batches(seed * NUM_THREADS + number), waiting), daemon=True
            ).start()
        while True:
            for waiting in queues:
                yield waiting.get()


def _fill(batches: Iterator[Work], waiting: queue.Queue[Work]) -> None:
    for work in batches:
        waiting.put(work)
