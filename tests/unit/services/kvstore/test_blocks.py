"""The block table: bytes, leases, and who is evicted."""

import dataclasses

import pytest
from support.kv import Chain

from flashmesh.errors import NoFreeBlocks, Overloaded
from flashmesh.services.kvstore import leases
from flashmesh.services.kvstore.blocks import BlockTable

OBJECT_BYTES = 1120


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def table_of(num_blocks, *, max_leased=None, clock=None, evicted=None):
    table = BlockTable(
        memory_bytes=num_blocks * OBJECT_BYTES,
        max_leased_share=1.0 if max_leased is None else max_leased / num_blocks,
        clock=clock or Clock(),
        on_gone=lambda item: evicted.append(item.hash) if evicted is not None else None,
    )
    # Any block tells the table how large the ones to come are.
    (probe,) = Chain(1, seed=99).objects
    table.put(probe)
    table.evict([probe.hash])
    return table


def put_all(table, chain):
    return [table.put(item) for item in chain.objects]


def test_a_block_is_stored_once_and_the_first_bytes_stay():
    table, chain = table_of(4), Chain(1)
    other = dataclasses.replace(chain.objects[0], data=b"other bytes")
    assert put_all(table, chain) == [True]
    assert table.put(other) is False
    assert table.get(chain.hashes[0]) is chain.objects[0]


def test_a_full_table_evicts_the_leaf_of_the_chain_that_was_used_longest_ago():
    evicted = []
    table, old, new = table_of(6, evicted=evicted), Chain(3, seed=1), Chain(3, seed=2)
    put_all(table, old)
    put_all(table, new)
    evicted.clear()
    put_all(table, Chain(4, seed=3))
    assert evicted == [*reversed(old.hashes), new.hashes[-1]]


def test_a_used_chain_outlives_one_that_was_stored_later():
    evicted = []
    table, old, new = table_of(6, evicted=evicted), Chain(3, seed=1), Chain(3, seed=2)
    put_all(table, old)
    put_all(table, new)
    table.touch(old.hashes)
    evicted.clear()
    put_all(table, Chain(3, seed=3))
    assert evicted == list(reversed(new.hashes))


def test_touching_a_leaf_touches_what_it_depends_on():
    evicted = []
    table, old, new = table_of(6, evicted=evicted), Chain(3, seed=1), Chain(3, seed=2)
    put_all(table, old)
    put_all(table, new)
    table.touch([old.hashes[-1]])
    evicted.clear()
    put_all(table, Chain(3, seed=3))
    assert evicted == list(reversed(new.hashes))


def test_blocks_put_in_any_order_are_evicted_leaf_first():
    evicted = []
    table, chain = table_of(4, evicted=evicted), Chain(4)
    for index in (2, 0, 3, 1):
        table.put(chain.objects[index])
    evicted.clear()
    put_all(table, Chain(4, seed=1))
    assert evicted == list(reversed(chain.hashes))


def test_parents_in_a_ring_do_not_trap_the_table():
    table, chain = table_of(4), Chain(2)
    first, second = chain.objects
    run = b"r" * 16
    table.put(dataclasses.replace(first, parent=second.hash, run=run))
    table.put(dataclasses.replace(second, parent=first.hash, run=run))
    table.touch(chain.hashes)
    assert table.stats().num_blocks == 2


def test_a_leased_block_is_never_evicted():
    table, chain = table_of(4), Chain(2)
    put_all(table, chain)
    table.lease("a", chain.hashes, 30)
    put_all(table, Chain(4, seed=1))
    assert all(hash in table for hash in chain.hashes)


def test_a_full_table_of_leased_blocks_refuses_a_new_one_and_keeps_all():
    table, chain = table_of(3), Chain(3)
    put_all(table, chain)
    table.lease("a", chain.hashes, 30)
    with pytest.raises(NoFreeBlocks):
        table.put(Chain(1, seed=1).objects[0])
    assert all(hash in table for hash in chain.hashes)


def test_a_block_larger_than_the_table_is_refused():
    with pytest.raises(NoFreeBlocks):
        table_of(1).put(Chain(1, payload_bytes=8000).objects[0])


def test_an_absent_block_is_pinned_on_arrival():
    table, chain = table_of(3), Chain(2)
    table.lease("a", chain.hashes, 30)
    assert table.stats().num_expected == 2
    put_all(table, chain)
    assert table.stats().memory.leased_bytes == 2 * OBJECT_BYTES
    assert table.stats().num_expected == 0


def test_leases_may_not_hold_more_than_their_share_absent_blocks_included():
    table = table_of(10, max_leased=5)
    table.lease("a", Chain(3, seed=1).hashes, 30)
    before = table.stats()
    with pytest.raises(Overloaded):
        table.lease("b", Chain(3, seed=2).hashes, 30)
    with pytest.raises(Overloaded):
        table.lease("a", Chain(3, seed=2).hashes, 30)
    assert table.stats() == before
    table.lease("b", Chain(2, seed=2).hashes, 30)


def test_blocks_that_a_lease_holds_already_cost_nothing_more():
    table, chain = table_of(10, max_leased=5), Chain(5)
    table.lease("a", chain.hashes, 30)
    table.lease("b", chain.hashes, 30)
    assert table.stats().num_expected == 5


def test_a_leased_block_larger_than_expected_is_refused_rather_than_breaking_the_bound():
    table, chain = table_of(10, max_leased=1), Chain(1, payload_bytes=2000)
    table.lease("a", chain.hashes, 30)
    with pytest.raises(NoFreeBlocks):
        table.put(chain.objects[0])


def test_the_number_of_leases_is_bounded(monkeypatch):
    monkeypatch.setattr(leases, "MAX_LEASES", 2)
    table = table_of(1)
    table.lease("a", [], 30)
    table.lease("b", [], 30)
    table.lease("b", [], 30)
    with pytest.raises(Overloaded):
        table.lease("c", [], 30)


def test_a_second_lease_call_with_the_same_id_adds_its_blocks():
    table, chain = table_of(4), Chain(4)
    put_all(table, chain)
    table.lease("a", chain.hashes[:2], 30)
    table.lease("a", chain.hashes[2:], 30)
    assert table.stats().memory.leased_bytes == 4 * OBJECT_BYTES
    table.release(["a"])
    assert table.stats().memory.leased_bytes == 0


def test_a_block_under_two_leases_stays_until_both_are_released():
    table, chain = table_of(2), Chain(1)
    put_all(table, chain)
    table.lease("a", chain.hashes, 30)
    table.lease("b", chain.hashes, 30)
    table.release(["a"])
    assert table.stats().memory.leased_bytes == OBJECT_BYTES
    table.release(["b"])
    assert table.stats().memory.evictable_bytes == OBJECT_BYTES


def test_releasing_twice_frees_once():
    table, chain = table_of(2), Chain(1)
    put_all(table, chain)
    table.lease("a", chain.hashes, 30)
    table.lease("b", chain.hashes, 30)
    table.release(["a", "a"])
    table.release(["a", "never held"])
    assert table.stats().memory.leased_bytes == OBJECT_BYTES


def test_a_lease_ends_at_its_deadline_unless_it_is_renewed():
    clock = Clock()
    table, chain = table_of(2, clock=clock), Chain(1)
    put_all(table, chain)
    table.lease("a", chain.hashes, 10)
    clock.now_s = 9
    assert table.expire() == 0
    assert table.renew(["a", "b"], 10) == ["b"]
    clock.now_s = 18.9
    assert table.expire() == 0
    clock.now_s = 19
    assert table.expire() == 1
    assert table.stats().memory.evictable_bytes == OBJECT_BYTES
    assert table.renew(["a"], 10) == ["a"]


def test_ten_thousand_leases_are_renewed_at_once():
    clock = Clock()
    table = table_of(2, clock=clock)
    lease_ids = [str(number) for number in range(10_000)]
    for lease_id in lease_ids:
        table.lease(lease_id, Chain(1).hashes if lease_id == "0" else [], 10)
    clock.now_s = 9
    assert table.renew([*lease_ids, "unknown"], 10) == ["unknown"]
    clock.now_s = 18
    assert table.expire() == 0
    clock.now_s = 19
    assert table.expire() == 10_000
    assert table.stats().num_expected == 0


def test_a_released_chain_goes_leaf_first():
    evicted = []
    table, chain = table_of(4, evicted=evicted), Chain(4)
    put_all(table, chain)
    table.lease("a", reversed(chain.hashes), 30)
    table.release(["a"])
    evicted.clear()
    put_all(table, Chain(4, seed=1))
    assert evicted == list(reversed(chain.hashes))


def test_a_good_block_survives_a_report_and_an_unknown_one_is_no_error():
    table, chain = table_of(2), Chain(2)
    table.put(chain.objects[0])
    assert table.quarantine(chain.hashes[0]) is False
    assert table.quarantine(chain.hashes[1]) is False
    assert chain.hashes[0] in table


def test_a_bad_block_is_dropped_and_its_lease_waits_for_a_good_copy():
    table, chain = table_of(2), Chain(1)
    (good,) = chain.objects
    table.lease("a", chain.hashes, 30)
    table.put(dataclasses.replace(good, data=good.data[:-1] + b"\xff"))
    assert table.quarantine(good.hash) is True
    assert table.stats().num_expected == 1
    assert table.put(good) is True
    assert table.stats().memory.leased_bytes == OBJECT_BYTES
