"""The disk tier under the memory tier: written behind, verified, compacted, found again."""

import asyncio
import contextlib
import threading

import pytest
from prometheus_client import REGISTRY
from support.faulty_files import FaultyFiles
from support.kv import Chain, until

from flashmesh.errors import ConfigError, NoFreeBlocks, Overloaded
from flashmesh.lifecycle import background
from flashmesh.services.kvstore.config import KvstoreConfig
from flashmesh.services.kvstore.segments import Files
from flashmesh.services.kvstore.store import Store

HANG_LIMIT_S = 30.0
OBJECT_BYTES = 1120
SEGMENT_BLOCKS = 8
DISK_BYTES = 16 * SEGMENT_BLOCKS * OBJECT_BYTES
LIVE_BLOCKS = 12 * SEGMENT_BLOCKS  # three quarters


@contextlib.asynccontextmanager
async def running_store(folder, *, memory_blocks=4, files=None, **settings):
    """A store whose earlier segments are found when the body begins."""
    config = KvstoreConfig(
        memory_bytes=memory_blocks * OBJECT_BYTES,
        **{"disk_path": str(folder), "disk_bytes": DISK_BYTES, "max_leased_share": 1.0} | settings,
    )
    async with contextlib.aclosing(Store(config, files=files)) as store, background(store.run()):
        await until(lambda: not store.disk.num_unscanned)
        yield store


async def put(store, objects):
    for item in objects:
        store.put(item)
    await store.flush()


async def read(store, hashes):
    return {
        item.hash: bytes(item.data) async for batch in store.read(hashes, 1 << 20) for item in batch
    }


async def scatter(store, chain):
    """Puts one block of a chain into every segment, among others that are not used again."""
    for seed, item in enumerate(chain.objects, 1000):
        await put(store, [item, *Chain(SEGMENT_BLOCKS - 1, seed=seed).objects])


async def flood(store, chain=None):
    """Puts more than the disk holds while `chain` stays in use."""
    for seed in range(2000, 2040):
        await put(store, Chain(10, seed=seed).objects)
        if chain is not None:
            store.table.touch(chain.hashes)


def contents(*chains):
    return {item.hash: item.data for chain in chains for item in chain.objects}


def file_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def metric(name, **labels):
    return REGISTRY.get_sample_value(f"flashmesh_kv_disk_{name}", labels) or 0


def where(store, hashes):
    """In memory, on disk, both or neither: "M", "D", "MD" or "-"."""
    found = []
    for hash in hashes:
        block = store.table.find(hash)
        found.append("M" * block.in_memory + "D" * block.on_disk if block else "-")
    return found


async def test_what_memory_has_no_room_for_comes_back_from_disk(tmp_path):
    chain = Chain(12)
    async with running_store(tmp_path) as store:
        await put(store, chain.objects)
        assert sorted(where(store, chain.hashes)) == ["D"] * 8 + ["MD"] * 4
        assert await read(store, chain.hashes) == contents(chain)


async def test_a_block_that_is_read_from_disk_is_kept_in_memory(tmp_path):
    old, new = Chain(2), Chain(4, seed=1)
    async with running_store(tmp_path) as store:
        await put(store, [*old.objects, *new.objects])
        assert where(store, old.hashes) == ["D", "D"]
        store.table.touch(old.hashes)
        await read(store, old.hashes)
        assert where(store, old.hashes) == ["MD", "MD"]


async def test_batches_keep_to_the_order_and_the_bound_across_tiers(tmp_path):
    chain = Chain(7)
    async with running_store(tmp_path) as store:
        await put(store, chain.objects)
        batches = [batch async for batch in store.read(reversed(chain.hashes), 3 * OBJECT_BYTES)]
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [item.hash for batch in batches for item in batch] == chain.hashes[::-1]


async def test_a_block_that_waits_for_the_disk_is_served_while_memory_has_lost_it(tmp_path):
    chain = Chain(12)
    async with running_store(tmp_path) as store:
        for item in chain.objects:  # nothing is written before the loop runs
            store.put(item)
        assert sorted(where(store, chain.hashes)) == ["D"] * 8 + ["MD"] * 4
        objects = [item async for batch in store.read(chain.hashes, 1 << 20) for item in batch]
        assert [item.hash for item in objects] == chain.hashes


async def test_beyond_the_bound_of_the_queue_blocks_stay_in_memory_only(tmp_path):
    chain, before = Chain(4), metric("skipped_total", reason="queue")
    async with running_store(tmp_path, disk_queue_bytes=2 * OBJECT_BYTES) as store:
        await put(store, chain.objects)
        assert where(store, chain.hashes) == ["MD", "MD", "M", "M"]
        await put(store, Chain(1, seed=1).objects)
        assert store.table.stats().disk.num_blocks == 3
    assert metric("skipped_total", reason="queue") == before + 2


async def test_an_object_larger_than_a_segment_stays_in_memory_only(tmp_path):
    chain = Chain(1, payload_bytes=2 * SEGMENT_BLOCKS * OBJECT_BYTES)
    async with running_store(tmp_path, memory_blocks=100) as store:
        await put(store, chain.objects)
        assert where(store, chain.hashes) == ["M"]


async def test_a_restart_finds_every_block_and_tells_the_index(tmp_path):
    chain = Chain(20)
    async with running_store(tmp_path) as store:
        await put(store, chain.objects)
    async with running_store(tmp_path) as store:
        assert where(store, chain.hashes) == ["D"] * 20
        assert sorted(store.inventory()) == sorted(chain.hashes)
        assert await read(store, chain.hashes) == contents(chain)


async def test_blocks_found_after_a_restart_end_the_wait_for_them(tmp_path):
    chain = Chain(2)
    async with running_store(tmp_path) as store:
        await put(store, chain.objects)
    config = KvstoreConfig(disk_path=str(tmp_path), disk_bytes=DISK_BYTES)
    async with contextlib.aclosing(Store(config)) as store:
        with store.waiting(chain.hashes) as arrivals:
            assert await read(store, chain.hashes) == {}
            async with background(store.run()):
                await until(lambda: not store.disk.num_unscanned)
                assert sorted(await arrivals.next(0)) == sorted(chain.hashes)


async def test_a_put_during_the_scan_wins_over_what_the_scan_finds(tmp_path):
    old, new = Chain(1), Chain(1, payload_bytes=400)
    async with running_store(tmp_path) as store:
        await put(store, old.objects)
    config = KvstoreConfig(disk_path=str(tmp_path), disk_bytes=DISK_BYTES)
    async with contextlib.aclosing(Store(config)) as store:
        assert store.put(new.objects[0])
        async with background(store.run()):
            await until(lambda: not store.disk.num_unscanned)
            await store.flush()
            assert await read(store, new.hashes) == contents(new)
    async with running_store(tmp_path) as store:
        assert await read(store, new.hashes) == contents(new), "the newer copy counts from now on"


async def test_bad_records_are_not_found_after_a_restart_and_are_counted(tmp_path):
    chain = Chain(3)
    async with running_store(tmp_path) as store:
        await put(store, chain.objects)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[OBJECT_BYTES + 500] ^= 1
    path.write_bytes(data)
    before = metric("damaged_total")
    async with running_store(tmp_path) as store:
        assert where(store, chain.hashes) == ["D", "-", "D"]
        assert store.put(chain.objects[1])
    assert metric("damaged_total") == before + 1


async def test_where_a_restart_finds_more_than_may_live_the_ends_of_prompts_go(tmp_path):
    starts, deep = [Chain(1, seed=seed) for seed in range(1, 21)], Chain(LIVE_BLOCKS - 16)
    async with running_store(tmp_path) as store:
        for chain in (*starts, deep):
            await put(store, chain.objects)
        assert where(store, starts[3].hashes) == ["-"], "evicted, and still in the files"
    async with running_store(tmp_path) as store:
        assert {where(store, chain.hashes)[0] for chain in starts} == {"D"}
        assert where(store, deep.hashes) == ["D"] * (LIVE_BLOCKS - 20) + ["-"] * 4


async def test_a_bit_flipped_on_disk_is_a_miss_and_a_new_put_is_taken(tmp_path):
    chain, flood = Chain(3), Chain(4, seed=1)
    async with running_store(tmp_path) as store:
        await put(store, [*chain.objects, *flood.objects])
        (path,) = tmp_path.iterdir()
        data = bytearray(path.read_bytes())
        data[OBJECT_BYTES + 500] ^= 1
        path.write_bytes(data)
        assert sorted(await read(store, chain.hashes)) == sorted([chain.hashes[0], chain.hashes[2]])
        assert where(store, [chain.hashes[1]]) == ["-"]
        await put(store, chain.objects)
        assert await read(store, chain.hashes) == contents(chain)


async def test_a_report_checks_the_copy_on_disk_too(tmp_path):
    chain = Chain(2)
    async with running_store(tmp_path) as store:
        await put(store, chain.objects)
        (path,) = tmp_path.iterdir()
        data = bytearray(path.read_bytes())
        data[500] ^= 1
        path.write_bytes(data)
        assert [await store.quarantine(hash) for hash in chain.hashes] == [True, False]
        assert where(store, chain.hashes) == ["M", "MD"]
        assert not await store.quarantine(Chain(1, seed=1).hashes[0])


async def test_the_files_never_exceed_their_bound_and_the_lowest_priority_goes(tmp_path):
    chains = [Chain(10, seed=seed) for seed in range(40)]
    async with running_store(tmp_path) as store:
        for chain in chains:
            await put(store, chain.objects)
            store.table.touch(chains[0].hashes)
            assert file_bytes(tmp_path) == store.disk.file_bytes <= DISK_BYTES
        stats = store.table.stats().disk
        assert stats.num_blocks == LIVE_BLOCKS
        assert stats.capacity_bytes == LIVE_BLOCKS * OBJECT_BYTES
        assert await read(store, chains[0].hashes) == contents(chains[0])
        assert await read(store, chains[-1].hashes) == contents(chains[-1])
        assert await read(store, chains[1].hashes) == {}


async def test_live_records_are_moved_when_their_segment_goes(tmp_path):
    kept, before = Chain(12), metric("compacted_total")
    async with running_store(tmp_path) as store:
        await scatter(store, kept)
        oldest = store.table.find(kept.hashes[0]).segment
        await flood(store, kept)
        assert store.table.find(kept.hashes[0]).segment is not oldest
        assert await read(store, kept.hashes) == contents(kept)
    assert metric("compacted_total") > before


async def test_compaction_drops_what_it_cannot_read(tmp_path):
    kept = Chain(12)
    async with running_store(tmp_path) as store:
        await scatter(store, kept)
        for path in tmp_path.iterdir():
            path.write_bytes(b"")
        await flood(store, kept)
        assert where(store, kept.hashes[:8]) == ["-"] * 8


class GatedFiles(Files):
    """Holds readers back where they are about to open a file."""

    def __init__(self):
        self.gate = threading.Event()
        self.num_held = 0

    def open(self, path, flags):
        if threading.current_thread().name.startswith("kv-read"):
            self.num_held += 1
            assert self.gate.wait(HANG_LIMIT_S)
        return super().open(path, flags)


async def test_a_record_that_moves_while_it_is_read_is_read_where_it_went(tmp_path):
    files, kept = GatedFiles(), Chain(12)
    async with running_store(tmp_path, files=files) as store:
        await scatter(store, kept)
        oldest = store.table.find(kept.hashes[0]).segment
        reading = asyncio.create_task(read(store, kept.hashes[:1]))
        await until(lambda: files.num_held)
        await flood(store, kept)
        assert store.table.find(kept.hashes[0]).segment is not oldest
        files.gate.set()
        assert await reading == {kept.hashes[0]: kept.objects[0].data}


async def test_leased_blocks_on_disk_stay_and_move(tmp_path):
    kept = Chain(12)
    async with running_store(tmp_path) as store:
        await scatter(store, kept)
        assert where(store, kept.hashes[:8]) == ["D"] * 8
        store.table.lease("a", kept.hashes, 30)
        assert store.table.stats().disk.leased_bytes == 12 * OBJECT_BYTES
        await read(store, kept.hashes)
        with pytest.raises(NoFreeBlocks):  # leases fill the memory
            await flood(store)
        store.table.release(["a"])
        store.table.lease("a", kept.hashes[:3], 30)
        await flood(store)
        assert where(store, kept.hashes) == ["MD"] * 3 + ["-"] * 9


async def test_leases_may_not_hold_more_of_the_disk_than_their_share(tmp_path):
    chain = Chain(60)
    async with running_store(tmp_path, max_leased_share=0.5) as store:
        await put(store, chain.objects)
        on_disk = [hash for hash in chain.hashes if where(store, [hash]) == ["D"]]
        store.table.lease("a", on_disk[:48], 30)
        with pytest.raises(Overloaded):
            store.table.lease("b", on_disk[48:], 30)


async def test_a_node_full_of_leased_blocks_refuses_a_put_and_keeps_all(tmp_path):
    chain = Chain(4)
    async with running_store(tmp_path) as store:
        await put(store, chain.objects)
        store.table.lease("a", chain.hashes, 30)
        with pytest.raises(NoFreeBlocks):
            store.put(Chain(1, seed=1).objects[0])
        assert where(store, chain.hashes) == ["MD"] * 4


async def test_a_full_disk_costs_its_blocks_only_and_is_used_again_when_space_returns(tmp_path):
    files = FaultyFiles()
    first, second, third = (Chain(2, seed=seed) for seed in range(3))
    async with running_store(tmp_path, files=files) as store:
        await put(store, first.objects)
        files.free_bytes = OBJECT_BYTES // 2
        await put(store, second.objects)
        assert metric("failing") == 1
        assert where(store, second.hashes) == ["M", "M"]
        files.free_bytes = None
        await put(store, third.objects)
        assert metric("failing") == 0
        assert await read(store, first.hashes) == contents(first)
        assert "D" not in "".join(where(store, second.hashes))
    async with running_store(tmp_path) as store:
        assert await read(store, third.hashes) == contents(third)
        assert where(store, first.hashes + second.hashes) == ["D", "D", "-", "-"]


async def test_a_disk_that_is_broken_leaves_a_node_of_memory(tmp_path):
    files = FaultyFiles()
    old, new = Chain(2), Chain(4, seed=1)
    async with running_store(tmp_path, files=files) as store:
        await put(store, old.objects)
        files.broken = {"open", "read", "write", "truncate", "remove"}
        await put(store, new.objects)
        assert where(store, old.hashes + new.hashes) == ["D"] * 2 + ["M"] * 4
        assert await read(store, old.hashes + new.hashes) == contents(new)
        assert where(store, old.hashes) == ["-", "-"]
        files.broken = set()
        await put(store, old.objects)
        assert where(store, old.hashes) == ["MD", "MD"]


@pytest.mark.parametrize("operation", ["remove", "write"])
async def test_compaction_that_fails_loses_nothing_and_goes_on_later(tmp_path, operation):
    files = FaultyFiles()
    kept = Chain(3)
    async with running_store(tmp_path, files=files) as store:
        await scatter(store, kept)
        store.table.lease("a", kept.hashes, 30)
        for broken in (set(), {operation}, set()):
            files.broken = broken
            await flood(store)
            assert metric("failing") == bool(broken)
            assert file_bytes(tmp_path) <= DISK_BYTES
    async with running_store(tmp_path) as store:
        assert await read(store, kept.hashes) == contents(kept)


async def test_a_smaller_bound_is_obeyed_before_anything_is_written(tmp_path):
    chain = Chain(90)
    async with running_store(tmp_path) as store:
        await put(store, chain.objects)
    async with running_store(tmp_path, disk_bytes=DISK_BYTES // 2) as store:
        await until(lambda: store.disk.file_bytes <= DISK_BYTES // 2)
        assert file_bytes(tmp_path) == store.disk.file_bytes
        assert store.table.stats().disk.num_blocks == LIVE_BLOCKS // 2


async def test_two_nodes_cannot_share_a_folder(tmp_path):
    async with running_store(tmp_path):
        with pytest.raises(ConfigError, match="each needs its own"):
            Store(KvstoreConfig(disk_path=str(tmp_path)))
