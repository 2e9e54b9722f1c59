"""Routed experts: sort slots by expert, multiply, combine; see `kernels.ops.moe`."""

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.combine import combine
from flashmesh.kernels.tilelang.expert_gemm import down, gate_up
from flashmesh.kernels.tilelang.expert_layout import ExpertWeights
from flashmesh.kernels.tilelang.expert_tiles import expert_tiles

TOKEN_TILES = {8: 4, 16: 8, 64: 64}
"""Rows of a tile, and up to how many rows of an expert on average it was the fastest."""

LARGEST_TILE = 128


def token_tile(num_tokens: int, count: int, num_experts: int) -> int:
    """Returns the rows of a tile; it moves no bits."""
    share = num_tokens * count / num_experts
    return next((tile for tile, most in TOKEN_TILES.items() if share <= most), LARGEST_TILE)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights,
    limit: float,
    round_activations: bool,
    shared: Tensor | None = None,
) -> Tensor:
    """Runs tokens through their experts; contract of `kernels.ops.moe.experts`, weights from `prepare_experts`.

    Raises:
        ValueError: shapes differ, or the products refuse them.
    """
    if ids.shape != weights.shape or len(ids) != len(x):
        raise ValueError("experts: x is [T, D], ids and weights are [T, count]")
    if not len(x):
        return torch.empty_like(x)
    tile = token_tile(len(x), ids.shape[1], w.num_experts)
    tiles, place = expert_tiles(ids, weights, w.num_experts, tile)
    a = gate_up(x, tiles, w, limit, round_activations, tile)
    return combine(down(a, tiles, w, tile), place, ids, shared)
