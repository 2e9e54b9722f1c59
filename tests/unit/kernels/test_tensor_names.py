"""The tensor table, against the released checkpoint's published totals."""

import json
import math

import pytest
from support import golden

from flashmesh.errors import Incompatible
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.formats import stored
from flashmesh.kernels.tensor_names import ExpertShard, is_vision, needed_by, tensors

RELEASED = {
    "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024,
    "o_groups": 8, "swiglu_limit": 10.0, "moe_intermediate_size": 2304, "n_routed_experts": 384,
    "num_experts_per_tok": 6, "sliding_window": 128, "index_n_heads": 32, "index_head_dim": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3, "index_topk": 512,
    "kv_source_layer_ids": [2, 8, 14, 20], "candidate_source_layer_id": 20,
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682], "engram_n_heads": 8, "engram_head_dim": 256,
    "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
}  # fmt: skip
NUM_VISION_TENSORS = 263
NUM_IMAGE_TENSORS = 3
VISION_PARAMETERS = (
    1024 * 588 + 1024
    + 32 * (2 * 1024 + 3072 * 1024 + 3072 + 1024 * 1024 + 1024 + 5632 * 1024 + 1024 * 2816)
    + 1024
    + 5120 * 9216 + 5120 + 5120 * 5120 + 5120
)  # fmt: skip
ITEM_BYTES = {"F8_E4M3": 1, "I8": 1, "BF16": 2, "F32": 4}


def released():
    raw = json.loads((golden.DATA / "config.json").read_text())
    raw["text_config"] |= RELEASED
    return ModelConfig.from_dict(raw)


def test_the_table_has_as_many_tensors_as_the_released_checkpoint():
    scales = [1 if stored(s.kind, s.shape).scale_shape is None else 2 for s in tensors(released())]
    assert sum(scales) + NUM_VISION_TENSORS + NUM_IMAGE_TENSORS == 96_085


def test_the_table_has_as_many_bytes_as_the_released_checkpoint():
    total = 2 * (VISION_PARAMETERS + NUM_IMAGE_TENSORS * 5120)
    for spec in tensors(released()):
        layout = stored(spec.kind, spec.shape)
        total += math.prod(layout.shape) * ITEM_BYTES[layout.dtype]
        total += math.prod(layout.scale_shape) if layout.scale_shape else 0
    assert total == 510_286_023_000


def test_the_table_has_as_many_fp32_values_as_the_released_checkpoint():
    values = sum(math.prod(spec.shape) for spec in tensors(released()) if spec.kind == "F32")
    assert values == 42_307_282


def test_names_are_unique():
    names = [spec.name for spec in tensors(released())]
    assert len(set(names)) == len(names)


def test_a_prefill_needs_the_encoder_and_what_makes_the_first_decoder_layers_rows():
    names = {spec.name for spec in needed_by(released(), "prefill")}
    assert {name for name in names if name.startswith("layers.20.")} == {
        "layers.20.attn_norm.weight",
        "layers.20.attn.compressor.wkv.weight",
        "layers.20.attn.compressor.norm.weight",
        "layers.20.attn.indexer.wk.weight",
        "layers.20.attn.indexer.k_norm.weight",
    }
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {
        str(layer) for layer in range(21)
    }
    assert {name for name in names if not name.startswith("layers.")} == {"embed.weight"}


def test_a_decode_needs_everything():
    needed = {spec.name for spec in needed_by(released(), "decode")}
    everything = {spec.name for spec in tensors(released())}
    assert needed == everything


@pytest.mark.parametrize("num_ranks", [1, 3, 64])
def test_ranks_share_the_routed_experts_and_nothing_else(num_ranks):
    config = released()
    ranks = [
        {spec.name for spec in needed_by(config, "decode", ExpertShard(rank, num_ranks))}
        for rank in range(num_ranks)
    ]
    assert set.union(*ranks) == {spec.name for spec in tensors(config)}
    common = {spec.name for spec in tensors(config) if ".ffn.experts." not in spec.name}
    assert all(common <= rank for rank in ranks)
    routed = [len(rank) - len(common) for rank in ranks]
    assert sum(routed) == 3 * (40 * 384 + 3 * 128)
    assert max(routed) - min(routed) <= 3 * (40 + 3)


@pytest.mark.parametrize("shard", [(0, 0), (2, 2), (-1, 2), (0, 129)])
def test_a_rank_that_cannot_be_is_refused(shard):
    with pytest.raises(Incompatible, match=f"rank {shard[0]} of {shard[1]} cannot share"):
        list(needed_by(released(), "decode", ExpertShard(*shard)))


def test_vision_names_are_recognised():
    names = ("vision.norm.weight", "aligner.w1.bias", "image_start", "image_end", "image_newline")
    assert all(map(is_vision, names))
    assert not is_vision("layers.0.attn.wkv.weight")
