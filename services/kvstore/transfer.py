"""The data path: raw frames in and out, one batch in memory for each stream.

Registered beside the protobuf service because protobuf `bytes` fields copy every payload twice. A batch is put together
only when the reader has taken the one before, so a slow reader costs one batch and gRPC's own window. A reader on this
host is sent references into the arena instead of bytes, where it can read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import prometheus_client

from flashmesh.errors import InvalidRequest
from flashmesh.hashing import HASH_BYTES, BlockHash
from flashmesh.kv_client import FRAME_BYTES, frames
from flashmesh.objects import pack_missing
from flashmesh.services.kvstore.store import HITS, MISSES, Store
from flashmesh.shared_memory import pack_references
from flashmesh.v1 import kvstore_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from flashmesh.objects import StoredObject
    from flashmesh.services.kvstore.arena import Arena

MAX_HASHES = 1 << 17
SHARED_BATCH_BYTES = 8 * 1024 * 1024
"""Blocks of one frame of references: a run of 64 in one message, and not so many that they grow old."""

SECONDS = prometheus_client.Histogram(
    "flashmesh_kv_transfer_seconds",
    "Time of a Get that finds or misses at once, of a Get that waits, and of a Put.",
    ["kind"],
    buckets=(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
)
SENT = prometheus_client.Counter(
    "flashmesh_kv_sent_bytes_total", "Bytes of blocks that readers were given, by way.", ["way"]
)
RECEIVED = prometheus_client.Counter("flashmesh_kv_received_bytes_total", "Bytes put.")


def check_hashes(hashes: Sequence[bytes]) -> list[BlockHash]:
    """Refuses names that no block can have.

    Raises:
        InvalidRequest: says which one.
    """
    if len(hashes) > MAX_HASHES:
        raise InvalidRequest(f"{len(hashes)} hashes are more than {MAX_HASHES}")
    for place, hash in enumerate(hashes):
        if len(hash) != HASH_BYTES:
            raise InvalidRequest(f"hash {place} has {len(hash)} bytes, not {HASH_BYTES}")
    return [BlockHash(hash) for hash in hashes]


class Transfer:
    """The `KvTransfer` handlers.

    Args:
        store: whose blocks.
        max_wait_s: longest wait of a Get.
        arena: where the store keeps them, if other processes can read it.
    """

    def __init__(self, store: Store, max_wait_s: float, arena: Arena | None = None) -> None:
        self._store = store
        self._max_wait_s = max_wait_s
        self.arena = arena

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the handlers."""
        handlers = {
            "Put": grpc.stream_unary_rpc_method_handler(
                self.put, response_serializer=kvstore_pb2.PutSummary.SerializeToString
            ),
            "Get": grpc.unary_stream_rpc_method_handler(
                self.get, request_deserializer=kvstore_pb2.GetRequest.FromString
            ),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("flashmesh.v1.KvTransfer", handlers),)
        )

    async def put(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.PutSummary:
        """Stores the objects of a stream of frames."""
        stored = known = 0
        with SECONDS.labels("put").time():
            async for frame in requests:
                RECEIVED.inc(len(frame))
                for item in self._store.parse(frame):
                    if self._store.put(item, same_request=stored + known > 0):
                        stored += 1
                    else:
                        known += 1
        return kvstore_pb2.PutSummary(num_stored=stored, num_known=known)

    async def get(
        self, request: kvstore_pb2.GetRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Sends what is there, then what arrives in time, then says what is missing."""
        hashes = list(dict.fromkeys(check_hashes(request.hashes)))
        wait_s = min(request.wait_ms / 1000, self._max_wait_s)
        started = time.monotonic()
        arena = self.arena if request.shared_memory else None
        if arena is not None and request.shared_memory_token != arena.offer.token:
            yield arena.offer.pack()
            arena = None
        reason = "timeout" if wait_s else "absent"
        with self._store.waiting(hashes if wait_s else []) as arrivals:
            missing = dict.fromkeys(hashes)
            self._store.table.touch(hashes)
            deadline = asyncio.get_running_loop().time() + wait_s
            ready = hashes
            while True:
                # What was sent may arrive again, after an eviction.
                wanted = [hash for hash in ready if hash in missing]
                max_bytes = FRAME_BYTES if arena is None else SHARED_BATCH_BYTES
                async with contextlib.aclosing(self._store.read(wanted, max_bytes)) as batches:
                    async for batch in batches:
                        for item in batch:
                            del missing[item.hash]
                        for frame in _frames(batch, arena):
                            yield frame
                if not missing or not wait_s or not (ready := await arrivals.next(deadline)):
                    break
        HITS.inc(len(hashes) - len(missing))
        MISSES.labels(reason).inc(len(missing))
        if missing:
            yield b"".join(map(pack_missing, missing))
        SECONDS.labels("waiting_get" if wait_s else "get").observe(time.monotonic() - started)


def _frames(batch: Sequence[StoredObject], arena: Arena | None) -> Iterator[bytes]:
    """Yields one frame of references to what is in the arena, and frames of the rest."""
    references, rest = [], []
    for item in batch:
        offset = arena.offset(item.data) if arena is not None else None
        if offset is None:
            rest.append(item.data)
        else:
            references.append((item.hash, offset, len(item.data)))
    if references:
        SENT.labels("shared").inc(sum(size for _, _, size in references))
        yield pack_references(references)
    SENT.labels("stream").inc(sum(map(len, rest)))
    yield from frames(rest)
