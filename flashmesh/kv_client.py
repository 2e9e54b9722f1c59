"""Calls to kvstore nodes: raw frames for payloads, protobuf for control, common errors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import prometheus_client

from flashmesh.errors import CorruptBlock, FlashmeshError, WorkerLost, from_rpc_error
from flashmesh.objects import StoredObject, parse_objects, verify
from flashmesh.rpc import Channels, within_deadline
from flashmesh.shared_memory import OFFER_MAGIC, REFERENCES_MAGIC, SharedMemories
from flashmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from flashmesh.hashing import BlockHash

FRAME_BYTES = 1024 * 1024
"""Frames grow up to this: it amortises a message and still bounds the memory of a stream."""

CONTROL_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 60.0

READ = prometheus_client.Counter(
    "flashmesh_kv_client_blocks_total", "Blocks that came intact, by way.", ["way"]
)
DAMAGED = prometheus_client.Counter(
    "flashmesh_kv_client_damaged_total", "Blocks that came damaged, by way.", ["way"]
)


class KvClient:
    """The way to the nodes.

    Args:
        channels: where calls go out.
        shared_memory: read the memory of nodes on this host where that is possible.
    """

    def __init__(self, channels: Channels, *, shared_memory: bool = True) -> None:
        self._channels = channels
        self._memories = SharedMemories() if shared_memory else None

    async def get(
        self, address: str, hashes: Sequence[BlockHash], wait_s: float
    ) -> AsyncGenerator[StoredObject, None]:
        """Yields intact copies of objects in any order; one that did not come has kind MISSING.

        Whether it is the block that the caller means, only the caller knows (see `fetch_blocks`).

        Raises:
            CorruptBlock: what came over the wire is damaged; the block was reported to its node.
            WorkerLost: the node cannot be reached, or left something unanswered.
        """
        outstanding = dict.fromkeys(hashes)
        memories = self._memories
        while True:
            with self._get(address, list(outstanding), wait_s, memories) as call:
                async for frame in call:
                    for item in await self._objects(address, frame, outstanding, memories):
                        yield item
            if not outstanding:
                return
            if memories is None:
                raise WorkerLost(f"kvstore {address} left {len(outstanding)} blocks unanswered")
            # Ranges of shared memory that were filled anew between the node's answer and our copy.
            DAMAGED.labels("shared").inc(len(outstanding))
            memories, wait_s = None, 0.0

    @contextlib.contextmanager
    def _get(
        self,
        address: str,
        hashes: Sequence[BlockHash],
        wait_s: float,
        memories: SharedMemories | None,
    ) -> Iterator[grpc.aio.UnaryStreamCall]:
        """Opens a call; leaving cancels what has not ended."""
        request = kvstore_pb2.GetRequest(hashes=hashes, wait_ms=int(wait_s * 1000))
        if memories is not None:
            memories.announce(address, request)
        method = self._channels.get(address).unary_stream(
            "/flashmesh.v1.KvTransfer/Get",
            request_serializer=kvstore_pb2.GetRequest.SerializeToString,
        )
        with node_errors(address):
            call = method(
                request,
                metadata=self._channels.metadata(),
                timeout=within_deadline(wait_s + TRANSFER_TIMEOUT_S),
            )
            try:
                yield call
            finally:
                call.cancel()

    async def _objects(
        self,
        address: str,
        frame: bytes,
        outstanding: dict[BlockHash, None],
        memories: SharedMemories | None,
    ) -> list[StoredObject]:
        """Returns the intact objects that a frame brings; they are no longer outstanding."""
        if memories is not None and frame.startswith(OFFER_MAGIC):
            memories.open(address, frame)
            return []
        if memories is not None and frame.startswith(REFERENCES_MAGIC):
            copies = memories.copy(address, frame)
            items = [item for item in copies if item.hash in outstanding]
            for item in items:
                del outstanding[item.hash]
            READ.labels("shared").inc(len(items))
            return items
        items = await self._intact(address, frame, outstanding)
        READ.labels("stream").inc(len(items))
        return items

    async def _intact(
        self, address: str, frame: bytes, outstanding: dict[BlockHash, None]
    ) -> list[StoredObject]:
        """Parses and verifies the objects of a frame; reports the one that is damaged."""
        items = []
        named = None
        try:
            for item in parse_objects(frame):
                if item.hash not in outstanding:
                    raise CorruptBlock("a block came that was not asked for")
                named = item.hash
                verify(item)
                del outstanding[named]
                items.append(item)
        except CorruptBlock as error:
            DAMAGED.labels("stream").inc()
            # Damage may hide the name; blocks come in the order of the request.
            suspect = named if named in outstanding else next(iter(outstanding), None)
            if suspect is not None:
                with contextlib.suppress(FlashmeshError):
                    await self.report(address, suspect, str(error))
            raise CorruptBlock(f"kvstore {address}: {error}") from error
        return items

    async def put(self, address: str, objects: Sequence[StoredObject]) -> kvstore_pb2.PutSummary:
        """Stores objects; the first writer of a hash wins.

        Raises:
            NoFreeBlocks: the node is full of leased blocks.
        """
        method = self._channels.get(address).stream_unary(
            "/flashmesh.v1.KvTransfer/Put",
            response_deserializer=kvstore_pb2.PutSummary.FromString,
        )
        with node_errors(address):
            summary: kvstore_pb2.PutSummary = await method(
                frames([item.data for item in objects]),
                metadata=self._channels.metadata(),
                timeout=within_deadline(TRANSFER_TIMEOUT_S),
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
        with node_errors(address):
            return await getattr(stub, method)(
                request,
                metadata=self._channels.metadata(),
                timeout=within_deadline(CONTROL_TIMEOUT_S),
            )


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
def node_errors(address: str) -> Iterator[None]:
    """Turns a failed call to a node into the error that it stands for."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, f"kvstore {address}") from error
