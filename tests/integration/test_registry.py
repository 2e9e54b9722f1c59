"""The registry against a real server: records, outages, wipes."""

import asyncio
import contextlib
import dataclasses
import os
import signal

import pytest
import redis.exceptions
from support.kv import until

from flashmesh import redis_client
from flashmesh.errors import Incompatible
from flashmesh.lifecycle import background
from flashmesh.redis_client import connect
from flashmesh.redis_server import private_redis
from flashmesh.registry import (
    TRUST_EMPTY_AFTER_S,
    Heartbeat,
    Registry,
    RegistryView,
    WorkerRecord,
)


def record(worker_id="decode-0", epoch="a" * 32, role="decode"):
    return WorkerRecord(id=worker_id, epoch=epoch, role=role, address="127.0.0.1:1")


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


class Outage:
    """A client whose server is away while `down`."""

    def __init__(self, client):
        self._client = client
        self.down = False

    def __getattr__(self, name):
        if self.down:
            raise redis.exceptions.ConnectionError("the server is away")
        return getattr(self._client, name)


@pytest.fixture
def outage(client):
    return Outage(client)


@pytest.fixture
def registry(outage):
    return Registry(outage, "test")


@pytest.fixture
def clock():
    return Clock()


async def trusted_view(registry, clock):
    view = RegistryView(registry, clock)
    await view.poll()
    clock.now_s += TRUST_EMPTY_AFTER_S
    await view.poll()
    return view


async def test_records_are_listed_by_id_until_they_are_removed(registry):
    one, two = record("decode-1"), record("decode-0")
    await registry.heartbeat(one, 10)
    await registry.heartbeat(two, 10)
    assert await registry.list() == [two, one]
    await registry.remove(two)
    assert await registry.list() == [one]


async def test_meshes_with_other_names_do_not_see_each_other(registry, client):
    await registry.heartbeat(record(), 10)
    assert await Registry(client, "other").list() == []


async def test_a_worker_cannot_remove_its_successor(registry):
    old, new = record(epoch="a" * 32), record(epoch="b" * 32)
    await registry.heartbeat(old, 10)
    await registry.heartbeat(new, 10)
    await registry.remove(old)
    assert await registry.list() == [new]


async def test_a_suspended_process_does_not_take_the_place_of_its_successor(registry, caplog):
    beats = []
    old, new = record(epoch="a" * 32), record(epoch="b" * 32)
    heartbeat = Heartbeat(registry, old, lambda: beats.append(1) or {}, interval_s=0.001, ttl_s=10)
    async with background(heartbeat.run()):
        await until(lambda: len(beats) > 2)
        await registry.heartbeat(new, 10)
        await until(lambda: "another process has taken this name" in caplog.messages)
        assert await registry.list() == [new]
        await heartbeat.leave()
    assert await registry.list() == [new]


async def test_a_renewal_writes_what_has_expired_or_cannot_be_read(registry, client):
    for lost in (None, "{}", "no JSON"):
        if lost is None:
            await client.delete("{flashmesh:test}:worker:decode-0")
        else:
            await client.set("{flashmesh:test}:worker:decode-0", lost)
        assert await registry.heartbeat(record(), 10, is_renewal=True)
        assert await registry.list() == [record()]


async def test_an_expired_record_is_gone_and_its_id_is_cleaned_up(registry, client):
    await registry.heartbeat(record("decode-0"), 10)
    await registry.heartbeat(record("decode-1"), 10)
    await client.delete("{flashmesh:test}:worker:decode-0")  # as its expiry would
    assert await registry.list() == [record("decode-1")]
    assert await client.smembers("{flashmesh:test}:workers") == {b"decode-1"}
    assert 0 < await client.pttl("{flashmesh:test}:worker:decode-1") <= 10_000


async def test_a_process_that_names_blocks_otherwise_is_refused(registry):
    await registry.check_scheme(record())
    await registry.heartbeat(record("kvstore-0"), 10)
    await registry.check_scheme(record())
    with pytest.raises(Incompatible, match=r"kvstore-0 .*flashmesh-blocks-1.*another"):
        await registry.check_scheme(dataclasses.replace(record(), scheme="another"))


async def test_one_unreadable_record_does_not_hide_the_others(registry, client):
    await registry.heartbeat(record("decode-0"), 10)
    await registry.heartbeat(record("decode-1"), 10)
    await client.set("{flashmesh:test}:worker:decode-0", "{}")
    assert await registry.list() == [record("decode-1")]


async def test_a_heartbeat_carries_the_load_of_the_moment(registry):
    loads = iter(range(1000))
    heartbeat = Heartbeat(
        registry, record(), lambda: {"n": next(loads)}, interval_s=0.001, ttl_s=10
    )
    async with background(heartbeat.run()):
        while (await registry.list())[:1] == [] or (await registry.list())[0].load["n"] < 3:
            await asyncio.sleep(0)
        await heartbeat.leave()
    assert await registry.list() == []


async def test_a_heartbeat_outlives_an_outage_logs_it_once_and_registers_again(
    registry, outage, caplog
):
    beats = []
    heartbeat = Heartbeat(
        registry, record(), lambda: beats.append(1) or {}, interval_s=0.001, ttl_s=10
    )
    outage.down = True
    async with background(heartbeat.run()):
        await until(lambda: len(beats) > 5)
        outage.down = False
        while not await registry.list():
            await asyncio.sleep(0)
        await heartbeat.leave()
    assert [line.message for line in caplog.records] == ["registry unreachable"]


async def test_a_worker_that_leaves_during_a_renewal_is_not_written_back(registry):
    heartbeat = Heartbeat(registry, record(), dict, interval_s=0.001, ttl_s=10)
    write = registry.heartbeat

    async def leave_first(*args, **kwargs):
        await heartbeat.leave()
        return await write(*args, **kwargs)

    registry.heartbeat = leave_first
    await heartbeat.run()
    assert await registry.list() == []


async def test_a_view_follows_the_registry(registry, clock):
    view = await trusted_view(registry, clock)
    assert view.workers("decode") == []
    await registry.heartbeat(record(), 10)
    await registry.heartbeat(record("kvstore-0", role="kvstore"), 10)
    await view.poll()
    clock.now_s += TRUST_EMPTY_AFTER_S
    assert view.workers("decode") == [record()]
    await registry.remove(record())
    await view.poll()
    assert view.workers("decode") == []
    assert [worker.id for worker in view.workers("kvstore")] == ["kvstore-0"]


async def test_whoever_waits_is_woken_by_the_poll_that_brings_the_worker(registry, clock):
    view = RegistryView(registry, clock)
    waiting = asyncio.create_task(view.wait_for(lambda: bool(view.workers("decode"))))
    await view.poll()
    assert not waiting.done()
    await registry.heartbeat(record(), 10)
    await view.poll()
    await waiting


async def test_a_view_keeps_the_last_known_workers_while_redis_is_away(
    registry, outage, clock, caplog
):
    await registry.heartbeat(record(), 10)
    view = await trusted_view(registry, clock)
    outage.down = True
    for _ in range(3):
        clock.now_s += 60
        await view.poll()
    assert view.workers("decode") == [record()]
    assert [line.message for line in caplog.records] == ["registry unreachable"]


@pytest.mark.parametrize("outage_was_seen", [True, False])
async def test_after_redis_lost_everything_an_emptier_table_is_believed_only_later(
    registry, outage, client, clock, outage_was_seen
):
    await registry.heartbeat(record("decode-0"), 10)
    await registry.heartbeat(record("decode-1"), 10)
    view = await trusted_view(registry, clock)
    if outage_was_seen:
        outage.down = True
        await view.poll()
        outage.down = False
    await client.flushall()
    back = dataclasses.replace(record("decode-1"), load={"n": 1})
    await registry.heartbeat(back, 10)
    await view.poll()
    assert view.workers("decode") == [record("decode-0"), back]
    clock.now_s += TRUST_EMPTY_AFTER_S - 0.1
    await view.poll()
    assert view.workers("decode") == [record("decode-0"), back]
    clock.now_s += 0.1
    await view.poll()
    assert view.workers("decode") == [back]


async def test_a_loop_that_writes_all_the_time_can_be_cancelled_at_any_moment(registry):
    """Python 3.11's wait_for swallows a cancellation now and then; nothing here may go through it."""
    async with asyncio.timeout(60):
        for turns in range(200):
            heartbeat = Heartbeat(registry, record(), dict, interval_s=0, ttl_s=10)
            async with background(heartbeat.run()):
                for _ in range(turns % 40):
                    await asyncio.sleep(0)


async def test_a_redis_that_hangs_counts_as_an_outage(tmp_path):
    with private_redis(tmp_path) as url:
        async with contextlib.aclosing(connect(url)) as client:
            pid = (await client.info("server"))["process_id"]
            os.kill(pid, signal.SIGSTOP)
            try:
                with pytest.raises(redis.exceptions.TimeoutError):
                    async with redis_client.call_limit(0.05):
                        await client.ping()
            finally:
                os.kill(pid, signal.SIGCONT)
            async with redis_client.call_limit():
                assert await client.ping()
