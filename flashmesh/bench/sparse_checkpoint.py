"""Checkpoints for measuring: one of random bytes at load-worthy size, one Engram table of holes.

Both are valid safetensors; neither is a model that says anything.
"""

from __future__ import annotations

import json
import math
import os
import struct
from typing import TYPE_CHECKING

import numpy as np

from flashmesh.errors import FlashmeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from flashmesh.kernels.config import ModelConfig


_ITEM_BYTES = {"BF16": 2, "F32": 4}
_ALWAYS_FINITE = 0x3B
"""Mask of random bytes: no e4m3 NaN, no E8M0 NaN or overflow, finite as bf16 and fp32."""


class NoSparseFilesError(FlashmeshError):
    """The file system allocates what was never written."""


def write_random(path: Path, config: ModelConfig) -> None:
    """Writes every tensor of a model, in the released formats, as random finite values."""
    entries = list(_entries(config))
    block = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8) & _ALWAYS_FINITE
    with path.open("wb") as file:
        file.write(_header(entries))
        for _, dtype, shape in entries:
            left = _num_bytes(dtype, shape)
            while left > 0:
                file.write(block[:left].data)
                left -= len(block)


def write_sparse_table(path: Path, name: str, num_rows: int, width: int) -> None:
    """Writes an Engram table of zeros, weight and scales, that takes no disk.

    Raises:
        NoSparseFilesError: this file system cannot.
    """
    from flashmesh.kernels.tensor_names import scale_name

    entries = [
        (name, "F8_E4M3", (num_rows, width)),
        (scale_name(name), "F8_E8M0", (num_rows, width // 32)),
    ]
    header = _header(entries)
    path.write_bytes(header)
    size = len(header) + sum(_num_bytes(dtype, shape) for _, dtype, shape in entries)
    try:
        os.truncate(path, size)
    except OSError as error:
        raise NoSparseFilesError(f"{path.parent}: no file of {size:,} bytes: {error}") from error
    taken = path.stat().st_blocks * 512
    if taken > size // 2:
        raise NoSparseFilesError(
            f"{path.parent}: a file of {size:,} bytes of holes takes {taken:,}"
        )


def _entries(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    from flashmesh.kernels.formats import stored
    from flashmesh.kernels.tensor_names import scale_name, tensors

    for spec in tensors(config):
        layout = stored(spec.kind, spec.shape)
        yield spec.name, layout.dtype, layout.shape
        if layout.scale_shape is not None:
            yield scale_name(spec.name), "F8_E8M0", layout.scale_shape


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _ITEM_BYTES.get(dtype, 1)


def _header(entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    header, end = {}, 0
    for name, dtype, shape in entries:
        begin, end = end, end + _num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw
