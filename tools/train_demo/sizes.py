"""The demo model's `config.json`: every mechanism of the released model, at a size that a laptop decodes quickly.

Six layers, because on a CPU the cost of a decode step is the number of its operations and hardly their size: one
window-only layer, a ratio-2 source with one layer that reuses it, then the decoder half with a ratio-1 source that also
keeps candidates, a layer that selects again among them, and one that reuses that selection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashmesh.kernels.demo import demo_config
from flashmesh.kernels.maker import tokenizer_keys

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "q_lora_rank": 128,
    "moe_intermediate_size": 128,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "index_n_heads": 8,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 32,
    "engram_layer_ids": [1, 2],
    "engram_vocab_size": 8000,
    "dspark_target_layer_ids": [3, 4, 5],
    "dspark_markov_rank": 64,
}
"""What differs from the random demo model's sizes."""


def trained_config(tokenizer: Tokenizer, **sizes: int) -> dict[str, Any]:
    """Returns config.json's contents for a tokenizer; `sizes` replace the demo's (tests)."""
    raw = demo_config()
    text = raw["text_config"] | _SIZES | sizes
    text |= tokenizer_keys(text, tokenizer)
    text["dspark_noise_token_id"] = tokenizer.token_to_id("<｜noise｜>")
    image = tokenizer.token_to_id("<｜image｜>")
    return raw | {"text_config": text, "image_token_id": image}
