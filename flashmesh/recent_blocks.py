"""The blocks that somebody claimed a moment ago: a client's own memory of the index.

A growing conversation comes back within seconds, and then only its end has to be asked about. What
is remembered may have been evicted since, as what Redis says may have been, so it is believed for a
short time only, and only while its owner has the same epoch.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from flashmesh.runs import RUN_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from flashmesh.hashing import BlockHash

MAX_BLOCKS = 1 << 17
"""16 prompts of a million tokens; about 25 MB."""

BELIEVED_S = 30.0


class RecentBlocks:
    """A bounded map from block to owner; the block confirmed longest ago is forgotten first.

    Args:
        clock: seconds.
        max_blocks: bound on what is remembered.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[BlockHash, tuple[str, float]] = OrderedDict()

    def count(self, hashes: Sequence[BlockHash], owners: Sequence[str]) -> int:
        """Returns how many leading blocks are believed to be with these owners.

        Args:
            hashes: a chain from block 0 on.
            owners: the owner's epoch for each of its runs.
        """
        now = self._clock()
        unknown = ("", now)

        def is_believed(place: int) -> bool:
            owner, until = self._blocks.get(hashes[place], unknown)
            return now < until and owner == owners[place // RUN_BLOCKS]

        return sum(1 for _ in itertools.takewhile(is_believed, range(len(hashes))))

    def confirm(self, hashes: Sequence[BlockHash], owners: Sequence[str]) -> None:
        """Remembers blocks that are claimed now; arguments as in `count`."""
        until = self._clock() + BELIEVED_S
        for place, hash in enumerate(hashes):
            self._blocks[hash] = owners[place // RUN_BLOCKS], until
            self._blocks.move_to_end(hash)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Drops what turned out to be wrong."""
        for hash in hashes:
            self._blocks.pop(hash, None)
