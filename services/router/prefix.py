"""A prompt as the store sees it: its chain of blocks, where they live, and how many are there."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmesh import hashing
from flashmesh.errors import FlashmeshError
from flashmesh.runs import place_runs
from flashmesh.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashmesh.index import IndexReader
    from flashmesh.kv_client import KvClient
    from flashmesh.registry import WorkerRecord
    from flashmesh.types import ModelInfo, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A validated request: nothing below checks it again."""

    request_id: str
    model: ModelInfo
    prompt: Sequence[int]
    params: SamplingParams
    cache_salt: bytes = b""
    tenant_salt: bytes = b""
    priority: int = 0
    stops: Sequence[str] = ()
    include_stop: bool = False


class Prefix:
    """The blocks of one prompt.

    Args:
        call: whose prompt.
        num_stored_blocks: how many leading blocks the replay plan takes from the store.
        nodes: kvstore nodes that answer, at least one.

    Attributes:
        chain: for the workers: root and places, generated blocks included.
        places: where the runs live.
        hashes: of the blocks that the plan takes from the store.
    """

    def __init__(self, call: Call, num_stored_blocks: int, nodes: Sequence[WorkerRecord]) -> None:
        root = hashing.root_hash(
            fingerprint=call.model.fingerprint,
            layout_id=call.model.layout_id,
            gemm_quantized=call.model.gemm_quantized,
            tenant_salt=call.tenant_salt,
        )
        extras = b""
        if call.cache_salt:
            extras = hashing.encode_extras([(hashing.EXTRA_CACHE_SALT, call.cache_salt)])
        hashes = list(hashing.chain(root, call.prompt, extras))
        self.places = place_runs(hashes, [(node.id, node.address) for node in nodes])
        self.hashes = hashes[:num_stored_blocks]
        self.chain = types_pb2.BlockChain(
            root_hash=root,
            extras=extras,
            places=[
                types_pb2.BlockPlace(
                    node_id=place.node_id,
                    address=place.address,
                    first_block=place.first_block,
                    num_blocks=place.num_blocks,
                )
                for place in self.places
            ],
        )
        epochs = {node.id: node.epoch for node in nodes}
        self._owners = [epochs[place.node_id] for place in self.places]

    async def count_indexed(self, index: IndexReader) -> int:
        """Returns how many leading blocks the index claims; it may claim too many; 0 without an index."""
        try:
            return await index.longest_prefix(self.hashes, self._owners)
        except FlashmeshError as error:
            log.warning("going on without hits", extra={"error": str(error)})
            return 0

    def confirm(self, index: IndexReader) -> None:
        """Tells the index's local memory that all blocks are stored."""
        index.confirm(self.hashes, self._owners)

    async def count_present(self, client: KvClient) -> int:
        """Returns how many leading blocks the nodes themselves have now."""
        total = 0
        for place in self.places:
            part = self.hashes[place.first_block : place.first_block + place.num_blocks]
            try:
                present = _leading(await client.have(place.address, part)) if part else 0
            except FlashmeshError as error:
                log.warning("a node did not answer", extra={"error": str(error)})
                break
            total += present
            if present < place.num_blocks:
                break
        return total


def _leading(flags: Iterable[bool]) -> int:
    """Counts the True values before the first False one."""
    return sum(1 for _ in itertools.takewhile(bool, flags))
