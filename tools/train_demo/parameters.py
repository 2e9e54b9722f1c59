"""The trained tensors: fp32 masters under their released names, how they start, and what they round to.

The table of `flashmesh.kernels.tensor_names` decides names, shapes and formats. One thing differs: a layer's routed
experts are stacked, `layers.0.ffn.experts.w1.weight` being `[experts, N, K]`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.tensor_names import tensors
from tools.train_demo.rounding import stored_weight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.formats import Kind
    from flashmesh.kernels.tensor_names import TensorSpec

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
BALANCED = ("ffn.gate.bias", "ffn.gate.bias_vl")
"""Router biases: moved by load, never by a gradient."""


def stacked_name(name: str) -> tuple[str, int | None]:
    """Returns the trained name of a released one, and which matrix of the stack it is."""
    found = _EXPERT.search(name)
    if found is None:
        return name, None
    return _EXPERT.sub(".experts.", name), int(found[1])


def kinds(config: ModelConfig) -> dict[str, Kind]:
    """Returns the stored format of every trained tensor."""
    return {stacked_name(spec.name)[0]: spec.kind for spec in tensors(config)}


def initial(config: ModelConfig, *, seed: int) -> dict[str, Tensor]:
    """Draws every tensor.

    Returns:
        fp32 by name, drafts included.
    """
    draw = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for spec in tensors(config):
        name, place = stacked_name(spec.name)
        value = _start(spec, config, draw)
        if place is None:
            values[name] = value
        else:
            stacks.setdefault(name, []).append(value)
    return values | {name: torch.stack(parts) for name, parts in stacks.items()}


def _start(spec: TensorSpec, c: ModelConfig, draw: torch.Generator) -> Tensor:
    name, shape = spec.name, spec.shape
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(shape)
    if name.endswith("_scale"):
        return torch.full(shape, 0.01)
    if name.endswith("_base"):
        return _stream_base(name, c)
    if name.endswith(("sink", "bias", "bias_vl", "wgate.weight", "markov_head.head.weight")):
        return torch.zeros(shape)
    if name.endswith(("wo_b.weight", "shared_experts.w2.weight", "confidence_head.proj.weight")):
        return torch.zeros(shape)  # a sub-layer starts as a no-op
    noise = torch.randn(shape, generator=draw)
    if name.endswith("engram.wkv.weight"):
        noise[-c.hidden_size :] = 0  # so does a lookup's value
    return noise * _deviation(name, shape)


def _deviation(name: str, shape: tuple[int, ...]) -> float:
    if name == "embed.weight":
        return 0.5  # sub-layers add to the streams on this scale
    if name == "head.weight" or name.endswith("w2.weight"):
        return 0.002
    if "indexer.w" in name and not name.endswith("weights_proj.weight"):
        return float(shape[1] ** -0.5)  # flatter scores would teach the indexer slowly
    return 0.02


def _stream_base(name: str, c: ModelConfig) -> Tensor:
    """Each sub-layer reads one home stream and writes all four; streams mix little at first.

    Single-pass mixing: the base of a sub-layer names the stream that the next one reads.
    """
    layer = int(name.split(".")[1])
    site = 2 * layer + ("ffn" in name)
    pre = torch.full((c.hc_mult,), -3.0)
    pre[(site + 1) % c.hc_mult] = 3.0
    comb = torch.full((c.hc_mult, c.hc_mult), -3.0).fill_diagonal_(3.0)
    return torch.cat((pre, torch.zeros(c.hc_mult), comb.flatten()))


def rounded(
    values: Mapping[str, Tensor], formats: Mapping[str, Kind], *, weights: bool
) -> dict[str, Tensor]:
    """Returns what the forward pass multiplies with: the masters, or what a checkpoint would store of them."""
    if not weights:
        return dict(values)
    return {name: stored_weight(formats[name], value) for name, value in values.items()}
