"""Between client and node: damage on the wire, many nodes at once, and streams that are cut short."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from prometheus_client import REGISTRY
from support.kv import Chain, Node, running_node, until

from flashmesh.errors import BlockNotFound, CorruptBlock, WorkerLost
from flashmesh.kv_client import KvClient
from flashmesh.kv_fetch import MAX_NODES, MAX_QUEUED, fetch_blocks
from flashmesh.objects import HEADER_BYTES
from flashmesh.rpc import SERVER_OPTIONS, Channels
from flashmesh.v1 import kvstore_pb2_grpc

HANG_LIMIT_S = 30.0
OBJECT_BYTES = 1120


class Wire(kvstore_pb2_grpc.KvStoreServicer):
    """Stands between client and node: holds Gets back while it is not open, and hands on what `change` returns.

    Attributes:
        address: where it listens.
        reports: hashes that the client reported.
        num_asked, num_open: Gets that came, and those that have not ended.
        num_frames: that the client took.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.address = ""
        self.change = lambda frame: frame
        self.open = asyncio.Event()
        self.open.set()
        self.reports = []
        self.num_asked = self.num_open = self.num_frames = 0

    async def get(self, request, context):
        self.num_asked += 1
        self.num_open += 1
        try:
            await self.open.wait()
            method = self._node.channel.unary_stream("/flashmesh.v1.KvTransfer/Get")
            async for frame in method(request):
                if changed := self.change(frame):
                    yield changed
                    self.num_frames += 1
        finally:
            self.num_open -= 1

    async def Report(self, request, context):
        self.reports.append(request.hash)
        return await kvstore_pb2_grpc.KvStoreStub(self._node.channel).Report(request)


@contextlib.asynccontextmanager
async def wire_to(node):
    wire = Wire(node)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {"Get": grpc.unary_stream_rpc_method_handler(wire.get)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("flashmesh.v1.KvTransfer", handlers),)
    )
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(wire, server)
    wire.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield wire
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def wires_to(node, number):
    """As many wires to one node: for a client they are nodes of their own."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(wire_to(node)) for _ in range(number)]


@pytest.fixture
async def client():
    async with contextlib.aclosing(Channels()) as channels:
        yield KvClient(channels, shared_memory=False)


@pytest.fixture
async def node():
    async with running_node() as node:
        yield node


def flip(place):
    """Returns what flips one bit of a frame."""

    def change(frame):
        data = bytearray(frame)
        data[place] ^= 1
        return bytes(data)

    return change


def damaged():
    return REGISTRY.get_sample_value("flashmesh_kv_client_damaged_total", {"way": "stream"}) or 0


def fetch(client, chain, wires):
    """Reads a chain whose blocks are spread evenly over the wires, in order."""
    return fetch_blocks(
        client,
        chain.places(*wires),
        chain.hashes,
        chain.tokens,
        chain.objects[0].layout_id,
        0,
        len(chain.hashes),
        0.0,
    )


@pytest.mark.parametrize(
    "place",
    [0, 4, 6, 10, 30, 100, 110, HEADER_BYTES, OBJECT_BYTES - 1],
    ids=["magic", "version", "kind", "layout", "hash", "size", "checksum", "payload", "end"],
)
async def test_a_flipped_bit_is_a_reported_miss_and_never_other_bytes(node, client, place):
    chain = Chain(3)
    await node.put(chain.objects)
    async with wire_to(node) as wire:
        wire.change = flip(OBJECT_BYTES + place)  # in the second block of the frame
        before = damaged()
        with pytest.raises(CorruptBlock):
            [item async for item in client.get(wire.address, chain.hashes, 0)]
        assert damaged() == before + 1
        assert len(wire.reports) == 1
        assert wire.reports[0] in chain.hashes[:2]
        wire.change = lambda frame: frame
        items = {item.hash: item async for item in client.get(wire.address, chain.hashes, 0)}
    assert all(await node.client.have(node.address, chain.hashes)), "the node's own copy is good"
    assert all(bytes(items[item.hash].data) == item.data for item in chain.objects)


async def test_the_block_that_was_damaged_is_the_one_reported(node, client):
    chain = Chain(3)
    await node.put(chain.objects)
    async with wire_to(node) as wire:
        wire.change = flip(2 * OBJECT_BYTES - 1)
        with pytest.raises(CorruptBlock):
            [item async for item in client.get(wire.address, [bytes(16), *chain.hashes], 0)]
    assert wire.reports == [chain.hashes[1]]


async def test_a_block_that_nobody_asked_for_is_refused(node, client):
    chain, other = Chain(1), Chain(1, seed=1)
    await node.put(chain.objects)
    async with wire_to(node) as wire:
        for frame in (other.objects[0].data, chain.objects[0].data * 2):
            wire.change = lambda _, frame=frame: frame
            with pytest.raises(CorruptBlock, match="not asked for"):
                [item async for item in client.get(wire.address, chain.hashes, 0)]


async def test_a_stream_that_ends_too_early_is_a_lost_node(node, client):
    chain = Chain(2)
    await node.put(chain.objects)
    async with wire_to(node) as wire:
        wire.change = lambda frame: b""
        with pytest.raises(WorkerLost, match="2 blocks"):
            [item async for item in client.get(wire.address, chain.hashes, 0)]


async def test_a_get_of_nothing_brings_nothing(node, client):
    assert [item async for item in client.get(node.address, [], 0)] == []
    assert (await client.put(node.address, [])).num_stored == 0


async def test_a_payload_of_no_bytes_comes_back(node, client):
    chain = Chain(2, payload_bytes=0)
    await client.put(node.address, chain.objects)
    items = [item async for item in client.get(node.address, chain.hashes, 0)]
    assert [bytes(item.payload) for item in items] == [b"", b""]


async def test_a_block_larger_than_a_frame_comes_back(node, client):
    chain = Chain(3, payload_bytes=5_000_000)
    await client.put(node.address, chain.objects)
    items = {item.hash: item async for item in client.get(node.address, chain.hashes, 0)}
    assert all(items[item.hash].payload == item.payload for item in chain.objects)


async def test_nodes_are_read_at_once_a_bounded_number_at_a_time(node, client):
    number = MAX_NODES + 3
    chain = Chain(number)
    await node.put(chain.objects)
    async with wires_to(node, number) as wires, asyncio.timeout(HANG_LIMIT_S):
        for wire in wires:
            wire.open.clear()
        asked = lambda: sum(wire.num_asked for wire in wires)
        task = asyncio.create_task(collect(fetch(client, chain, wires)))
        await until(lambda: asked() == MAX_NODES)
        await client.have(node.address, [])  # time for one more, if it were to come
        assert asked() == MAX_NODES
        for wire in reversed(wires):
            wire.open.set()
        found = await task
    assert found == {index: bytes(item.payload) for index, item in enumerate(chain.objects)}


async def collect(blocks):
    return {index: bytes(item.payload) async for index, item in blocks}


async def test_the_first_missing_block_of_all_nodes_is_named_when_the_others_have_come(
    node, client
):
    chain = Chain(6)
    await node.put([chain.objects[index] for index in (0, 1, 3, 4)])
    found = []
    async with wires_to(node, 3) as wires:
        wires[0].open.clear()
        with pytest.raises(BlockNotFound) as caught:
            async for index, _ in fetch(client, chain, wires):
                found.append(index)
                if len(found) == 2:  # the nodes with the missing blocks are done first
                    wires[0].open.set()
    assert caught.value.index == 2
    assert sorted(found) == [0, 1, 3, 4]


async def test_the_failure_of_one_node_ends_all_reading(node, client):
    chain = Chain(3)
    await node.put(chain.objects)
    async with wires_to(node, 3) as wires:
        wires[0].open.clear()
        wires[1].change = lambda frame: b""
        with pytest.raises(WorkerLost):
            await collect(fetch(client, chain, wires))
        await until(lambda: not any(wire.num_open for wire in wires))


async def test_a_reader_that_leaves_ends_all_reading(node, client):
    chain = Chain(4)
    await node.put(chain.objects)
    async with wires_to(node, 2) as wires:
        wires[0].open.clear()
        async with contextlib.aclosing(fetch(client, chain, wires)) as blocks:
            assert (await anext(blocks))[0] == 2
        await until(lambda: not any(wire.num_open for wire in wires))


async def test_a_slow_reader_holds_all_nodes_back(client):
    """What is on its way is bounded by the queue and by what gRPC holds of each stream, not by the request."""
    chain = Chain(120, payload_bytes=1_000_000)
    async with running_node(memory_bytes=200_000_000) as node, wires_to(node, 2) as wires:
        await node.put(chain.objects)
        blocks = fetch(client, chain, wires)
        async with contextlib.aclosing(blocks):
            await anext(blocks)
            for _ in range(50):  # rounds in which a greedy client would have taken all
                await client.have(node.address, [])
            taken = sum(wire.num_frames for wire in wires)
            assert taken < MAX_QUEUED + 60
            rest = [index async for index, _ in blocks]
        assert len(rest) == 119
