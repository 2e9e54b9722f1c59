"""Small models for the device ops, and passes over them."""

import json

import torch

from flashmesh.bench.gpu.slice_model import RandomSource
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.device.caches import DeviceCaches
from flashmesh.kernels.device.draft import DeviceDrafter
from flashmesh.kernels.device.model import DeviceModel
from flashmesh.kernels.device.runner import DeviceRunner
from flashmesh.kernels.device.weights import WeightMaker
from flashmesh.kernels.engram import EngramHash, bucket_primes, load_token_map
from flashmesh.kernels.ops.table import load_ops
from flashmesh.kernels.weights import load_weights
from support import golden


def random_runner(raw, *, backend, device="cuda", seed=1, max_tokens=4096, graphs=False):
    """A model of random weights, drawn on the device: the same ones for every backend."""
    device, config, ops = torch.device(device), ModelConfig.from_dict(raw), load_ops(backend)
    maker = WeightMaker(config, RandomSource(config, device, seed), ops, device)
    weights = maker.make()
    table = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    hashes = EngramHash(config, table).to(device)
    caches = DeviceCaches(config, 4, 4 * max_tokens // 128, device)
    model = DeviceModel(config, weights, hashes, caches, ops, round_activations=True)
    runner = DeviceRunner(model, max_tokens, use_graphs=graphs)
    runner.drafter = DeviceDrafter(config, maker, model, weights.embed, weights.head, 4)
    return runner


def device_runner(
    folder, *, backend="reference", device="cpu", max_tokens=4096, rounded=False, graphs=False
):
    """Loads a checkpoint into a device model with room for four sequences."""
    device = torch.device(device)
    config = ModelConfig.load(folder)
    weights = load_weights(folder, config, "all", expand_below_bytes=0)
    ops = load_ops(backend)
    prepared = WeightMaker(config, weights.stored, ops, device).make()
    caches = DeviceCaches(config, 4, 4 * max_tokens // 128, device)
    hashes = EngramHash(config, load_token_map(folder, config)).to(device)
    model = DeviceModel(config, prepared, hashes, caches, ops, round_activations=rounded)
    return DeviceRunner(model, max_tokens, use_graphs=graphs)


def small_raw():
    """config.json of a model whose sizes the Hopper kernels take: real heads, few of everything else."""
    raw = json.loads((golden.DATA / "config.json").read_text())
    text = raw["text_config"]
    primes = bucket_primes(num_layers=1, num_orders=3, num_heads=8, start=text["engram_vocab_size"])
    text.update(
        num_hidden_layers=6,
        compress_ratios=[0, 2, 2, 1, 1, 1, 0],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3, 5],
        candidate_source_layer_id=3,
        engram_layer_ids=[1],
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=[3, 4, 5],
        engram_n_heads=8,
        engram_head_dim=256,
        engram_num_embeddings=[sum(map(sum, layer)) for layer in primes],
        hidden_size=512,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=256,
        o_lora_rank=128,
        o_groups=8,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_experts_per_tok=6,
        sliding_window=128,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=64,
        candidate_topk_blocks=16,
        dspark_markov_rank=256,
        dspark_n_routed_experts=16,
        dspark_num_experts_per_tok=3,
    )
    return raw


def with_drafter(runner, folder, max_anchors=4):
    """Adds the draft module to a runner."""
    config, model = runner.model.config, runner.model
    weights = load_weights(folder, config, "all", expand_below_bytes=0)
    device = model.caches.window[0].device
    maker = WeightMaker(config, weights.stored, model.ops, device)
    embed, head = maker.bf16("embed.weight"), maker.bf16("head.weight")
    runner.drafter = DeviceDrafter(config, maker, model, embed, head, max_anchors)
    return runner
