"""The configuration: the layer map, other spellings, and refusals that name every problem."""

import json

import pytest
from support import golden

from flashmesh.errors import CheckpointError
from flashmesh.kernels.config import ModelConfig


@pytest.fixture
def raw():
    return json.loads((golden.DATA / "config.json").read_text())


def test_the_layer_map_follows_the_source_lists(raw):
    config = ModelConfig.from_dict(raw)
    assert config.num_encoder_layers == 4
    assert [config.kv_source(layer) for layer in range(8)] == [None, 1, 1, 3, 4, 4, 4, 4]
    assert [config.index_source(layer) for layer in range(8)] == [None, 1, 1, 3, 4, 4, 6, 6]
    assert config.engram_hash_columns == 6


def test_the_other_official_spellings_mean_the_same(raw):
    expected, text = ModelConfig.from_dict(raw), raw["text_config"]
    for ours, other in (
        ("kv_source_layer_ids", "kv_source_layers"),
        ("index_source_layer_ids", "index_source_layers"),
        ("candidate_source_layer_id", "candidate_source_layer"),
        ("engram_pad_token_id", "engram_pad_id"),
        ("dspark_num_experts_per_tok", "dspark_n_activated_experts"),
    ):
        text[other] = text.pop(ours)
    assert ModelConfig.from_dict(raw) == expected


def test_every_problem_of_the_values_is_named_at_once(raw):
    text = raw["text_config"]
    del text["head_dim"]
    text["vocab_size"] = "many"
    text["hidden_act"] = "gelu"
    text["rope_scaling"]["rope_type"] = "linear"
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(raw)
    for part in ("config.json", "head_dim is missing", "vocab_size", "hidden_act", "rope_type"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be > 0"),
        ({"head_dim": 40}, "head_dim must be a multiple of 32"),
        ({"num_experts_per_tok": 9}, "exceeds n_routed_experts"),
        ({"compress_ratios": [0, 2]}, "2 entries for 8 layers"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 2, 1]}, "decoder half"),
        ({"compress_ratios": [0, 2, 2, 2, 3, 1, 1, 1]}, "must hold 0, 1 and 2"),
        ({"kv_source_layer_ids": [1, 4, 3]}, "rising layer ids"),
        ({"kv_source_layer_ids": [1, 3]}, "no KV source of its own ratio"),
        ({"kv_source_layer_ids": [1, 3, 4, 6]}, "only KV source of the decoder half"),
        ({"kv_source_layer_ids": [1, 2, 3, 4]}, "must also be an index source"),
        ({"index_source_layer_ids": [0, 1, 3, 4, 6]}, "window-only layer"),
        ({"candidate_source_layer_id": 6}, "must be a KV source"),
        ({"engram_num_embeddings": [462]}, "differ in length"),
        ({"engram_layer_ids": [1, 4]}, "engram_layer_ids must lie in the encoder half"),
    ],
)
def test_a_map_that_cannot_run_is_refused(raw, change, message):
    raw["text_config"] |= change
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(raw)


def test_a_folder_without_a_readable_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.load(tmp_path)
