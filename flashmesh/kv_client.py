"""Calls to kvstore nodes: raw frames for payloads, protobuf for control, common errors."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from flashmesh.errors import BlockNotFound, CorruptBlock, FlashmeshError, from_rpc_error
from flashmesh.objects import KIND_MISSING, StoredObject, parse_objects, verify_is
from flashmesh.rpc import Channels, remaining_s
from flashmesh.types import BLOCK_TOKENS
from flashmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from flashmesh.hashing import BlockHash
    from flashmesh.runs import Place

FRAME_BYTES = 1024 * 1024
"""Frames grow up to this: it amortises a message and still bounds the memory of a stream."""

CONTROL_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 60.0


class BlockMissing(BlockNotFound):
    """A block did not come; `index` is its place in the chain."""

    def __init__(self, index: int, node_id: str) -> None:
        super().__init__(f"block {index} of the prompt is not on kvstore node {node_id}")
        self.index = index


class KvClient:
    """The way to the nodes."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def get(
        self, address: str, hashes: Sequence[BlockHash], wait_s: float
    ) -> AsyncGenerator[StoredObject, None]:
        """Yields the named objects in any order; those that did not come in time have kind MISSING.

        Payloads are not verified here: the reader knows what it asked for.
        """
        request = kvstore_pb2.GetRequest(hashes=hashes, wait_ms=int(wait_s * 1000))
        method = self._channels.get(address).unary_stream(
            "/flashmesh.v1.KvTransfer/Get",
            request_serializer=kvstore_pb2.GetRequest.SerializeToString,
        )
        with _errors(address):
            call = method(
                request,
                metadata=self._channels.metadata(),
                timeout=_timeout_s(wait_s + TRANSFER_TIMEOUT_S),
            )
            try:
                async for frame in call:
                    for item in parse_objects(frame):
                        yield item
            finally:
                call.cancel()

    async def put(self, address: str, objects: Sequence[StoredObject]) -> kvstore_pb2.PutSummary:
        """Stores objects; the first writer of a hash wins.

        Raises:
            NoFreeBlocks: the node is full of leased blocks.
        """
        method = self._channels.get(address).stream_unary(
            "/flashmesh.v1.KvTransfer/Put",
            response_deserializer=kvstore_pb2.PutSummary.FromString,
        )
        with _errors(address):
            summary: kvstore_pb2.PutSummary = await method(
                frames([item.data for item in objects]),
                metadata=self._channels.metadata(),
                timeout=_timeout_s(TRANSFER_TIMEOUT_S),
            )
            return summary

    async def have(self, address: str, hashes: Sequence[BlockHash]) -> list[bool]:
        """Says which blocks are readable now."""
        response = await self._control(address, "Have", kvstore_pb2.HaveRequest(hashes=hashes))
        return list(response.present)

    async def lease(
        self, address: str, lease_id: str, hashes: Sequence[BlockHash], ttl_s: float
    ) -> None:
        """Keeps blocks from eviction, those too that are not stored yet.

        Raises:
            Overloaded: the node holds as many leased bytes as it may.
        """
        request = kvstore_pb2.LeaseRequest(
            lease_id=lease_id, hashes=hashes, ttl_ms=int(ttl_s * 1000)
        )
        await self._control(address, "Lease", request)

    async def renew(self, address: str, lease_ids: Sequence[str], ttl_s: float) -> list[str]:
        """Extends leases; returns those that the node does not hold."""
        request = kvstore_pb2.RenewRequest(lease_ids=lease_ids, ttl_ms=int(ttl_s * 1000))
        response = await self._control(address, "Renew", request)
        return list(response.unknown_lease_ids)

    async def release(self, address: str, lease_ids: Sequence[str]) -> None:
        """Gives leases back; unknown ones are no error."""
        await self._control(address, "Release", kvstore_pb2.ReleaseRequest(lease_ids=lease_ids))

    async def report(self, address: str, hash: BlockHash, reason: str) -> bool:
        """Tells a node that its block came out bad; says whether it dropped its copy."""
        request = kvstore_pb2.ReportRequest(hash=hash, reason=reason[:200])
        return bool((await self._control(address, "Report", request)).quarantined)

    async def _control(self, address: str, method: str, request: object) -> Any:
        stub = kvstore_pb2_grpc.KvStoreStub(self._channels.get(address))
        with _errors(address):
            return await getattr(stub, method)(
                request,
                metadata=self._channels.metadata(),
                timeout=_timeout_s(CONTROL_TIMEOUT_S),
            )


async def fetch_blocks(
    client: KvClient,
    places: Sequence[Place],
    hashes: Sequence[BlockHash],
    tokens: Sequence[int],
    layout_id: bytes,
    first: int,
    stop: int,
    wait_s: float,
) -> AsyncGenerator[tuple[int, StoredObject], None]:
    """Yields verified blocks [first, stop) of a chain, run by run, in any order within a run.

    Args:
        client: the way to the nodes.
        places: where the chain's blocks live.
        hashes, tokens: of the whole chain.
        layout_id: that the payloads must have.
        first, stop: block indices.
        wait_s: how long to wait in all for blocks that are not stored yet.

    Raises:
        BlockMissing: names the first block that did not come.
        CorruptBlock: a block is not what it claims; it was reported to its node.
    """
    index_of = {hash: index for index, hash in enumerate(hashes)}
    clock = asyncio.get_running_loop().time
    deadline = clock() + wait_s
    for place in places:
        begin, end = max(first, place.first_block), min(stop, place.first_block + place.num_blocks)
        if begin >= end:
            continue
        missing = []
        left_s = max(0.0, deadline - clock())
        async with contextlib.aclosing(
            client.get(place.address, hashes[begin:end], left_s)
        ) as items:
            async for item in items:
                index = index_of.get(item.hash)
                if index is None:
                    raise CorruptBlock(f"kvstore {place.address} sent a block nobody asked for")
                if item.kind == KIND_MISSING:
                    missing.append(index)
                    continue
                block = tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                try:
                    verify_is(
                        item, hash=hashes[index], layout_id=layout_id, index=index, tokens=block
                    )
                except CorruptBlock as error:
                    with contextlib.suppress(FlashmeshError):
                        await client.report(place.address, hashes[index], str(error))
                    raise
                yield index, item
        if missing:
            raise BlockMissing(min(missing), place.node_id)


def frames(objects: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    """Joins objects into frames of up to `FRAME_BYTES`; an object is never split."""
    batch: list[bytes | memoryview] = []
    size = 0
    for item in objects:
        if batch and size + len(item) > FRAME_BYTES:
            yield b"".join(batch)
            batch, size = [], 0
        batch.append(item)
        size += len(item)
    if batch:
        yield b"".join(batch)


@contextlib.contextmanager
def _errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, f"kvstore {address}") from error


def _timeout_s(limit_s: float) -> float:
    left = remaining_s()
    return limit_s if left is None else min(limit_s, left)
