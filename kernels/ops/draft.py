"""The draft module's heads: the low-rank Markov correction of logits, and the confidence of a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashmesh.kernels.reference.basics import linear

if TYPE_CHECKING:
    from torch import Tensor


def markov_logits(base: Tensor, embedded: Tensor, head: Tensor) -> Tensor:
    """Adds the previous token's correction to logits: `base + embedded . head^T`.

    Args:
        base: fp32 `[n, V]`.
        embedded: bf16 `[n, rank]`, the Markov embedding of the token before.
        head: bf16 `[V, rank]`.

    Returns:
        fp32 `[n, V]`.
    """
    return base + linear(embedded.float(), head.float())


def confidence(state: Tensor, embedded: Tensor, weight: Tensor) -> Tensor:
    """Logit of a draft token's acceptance: `weight . concat(state, embedded)`, in fp32.

    Args:
        state: bf16 `[n, D]`, before the last norm.
        embedded: bf16 `[n, rank]`, the Markov embedding of the token before.
        weight: bf16 `[D + rank]`.

    Returns:
        fp32 `[n]`.
    """
    return torch.cat((state, embedded), 1).float() @ weight.float()
