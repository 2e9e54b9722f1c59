"""The DSpark draft module: proposes the next tokens from features of the verified ones.

Two sides. For every row that runs the decoder half, a context row is written into a ring for each draft block, made
from the inputs of the target layers. After an anchor token was drawn, three blocks run over the anchor and noise
tokens at once, and a low-rank Markov head then draws token after token. Drafts only save time: the caller verifies
them by running them as rows, so nothing here can change what is emitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.reference import mhc
from flashmesh.kernels.reference.attention import attend
from flashmesh.kernels.reference.basics import frequencies, linear, rms_norm, rotate_, turns
from flashmesh.kernels.sampling import RowContext, propose
from flashmesh.kernels.shapes import TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flashmesh.kernels.config import ModelConfig
    from flashmesh.kernels.model import Model, Rows
    from flashmesh.kernels.reference.moe import Experts
    from flashmesh.kernels.weights import Weights
    from flashmesh.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where drafting begins.

    Attributes:
        token: drawn, not run yet.
        pos: its position; context rows exist below it.
        slot: the session's.
        low: first position whose context row the session has.
        params: how drafts are drawn, with the noise of their own positions; penalties and grammar are left out.
    """

    token: int
    pos: int
    slot: int
    low: int
    params: SamplingParams


@dataclass(slots=True)
class Draft:
    """Proposed tokens after an anchor, and how likely each is to be accepted if those before it are."""

    tokens: list[int]
    confidences: list[float]


class Drafter:
    """Draft blocks and their context rings.

    Args:
        config: of the model.
        weights: with the `mtp.` tensors.
        model: whose blocks, embedding and head the draft shares.
        experts: of every draft block.
        num_slots: sessions; one more slot belongs to nobody.
        ring: positions of a context ring.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        model: Model,
        experts: Sequence[Experts],
        num_slots: int,
        ring: int,
    ) -> None:
        self._c = config
        self._w = weights
        self._model = model
        self._experts = experts
        self._ring = ring
        self._last = f"mtp.{config.num_nextn_predict_layers - 1}."
        self._frequencies = frequencies(config, compressed=False)
        self._context = [
            torch.zeros(num_slots + 1, ring, config.head_dim)
            for _ in range(config.num_nextn_predict_layers)
        ]

    def remember(self, rows: Rows, features: Tensor) -> None:
        """Writes the context rows of verified, or to be verified, tokens.

        Args:
            rows: R rows that ran the decoder half.
            features: fp32 `[R, targets * D]`: means over the streams entering the target layers.
        """
        c, w = self._c, self._w
        x = self._model.gemm(features, w["mtp.0.main_proj.weight"])
        x = rms_norm(x, w["mtp.0.main_norm.weight"], c.rms_norm_eps)
        self._model.observe("main_x", 0, x)
        turn = turns(rows.pos, self._frequencies)
        for block, ring in enumerate(self._context):
            row = self._model.window_row(f"mtp.{block}.attn.", x, turn)
            ring[rows.slot, rows.pos % self._ring] = row

    def copy(self, source: int, target: int) -> None:
        """Copies the context rows of a slot."""
        for ring in self._context:
            ring[target] = ring[source]

    def draft(self, anchors: Sequence[Anchor]) -> list[Draft]:
        """Proposes `dspark_block_size` tokens for every anchor."""
        states, hidden = self._blocks(anchors)
        base = linear(hidden, self._w["head.weight"])
        size = self._c.dspark_block_size
        count = len(anchors) * size
        self._model.observe("base_logits", 0, base[:count])
        return self._markov(
            anchors,
            states[:count].view(len(anchors), size, -1),
            base[:count].view(len(anchors), size, -1),
        )

    def _blocks(self, anchors: Sequence[Anchor]) -> tuple[Tensor, Tensor]:
        """Runs the draft blocks; returns the collapsed state before and after the last norm, `[R, D]` each."""
        c, size = self._c, self._c.dspark_block_size
        count = len(anchors) * size
        row = torch.arange(count + -count % TILE)
        row[count:] = 0  # rows that pad the tile copy the first
        owner, offset = row // size, row % size
        first = torch.tensor([anchor.pos for anchor in anchors])[owner]
        ids = torch.tensor([anchor.token for anchor in anchors])[owner]
        ids = torch.where(offset == 0, ids, c.dspark_noise_token_id)
        slot = torch.tensor([anchor.slot for anchor in anchors])[owner]
        low = torch.tensor([anchor.low for anchor in anchors])[owner]
        seen = first.unsqueeze(1) + torch.arange(-c.sliding_window, 0)
        peers = owner.unsqueeze(1) * size + torch.arange(size)
        present = torch.cat((seen >= low.unsqueeze(1), torch.ones_like(peers, dtype=torch.bool)), 1)
        places = (slot.unsqueeze(1), seen.clamp(min=0) % self._ring)
        turn = turns(first + offset, self._frequencies)

        streams = self._w.rows("embed.weight", ids).unsqueeze(1).repeat(1, c.hc_mult, 1)
        carried = torch.zeros(len(row), c.hc_mult)
        carried[:, 0] = 1
        for block, ring in enumerate(self._context):
            prefix = f"mtp.{block}."
            streams, carried = self._model.block(
                prefix,
                streams,
                carried,
                partial(self._attention, f"{prefix}attn.", ring[places], peers, present, turn),
                partial(self._moe, block),
            )
            self._model.observe("stage_streams", block, streams[:count])
        state = mhc.collapse(streams, carried)
        hidden = rms_norm(state, self._w[self._last + "norm.weight"], c.rms_norm_eps)
        return state, hidden

    def _moe(self, block: int, x: Tensor) -> Tensor:
        prefix = f"mtp.{block}."
        bias = self._w[prefix + "ffn.gate.bias"]
        count = self._c.dspark_num_experts_per_tok
        return self._model.moe(prefix, x, bias, self._experts[block], count)

    def _attention(
        self, prefix: str, context: Tensor, peers: Tensor, present: Tensor, turn: Tensor, x: Tensor
    ) -> Tensor:
        """Attends to the context window and, both ways, to the whole draft."""
        _, q, row = self._model.projections(prefix, x, turn)
        keys = torch.cat((context, row[peers]), 1).masked_fill_(~present.unsqueeze(2), 0)
        scale = self._c.head_dim**-0.5
        out = attend(q, keys, present, self._w[prefix + "attn_sink"], scale)
        return self._model.project(prefix, rotate_(out, turn.conj()))

    def _markov(self, anchors: Sequence[Anchor], states: Tensor, base: Tensor) -> list[Draft]:
        """Draws the drafts one after the other; `[n, size, D]` and `[n, size, V]`."""
        w, count = self._w, len(anchors)
        drafts = [Draft([], []) for _ in anchors]
        previous = torch.tensor([anchor.token for anchor in anchors])
        padding = (0, 0, 0, -count % TILE)
        for step in range(self._c.dspark_block_size):
            embedded = w.rows(self._last + "markov_head.embed.weight", previous)
            padded = torch.nn.functional.pad(embedded, padding)
            logits = (
                base[:, step] + linear(padded, w[self._last + "markov_head.head.weight"])[:count]
            )
            self._model.observe("draft_logits", step, logits)
            tokens = propose(
                logits,
                [RowContext(params=a.params, position=a.pos + 1 + step) for a in anchors],
            )
            seen = torch.cat((states[:, step], embedded), 1)
            seen = torch.nn.functional.pad(seen, padding)
            confidence = linear(seen, w[self._last + "confidence_head.proj.weight"])[:count, 0]
            self._model.observe("confidence", step, confidence)
            for draft, token, value in zip(
                drafts, tokens, confidence.sigmoid().tolist(), strict=True
            ):
                draft.tokens.append(token)
                draft.confidences.append(value)
            previous = torch.tensor(tokens)
        return drafts
