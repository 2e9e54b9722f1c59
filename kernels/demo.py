"""The built-in checkpoint: this architecture at a few megabytes, in exactly the released format.

Its weights are random, so its text is noise; everything else is as in the released model: all mechanisms, names,
formats, draft tensors, and a tokenizer with the same special tokens. It is made on first use, in seconds, and equal on
every machine with the same versions.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.engram import bucket_primes, token_map
from flashmesh.kernels.formats import quantise, stored
from flashmesh.kernels.shards import INDEX_FILE
from flashmesh.kernels.tensor_names import TensorSpec, scale_name, tensors, vision_tensors
from flashmesh.kernels.vision_config import VisionConfig

MAKER_VERSION = 1
"""Counts changes of what a seed gives."""

_ENGRAM_START = 512
_ENGRAM_HEADS = 2
_SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 16384,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "compress_rope_theta": 160000,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 6],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 16,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4,
    "engram_n_heads": _ENGRAM_HEADS,
    "engram_head_dim": 32,
    "engram_vocab_size": _ENGRAM_START,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
_VISION_SIZES: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 84 * 84,
    "max_wh_ratio": None,
}


def demo_checkpoint(cache_dir: Path, *, seed: int = 0) -> Path:
    """Returns the built-in checkpoint's folder, making it if it is not there yet."""
    identity = json.dumps([MAKER_VERSION, seed, torch.__version__, demo_config()], sort_keys=True)
    folder = cache_dir / f"demo-random-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        make_demo_checkpoint(folder, seed=seed)
    return folder


def make_demo_checkpoint(folder: Path, *, seed: int = 0, vision: bool = False) -> None:
    """Writes the checkpoint; the folder appears complete or not at all.

    Args:
        folder: must not exist yet; a concurrent maker of the same one is no error.
        seed: of the weights.
        vision: add a vision tower; no other tensor changes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        raw = demo_config(vision=vision)
        (temporary / "config.json").write_text(json.dumps(raw, indent=1))
        (temporary / "tokenizer.json").write_text(_tokenizer_text())
        _write_shards(temporary, raw, seed)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else somebody else has just made the same one
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def demo_config(*, vision: bool = False) -> dict[str, Any]:
    """Returns config.json's contents; what depends on the tokenizer is computed from it."""
    tokenizer = Tokenizer.from_str(_tokenizer_text())
    primes = bucket_primes(
        num_layers=len(_SIZES["engram_layer_ids"]),
        num_orders=_SIZES["engram_max_ngram_size"] - 1,
        num_heads=_ENGRAM_HEADS,
        start=_ENGRAM_START,
    )
    text = _SIZES | {
        "model_type": "deepseek_v41_text",
        "engram_num_embeddings": [sum(map(sum, layer)) for layer in primes],
        "engram_compressed_vocab_size": int(token_map(tokenizer, _SIZES["vocab_size"]).max()) + 1,
        "dspark_noise_token_id": tokenizer.token_to_id("<｜noise｜>"),
    }
    raw = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": tokenizer.token_to_id("<｜image｜>"),
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }
    return raw | {"vision_config": _VISION_SIZES} if vision else raw


def _tokenizer_text() -> str:
    return resources.files("flashmesh.data").joinpath("tokenizer.json").read_text("utf-8")


def _write_shards(folder: Path, raw: dict[str, Any], seed: int) -> None:
    """Writes backbone, draft and the vision tower if there is one, a shard each, and their index."""
    config, vision = ModelConfig.from_dict(raw), VisionConfig.from_dict(raw)
    specs = {
        "backbone": [s for s in tensors(config) if not s.name.startswith("mtp.")],
        "draft": [s for s in tensors(config) if s.name.startswith("mtp.")],
    }
    if vision is not None:
        specs["vision"] = list(vision_tensors(vision, config.hidden_size))
    shards = [_stored_values(part, config, seed) for part in specs.values()]
    weight_map: dict[str, str] = {}
    total = 0
    for number, values in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(values, folder / name)
        weight_map |= dict.fromkeys(values, name)
        total += sum(value.nbytes for value in values.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1))


def _stored_values(specs: list[TensorSpec], config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Draws tensors and stores them in their formats, by name."""
    shard: dict[str, Tensor] = {}
    for spec in specs:
        weight, scale = quantise(spec.kind, _values(spec, config, seed))
        shard[spec.name] = weight.contiguous()
        if scale is not None:
            shard[scale_name(spec.name)] = scale.contiguous()
        assert tuple(weight.shape) == stored(spec.kind, spec.shape).shape
    return shard


def _values(spec: TensorSpec, config: ModelConfig, seed: int) -> Tensor:
    """Draws one tensor, from a stream of its own so that no other tensor moves it."""
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    noise = torch.randn(
        spec.shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    )
    name = spec.name
    if name.endswith(("norm.weight", "q_weight", "k_weight", "norm1.weight", "norm2.weight")):
        return 1 + 0.1 * noise
    if name.endswith("_scale"):
        return 0.5 + 0.05 * noise
    if name.endswith(("_base", "attn_sink", "gate.bias", "gate.bias_vl")):
        return 0.2 * noise
    if name in ("embed.weight", "head.weight") or "engram.embed" in name or "markov" in name:
        # Logits a few units wide, so that neither one token nor chance decides everything.
        return noise * (1.0 if name != "head.weight" else 3 * math.pow(config.hidden_size, -0.5))
    return noise * math.pow(spec.shape[-1], -0.5)
