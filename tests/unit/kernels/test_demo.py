"""The built-in checkpoint: complete, in the released format, reused, and not degenerate."""

import pytest
import torch
from safetensors.torch import load_file
from support import golden

from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.demo import demo_checkpoint, make_demo_checkpoint
from flashmesh.kernels.door import RowRun
from flashmesh.kernels.engine import load_engine
from flashmesh.kernels.engram import load_token_map
from flashmesh.kernels.formats import stored
from flashmesh.kernels.sampler import SequenceSampler
from flashmesh.kernels.tensor_names import scale_name, tensors
from flashmesh.kernels.weights import load_weights
from flashmesh.types import SamplingParams


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def folder(cache):
    return demo_checkpoint(cache)


def test_it_stays_below_8_megabytes(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8_000_000


def test_an_existing_one_is_reused(cache, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert demo_checkpoint(cache) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert list(cache.iterdir()) == [folder]


def test_an_interrupted_maker_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("flashmesh.kernels.maker._write_shards", fail)
    with pytest.raises(KeyboardInterrupt):
        make_demo_checkpoint(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_every_tensor_is_stored_as_the_released_format_says(folder):
    found = {}
    for shard in folder.glob("*.safetensors"):
        found |= load_file(shard)
    for spec in tensors(ModelConfig.load(folder)):
        layout = stored(spec.kind, spec.shape)
        assert tuple(found.pop(spec.name).shape) == layout.shape
        if layout.scale_shape is not None:
            assert tuple(found.pop(scale_name(spec.name)).shape) == layout.scale_shape
    assert found == {}


def test_two_makers_with_one_seed_agree_and_other_seeds_differ(folder, tmp_path):
    make_demo_checkpoint(tmp_path / "same", seed=0)
    make_demo_checkpoint(tmp_path / "other", seed=1)
    for path in folder.iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()
    for shard in folder.glob("*.safetensors"):
        assert (tmp_path / "other" / shard.name).read_bytes() != shard.read_bytes()


def test_its_tokenizer_is_the_one_that_its_config_was_made_for(folder):
    config = ModelConfig.load(folder)
    assert len(load_token_map(folder, config)) == config.vocab_size == 4096


def test_router_biases_sinks_and_stream_bases_are_not_zero(folder):
    weights = load_weights(folder, ModelConfig.load(folder), "all")
    for name in ("ffn.gate.bias", "ffn.gate.bias_vl", "attn.attn_sink", "hc_attn_base"):
        assert weights[f"layers.5.{name}"].abs().min() > 0


def test_greedy_text_is_neither_one_token_nor_one_of_near_ties(folder):
    engine = load_engine(folder, role="all", name="demo", num_pages=4, num_slots=1, threads=1)
    prompt = list(range(100, 140))
    sampler = SequenceSampler(SamplingParams(), prompt, engine.info)
    with engine.open(golden.full_plan(96), []) as session:
        run = RowRun(
            session=session,
            tokens=prompt,
            num_logits=1,
            sampler=sampler,
            keep_logits=True,
        )
        drawn, gaps = [], []
        for _ in range(32):
            result = engine.step([run])[0]
            drawn += result.tokens
            sampler.accept(result.tokens)
            best = result.logits[-1].topk(2).values
            gaps.append(float(best[0] - best[1]))
            run.tokens = result.tokens
    assert len(set(drawn)) > 16
    assert torch.tensor(gaps).median() > 0.01
