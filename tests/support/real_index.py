"""The released model's checkpoint without its payload: true names, shapes, dtypes and sizes.

Written from the published inventory and not from `tensor_names`, which it checks. Shards have their
real headers and their real lengths, but are holes from there on, so half a terabyte takes some
megabytes of disk.
"""

from __future__ import annotations

import json
import math
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Tensors = Iterator[tuple[str, str, tuple[int, ...]]]

HIDDEN, INNER, VOCAB, LATENT = 5120, 2304, 129280, 1280
ENGRAM_ROWS = {1: 384_006_168, 14: 384_016_682}
KV_SOURCES = (2, 8, 14, 20)
INDEX_SOURCES = (2, 8, 14, 20, 24, 28, 32, 36)
ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
NUM_SHARDS = 48
TEXT_CONFIG = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 40, "num_attention_heads": 64,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": LATENT, "o_lora_rank": 1024,
    "o_groups": 8, "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "max_position_embeddings": 1048576,
    "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "moe_intermediate_size": INNER, "n_routed_experts": 384, "num_experts_per_tok": 6,
    "n_shared_experts": 1, "routed_scaling_factor": 1.5, "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": list(KV_SOURCES), "index_source_layer_ids": list(INDEX_SOURCES),
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
    "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "engram_layer_ids": list(ENGRAM_ROWS), "engram_num_embeddings": list(ENGRAM_ROWS.values()),
    "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256,
    "engram_vocab_size": 16_000_000, "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 3, "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
}  # fmt: skip
VISION_CONFIG = {
    "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16,
    "intermediate_size": 2816, "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3,
    "max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": None,
}  # fmt: skip
CONFIG = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
    "tie_word_embeddings": False, "text_config": TEXT_CONFIG, "vision_config": VISION_CONFIG,
}  # fmt: skip


def write_real_index(folder: Path) -> None:
    """Writes config.json, the index and 48 sparse shards of 510 GB together."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for number in range(1, NUM_SHARDS + 1):
        name = f"model-{number:05d}-of-{NUM_SHARDS:05d}.safetensors"
        weight_map |= dict.fromkeys(_write_shard(folder / name, shard_tensors(number)), name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_shard(path: Path, tensors: Tensors) -> list[str]:
    header, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + end)
    return list(header)


def shard_tensors(number: int) -> Tensors:
    """What shard 1 to 48 holds: vision and embeddings, a layer each, the draft, the Engram layers."""
    if number == 1:
        yield from vision()
    elif number == 2:
        yield "embed.weight", "BF16", (VOCAB, HIDDEN)
        yield "head.weight", "BF16", (VOCAB, HIDDEN)
        yield "norm.weight", "BF16", (HIDDEN,)
        for mark in ("start", "end", "newline"):
            yield f"image_{mark}", "BF16", (HIDDEN,)
    elif number <= 42:
        yield from backbone_layer(number - 3)
    elif number <= 45:
        yield from block(f"mtp.{number - 43}.", 128)
    elif number == 46:
        yield from draft_extras()
    else:
        yield from engram({47: 1, 48: 14}[number])


def f8(name: str, rows: int, columns: int) -> Tensors:
    """A weight with a scale for each 32x32 tile."""
    yield name + ".weight", "F8_E4M3", (rows, columns)
    yield name + ".scale", "F8_E8M0", (-(-rows // 32), -(-columns // 32))


def f4(name: str, rows: int, columns: int) -> Tensors:
    """Two codes a byte, a scale for each row and 32 columns."""
    yield name + ".weight", "I8", (rows, columns // 2)
    yield name + ".scale", "F8_E8M0", (rows, columns // 32)


def block(prefix: str, num_experts: int) -> Tensors:
    """What backbone layers and draft blocks share."""
    for site in ("attn", "ffn"):
        yield f"{prefix}{site}_norm.weight", "BF16", (HIDDEN,)
        yield f"{prefix}hc_{site}_fn", "F32", (24, 20480)
        yield f"{prefix}hc_{site}_base", "F32", (24,)
        yield f"{prefix}hc_{site}_scale", "F32", (3,)
    yield from f8(prefix + "attn.wq_a", LATENT, HIDDEN)
    yield prefix + "attn.q_norm.weight", "BF16", (LATENT,)
    yield from f8(prefix + "attn.wq_b", 32768, LATENT)
    yield from f8(prefix + "attn.wkv", 512, HIDDEN)
    yield prefix + "attn.kv_norm.weight", "BF16", (512,)
    yield from f8(prefix + "attn.wo_a", 8192, 4096)
    yield from f8(prefix + "attn.wo_b", HIDDEN, 8192)
    yield prefix + "attn.attn_sink", "F32", (64,)
    yield prefix + "ffn.gate.weight", "BF16", (num_experts, HIDDEN)
    yield prefix + "ffn.gate.bias", "F32", (num_experts,)
    yield prefix + "ffn.gate.bias_vl", "F32", (num_experts,)
    shared = prefix + "ffn.shared_experts."
    yield from f8(shared + "w1", INNER, HIDDEN)
    yield from f8(shared + "w3", INNER, HIDDEN)
    yield from f8(shared + "w2", HIDDEN, INNER)
    for expert in range(num_experts):
        yield from f4(f"{prefix}ffn.experts.{expert}.w1", INNER, HIDDEN)
        yield from f4(f"{prefix}ffn.experts.{expert}.w3", INNER, HIDDEN)
        yield from f4(f"{prefix}ffn.experts.{expert}.w2", HIDDEN, INNER)


def backbone_layer(layer: int) -> Tensors:
    """A layer with its compressor and indexer, Engram excepted."""
    prefix = f"layers.{layer}."
    yield from block(prefix, 384)
    if layer in KV_SOURCES:
        yield prefix + "attn.compressor.wkv.weight", "BF16", (512, HIDDEN)
        if layer != 20:
            yield prefix + "attn.compressor.wgate.weight", "BF16", (512, HIDDEN)
        yield prefix + "attn.compressor.norm.weight", "BF16", (512,)
        yield prefix + "attn.indexer.wk.weight", "BF16", (128, 512)
        yield prefix + "attn.indexer.k_norm.weight", "BF16", (128,)
    if layer in INDEX_SOURCES:
        yield from f8(prefix + "attn.indexer.wq_b", 4096, LATENT)
        yield prefix + "attn.indexer.weights_proj.weight", "BF16", (32, HIDDEN)


def engram(layer: int) -> Tensors:
    """One lookup table and what turns its rows into values."""
    prefix, rows = f"layers.{layer}.engram.", ENGRAM_ROWS[layer]
    yield prefix + "embed.weight", "F8_E4M3", (rows, 256)
    yield prefix + "embed.scale", "F8_E8M0", (rows, 8)
    yield from f8(prefix + "wkv", 25600, 6144)
    yield prefix + "q_weight", "BF16", (4, HIDDEN)
    yield prefix + "k_weight", "BF16", (4, HIDDEN)


def draft_extras() -> Tensors:
    """What only the first or the last draft block has."""
    yield from f8("mtp.0.main_proj", HIDDEN, 15360)
    yield "mtp.0.main_norm.weight", "BF16", (HIDDEN,)
    yield "mtp.2.norm.weight", "BF16", (HIDDEN,)
    yield "mtp.2.markov_head.embed.weight", "BF16", (VOCAB, 256)
    yield "mtp.2.markov_head.head.weight", "BF16", (VOCAB, 256)
    yield "mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)


def vision() -> Tensors:
    """The tower and the aligner."""
    yield from affine("vision.patch_embed.proj", 1024, 588)
    for index in range(32):
        prefix = f"vision.blocks.{index}."
        yield prefix + "norm1.weight", "BF16", (1024,)
        yield prefix + "norm2.weight", "BF16", (1024,)
        yield from affine(prefix + "attn.wqkv", 3072, 1024)
        yield from affine(prefix + "attn.wo", 1024, 1024)
        yield prefix + "mlp.w1.weight", "BF16", (5632, 1024)
        yield prefix + "mlp.w2.weight", "BF16", (1024, 2816)
    yield "vision.norm.weight", "BF16", (1024,)
    yield from affine("aligner.w1", HIDDEN, 9216)
    yield from affine("aligner.w2", HIDDEN, HIDDEN)


def affine(name: str, rows: int, columns: int) -> Tensors:
    """A matrix and a bias."""
    yield name + ".weight", "BF16", (rows, columns)
    yield name + ".bias", "BF16", (rows,)
