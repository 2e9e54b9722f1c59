"""An Engram table: mapped, never copied whole; rows are expanded as they are looked up.

The tables are two fifths of the released model's bytes and a token reads 24 rows of each, so they
stay in their files, where the system caches what is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from flashmesh.kernels.formats import expand
from flashmesh.kernels.shards import WHOLE_FILE_BYTES, MappedRows
from flashmesh.kernels.stored_tensor import StoredTensor, check_finite

if TYPE_CHECKING:
    from torch import Tensor

    from flashmesh.kernels.checkpoint import Place

_SCAN_ROWS = 1 << 14


class EngramTable(NamedTuple):
    """A table in its file.

    Attributes:
        place: of the weight.
        weight: rows of codes, or of values in a dequantised copy.
        scale: rows of scales; None in a dequantised copy.
    """

    place: Place
    weight: MappedRows
    scale: MappedRows | None

    @classmethod
    def open(cls, weight: Place, scale: Place | None) -> Self:
        """Maps a table; reads nothing."""
        return cls(
            weight,
            weight.shard.rows(weight.name),
            None if scale is None else scale.shard.rows(scale.name),
        )

    def rows(self, ids: np.ndarray) -> Tensor:
        """Reads rows.

        Args:
            ids: int64 `[n]`, each in [0, rows of the table).

        Returns:
            fp32 `[n, width]`.

        Raises:
            CheckpointError: a row holds NaN.
        """
        scale = None if self.scale is None else self.scale.read(ids)
        values = expand("F8row", self.weight.read(ids), scale)
        check_finite(values, self.place)
        return values

    def stored(self) -> Tensor | StoredTensor:
        """Reads the whole table."""
        every = np.arange(len(self.weight.data))
        weight = self.weight.read(every)
        return (
            weight if self.scale is None else StoredTensor("F8row", weight, self.scale.read(every))
        )

    def scan(self) -> None:
        """Looks for NaN in a table small enough for it; others are checked as rows are read.

        Raises:
            CheckpointError: there is one.
        """
        num_rows = len(self.weight.data)
        if self.place.num_bytes <= WHOLE_FILE_BYTES:
            for start in range(0, num_rows, _SCAN_ROWS):
                self.rows(np.arange(start, min(start + _SCAN_ROWS, num_rows)))
