"""The draft module on a device: context rows of verified tokens, and five proposed tokens after an anchor.

The same computation as `kernels.draft`, without the host: tokens and confidences stay on the device.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.device.model import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flashmesh.kernels.device.inputs import DeviceRows
    from flashmesh.kernels.device.model import Angles, DeviceModel
    from flashmesh.kernels.device.weights import Block, WeightMaker


class DeviceDrafter:
    """Draft blocks and their context rings.

    Args:
        maker: prepares the `mtp.` tensors.
        model: whose blocks, embedding and head the draft shares.
        max_anchors: drafts made at once.
    """

    def __init__(self, maker: WeightMaker, model: DeviceModel, max_anchors: int) -> None:
        config = model.config
        self._c, self._model = config, model
        prefixes = [f"mtp.{n}." for n in range(config.num_nextn_predict_layers)]
        self._blocks = [maker.block(prefix, None) for prefix in prefixes]
        self._context_kv = [maker.dense(prefix + "attn.wkv") for prefix in prefixes]
        self._main_proj = maker.dense("mtp.0.main_proj")
        self._main_norm = maker.fp32("mtp.0.main_norm.weight")
        self._norm = maker.fp32(prefixes[-1] + "norm.weight")
        self._markov_embed = maker.bf16(prefixes[-1] + "markov_head.embed.weight")
        self._markov_head = maker.bf16(prefixes[-1] + "markov_head.head.weight")
        self._confidence = maker.bf16(prefixes[-1] + "confidence_head.proj.weight")[0]
        caches = model.caches
        # The block's own rows stand after the rings.
        self._own = (caches.num_slots + 1) * caches.ring
        shape = (self._own + max_anchors * config.dspark_block_size, caches.window[0].shape[1])
        self._rings = [
            torch.zeros(shape, dtype=torch.uint8, device=caches.device) for _ in prefixes
        ]

    def remember(self, rows: DeviceRows, features: Tensor, angles: Angles) -> None:
        """Writes the context rows of tokens that ran the decoder half.

        Args:
            rows: those tokens.
            features: bf16 `[R, targets * D]`, means over the streams that enter the target layers.
            angles: of window-only layers, at the rows' positions.
        """
        model, ops, eps = self._model, self._model.ops, self._c.rms_norm_eps
        x = ops.dense(model.rounded(features), self._main_proj)
        x = model.rounded(ops.rms_norm(x, self._main_norm, eps, False))
        at = model.caches.ring_rows(rows.slot, rows.pos)
        for block, weight, rows_of_block in zip(
            self._blocks, self._context_kv, self._rings, strict=True
        ):
            kv = ops.dense(x, weight)
            ops.store_window(kv, block.kv_norm, *angles, rows_of_block, at, eps)

    def draft(
        self,
        token: Tensor,
        pos: Tensor,
        slot: Tensor,
        low: Tensor,
        draw: Callable[[Tensor, int], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Proposes tokens.

        Args:
            token: int64 `[n]` anchors, drawn and not run yet.
            pos: int32 `[n]`, their positions; context rows exist below.
            slot: int32 `[n]`.
            low: int32 `[n]`, first position whose context row exists.
            draw: logits fp32 `[n, V]` and the place in the draft to token ids int64 `[n]`.

        Returns:
            Tokens int64 `[n, B]`, and confidences fp32 `[n, B]`: how likely each is right if those before it are.
        """
        size, count = self._c.dspark_block_size, len(token)
        state, hidden = self._run_blocks(token, pos, slot, low)
        base = self._model.logits(hidden)
        self._model.observe("base_logits", 0, base)
        base = base.view(count, size, -1)
        state = state.view(count, size, -1)
        tokens, confidences = [], []
        for place in range(size):
            embedded = self._markov_embed[token]
            logits = self._model.ops.markov_logits(
                base[:, place].contiguous(), embedded, self._markov_head
            )
            token = draw(logits, place)
            here = state[:, place].contiguous()
            confidences.append(self._model.ops.confidence(here, embedded, self._confidence))
            tokens.append(token)
        return torch.stack(tokens, 1), torch.stack(confidences, 1).sigmoid()

    def _run_blocks(
        self, token: Tensor, pos: Tensor, slot: Tensor, low: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs the blocks over anchor and noise tokens; returns the collapsed state before and after the last norm."""
        c, model, size = self._c, self._model, self._c.dspark_block_size
        device, count = token.device, len(token)
        row = torch.arange(count * size, device=device, dtype=torch.int32)
        owner, place = row.long() // size, row % size
        ids = torch.where(place == 0, token[owner], c.dspark_noise_token_id)
        angles = model.angles(pos[owner] + place, compressed=False)
        store = self._own + row
        index = self._index(pos, slot, low)[owner].contiguous()
        text = torch.ones(len(row), dtype=torch.bool, device=device)
        experts = c.dspark_num_experts_per_tok
        steps = [
            Step(
                block,
                partial(self._attention, block, ring, angles, store, index),
                partial(model.moe, block, experts, text, text),
            )
            for block, ring in zip(self._blocks, self._rings, strict=True)
        ]
        streams, carried = model.run_blocks(steps, *model.enter(ids))
        hidden = model.ops.collapse_norm(streams, carried, self._norm, c.rms_norm_eps)
        state = (carried.unsqueeze(2) * streams.float()).sum(1).bfloat16()
        return state, hidden

    def _index(self, pos: Tensor, slot: Tensor, low: Tensor) -> Tensor:
        """Returns int32 `[n, 192]`: the context window, the draft's own rows, and nothing up to a whole tile."""
        window, size = self._c.sliding_window, self._c.dspark_block_size
        device, count = pos.device, len(pos)
        seen = pos.unsqueeze(1) + torch.arange(-window, 0, device=device, dtype=torch.int32)
        rows = self._model.caches.ring_rows(slot.unsqueeze(1), seen)
        context = torch.where(seen >= low.unsqueeze(1), rows, -1)
        own = self._own + torch.arange(count * size, device=device, dtype=torch.int32)
        index = torch.cat((context, own.view(count, size)), 1)
        return torch.nn.functional.pad(index, (0, -index.shape[1] % 64), value=-1).int()

    def _attention(
        self,
        block: Block,
        ring: Tensor,
        angles: Angles,
        store: Tensor,
        index: Tensor,
        x: Tensor,
        rounded: Tensor | None,
    ) -> Tensor:
        model = self._model
        _, q = model.queries(block, x, rounded, angles, ring, store)
        return model.attend(block, q, angles, ring, index, model.caches.no_kv, index[:, :0])
