"""Caches of the device model, in stored bytes: window rings, compressed rows, index keys, open pairs.

Compressed rows and index keys lie as in a block's payload, section by section, so that a page's sections are copied
out and in without touching a row (`kernels.layout`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.layout import BlockLayout, WindowLayout
from flashmesh.kernels.pages import MAX_ROLLBACK

if TYPE_CHECKING:
    from torch import Tensor

    from flashmesh.kernels.config import ModelConfig


class DeviceCaches:
    """Rows of all sequences.

    The last slot and the last page belong to nobody: rows that fill up a recorded step stand there.

    Args:
        config: of the model.
        num_slots: sequences at once.
        num_pages: blocks of 128 tokens over all sequences.
        device: where they lie.

    Attributes:
        ring: positions of a window ring: a pass stores up to `MAX_ROLLBACK` rows before it attends.
        rows: by KV source, compressed rows of a page.
        window: by layer, uint8 `[(slots + 1) * ring, E + E/32]`.
        kv: by KV source, uint8 `[(pages + 1) * rows, E/2 + E/16]`.
        ik: by KV source, uint8 `[pages + 1, rows * (F/2 + F/32)]`, codes before scales.
        open_pair: by source of ratio 2, fp32 `[slots + 1, 1 + MAX_ROLLBACK, 2, E]`.
        no_kv: uint8 `[1, E/2 + E/16]`, for layers that have their window only; it is never read.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, num_pages: int, device: torch.device
    ) -> None:
        self.num_slots, self.num_pages, self.device = num_slots, num_pages, device
        self.ring = config.sliding_window + MAX_ROLLBACK
        row_bytes, sources = WindowLayout.of(config).row_bytes, BlockLayout.of(config).sources

        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.window = [
            zeros((num_slots + 1) * self.ring, row_bytes) for _ in range(config.num_hidden_layers)
        ]
        self.rows = {s.layer: s.num_rows for s in sources}
        self.kv = {s.layer: zeros((num_pages + 1) * s.num_rows, s.kv_row_bytes) for s in sources}
        self.ik = {
            s.layer: zeros(num_pages + 1, s.num_rows * (s.index_code_bytes + s.index_scale_bytes))
            for s in sources
        }
        self.open_pair = {
            s.layer: zeros(num_slots + 1, 1 + MAX_ROLLBACK, 2, config.head_dim, dtype=torch.float32)
            for s in sources
            if s.ratio == 2
        }
        self.no_kv = zeros(1, sources[0].kv_row_bytes)

    def ring_rows(self, slot: Tensor | int, pos: Tensor) -> Tensor:
        """Returns where positions of slots stand among the rings' rows."""
        return slot * self.ring + pos % self.ring
