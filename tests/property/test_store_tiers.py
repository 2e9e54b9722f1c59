"""A node of two tiers under any sequence of use, pressure, faults and restarts.

Laws: a block that is returned has the bytes that were put, or it is a clean miss; in each tier free,
leased and evictable bytes add up to the capacity; files keep to their bound; a leased block leaves
only through a fault; what the index is told is what is here.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.faulty_files import FaultyFiles
from support.kv import Chain, until

from flashmesh.errors import NoFreeBlocks, Overloaded
from flashmesh.lifecycle import background
from flashmesh.services.kvstore.config import KvstoreConfig
from flashmesh.services.kvstore.store import Store

CHAINS = [Chain(8, seed=seed, payload_bytes=400) for seed in range(6)]
VARIANTS = [Chain(8, seed=seed, payload_bytes=600) for seed in range(6)]  # other writers' bytes
HASHES = [hash for chain in CHAINS for hash in chain.hashes]
OBJECT_BYTES = len(CHAINS[0].objects[0].data)
SEGMENT_BYTES = 2 * OBJECT_BYTES
DISK_BYTES = 16 * SEGMENT_BYTES
OPERATIONS = ("open", "write", "read", "truncate", "remove")

hash_lists = st.lists(st.sampled_from(HASHES), max_size=4)
lease_ids = st.sampled_from("abc")
chains = st.sampled_from([*CHAINS, *VARIANTS])


class Claims:
    """What the index has been told."""

    def __init__(self, on_unpublish):
        self.hashes = set()
        self._on_unpublish = on_unpublish

    def publish(self, hash):
        assert hash not in self.hashes
        self.hashes.add(hash)

    def unpublish(self, hash):
        self.hashes.remove(hash)
        self._on_unpublish(hash)


class StoreOfTwoTiers(RuleBasedStateMachine):
    """The model knows which bytes were accepted for a hash, and which lease names what."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.files = FaultyFiles()
        self.accepted = {hash: set() for hash in HASHES}
        self.now_s = 0
        self.open()

    def open(self):
        self.here = {}  # hash to the bytes seen since it came
        self.leases = {}
        # Leased blocks may go where something was broken.
        self.may_lose = bool(self.files.broken) or self.files.free_bytes is not None
        config = KvstoreConfig(
            memory_bytes=6 * OBJECT_BYTES,
            disk_path=str(self.folder),
            disk_bytes=DISK_BYTES,
            disk_queue_bytes=8 * OBJECT_BYTES,
            max_leased_share=0.7,
        )
        self.store = Store(config, files=self.files, clock=lambda: self.now_s)
        self.store.index = self.claims = Claims(self.on_gone)

    def close(self):
        self.loop.run_until_complete(self.store.aclose())

    def teardown(self):
        self.get(HASHES)
        self.close()
        self.loop.close()
        shutil.rmtree(self.folder)

    def leased(self):
        return {hash for hashes, _ in self.leases.values() for hash in hashes}

    def on_gone(self, hash):
        assert self.may_lose or hash not in self.leased(), "a leased block was evicted"
        self.here.pop(hash, None)

    @initialize(order=st.permutations(CHAINS))
    def begin_with_a_full_disk(self, order):
        self.put_side_by_side(order)

    @rule(order=st.permutations(VARIANTS))
    def put_side_by_side(self, order):
        """Segments hold blocks of several chains, so that they die by and by."""
        for items in zip(*[chain.objects for chain in order], strict=True):
            self.put(items)
            self.settle()

    @rule(chain=chains)
    def put_chain(self, chain):
        self.put(chain.objects)

    def put(self, items):
        for item in items:
            known = item.hash in self.store.table
            try:
                assert self.store.put(item) is not known
            except NoFreeBlocks:
                assert self.leased()
                continue
            if not known:
                self.accepted[item.hash].add(item.data)
                self.here[item.hash] = item.data

    @rule(chain=chains)
    def get_chain(self, chain):
        self.get(chain.hashes)

    @rule(hashes=hash_lists)
    def get(self, hashes):
        self.store.table.touch(hashes)
        for item in self.loop.run_until_complete(self.read(hashes)):
            data = bytes(item.data)
            assert data in self.accepted[item.hash], "bytes that nobody put"
            assert data == self.here.setdefault(item.hash, data), "bytes changed"

    async def read(self, hashes):
        return [item async for batch in self.store.read(hashes, 3 * OBJECT_BYTES) for item in batch]

    @rule()
    def settle(self):
        """Everything queued is written, everything on disk is found."""

        async def work():
            # Only here, so that what is written when does not depend on threads.
            async with background(self.store.disk.run()):
                await until(lambda: not self.store.disk.num_unscanned)
                await self.store.flush()

        self.loop.run_until_complete(work())

    @rule(lease_id=lease_ids, hashes=hash_lists, ttl_s=st.integers(1, 9))
    def lease(self, lease_id, hashes, ttl_s):
        before = self.store.table.stats()
        try:
            self.store.table.lease(lease_id, hashes, ttl_s)
        except Overloaded:
            assert self.store.table.stats() == before
            return
        held, _ = self.leases.get(lease_id, (set(), 0))
        self.leases[lease_id] = (held | set(hashes), self.now_s + ttl_s)

    @rule(lease_id=lease_ids, ttl_s=st.integers(1, 5))
    def renew(self, lease_id, ttl_s):
        unknown = self.store.table.renew([lease_id], ttl_s)
        assert unknown == [lease_id] * (lease_id not in self.leases)
        if not unknown:
            self.leases[lease_id] = (self.leases[lease_id][0], self.now_s + ttl_s)

    @rule(lease_id=lease_ids)
    def release(self, lease_id):
        self.store.table.release([lease_id])
        self.leases.pop(lease_id, None)

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.store.table.expire()
        self.leases = {k: v for k, v in self.leases.items() if v[1] > self.now_s}

    @rule(hash=st.sampled_from(HASHES))
    def report(self, hash):
        self.loop.run_until_complete(self.store.quarantine(hash))

    @rule(hashes=hash_lists)
    def evict(self, hashes):
        self.store.table.evict(hashes)
        assert not (set(hashes) & self.store_hashes()) - self.leased()

    @rule(garbage=st.integers(0, OBJECT_BYTES - 1))
    def crash(self, garbage):
        """Memory and queue are lost; the last write may have been cut off."""
        room = DISK_BYTES - SEGMENT_BYTES - self.file_bytes()
        self.close()
        if garbage < room and (paths := self.paths()):
            with paths[-1].open("ab") as file:
                file.write(CHAINS[0].objects[0].data[:garbage])
        self.open()

    @rule()
    def stop_and_start(self):
        """Without damage and with room for all, everything that is on disk is found again."""
        self.settle()
        on_disk = {b.hash for b in self.store.table.blocks() if b.on_disk}
        intact = not self.may_lose and self.store.disk.file_bytes <= DISK_BYTES * 3 // 4
        self.close()
        self.open()
        self.settle()
        assert not intact or on_disk <= self.store_hashes()

    @rule(
        kind=st.sampled_from(["flip", "delete", "fill up", *OPERATIONS]), at=st.integers(0, 10**6)
    )
    def disk_fails(self, kind, at):
        """A bit flips, a file vanishes, space runs out, or an operation fails from now on."""
        self.may_lose = True
        paths = [path for path in self.paths() if path.stat().st_size]
        if kind == "fill up":
            self.files.free_bytes = at % (2 * OBJECT_BYTES)
        elif kind in OPERATIONS:
            self.files.broken = {kind}
        elif paths and kind == "delete":
            paths[at % len(paths)].unlink()
        elif paths:
            path = paths[at % len(paths)]
            content = bytearray(path.read_bytes())
            content[at % len(content)] ^= 1 << at % 8
            path.write_bytes(content)

    @rule()
    def disk_recovers(self):
        self.files.free_bytes = None
        self.files.broken = set()

    def paths(self):
        return sorted(self.folder.glob("*.blocks"))

    def file_bytes(self):
        return sum(path.stat().st_size for path in self.paths())

    def store_hashes(self):
        return {block.hash for block in self.store.table.blocks()}

    @invariant()
    def every_byte_is_accounted_for(self):
        stats, blocks = self.store.table.stats(), list(self.store.table.blocks())
        assert set(self.store.inventory()) == self.claims.hashes
        for tier, held in (
            (stats.memory, [block for block in blocks if block.in_memory]),
            (stats.disk, [block for block in blocks if block.on_disk]),
        ):
            leased = sum(block.num_bytes for block in held if block.hash in self.leased())
            assert tier.num_blocks == len(held)
            assert tier.leased_bytes == leased <= 0.7 * tier.capacity_bytes
            assert leased + tier.evictable_bytes == sum(block.num_bytes for block in held)
            assert tier.free_bytes >= 0
        assert stats.num_leases == len(self.leases)
        assert stats.num_expected == len(self.leased() - {block.hash for block in blocks})

    @invariant()
    def files_keep_to_their_bound(self):
        assert self.file_bytes() <= DISK_BYTES
        assert self.store.disk.file_bytes <= DISK_BYTES


TestStoreOfTwoTiers = StoreOfTwoTiers.TestCase
TestStoreOfTwoTiers.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
