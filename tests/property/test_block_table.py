"""The block table against a naive model: bytes are conserved, leases hold, leaves go first."""

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.kv import Chain

from flashmesh.errors import NoFreeBlocks, Overloaded
from flashmesh.services.kvstore.blocks import BlockTable

CHAINS = [Chain(5, seed=seed, payload_bytes=400 + 400 * seed) for seed in range(2)]
OBJECTS = [item for chain in CHAINS for item in chain.objects]
CAPACITY_BYTES, MAX_LEASED_BYTES = 4000, 2400

indices = st.integers(0, len(OBJECTS) - 1)
hash_lists = st.lists(indices, max_size=5).map(lambda found: [OBJECTS[i].hash for i in found])
lease_ids = st.sampled_from("abc")
ttls = st.integers(1, 5)


class TableAndModel(RuleBasedStateMachine):
    """The model knows what is stored and who leases what, and derives every number from it."""

    def __init__(self):
        super().__init__()
        self.now_s = 0
        self.stored = {}
        self.leases = {}
        self.table = BlockTable(
            memory_bytes=CAPACITY_BYTES,
            max_leased_share=MAX_LEASED_BYTES / CAPACITY_BYTES,
            clock=lambda: self.now_s,
            on_gone=self.on_drop,
        )
        self.rotten = None
        self.put(0)  # so that the table knows the size of a block

    def leased(self):
        return {hash for hashes, _ in self.leases.values() for hash in hashes}

    def leased_bytes(self):
        return sum(len(self.stored[hash].data) for hash in self.leased() & self.stored.keys())

    def on_drop(self, item):
        if item.hash == self.rotten:
            del self.stored[item.hash]
            return
        assert item.hash not in self.leased(), "a leased block was evicted"
        children = [other for other in self.stored.values() if other.parent == item.hash]
        assert all(child.hash in self.leased() for child in children), "a leaf was left behind"
        del self.stored[item.hash]

    @rule(index=indices)
    def put(self, index):
        item = OBJECTS[index]
        known, size = item.hash in self.stored, len(item.data)
        limit = MAX_LEASED_BYTES if item.hash in self.leased() else CAPACITY_BYTES
        fits = known or self.leased_bytes() + size <= limit
        before = dict(self.stored)
        try:
            assert self.table.put(item) is not known
            assert fits
            self.stored.setdefault(item.hash, item)
        except NoFreeBlocks:
            assert not fits
            assert self.stored == before, "refused, but something was evicted for it"

    @rule(index=indices)
    def a_stored_block_rots_and_is_reported(self, index):
        item = OBJECTS[index]
        if item.hash in self.stored:
            bad = dataclasses.replace(item, data=item.data[:-1] + b"\xff")
            self.table.find(item.hash).memory = bad
            self.rotten = item.hash
            assert self.table.quarantine(item.hash)
            self.rotten = None

    @rule(index=indices)
    def a_good_block_is_reported(self, index):
        assert not self.table.quarantine(OBJECTS[index].hash)

    @rule(hashes=hash_lists)
    def touch(self, hashes):
        self.table.touch(hashes)

    @rule(lease_id=lease_ids, hashes=hash_lists, ttl_s=ttls)
    def lease(self, lease_id, hashes, ttl_s):
        before = self.table.stats()
        try:
            self.table.lease(lease_id, hashes, ttl_s)
        except Overloaded:
            assert self.table.stats() == before
            return
        held, _ = self.leases.get(lease_id, (set(), 0))
        self.leases[lease_id] = (held | set(hashes), self.now_s + ttl_s)

    @rule(ids=st.lists(lease_ids, max_size=3), ttl_s=ttls)
    def renew(self, ids, ttl_s):
        unknown = self.table.renew(ids, ttl_s)
        assert unknown == [lease_id for lease_id in ids if lease_id not in self.leases]
        for lease_id in set(ids) - set(unknown):
            self.leases[lease_id] = (self.leases[lease_id][0], self.now_s + ttl_s)

    @rule(ids=st.lists(lease_ids, max_size=3))
    def release(self, ids):
        self.table.release(ids)
        for lease_id in ids:
            self.leases.pop(lease_id, None)

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds):
        self.now_s += seconds
        over = [key for key, (_, deadline) in self.leases.items() if deadline <= self.now_s]
        assert self.table.expire() == len(over)
        for lease_id in over:
            del self.leases[lease_id]

    @invariant()
    def numbers_agree(self):
        stats = self.table.stats()
        used = sum(len(item.data) for item in self.stored.values())
        assert {block.hash for block in self.table.blocks()} == set(self.stored)
        assert stats.num_blocks == stats.memory.num_blocks == len(self.stored)
        assert stats.memory.leased_bytes == self.leased_bytes() <= MAX_LEASED_BYTES
        assert stats.memory.leased_bytes + stats.memory.evictable_bytes == used <= CAPACITY_BYTES
        assert stats.memory.free_bytes == CAPACITY_BYTES - used
        assert stats.num_leases == len(self.leases)
        assert stats.num_expected == len(self.leased() - self.stored.keys())


TestTableAndModel = TableAndModel.TestCase
TestTableAndModel.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
