"""Draws tokens from logits with noise that depends on seed, choice and position only.

The token at position t is the argmax over v of log p_t(v) + g(seed, choice, t, v), where p_t is the
processed distribution and g is Gumbel noise from a counter-based generator. So a token does not
depend on the batch, on the step that drew it, or on what was drawn before, and a draft drawn with
the same noise is accepted by plain equality. Every row is computed alone, in numpy, whose sums no
thread pool splits: other rows cannot change a bit of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flashmesh.errors import FlashmeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from flashmesh.types import SamplingParams

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_TOKEN_NOISE = 0x746F6B6E
"""Fourth counter word: keeps token noise apart from any other use of the same seed."""


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Draws one token a row.

    Args:
        logits: `[R, vocab]` fp32 on any device; -inf excludes a token.
        params: one for each row.
        positions: the position that each drawn token will have, one for each row.

    Returns:
        The tokens, and the natural log of their raw probability (softmax of the unprocessed
        logits). Zero rows give empty lists. Equal values rank by ascending index; -0 equals +0.

    Raises:
        FlashmeshError: a row holds NaN or +inf, or excludes every token.
    """
    rows = logits.detach().cpu().numpy()
    tokens, logprobs = [], []
    for index, (row, row_params, position) in enumerate(zip(rows, params, positions, strict=True)):
        if not np.isfinite(row.max()):  # max also carries a NaN out
            raise FlashmeshError(f"logits of row {index} (position {position}) cannot be sampled")
        token = _draw(row, row_params, position)
        tokens.append(token)
        logprobs.append(_raw_logprob(row, token))
    return tokens, logprobs


def _draw(row: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    if params.temperature == 0:
        return int(np.argmax(row))  # the first of equal values
    ids, scores = support(row, params)
    noisy = scores + gumbel(params.seed, params.choice, position, ids)
    return int(ids[np.argmax(noisy)])


def support(row: NDArray[np.float32], params: SamplingParams) -> tuple[Ids, NDArray[np.float64]]:
    """Finds which tokens may be drawn.

    Temperature comes first, then top-k, then top-p on what top-k left, then min-p. Equal values
    rank by ascending index.

    Args:
        row: `[vocab]` finite or -inf logits.
        params: a temperature above 0.

    Returns:
        Ascending ids and, for each, log p up to one constant, fp64: the likeliest token has 0.
    """
    ids: Ids = np.flatnonzero(row > -np.inf)
    if 0 < params.top_k < len(ids):
        ids = _largest(row, ids, params.top_k)
    # Subtracting first keeps a tiny temperature from giving inf - inf.
    with np.errstate(over="ignore"):
        scores = (row[ids].astype(np.float64) - float(row.max())) / params.temperature
    kept = np.ones(len(ids), dtype=bool)
    if params.top_p < 1:
        kept = _nucleus(row[ids], scores, params.top_p)
    if params.min_p > 0:
        kept &= np.exp(scores) >= params.min_p
    return ids[kept], scores[kept]


def _largest(row: NDArray[np.float32], ids: Ids, count: int) -> Ids:
    """Keeps `count` ids by value descending, then index ascending; returns them ascending."""
    values = row[ids]
    # Only the threshold is taken: in which order partition leaves equal values is undefined.
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    kept: NDArray[np.bool_] = values > threshold
    tied = np.flatnonzero(values == threshold)
    kept[tied[: count - int(kept.sum())]] = True
    return ids[kept]


def _nucleus(
    values: NDArray[np.float32], scores: NDArray[np.float64], top_p: float
) -> NDArray[np.bool_]:
    """Marks the shortest prefix, by falling probability, that reaches the mass `top_p`."""
    mass = np.exp(scores)
    mass /= mass.sum()
    # All tokens below this share together weigh less than 1 - top_p, so the prefix ends before
    # them: a peaked distribution then sorts a few tokens and not the whole vocabulary.
    likely = np.flatnonzero(mass >= (1 - top_p) / (2 * len(mass)))
    order = likely[np.argsort(-values[likely], kind="stable")]
    reached = np.cumsum(mass[order]) >= top_p
    count = int(np.argmax(reached)) + 1 if reached.any() else len(order)
    kept = np.zeros(len(mass), dtype=bool)
    kept[order[:count]] = True
    return kept


def _raw_logprob(row: NDArray[np.float32], token: int) -> float:
    shifted = row.astype(np.float64) - float(row.max())
    return float(shifted[token] - np.log(np.exp(shifted).sum()))


def gumbel(seed: int, choice: int, position: int, ids: Ids) -> NDArray[np.float64]:
    """Returns the standard Gumbel noise of some tokens at one position.

    A pure function of its arguments, elementwise in `ids`. Four neighbouring ids share one block of
    the generator.

    Args:
        seed: 64 bits, the generator's key.
        choice: which of several answers, modulo 2^32.
        position: of the token to draw, modulo 2^32.
        ids: ascending token ids.
    """
    blocks = ids // 4
    starts = np.diff(blocks, prepend=-1) != 0
    block_ids, index = blocks[starts], np.cumsum(starts) - 1
    words = np.empty((4, len(block_ids)), dtype=np.uint64)
    words[0] = block_ids
    words[1] = position & 0xFFFFFFFF
    words[2] = choice & 0xFFFFFFFF
    words[3] = _TOKEN_NOISE
    drawn = philox(words, (seed & 0xFFFFFFFF, seed >> 32))[ids % 4, index]
    uniform = (drawn.astype(np.float64) + 0.5) / 2.0**32  # never 0 or 1
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10: scrambles counter blocks under a key.

    Args:
        counter: `[4, n]` words below 2^32.
        key: two words below 2^32.

    Returns:
        `[4, n]` words below 2^32.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> _SHIFT) ^ c1 ^ np.uint64(k0),
            right & _WORD,
            (left >> _SHIFT) ^ c3 ^ np.uint64(k1),
            left & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])
