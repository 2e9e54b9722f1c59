"""Loading the vision tower, and refusing every kind of broken one."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support import golden
from support.vision import RELEASED

from flashmesh.errors import CheckpointError
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.tensor_names import is_vision, vision_tensors
from flashmesh.kernels.vision_config import VisionConfig
from flashmesh.kernels.vision_weights import load_tower, load_vision
from flashmesh.kernels.weights import load_weights

TEXT = ModelConfig.load(golden.DATA)
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 12,
    "patch_size": 4,
}  # fmt: skip
SMALL = VisionConfig.from_dict({"vision_config": RELEASED | SIZES})
W1 = "vision.blocks.1.mlp.w1.weight"


@pytest.fixture(scope="module")
def values():
    return {s.name: torch.randn(s.shape).bfloat16() for s in vision_tensors(SMALL, 64)}


def folder_of(path, tensors):
    save_file(tensors, path / "model.safetensors")
    return path


def refusal(path, tensors):
    with pytest.raises(CheckpointError) as caught:
        load_vision(folder_of(path, tensors), TEXT, SMALL)
    return str(caught.value)


def test_the_table_has_the_released_tensors():
    specs = list(vision_tensors(VisionConfig.from_dict({"vision_config": RELEASED}), 5120))
    shapes = {spec.name: spec.shape for spec in specs}
    assert len(specs) == len(shapes) == 263 + 3
    assert all(is_vision(name) for name in shapes)
    assert {spec.kind for spec in specs} == {"BF16"}
    assert shapes["vision.patch_embed.proj.weight"] == (1024, 588)
    assert shapes["vision.blocks.31.mlp.w1.weight"] == (5632, 1024)
    assert shapes["vision.blocks.0.attn.wqkv.bias"] == (3072,)
    assert shapes["aligner.w1.weight"] == (5120, 9216)
    assert shapes["image_newline"] == (5120,)


def test_values_are_loaded_as_fp32_and_a_prefix_is_accepted(values, tmp_path):
    prefixed = {f"model.{name}": value for name, value in values.items()}
    loaded = load_vision(folder_of(tmp_path, prefixed), TEXT, SMALL)
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(loaded[name], value.float()), name


def test_a_missing_tensor_is_named(values, tmp_path):
    kept = {name: value for name, value in values.items() if name != "image_end"}
    assert "1 tensors are missing from all shards: image_end" in refusal(tmp_path, kept)


def test_a_checkpoint_without_the_tower_is_refused_by_its_first_tensors(values, tmp_path):
    message = refusal(tmp_path, {"norm.weight": torch.ones(64).bfloat16()})
    assert f"{len(values)} tensors are missing" in message
    assert "vision.patch_embed.proj.weight" in message


@pytest.mark.parametrize("name", ["vision.blocks.2.norm1.weight", "aligner.w3.bias", "vision.x"])
def test_a_tensor_of_a_larger_tower_is_refused(values, tmp_path, name):
    message = refusal(tmp_path, values | {name: torch.ones(2)})
    assert f"model.safetensors: {name} belongs to no tensor of this vision_config" in message


def test_a_tensor_that_occurs_twice_is_refused(values, tmp_path):
    twice = {"model.image_start": values["image_start"].clone()}
    assert "image_start is there twice" in refusal(tmp_path, values | twice)


@pytest.mark.parametrize(
    ("replacement", "expected"),
    [
        (torch.zeros(24, 15).bfloat16(), "expected BF16 [24, 16], found BF16 [24, 15]"),
        (torch.zeros(12, 32).bfloat16(), "expected BF16 [24, 16], found BF16 [12, 32]"),
        (torch.zeros(24, 16), "expected BF16 [24, 16], found F32 [24, 16]"),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(values, tmp_path, replacement, expected):
    message = refusal(tmp_path, values | {W1: replacement})
    assert f"model.safetensors: {W1}: {expected}" in message


def test_nan_is_named(values, tmp_path):
    broken = values[W1].clone()
    broken[3, 4] = torch.nan
    message = refusal(tmp_path, values | {W1: broken})
    assert f"{W1}: expected finite values, found 1 NaN or infinite of 384" in message


def test_a_truncated_shard_is_named(values, tmp_path):
    path = folder_of(tmp_path, values) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="model.safetensors: truncated"):
        load_vision(tmp_path, TEXT, SMALL)


def test_a_tower_is_loaded_where_config_json_describes_one(values, tmp_path):
    path = folder_of(tmp_path, values) / "config.json"
    path.write_text(json.dumps({"vision_config": RELEASED | SIZES}))
    assert load_tower(tmp_path, TEXT).config == SMALL
    path.write_text(json.dumps({"vision_config": {"num_hidden_layers": 0}}))
    with pytest.raises(CheckpointError, match="describes no vision tower"):
        load_tower(tmp_path, TEXT)


def test_text_loads_from_a_checkpoint_without_a_tower():
    folder = golden.checkpoint()
    try:
        assert "image_start" not in load_weights(folder, TEXT, "prefill")
    finally:
        shutil.rmtree(folder)
