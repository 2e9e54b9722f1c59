"""Reading a kvstore node's memory from another process of its host.

A node keeps its blocks in one anonymous memory file. Instead of a block's bytes, Get can name the range of the
file that holds them; the reader copies the range and verifies its copy like any other. Nothing is locked or
acknowledged: a range that the node has filled anew meanwhile fails verification, and that block is then read over
gRPC.

The file has no name in any file system. A reader opens it through /proc, which the kernel grants to the node's own
user inside one process namespace. It goes with the last process that has it open, however that one ends, and a reader
lets go of it when the node ends.

Two kinds of frames travel in a Get beside those of objects; numbers are little-endian:

    offer       "FMSO", u32 process id, u32 file descriptor, u64 bytes of the file, 16 bytes of token
    references  "FMSR", then for each block: 16 bytes of hash, u64 offset, u32 bytes
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmesh.errors import CorruptBlock
from flashmesh.hashing import BlockHash
from flashmesh.objects import StoredObject, parse_objects, verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flashmesh.v1 import kvstore_pb2

log = logging.getLogger(__name__)

FILE_NAME = "flashmesh-kvstore"
TOKEN_BYTES = 16
"""The file begins with this many random bytes, by which a reader knows that it opened the right one."""

OFFER_MAGIC = b"FMSO"
REFERENCES_MAGIC = b"FMSR"

_OFFER = struct.Struct("<4sIIQ16s")
_REFERENCE = struct.Struct("<16sQI")


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a node's memory file is, and how to know it."""

    pid: int
    fd: int
    num_bytes: int
    token: bytes

    def pack(self) -> bytes:
        """Returns the frame."""
        return _OFFER.pack(OFFER_MAGIC, self.pid, self.fd, self.num_bytes, self.token)

    @classmethod
    def parse(cls, frame: bytes) -> Offer:
        """Reads a frame that begins with `OFFER_MAGIC`.

        Raises:
            CorruptBlock: it has another length than an offer.
        """
        if len(frame) != _OFFER.size:
            raise CorruptBlock(f"an offer has {_OFFER.size} bytes, not {len(frame)}")
        _, pid, fd, num_bytes, token = _OFFER.unpack(frame)
        return cls(pid, fd, num_bytes, token)


def pack_references(references: Iterable[tuple[BlockHash, int, int]]) -> bytes:
    """Returns the frame that names (hash, offset, bytes) of blocks."""
    return REFERENCES_MAGIC + b"".join(_REFERENCE.pack(*item) for item in references)


def parse_references(frame: bytes) -> Iterator[tuple[BlockHash, int, int]]:
    """Yields (hash, offset, bytes) out of a frame that begins with `REFERENCES_MAGIC`.

    Raises:
        CorruptBlock: the frame is not a whole number of references.
    """
    records = memoryview(frame)[len(REFERENCES_MAGIC) :]
    if len(records) % _REFERENCE.size:
        raise CorruptBlock(f"{len(records)} bytes are not whole references of {_REFERENCE.size}")
    for hash, offset, num_bytes in _REFERENCE.iter_unpack(records):
        yield BlockHash(hash), offset, num_bytes


class SharedMemory:
    """A node's memory file, open for reading.

    Args:
        offer: the node's.

    Attributes:
        token: the node's.
        process_fd: becomes readable when the node ends.

    Raises:
        OSError: it cannot be opened from here, or is another file.
    """

    def __init__(self, offer: Offer) -> None:
        path = f"/proc/{offer.pid}/fd/{offer.fd}"
        # In another process namespace this may be a pipe or a device, which opening would disturb.
        if not os.readlink(path).startswith(f"/memfd:{FILE_NAME}"):
            raise FileNotFoundError(f"{path} is not a node's memory")
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != offer.num_bytes:
                raise FileNotFoundError(f"{path} has {size} bytes, not {offer.num_bytes}")
            # The node has sealed the size, so no access can fall behind the end of the file.
            memory = mmap.mmap(file.fileno(), offer.num_bytes, prot=mmap.PROT_READ)
        self._memory = memoryview(memory)
        if self._memory[:TOKEN_BYTES] != offer.token:
            raise FileNotFoundError(f"{path} belongs to another node")
        self.token = offer.token
        self.process_fd = os.pidfd_open(offer.pid)
        weakref.finalize(self, os.close, self.process_fd)

    def copy(self, hash: BlockHash, offset: int, num_bytes: int) -> StoredObject | None:
        """Returns a verified copy of a block; None if the range does not hold it (any more)."""
        try:
            (item,) = parse_objects(bytes(self._memory[offset : offset + num_bytes]))
            verify(item)
        except (CorruptBlock, ValueError):  # ValueError: several objects, or none
            return None
        return item if item.hash == hash else None


class SharedMemories:
    """The memories that this process reads, by their node's address; used inside one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, SharedMemory] = {}
        self._refused: set[str] = set()

    def announce(self, address: str, request: kvstore_pb2.GetRequest) -> None:
        """Says in a request what this process can read."""
        if address not in self._refused:
            request.shared_memory = True
            if memory := self._open.get(address):
                request.shared_memory_token = memory.token

    def open(self, address: str, frame: bytes) -> None:
        """Opens what a node offers, for the next Gets; a node that cannot be read is left alone."""
        try:
            memory = SharedMemory(Offer.parse(frame))
        except OSError as error:
            self._refused.add(address)
            log.info("no shared memory", extra={"address": address, "error": str(error)})
            return
        self._open[address] = memory
        # Else the blocks of a node that is gone would stay in memory for as long as this process.
        loop = asyncio.get_running_loop()
        loop.add_reader(memory.process_fd, self._close, loop, address, memory)

    def copy(self, address: str, frame: bytes) -> list[StoredObject]:
        """Returns verified copies of the blocks that a frame refers to and that are still there."""
        memory = self._open.get(address)
        if memory is None:  # the node ended since
            return []
        copies = (memory.copy(*reference) for reference in parse_references(frame))
        return [item for item in copies if item is not None]

    def _close(self, loop: asyncio.AbstractEventLoop, address: str, memory: SharedMemory) -> None:
        loop.remove_reader(memory.process_fd)
        if self._open.get(address) is memory:
            del self._open[address]
