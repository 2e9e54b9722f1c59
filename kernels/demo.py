"""The random checkpoint: this architecture at a few megabytes, in exactly the released format.

Its weights are random, so its text is noise; everything else is as in the released model: all mechanisms, names,
formats, draft tensors, and a tokenizer with the same special tokens. It is made on first use, in seconds, and equal on
every machine with the same versions. `maker` writes the files; here are the sizes. The trained demo checkpoint, which
is shipped, is another one (`flashmesh.data.demo_folder`).
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from flashmesh.errors import CheckpointError, InvalidRequest
from flashmesh.kernels.maker import (
    QUANTIZATION,
    built_in_tokenizer,
    tokenizer_keys,
    write_checkpoint,
)

if TYPE_CHECKING:
    from pathlib import Path

MAKER_VERSION = 1
"""Counts changes of what a seed gives."""

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
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 512,
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
    """Returns the random checkpoint's folder, making it if it is not there yet."""
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
    try:
        write_checkpoint(folder, demo_config(vision=vision), built_in_tokenizer(), seed=seed)
    except OSError:
        if not folder.is_dir():  # else somebody else has just made the same one
            raise


def make_tiny_checkpoint(
    folder: Path,
    *,
    config_file: Path | None = None,
    tokenizer_file: Path | None = None,
    seed: int = 0,
) -> None:
    """Writes a checkpoint of random weights for any small `config.json`.

    Args:
        folder: must not exist yet; it appears complete or not at all.
        config_file: nested or flat, in either spelling of its keys. `engram_num_embeddings` and
            `engram_compressed_vocab_size` are computed, as a loader refuses other values. None takes
            the built-in sizes.
        tokenizer_file: None takes the one beside `config_file`, or else the built-in one.
        seed: of the weights.

    Raises:
        CheckpointError: a file is missing, is no JSON, or describes no usable model.
        InvalidRequest: the folder is there already, or the model is too large to be made.
    """
    if folder.exists():
        raise InvalidRequest(f"{folder}: is there already")
    if config_file is None:
        make_demo_checkpoint(folder, seed=seed)
        return
    beside = config_file.parent / "tokenizer.json"
    if tokenizer_file is None and beside.is_file():
        tokenizer_file = beside
    try:
        raw = json.loads(config_file.read_text(encoding="utf-8"))
        tokenizer = tokenizer_file.read_text("utf-8") if tokenizer_file else built_in_tokenizer()
        completed = _completed(raw, Tokenizer.from_str(tokenizer))
    except KeyError as error:
        raise CheckpointError(f"{config_file}: {error.args[0]} is missing") from error
    except Exception as error:  # the tokenizer library raises a bare Exception
        raise CheckpointError(f"{config_file}: {error}") from error
    write_checkpoint(folder, completed, tokenizer, seed=seed)


def _completed(raw: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns config.json's contents with the keys that are computed."""
    if "text_config" in raw:
        text = raw["text_config"]
        raw = raw | {"text_config": text | tokenizer_keys(text, tokenizer)}
    else:
        raw = raw | tokenizer_keys(raw, tokenizer)
    return raw | {"quantization_config": raw.get("quantization_config", QUANTIZATION)}


def demo_config(*, vision: bool = False) -> dict[str, Any]:
    """Returns config.json's contents; what depends on the tokenizer is computed from it."""
    tokenizer = Tokenizer.from_str(built_in_tokenizer())
    text = _SIZES | {
        "model_type": "deepseek_v41_text",
        **tokenizer_keys(_SIZES, tokenizer),
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
        "quantization_config": QUANTIZATION,
        "text_config": text,
    }
    return raw | {"vision_config": _VISION_SIZES} if vision else raw
