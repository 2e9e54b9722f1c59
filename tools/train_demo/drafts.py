"""Trains the DSpark draft blocks on the frozen, rounded backbone.

For random places in the rows the three blocks propose the next five tokens at once, as they do when serving. They learn
to have the target's distribution, and the confidence head learns how often a draft drawn with the target's own noise is
the target's token, from draws of that noise: so its estimate is one of exactly what decides when serving.

Source of the loss: the DSpark paper, equations 9 to 12, with the acceptance target of coupled draws in place of one
minus total variation.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from flashmesh.kernels.reference.basics import rms_norm
from tools.train_demo.backbone import LOG_EVERY, Plan, rate
from tools.train_demo.mixing import spread
from tools.train_demo.optimiser import Optimiser
from tools.train_demo.parameters import BALANCED, kinds, rounded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from tools.train_demo.batches import Work
    from tools.train_demo.mixing import Turns
    from tools.train_demo.network import Network

NUM_ANCHORS = 48
"""Places of a row where drafting begins."""
ROUNDED_FROM = 0.5
BIAS_STEP = 0.01


class Drafted(NamedTuple):
    """Draft blocks' states `[B, A, 5, D]` before and after the last norm, and expert loads `[blocks, M]`."""

    states: Tensor
    hidden: Tensor
    load: Tensor


def blocks(
    net: Network, w: dict[str, Tensor], work: Work, features: Tensor, anchors: Tensor
) -> Drafted:
    """Runs the draft blocks.

    Args:
        net: of the model.
        w: weights, backbone and drafts.
        work: the rows.
        features: of the target, `[B, T, targets * D]`.
        anchors: int64 `[B, A]`, places in the rows of the token that a draft follows.
    """
    c, ids, start = net.config, work.batch.ids, work.batch.start
    size, window = c.dspark_block_size, c.sliding_window
    x = net.linear(features, w["mtp.0.main_proj.weight"])
    main = rms_norm(x, w["mtp.0.main_norm.weight"], c.rms_norm_eps)
    place = torch.arange(ids.shape[1], device=ids.device)
    context_turns = net.turns(place - start, compressed=False)
    first = start.gather(1, anchors)
    offset = torch.arange(size, device=ids.device)
    turns = net.turns((anchors - first).unsqueeze(2) + offset, compressed=False)
    seen = anchors.unsqueeze(2) + torch.arange(-window, 0, device=ids.device)
    present = seen >= first.unsqueeze(2)
    peers = torch.ones(*anchors.shape, size, dtype=torch.bool, device=ids.device)
    mask = torch.cat((present, peers), 2)[:, :, None, None].expand(-1, -1, -1, size, -1)
    inputs = ids.gather(1, anchors).unsqueeze(2).repeat(1, 1, size)
    inputs[..., 1:] = c.dspark_noise_token_id
    streams = w["embed.weight"][inputs].unsqueeze(3).repeat(1, 1, 1, c.hc_mult, 1)
    carried = torch.zeros_like(streams[..., 0])
    carried[..., 0] = 1
    loads = []
    for block in range(c.num_nextn_predict_layers):
        prefix = f"mtp.{block}."
        rows = net.window_row(w, prefix + "attn.", main, context_turns)
        context = _gather(rows, seen.clamp(min=0))
        pre, post, comb = net.mix(w, prefix + "hc_attn_", streams)
        x = net.sub_layer_input(w[prefix + "attn_norm.weight"], streams, carried)
        y = _attention(net, w, prefix + "attn.", x, turns, context, mask)
        streams = spread(streams, y, post, comb)
        carried, post, comb = net.mix(w, prefix + "hc_ffn_", streams)
        x = net.sub_layer_input(w[prefix + "ffn_norm.weight"], streams, pre)
        y, load, _ = net.moe(w, prefix, x.flatten(1, 2), c.dspark_num_experts_per_tok)
        loads.append(load)
        streams = spread(streams, y.view_as(x), post, comb)
    states = (streams * carried.unsqueeze(-1)).sum(-2)
    last = f"mtp.{c.num_nextn_predict_layers - 1}."
    hidden = rms_norm(states, w[last + "norm.weight"], c.rms_norm_eps)
    return Drafted(states, hidden, torch.stack(loads))


def _attention(
    net: Network,
    w: dict[str, Tensor],
    prefix: str,
    x: Tensor,
    turns: Turns,
    context: Tensor,
    mask: Tensor,
) -> Tensor:
    _, q, row = net.queries(w, prefix, x, turns)
    keys = torch.cat((context, row), 2).unsqueeze(2)
    (probabilities,) = net.attend(q.transpose(2, 3), [(keys, mask)], w[prefix + "attn_sink"])
    return net.project(w, prefix, net.weigh(probabilities, keys).transpose(2, 3), turns)


def _gather(rows: Tensor, places: Tensor) -> Tensor:
    """Returns rows `[B, T, n]` at places `[B, A, m]` as `[B, A, m, n]`."""
    batch = torch.arange(len(rows), device=rows.device).view(-1, 1, 1)
    return rows[batch, places]


def draft_loss(
    net: Network,
    w: dict[str, Tensor],
    work: Work,
    features: Tensor,
    target: Tensor,
    anchors: Tensor,
    noise: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and, by position, how often a draft is accepted and was expected to be.

    Args:
        net: of the model.
        w: weights, backbone and drafts.
        work: the rows.
        features: of the target.
        target: its normed output `[B, T, D]`.
        anchors: int64 `[B, A]`.
        noise: standard Gumbel draws `[B, A, 5, V]`.
    """
    c, ids = net.config, work.batch.ids
    size = c.dspark_block_size
    drafted = blocks(net, w, work, features, anchors)
    places = anchors.unsqueeze(2) + torch.arange(size, device=ids.device)
    inside = places + 1 < ids.shape[1]
    places = places.clamp(max=ids.shape[1] - 2)
    valid = inside & (_at(work.weights, places) > 0)
    valid = valid.int().cummin(-1).values * (_at(work.weights, anchors) == 1).unsqueeze(2)
    previous, wanted = _at(ids, places), _at(ids, places + 1)
    last = f"mtp.{c.num_nextn_predict_layers - 1}."
    embedded = w[last + "markov_head.embed.weight"][previous]
    logits = net.linear(drafted.hidden, w["head.weight"])
    logits = logits + net.linear(embedded, w[last + "markov_head.head.weight"])
    with torch.no_grad():
        goal = net.linear(_gather(target, places), w["head.weight"]).log_softmax(-1)
    log_q = logits.log_softmax(-1)
    ce = -log_q.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    distance = (log_q.exp() - goal.exp()).abs().sum(-1)
    with torch.no_grad():
        accepted = ((log_q + noise).argmax(-1) == (goal + noise).argmax(-1)).float()
    seen = torch.cat((drafted.states.detach(), embedded.detach()), -1)
    confidence = functional.linear(seen, w[last + "confidence_head.proj.weight"]).squeeze(-1)
    calibration = functional.binary_cross_entropy_with_logits(
        confidence, accepted, reduction="none"
    )
    weight = valid * torch.exp(-torch.arange(size, device=ids.device) / 4)
    each = 0.1 * ce + 0.9 * distance + calibration
    loss = (each * weight).sum() / weight.sum().clamp(min=1)
    counts = valid.float().sum((0, 1)).clamp(min=1)
    return loss, {
        "accepted": (accepted * valid).sum((0, 1)) / counts,
        "confidence": (confidence.detach().sigmoid() * valid).sum((0, 1)) / counts,
        "load": drafted.load.detach(),
    }


def _at(values: Tensor, places: Tensor) -> Tensor:
    """Returns `[B, T]` values at places `[B, ...]`."""
    return values.gather(1, places.flatten(1)).view_as(places)


def draw_anchors(weights: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Draws places whose next token counts, `[B, count]`; a row with fewer repeats places that do not."""
    keys = torch.rand(weights.shape, generator=draw, device=weights.device) + (weights == 1)
    return keys.topk(count, -1).indices


def gumbel(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Draws standard Gumbel noise on the generator's device."""
    # Never 0 or 1, whose logarithms would make every comparison of noisy scores meaningless.
    uniform = torch.rand(shape, generator=draw, device=draw.device).clamp(1e-20, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))


class DraftTrainer:
    """Trains the drafts' masters.

    Args:
        net: of the model.
        backbone: its weights as stored; not changed.
        masters: the drafts' tensors; changed in place.
        plan: of the run.
    """

    def __init__(
        self, net: Network, backbone: dict[str, Tensor], masters: dict[str, Tensor], plan: Plan
    ) -> None:
        self.masters = masters
        self._net = net
        self._backbone = backbone
        self._plan = plan
        self._kinds = {name: kind for name, kind in kinds(net.config).items() if name in masters}
        trained = {name: value for name, value in masters.items() if not name.endswith(BALANCED)}
        self._optimiser = Optimiser(trained, net.config)
        self._trained = list(trained.values())
        self._draw = torch.Generator(plan.device).manual_seed(0)
        self._loss = torch.compile(draft_loss) if plan.compiled else draft_loss
        self._forward = torch.compile(net.forward) if plan.compiled else net.forward

    def run(self, works: Iterator[Work], folder: Path) -> None:
        """Trains to the end of the plan."""
        begin = time.perf_counter()
        for step in range(self._plan.num_steps):
            metrics = self.advance(next(works), step)
            if (step + 1) % LOG_EVERY == 0 or step + 1 == self._plan.num_steps:
                figures: dict[str, object] = {
                    name: [round(x, 3) for x in value.tolist()] for name, value in metrics.items()
                }
                seconds = time.perf_counter() - begin
                figures |= {"draft_step": step + 1, "step_s": round(seconds / (step + 1), 4)}
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(figures) + "\n")
                print(json.dumps(figures), flush=True)

    def advance(self, work: Work, step: int) -> dict[str, Tensor]:
        """Makes one step."""
        device, share = self._plan.device, step / self._plan.num_steps
        work = work.to(device)
        with torch.no_grad():
            result = self._forward(self._backbone, work.batch, torch.tensor(False, device=device))
            weights = rounded(self.masters, self._kinds, weights=share >= ROUNDED_FROM)
        weights = {name: value.detach().requires_grad_() for name, value in weights.items()}
        count = min(NUM_ANCHORS, work.weights.shape[1])
        anchors = draw_anchors(work.weights, count, self._draw)
        c = self._net.config
        shape = (*anchors.shape, c.dspark_block_size, c.vocab_size)
        loss, metrics = self._loss(
            self._net,
            self._backbone | weights,
            work,
            result.features,
            result.hidden,
            anchors,
            gumbel(shape, self._draw),
        )
        loss.backward()  # type: ignore[no-untyped-call]
        for name, weight in weights.items():
            self.masters[name].grad = weight.grad
        norm = torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        if bool(torch.isfinite(norm)):
            self._optimiser.step(rate(step, self._plan.num_steps))
        for block, shares in enumerate(metrics.pop("load")):
            change = torch.sign(shares.mean() - shares) * BIAS_STEP * (share < ROUNDED_FROM)
            for name in BALANCED:
                self.masters[f"mtp.{block}.{name}"] += change - change.mean()
        return metrics
