"""The bytes of one block: the global rows of 128 tokens, in a form that any worker can read.

Computed from the configuration in this one place. It never touches rows: `quantize` makes the bytes
and `pages` puts them here.

A payload is a run of sections without padding, two for each KV source layer in rising order. With
ratio r a source has `n = 128 / r` rows in a block, row j covering tokens `r*j .. r*j + r - 1`:

    index keys (F = index_head_dim)
        n * F/2   bytes  e2m1 codes, row after row; element 2i in the low nibble of byte i
        n * F/32  bytes  E8M0 scales, row after row; one for 32 elements
    compressed KV (E = head_dim), row after row, each
        E/2       bytes  e2m1 codes, packed alike
        E/16      bytes  e4m3 scales; one for 16 elements

For DeepSeek-V4.1-Flash (F = 128, E = 512; sources 2, 8, 14 of ratio 2 and 20 of ratio 1):

    offset   bytes   section
         0    4352   layer  2 index keys: 64 rows * 64 codes, 64 rows * 4 scales
      4352   18432   layer  2 compressed KV: 64 rows * (256 + 32)
     22784    4352   layer  8 index keys
     27136   18432   layer  8 compressed KV
     45568    4352   layer 14 index keys
     49920   18432   layer 14 compressed KV
     68352    8704   layer 20 index keys: 128 rows
     77056   36864   layer 20 compressed KV: 128 rows
    113920           = 128 tokens * 890 bytes
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from flashmesh.kernels.config import ModelConfig

LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class SourceLayout:
    """Where one KV source layer's rows stand in a block.

    Attributes:
        layer: the source layer.
        ratio: tokens of one row.
        num_rows: rows in a block.
        index_codes: offset of `[num_rows, index_code_bytes]`.
        index_scales: offset of `[num_rows, index_scale_bytes]`.
        kv: offset of `[num_rows, kv_code_bytes + kv_scale_bytes]`.
        end: offset after the last byte.
    """

    layer: int
    ratio: int
    num_rows: int
    index_codes: int
    index_scales: int
    kv: int
    end: int
    index_code_bytes: int
    index_scale_bytes: int
    kv_code_bytes: int
    kv_scale_bytes: int

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one compressed KV row."""
        return self.kv_code_bytes + self.kv_scale_bytes


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Sections of a block, and the id under which workers compare layouts.

    Attributes:
        sources: one entry for each KV source layer, in order.
        block_bytes: payload bytes of one block.
        layout_id: first 16 bytes of the SHA-256 of `description`.
        description: canonical text that names everything which fixes the bytes' meaning.
    """

    sources: tuple[SourceLayout, ...]
    block_bytes: int
    layout_id: bytes
    description: str

    @classmethod
    def of(cls, config: ModelConfig) -> BlockLayout:
        """Computes the layout of a model's blocks."""
        sources: list[SourceLayout] = []
        offset = 0
        for layer in config.kv_source_layer_ids:
            sources.append(_source_layout(config, layer, offset))
            offset = sources[-1].end
        layers = ",".join(f"{s.layer}/{s.ratio}" for s in sources)
        description = (
            f"flashmesh block v{LAYOUT_VERSION}; tokens {BLOCK_TOKENS}; sources {layers}; "
            f"index mxfp4-32 [{config.index_head_dim}] codes then scales; "
            f"kv nvfp4-16 [{config.head_dim}] row-interleaved; bytes {offset}"
        )
        digest = hashlib.sha256(description.encode()).digest()[:16]
        return cls(tuple(sources), offset, digest, description)


def _source_layout(config: ModelConfig, layer: int, offset: int) -> SourceLayout:
    ratio = config.ratio(layer)
    rows = BLOCK_TOKENS // ratio
    index_codes, index_scales = config.index_head_dim // 2, config.index_head_dim // 32
    kv_codes, kv_scales = config.head_dim // 2, config.head_dim // 16
    scales_at = offset + rows * index_codes
    kv_at = scales_at + rows * index_scales
    return SourceLayout(
        layer=layer,
        ratio=ratio,
        num_rows=rows,
        index_codes=offset,
        index_scales=scales_at,
        kv=kv_at,
        end=kv_at + rows * (kv_codes + kv_scales),
        index_code_bytes=index_codes,
        index_scale_bytes=index_scales,
        kv_code_bytes=kv_codes,
        kv_scale_bytes=kv_scales,
    )


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """The bytes of one sequence's position-bound state in stored form; no such object is stored or sent yet.

    A window row is `head_dim` e4m3 codes and one E8M0 scale for 32 of them; an open pair is one token's latent and
    gate in fp32. For V4.1-Flash: 528 bytes a row, 2,703,360 for 40 layers of 128 rows, 202,752 for the draft, 12,288
    for three open pairs.

    Attributes:
        row_bytes: of a window row.
        layer_bytes: of one layer's window.
        backbone_bytes, draft_bytes: of all windows of the backbone, and of the draft blocks.
        open_pair_bytes: of the compressors' open pairs.
    """

    row_bytes: int
    layer_bytes: int
    backbone_bytes: int
    draft_bytes: int
    open_pair_bytes: int

    @classmethod
    def of(cls, config: ModelConfig) -> WindowLayout:
        """Computes the sizes for a model."""
        row = config.head_dim + config.head_dim // 32
        layer = config.sliding_window * row
        pairs = sum(config.ratio(source) == 2 for source in config.kv_source_layer_ids)
        return cls(
            row_bytes=row,
            layer_bytes=layer,
            backbone_bytes=layer * config.num_hidden_layers,
            draft_bytes=layer * config.num_nextn_predict_layers,
            open_pair_bytes=pairs * 2 * config.head_dim * 4,
        )

    @property
    def slot_bytes(self) -> int:
        """Everything that one sequence needs beside its blocks."""
        return self.backbone_bytes + self.draft_bytes + self.open_pair_bytes
