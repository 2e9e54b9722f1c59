"""Trains the backbone: next-token loss, balanced routing, an indexer that learns from attention, rounding at the end.

The run has stages by share of its steps: attention over all compressed rows first, then over selected ones, so that
the indexer has something to learn from; stored-format weights in the last part, so that the released format loses
little. Rounding of cached rows is on throughout.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tools.train_demo.optimiser import Optimiser
from tools.train_demo.parameters import BALANCED, kinds, rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from tools.train_demo.batches import Work
    from tools.train_demo.network import Network

WARM_UP_STEPS = 60
FLAT_UNTIL, LAST_RATE = 0.5, 0.05
SPARSE_FROM, ROUNDED_FROM, BALANCE_UNTIL = 0.35, 0.6, 0.9
DENSE_EVERY = 4
"""In the sparse stage one step of so many sees all rows, so that the indexer can take a dropped one back."""
BIAS_STEP = 0.01
LOG_EVERY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and where.

    Attributes:
        num_steps: of the whole run.
        device: of the network.
        compiled: compile the loss; worth it from a few hundred steps on.
        save_every: steps between saved states.
    """

    num_steps: int
    device: str
    compiled: bool
    save_every: int = 500


class Trainer:
    """The state of a run: masters, optimiser, step.

    Args:
        net: of the masters' configuration.
        masters: fp32 by trained name, drafts excluded; changed in place.
        plan: of the run.
    """

    def __init__(self, net: Network, masters: dict[str, Tensor], plan: Plan) -> None:
        self.masters = masters
        self.step = 0
        self._net = net
        self._plan = plan
        self._kinds = kinds(net.config)
        trained = {name: value for name, value in masters.items() if not name.endswith(BALANCED)}
        self._optimiser = Optimiser(trained, net.config)
        self._weights = {
            name: value.clone().requires_grad_(name in trained) for name, value in masters.items()
        }
        self._index = [value for name, value in trained.items() if "indexer" in name]
        self._others = [value for name, value in trained.items() if "indexer" not in name]
        loss: Callable[..., tuple[Tensor, dict[str, Tensor]]] = backbone_loss
        self._loss = torch.compile(loss) if plan.compiled else loss
        self._round = torch.compile(_round_into) if plan.compiled else _round_into

    def run(self, works: Iterator[Work], folder: Path) -> None:
        """Trains to the end of the plan; `metrics.jsonl` and states go below `folder`."""
        begin, first = time.perf_counter(), self.step
        while self.step < self._plan.num_steps:
            metrics = self.advance(next(works))
            if self.step % LOG_EVERY == 0 or self.step == self._plan.num_steps:
                figures = {name: round(float(value), 4) for name, value in metrics.items()}
                seconds = time.perf_counter() - begin
                figures |= {"step": self.step, "step_s": round(seconds / (self.step - first), 4)}
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(figures) + "\n")
                print(json.dumps(figures), flush=True)
            if self.step % self._plan.save_every == 0:
                self.save(folder / "backbone-state.pt")

    def advance(self, work: Work) -> dict[str, Tensor]:
        """Makes one step; a gradient that is not finite is skipped."""
        share = self.step / self._plan.num_steps
        work = work.to(self._plan.device)
        self._set_weights(stored=share >= ROUNDED_FROM)
        dense = share < SPARSE_FROM or self.step % DENSE_EVERY == 0
        loss, metrics = self._loss(
            self._net, self._weights, work, torch.tensor(dense, device=self._plan.device)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        for name, weight in self._weights.items():
            self.masters[name].grad, weight.grad = weight.grad, None
        norm = torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        index_norm = torch.nn.utils.clip_grad_norm_(self._index, 1.0)
        finite = bool(torch.isfinite(norm + index_norm))
        if finite:
            self._optimiser.step(rate(self.step, self._plan.num_steps))
        load = metrics.pop("load")
        if share < BALANCE_UNTIL:
            self._balance(load, BIAS_STEP * rate(self.step, self._plan.num_steps))
        self.step += 1
        metrics["load_max"] = load.amax() * load.shape[1]
        return metrics | {"norm": norm, "skipped": torch.tensor(float(not finite))}

    def _set_weights(self, *, stored: bool) -> None:
        """Sets what the forward pass multiplies with; the gradient at a rounded weight is the master's."""
        if stored:
            self._round(self._weights, self.masters, self._kinds)
            return
        with torch.no_grad():
            names = list(self.masters)
            torch._foreach_copy_(
                [self._weights[name] for name in names], [self.masters[name] for name in names]
            )

    def _balance(self, load: Tensor, step: float) -> None:
        """Raises the bias of experts below their share and lowers the others."""
        for layer, shares in enumerate(load):
            change = step * torch.sign(shares.mean() - shares)
            for name in BALANCED:
                self.masters[f"layers.{layer}.{name}"] += change - change.mean()

    def save(self, path: Path) -> None:
        """Writes everything that a restart needs; the file appears complete."""
        state = {
            "step": self.step,
            "masters": {name: value.detach() for name, value in self.masters.items()},
            "optimiser": self._optimiser.state(),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def load(self, path: Path) -> None:
        """Goes on where a saved state ended."""
        state: dict[str, Any] = torch.load(path, map_location=self._plan.device)
        self.step = state["step"]
        with torch.no_grad():
            for name, value in state["masters"].items():
                self.masters[name].copy_(value)
        self._optimiser.load(state["optimiser"])


def rate(step: int, num_steps: int) -> float:
    """Share of the peak learning rate: up, flat, down in a line."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    left = (1 - step / num_steps) / (1 - FLAT_UNTIL)
    return max(LAST_RATE, min(1.0, left))


def backbone_loss(
    net: Network, w: dict[str, Tensor], work: Work, dense: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss to descend, and what to look at: `ce` over counted tokens, `index`, `load`."""
    result = net.forward(w, work.batch, dense)
    logits = net.linear(result.hidden, w["head.weight"])
    targets = work.batch.ids.roll(-1, 1)
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    weights = work.weights.flatten()
    ce = (each * weights).sum() / weights.sum()
    normaliser = (logits.logsumexp(-1).flatten().square() * weights).sum() / weights.sum()
    loss = ce + 1e-4 * normaliser + 1e-3 * result.balance_loss + result.index_loss
    counted = (weights == 1).float()
    return loss, {
        "ce": ((each * counted).sum() / counted.sum().clamp(min=1)).detach(),
        "index": result.index_loss.detach(),
        "load": result.load.detach(),
    }


@torch.no_grad()
def _round_into(
    weights: dict[str, Tensor], masters: dict[str, Tensor], formats: dict[str, Any]
) -> None:
    for name, value in rounded(masters, formats, weights=True).items():
        weights[name].copy_(value)
