"""Which blocks are stored where, in Redis: what each node claims, under its own epoch.

A node's claims are sets that carry its epoch in their names, so a claim cannot outlive the process
that made it, nor be written by another. A member is 48 bits of a block's hash; Redis packs sets of
integers, so a claim takes about ten bytes. A reader asks the node that a run is placed on, and only
that: a prompt of any length is one round trip. The index may over-claim, `Get` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict
from typing import TYPE_CHECKING

import prometheus_client
import redis.asyncio
import redis.exceptions

from flashmesh.errors import WorkerLost
from flashmesh.recent_blocks import RecentBlocks
from flashmesh.redis_client import call_limit, key_prefix
from flashmesh.runs import RUN_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from flashmesh.hashing import BlockHash

log = logging.getLogger(__name__)

MIN_BUCKETS = 16
GROWTH = 4
BUCKET_CLAIMS = 256
"""Mean size at which a node takes more buckets. Redis packs sets of up to 512 integers."""

MAX_QUEUED = 1 << 20
WRITE_BLOCKS = 1024
WRITE_BUCKETS = 16
CHECK_INTERVAL_S = 1.0
LOOKUP_LIMIT_S = 1.0
"""A request would rather go on without hits than wait for a Redis that is silent."""

GATHER_S = 0.02
"""How long changes are gathered before they are written: a Put of hundreds makes few writes."""

# Nodes evict leaf first inside a run, so a run whose last block is claimed is taken as a whole: a
# million tokens keep Redis busy for half a millisecond so, and fifty times as long block by block. The
# buckets, which KEYS does not name, are in the slot of the key that their names begin with. Lua's
# numbers are exact up to 53 bits.
_LONGEST_PREFIX = """
local hashes, run_blocks = ARGV[1], tonumber(ARGV[2])
local num_blocks, found = #hashes / 16, 0
for _, claims in ipairs(KEYS) do
  local state = redis.call('GET', claims)
  local num_buckets = state and tonumber(string.match(state, '^%d+')) or 0
  if num_buckets == 0 then return found end
  local function is_claimed(block)
    local claim, spread = struct.unpack('>I6I4', hashes, block * 16 + 1)
    local bucket = claims .. ':' .. num_buckets .. ':' .. spread % num_buckets
    return redis.call('SISMEMBER', bucket, string.format('%.0f', claim)) == 1
  end
  local stop = found + run_blocks
  if stop <= num_blocks and is_claimed(stop - 1) then
    found = stop
  else
    while found < math.min(stop, num_blocks) do
      if not is_claimed(found) then return found end
      found = found + 1
    end
  end
end
return found
"""

REPUBLISHED = prometheus_client.Counter(
    "flashmesh_index_republished_total", "Times the whole inventory was published."
)


class IndexReader:
    """Looks prefixes up, in what it has seen lately and then in Redis.

    Args:
        client: from `redis_client.connect`.
        mesh: the mesh's name.
        recent: what this client remembers.
    """

    def __init__(
        self, client: redis.asyncio.Redis, mesh: str, recent: RecentBlocks | None = None
    ) -> None:
        self._client = client
        self._mesh = mesh
        self._recent = recent or RecentBlocks()

    async def longest_prefix(self, hashes: Sequence[BlockHash], owners: Sequence[str]) -> int:
        """Returns how many leading blocks are claimed by the nodes that they are placed on.

        One round trip at most; none for a prompt of which everything was seen lately.

        Args:
            hashes: a chain from block 0 on.
            owners: the epoch, as the registry has it, of the node of each of its runs.

        Raises:
            WorkerLost: Redis cannot be asked, and nothing of the prompt was seen lately.
        """
        known = self._recent.count(hashes, owners)
        if known == len(hashes):
            return known
        run = known // RUN_BLOCKS
        first = run * RUN_BLOCKS
        keys = [claims_key(self._mesh, owner) for owner in owners[run:]]
        try:
            async with call_limit(LOOKUP_LIMIT_S):
                found = await self._client.eval(
                    _LONGEST_PREFIX, len(keys), *keys, b"".join(hashes[first:]), RUN_BLOCKS
                )
        except (redis.exceptions.RedisError, OSError) as error:
            if known:
                return known
            raise WorkerLost(f"the index cannot be asked: {error}") from error
        self._recent.confirm(hashes[first : first + found], owners[run:])
        # Redis may not know yet of what was confirmed a moment ago, or while it was asked.
        return max(self._recent.count(hashes, owners), first + int(found))

    def confirm(self, hashes: Sequence[BlockHash], owners: Sequence[str]) -> None:
        """Remembers blocks that are known to be stored, before their node has claimed them.

        Args:
            hashes: a chain from block 0 on.
            owners: the owner's epoch for each of its runs.
        """
        self._recent.confirm(hashes, owners)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Drops what this client remembers of blocks: a node did not have them."""
        self._recent.forget(hashes)


class _Lost(Exception):  # noqa: N818
    """Redis does not hold what was written: it was wiped, or is older than it was."""


class IndexWriter:
    """A node's claims; one task writes, callers never wait.

    Every write is numbered, and the number stands in Redis with the claims. Where another number is
    found, Redis has lost something, and everything is published again.

    Args:
        client: from `redis_client.connect`.
        mesh: the mesh's name.
        epoch: of this node, 16 bytes.
        inventory: every block that is stored now.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        mesh: str,
        epoch: bytes,
        inventory: Callable[[], Iterable[BlockHash]],
    ) -> None:
        self._client = client
        self._key = claims_key(mesh, epoch.hex())
        self._inventory = inventory
        self._changes: dict[BlockHash, bool] = {}
        self._must_write_all = True
        self._num_buckets = 0  # that readers look into; 0 before everything is published
        self._num_claims = 0
        self._write_number = 0
        self._answered_number = 0
        self._wake = asyncio.Event()
        self._written = asyncio.Event()

    def publish(self, hash: BlockHash) -> None:
        """Claims a block, soon."""
        self._change(hash, stored=True)

    def unpublish(self, hash: BlockHash) -> None:
        """Takes a claim back, soon."""
        self._change(hash, stored=False)

    async def run(self) -> None:
        """Writes until cancelled."""
        down = False
        while True:
            try:
                await self._catch_up()
                self._written.set()
                down = False
            except _Lost:
                self._must_write_all = True
                self._written.clear()
                continue
            except (redis.exceptions.RedisError, OSError) as error:
                if not down:
                    log.warning("index unreachable", extra={"error": str(error)})
                down = True
                await asyncio.sleep(CHECK_INTERVAL_S)
            self._wake.clear()
            if not self._changes:
                await self._rest()

    async def written(self) -> None:
        """Waits until Redis holds the inventory as it is now."""
        await self._written.wait()

    async def withdraw(self) -> None:
        """Takes every claim back (a clean stop)."""
        try:
            await self._delete([self._key, *self._buckets_below(self._num_buckets * GROWTH)])
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("claims left to their epoch", extra={"error": str(error)})

    def _change(self, hash: BlockHash, *, stored: bool) -> None:
        if len(self._changes) >= MAX_QUEUED:  # Redis has been away for long
            self._must_write_all = True
            self._changes.clear()
        self._changes[hash] = stored
        self._written.clear()
        self._wake.set()

    async def _catch_up(self) -> None:
        if not self._must_write_all:
            async with call_limit():
                self._check(await self._client.get(self._key))
        while self._must_write_all or self._changes:
            if self._must_write_all or self._num_claims > BUCKET_CLAIMS * self._num_buckets:
                await self._write_all()
            else:
                if len(self._changes) < WRITE_BLOCKS:
                    await asyncio.sleep(GATHER_S)
                await self._write_changes()

    async def _write_all(self) -> None:
        """Makes the claims equal to the inventory, in as many buckets as it needs."""
        self._changes.clear()
        hashes = list(self._inventory())
        self._must_write_all = False  # unless changes overflow from here on
        try:
            num_buckets = max(self._num_buckets, MIN_BUCKETS)
            while len(hashes) > BUCKET_CLAIMS * num_buckets:
                num_buckets *= GROWTH
            with contextlib.suppress(_Lost):  # that is why we are here; the next one is not
                await self._write([])
            await self._replace_buckets(hashes, num_buckets)
            self._num_buckets, self._num_claims = num_buckets, len(hashes)
            await self._write([])
            await self._delete(self._buckets_below(num_buckets))
        except BaseException:
            self._must_write_all = True
            raise
        REPUBLISHED.inc()

    async def _replace_buckets(self, hashes: Iterable[BlockHash], num_buckets: int) -> None:
        """Writes buckets anew, each at once; readers of other buckets are not concerned."""
        # A million blocks take a second: too long for the event loop of a node that serves.
        buckets = await asyncio.to_thread(_spread, hashes, num_buckets)
        for first in range(0, num_buckets, WRITE_BUCKETS):
            commands: list[tuple[str | int, ...]] = []
            for bucket, claims in enumerate(buckets[first : first + WRITE_BUCKETS], first):
                key = self._bucket_key(num_buckets, bucket)
                commands.append(("DEL", key))
                if claims:
                    commands.append(("SADD", key, *claims))
            await self._write(commands)

    async def _write_changes(self) -> None:
        batch = dict(itertools.islice(self._changes.items(), WRITE_BLOCKS))
        by_set: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for hash, stored in batch.items():
            key = self._bucket_key(self._num_buckets, _bucket(hash, self._num_buckets))
            by_set["SADD" if stored else "SREM", key].append(_claim(hash))
        await self._write([(verb, key, *claims) for (verb, key), claims in by_set.items()])
        for hash, stored in batch.items():
            self._num_claims += 1 if stored else -1
            if self._changes.get(hash) == stored:  # it may have changed again meanwhile
                del self._changes[hash]

    async def _write(self, commands: Iterable[tuple[str | int, ...]]) -> None:
        """Executes commands and leaves the number of this write behind, all or nothing."""
        self._write_number += 1
        async with call_limit(), self._client.pipeline(transaction=True) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            pipe.set(self._key, f"{self._num_buckets} {self._write_number}", get=True)
            *_, before = await pipe.execute()
        try:
            self._check(before)
        finally:
            self._answered_number = self._write_number

    def _check(self, state: bytes | str | None) -> None:
        """Compares what Redis holds with what was written; a write without an answer may be there.

        Raises:
            _Lost: it holds something older, or nothing.
        """
        if state is None or int(state.split()[1]) < self._answered_number:
            raise _Lost

    async def _delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        for first in range(0, len(names), WRITE_BLOCKS):
            async with call_limit():
                await self._client.unlink(*names[first : first + WRITE_BLOCKS])

    def _buckets_below(self, num_buckets: int) -> Iterator[str]:
        """Yields the keys of all buckets there were while there were fewer than so many."""
        size = MIN_BUCKETS
        while size < num_buckets:
            for bucket in range(size):
                yield self._bucket_key(size, bucket)
            size *= GROWTH

    def _bucket_key(self, num_buckets: int, bucket: int) -> str:
        return f"{self._key}:{num_buckets}:{bucket}"

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(CHECK_INTERVAL_S):
                await self._wake.wait()
        except TimeoutError:
            pass


def claims_key(mesh: str, epoch: str) -> str:
    """Returns the key that tells how a node's claims are packed; its buckets' keys begin with it."""
    return f"{key_prefix(mesh)}:claims:{epoch}"


def _spread(hashes: Iterable[BlockHash], num_buckets: int) -> list[list[int]]:
    buckets: list[list[int]] = [[] for _ in range(num_buckets)]
    for hash in hashes:
        buckets[_bucket(hash, num_buckets)].append(_claim(hash))
    return buckets


def _claim(hash: BlockHash) -> int:
    return int.from_bytes(hash[:6])


def _bucket(hash: BlockHash, num_buckets: int) -> int:
    return int.from_bytes(hash[6:10]) % num_buckets
