"""Who computes which blocks right now, so that requests with one prefix compute it once.

A request claims the blocks that it has computed for it. Another one that needs them waits until they are stored, or
until the claim ends without them, and then claims the rest itself. Routers and prefill workers keep a table each, owned
by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from flashmesh.hashing import BlockHash


class Computation:
    """Blocks of one chain that are computed in order for one request."""

    def __init__(self, hashes: Sequence[BlockHash]) -> None:
        self.hashes = hashes
        self.num_stored = 0
        self.ended = False
        self._changed = asyncio.Event()

    def advance(self, num_stored: int) -> None:
        """Tells how many of the blocks are stored by now."""
        if num_stored > self.num_stored:
            self.num_stored = num_stored
            self._wake()

    def end(self) -> None:
        """Tells that no more will come."""
        self.ended = True
        self._wake()

    async def change(self) -> None:
        """Waits for `advance` or `end`."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Computations:
    """All that are known in one process."""

    def __init__(self) -> None:
        self._by_block: dict[BlockHash, tuple[Computation, int]] = {}

    async def arrivals(
        self, hashes: Sequence[BlockHash], num_stored: int
    ) -> AsyncGenerator[int, None]:
        """Waits for blocks that are being computed, and yields how many of a chain are stored as they come.

        Ends when nobody computes the next block. Nothing is awaited after that, so of many that waited for a claim
        that ended early, the first claims the rest before the others look.

        Args:
            hashes: of the chain's blocks.
            num_stored: leading blocks that are stored when this begins.
        """
        while num_stored < len(hashes) and (found := self._by_block.get(hashes[num_stored])):
            computation, place = found
            begin = num_stored
            # Hashes are chained: what is equal at one place was equal before it.
            theirs = computation.hashes[place:]
            same = sum(a == b for a, b in zip(theirs, hashes[begin:], strict=False))
            while num_stored < begin + same:
                arrived = begin + min(same, computation.num_stored - place)
                if arrived > num_stored:
                    num_stored = arrived
                    yield num_stored
                elif computation.ended:
                    break
                else:
                    await computation.change()

    @contextlib.contextmanager
    def claim(self, hashes: Sequence[BlockHash]) -> Iterator[Computation]:
        """Claims blocks while the body has them computed, but for those that somebody claims already."""
        computation = Computation(hashes)
        mine = {
            hash: (computation, place)
            for place, hash in enumerate(hashes)
            if hash not in self._by_block
        }
        self._by_block |= mine
        try:
            yield computation
        finally:
            for hash in mine:
                del self._by_block[hash]
            computation.end()
