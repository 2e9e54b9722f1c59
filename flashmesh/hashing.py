"""The prefix hash chain: which bytes name a block.

A block's hash covers everything before it, the model, the layout and the tenant, so equal hashes
mean equal tokens and interchangeable payloads. The scheme is published and free of per-process
state: every process, and every language, computes the same keys. Worked examples are in
docs/hashing.md and pinned by tests.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from typing import TYPE_CHECKING, NewType

from flashmesh.errors import Incompatible
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BlockHash = NewType("BlockHash", bytes)
"""16 bytes that name one block and the whole prefix before it."""

SCHEME = b"flashmesh-blocks-1"
HASH_BYTES = 16

GOLDEN_BLOCK = bytes.fromhex("d19c887fa72403ad77f82d30318062df")
"""Block 1 of the worked example, which depends on the root, on block 0 and on two blocks of tokens."""

EXTRA_CACHE_SALT = 1
EXTRA_ADAPTER = 2
EXTRA_IMAGE = 3


def root_hash(
    *, fingerprint: bytes, layout_id: bytes, gemm_quantized: bool, tenant_salt: bytes
) -> bytes:
    """Returns the 32 bytes that the first block of every prompt is chained to.

    Args:
        fingerprint: the model's (`ModelInfo.fingerprint`).
        layout_id: of a block's payload.
        gemm_quantized: the switch for quantised GEMM inputs, which changes every stored row.
        tenant_salt: tenants with different salts share nothing.
    """
    digest = hashlib.sha256()
    for part in (SCHEME, fingerprint, layout_id, bytes([gemm_quantized]), tenant_salt):
        digest.update(struct.pack("<I", len(part)) + part)
    return digest.digest()


def encode_extras(extras: Iterable[tuple[int, bytes]]) -> bytes:
    """Packs what else a block depends on: sorted (u8 tag, u32 length, bytes) records."""
    return b"".join(struct.pack("<BI", tag, len(value)) + value for tag, value in sorted(extras))


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Packs token ids as u32 little-endian."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_fingerprint(tokens: Sequence[int]) -> bytes:
    """Returns the 16 bytes by which a stored object says which tokens it holds rows of."""
    return hashlib.sha256(token_bytes(tokens)).digest()[:HASH_BYTES]


def next_hash(parent: bytes, tokens: Sequence[int], extras: bytes = b"") -> BlockHash:
    """Returns the hash of the block of `tokens` that follows `parent` (a root or a block hash)."""
    return BlockHash(hashlib.sha256(parent + extras + token_bytes(tokens)).digest()[:HASH_BYTES])


def chain(root: bytes, tokens: Sequence[int], extras: bytes = b"") -> Iterator[BlockHash]:
    """Yields the hash of every whole block of `tokens`; a tail shorter than a block has none."""
    parent = root
    for begin in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = next_hash(parent, tokens[begin : begin + BLOCK_TOKENS], extras)
        yield block
        parent = block


def check_scheme() -> None:
    """Computes the worked example; every process does so before it joins a mesh.

    Raises:
        Incompatible: this build computes other keys than the published scheme.
    """
    root = root_hash(
        fingerprint=bytes(range(32)),
        layout_id=bytes(range(16)),
        gemm_quantized=False,
        tenant_salt=b"",
    )
    *_, block = chain(root, range(2 * BLOCK_TOKENS))
    if block != GOLDEN_BLOCK:
        raise Incompatible(
            f"this build hashes block 1 of the example to {block.hex()}, "
            f"but {SCHEME.decode()} says {GOLDEN_BLOCK.hex()}"
        )
