"""Deletes what dead nodes left in the index.

Nobody believes the claims of an epoch that the registry does not confirm, but they take memory until
somebody deletes them: a node that was killed cannot. So now and then one of the living walks over all
claims. A node that was only away and loses its claims to the walk notices within a second, and
publishes them again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, cast

import redis.asyncio
import redis.exceptions

from flashmesh.index import claims_key
from flashmesh.redis_client import call_limit, key_prefix
from flashmesh.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 60
"""From one walk to the next, whichever nodes make them."""

TURN_INTERVAL_S = 5.0
SCAN_KEYS = 1000


async def keep_swept(client: redis.asyncio.Redis, mesh: str, epoch: str) -> None:
    """Takes turns with the other nodes at sweeping, until cancelled.

    Args:
        client: from `redis_client.connect`.
        mesh: the mesh's name.
        epoch: of this node, as the registry has it.
    """
    registry = Registry(client, mesh)
    turn = f"{key_prefix(mesh)}:sweep"
    while True:
        try:
            living = {record.epoch for record in await registry.list()}
            # Where this node is missing, others are too: Redis has come back empty.
            if epoch in living:
                async with call_limit():
                    is_ours = await client.set(turn, epoch, nx=True, ex=SWEEP_INTERVAL_S)
                if is_ours:
                    await sweep(client, mesh, living)
        except (redis.exceptions.RedisError, OSError) as error:
            log.debug("claims not swept", extra={"error": str(error)})
        await asyncio.sleep(TURN_INTERVAL_S)


async def sweep(client: redis.asyncio.Redis, mesh: str, living: AbstractSet[str]) -> int:
    """Deletes the claims of all epochs but these; returns how many keys that were."""
    claims = claims_key(mesh, "")
    pattern = re.sub(r"([*?\[\]\\])", r"\\\1", claims) + "*"  # a mesh may be named like a pattern
    num_deleted, cursor = 0, 0
    while True:
        async with call_limit():
            cursor, keys = await client.scan(cursor, match=pattern, count=SCAN_KEYS)
            dead = [key for key in cast("list[bytes]", keys) if _epoch(key, claims) not in living]
            if dead:
                num_deleted += await client.unlink(*dead)
        if cursor == 0:
            return num_deleted


def _epoch(key: bytes, claims: str) -> str:
    return key.decode().removeprefix(claims).partition(":")[0]
