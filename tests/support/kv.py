"""Chains of blocks and kvstore nodes for tests: nodes run in this process, on port 0."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING

import grpc.aio

from flashmesh import hashing
from flashmesh.index import IndexWriter
from flashmesh.kv_client import KvClient
from flashmesh.lifecycle import background
from flashmesh.objects import pack_block
from flashmesh.rpc import SERVER_OPTIONS, Channels, Interceptor
from flashmesh.runs import RUN_BLOCKS, Place
from flashmesh.services.kvstore.arena import open_arena
from flashmesh.services.kvstore.config import KvstoreConfig
from flashmesh.services.kvstore.service import KvStoreServicer
from flashmesh.services.kvstore.store import Store
from flashmesh.services.kvstore.transfer import Transfer
from flashmesh.types import BLOCK_TOKENS
from flashmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import redis.asyncio

    from flashmesh.objects import StoredObject

LAYOUT = bytes(range(16))


class Chain:
    """Consecutive blocks of one prompt, with payloads that tell them apart."""

    def __init__(self, num_blocks: int, *, seed: int = 0, payload_bytes: int = 1000) -> None:
        self.tokens = [seed * 1_000_003 + i for i in range(num_blocks * BLOCK_TOKENS)]
        root = hashing.root_hash(
            fingerprint=bytes(32), layout_id=LAYOUT, gemm_quantized=False, tenant_salt=b""
        )
        self.hashes = list(hashing.chain(root, self.tokens))
        self.objects = [self._pack(root, index, payload_bytes) for index in range(num_blocks)]

    def _pack(self, root: bytes, index: int, payload_bytes: int) -> StoredObject:
        return pack_block(
            layout_id=LAYOUT,
            hash=self.hashes[index],
            parent=self.hashes[index - 1] if index else root,
            run=self.hashes[index // RUN_BLOCKS * RUN_BLOCKS],
            index=index,
            tokens=self.tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS],
            payload=index.to_bytes(4, "little") * (payload_bytes // 4),
        )

    def places(self, *nodes: Node) -> list[Place]:
        """Cuts the chain evenly over nodes, in order."""
        share = -(-len(self.hashes) // len(nodes))
        return [
            Place(node_id=f"n{i}", address=node.address, first_block=i * share, num_blocks=share)
            for i, node in enumerate(nodes)
        ]


class Node:
    """A kvstore node that serves."""

    def __init__(
        self,
        store: Store,
        transfer: Transfer,
        epoch: bytes,
        address: str,
        channels: Channels,
    ) -> None:
        self.store = store
        self.transfer = transfer
        self.epoch = epoch
        self.address = address
        self.channel = channels.get(address)
        self.client = KvClient(channels)

    async def stat(self) -> kvstore_pb2.StatResponse:
        return await kvstore_pb2_grpc.KvStoreStub(self.channel).Stat(kvstore_pb2.StatRequest())

    async def get(self, hashes, wait_s: float = 0.0) -> dict[bytes, StoredObject]:
        """Everything that a Get sends, missing ones too, by hash."""
        return {item.hash: item async for item in self.client.get(self.address, hashes, wait_s)}

    async def put(self, objects) -> kvstore_pb2.PutSummary:
        return await self.client.put(self.address, objects)

    async def put_frames(self, *frames: bytes) -> kvstore_pb2.PutSummary:
        """Sends frames as they are."""
        method = self.channel.stream_unary(
            "/flashmesh.v1.KvTransfer/Put",
            response_deserializer=kvstore_pb2.PutSummary.FromString,
        )
        return await method(iter(frames))


@contextlib.asynccontextmanager
async def running_node(
    redis: redis.asyncio.Redis | None = None, mesh: str = "test", **config
) -> AsyncIterator[Node]:
    """Runs a node; with a Redis it publishes what it stores."""
    settings = KvstoreConfig(**config)
    arena = open_arena(settings.memory_bytes)
    store = Store(settings, arena.keep if arena else bytes)
    epoch = secrets.token_bytes(16)
    server = grpc.aio.server(interceptors=[Interceptor()], options=SERVER_OPTIONS)
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(
        KvStoreServicer(store, "n0", epoch, settings), server
    )
    transfer = Transfer(store, settings.max_wait_s, arena)
    transfer.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(contextlib.aclosing(store))
        await stack.enter_async_context(background(store.run()))
        channels = await stack.enter_async_context(contextlib.aclosing(Channels()))
        stack.push_async_callback(server.stop, 0)
        if redis is not None:
            store.index = IndexWriter(redis, mesh, epoch, store.inventory)
            await stack.enter_async_context(background(store.index.run()))
        yield Node(store, transfer, epoch, f"127.0.0.1:{port}", channels)


async def until(condition):
    """Lets the loop run until a condition holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)
