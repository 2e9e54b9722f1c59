import importlib
import math
import shutil

import pytest
import torch
from support import golden
from support.device import device_runner

from flashmesh.bench import gpu
from flashmesh.bench.gpu.bounds import watched
from flashmesh.bench.gpu.case import Case, Ceilings, Figure
from flashmesh.bench.gpu.slice_model import RandomSource, slice_config
from flashmesh.bench.registry import SUITES, select
from flashmesh.errors import KernelsUnavailable
from flashmesh.kernels.tensor_names import tensors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_hopper_gpu_is_told_so():
    (benchmark,) = select("gpu").values()
    with pytest.raises(KernelsUnavailable, match="Hopper"):
        list(benchmark.run(lambda: None))
    assert "gpu" not in SUITES["all"]


def test_every_family_has_cases():
    for family in gpu.FAMILIES:
        if family != "slice":
            assert callable(importlib.import_module(f"flashmesh.bench.gpu.{family}").cases)


def test_a_bound_is_the_slower_of_moving_and_multiplying():
    ceilings = Ceilings(copy=4e12, bf16=700e12, fp8=1200e12)
    moving = Case("a.1", run=print, num_bytes=4 * 10**12, num_flops=7 * 10**12)
    multiplying = Case("a.2", run=print, num_bytes=1, num_flops=14 * 10**14)
    assert ceilings.bound(moving) == 1
    assert ceilings.bound(multiplying) == 2


def test_a_figure_reads_as_a_line():
    line = str(
        Figure("op.8", took=2e-6, bound=1e-6, num_bytes=10**6, peer_name="x", peer_took=4e-6)
    )
    assert line.split()[:3] == ["gpu.op.8", "0.50", "2.0"]
    assert line.endswith("x 4.0 us = 2.00x")


def test_watching_a_step_counts_its_work_and_changes_nothing():
    folder = golden.checkpoint(quantized=True)
    runner = device_runner(folder, rounded=True)
    shutil.rmtree(folder)
    tokens, log = golden.ids("s40"), []
    plain = runner.open(64)
    expected = runner.prefill(plain, tokens, decoder_rows=64).clone()
    runner.close(plain)
    ops, runner.model.ops = runner.model.ops, watched(runner.model.ops, log)
    state = runner.open(64)
    assert torch.equal(runner.prefill(state, tokens, decoder_rows=64), expected)
    runner.close(state)
    by_op = {work.op for work in log}
    assert {"dense", "experts", "sparse_attention", "index_scores", "engram_rows"} <= by_op
    assert by_op <= set(ops.report())
    assert all(work.num_bytes > 0 for work in log)
    config = runner.model.config
    first = next(work for work in log if work.op == "dense")
    width = config.q_lora_rank + config.head_dim
    if config.engram_layer_ids[0] > 0:  # the first product is the first layer's latents
        assert first.num_flops == 2 * 40 * width * config.hidden_size
    experts = next(work for work in log if work.op == "experts")
    slots = 40 * config.num_experts_per_tok
    assert experts.num_flops == 6 * slots * config.hidden_size * config.moe_intermediate_size


def test_the_slice_has_the_released_sizes_and_finite_weights_of_unit_gain():
    config = slice_config()
    assert (config.hidden_size, config.n_routed_experts, config.num_encoder_layers) == (
        5120,
        384,
        2,
    )
    source = RandomSource(config, torch.device("cpu"), seed=3)
    names = {spec.name: spec for spec in tensors(config)}
    for name in (
        "layers.0.attn.wq_a.weight",
        "layers.2.ffn.experts.383.w2.weight",
        "layers.1.attn.compressor.wgate.weight",
        "layers.3.attn_norm.weight",
    ):
        value = source(name)
        values = value.expand() if hasattr(value, "kind") else value.float()
        assert values.shape == names[name].shape
        assert torch.isfinite(values).all()
        if "norm" not in name:
            gain = float(values.std()) * math.sqrt(values.shape[1])
            assert 0.5 < gain < 2
