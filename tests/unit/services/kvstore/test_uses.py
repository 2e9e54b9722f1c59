"""What a use does to priorities, and what is remembered of blocks that have gone."""

import pytest
from support.kv import Chain

from flashmesh.services.kvstore import uses
from flashmesh.services.kvstore.blocks import BlockTable

OBJECT_BYTES = 1120


def table_of(num_blocks, gone=None):
    return BlockTable(
        memory_bytes=num_blocks * OBJECT_BYTES,
        max_leased_share=1.0,
        clock=lambda: 0.0,
        on_gone=lambda block: gone.append(block.hash) if gone is not None else None,
    )


def put_all(table, *chains):
    for chain in chains:
        for item in chain.objects:
            table.put(item)


@pytest.fixture
def by_frequency(monkeypatch):
    """A policy under which an ancestor may be worth less than its descendants."""
    monkeypatch.setattr(uses, "priority", lambda usage, floor: float(usage.num_uses))


@pytest.fixture
def seen(monkeypatch):
    """Everything that the policy is asked."""
    calls = []

    def record(usage, floor):
        calls.append((usage, floor))
        return float(usage.last_use)

    monkeypatch.setattr(uses, "priority", record)
    return calls


def test_a_use_counts_once_for_every_block_of_the_request(seen):
    table, chain = table_of(4), Chain(2)
    put_all(table, chain)
    seen.clear()
    table.touch([chain.hashes[1], chain.hashes[0], Chain(1, seed=1).hashes[0]])
    usages = {usage.position: usage for usage, _ in seen}
    assert usages.keys() == {0, 128}
    assert {usage.num_uses for usage in usages.values()} == {2}
    assert {usage.last_use for usage in usages.values()} == {3}
    assert usages[0].previous_use == 1


def test_a_lease_that_ends_prolongs_the_use_and_is_none_itself(seen):
    table, chain = table_of(4), Chain(1)
    put_all(table, chain)
    table.lease("a", chain.hashes, 30)
    put_all(table, Chain(2, seed=1))
    seen.clear()
    table.release(["a"])
    ((usage, _),) = seen
    assert (usage.num_uses, usage.last_use, usage.previous_use) == (1, 4, 0)


def test_the_policy_is_told_the_priority_of_the_latest_eviction(seen):
    table, old, new = table_of(2), Chain(2, seed=1), Chain(2, seed=2)
    put_all(table, old)
    table.touch(old.hashes)
    put_all(table, new)
    assert [floor for _, floor in seen] == [0.0, 0.0, 0.0, 0.0, 3.0, 3.0]


def test_what_has_gone_is_remembered_when_it_comes_back(seen):
    table, chain = table_of(1), Chain(1)
    put_all(table, chain)
    table.touch(chain.hashes)
    put_all(table, Chain(1, seed=1))
    assert chain.hashes[0] not in table
    put_all(table, chain)
    assert seen[-1][0].num_uses == 3


def test_what_went_longest_ago_is_forgotten(seen, monkeypatch):
    monkeypatch.setattr(uses, "MIN_GHOSTS", 3)
    table, chain = table_of(1), Chain(1)
    put_all(table, chain, *(Chain(1, seed=seed) for seed in range(1, 6)), chain)
    assert seen[-1][0].num_uses == 1


def test_an_ancestor_is_never_below_its_descendants(by_frequency):
    gone = []
    table, chain = table_of(4, gone), Chain(3)
    put_all(table, chain)
    for _ in range(3):
        table.touch([chain.hashes[2]])
    put_all(table, *(Chain(1, seed=seed) for seed in range(1, 8)))
    assert not set(gone) & set(chain.hashes)


def test_an_ancestor_that_comes_later_takes_its_place_above_its_descendants(by_frequency):
    gone = []
    table, chain = table_of(4, gone), Chain(3)
    for index in (2, 0):
        table.put(chain.objects[index])
    for _ in range(3):
        table.touch([chain.hashes[2]])
    table.put(chain.objects[1])
    put_all(table, *(Chain(1, seed=seed) for seed in range(1, 8)))
    assert not set(gone) & set(chain.hashes)


def test_a_use_does_not_lower_a_priority(monkeypatch):
    gone = []
    table, chain = table_of(2, gone), Chain(1)
    put_all(table, chain)
    monkeypatch.setattr(uses, "priority", lambda usage, floor: 0.0)
    table.touch(chain.hashes)
    put_all(table, Chain(1, seed=1), Chain(1, seed=2))
    assert gone == Chain(1, seed=1).hashes


def test_what_was_leased_a_thousand_times_is_still_evicted_in_order():
    gone = []
    table, chain = table_of(4, gone), Chain(4)
    put_all(table, chain)
    for number in range(1000):
        table.lease(str(number), chain.hashes[number % 4 :], 30)
        table.release([str(number)])
    assert len(table._memory._heap) < 100
    put_all(table, Chain(4, seed=1))
    assert gone == chain.hashes[::-1]
