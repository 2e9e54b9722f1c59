"""Calls that an operator makes to a kvstore node: how it stands, what it holds, check it, drop it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmesh.kv_client import CONTROL_TIMEOUT_S, TRANSFER_TIMEOUT_S, node_errors
from flashmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from flashmesh.rpc import Channels


class KvAdmin:
    """The way to the nodes, for tools.

    Errors are those of `flashmesh.errors`: WorkerLost where no node answers, Unauthenticated, InvalidRequest.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def stat(self, address: str) -> kvstore_pb2.StatResponse:
        """Returns counts and bytes by tier."""
        with node_errors(address):
            response: kvstore_pb2.StatResponse = await self._stub(address).Stat(
                kvstore_pb2.StatRequest(),
                metadata=self._channels.metadata(),
                timeout=CONTROL_TIMEOUT_S,
            )
            return response

    async def blocks(self, address: str) -> AsyncGenerator[kvstore_pb2.BlockInfo, None]:
        """Yields every block, oldest first; the node sends the next page when this one was taken."""
        with node_errors(address):
            call = self._stub(address).List(
                kvstore_pb2.ListRequest(), metadata=self._channels.metadata()
            )
            try:
                async for page in call:
                    for block in page.blocks:
                        yield block
            finally:
                call.cancel()

    async def verify(
        self, address: str, bytes_per_s: int = 0
    ) -> AsyncGenerator[kvstore_pb2.VerifyProgress, None]:
        """Has the node check everything it holds and drop what is bad; leaving early ends the check.

        Args:
            address: the node.
            bytes_per_s: bound on what it reads; 0 leaves it to the node.
        """
        with node_errors(address):
            call = self._stub(address).Verify(
                kvstore_pb2.VerifyRequest(bytes_per_s=bytes_per_s),
                metadata=self._channels.metadata(),
            )
            try:
                async for progress in call:
                    yield progress
            finally:
                call.cancel()

    async def evict(
        self, address: str, hashes: Sequence[bytes] = (), *, everything: bool = False
    ) -> kvstore_pb2.EvictResponse:
        """Drops the named blocks, or everything; leased blocks stay."""
        with node_errors(address):
            response: kvstore_pb2.EvictResponse = await self._stub(address).Evict(
                kvstore_pb2.EvictRequest(hashes=hashes, all=everything),
                metadata=self._channels.metadata(),
                timeout=TRANSFER_TIMEOUT_S,
            )
            return response

    def _stub(self, address: str) -> kvstore_pb2_grpc.KvStoreStub:
        return kvstore_pb2_grpc.KvStoreStub(self._channels.get(address))
