"""The bytes of a block: the released model's numbers, and sections that touch without overlap."""

import dataclasses
import json

from support import golden

from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.layout import BlockLayout, WindowLayout

GOLDEN = ModelConfig.from_dict(json.loads((golden.DATA / "config.json").read_text()))
RELEASED = dataclasses.replace(
    GOLDEN,
    num_hidden_layers=40,
    head_dim=512,
    qk_rope_head_dim=64,
    index_head_dim=128,
    compress_ratios=(0, 0, *[2] * 18, *[1] * 20, 0, 0, 0),
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    candidate_source_layer_id=20,
)


def test_a_block_of_the_released_model_has_890_bytes_a_token():
    layout = BlockLayout.of(RELEASED)
    assert layout.block_bytes == 113_920 == 128 * 890
    starts = [offset for s in layout.sources for offset in (s.index_codes, s.kv)]
    assert starts == [0, 4352, 22784, 27136, 45568, 49920, 68352, 77056]
    assert [s.num_rows for s in layout.sources] == [64, 64, 64, 128]
    assert layout.sources[3].kv_row_bytes == 288


def test_sections_follow_each_other_without_gaps():
    for config in (GOLDEN, RELEASED):
        layout, offset = BlockLayout.of(config), 0
        for source in layout.sources:
            assert source.index_codes == offset
            assert source.index_scales == offset + source.num_rows * source.index_code_bytes
            assert source.kv == source.index_scales + source.num_rows * source.index_scale_bytes
            offset = source.kv + source.num_rows * source.kv_row_bytes
            assert source.end == offset
        assert layout.block_bytes == offset


def test_the_id_names_the_layout_and_nothing_else():
    layout = BlockLayout.of(GOLDEN)
    assert len(layout.layout_id) == 16
    assert BlockLayout.of(dataclasses.replace(GOLDEN, vocab_size=600)).layout_id == layout.layout_id
    for change in ({"head_dim": 128}, {"index_head_dim": 64}):
        other = BlockLayout.of(dataclasses.replace(GOLDEN, **change))
        assert other.layout_id != layout.layout_id


def test_a_window_slot_of_the_released_model_has_the_published_sizes():
    slot = WindowLayout.of(dataclasses.replace(RELEASED, sliding_window=128))
    assert slot.row_bytes == 528
    assert slot.backbone_bytes == 128 * 528 * 40 == 2_703_360
    assert slot.draft_bytes == 202_752
    assert slot.open_pair_bytes == 3 * 4096
    assert slot.slot_bytes == 2_703_360 + 202_752 + 12_288
