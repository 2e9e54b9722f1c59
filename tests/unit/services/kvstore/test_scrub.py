"""The walks over all blocks: what goes meanwhile is left out, and the scrub keeps to its rate."""

import contextlib

import pytest
from support.kv import Chain

from flashmesh.services.kvstore import scrub as scrub_module
from flashmesh.services.kvstore import service as service_module
from flashmesh.services.kvstore.config import KvstoreConfig
from flashmesh.services.kvstore.scrub import pause_s, scrub
from flashmesh.services.kvstore.service import KvStoreServicer
from flashmesh.services.kvstore.store import Store
from flashmesh.v1 import kvstore_pb2

CHAIN = Chain(6)
OBJECT_BYTES = 1120
CONFIG = KvstoreConfig(memory_bytes=100_000)


@pytest.fixture
def store():
    store = Store(CONFIG)
    for item in CHAIN.objects:
        store.put(item)
    return store


async def test_a_block_that_goes_during_the_scrub_is_left_out(store, monkeypatch):
    monkeypatch.setattr(scrub_module, "STEP_BYTES", 2 * OBJECT_BYTES)
    async with contextlib.aclosing(scrub(store, 1 << 40)) as steps:
        first = await anext(steps)
        assert (first.num_checked, first.num_bytes) == (2, 2 * OBJECT_BYTES)
        store.table.evict(CHAIN.hashes[2:5])
        last = [step async for step in steps][-1]
    assert (last.num_checked, last.num_total, last.num_bytes) == (6, 6, 3 * OBJECT_BYTES)
    assert not last.bad_hashes


async def test_a_block_that_goes_during_the_listing_is_left_out(store, monkeypatch):
    monkeypatch.setattr(service_module, "PAGE_BLOCKS", 2)
    service = KvStoreServicer(store, "n0", bytes(16), CONFIG)
    async with contextlib.aclosing(service.List(kvstore_pb2.ListRequest(), None)) as pages:
        names = [block.hash for block in (await anext(pages)).blocks]
        store.table.evict(CHAIN.hashes[2:5])
        names += [block.hash async for page in pages for block in page.blocks]
    assert names == [*CHAIN.hashes[:2], CHAIN.hashes[5]]


@pytest.mark.parametrize(
    ("num_bytes", "elapsed_s", "pause"), [(400, 1.0, 3.0), (100, 1.0, 0.0), (50, 1.0, 0.0)]
)
def test_the_pause_brings_the_rate_down_to_what_is_allowed(num_bytes, elapsed_s, pause):
    assert pause_s(num_bytes, elapsed_s, bytes_per_s=100) == pause
