"""Two encoder and two decoder layers of V4.1-Flash at their real sizes, with random weights in the released formats.

Layer 0 has its window only, layer 1 is an Engram layer and a KV source of ratio 2; layers 2 and 3 are the decoder
half: a KV and candidate source, and a layer that selects anew among its candidates. So every kind of layer's work is
there once, but for layers that reuse a selection, which do less.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.device.runner import DeviceRunner
    from flashmesh.kernels.stored_tensor import StoredTensor

_TEXT = {
    "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 4, "num_attention_heads": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20, "max_position_embeddings": 1048576, "rope_theta": 10000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
    "compress_rope_theta": 160000, "moe_intermediate_size": 2304, "n_routed_experts": 384,
    "num_experts_per_tok": 6, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "sliding_window": 128,
    "compress_ratios": [0, 2, 1, 1], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 3],
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "engram_layer_ids": [1], "engram_max_ngram_size": 4, "engram_n_heads": 8,
    "engram_head_dim": 256, "engram_vocab_size": 65536, "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 129280, "num_nextn_predict_layers": 0, "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [], "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2, "image_token_id": 129264,
}  # fmt: skip


def slice_config() -> ModelConfig:
    """The slice's configuration; its Engram tables have 1.6 million rows, a look-up costs the same."""
    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.engram import bucket_primes

    primes = bucket_primes(num_layers=1, num_orders=3, num_heads=8, start=65536)
    return ModelConfig.from_dict(
        {**_TEXT, "engram_num_embeddings": [sum(map(sum, layer)) for layer in primes]}
    )


class RandomSource:
    """Tensors of a configuration by released name, drawn on the device as they are asked for.

    Args:
        config: names and shapes.
        device: where values are drawn.
        seed: of the values.
    """

    def __init__(self, config: ModelConfig, device: torch.device, seed: int) -> None:
        from flashmesh.kernels.tensor_names import tensors

        self._specs = {spec.name: spec for spec in tensors(config)}
        self._random = torch.Generator(device=device).manual_seed(seed)
        self._device = device

    def __call__(self, name: str) -> torch.Tensor | StoredTensor:
        """Draws a tensor: weights of variance 1 / columns, norms of one, small biases."""
        from flashmesh.kernels.formats import stored
        from flashmesh.kernels.stored_tensor import StoredTensor

        spec = self._specs[name]
        layout = stored(spec.kind, spec.shape)
        if layout.scale_shape is None:
            if "norm" in name:
                return torch.ones(spec.shape, device=self._device)
            # Embeddings of size one keep rows apart from each other, as trained ones do.
            gain = 1.0 if name == "embed.weight" else spec.shape[-1] ** -0.5
            values = self._normal(spec.shape) * gain
            return values.bfloat16() if spec.kind == "BF16" else values
        # Codes of a standard deviation of about 64 (e4m3) or 2.8 (e2m1, all codes alike), scaled back.
        exponent = -round(math.log2(spec.shape[-1]) / 2) - 1
        if spec.kind == "F4":
            codes = self._bytes(layout.shape)
            exponent -= 1
        else:
            codes = (self._normal(layout.shape) * 64).to(torch.float8_e4m3fn)
            exponent -= 6
        scale = torch.full(
            layout.scale_shape, 127 + exponent, dtype=torch.uint8, device=self._device
        )
        scale += self._bytes(layout.scale_shape) & 1
        return StoredTensor(spec.kind, codes, scale.view(torch.float8_e8m0fnu))

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=self._device, generator=self._random)

    def _bytes(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(
            0, 256, shape, dtype=torch.uint8, device=self._device, generator=self._random
        )


def slice_runner(
    *, max_tokens: int, num_slots: int, num_tokens: int, seed: int = 0
) -> DeviceRunner:
    """Builds the slice on the current CUDA device, with the Hopper kernels.

    Args:
        max_tokens: of a sequence.
        num_slots: sequences at once.
        num_tokens: pages for so many tokens of each.
        seed: of the weights.
    """
    from flashmesh.kernels.device.build import build_runner
    from flashmesh.kernels.ops.table import load_ops

    device, config = torch.device("cuda"), slice_config()
    return build_runner(
        config,
        RandomSource(config, device, seed),
        torch.arange(config.vocab_size),
        load_ops("tilelang"),
        device,
        num_slots=num_slots,
        num_pages=num_slots * num_tokens // 128,
        max_tokens=max_tokens,
        round_activations=True,
        use_graphs=True,
    )
