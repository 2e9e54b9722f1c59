"""The model as one differentiable function over whole packed rows, for training.

The definition of right is `flashmesh.kernels.model`, which steps over caches; a test holds both to equal logits. Here
nothing is cached: a row of T tokens holds whole documents, masks say who sees whom, and selections are masks too. In
the comments B is the batch and T its tokens; the other letters are those of `flashmesh.kernels.shapes`.

Documents begin at multiples of `DOCUMENT_GRAIN`, so that no ratio-2 pair and no candidate block straddles two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from flashmesh.kernels.reference.basics import frequencies, rms_norm
from tools.train_demo.masks import candidates, make_masks, top
from tools.train_demo.mixing import Turns, rotate, sinkhorn, spread
from tools.train_demo.rounding import compressed_row, index_vector, window_row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from flashmesh.kernels.config import ModelConfig

DOCUMENT_GRAIN = 8


@dataclass(slots=True)
class Batch:
    """Packed rows.

    Attributes:
        ids: int64 `[B, T]`, T a multiple of the window.
        start: int64 `[B, T]`, where in its row a token's document begins; a padding token is a document of its own.
        engram: for each Engram layer the table rows int64 `[B, T, columns]`.
    """

    ids: Tensor
    start: Tensor
    engram: list[Tensor]

    def to(self, device: str) -> Batch:
        """Returns a copy on a device."""
        engram = [rows.to(device) for rows in self.engram]
        return Batch(self.ids.to(device), self.start.to(device), engram)


class Result(NamedTuple):
    """What a forward pass gives.

    Attributes:
        hidden: normed output `[B, T, D]`; logits are its product with the head.
        features: inputs of the draft's target layers, `[B, T, targets * D]`.
        index_loss: KL from the attention's own distribution over compressed rows to the indexer's, a scalar.
        balance_loss: 1 when every expert of every sequence has its share.
        load: share of the routed slots that went to each expert, `[layers, M]`.
    """

    hidden: Tensor
    features: Tensor
    index_loss: Tensor
    balance_loss: Tensor
    load: Tensor


class Network:
    """The backbone's forward pass and what the draft blocks share with it.

    Args:
        config: of the model.
        product: dtype in which large products multiply: fp32 to compare, bf16 to be quick. Norms, mixing, routing,
            softmax and the residual streams are fp32 either way.
        device: of all tensors.
    """

    def __init__(self, config: ModelConfig, *, product: torch.dtype, device: str) -> None:
        self.config = config
        self.product = product
        layers = range(config.num_hidden_layers)
        # Looked up once: a compiler cannot trace the search.
        self.kv_source = [config.kv_source(layer) for layer in layers]
        self.index_source = [config.index_source(layer) for layer in layers]
        self._frequencies = {
            compressed: frequencies(config, compressed=compressed).to(device)
            for compressed in (False, True)
        }

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns `x @ weight.T` as fp32."""
        dtype = self.product
        return functional.linear(x.to(dtype), weight.to(dtype)).float()

    def forward(self, w: Mapping[str, Tensor], batch: Batch, dense: Tensor) -> Result:
        """Runs the backbone.

        Args:
            w: weights by trained name.
            batch: the tokens.
            dense: bool scalar; True lets every query see all compressed rows, not only selected ones.
        """
        c = self.config
        state = _Forward(self, w, batch, dense)
        streams = w["embed.weight"][batch.ids].unsqueeze(2).repeat(1, 1, c.hc_mult, 1)
        carried = torch.zeros_like(streams[..., 0])
        carried[..., 0] = 1
        features = []
        for layer in range(c.num_hidden_layers):
            if layer in c.engram_layer_ids:
                streams = state.engram(layer, streams)
            if layer in c.dspark_target_layer_ids:
                features.append(streams.mean(2))
            prefix = f"layers.{layer}."
            pre, post, comb = self.mix(w, prefix + "hc_attn_", streams)
            x = self.sub_layer_input(w[prefix + "attn_norm.weight"], streams, carried)
            streams = spread(streams, state.attention(layer, x), post, comb)
            carried, post, comb = self.mix(w, prefix + "hc_ffn_", streams)
            x = self.sub_layer_input(w[prefix + "ffn_norm.weight"], streams, pre)
            y, load, balance = self.moe(w, prefix, x, c.num_experts_per_tok)
            state.loads.append(load)
            state.balances.append(balance)
            streams = spread(streams, y, post, comb)
        hidden = self.sub_layer_input(w["norm.weight"], streams, carried)
        return Result(
            hidden,
            torch.cat(features, -1),
            state.index_loss(),
            torch.stack(state.balances).mean(),
            torch.stack(state.loads),
        )

    def turns(self, positions: Tensor, *, compressed: bool) -> Turns:
        """Returns the rotations of positions int64 `[..., n]`."""
        theta = positions.float().unsqueeze(-1) * self._frequencies[compressed]
        return Turns(theta.cos(), theta.sin())

    def sub_layer_input(self, weight: Tensor, streams: Tensor, pre: Tensor) -> Tensor:
        """Collapses streams `[..., 4, D]` with `pre` `[..., 4]` and norms the sum."""
        collapsed = (streams * pre.unsqueeze(-1)).sum(-2)
        return rms_norm(collapsed, weight, self.config.rms_norm_eps)

    def mix(
        self, w: Mapping[str, Tensor], prefix: str, streams: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a sub-layer's pre `[..., 4]`, post `[..., 4]` and comb `[..., 4, 4]`, source before destination."""
        c = self.config
        flat = streams.flatten(-2)
        mixed = functional.linear(flat, w[prefix + "fn"])
        mixed = mixed * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
        scale = w[prefix + "scale"]
        steps = torch.cat((scale[0].expand(4), scale[1].expand(4), scale[2].expand(16)))
        z = w[prefix + "base"] + mixed * steps
        pre, post = torch.sigmoid(z[..., :4]) + 1e-6, 2 * torch.sigmoid(z[..., 4:8])
        return pre, post, sinkhorn(z[..., 8:].unflatten(-1, (4, 4)), c.hc_sinkhorn_iters, c.hc_eps)

    def queries(
        self, w: Mapping[str, Tensor], prefix: str, x: Tensor, turns: Turns
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query latent `[..., Q]`, rotated queries `[..., H, E]` and window row `[..., E]`."""
        c = self.config
        latent = rms_norm(
            self.linear(x, w[prefix + "wq_a.weight"]), w[prefix + "q_norm.weight"], c.rms_norm_eps
        )
        q = self.linear(latent, w[prefix + "wq_b.weight"]).unflatten(-1, (-1, c.head_dim))
        return latent, rotate(q, turns), self.window_row(w, prefix, x, turns)

    def window_row(self, w: Mapping[str, Tensor], prefix: str, x: Tensor, turns: Turns) -> Tensor:
        """Returns the rounded window row `[..., E]`."""
        row = self.linear(x, w[prefix + "wkv.weight"])
        row = rms_norm(row, w[prefix + "kv_norm.weight"], self.config.rms_norm_eps)
        return window_row(rotate(row, turns))

    def project(self, w: Mapping[str, Tensor], prefix: str, out: Tensor, turns: Turns) -> Tensor:
        """Turns attention output `[..., H, E]` back and projects it, in groups, to `[..., D]`."""
        c, dtype = self.config, self.product
        out = rotate(out, Turns(turns.cos, -turns.sin)).flatten(-2).unflatten(-1, (c.o_groups, -1))
        wo_a = w[prefix + "wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        parts = torch.einsum("...gk,gnk->...gn", out.to(dtype), wo_a.to(dtype))
        return self.linear(parts.flatten(-2), w[prefix + "wo_b.weight"])

    def attend(self, q: Tensor, parts: list[tuple[Tensor, Tensor]], sink: Tensor) -> list[Tensor]:
        """Returns the joint probabilities of several sets of keys, with a sink in the denominator.

        Args:
            q: `[..., H, n, E]`.
            parts: keys `[..., 1, m, E]` and the mask bool `[..., 1, n, m]` of who sees them.
            sink: `[H]`.

        Returns:
            For each part the probabilities `[..., H, n, m]`.
        """
        dtype, scale = self.product, self.config.head_dim**-0.5
        logits = [
            (q.to(dtype) @ keys.to(dtype).transpose(-1, -2))
            .float()
            .mul(scale)
            .masked_fill(~mask, -torch.inf)
            for keys, mask in parts
        ]
        sink = sink.view(-1, 1, 1).expand(*q.shape[:-1], 1)
        joint = torch.cat([*logits, sink], -1).softmax(-1)
        return list(joint.split([*(part.shape[-1] for part in logits), 1], -1)[:-1])

    def weigh(self, probabilities: Tensor, keys: Tensor) -> Tensor:
        """Returns `probabilities @ keys` as fp32."""
        return (probabilities.to(self.product) @ keys.to(self.product)).float()

    def moe(
        self, w: Mapping[str, Tensor], prefix: str, x: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes every expert and weighs most of them with zero: a few experts cost less than sorting tokens.

        Args:
            w: weights.
            prefix: of the block.
            x: `[..., n, D]`; n tokens are one sequence for the balance loss.
            count: experts of a token.

        Returns:
            Output `[..., n, D]`, load `[M]`, balance loss.
        """
        c, dtype, prefix = self.config, self.product, prefix + "ffn."
        scores = functional.softplus(functional.linear(x, w[prefix + "gate.weight"])).sqrt()
        chosen = (scores.detach() + w[prefix + "gate.bias"]).topk(count, -1).indices
        routed = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        picked = scores * routed
        weights = c.routed_scaling_factor * picked / (picked.sum(-1, keepdim=True) + 1e-20)
        w1, w2, w3 = (w[f"{prefix}experts.{name}.weight"] for name in ("w1", "w2", "w3"))
        inner = self._swiglu(self.linear(x, w1.flatten(0, 1)), self.linear(x, w3.flatten(0, 1)))
        inner = inner.unflatten(-1, (len(w1), -1)) * weights.unsqueeze(-1)
        y = functional.linear(
            inner.flatten(-2).to(dtype), w2.transpose(0, 1).flatten(1).to(dtype)
        ).float()
        w1, w2, w3 = (w[f"{prefix}shared_experts.{name}.weight"] for name in ("w1", "w2", "w3"))
        y = y + self.linear(self._swiglu(self.linear(x, w1), self.linear(x, w3)), w2)
        share = routed.mean(-2) * (scores.shape[-1] / count)
        balance = (share * (scores / scores.sum(-1, keepdim=True)).mean(-2)).sum(-1).mean()
        return y, routed.flatten(0, -2).mean(0) / count, balance

    def _swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        limit = self.config.swiglu_limit
        return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class _Forward:
    """State of one forward pass: masks, rotations, compressed rows and selections of the sources."""

    def __init__(self, net: Network, w: Mapping[str, Tensor], batch: Batch, dense: Tensor) -> None:
        c = net.config
        self._net = net
        self._w = w
        self._batch = batch
        self._dense = dense
        tokens = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        self._pos = tokens - batch.start
        self._turns = {kind: net.turns(self._pos, compressed=kind) for kind in (False, True)}
        self._masks = make_masks(batch.start, c.sliding_window)
        self._compressed: dict[int, tuple[Tensor, Tensor]] = {}
        self._selected: dict[int, Tensor] = {}
        self._index_scores: dict[int, Tensor] = {}
        self._attended: dict[int, list[Tensor]] = {}
        self._candidates: Tensor | None = None
        self.loads: list[Tensor] = []
        self.balances: list[Tensor] = []

    def engram(self, layer: int, streams: Tensor) -> Tensor:
        """Adds the gated lookups of a layer to the streams."""
        c, w, prefix = self._net.config, self._w, f"layers.{layer}.engram."
        rows = self._batch.engram[c.engram_layer_ids.index(layer)]
        looked_up = functional.embedding(rows, w[prefix + "embed.weight"]).flatten(2)
        keys, value = self._net.linear(looked_up, w[prefix + "wkv.weight"]).split(
            [c.hc_mult * c.hidden_size, c.hidden_size], -1
        )
        keys = keys.unflatten(-1, (c.hc_mult, -1))
        dots = (streams * w[prefix + "q_weight"] * w[prefix + "k_weight"] * keys).sum(-1)
        dots = dots * torch.rsqrt(streams.square().mean(-1) + 1e-20)
        dots = dots * torch.rsqrt(keys.square().mean(-1) + 1e-20) * c.hidden_size**-0.5
        gate = torch.sigmoid(torch.sign(dots) * dots.abs().clamp(min=1e-6).sqrt())
        return streams + gate.unsqueeze(-1) * value.unsqueeze(2)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """One attention sub-layer, `[B, T, D]` to the same."""
        net, c, w, prefix = self._net, self._net.config, self._w, f"layers.{layer}.attn."
        ratio = c.ratio(layer)
        turns = self._turns[ratio > 0]
        latent, q, row = net.queries(w, prefix, x, turns)
        window = c.sliding_window
        q = q.unflatten(1, (-1, window)).transpose(2, 3)  # [B, N, H, W, E]
        chunks = functional.pad(row, (0, 0, window, 0)).unflatten(1, (-1, window))
        keys = torch.cat((chunks[:, :-1], chunks[:, 1:]), 2).unsqueeze(2)  # [B, N, 1, 2 W, E]
        parts = [(keys, self._masks.window.unsqueeze(2))]
        if ratio:
            if layer in c.kv_source_layer_ids:
                self._compressed[layer] = self._compress(layer, x)
            if layer in c.index_source_layer_ids:
                self._selected[layer] = self._select(layer, x, latent)
            source = _known(net.index_source[layer])
            rows, _ = self._compressed[_known(net.kv_source[layer])]
            mask = self._selected[source].unflatten(1, (-1, window)).unsqueeze(2)
            parts.append((rows.unsqueeze(1).unsqueeze(2), mask))
        sink = w[prefix + "attn_sink"]
        probabilities = net.attend(q, parts, sink)
        if ratio:
            mass = probabilities[1].detach().sum(2).flatten(1, 2)
            self._attended.setdefault(source, []).append(mass)
        out = sum(net.weigh(p, k) for p, (k, _) in zip(probabilities, parts, strict=True))
        assert isinstance(out, torch.Tensor)
        return net.project(w, prefix, out.transpose(2, 3).flatten(1, 2), turns)

    def _compress(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a source's compressed rows `[B, J, E]` and index keys `[B, J, F]`."""
        net, c, w, prefix = self._net, self._net.config, self._w, f"layers.{layer}.attn."
        ratio = c.ratio(layer)
        latent = net.linear(x, w[prefix + "compressor.wkv.weight"])
        if ratio == 2:
            gate = (
                net.linear(x, w[prefix + "compressor.wgate.weight"])
                .unflatten(1, (-1, 2))
                .softmax(2)
            )
            latent = (gate * latent.unflatten(1, (-1, 2))).sum(2)
        latent = rms_norm(latent, w[prefix + "compressor.norm.weight"], c.rms_norm_eps)
        turns = net.turns(self._pos[:, ::ratio], compressed=True)
        # The indexer learns from its own loss only: what it reads is detached.
        key = net.linear(latent.detach(), w[prefix + "indexer.wk.weight"])
        key = rms_norm(key, w[prefix + "indexer.k_norm.weight"], c.rms_norm_eps)
        return compressed_row(rotate(latent, turns)), index_vector(rotate(key, turns))

    def _select(self, layer: int, x: Tensor, latent: Tensor) -> Tensor:
        """Scores all compressed rows and returns who may attend to which, bool `[B, T, J]`."""
        net, c, w, prefix = self._net, self._net.config, self._w, f"layers.{layer}.attn.indexer."
        _, keys = self._compressed[_known(net.kv_source[layer])]
        iq = net.linear(latent.detach(), w[prefix + "wq_b.weight"]).unflatten(
            -1, (c.index_n_heads, -1)
        )
        iq = index_vector(rotate(iq, self._turns[True]))
        iw = net.linear(x.detach(), w[prefix + "weights_proj.weight"])
        iw = iw * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        dots = torch.einsum("bthf,bjf->bthj", iq.to(net.product), keys.to(net.product))
        scores = (dots.float().relu() * iw.unsqueeze(-1)).sum(2)
        self._index_scores[layer] = scores
        visible = self._masks.visible[c.ratio(layer)]
        allowed = visible
        if layer == c.candidate_source_layer_id:
            self._candidates = candidates(
                scores.detach(), visible, c.candidate_block_size, c.candidate_topk_blocks
            )
        elif self._candidates is not None:
            allowed = self._candidates
        return visible & (self._dense | top(scores.detach(), allowed, c.index_topk))

    def index_loss(self) -> Tensor:
        """KL of every source's scores against the mean attention of the layers that use its selection."""
        losses = []
        for source, masses in self._attended.items():
            target = torch.stack(masses).mean(0)
            total = target.sum(-1, keepdim=True)
            target = target / total.clamp(min=1e-6)
            allowed = self._selected[source]
            scores = self._index_scores[source].masked_fill(~allowed, -torch.inf)
            # A row that sees nothing has no distribution; zeros keep its gradient finite.
            scores = torch.where(allowed.any(-1, keepdim=True), scores, 0.0)
            gap = target * (target.clamp(min=1e-9).log() - scores.log_softmax(-1).clamp(min=-1e4))
            counted = (total.squeeze(-1) > 1e-3).float()
            losses.append((gap.sum(-1) * counted).sum() / counted.sum().clamp(min=1))
        return torch.stack(losses).sum()


def _known(layer: int | None) -> int:
    """A compressed layer has sources: the configuration was checked for it."""
    assert layer is not None
    return layer
