"""Muon for matrices, AdamW for everything else, both on fp32 masters.

Source of Muon: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the scale that lets
it share AdamW's learning rates: J. Liu et al., "Muon is scalable for LLM training", 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from flashmesh.kernels.config import ModelConfig

MATRIX_RATE, OTHER_RATE, TABLE_RATE = 6e-3, 3e-3, 1.5e-2
"""Peak learning rates: of Muon, of AdamW, and of the Engram tables, whose rows are seldom looked up."""
DECAY = 0.1
MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MATRICES = ("wq_a", "wq_b", "wkv", "wgate", "wo_a", "wo_b", "w1", "w2", "w3", "main_proj")


class Optimiser:
    """Updates masters in place.

    Args:
        masters: leaf tensors by trained name; their `.grad` is what a step applies.
        config: of the model: which matrices fall into heads and groups.
    """

    def __init__(self, masters: Mapping[str, Tensor], config: ModelConfig) -> None:
        matrices = {name: value for name, value in masters.items() if is_matrix(name)}
        others = {name: value for name, value in masters.items() if name not in matrices}
        self._muon = _Muon(matrices, config)
        tables = [value for name, value in others.items() if name.endswith("engram.embed.weight")]
        rest = [value for name, value in others.items() if not name.endswith("engram.embed.weight")]
        self._adam = torch.optim.AdamW(
            [
                {"params": group, "peak": peak}
                for group, peak in ((rest, OTHER_RATE), (tables, TABLE_RATE))
                if group
            ],
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )

    def step(self, rate: float) -> None:
        """Applies the gradients.

        Args:
            rate: share of the peak learning rates.
        """
        for group in self._adam.param_groups:
            group["lr"] = group["peak"] * rate
        self._adam.step()
        self._muon.step(MATRIX_RATE * rate)

    def state(self) -> dict[str, object]:
        """Returns what a restart needs."""
        return {"adam": self._adam.state_dict(), "muon": self._muon.momentum}

    def load(self, state: dict[str, object]) -> None:
        """Takes what `state` returned."""
        adam, momentum = state["adam"], state["muon"]
        assert isinstance(adam, dict)
        assert isinstance(momentum, dict)
        self._adam.load_state_dict(adam)
        self._muon.momentum = momentum


def is_matrix(name: str) -> bool:
    """Whether Muon trains this tensor."""
    return "indexer" not in name and name.split(".")[-2] in _MATRICES


class _Muon:
    def __init__(self, matrices: Mapping[str, Tensor], config: ModelConfig) -> None:
        self._matrices = matrices
        self._parts = {name: _num_parts(name, config) for name in matrices}
        self.momentum = {name: torch.zeros_like(value) for name, value in matrices.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Orthogonalises matrices of one shape together."""
        shapes: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
        for name, value in self._matrices.items():
            if value.grad is None:
                continue
            momentum = self.momentum[name].mul_(MOMENTUM).add_(value.grad)
            ahead = value.grad + MOMENTUM * momentum
            parts = ahead.reshape(-1, value.shape[-2] // self._parts[name], value.shape[-1])
            shapes.setdefault(tuple(parts.shape[1:]), []).append((name, parts))
        for shape, group in shapes.items():
            updates = orthogonalise(torch.cat([parts for _, parts in group]))
            updates *= 0.2 * max(shape) ** 0.5
            for (name, _), update in zip(
                group, updates.split([len(parts) for _, parts in group]), strict=True
            ):
                value = self._matrices[name]
                value.mul_(1 - rate * DECAY).add_(update.view_as(value), alpha=-rate)


def _num_parts(name: str, config: ModelConfig) -> int:
    """Into how many matrices a tensor's rows fall: query heads, output groups."""
    if name.endswith("attn.wq_b.weight"):
        return config.num_attention_heads
    return config.o_groups if name.endswith("wo_a.weight") else 1


def orthogonalise(x: Tensor) -> Tensor:
    """Moves singular values of `[n, rows, columns]` towards 1 by five Newton-Schulz steps."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.bfloat16() if x.is_cuda else x  # stable in bf16, but a CPU is slow at it
    y = y.transpose(-1, -2) if tall else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(5):
        gram = y @ y.transpose(-1, -2)
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.transpose(-1, -2) if tall else y).float()
