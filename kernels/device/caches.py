"""Caches of the device model, in stored bytes: window rings, compressed rows, index keys, open pairs.

Compressed rows and index keys lie as in a block's payload, section by section, so that a page's sections are copied
out and in without touching a row (`kernels.layout`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.pages import MAX_ROLLBACK
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
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
        window: by layer, uint8 `[(slots + 1) * ring, E + E/32]`.
        kv: by KV source, uint8 `[(pages + 1) * rows, E/2 + E/16]`.
        ik: by KV source, uint8 `[pages + 1, rows * (F/2 + F/32)]`, codes before scales.
        open_pair: by source of ratio 2, fp32 `[slots + 1, 1 + MAX_ROLLBACK, 2, E]`.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, num_pages: int, device: torch.device
    ) -> None:
        c = config
        self.num_slots, self.num_pages, self.device = num_slots, num_pages, device
        self.ring = c.sliding_window + MAX_ROLLBACK
        window_bytes = c.head_dim + c.head_dim // 32
        kv_bytes = c.head_dim // 2 + c.head_dim // 16
        ik_bytes = c.index_head_dim // 2 + c.index_head_dim // 32

        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.window = [
            zeros((num_slots + 1) * self.ring, window_bytes) for _ in range(c.num_hidden_layers)
        ]
        self.rows = {s: BLOCK_TOKENS // c.ratio(s) for s in c.kv_source_layer_ids}
        self.kv = {s: zeros((num_pages + 1) * n, kv_bytes) for s, n in self.rows.items()}
        self.ik = {s: zeros(num_pages + 1, n * ik_bytes) for s, n in self.rows.items()}
        self.open_pair = {
            s: zeros(num_slots + 1, 1 + MAX_ROLLBACK, 2, c.head_dim, dtype=torch.float32)
            for s in self.rows
            if c.ratio(s) == 2
        }
