"""Loading a checkpoint, and refusing every kind of broken one."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import golden

from flashmesh.errors import CheckpointError
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.tensor_names import ExpertShard, needed_by
from flashmesh.kernels.weights import checkpoint_folder, load_weights

CONFIG = ModelConfig.load(golden.DATA)
EXPERT = "layers.2.ffn.experts.3.w1"
HALVES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def values():
    """The golden checkpoint's tensors as stored; tests replace entries in a copy."""
    return load_file(golden.DATA / "model_quantized.safetensors")


@pytest.fixture(scope="module")
def loaded():
    return load(golden.DATA / "model_quantized.safetensors")


def load(file, role="all"):
    folder = golden.checkpoint(quantized=file.stem.endswith("quantized"))
    try:
        return load_weights(folder, CONFIG, role)
    finally:
        shutil.rmtree(folder)


def single(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return folder


def sharded(folder, tensors):
    names = sorted(tensors)
    parts = (names[::2], names[1::2])
    for file, part in zip(HALVES, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {n: file for file, part in zip(HALVES, parts, strict=True) for n in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def refusal(folder, role="all"):
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, CONFIG, role)
    return str(caught.value)


def test_quantised_and_dequantised_files_give_the_same_values(loaded):
    plain = load(golden.DATA / "model.safetensors")
    tables = {f"layers.{layer}.engram.embed.weight" for layer in CONFIG.engram_layer_ids}
    for spec in needed_by(CONFIG, "all"):
        if spec.name not in tables:
            assert torch.equal(loaded[spec.name], plain[spec.name]), spec.name
            assert loaded[spec.name].dtype == torch.float32
            assert loaded[spec.name].shape == spec.shape
    for layer, size in zip(CONFIG.engram_layer_ids, CONFIG.engram_num_embeddings, strict=True):
        rows = torch.arange(size)
        assert torch.equal(loaded.engram_rows(layer, rows), plain.engram_rows(layer, rows))


def test_engram_rows_have_the_shape_of_their_ids(loaded):
    rows = torch.tensor([[5, 0, 5], [461, 7, 1]])
    got = loaded.engram_rows(1, rows)
    assert got.shape == (2, 3, CONFIG.engram_head_dim)
    assert torch.equal(got[0, 0], got[0, 2])
    assert torch.equal(got[1, 1], loaded.engram_rows(1, torch.tensor(7)))
    assert loaded.engram_rows(1, torch.empty(0, 6, dtype=torch.int64)).shape == (0, 6, 32)


def test_a_prefix_before_every_name_is_accepted(values, tmp_path, loaded):
    folder = single(tmp_path, {f"model.{name}": value for name, value in values.items()})
    weights = load_weights(folder, CONFIG, "all")
    assert torch.equal(weights[EXPERT + ".weight"], loaded[EXPERT + ".weight"])


def test_shards_give_the_values_of_one_file(values, tmp_path, loaded):
    weights = load_weights(sharded(tmp_path, values), CONFIG, "all")
    for name in ("head.weight", EXPERT + ".weight", "layers.7.hc_ffn_fn"):
        assert torch.equal(weights[name], loaded[name])


def test_a_prefill_role_loads_no_decoder_and_no_head():
    weights = load(golden.DATA / "model_quantized.safetensors", "prefill")
    assert "layers.3.ffn.gate.weight" in weights
    assert "layers.4.attn.indexer.wk.weight" in weights
    assert weights.engram_rows(3, torch.tensor([0])).shape == (1, 32)
    for name in ("layers.4.attn.wkv.weight", "layers.4.ffn.gate.weight", "head.weight"):
        assert name not in weights


def test_the_draft_is_loaded_by_those_that_decode(loaded):
    assert "mtp.0.attn.wkv.weight" in loaded
    prefill = load(golden.DATA / "model_quantized.safetensors", "prefill")
    assert "mtp.0.attn.wkv.weight" not in prefill


def test_vision_tensors_are_recognised_and_not_loaded(values, tmp_path):
    vision = {"vision.norm.weight": torch.ones(4), "image_start": torch.ones(4)}
    assert "image_start" not in load_weights(single(tmp_path, values | vision), CONFIG, "all")


def test_a_role_does_not_miss_what_it_does_not_need(values, tmp_path):
    late = ("mtp.", "head.", "layers.7.")
    kept = {name: value for name, value in values.items() if not name.startswith(late)}
    folder = single(tmp_path, kept)
    assert "embed.weight" in load_weights(folder, CONFIG, "prefill")
    assert "layers.7.attn" in refusal(folder, "decode")


def test_the_fingerprint_is_the_same_for_every_role(loaded):
    prefill = load(golden.DATA / "model_quantized.safetensors", "prefill")
    assert prefill.fingerprint == loaded.fingerprint
    assert len(loaded.fingerprint) == 32


def test_the_fingerprint_changes_with_one_bit_of_a_draft_tensor(values, tmp_path):
    base = load_weights(single(tmp_path, values), CONFIG, "prefill").fingerprint
    draft = values["mtp.2.norm.weight"].clone()
    draft.view(torch.int16)[0] ^= 1
    other = load_weights(single(tmp_path, values | {"mtp.2.norm.weight": draft}), CONFIG, "prefill")
    assert other.fingerprint != base


def test_a_missing_shard_is_named(values, tmp_path):
    folder = sharded(tmp_path, values)
    (folder / HALVES[1]).unlink()
    assert HALVES[1] in refusal(folder)


def test_an_empty_folder_is_refused_by_the_name_of_the_file_it_lacks(tmp_path):
    assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("kept_bytes", [-1, 4000, 9, 8, 7, 0])
def test_a_truncated_shard_is_named_with_expected_and_found_bytes(values, tmp_path, kept_bytes):
    path = sharded(tmp_path, values) / HALVES[0]
    path.write_bytes(path.read_bytes()[:kept_bytes])
    message = refusal(tmp_path)
    for part in (HALVES[0], "truncated", "expected", "found"):
        assert part in message


def test_bytes_after_the_last_tensor_are_refused(values, tmp_path):
    path = single(tmp_path, values) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    assert "overlong" in refusal(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b"\xff\xfe",
        b'{"embed.weight": 3}',
        b'{"embed.weight": {"dtype": "BF16", "shape": [1]}}',
        b'{"embed.weight": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 1]}}',
        b'{"embed.weight": {"dtype": "I8", "shape": [-1], "data_offsets": [0, 1]}}',
        b'{"embed.weight": {"dtype": "I8", "shape": [1.5], "data_offsets": [0, 1]}}',
    ],
)
def test_a_garbage_header_is_refused(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    assert "model.safetensors: the header is garbage" in refusal(tmp_path)


def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_named(tmp_path):
    header = b'{"embed.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 3]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0")
    assert "embed.weight: expected 4 bytes" in refusal(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "weight_map" in refusal(tmp_path)


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path):
    index = {"weight_map": {"embed.weight": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no plain file name" in refusal(tmp_path)


def test_a_tensor_that_the_index_promises_and_its_shard_lacks_is_named(values, tmp_path):
    path = sharded(tmp_path, values) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["embed.weight.more"] = HALVES[0]
    path.write_text(json.dumps(index))
    assert f"{HALVES[0]}: embed.weight.more is missing" in refusal(tmp_path)


def test_missing_tensors_are_counted_and_the_first_named(values, tmp_path):
    kept = {name: value for name, value in values.items() if not name.startswith("layers.5.ffn.")}
    message = refusal(single(tmp_path, kept))
    assert "layers.5.ffn.gate.weight" in message
    assert "30 tensors are missing" in message
    assert "and 25 more" in message


def test_a_missing_scale_is_a_missing_tensor(values, tmp_path):
    kept = {name: value for name, value in values.items() if name != EXPERT + ".scale"}
    assert EXPERT + ".scale" in refusal(single(tmp_path, kept))


def test_an_unknown_tensor_is_refused(values, tmp_path):
    folder = single(tmp_path, values | {"layers.8.attn.wkv.weight": torch.ones(2)})
    assert "model.safetensors: layers.8.attn.wkv.weight belongs to no tensor" in refusal(folder)


def test_a_tensor_that_occurs_twice_is_refused(values, tmp_path):
    folder = single(tmp_path, values | {"model.norm.weight": values["norm.weight"].clone()})
    assert "norm.weight is there twice" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "replacement", "expected"),
    [
        ("norm.weight", torch.ones(65).bfloat16(), "expected BF16 [64], found BF16 [65]"),
        ("norm.weight", torch.ones(64), "expected BF16 [64], found F32 [64]"),
        ("layers.0.attn.attn_sink", torch.ones(4).bfloat16(), "expected F32 [4], found BF16 [4]"),
        (EXPERT + ".weight", torch.zeros(64, 64, dtype=torch.int8), "expected I8 [64, 32]"),
        (EXPERT + ".scale", torch.zeros(64, 2, dtype=torch.uint8), "expected F8_E8M0 [64, 2]"),
        # A dequantised weight that kept its scales would be scaled twice.
        (EXPERT + ".weight", torch.zeros(64, 64).bfloat16(), "expected I8 [64, 32]"),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(values, tmp_path, name, replacement, expected):
    message = refusal(single(tmp_path, values | {name: replacement}))
    assert f"model.safetensors: {name}: {expected}" in message


@pytest.mark.parametrize(
    "name", [EXPERT, "layers.0.attn.wkv", "layers.3.engram.embed", "layers.1.engram.wkv"]
)
def test_a_nan_scale_is_named_by_its_weight_and_shard(values, tmp_path, name):
    scale = values[name + ".scale"].clone()
    scale.view(torch.uint8)[-1, 0] = 255
    message = refusal(single(tmp_path, values | {name + ".scale": scale}))
    assert f"model.safetensors: {name}.weight: expected finite values, found " in message


@pytest.mark.parametrize("name", ["layers.0.attn.wkv.weight", "embed.weight", "layers.0.hc_ffn_fn"])
def test_a_nan_weight_is_named(values, tmp_path, name):
    weight = values[name].clone()
    weight.view(torch.uint8)[0, : weight.itemsize] = 0x7F  # NaN in e4m3, and nearly so in bf16
    if weight.dtype != torch.float8_e4m3fn:
        weight[0, 0] = torch.nan
    message = refusal(single(tmp_path, values | {name: weight}))
    assert f"{name}: expected finite values, found 1 NaN or infinite" in message


def test_a_large_engram_table_is_checked_as_its_rows_are_read(values, tmp_path, monkeypatch):
    monkeypatch.setattr("flashmesh.kernels.engram_table.WHOLE_FILE_BYTES", 0)
    scale = values["layers.3.engram.embed.scale"].clone()
    scale.view(torch.uint8)[9, 0] = 255
    folder = single(tmp_path, values | {"layers.3.engram.embed.scale": scale})
    weights = load_weights(folder, CONFIG, "prefill")
    assert weights.engram_rows(3, torch.tensor([8])).isfinite().all()
    with pytest.raises(CheckpointError, match="engram.embed"):
        weights.engram_rows(3, torch.tensor([9]))


def test_a_rank_loads_its_experts_and_misses_no_others(values, tmp_path):
    theirs = tuple(f".ffn.experts.{expert}." for expert in (0, 1, 2, 3))
    drafts = tuple(f".ffn.experts.{expert}." for expert in (0, 1))
    held = {
        name: value
        for name, value in values.items()
        if not any(part in name for part in (drafts if name.startswith("mtp.") else theirs))
    }
    folder = single(tmp_path, held)
    weights = load_weights(folder, CONFIG, "all", experts=ExpertShard(1, 2))
    assert "layers.0.ffn.experts.4.w1.weight" in weights
    assert "layers.0.ffn.experts.3.w1.weight" not in weights
    assert "mtp.0.ffn.experts.2.w1.weight" in weights
    assert "mtp.0.ffn.experts.1.w1.weight" not in weights
    assert "layers.0.ffn.shared_experts.w1.weight" in weights
    with pytest.raises(CheckpointError, match="missing from all shards: .*experts.0.w1"):
        load_weights(folder, CONFIG, "all", experts=ExpertShard(0, 2))


def test_a_local_folder_is_used_as_it_is(tmp_path):
    assert checkpoint_folder(str(tmp_path), None) == tmp_path


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./none", "none", "a/b/c"])
def test_a_missing_folder_is_not_asked_of_the_hub(path):
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint_folder(path, None)


def test_a_download_needs_a_revision():
    with pytest.raises(CheckpointError, match="owner/name: no such folder; .* pin a revision"):
        checkpoint_folder("owner/name", None)


def test_a_failed_download_names_id_and_revision(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match="owner/name at revision v1.*offline"):
        checkpoint_folder("owner/name", "v1")


def test_a_download_fetches_the_named_revision(monkeypatch, tmp_path):
    asked = []

    def download(repo, *, revision, allow_patterns):
        asked.append((repo, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert checkpoint_folder("owner/name", "v1") == tmp_path
    assert asked == [("owner/name", "v1")]
