"""Weights as the device ops take them: stacked, repacked, on the device.

Where they come from is the caller's: a loaded checkpoint, or random values in the released formats. Nothing here is
expanded: F8 and F4 weights stay codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashmesh.errors import CheckpointError
from flashmesh.kernels.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.ops.table import OpTable

Source = Callable[[str], "Tensor | StoredTensor"]
"""Released name to the tensor in its stored format."""


@dataclass(slots=True)
class Compressor:
    """How a KV source makes compressed rows and index keys; `gate` where two tokens share a row."""

    value: Tensor
    gate: Tensor | None
    norm: Tensor
    key: Tensor
    key_norm: Tensor


@dataclass(slots=True)
class Indexer:
    """The query side of an index source."""

    queries: Any
    heads: Tensor


@dataclass(slots=True)
class Engram:
    """An Engram layer; table rows lie on the device."""

    codes: Tensor
    scales: Tensor
    wkv: Any
    q_weight: Tensor
    k_weight: Tensor


@dataclass(slots=True)
class Block:
    """One block: attention, experts, and the mixing around both. `Any` marks what `prepare_*` of an op table made."""

    attn_norm: Tensor
    ffn_norm: Tensor
    attn_mix: Any
    ffn_mix: Any
    latents: Any  # wq_a over wkv
    q_norm: Tensor
    kv_norm: Tensor
    queries: Any
    output_a: Any
    output_b: Any
    sink: Tensor
    gate: Tensor
    bias: Tensor
    bias_image: Tensor
    experts: Any
    shared_up: Any  # w1 over w3
    shared_down: Any
    compressor: Compressor | None = None
    indexer: Indexer | None = None
    engram: Engram | None = None


@dataclass(slots=True)
class DeviceWeights:
    """A model's weights."""

    embed: Tensor
    head: Tensor
    norm: Tensor
    blocks: list[Block]


class WeightMaker:
    """Prepares weights for an op table.

    Args:
        config: of the model.
        source: where tensors come from.
        ops: whose `prepare_*` lay them out.
        device: where they go.
    """

    def __init__(
        self, config: ModelConfig, source: Source, ops: OpTable, device: torch.device
    ) -> None:
        self._c = config
        self._source = source
        self._ops = ops
        self._device = device

    def make(self) -> DeviceWeights:
        """Prepares the whole backbone, layer by layer.

        Raises:
            CheckpointError: a tensor is not in its released format.
        """
        return DeviceWeights(
            self.bf16("embed.weight"),
            self.bf16("head.weight"),
            self.fp32("norm.weight"),
            [self.block(f"layers.{n}.", n) for n in range(self._c.num_hidden_layers)],
        )

    def block(self, prefix: str, layer: int | None) -> Block:
        """Prepares one block; `layer` None for a draft block."""
        c, attn, ffn = self._c, prefix + "attn.", prefix + "ffn."
        block = Block(
            attn_norm=self.fp32(prefix + "attn_norm.weight"),
            ffn_norm=self.fp32(prefix + "ffn_norm.weight"),
            attn_mix=self._mix(prefix + "hc_attn_"),
            ffn_mix=self._mix(prefix + "hc_ffn_"),
            latents=self.dense(attn + "wq_a", attn + "wkv"),
            q_norm=self.fp32(attn + "q_norm.weight"),
            kv_norm=self.fp32(attn + "kv_norm.weight"),
            queries=self.dense(attn + "wq_b"),
            output_a=self.dense(attn + "wo_a", groups=c.o_groups),
            output_b=self.dense(attn + "wo_b"),
            sink=self.fp32(attn + "attn_sink"),
            gate=self.bf16(ffn + "gate.weight"),
            bias=self.fp32(ffn + "gate.bias"),
            bias_image=self.fp32(ffn + "gate.bias_vl"),
            experts=self._experts(
                ffn, c.n_routed_experts if layer is not None else c.dspark_n_routed_experts
            ),
            shared_up=self.dense(ffn + "shared_experts.w1", ffn + "shared_experts.w3"),
            shared_down=self.dense(ffn + "shared_experts.w2"),
        )
        if layer in c.kv_source_layer_ids:
            block.compressor = self._compressor(attn, layer)
        if layer in c.index_source_layer_ids:
            block.indexer = Indexer(
                self.dense(attn + "indexer.wq_b"), self.bf16(attn + "indexer.weights_proj.weight")
            )
        if layer in c.engram_layer_ids:
            block.engram = self._engram(prefix + "engram.")
        return block

    def _compressor(self, attn: str, layer: int) -> Compressor:
        name = attn + "compressor."
        return Compressor(
            value=self.bf16(name + "wkv.weight"),
            gate=self.bf16(name + "wgate.weight") if self._c.ratio(layer) == 2 else None,
            norm=self.fp32(name + "norm.weight"),
            key=self.bf16(attn + "indexer.wk.weight"),
            key_norm=self.fp32(attn + "indexer.k_norm.weight"),
        )

    def _engram(self, name: str) -> Engram:
        table = self._stored(name + "embed.weight")
        return Engram(
            table.weight,
            table.scale.view(torch.uint8),
            self.dense(name + "wkv"),
            self.bf16(name + "q_weight"),
            self.bf16(name + "k_weight"),
        )

    def _mix(self, prefix: str) -> Any:
        return self._ops.prepare_mix(*(self.fp32(prefix + p) for p in ("fn", "base", "scale")))

    def _experts(self, ffn: str, count: int) -> Any:
        """Gathers a block's experts: `[M, ...]` codes and scales of w1, w3 and w2."""
        parts: list[Tensor] = []
        for name in ("w1", "w3", "w2"):
            stored = [self._stored(f"{ffn}experts.{e}.{name}.weight") for e in range(count)]
            parts.append(torch.stack([w.weight.view(torch.uint8) for w in stored]))
            parts.append(torch.stack([w.scale.view(torch.uint8) for w in stored]))
        return self._ops.prepare_experts(*parts)

    def dense(self, *names: str, groups: int = 1) -> Any:
        """Stacks F8 weights that share their input, one above the other."""
        stored = [self._stored(name + ".weight") for name in names]
        codes = torch.cat([w.weight for w in stored])
        scales = torch.cat([w.scale.view(torch.uint8) for w in stored])
        return self._ops.prepare_dense(codes, scales, groups)

    def _stored(self, name: str) -> StoredTensor:
        value = self._source(name)
        if not isinstance(value, StoredTensor):
            raise CheckpointError(f"{name}: the device model needs codes and scales, found values")
        return StoredTensor(value.kind, value.weight.to(self._device), value.scale.to(self._device))

    def fp32(self, name: str) -> Tensor:
        """Returns a plain tensor in fp32."""
        return self._plain(name).to(self._device, torch.float32)

    def bf16(self, name: str) -> Tensor:
        """Returns a plain tensor in bf16."""
        return self._plain(name).to(self._device, torch.bfloat16)

    def _plain(self, name: str) -> Tensor:
        value = self._source(name)
        if isinstance(value, StoredTensor):
            raise CheckpointError(f"{name}: expected plain values, found codes and scales")
        return value
