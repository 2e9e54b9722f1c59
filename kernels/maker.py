"""Writes checkpoints, of random weights or given ones, in exactly the released format.

A tensor is drawn from a stream of its own, so no other tensor moves it, and the same seed gives the
same bytes on every machine with the same versions. The sizes come from a `config.json`; what depends
on the tokenizer is computed, since a loader refuses anything else.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from flashmesh.errors import InvalidRequest
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.engram import bucket_primes, token_map
from flashmesh.kernels.formats import quantise, stored
from flashmesh.kernels.shards import INDEX_FILE
from flashmesh.kernels.tensor_names import TensorSpec, scale_name, tensors, vision_tensors
from flashmesh.kernels.vision_config import VisionConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenizers import Tokenizer
    from torch import Tensor

QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""`quantization_config` of the released file: the formats of `formats`."""

MAX_PARAMETERS = 1 << 29
"""Most parameters of a checkpoint made here; all of them are drawn as fp32 and held at once."""


def tokenizer_keys(text: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Computes the keys that follow from the tokenizer and from the Engram hash.

    Args:
        text: `text_config`.
        tokenizer: of the checkpoint.

    Raises:
        KeyError: `text` lacks a key that they follow from.
    """
    primes = bucket_primes(
        num_layers=len(text["engram_layer_ids"]),
        num_orders=text["engram_max_ngram_size"] - 1,
        num_heads=text["engram_n_heads"],
        start=text["engram_vocab_size"],
    )
    return {
        "engram_num_embeddings": [sum(map(sum, layer)) for layer in primes],
        "engram_compressed_vocab_size": int(token_map(tokenizer, text["vocab_size"]).max()) + 1,
    }


def built_in_tokenizer() -> str:
    """Returns the text of the built-in tokenizer.json."""
    return resources.files("flashmesh.data").joinpath("tokenizer.json").read_text("utf-8")


def write_checkpoint(folder: Path, raw: Mapping[str, Any], tokenizer: str, *, seed: int) -> None:
    """Writes config.json, tokenizer.json, the shards and their index.

    Args:
        folder: must not exist yet; it appears complete or not at all.
        raw: config.json's contents.
        tokenizer: tokenizer.json's text.
        seed: of the weights.

    Raises:
        CheckpointError: `raw` describes no usable model.
        InvalidRequest: the model is too large to be made.
        OSError: the folder is there already, or could not be written.
    """
    config = ModelConfig.from_dict(raw)
    size = sum(math.prod(spec.shape) for spec in tensors(config))
    if size > MAX_PARAMETERS:
        raise InvalidRequest(
            f"{size:,} parameters are too many to make, {MAX_PARAMETERS:,} at most"
        )
    write_values(folder, raw, tokenizer, lambda spec: _values(spec, config, seed))


def write_values(
    folder: Path,
    raw: Mapping[str, Any],
    tokenizer: str,
    values: Callable[[TensorSpec], Tensor],
) -> None:
    """Writes a checkpoint of given weights, each in its stored format.

    Args:
        folder: must not exist yet; it appears complete or not at all.
        raw: config.json's contents.
        tokenizer: tokenizer.json's text.
        values: asked once for every tensor; fp32 of its logical shape.

    Raises:
        CheckpointError: `raw` describes no usable model.
        OSError: the folder is there already, or could not be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        (temporary / "config.json").write_text(json.dumps(raw, indent=1))
        (temporary / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        _write_shards(temporary, raw, values)
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(
    folder: Path, raw: Mapping[str, Any], values: Callable[[TensorSpec], Tensor]
) -> None:
    """Writes backbone, draft and the vision tower if there is one, a shard each, and their index."""
    config, vision = ModelConfig.from_dict(raw), VisionConfig.from_dict(raw)
    specs = {
        "backbone": [s for s in tensors(config) if not s.name.startswith("mtp.")],
        "draft": [s for s in tensors(config) if s.name.startswith("mtp.")],
    }
    if vision is not None:
        specs["vision"] = list(vision_tensors(vision, config.hidden_size))
    shards = [_stored_values(part, values) for part in specs.values()]
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
        total += sum(value.nbytes for value in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1))


def _stored_values(
    specs: list[TensorSpec], values: Callable[[TensorSpec], Tensor]
) -> dict[str, Tensor]:
    """Stores tensors in their formats, by name."""
    shard: dict[str, Tensor] = {}
    for spec in specs:
        weight, scale = quantise(spec.kind, values(spec))
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
