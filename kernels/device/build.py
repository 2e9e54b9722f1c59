"""Puts a device model together: weights, hashes and caches, the layers, and a runner of its sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmesh.kernels.device.caches import DeviceCaches
from flashmesh.kernels.device.draft import DeviceDrafter
from flashmesh.kernels.device.model import DeviceModel
from flashmesh.kernels.device.runner import DeviceRunner
from flashmesh.kernels.device.weights import WeightMaker
from flashmesh.kernels.engram import EngramHash

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.device.weights import Source
    from flashmesh.kernels.ops.table import OpTable


def build_runner(
    config: ModelConfig,
    source: Source,
    token_map: Tensor,
    ops: OpTable,
    device: torch.device,
    *,
    num_slots: int,
    num_pages: int,
    max_tokens: int,
    max_anchors: int = 0,
    round_activations: bool,
    use_graphs: bool,
) -> DeviceRunner:
    """Prepares weights and caches on a device.

    Args:
        config: of the model.
        source: where tensors come from.
        token_map: see `EngramHash`.
        ops: what runs.
        device: where it runs.
        num_slots: sequences at once.
        num_pages: blocks of 128 tokens over all sequences.
        max_tokens: of a sequence.
        max_anchors: drafts made at once; 0 leaves the draft module out.
        round_activations: round inputs of F8 and F4 products to FP8-32, as released.
        use_graphs: record decode steps; needs a CUDA device.

    Raises:
        CheckpointError: a tensor is not in its released format.
    """
    maker = WeightMaker(config, source, ops, device)
    weights, hashes = maker.make(), EngramHash(config, token_map).to(device)
    caches = DeviceCaches(config, num_slots, num_pages, device)
    model = DeviceModel(config, weights, hashes, caches, ops, round_activations=round_activations)
    drafter = DeviceDrafter(maker, model, max_anchors) if max_anchors else None
    return DeviceRunner(model, max_tokens, drafter, use_graphs=use_graphs)
