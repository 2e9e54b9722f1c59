"""Weights kept in their stored format give the bits of weights expanded once."""

import shutil

import pytest
import torch
from support import golden

from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.engine import load_engine
from flashmesh.kernels.formats import quantise
from flashmesh.kernels.stored_tensor import StoredTensor
from flashmesh.kernels.tensor_names import engram_table_name, needed_by
from flashmesh.kernels.weights import load_weights

CONFIG = ModelConfig.load(golden.DATA)


@pytest.fixture(scope="module")
def folder():
    folder = golden.checkpoint(quantized=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def kept(folder):
    return load_weights(folder, CONFIG, "all", expand_below_bytes=0)


@pytest.fixture(scope="module")
def expanded(folder):
    return load_weights(folder, CONFIG, "all")


def engine(folder, expand_below_mb):
    return load_engine(
        folder, role="all", name="golden", num_pages=8, num_slots=2, expand_below_mb=expand_below_mb
    )


@pytest.mark.parametrize("sequence", ["s40", "s150"])
def test_logits_are_the_same_bit_for_bit(folder, sequence):
    tokens = golden.ids(sequence)
    stored, fp32 = (golden.full_forward(engine(folder, mb), tokens) for mb in (0, 2048))
    assert torch.equal(stored, fp32)


def test_every_tensor_has_the_same_bits(kept, expanded):
    tables = {engram_table_name(layer) for layer in CONFIG.engram_layer_ids}
    for spec in needed_by(CONFIG, "all"):
        if spec.name not in tables:
            assert torch.equal(kept[spec.name], expanded[spec.name]), spec.name
            assert kept[spec.name].dtype == torch.float32


def test_experts_and_rows_are_those_of_the_whole(kept, expanded):
    for weights in (kept, expanded):
        for part, value in zip((1, 2, 3), weights.experts("layers.2.")[5], strict=True):
            assert torch.equal(value, weights[f"layers.2.ffn.experts.5.w{part}.weight"])
        ids = torch.tensor([7, 0, 7])
        for name in ("embed.weight", "layers.0.attn.wkv.weight"):
            assert torch.equal(weights.rows(name, ids), weights[name][ids])


def test_kept_weights_take_a_fraction_of_the_memory(kept, expanded):
    assert kept.num_bytes < expanded.num_bytes / 3


@pytest.mark.parametrize(("kind", "code"), [("F8", 0x7F), ("F8", 0xFF)])
def test_a_nan_code_is_seen_without_expanding(kind, code):
    weight, scale = quantise(kind, torch.randn(64, 64))
    assert StoredTensor(kind, weight, scale).is_finite()
    weight.view(torch.uint8)[63, 63] = code
    assert not StoredTensor(kind, weight, scale).is_finite()


@pytest.mark.parametrize(("byte", "finite"), [(255, False), (254, False), (245, True)])
def test_a_scale_that_overflows_is_seen(byte, finite):
    weight, scale = quantise("F8", torch.full((32, 32), 448.0))
    scale.view(torch.uint8)[:] = byte
    tensor = StoredTensor("F8", weight, scale)
    assert tensor.is_finite() == finite == bool(tensor.expand().isfinite().all())


def test_a_large_scale_over_small_codes_is_finite():
    weight, scale = quantise("F4", torch.zeros(32, 32))
    scale.view(torch.uint8)[:] = 254
    assert StoredTensor("F4", weight, scale).is_finite()
