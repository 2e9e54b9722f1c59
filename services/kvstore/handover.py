"""What a node that stops gives to the others: the blocks that somebody leases, and the leases.

A run goes to the node that rendezvous hashing names once this one has left, which is where routers
look for it from then on. What is not handed over in time costs work, never a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from flashmesh.errors import FlashmeshError
from flashmesh.hashing import BlockHash
from flashmesh.kv_client import FRAME_BYTES
from flashmesh.runs import place_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashmesh.kv_client import KvClient
    from flashmesh.services.kvstore.store import Store

log = logging.getLogger(__name__)

LeasedBlocks = dict[tuple[str, float], list[BlockHash]]
"""Stored blocks by lease id and time to live."""


async def hand_over(store: Store, client: KvClient, nodes: Sequence[tuple[str, str]]) -> None:
    """Copies leased blocks to the nodes that take their runs, and leases them there.

    Blocks that are leased and not stored are left out: whoever waits for them plans again.

    Args:
        store: of the node that stops.
        client: the way to the others.
        nodes: (node id, address) of the others; without any, nothing happens.
    """
    if nodes:
        shares = _shares(store, nodes)
        await asyncio.gather(*[_give(store, client, *share) for share in shares.items()])


def _shares(store: Store, nodes: Sequence[tuple[str, str]]) -> Mapping[str, LeasedBlocks]:
    """Returns what goes where, by address."""
    shares: defaultdict[str, LeasedBlocks] = defaultdict(dict)
    for lease_id, lease in store.table.leases():
        for hash in lease.hashes:
            if (block := store.table.find(hash)) is not None:
                _, address = place_run(block.run, nodes)
                shares[address].setdefault((lease_id, lease.ttl_s), []).append(hash)
    return shares


async def _give(store: Store, client: KvClient, address: str, share: LeasedBlocks) -> None:
    hashes = list(dict.fromkeys(hash for part in share.values() for hash in part))
    try:
        # Before the blocks, which are then pinned as they arrive.
        for (lease_id, ttl_s), part in share.items():
            await client.lease(address, lease_id, part, ttl_s)
        async for batch in store.read(hashes, FRAME_BYTES):
            await client.put(address, batch)
    except FlashmeshError as error:
        log.warning("leased runs not handed over", extra={"node": address, "error": str(error)})
    else:
        log.info("leased runs handed over", extra={"node": address, "num_blocks": len(hashes)})
