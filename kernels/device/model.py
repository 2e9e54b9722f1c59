"""The layers, top to bottom, through an op table.

The same model as `kernels.model`, in the same order, with bf16 between ops. Sub-layers meet in one fused op: it adds
what a sub-layer gave to the streams and mixes the next one's input in the same pass over memory. Nothing waits for
the host, so a pass over rows of a fixed number can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashmesh.kernels.model import known_source
from flashmesh.kernels.reference.basics import angles, frequencies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.device.caches import DeviceCaches
    from flashmesh.kernels.device.inputs import DeviceRows, WindowPlan
    from flashmesh.kernels.device.weights import Block, DeviceWeights
    from flashmesh.kernels.engram import EngramHash
    from flashmesh.kernels.ops.table import OpTable

SubLayer = Callable[["Tensor", "Tensor | None"], "Tensor"]
"""Normed input `[R, D]`, as it is and rounded (None where nothing rounds), to output `[R, D]`."""

Angles = tuple["Tensor", "Tensor"]
"""Cosines and sines, fp32 `[R, P/2]`."""


@dataclass(slots=True)
class Step:
    """A block and its sub-layers.

    Attributes:
        enter: changes the streams before the block mixes them; None where nothing does, so that one op brings them
            from the block before.
        read: sees the streams that the block mixes.
    """

    block: Block
    attention: SubLayer
    moe: SubLayer
    enter: Callable[[Tensor], Tensor] | None = None
    read: Callable[[Tensor], None] | None = None


class Candidates(NamedTuple):
    """Blocks of keys, and how many of their keys may be taken: the first ones, since blocks rise.

    Attributes:
        blocks: int32 `[R, n]`, ids; -1 where there is none.
        num_keys: int32 `[R]`.
    """

    blocks: Tensor
    num_keys: Tensor


@dataclass(slots=True)
class HalfPass:
    """A pass over one half: its rows, their windows and angles, and what index sources have found so far.

    Attributes:
        angles: cosines and sines fp32 `[R, P/2]`, of window-only layers (False) and compressed ones (True).
        pair_angles: of compressed layers where two tokens share a row, which stands at the first one's position.
        candidates: what reindexing layers select from; None while all keys stand.
        selected: by index source, physical rows int32 `[R, K]`.
        features: bf16 `[R, D]` of each target layer, which drafts are made from.
    """

    rows: DeviceRows
    windows: WindowPlan
    angles: dict[bool, Angles]
    pair_angles: Angles
    candidates: Candidates | None = None
    selected: dict[int, Tensor] = field(default_factory=dict)
    features: list[Tensor] = field(default_factory=list)
    _visible: dict[int, Tensor] = field(default_factory=dict)
    _global_row: dict[int, Tensor] = field(default_factory=dict)

    def visible(self, ratio: int) -> Tensor:
        """Returns int32 `[R]`, how many compressed rows each row may see."""
        if ratio not in self._visible:
            self._visible[ratio] = (self.rows.pos + 1) // ratio * self.rows.alive
        return self._visible[ratio]

    def global_row(self, ratio: int) -> Tensor:
        """Returns int32 `[R]`, see `DeviceRows.global_row`."""
        if ratio not in self._global_row:
            self._global_row[ratio] = self.rows.global_row(ratio)
        return self._global_row[ratio]

    def keep_features(self, streams: Tensor) -> None:
        """Keeps the mean over the streams that enter a target layer."""
        self.features.append(streams.float().mean(1).bfloat16())


class DeviceModel:
    """Weights, caches and ops of one device.

    Args:
        config: of the model.
        weights: prepared for `ops`.
        hashes: of the Engram layers, on the device.
        caches: on the device.
        ops: what runs.
        round_activations: round inputs of F8 and F4 products to FP8-32, as released.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DeviceWeights,
        hashes: EngramHash,
        caches: DeviceCaches,
        ops: OpTable,
        *,
        round_activations: bool,
    ) -> None:
        self.config = config
        self.caches = caches
        self.ops = ops
        self.observe: Callable[[str, int, Tensor], None] = lambda name, layer, value: None
        self._w = weights
        self._hashes = hashes
        self.rounds = round_activations
        self._frequencies = {
            kind: frequencies(config, compressed=kind).to(caches.device) for kind in (False, True)
        }

    def begin(self, rows: DeviceRows, windows: WindowPlan) -> HalfPass:
        """Starts a pass over one half."""
        angles = {kind: self.angles(rows.pos, compressed=kind) for kind in self._frequencies}
        # A pair of tokens stands at the position of its first one.
        return HalfPass(rows, windows, angles, self.angles(rows.pos // 2 * 2, compressed=True))

    def forward(
        self,
        encoder: HalfPass,
        decoder: HalfPass | None,
        keep: Tensor | None,
        wanted: Tensor | None = None,
    ) -> Tensor | None:
        """Runs a pass.

        Args:
            encoder: all rows.
            decoder: those that run the decoder half too; None where there are none.
            keep: int64, their places among all rows; None for all.
            wanted: int64, places in `decoder` that give logits; None for all.

        Returns:
            Logits fp32 `[n, V]`; None without a decoder half.
        """
        c, first = self.config, self.config.num_encoder_layers
        streams, carried = self.enter(encoder.rows.ids)
        streams, carried = self.run_layers(range(first), encoder, streams, carried)
        block = self._w.blocks[first]
        x = self.ops.collapse_norm(streams, carried, block.attn_norm, c.rms_norm_eps)
        self._write_global_rows(first, encoder, x)
        if decoder is None:
            return None
        if keep is not None:
            streams, carried = streams[keep], carried[keep]
        layers = range(first, c.num_hidden_layers)
        streams, carried = self.run_layers(layers, decoder, streams, carried)
        if wanted is not None:
            streams, carried = streams[wanted], carried[wanted]
        return self.logits(self.ops.collapse_norm(streams, carried, self._w.norm, c.rms_norm_eps))

    def enter(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embeds tokens int64 `[R]`: returns the streams and the pre-mix that enter the first block."""
        num_streams = self.config.hc_mult
        streams = self._w.embed[ids].unsqueeze(1).repeat(1, num_streams, 1)
        carried = torch.zeros(len(ids), num_streams, device=ids.device)
        carried[:, 0] = 1
        return streams, carried

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns fp32 `[R, V]` of rows `[R, D]` after the last norm."""
        return self.ops.plain_linear(hidden, self._w.head, torch.float32)

    def rounded(self, x: Tensor) -> Any:
        """Returns what a product with F8 or F4 weights takes of bf16 `[R, n]`."""
        return self.ops.round_rows(x) if self.rounds else x

    def run_layers(
        self, layers: range, state: HalfPass, streams: Tensor, carried: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs consecutive layers of one half; returns the streams and the pre-mix that leave the last."""
        blocks, targets = self._w.blocks, self.config.dspark_target_layer_ids
        steps = [
            Step(
                blocks[layer],
                partial(self._attention, layer, state),
                partial(self._moe, layer, state.rows),
                partial(self._engram, layer, state.rows) if blocks[layer].engram else None,
                state.keep_features if layer in targets else None,
            )
            for layer in layers
        ]
        return self.run_blocks(steps, streams, carried, layers.start)

    def run_blocks(
        self, steps: Sequence[Step], streams: Tensor, carried: Tensor, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Runs blocks around the streams; `first` numbers them for observers."""
        mixed: Any = None
        for place, step in enumerate(steps):
            block = step.block
            if mixed is None:
                if step.enter is not None:
                    streams = step.enter(streams)
                mixed = self.ops.mix(
                    streams, carried, block.attn_mix, block.attn_norm, *self._mixing()
                )
            if step.read is not None:
                step.read(streams)
            y = step.attention(mixed.x, mixed.x_rounded)
            self.observe("attn_out", first + place, y)
            streams, mixed = self._spread_mix(
                streams, y, mixed, mixed.pre, block.ffn_mix, block.ffn_norm
            )
            y = step.moe(mixed.x, mixed.x_rounded)
            self.observe("ffn_out", first + place, y)
            carried = mixed.pre
            following = steps[place + 1] if place + 1 < len(steps) else None
            if following is None or following.enter is not None:
                streams, mixed = self.ops.spread(streams, y, mixed.post, mixed.comb), None
            else:
                block = following.block
                streams, mixed = self._spread_mix(
                    streams, y, mixed, carried, block.attn_mix, block.attn_norm
                )
            self.observe("streams", first + place + 1, streams)
            self.observe("carried_pre", first + place + 1, carried)
        return streams, carried

    def _engram(self, layer: int, rows: DeviceRows, streams: Tensor) -> Tensor:
        engram = self._w.blocks[layer].engram
        assert engram is not None
        found = self._hashes.rows(layer, rows.grams)
        looked_up = self.ops.engram_rows(engram.codes, engram.scales, found)
        kv = self.ops.dense(looked_up, engram.wkv)
        return self.ops.engram_gate(streams, kv, engram.q_weight, engram.k_weight, rows.text)

    def _spread_mix(
        self,
        streams: Tensor,
        y: Tensor,
        mixed: Any,
        carried: Tensor,
        weights: Any,
        norm: Tensor,
    ) -> tuple[Tensor, Any]:
        return self.ops.spread_mix(
            streams, y, mixed.post, mixed.comb, carried, weights, norm, *self._mixing()
        )

    def _mixing(self) -> tuple[int, float, float, bool]:
        c = self.config
        return c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, self.rounds

    def _attention(self, layer: int, state: HalfPass, x: Tensor, rounded: Tensor | None) -> Tensor:
        c, block = self.config, self._w.blocks[layer]
        ratio = c.ratio(layer)
        angles, windows = state.angles[ratio > 0], state.windows
        window = windows.buffer(layer)
        latent, q = self.queries(block, x, rounded, angles, window, windows.store)
        if ratio:
            # The first decoder layer's rows are written before the halves part (see `forward`).
            if block.compressor is not None and layer < c.num_encoder_layers:
                self._write_global_rows(layer, state, x)
            if block.indexer is not None:
                state.selected[layer] = self._select(layer, state, x, latent)
            kv = self.caches.kv[known_source(c.kv_source(layer))]
            selected = state.selected[known_source(c.index_source(layer))]
        else:
            kv, selected = self.caches.no_kv, windows.index[:, :0]
        y = self.attend(block, q, angles, window, windows.index, kv, selected)
        windows.finish(layer)
        return y

    def queries(
        self,
        block: Block,
        x: Tensor,
        rounded: Tensor | None,
        angles: Angles,
        window: Tensor,
        store: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns query latents `[R, Q]` and unrotated queries `[R, H, E]`; stores the rows' keys in `window`."""
        c, ops = self.config, self.ops
        latent = ops.query_latent_and_window(
            ops.dense(x if rounded is None else rounded, block.latents),
            block.q_norm,
            block.kv_norm,
            *angles,
            window,
            store,
            c.rms_norm_eps,
        )[int(self.rounds)]
        q = ops.dense(latent, block.queries).view(-1, c.num_attention_heads, c.head_dim)
        return latent, q

    def attend(
        self,
        block: Block,
        q: Tensor,
        angles: Angles,
        window: Tensor,
        index: Tensor,
        kv: Tensor,
        selected: Tensor,
    ) -> Tensor:
        """Attends to window and compressed rows and projects back: `[R, D]`."""
        ops, scale = self.ops, self.config.head_dim**-0.5
        out = ops.sparse_attention(q, *angles, window, index, kv, selected, block.sink, scale)
        grouped = ops.dense(out.flatten(1), block.output_a)
        return ops.dense(self.rounded(grouped), block.output_b)

    def _write_global_rows(self, layer: int, state: HalfPass, x: Tensor) -> None:
        """Compresses the rows of a KV source and stores those that may be written."""
        c, ops, rows = self.config, self.ops, state.rows
        block, ratio = self._w.blocks[layer].compressor, c.ratio(layer)
        assert block is not None
        angles = state.angles[True]
        if block.gate is not None:
            angles = state.pair_angles
            value = ops.plain_linear(x, block.value, torch.float32)
            gate = ops.plain_linear(x, block.gate, torch.float32)
            open_pair = self.caches.open_pair[layer]
            joined = ops.join_pairs(value, gate, open_pair, rows.slot, rows.pos, rows.begin)
        else:
            joined = ops.plain_linear(x, block.value, torch.bfloat16)
        latent = ops.rms_norm(joined, block.norm, c.rms_norm_eps, False)
        key = ops.plain_linear(latent, block.key, torch.bfloat16)
        at = state.global_row(ratio)
        ops.store_compressed(latent, *angles, self.caches.kv[layer], at)
        keys = self.caches.ik[layer]
        ops.store_index_key(key, block.key_norm, *angles, keys, at, c.rms_norm_eps)

    def _select(self, layer: int, state: HalfPass, x: Tensor, latent: Tensor) -> Tensor:
        """Scores the source's index keys and selects; returns physical rows int32 `[R, K]`."""
        c, ops, rows = self.config, self.ops, state.rows
        block, ratio = self._w.blocks[layer].indexer, c.ratio(layer)
        assert block is not None
        source = known_source(c.kv_source(layer))
        queries = ops.index_queries(
            ops.dense(latent, block.queries), *state.angles[True], c.index_head_dim
        )
        # Left out: the constant that the model scales these by, which changes no ranking.
        heads = ops.plain_linear(x, block.heads, torch.float32)
        visible = state.visible(ratio)
        keys = (self.caches.ik[source], rows.page_table, rows.sequence)
        size, num_blocks = c.candidate_block_size, c.candidate_topk_blocks
        if state.candidates is not None and layer != c.candidate_source_layer_id:
            blocks, num_keys = state.candidates
            scores = ops.candidate_scores(queries, heads, *keys, visible, blocks, block=size)
            chosen = ops.top_rows(scores, num_keys, c.index_topk)
            chosen = ops.gather_columns(chosen, blocks, block=size)
        else:
            num_columns = rows.num_tokens // ratio
            scores = ops.index_scores(queries, heads, *keys, visible, num_columns)
            chosen = ops.top_rows(scores, visible, c.index_topk)
            if layer == c.candidate_source_layer_id and num_columns > num_blocks * size:
                blocks = ops.top_blocks(scores, visible, block=size, count=num_blocks)
                # The last block holds the last key.
                full = (-(-visible // size)).clamp(max=num_blocks) * size
                state.candidates = Candidates(blocks, full - (-visible % size))
        self.observe("topk", layer, chosen)
        per_page = self.caches.rows[source]
        return ops.physical_rows(chosen, rows.page_table, rows.sequence, per_page)

    def _moe(self, layer: int, rows: DeviceRows, x: Tensor, rounded: Tensor | None) -> Tensor:
        block, count = self._w.blocks[layer], self.config.num_experts_per_tok
        return self.moe(block, count, rows.text, rows.alive, x, rounded)

    def moe(
        self,
        block: Block,
        count: int,
        text: Tensor,
        alive: Tensor,
        x: Tensor,
        rounded: Tensor | None,
    ) -> Tensor:
        """Returns the sum of `count` routed experts and the shared one, `[R, D]`; rows not alive are routed nowhere."""
        c, ops = self.config, self.ops
        gate = (block.gate, block.bias, block.bias_image)
        ids, weights = ops.route(x, *gate, text, count, c.routed_scaling_factor)
        self.observe("route_idx", 0, ids)
        ids = ids.masked_fill(~alive.unsqueeze(1), -1)
        inner = x if rounded is None else rounded
        up = ops.swiglu(ops.dense(inner, block.shared_up), c.swiglu_limit, self.rounds)
        shared = ops.dense(up, block.shared_down)
        return ops.experts(inner, ids, weights, block.experts, c.swiglu_limit, self.rounds, shared)

    def angles(self, pos: Tensor, *, compressed: bool) -> Angles:
        """Returns cosines and sines fp32 `[R, P/2]` of rows at positions `[R]`."""
        return angles(pos, self._frequencies[compressed])
