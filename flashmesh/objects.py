"""The stored object: what a kvstore keeps and what travels in a transfer frame.

A fixed header and a payload. The header says which block the payload claims to be (hash, parent,
position, a fingerprint of its own tokens) and carries a checksum over both, computed once by the
writer and verified by every reader on its own copy. All numbers are little-endian.

    offset  bytes  field
         0      4  magic "FMKV"
         4      2  version, 1
         6      2  kind: 0 missing (a reply, no payload), 1 block
         8     16  layout id
        24     16  hash
        40     16  parent hash (the first 16 bytes of the root for the first block)
        56     16  hash of the first block of its run of 64, the unit of placement
        72      8  position of the first token
        80     16  fingerprint of the block's own tokens
        96      8  payload bytes
       104     16  checksum: xxh3-128 over bytes [0, 104) and the payload
       120         payload
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from flashmesh.errors import CorruptBlock
from flashmesh.hashing import HASH_BYTES, BlockHash, token_fingerprint
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAGIC = b"FMKV"
VERSION = 1
KIND_MISSING = 0
KIND_BLOCK = 1

_FIELDS = struct.Struct("<4sHH16s16s16s16sQ16sQ")
_CHECKSUM = struct.Struct("16s")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A parsed object; `data` is header and payload together, as stored and as sent."""

    kind: int
    layout_id: bytes
    hash: BlockHash
    parent: bytes
    run: BlockHash
    position: int
    fingerprint: bytes
    checksum: bytes
    data: bytes | memoryview = field(repr=False)

    def held_in(self, data: bytes | memoryview) -> StoredObject:
        """Returns the same object over a copy of its bytes."""
        return StoredObject(
            self.kind,
            self.layout_id,
            self.hash,
            self.parent,
            self.run,
            self.position,
            self.fingerprint,
            self.checksum,
            data,
        )

    @property
    def payload(self) -> memoryview:
        """The payload, not copied."""
        return memoryview(self.data)[HEADER_BYTES:]


def pack_block(
    *,
    layout_id: bytes,
    hash: BlockHash,
    parent: bytes,
    run: BlockHash,
    index: int,
    tokens: Sequence[int],
    payload: bytes,
) -> StoredObject:
    """Makes the object of block `index`, holding the rows of `tokens`."""
    fingerprint = token_fingerprint(tokens)
    position = index * BLOCK_TOKENS
    parent = parent[:HASH_BYTES]
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        KIND_BLOCK,
        layout_id,
        hash,
        parent,
        run,
        position,
        fingerprint,
        len(payload),
    )
    checksum = xxhash.xxh3_128(fields)
    checksum.update(payload)
    digest = checksum.digest()
    data = b"".join((fields, digest, payload))
    return StoredObject(
        KIND_BLOCK, layout_id, hash, parent, run, position, fingerprint, digest, data
    )


def pack_missing(hash: BlockHash) -> bytes:
    """Makes the reply for a block that is not stored."""
    fields = _FIELDS.pack(
        MAGIC, VERSION, KIND_MISSING, bytes(16), hash, bytes(16), bytes(16), 0, bytes(16), 0
    )
    return fields + xxhash.xxh3_128(fields).digest()


def object_bytes(header: bytes | memoryview) -> int:
    """Returns the length of the object that begins with this header, which it claims.

    Raises:
        CorruptBlock: no object begins like this.
    """
    if len(header) < HEADER_BYTES:
        raise CorruptBlock(f"{len(header)} bytes are too few for an object header")
    magic, version, kind, *_, size = _FIELDS.unpack_from(header)
    if magic != MAGIC or version != VERSION or kind not in (KIND_MISSING, KIND_BLOCK):
        raise CorruptBlock(f"not an object: magic {magic!r}, version {version}, kind {kind}")
    return HEADER_BYTES + int(size)


def parse_objects(frame: bytes | memoryview) -> Iterator[StoredObject]:
    """Yields the objects of a frame without copying; the checksum is not looked at (see `verify`).

    Raises:
        CorruptBlock: the frame is not a whole number of well-formed objects.
    """
    view = memoryview(frame)
    while view:
        end = object_bytes(view)
        (_, _, kind, layout_id, hash, parent, run, position, fingerprint, _) = _FIELDS.unpack_from(
            view
        )
        if len(view) < end:
            raise CorruptBlock(f"an object of {end} bytes was cut off at {len(view)}")
        (checksum,) = _CHECKSUM.unpack_from(view, _FIELDS.size)
        yield StoredObject(
            kind,
            layout_id,
            BlockHash(hash),
            parent,
            BlockHash(run),
            position,
            fingerprint,
            checksum,
            view[:end],
        )
        view = view[end:]


def verify(item: StoredObject) -> None:
    """Checks header and payload against the checksum.

    Raises:
        CorruptBlock: they differ.
    """
    data = memoryview(item.data)
    actual = xxhash.xxh3_128(data[: _FIELDS.size])
    actual.update(data[HEADER_BYTES:])
    if actual.digest() != item.checksum:
        raise CorruptBlock(f"block {item.hash.hex()}: checksum differs")


def check_is(
    item: StoredObject, *, hash: BlockHash, layout_id: bytes, index: int, tokens: Sequence[int]
) -> None:
    """Checks that an intact object is the block that was asked for.

    Raises:
        CorruptBlock: it is another block, or holds rows of other tokens.
    """
    wanted = (hash, layout_id, index * BLOCK_TOKENS, token_fingerprint(tokens))
    if (item.hash, item.layout_id, item.position, item.fingerprint) != wanted:
        raise CorruptBlock(f"block {hash.hex()}: the stored object is a foreign one")
