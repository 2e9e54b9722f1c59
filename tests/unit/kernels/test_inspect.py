"""What inspection says of the released model, and of checkpoints that do not fit."""

import json

import pytest
from support import golden
from support.real_index import write_real_index

from flashmesh import cli
from flashmesh.errors import CheckpointError
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.inspect import active_parameters, inspect_checkpoint


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    write_real_index(folder)
    return folder


@pytest.fixture(scope="module")
def found(real):
    return inspect_checkpoint(real)


@pytest.fixture
def small():
    folder = golden.checkpoint(quantized=True)
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_the_released_model_has_its_published_totals(found):
    assert found.total == (96_085, 510_286_023_000)
    assert found.num_shards == 48
    assert sum(found.parameters.values()) == 763_205_315_794
    assert found.kinds["F32"].num_bytes == 4 * 42_307_282
    assert found.problem is None


def test_kinds_and_parts_add_up(found):
    for totals in (found.kinds, found.parts):
        assert sum(total.num_tensors for total in totals.values()) == found.total.num_tensors
        assert sum(total.num_bytes for total in totals.values()) == found.total.num_bytes


def test_a_rank_of_64_loads_a_64th_of_the_routed_experts(real, found, capsys):
    # 40 layers of 384 and 3 draft blocks of 128, w1, w2 and w3 of 5120 x 2304 in FP4 with a scale for 32 values.
    expert = 3 * 5120 * 2304 * (1 / 2 + 1 / 32)
    routed = (40 * 384 + 3 * 128) * expert
    loaded = found.roles["decode"].loaded.num_bytes - routed * 63 / 64
    assert cli.main(["model", "inspect", str(real), "--expert-ranks", "64"]) == 0
    assert f"{int(loaded):,}" in capsys.readouterr().out


def test_the_released_model_activates_8_and_16_billion_parameters(found):
    for role, layers, rounded in (("prefill", 7.55, 8), ("decode", 15.75, 16)):
        active = found.active[role]
        assert round(active.layers / 1e9, 2) == layers
        assert round(active.layers / 1e9) == rounded
        assert round((active.layers + active.others) / 1e9) == rounded


def test_the_released_model_takes_890_bytes_of_kv_a_token(found):
    assert found.kv_bytes_per_token == 890
    assert found.block_bytes == 113_920


def test_a_prefill_loads_less_than_half_and_maps_the_same_tables(found):
    prefill, decode = found.roles["prefill"], found.roles["decode"]
    assert prefill.mapped == decode.mapped
    assert prefill.mapped.num_bytes == (384_006_168 + 384_016_682) * (256 + 8)
    assert prefill.loaded.num_bytes < decode.loaded.num_bytes / 2
    vision = found.parts["vision"]
    assert decode.loaded.num_bytes + decode.mapped.num_bytes + vision.num_bytes == (
        found.total.num_bytes
    )


def test_a_token_uses_its_chosen_share_of_the_experts():
    raw = json.loads((golden.DATA / "config.json").read_text())
    one = active_parameters(ModelConfig.from_dict(raw), "decode")
    raw["text_config"]["num_experts_per_tok"] += 1
    two = active_parameters(ModelConfig.from_dict(raw), "decode")
    assert two.layers - one.layers == 8 * 3 * 64 * 64
    assert two.others == one.others


def test_what_does_not_fit_is_shown_and_exits_1(small, capsys):
    config = json.loads((small / "config.json").read_text())
    config["text_config"]["q_lora_rank"] = 96
    (small / "config.json").write_text(json.dumps(config))
    assert "expected" in inspect_checkpoint(small).problem
    assert cli.main(["model", "inspect", str(small)]) == 1
    assert "unusable: model.safetensors: layers.0.attn." in capsys.readouterr().out


def test_a_good_checkpoint_is_shown_and_exits_0(small, capsys):
    assert cli.main(["model", "inspect", str(small)]) == 0
    shown = capsys.readouterr().out
    assert "bytes a token" in shown
    assert "names, shapes and dtypes fit config.json" in shown


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        inspect_checkpoint(tmp_path)
