"""What documents cost a network, in nats a token: to compare weights before and after they are rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tools.train_demo.packing import alone, next_weights

if TYPE_CHECKING:
    from torch import Tensor

    from tools.train_demo.network import Network
    from tools.train_demo.packing import Documents, Hasher


@torch.no_grad()
def loss(
    net: Network, w: dict[str, Tensor], hasher: Hasher, found: Documents, device: str
) -> float:
    """Returns the mean loss in nats of the counted tokens, with sparse attention, each document alone in its row."""
    total, count = 0.0, 0
    for place in range(len(found)):
        document = found.document(place)
        rows = alone(document, net.config.sliding_window, pad=net.config.pad_token_id)
        batch = hasher.batch(rows).to(device)
        result = net.forward(w, batch, torch.tensor(False, device=device))
        logits = net.linear(result.hidden, w["head.weight"])[0]
        each = functional.cross_entropy(logits, batch.ids[0].roll(-1), reduction="none")
        weights = next_weights(rows, 0.0)[0].to(device)
        total += float((each * weights).sum())
        count += int(weights.sum())
    return total / count
