"""Reading and checking everything that the node holds, at a bounded rate.

Copies rot while nobody reads them. The scrub walks the blocks that are stored when it begins, has the store check every
copy, and drops what is bad, so that the next Put brings a good one.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from flashmesh.v1 import kvstore_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from flashmesh.services.kvstore.store import Store

DEFAULT_BYTES_PER_S = 200_000_000
"""A fraction of what a core can check, so that readers hardly notice."""

STEP_BYTES = 4 * 1024 * 1024
"""Between two messages, and between two chances for others to run."""


async def scrub(store: Store, bytes_per_s: int) -> AsyncGenerator[kvstore_pb2.VerifyProgress, None]:
    """Checks all blocks; yields where it stands, at least once.

    Args:
        store: whose.
        bytes_per_s: bound on what is read; 0 is the default.
    """
    hashes = store.table.hashes()
    progress = kvstore_pb2.VerifyProgress(num_total=len(hashes))
    step_bytes, started = 0, time.monotonic()
    for hash in hashes:
        block = store.table.info(hash)
        if block is not None:
            step_bytes += block.num_bytes * (block.in_memory + block.on_disk)
            if await store.quarantine(hash, where="scrub"):
                progress.bad_hashes.append(hash)
        progress.num_checked += 1
        if step_bytes >= STEP_BYTES:
            progress.num_bytes += step_bytes
            step_bytes = 0
            yield progress
            progress.ClearField("bad_hashes")
            elapsed_s = time.monotonic() - started
            await asyncio.sleep(
                pause_s(progress.num_bytes, elapsed_s, bytes_per_s or DEFAULT_BYTES_PER_S)
            )
    progress.num_bytes += step_bytes
    yield progress


def pause_s(num_bytes: int, elapsed_s: float, bytes_per_s: int) -> float:
    """Returns how long to wait for the rate to fall to what is allowed."""
    return max(0.0, num_bytes / bytes_per_s - elapsed_s)
