"""The baseline that a model must beat: an interpolated n-gram model of the same number of parameters.

It is counted on the training data. Probabilities are interpolated over the orders by Witten and Bell's rule: the weight
of the shorter context is the number of different tokens seen after the longer one.

Source: I. Witten and T. Bell, "The zero-frequency problem", IEEE Trans. Information Theory 37(4), 1991, method C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tools.train_demo.packing import COUNTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tools.train_demo.packing import Documents

ORDER = 5
_BITS = 12
"""Of a token id; five ids fit one 64-bit key."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """N-grams of one order: sorted keys with counts, and their contexts with totals and numbers of continuations."""

    grams: NDArray[np.uint64]
    counts: NDArray[np.int64]
    contexts: NDArray[np.uint64]
    totals: NDArray[np.int64]
    kinds: NDArray[np.int64]


class NGram:
    """Counts of orders 1 to `ORDER`.

    Args:
        documents: training data of one kind or several.
        num_parameters: most n-grams kept, over all orders; the rarest of the longest order go first.
    """

    def __init__(self, documents: list[Documents], num_parameters: int) -> None:
        tokens = np.concatenate([part.tokens & (COUNTED - 1) for part in documents])
        left = num_parameters
        self._orders: list[_Counts] = []
        for order in range(1, ORDER + 1):
            if not left:
                break
            grams, counts = np.unique(_keys(tokens, order), return_counts=True)
            if len(grams) > left:
                kept = np.sort(np.argsort(-counts, kind="stable")[:left])
                grams, counts = grams[kept], counts[kept]
            left -= len(grams)
            contexts, first = np.unique(grams >> np.uint64(_BITS), return_index=True)
            totals = np.add.reduceat(counts, first)
            kinds = np.diff(first, append=len(grams))
            self._orders.append(_Counts(grams, counts, contexts, totals, kinds))

    def loss(self, documents: Documents) -> float:
        """Returns the mean loss in nats of the counted tokens, each given what is before it in its document."""
        losses = []
        for place in range(len(documents)):
            stored = documents.document(place)
            each = -np.log(self._probabilities(stored & np.uint16(COUNTED - 1)))
            losses.append(each[1:][stored[1:] >= COUNTED])
        return float(np.concatenate(losses).mean())

    def _probabilities(self, tokens: NDArray[np.uint16]) -> NDArray[np.float64]:
        found = np.full(len(tokens), 1.0 / (1 << _BITS))
        for order, stored in enumerate(self._orders, 1):
            if len(tokens) < order:
                break
            keys = _keys(tokens, order)
            total, there = _look_up(stored.contexts, stored.totals, keys >> np.uint64(_BITS))
            kinds, _ = _look_up(stored.contexts, stored.kinds, keys >> np.uint64(_BITS))
            count, _ = _look_up(stored.grams, stored.counts, keys)
            shorter = found[order - 1 :]
            mixed = (count + kinds * shorter) / np.maximum(total + kinds, 1)
            found[order - 1 :] = np.where(there, mixed, shorter)
        return found


def _keys(tokens: NDArray[np.uint16], order: int) -> NDArray[np.uint64]:
    """Packs every run of `order` ids, the last id in the lowest bits."""
    wide = tokens.astype(np.uint64)
    keys = np.zeros(len(wide) - order + 1, dtype=np.uint64)
    for place in range(order):
        keys = (keys << np.uint64(_BITS)) | wide[place : place + len(keys)]
    return keys


def _look_up(
    keys: NDArray[np.uint64], values: NDArray[np.int64], wanted: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the values of keys, 0 where there are none, and which there are."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    there = keys[place] == wanted
    return np.where(there, values[place], 0), there
