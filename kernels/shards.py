"""Safetensors files of a checkpoint: which there are, whether they are whole, bytes out of them.

Only headers are read until somebody asks for a tensor, so a broken download is refused in
milliseconds and before any memory is taken. Nothing here knows the model; `weights` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from flashmesh.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from io import RawIOBase

    from numpy.typing import NDArray

    from flashmesh.kernels.config import ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
WHOLE_FILE_BYTES = 64 << 20
"""Files up to this size are hashed, and tables up to it scanned for NaN, in full."""

_SAMPLE_BYTES = 64 << 10
_NUM_SAMPLES = WHOLE_FILE_BYTES // _SAMPLE_BYTES
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class Entry(NamedTuple):
    """One tensor of a shard; its bytes are [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One whole safetensors file.

    Attributes:
        path: of the file.
        size_bytes: of the file.
        header: the raw JSON bytes.
        entries: by the names in the file.
    """

    path: Path
    size_bytes: int
    header: bytes
    entries: Mapping[str, Entry]

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """Maps a tensor's bytes read-only; pages are read when touched, and no others."""
        entry = self.entries[name]
        if entry.start == entry.stop:
            return np.empty(0, dtype=np.uint8)  # an empty range cannot be mapped
        try:
            # From the file's start: a mapping must begin on a page.
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), entry.stop, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path.name}: {name}: {error}") from error
        if hasattr(mmap, "MADV_RANDOM"):
            # A row is 256 bytes; without this the system reads 128 KiB around each.
            mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, np.uint8, entry.stop - entry.start, entry.start)

    def read(self, name: str) -> torch.Tensor:
        """Copies a tensor out of the file, in its stored dtype and shape.

        Raises:
            CheckpointError: the file has shrunk or gone since its header was read.
        """
        entry = self.entries[name]
        raw = np.empty(entry.stop - entry.start, dtype=np.uint8)
        try:
            # Read, not copied out of a mapping: that takes half again to four times as long.
            with self.path.open("rb", buffering=0) as file:
                file.seek(entry.start)
                if _fill(file, raw) < len(raw):
                    raise CheckpointError(f"{self.path.name}: {name}: the file has shrunk")
        except OSError as error:
            raise CheckpointError(f"{self.path.name}: {name}: {error}") from error
        return torch.from_numpy(raw).view(_DTYPES[entry.dtype]).view(entry.shape)

    def rows(self, name: str) -> MappedRows:
        """Maps a 2-D tensor; the mapping outlives the file's name."""
        entry = self.entries[name]
        return MappedRows(self.bytes_of(name).reshape(entry.shape[0], -1), _DTYPES[entry.dtype])


class MappedRows(NamedTuple):
    """A 2-D tensor in its file: rows are read as they are asked for."""

    data: NDArray[np.uint8]
    dtype: torch.dtype

    def read(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Copies `[n]` rows, in their stored dtype."""
        return torch.from_numpy(self.data[ids]).view(self.dtype)


def _fill(file: RawIOBase, buffer: NDArray[np.uint8]) -> int:
    """Reads until the buffer is full or the file ends: one call gives 2 GiB at most."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:].data)):
        filled += count
    return filled


def open_shards(folder: Path) -> list[Shard]:
    """Reads the headers of all shards of a checkpoint, in name order.

    Raises:
        CheckpointError: a file is missing, truncated or no safetensors file, or the index names a
            tensor that its shard lacks.
    """
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        return [_open_shard(folder / SINGLE_FILE)]
    weight_map = _read_index(index_path)
    shards = [_open_shard(folder / file) for file in sorted(set(weight_map.values()))]
    entries = {shard.path.name: shard.entries for shard in shards}
    for name, file in weight_map.items():
        if name not in entries[file]:
            raise CheckpointError(f"{file}: {name} is missing, {INDEX_FILE} says it is there")
    return shards


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: no usable weight_map ({error!r})") from error
    for name, file in pairs.items():
        if Path(file).name != file:  # an index must not reach out of its folder
            raise CheckpointError(f"{path}: {name} lies in {file!r}, which is no plain file name")
    if not pairs:
        raise CheckpointError(f"{path}: weight_map is empty")
    return pairs


def _open_shard(path: Path) -> Shard:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _read_header(path.name, file.read(8), size, file.read)
    except OSError as error:
        raise CheckpointError(f"shard {path} cannot be read: {error.strerror}") from error
    return Shard(path, size, header, _parse_header(path.name, header, size))


def _read_header(file_name: str, prefix: bytes, size: int, read: Any) -> bytes:
    if len(prefix) < 8:
        raise CheckpointError(f"{file_name}: truncated, expected at least 8 bytes, found {size}")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{file_name}: truncated or no safetensors file: expected a header of {length} bytes, "
            f"found {size - 8} bytes in all"
        )
    header: bytes = read(length)
    return header


def _parse_header(file_name: str, header: bytes, size: int) -> dict[str, Entry]:
    """Checks that tensors fill the file without holes, and that each has the bytes it declares."""
    data_start = 8 + len(header)
    try:
        raw = json.loads(header)
        raw.pop("__metadata__", None)
        entries = {name: _entry(value, data_start) for name, value in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file_name}: the header is garbage ({error!r})") from error
    expected_start = data_start
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        num_bytes = _num_bytes(entry)
        if entry.start != expected_start or entry.stop - entry.start != num_bytes:
            raise CheckpointError(
                f"{file_name}: {name}: expected {num_bytes} bytes at {expected_start}, "
                f"found [{entry.start}, {entry.stop})"
            )
        expected_start = entry.stop
    if expected_start != size:
        raise CheckpointError(
            f"{file_name}: truncated or overlong: expected {expected_start} bytes, found {size}"
        )
    return entries


def _entry(raw: Mapping[str, Any], data_start: int) -> Entry:
    start, stop = raw["data_offsets"]
    shape = tuple(raw["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError("offsets and shapes must be whole numbers")
    if raw["dtype"] not in _DTYPES:
        raise ValueError(f"unknown dtype {raw['dtype']}")
    return Entry(raw["dtype"], shape, data_start + start, data_start + stop)


def _num_bytes(entry: Entry) -> int:
    num_bytes = _DTYPES[entry.dtype].itemsize
    for size in entry.shape:
        num_bytes *= size
    return num_bytes


def fingerprint(config: ModelConfig, shards: Sequence[Shard], tokenizer: Path) -> bytes:
    """Hashes everything that a KV row depends on: 32 bytes, the same for every role.

    Args:
        config: hashed in canonical form, so spelling and order of its file do not matter.
        shards: in name order; large files count by header, size and evenly spaced samples.
        tokenizer: hashed where it exists, since Engram derives its token map from it.
    """
    digest = hashlib.sha256()
    canonical = json.dumps(dataclasses.asdict(config), sort_keys=True, separators=(",", ":"))
    _update(digest, canonical.encode())
    _update(digest, tokenizer.read_bytes() if tokenizer.is_file() else b"")
    for shard in shards:
        _update(digest, shard.path.name.encode())
        _update(digest, shard.header)
        digest.update(struct.pack("<Q", shard.size_bytes))
        for sample in _samples(shard):
            digest.update(sample)
    return digest.digest()


def _update(digest: Any, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)))  # so that no two part lists read alike
    digest.update(part)


def _samples(shard: Shard) -> Iterator[bytes]:
    with shard.path.open("rb") as file:
        if shard.size_bytes <= WHOLE_FILE_BYTES:
            yield file.read()
            return
        for number in range(_NUM_SAMPLES):
            file.seek(number * (shard.size_bytes - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
