"""Small checkpoints of any configuration: in the released format, loadable, and repeatable."""

import json

import pytest
from support import golden

from flashmesh import cli
from flashmesh.errors import CheckpointError, InvalidRequest
from flashmesh.kernels.demo import make_demo_checkpoint, make_tiny_checkpoint
from flashmesh.kernels.engine import load_engine
from flashmesh.kernels.inspect import inspect_checkpoint

CONFIG = golden.DATA / "config.json"


def config(folder, **changes):
    raw = json.loads(CONFIG.read_text())
    raw["text_config"] |= changes
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return path


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_configuration_with_its_tokenizer_is_kept_and_runs(tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["model", "make-tiny", str(out), "--config", str(CONFIG), "--seed", "3"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert json.loads((out / "config.json").read_text()) == json.loads(CONFIG.read_text())
    assert inspect_checkpoint(out).problem is None
    engine = load_engine(out, role="all", name="tiny", num_pages=2, num_slots=1)
    assert golden.full_forward(engine, [5, 6, 7]).isfinite().all()


def test_without_a_tokenizer_beside_it_the_built_in_one_is_taken(tmp_path):
    make_tiny_checkpoint(tmp_path / "out", config_file=config(tmp_path, vocab_size=700))
    load_engine(tmp_path / "out", role="prefill", name="tiny", num_pages=1, num_slots=1)


def test_a_flat_configuration_is_accepted(tmp_path):
    raw = json.loads(CONFIG.read_text())
    path = tmp_path / "flat.json"
    path.write_text(json.dumps({**raw, **raw.pop("text_config"), "vision_config": None}))
    tokenizer = golden.DATA / "tokenizer.json"
    make_tiny_checkpoint(tmp_path / "out", config_file=path, tokenizer_file=tokenizer)
    assert inspect_checkpoint(tmp_path / "out").problem is None


def test_one_seed_gives_the_same_bytes_and_no_configuration_the_built_in_sizes(tmp_path):
    make_tiny_checkpoint(tmp_path / "one")
    make_demo_checkpoint(tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_an_existing_folder_is_left_alone(tmp_path):
    with pytest.raises(InvalidRequest, match="already"):
        make_tiny_checkpoint(tmp_path)


def test_a_large_model_is_refused_before_anything_is_drawn(tmp_path):
    path = config(tmp_path, hidden_size=1 << 20)
    with pytest.raises(InvalidRequest, match="too many to make"):
        make_tiny_checkpoint(tmp_path / "out", config_file=path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "{}", '{"text_config": {"vocab_size": 5}}'])
def test_an_unusable_configuration_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        make_tiny_checkpoint(tmp_path / "out", config_file=path)
