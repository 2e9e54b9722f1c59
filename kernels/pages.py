"""The caches: pages of global rows, window slots, and the open pairs of ratio-2 compressors.

A page holds the global rows of one block twice: as the stored bytes, exact for export, and dequantised for compute. A
slot holds a session's windows as rings, long enough that a pass may store its rows first and attend after. The last
page and the last slot belong to nobody: rows that pad a step write there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashmesh.errors import CorruptBlock, NoFreeBlocks
from flashmesh.kernels.quantize import mxfp4_32, nvfp4_16, unpack_mxfp4_32, unpack_nvfp4_16

if TYPE_CHECKING:
    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.layout import BlockLayout, SourceLayout

RUN_ROWS = 128
"""Most rows of one session in a pass; longer runs are cut, which changes no bit."""

MAX_ROLLBACK = 8
"""Most rows that a session may take back: a round's drafts, and room. Rings are that much longer than their reach."""


class FreeList:
    """Numbers to hand out, lowest first."""

    def __init__(self, count: int, noun: str) -> None:
        self.count = count
        self._noun = noun
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` numbers or none.

        Raises:
            NoFreeBlocks: fewer are free.
        """
        if count > len(self._free):
            raise NoFreeBlocks(
                f"{count} {self._noun} needed, {len(self._free)} of {self.count} are free"
            )
        return [self._free.pop() for _ in range(count)]

    def give(self, numbers: list[int]) -> None:
        """Takes numbers back."""
        self._free += numbers


@dataclass(slots=True)
class GlobalRows:
    """One KV source layer's rows: `kv` `[pages, rows, E]` and `ik` `[pages, rows, F]`, fp32."""

    layout: SourceLayout
    kv: Tensor
    ik: Tensor


class Pages:
    """Global rows of all sessions.

    Args:
        config: of the model.
        layout: of a block.
        num_pages: how many sessions may share.
    """

    def __init__(self, config: ModelConfig, layout: BlockLayout, num_pages: int) -> None:
        self.free = FreeList(num_pages, "pages")
        self.nobody = num_pages
        self._bytes = torch.zeros(num_pages + 1, layout.block_bytes, dtype=torch.uint8)
        self.sources = {
            source.layer: GlobalRows(
                source,
                torch.zeros(num_pages + 1, source.num_rows, config.head_dim),
                torch.zeros(num_pages + 1, source.num_rows, config.index_head_dim),
            )
            for source in layout.sources
        }

    def write(
        self, layer: int, page: Tensor, row: Tensor, latent: Tensor, index_key: Tensor
    ) -> None:
        """Quantises rows and stores them.

        Args:
            layer: a KV source layer.
            page, row: int64 `[R]`, where each goes.
            latent: fp32 `[R, E]`, normed and rotated.
            index_key: fp32 `[R, F]`, normed and rotated.
        """
        rows = self.sources[layer]
        at = rows.layout
        codes, scales, values = nvfp4_16(latent)
        rows.kv[page, row] = values
        self._put(page, at.kv + row * at.kv_row_bytes, codes)
        self._put(page, at.kv + row * at.kv_row_bytes + at.kv_code_bytes, scales)
        codes, scales, values = mxfp4_32(index_key)
        rows.ik[page, row] = values
        self._put(page, at.index_codes + row * at.index_code_bytes, codes)
        self._put(page, at.index_scales + row * at.index_scale_bytes, scales)

    def load(self, page: int, payload: bytes | memoryview) -> None:
        """Fills a page from a stored block.

        Raises:
            CorruptBlock: the payload has another size than the layout's.
        """
        if len(payload) != self._bytes.shape[1]:
            raise CorruptBlock(
                f"a payload has {len(payload)} bytes, the layout {self._bytes.shape[1]}"
            )
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._bytes[page] = data
        for rows in self.sources.values():
            at = rows.layout
            kv = data[at.kv : at.end].view(at.num_rows, -1)
            rows.kv[page] = unpack_nvfp4_16(kv[:, : at.kv_code_bytes], kv[:, at.kv_code_bytes :])
            codes = data[at.index_codes : at.index_scales].view(at.num_rows, -1)
            scales = data[at.index_scales : at.kv].view(at.num_rows, -1)
            rows.ik[page] = unpack_mxfp4_32(codes, scales)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies pages; int64 `[n]` each."""
        self._bytes[target] = self._bytes[source]
        for rows in self.sources.values():
            rows.kv[target] = rows.kv[source]
            rows.ik[target] = rows.ik[source]

    def payload(self, page: int) -> bytes:
        """Returns a copy of a page's stored bytes."""
        return self._bytes[page].numpy().tobytes()

    def _put(self, page: Tensor, offset: Tensor, data: Tensor) -> None:
        columns = offset.unsqueeze(1) + torch.arange(data.shape[1])
        self._bytes[page.unsqueeze(1), columns] = data


class Slots:
    """Windows and open pairs of all sessions.

    Args:
        config: of the model.
        num_layers: layers that the role runs.
        num_slots: how many sessions at once.
    """

    def __init__(self, config: ModelConfig, num_layers: int, num_slots: int) -> None:
        self.free = FreeList(num_slots, "slots")
        self.nobody = num_slots
        self.ring = config.sliding_window + RUN_ROWS + MAX_ROLLBACK
        self.pair_ring = 1 + MAX_ROLLBACK
        self.window = [
            torch.zeros(num_slots + 1, self.ring, config.head_dim) for _ in range(num_layers)
        ]
        # Latent and gate of the last tokens that a ratio-2 compressor has seen, by position.
        self.open_pair = {
            layer: torch.zeros(num_slots + 1, self.pair_ring, 2, config.head_dim)
            for layer in config.kv_source_layer_ids
            if config.ratio(layer) == 2
        }

    def copy(self, source: int, target: int) -> None:
        """Copies a slot."""
        for rows in (*self.window, *self.open_pair.values()):
            rows[target] = rows[source]
