"""The data path: raw frames in and out, one frame in memory for each stream.

Registered beside the protobuf service because protobuf `bytes` fields copy every payload twice. A
frame is built only when the reader has taken the one before, so a slow reader costs one frame and
gRPC's own window.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from flashmesh.errors import InvalidRequest
from flashmesh.hashing import HASH_BYTES, BlockHash
from flashmesh.kv_client import FRAME_BYTES
from flashmesh.objects import pack_missing
from flashmesh.services.kvstore.store import HITS, MISSES, Store
from flashmesh.v1 import kvstore_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

MAX_HASHES = 1 << 17


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
    """The `KvTransfer` handlers."""

    def __init__(self, store: Store, max_wait_s: float) -> None:
        self._store = store
        self._max_wait_s = max_wait_s

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
        self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.PutSummary:
        """Stores the objects of a stream of frames."""
        stored = known = 0
        async for frame in frames:
            for item in self._store.parse(frame):
                if self._store.put(item):
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
        with self._store.waiting(hashes) as arrivals:
            missing = dict.fromkeys(hashes)
            self._store.table.touch(hashes)
            deadline = asyncio.get_running_loop().time() + wait_s
            ready = hashes
            while True:
                for frame in self._frames(ready, missing):
                    yield frame
                if not missing or not wait_s or not (ready := await arrivals.next(deadline)):
                    break
        HITS.inc(len(hashes) - len(missing))
        MISSES.inc(len(missing))
        if missing:
            yield b"".join(map(pack_missing, missing))

    def _frames(
        self, ready: Sequence[BlockHash], missing: dict[BlockHash, None]
    ) -> Iterator[bytes]:
        """Yields frames of the missing blocks that are here when their turn comes."""
        batch: list[bytes | memoryview] = []
        size = 0
        for hash in ready:
            # Sent before, in the frames of an earlier round: it may arrive again after an eviction.
            item = self._store.table.get(hash) if hash in missing else None
            if item is None:
                continue
            if batch and size + len(item.data) > FRAME_BYTES:
                yield b"".join(batch)
                batch, size = [], 0
            batch.append(item.data)
            size += len(item.data)
            del missing[hash]
        if batch:
            yield b"".join(batch)
