"""Placement of blocks: runs of 64 consecutive blocks, each on the node of highest score.

A run is named by the hash of its first block, so every request that shares the prefix places it
alike, and a node that joins or leaves moves only its own share. Blocks that are generated after the
known ones stay on the last run's node.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashmesh.hashing import BlockHash

RUN_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where consecutive blocks of a chain live.

    Attributes:
        node_id, address: the node.
        first_block, num_blocks: which blocks.
    """

    node_id: str
    address: str
    first_block: int
    num_blocks: int


def place_run(run: bytes, nodes: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Returns the (node id, address) that rendezvous hashing names (Thaler, Ravishankar 1998).

    Args:
        run: hash of the run's first block.
        nodes: (node id, address) of the live nodes, at least one, in any order.
    """
    return max(nodes, key=lambda node: (_score(run, node[0]), node[0]))


def place_runs(hashes: Sequence[BlockHash], nodes: Sequence[tuple[str, str]]) -> list[Place]:
    """Places a chain of blocks.

    Args:
        hashes: of the chain's whole blocks, from block 0 on; may be empty.
        nodes: (node id, address) of the live nodes, at least one.

    Returns:
        Places in order and without gaps. The last run is placed as if it were full, and a chain
        without a whole block gets one such place, so that blocks generated later have one too.
    """
    places = []
    for first in range(0, max(1, len(hashes)), RUN_BLOCKS):
        node_id, address = place_run(hashes[first] if hashes else b"", nodes)
        places.append(
            Place(node_id=node_id, address=address, first_block=first, num_blocks=RUN_BLOCKS)
        )
    return places


def _score(run: bytes, node_id: str) -> bytes:
    return hashlib.blake2b(run, key=node_id.encode()[:64], digest_size=8).digest()
