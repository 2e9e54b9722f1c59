"""The model, top to bottom: embedding, encoder half, decoder half, logits.

One pass takes rows of any sessions, padded to whole tiles, and runs every layer over all of them. Rows before their
session's `decoder_start` stop after the encoder half; of the first decoder layer they need only what its compressed
rows are made of. Nothing here knows what a session or a step is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashmesh.kernels.engram import EngramHash, inject
from flashmesh.kernels.quantize import fp8_32, mxfp4_32
from flashmesh.kernels.reference import mhc
from flashmesh.kernels.reference.attention import attend, index_scores
from flashmesh.kernels.reference.basics import frequencies, linear, rms_norm, rotate_, turns
from flashmesh.kernels.reference.moe import Experts, route, routed, swiglu
from flashmesh.kernels.reference.select import candidate_mask, top_rows
from flashmesh.kernels.shapes import TILE
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.draft import Drafter
    from flashmesh.kernels.pages import Pages, Slots
    from flashmesh.kernels.reference.basics import Gemm
    from flashmesh.kernels.weights import Weights

SubLayer = Callable[[Tensor], Tensor]
"""Normed input `[R, D]` to output `[R, D]`."""

Observer = Callable[[str, int, Tensor], None]
"""Told (name, layer, tensor) of intermediate results; tests only."""


@dataclass(slots=True)
class Span:
    """Rows [begin, end) of a pass that belong to one session, and its pages in order."""

    begin: int
    end: int
    pages: Tensor


@dataclass(slots=True)
class Rows:
    """What a pass knows of its rows; all tensors have R entries, R a multiple of the tile.

    Attributes:
        ids: token ids.
        grams: `[R, 4]`, see `EngramHash.rows`.
        pos: positions.
        slot: window slots.
        encoder_low, decoder_low: first position whose window row the half may see.
        page: where the row's block lies; the nobody page where it writes no global row.
        text: False for rows of an image span.
        spans: the sessions.
        embeds: rows that replace embeddings, by place in the pass.
    """

    ids: Tensor
    grams: Tensor
    pos: Tensor
    slot: Tensor
    encoder_low: Tensor
    decoder_low: Tensor
    page: Tensor
    text: Tensor
    spans: list[Span]
    embeds: dict[int, Tensor] = field(default_factory=dict)

    def select(self, keep: Tensor, spans: list[Span], nobody: int) -> Rows:
        """Returns the rows at `keep` int64 `[n]`, padded with copies of the first that belong to nobody."""
        padding = -len(keep) % TILE
        index = torch.cat((keep, keep[:1].expand(padding)))
        slot = self.slot[index]
        if padding:
            slot[len(keep) :] = nobody
        return Rows(
            self.ids[index],
            self.grams[index],
            self.pos[index],
            slot,
            self.encoder_low[index],
            self.decoder_low[index],
            self.page[index],
            self.text[index],
            spans,
        )


@dataclass(slots=True)
class _Selection:
    """What an index source layer found, for the layers that reuse it."""

    keys: Tensor
    present: Tensor


@dataclass(slots=True)
class _Pass:
    """State that lives for one pass over one half: rows, angles, selections."""

    rows: Rows
    low: Tensor
    turn: dict[bool, Tensor]
    window_index: Tensor
    window_present: Tensor
    selections: dict[int, _Selection] = field(default_factory=dict)
    candidates: list[Tensor] | None = None
    features: list[Tensor] = field(default_factory=list)


class Model:
    """Weights and caches of one engine.

    Args:
        config: of the model.
        weights: of the engine's role.
        hashes: of the Engram layers.
        pages, slots: the caches.
        num_layers: layers that the role runs: all, or the encoder half.
        gemm: how F8 and F4 weights multiply: `linear`, or `quantized_linear` as released. The grouped output
            projection's first half stays unquantised, as in the released inference code.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        hashes: EngramHash,
        pages: Pages,
        slots: Slots,
        num_layers: int,
        gemm: Gemm = linear,
    ) -> None:
        self.config = config
        self.gemm = gemm
        self.observe: Observer = lambda name, layer, value: None
        self._w = weights
        self._hashes = hashes
        self._pages = pages
        self._slots = slots
        self._frequencies = {
            compressed: frequencies(config, compressed=compressed) for compressed in (False, True)
        }
        self._experts = [weights.experts(f"layers.{layer}.") for layer in range(num_layers)]
        self.drafter: Drafter | None = None

    def forward(self, rows: Rows, decoder: Rows | None, keep: Tensor, wanted: Tensor) -> Tensor:
        """Runs a pass.

        Args:
            rows: all rows.
            decoder: those that run the decoder half too; None where there are none.
            keep: their places in `rows`, int64, unpadded.
            wanted: places in `decoder` that give logits, int64.

        Returns:
            Logits fp32 `[len(wanted), V]`.
        """
        c = self.config
        first = c.num_encoder_layers
        embedded = self._w.rows("embed.weight", rows.ids)
        for place, row in rows.embeds.items():
            embedded[place] = row
        streams = embedded.unsqueeze(1).repeat(1, c.hc_mult, 1)
        carried = torch.zeros(len(rows.ids), c.hc_mult)
        carried[:, 0] = 1
        state = self._begin(rows, rows.encoder_low)
        for layer in range(first):
            streams, carried = self._layer(layer, state, streams, carried)
        x = self._attention_input(first, streams, carried)
        self._write_global_rows(first, state, x)
        if decoder is None:
            return torch.empty(0, c.vocab_size)
        index = torch.cat((keep, keep[:1].expand(len(decoder.ids) - len(keep))))
        streams, carried = streams[index], carried[index]
        state = self._begin(decoder, decoder.decoder_low)
        for layer in range(first, c.num_hidden_layers):
            streams, carried = self._layer(layer, state, streams, carried)
        if self.drafter is not None:
            self.drafter.remember(decoder, torch.cat(state.features, 1))
        return self._logits(streams, carried, wanted)

    def _begin(self, rows: Rows, low: Tensor) -> _Pass:
        window = self.config.sliding_window
        positions = rows.pos.unsqueeze(1) + torch.arange(1 - window, 1)
        return _Pass(
            rows,
            low,
            {kind: turns(rows.pos, f) for kind, f in self._frequencies.items()},
            positions.clamp(min=0) % self._slots.ring,
            positions >= low.unsqueeze(1),
        )

    def _layer(
        self, layer: int, state: _Pass, streams: Tensor, carried: Tensor
    ) -> tuple[Tensor, Tensor]:
        c, prefix = self.config, f"layers.{layer}."
        self.observe("streams", layer, streams)
        self.observe("carried_pre", layer, carried)
        if layer in c.engram_layer_ids:
            streams = self._engram(layer, state.rows, streams)
            self.observe("streams_after_engram", layer, streams)
        if layer in c.dspark_target_layer_ids:
            state.features.append(streams.mean(1))
        return self.block(
            prefix,
            streams,
            carried,
            lambda x: self._attention(layer, state, x),
            lambda x: self._moe(layer, state.rows, x),
        )

    def block(
        self, prefix: str, streams: Tensor, carried: Tensor, attention: SubLayer, moe: SubLayer
    ) -> tuple[Tensor, Tensor]:
        """Runs both sub-layers of a block around the streams; returns streams and the next pre-mix."""
        w, eps, observe = self._w, self.config.rms_norm_eps, self.observe
        pre, post, comb = self._mix(prefix + "hc_attn_", streams)
        x = rms_norm(mhc.collapse(streams, carried), w[prefix + "attn_norm.weight"], eps)
        observe(prefix + "attn_in", 0, x)
        y = attention(x)
        observe(prefix + "attn_out", 0, y)
        streams = mhc.spread(streams, y, post, comb)
        observe(prefix + "streams_mid", 0, streams)
        next_pre, post, comb = self._mix(prefix + "hc_ffn_", streams)
        x = rms_norm(mhc.collapse(streams, pre), w[prefix + "ffn_norm.weight"], eps)
        observe(prefix + "ffn_in", 0, x)
        y = moe(x)
        observe(prefix + "ffn_out", 0, y)
        return mhc.spread(streams, y, post, comb), next_pre

    def _mix(self, prefix: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, w = self.config, self._w
        mixing = mhc.coefficients(
            streams,
            w[prefix + "fn"],
            w[prefix + "base"],
            w[prefix + "scale"],
            iters=c.hc_sinkhorn_iters,
            eps=c.hc_eps,
        )
        for name, value in zip(("pre", "post", "comb"), mixing, strict=True):
            self.observe(prefix + name, 0, value)
        return mixing

    def _attention_input(self, layer: int, streams: Tensor, carried: Tensor) -> Tensor:
        weight = self._w[f"layers.{layer}.attn_norm.weight"]
        return rms_norm(mhc.collapse(streams, carried), weight, self.config.rms_norm_eps)

    def _engram(self, layer: int, rows: Rows, streams: Tensor) -> Tensor:
        w, prefix = self._w, f"layers.{layer}.engram."
        looked_up = w.engram_rows(layer, self._hashes.rows(layer, rows.grams)).flatten(1)
        self.observe("engram_rows", layer, looked_up)
        return inject(
            streams,
            looked_up,
            w[prefix + "wkv.weight"],
            w[prefix + "q_weight"],
            w[prefix + "k_weight"],
            rows.text,
            self.gemm,
        )

    def _attention(self, layer: int, state: _Pass, x: Tensor) -> Tensor:
        c, w, prefix = self.config, self._w, f"layers.{layer}.attn."
        ratio = c.ratio(layer)
        turn = state.turn[ratio > 0]
        latent, q, row = self.projections(prefix, x, turn)
        self.observe("window_kv", layer, row)
        keys, present = self._window(layer, state, row)
        if ratio:
            # The first decoder layer's rows are written before the halves part (see `forward`).
            if layer in c.kv_source_layer_ids and layer < c.num_encoder_layers:
                self._write_global_rows(layer, state, x)
            if layer in c.index_source_layer_ids:
                state.selections[layer] = self._select(layer, state, x, latent)
            selected = state.selections[known_source(c.index_source(layer))]
            keys = torch.cat((keys, selected.keys), 1)
            present = torch.cat((present, selected.present), 1)
        out = attend(q, keys, present, w[prefix + "attn_sink"], c.head_dim**-0.5)
        return self.project(prefix, rotate_(out, turn.conj()))

    def projections(self, prefix: str, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query latent `[R, Q]`, rotated queries `[R, H, E]` and the window row `[R, E]`."""
        c, w = self.config, self._w
        latent = rms_norm(
            self.gemm(x, w[prefix + "wq_a.weight"]), w[prefix + "q_norm.weight"], c.rms_norm_eps
        )
        q = self.gemm(latent, w[prefix + "wq_b.weight"])
        q = q.view(-1, c.num_attention_heads, c.head_dim)
        return latent, rotate_(q, turn), self.window_row(prefix, x, turn)

    def window_row(self, prefix: str, x: Tensor, turn: Tensor) -> Tensor:
        """Returns the window row `[R, E]`: key and value of its token in this layer."""
        w, eps = self._w, self.config.rms_norm_eps
        row = rms_norm(self.gemm(x, w[prefix + "wkv.weight"]), w[prefix + "kv_norm.weight"], eps)
        return fp8_32(rotate_(row, turn))

    def _window(self, layer: int, state: _Pass, row: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the pass's window rows and gathers what each row sees: `[R, W, E]`, oldest first."""
        ring, rows = self._slots.window[layer], state.rows
        ring[rows.slot, rows.pos % self._slots.ring] = row
        keys = ring[rows.slot.unsqueeze(1), state.window_index]
        present = state.window_present
        return keys.masked_fill_(~present.unsqueeze(2), 0), present

    def project(self, prefix: str, out: Tensor) -> Tensor:
        c, w = self.config, self._w
        groups = out.view(len(out), c.o_groups, -1)
        wo_a = w[prefix + "wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        parts = [linear(groups[:, g].contiguous(), wo_a[g]) for g in range(c.o_groups)]
        return self.gemm(torch.cat(parts, 1), w[prefix + "wo_b.weight"])

    def _write_global_rows(self, layer: int, state: _Pass, x: Tensor) -> None:
        """Compresses the rows of a KV source layer and stores those that their session may write."""
        c, w, prefix = self.config, self._w, f"layers.{layer}.attn."
        rows, ratio = state.rows, c.ratio(layer)
        latent = linear(x, w[prefix + "compressor.wkv.weight"])
        if ratio == 2:
            gate = linear(x, w[prefix + "compressor.wgate.weight"])
            latent = self._pair(layer, rows, latent, gate)
        latent = rms_norm(latent, w[prefix + "compressor.norm.weight"], c.rms_norm_eps)
        # A group stands at the position of its first token.
        turn = turns(rows.pos // ratio * ratio, self._frequencies[True])
        key = rms_norm(
            linear(latent, w[prefix + "indexer.wk.weight"]),
            w[prefix + "indexer.k_norm.weight"],
            c.rms_norm_eps,
        )
        complete = rows.pos % ratio == ratio - 1
        page = torch.where(complete, rows.page, self._pages.nobody)
        place = rows.pos % BLOCK_TOKENS // ratio
        # Rotated last and in place: the index key is made from the unrotated latent.
        self._pages.write(layer, page, place, rotate_(latent, turn), rotate_(key, turn))

    def _pair(self, layer: int, rows: Rows, latent: Tensor, gate: Tensor) -> Tensor:
        """Joins every row with the token before it, which may have come in an earlier pass."""
        open_pair, ring = self._slots.open_pair[layer], self._slots.pair_ring
        first = torch.tensor([span.begin for span in rows.spans])
        kept = torch.tensor(
            [row for s in rows.spans for row in range(max(s.begin, s.end - ring), s.end)]
        )
        before = latent.roll(1, 0), gate.roll(1, 0)
        for index, values in enumerate(before):
            values[first] = open_pair[rows.slot[first], (rows.pos[first] - 1) % ring, index]
        for index, values in enumerate((latent, gate)):
            open_pair[rows.slot[kept], rows.pos[kept] % ring, index] = values[kept]
        peak = torch.maximum(before[1], gate)
        e0, e1 = (before[1] - peak).exp_(), (gate - peak).exp_()
        total = e0 + e1
        return e0 / total * before[0] + e1 / total * latent

    def _select(self, layer: int, state: _Pass, x: Tensor, latent: Tensor) -> _Selection:
        """Scores the source's index keys, selects, and gathers the compressed rows: `[R, K, E]`."""
        c, w, prefix = self.config, self._w, f"layers.{layer}.attn.indexer."
        source = self._pages.sources[known_source(c.kv_source(layer))]
        iq = self.gemm(latent, w[prefix + "wq_b.weight"])
        iq = rotate_(iq.view(-1, c.index_n_heads, c.index_head_dim), state.turn[True])
        iq = mxfp4_32(iq)[2]
        iw = linear(x, w[prefix + "weights_proj.weight"])
        iw = iw * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        rows = state.rows
        keys = torch.zeros(len(rows.ids), c.index_topk, c.head_dim)
        present = torch.zeros(len(rows.ids), c.index_topk, dtype=torch.bool)
        candidates = []
        for place, span in enumerate(rows.spans):
            part = slice(span.begin, span.end)
            visible_count = (rows.pos[part] + 1) // c.ratio(layer)
            num_pages = -(-int(visible_count[-1]) // source.layout.num_rows) or 1
            pages = span.pages[:num_pages]
            scores = index_scores(iq[part], source.ik[pages].flatten(0, 1), iw[part])
            visible = torch.arange(scores.shape[1]) < visible_count.unsqueeze(1)
            allowed = visible
            if layer == c.candidate_source_layer_id:
                candidates.append(
                    candidate_mask(
                        scores,
                        visible,
                        block=c.candidate_block_size,
                        count=c.candidate_topk_blocks,
                    )
                )
            elif state.candidates is not None:
                allowed = state.candidates[place]
            chosen = top_rows(scores, allowed, c.index_topk)
            self.observe("topk", layer, chosen)
            present[part] = chosen >= 0
            chosen.clamp_(min=0)
            per_page = source.layout.num_rows
            keys[part] = source.kv[pages[chosen // per_page], chosen % per_page]
        if candidates:
            state.candidates = candidates
        return _Selection(keys.masked_fill_(~present.unsqueeze(2), 0), present)

    def _moe(self, layer: int, rows: Rows, x: Tensor) -> Tensor:
        c, w, prefix = self.config, self._w, f"layers.{layer}."
        bias = torch.where(
            rows.text.unsqueeze(1), w[prefix + "ffn.gate.bias"], w[prefix + "ffn.gate.bias_vl"]
        )
        nobody = (rows.slot == self._slots.nobody).unsqueeze(1)
        return self.moe(prefix, x, bias, self._experts[layer], c.num_experts_per_tok, nobody)

    def moe(
        self,
        prefix: str,
        x: Tensor,
        bias: Tensor,
        experts: Experts,
        count: int,
        skipped: Tensor | None = None,
    ) -> Tensor:
        """Returns routed and shared experts' sum `[R, D]`; `skipped` bool `[R, 1]` rows have no routed part."""
        c, w, prefix = self.config, self._w, prefix + "ffn."
        chosen, weights = route(x, w[prefix + "gate.weight"], bias, count, c.routed_scaling_factor)
        self.observe(f"{prefix}route_idx", 0, chosen)
        self.observe(f"{prefix}route_w", 0, weights)
        if skipped is not None:
            chosen = chosen.masked_fill(skipped, -1)
        y = routed(x, chosen, weights, experts, c.swiglu_limit, self.gemm)
        w1, w2, w3 = (w[f"{prefix}shared_experts.{name}.weight"] for name in ("w1", "w2", "w3"))
        return y + swiglu(x, w1, w2, w3, c.swiglu_limit, None, self.gemm)

    def _logits(self, streams: Tensor, carried: Tensor, wanted: Tensor) -> Tensor:
        c, w = self.config, self._w
        self.observe("streams", c.num_hidden_layers, streams)
        self.observe("carried_pre", c.num_hidden_layers, carried)
        hidden = rms_norm(mhc.collapse(streams, carried), w["norm.weight"], c.rms_norm_eps)
        self.observe("final", c.num_hidden_layers, hidden)
        if not len(wanted):
            return torch.empty(0, c.vocab_size)
        index = torch.cat((wanted, wanted[:1].expand(-len(wanted) % TILE)))
        return linear(hidden[index], w["head.weight"])[: len(wanted)]


def known_source(layer: int | None) -> int:
    """Returns a compressed layer's source, which it has: the configuration was checked for it."""
    assert layer is not None
    return layer
