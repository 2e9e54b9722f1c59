"""How blocks are used, and the priority that follows from it.

A use raises a block and what it depends on: ancestors within the run are never below their
descendants, so that the leaf goes first. Blocks that are not stored are remembered for a while: how
they were used, and how high their descendants stand.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashmesh.hashing import BlockHash
from flashmesh.services.kvstore.policy import Usage, priority
from flashmesh.services.kvstore.tier import UNUSED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flashmesh.services.kvstore.tier import Block

MIN_GHOSTS = 1024
GHOSTS_PER_BLOCK = 4
MAX_GHOSTS = 1 << 20
"""Absent blocks remembered: four for each stored one, up to a million; beyond, one for each."""


@dataclass(slots=True)
class _Ghost:
    usage: Usage | None = None
    priority: float = UNUSED  # of the highest descendant


class Uses:
    """Clock, priorities and ghosts of one table.

    Args:
        blocks: the stored ones, by hash; read only.
    """

    def __init__(self, blocks: Mapping[BlockHash, Block]) -> None:
        self._blocks = blocks
        self._ghosts: OrderedDict[BlockHash, _Ghost] = OrderedDict()
        self._now = 0  # counts requests
        self._floor = 0.0

    def begin(self, block: Block) -> None:
        """Gives a block that is stored now what was remembered of it; this is not a use."""
        ghost = self._ghosts.pop(block.hash, _Ghost())
        block.usage = ghost.usage or block.usage
        self._raise(block, ghost.priority)

    def end(self, block: Block) -> None:
        """Remembers a block that is stored no more."""
        self._remember(block.hash).usage = block.usage

    def evicted(self, block: Block) -> None:
        """Raises the floor: what has not been used since stands lower from now on."""
        self._floor = max(self._floor, block.priority)

    def count(self, hashes: Iterable[BlockHash], *, same_request: bool = False) -> None:
        """Counts a use of the stored ones by one request, a new one or that of the call before."""
        self._now += not same_request
        for block in self._stored(hashes):
            usage = block.usage
            block.usage = Usage(
                num_uses=usage.num_uses + 1,
                last_use=self._now,
                previous_use=usage.last_use,
                position=usage.position,
            )
            self._raise(block, priority(block.usage, self._floor))

    def prolong(self, hashes: Iterable[BlockHash]) -> None:
        """Moves the latest use of the stored ones to now: it lasted until now."""
        self._now += 1
        for block in self._stored(hashes):
            block.usage = replace(block.usage, last_use=self._now)
            self._raise(block, priority(block.usage, self._floor))

    def _stored(self, hashes: Iterable[BlockHash]) -> list[Block]:
        return [block for hash in hashes if (block := self._blocks.get(hash)) is not None]

    def _raise(self, block: Block, value: float) -> None:
        # Parents are the writer's claim and might form a ring: who is high enough ends the walk.
        while block.priority < value:
            block.priority = value
            if block.hash == block.run:
                return
            parent = self._blocks.get(BlockHash(block.parent))
            if parent is None:
                ghost = self._remember(BlockHash(block.parent))
                ghost.priority = max(ghost.priority, value)
                return
            block = parent

    def _remember(self, hash: BlockHash) -> _Ghost:
        ghost = self._ghosts.setdefault(hash, _Ghost())
        self._ghosts.move_to_end(hash)
        num_blocks = len(self._blocks)
        several = min(GHOSTS_PER_BLOCK * num_blocks, MAX_GHOSTS)
        if len(self._ghosts) > max(MIN_GHOSTS, several, num_blocks):
            self._ghosts.popitem(last=False)
        return ghost
