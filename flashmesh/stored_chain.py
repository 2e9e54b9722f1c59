"""One prompt's blocks in the store, as a worker sees them: fetch by index, put by index.

The router names root and places; the worker derives every hash from the tokens it holds itself, so a block that does
not hold exactly these tokens can neither be read nor written under their name.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING

import xxhash

from flashmesh.errors import BlockNotFound, InvalidRequest, WorkerLost
from flashmesh.hashing import BlockHash, next_hash
from flashmesh.kv_fetch import fetch_blocks
from flashmesh.objects import StoredObject, pack_block
from flashmesh.runs import RUN_BLOCKS, Place
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashmesh.kv_client import KvClient
    from flashmesh.v1 import types_pb2


class StoredChain:
    """The chain of one request.

    Args:
        client: the way to the nodes.
        chain: root, places and extras, as the router sent them.
        layout_id: of this worker's payloads.
        tokens: ids known so far; `extend` adds to them.
    """

    def __init__(
        self,
        client: KvClient,
        chain: types_pb2.BlockChain,
        layout_id: bytes,
        tokens: Sequence[int],
    ) -> None:
        if len(chain.root_hash) != 32:
            raise InvalidRequest(f"root_hash has {len(chain.root_hash)} bytes, not 32")
        self._client = client
        self._root = chain.root_hash
        self._extras = chain.extras
        self._layout_id = layout_id
        self._places = _parse_places(chain.places)
        self._tokens: list[int] = []
        self.hashes: list[BlockHash] = []
        self.extend(tokens)

    def fork(self, tokens: Sequence[int]) -> StoredChain:
        """Returns a copy that goes on with other tokens."""
        twin = copy.copy(self)
        twin._tokens = list(self._tokens)
        twin.hashes = list(self.hashes)
        twin.extend(tokens)
        return twin

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens, and the hashes of the blocks that they complete."""
        self._tokens += tokens
        while len(self._tokens) >= (len(self.hashes) + 1) * BLOCK_TOKENS:
            parent = self.hashes[-1] if self.hashes else self._root
            block = self._block_tokens(len(self.hashes))
            self.hashes.append(next_hash(parent, block, self._extras))

    async def fetch(self, first: int, stop: int, wait_s: float) -> list[StoredObject]:
        """Returns verified copies of blocks [first, stop), waiting for those that are not there yet.

        Raises:
            BlockNotFound: one did not arrive, or its node cannot be reached.
            CorruptBlock: one was not what it claims to be, and was reported.
        """
        if first >= stop:
            return []
        self._place(first)
        blocks = fetch_blocks(
            self._client,
            self._places,
            self.hashes[:stop],
            self._tokens,
            self._layout_id,
            first,
            stop,
            wait_s,
        )
        with _node_errors():
            async with contextlib.aclosing(blocks):
                found = {index: item async for index, item in blocks}
        return [found[index] for index in range(first, stop)]

    async def put(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        """Stores blocks, (index, payload) each, and returns how many somebody had stored before.

        Raises:
            NoFreeBlocks: the node is full of leased blocks.
            BlockNotFound: it cannot be reached.
        """
        by_address: dict[str, list[StoredObject]] = {}
        for index, payload in blocks:
            by_address.setdefault(self._place(index).address, []).append(self._pack(index, payload))
        known = 0
        for address, objects in by_address.items():
            with _node_errors():
                known += (await self._client.put(address, objects)).num_known
        return known

    def _pack(self, index: int, payload: bytes) -> StoredObject:
        return pack_block(
            layout_id=self._layout_id,
            hash=self.hashes[index],
            parent=self.hashes[index - 1] if index else self._root,
            run=self.hashes[index // RUN_BLOCKS * RUN_BLOCKS],
            index=index,
            tokens=self._block_tokens(index),
            payload=payload,
        )

    def _block_tokens(self, index: int) -> list[int]:
        return self._tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]

    def _place(self, index: int) -> Place:
        if not self._places:
            raise InvalidRequest("the chain names no kvstore node")
        for place in self._places:
            if index < place.first_block + place.num_blocks:
                return place
        return self._places[-1]


@contextlib.contextmanager
def _node_errors() -> Iterator[None]:
    """Says of a lost node that its blocks are lost: the worker that needs them is not to blame."""
    try:
        yield
    except WorkerLost as error:
        raise BlockNotFound(str(error)) from error


def prefix_digest(items: Sequence[StoredObject]) -> bytes:
    """Returns the 16-byte digest chained over the payloads that stood for a prefix; empty for none."""
    if not items:
        return b""
    return xxhash.xxh3_128_digest(b"".join(item.checksum for item in items))


def _parse_places(messages: Sequence[types_pb2.BlockPlace]) -> list[Place]:
    places = [
        Place(
            node_id=message.node_id,
            address=message.address,
            first_block=message.first_block,
            num_blocks=message.num_blocks,
        )
        for message in messages
    ]
    expected = 0
    for place in places:
        if place.first_block != expected or not place.num_blocks:
            raise InvalidRequest(f"places have a gap at block {expected}")
        expected += place.num_blocks
    return places
