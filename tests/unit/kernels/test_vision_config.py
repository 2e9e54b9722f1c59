"""Reading `vision_config`: the released values, towers that are not there, and every problem at once."""

import json

import pytest
from support import golden
from support.vision import RELEASED

from flashmesh.errors import CheckpointError
from flashmesh.kernels.vision_config import VisionConfig


def refusal(changes, dropped=()):
    table = {key: value for key, value in (RELEASED | changes).items() if key not in dropped}
    with pytest.raises(CheckpointError) as caught:
        VisionConfig.from_dict({"vision_config": table})
    return str(caught.value)


def test_the_released_table_is_read():
    config = VisionConfig.from_dict({"vision_config": RELEASED})
    assert (config.head_dim, config.patch_values) == (64, 588)
    assert (config.rope_theta, config.min_pixels) == (10000.0, 295936)


@pytest.mark.parametrize("raw", [{}, {"vision_config": None}])
def test_a_checkpoint_may_have_no_table(raw):
    assert VisionConfig.from_dict(raw) is None


def test_a_table_of_no_layers_describes_no_tower():
    assert VisionConfig.load(golden.DATA) is None


def test_a_folder_without_config_json_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        VisionConfig.load(tmp_path)


def test_the_table_of_a_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": RELEASED}))
    assert VisionConfig.load(tmp_path).num_hidden_layers == 32


def test_all_problems_are_named_at_once():
    message = refusal(
        {"patch_size": "14", "min_pixels": 1.5, "rope_theta": True, "max_wh_ratio": 200},
        dropped=("hidden_size",),
    )
    for part in (
        "vision_config: ",
        "max_wh_ratio is 200, only null is supported",
        "hidden_size is missing",
        "patch_size: '14' is not a number",
        "min_pixels: 1.5 is not a whole number",
        "rope_theta: True is not a number",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_hidden_layers": -1, "patch_size": 0}, "num_hidden_layers must be > 0; patch_size"),
        ({"num_attention_heads": 15}, "num_attention_heads must divide hidden_size"),
        ({"hidden_size": 96}, "a head is 6 wide, which must be a multiple of 4"),
        ({"max_image_tokens": 3}, "max_image_tokens must be >= 4"),
        ({"rope_theta": float("nan")}, "rope_theta must be > 0"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(changes, expected):
    assert expected in refusal(changes)


def test_a_table_of_another_kind_is_refused():
    with pytest.raises(CheckpointError, match="expected a table"):
        VisionConfig.from_dict({"vision_config": [1]})
