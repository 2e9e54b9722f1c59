"""Small models for the device ops, and passes over them."""

import json

import torch

from flashmesh.bench.gpu.slice_model import RandomSource
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.device.build import build_runner
from flashmesh.kernels.engram import bucket_primes, load_token_map
from flashmesh.kernels.ops.table import load_ops
from flashmesh.kernels.weights import load_weights
from support import golden

MAX_TOKENS = 4096
ROOM = {"num_slots": 4, "num_pages": 4 * MAX_TOKENS // 128, "max_tokens": MAX_TOKENS}
"""Four sequences."""


def random_runner(raw, *, backend, device="cuda", seed=1, graphs=False):
    """A model of random weights with its draft module, drawn on the device: the same ones for every backend."""
    device, config = torch.device(device), ModelConfig.from_dict(raw)
    return build_runner(
        config,
        RandomSource(config, device, seed),
        torch.arange(config.vocab_size) % config.engram_compressed_vocab_size,
        load_ops(backend),
        device,
        **ROOM,
        max_anchors=4,
        round_activations=True,
        use_graphs=graphs,
    )


def device_runner(folder, *, backend="reference", device="cpu", rounded=False, drafts=False):
    """Loads a checkpoint into a device model."""
    config = ModelConfig.load(folder)
    return build_runner(
        config,
        load_weights(folder, config, "all", expand_below_bytes=0).stored,
        load_token_map(folder, config),
        load_ops(backend),
        torch.device(device),
        **ROOM,
        max_anchors=4 if drafts else 0,
        round_activations=rounded,
        use_graphs=False,
    )


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
