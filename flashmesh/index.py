"""Which blocks are stored where, in Redis: presence only, packed by run, under the owner's epoch.

One hash for each run of 64 blocks (`...:run:<hash of its first block>`), one field for each stored
block (its 16-byte hash), the value the first 8 bytes of the owner's epoch. A prompt of any length
is looked up in one pipelined round trip. The index may over-claim, `Get` decides; an epoch that the
registry does not confirm counts as absence, so a node that restarted claims nothing from before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from typing import TYPE_CHECKING

import prometheus_client
import redis.asyncio
import redis.exceptions

from flashmesh.errors import WorkerLost
from flashmesh.hashing import BlockHash
from flashmesh.redis_client import call_limit
from flashmesh.runs import RUN_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

log = logging.getLogger(__name__)

EPOCH_BYTES = 8
MAX_QUEUED = 1 << 20
MAX_BATCH = 1024
CHECK_INTERVAL_S = 1.0

# A block may have been published by another owner since; only our own claim is ours to take back.
_UNPUBLISH = """
for i = 2, #ARGV do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[1] then redis.call('HDEL', KEYS[1], ARGV[i]) end
end
"""

REPUBLISHED = prometheus_client.Counter(
    "flashmesh_index_republished_total", "Times the whole inventory was published again."
)

Entry = tuple[BlockHash, BlockHash]
"""(run, block)."""


class IndexReader:
    """Looks prefixes up.

    Args:
        client: from `redis_client.connect`.
        mesh: the mesh's name.
    """

    def __init__(self, client: redis.asyncio.Redis, mesh: str) -> None:
        self._client = client
        self._prefix = f"{{flashmesh:{mesh}}}"

    async def longest_prefix(
        self, hashes: Sequence[BlockHash], epochs: AbstractSet[bytes]
    ) -> list[bytes]:
        """Returns the owners (8-byte epochs) of the leading blocks that somebody claims.

        Args:
            hashes: a chain from block 0 on.
            epochs: first 8 bytes of the epochs that the registry confirms.

        Raises:
            WorkerLost: Redis cannot be asked.
        """
        try:
            async with call_limit(), self._client.pipeline(transaction=False) as pipe:
                for first in range(0, len(hashes), RUN_BLOCKS):
                    pipe.hmget(
                        _run_key(self._prefix, hashes[first]), hashes[first : first + RUN_BLOCKS]
                    )
                runs = await pipe.execute()
        except (redis.exceptions.RedisError, OSError) as error:
            raise WorkerLost(f"the index cannot be asked: {error}") from error
        return list(itertools.takewhile(epochs.__contains__, itertools.chain.from_iterable(runs)))


class IndexWriter:
    """A node's share of the index; one task writes, callers never wait.

    Args:
        client: from `redis_client.connect`.
        mesh: the mesh's name.
        epoch: of this node, 16 bytes.
        inventory: every (run, block) that is stored now; read when Redis has lost them.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        mesh: str,
        epoch: bytes,
        inventory: Callable[[], Iterable[Entry]],
    ) -> None:
        self._client = client
        self._prefix = f"{{flashmesh:{mesh}}}"
        self._epoch = epoch[:EPOCH_BYTES]
        self._sentinel = f"{self._prefix}:inventory:{epoch.hex()}"
        self._inventory = inventory
        self._changes: dict[Entry, bool] = {}
        self._overflowed = False
        self._wake = asyncio.Event()

    def publish(self, run: BlockHash, block: BlockHash) -> None:
        """Claims a block, soon."""
        self._change((run, block), stored=True)

    def unpublish(self, run: BlockHash, block: BlockHash) -> None:
        """Takes a claim back, soon."""
        self._change((run, block), stored=False)

    async def run(self) -> None:
        """Writes until cancelled."""
        down = False
        while True:
            try:
                if self._overflowed or not await self._is_published():
                    await self._republish()
                while self._changes:
                    await self._write_batch()
                down = False
            except (redis.exceptions.RedisError, OSError) as error:
                if not down:
                    log.warning("index unreachable", extra={"error": str(error)})
                down = True
                await asyncio.sleep(CHECK_INTERVAL_S)
            self._wake.clear()
            if not self._changes:
                await self._rest()

    async def withdraw(self) -> None:
        """Takes every claim back (a clean stop)."""
        self._changes.update(dict.fromkeys(self._inventory(), False))
        try:
            while self._changes:
                await self._write_batch()
            async with call_limit():
                await self._client.delete(self._sentinel)
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("claims left to their epoch", extra={"error": str(error)})

    def _change(self, entry: Entry, *, stored: bool) -> None:
        if len(self._changes) >= MAX_QUEUED:  # Redis has been away for long
            self._overflowed = True
            return
        self._changes[entry] = stored
        self._wake.set()

    async def _is_published(self) -> bool:
        async with call_limit():
            return bool(await self._client.exists(self._sentinel))

    async def _republish(self) -> None:
        self._overflowed = False
        self._changes.update(dict.fromkeys(self._inventory(), True))
        while self._changes:
            await self._write_batch()
        async with call_limit():
            await self._client.set(self._sentinel, 1)
        REPUBLISHED.inc()

    async def _write_batch(self) -> None:
        batch = dict(itertools.islice(self._changes.items(), MAX_BATCH))
        stored: defaultdict[bytes, list[bytes]] = defaultdict(list)
        gone: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for (run, block), is_stored in batch.items():
            (stored if is_stored else gone)[run].append(block)
        async with call_limit(), self._client.pipeline(transaction=False) as pipe:
            for key, blocks in stored.items():
                pipe.hset(_run_key(self._prefix, key), mapping=dict.fromkeys(blocks, self._epoch))
            for key, blocks in gone.items():
                pipe.eval(_UNPUBLISH, 1, _run_key(self._prefix, key), self._epoch, *blocks)
            await pipe.execute()
        for entry, is_stored in batch.items():  # unless it changed again meanwhile
            if self._changes.get(entry) == is_stored:
                del self._changes[entry]

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(CHECK_INTERVAL_S):
                await self._wake.wait()
        except TimeoutError:
            pass


def _run_key(prefix: str, run: bytes) -> str:
    return f"{prefix}:run:{run.hex()}"
