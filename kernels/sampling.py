"""Draws tokens from logits with noise that depends on seed, choice and position only.

The token at position t is the argmax over v of log p_t(v) + g(seed, choice, t, v), where p_t is the processed
distribution and g is Gumbel noise from a counter-based generator. So a token does not depend on the batch, on the
step that drew it, or on what was drawn before, and a draft drawn with the same noise is accepted by plain equality.
Every row is computed alone, in numpy, whose sums no thread pool splits: other rows cannot change a bit of it. What a
row must know of its sequence comes in a `RowContext` (`flashmesh.kernels.sampler` makes them).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flashmesh.errors import FlashmeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from flashmesh.types import SamplingParams

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]
Scores = NDArray[np.float64]
Words = NDArray[np.uint64]

_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS = 10
_TOKEN_NOISE = 0x746F6B6E
"""Fourth counter word: keeps token noise apart from any other use of the same seed."""

_NOISE_IDS = 1 << 14
"""Ids whose noise is made at once, so that the generator's words stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What the tokens before a position were, as far as penalties ask.

    Attributes:
        ids: `[n]` distinct ids, ascending: of prompt and output for a repetition penalty, else of the output.
        in_output: `[n]` how often each is in the output; 0 for those of the prompt alone.
    """

    ids: Ids
    in_output: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContext:
    """Everything but the logits that the token after a row depends on.

    Attributes:
        params: of the row's sequence.
        position: that the drawn token will have.
        counts: of the tokens before it; None leaves penalties out.
        allowed: `[vocab]` which tokens a grammar admits; None admits all.
        excluded: ids that would end the output too early. If nothing else is admitted, they are after all.
        failure: why no token can follow the row, where that is known before.
    """

    params: SamplingParams
    position: int
    counts: TokenCounts | None = None
    allowed: NDArray[np.bool_] | None = None
    excluded: tuple[int, ...] = ()
    failure: FlashmeshError | None = None


@dataclass(slots=True)
class Drawn:
    """One drawn token; logprobs are natural logs.

    Attributes:
        token: its id.
        logprob: in the raw distribution, the softmax of the logits as the model gave them.
        processed_logprob: in the distribution that it was drawn from; 0 where the temperature is 0.
        top_ids: the likeliest tokens of the raw distribution, as many as `top_logprobs` asks, likeliest first.
        top_logprobs: theirs.
    """

    token: int
    logprob: float
    processed_logprob: float
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


def sample(logits: torch.Tensor, rows: Sequence[RowContext]) -> list[Drawn | FlashmeshError]:
    """Draws one token a row.

    Penalties come first, then bias, the grammar's mask, the minimum length, temperature, top-k, top-p on what top-k
    left, and min-p.

    Args:
        logits: `[R, vocab]` fp32 on any device; -inf excludes a token.
        rows: one for each row.

    Returns:
        A token each. An error stands for a row that has failed, holds NaN or +inf, or admits no token: it is its
        sequence's alone. Zero rows give an empty list. Equal values rank by ascending index; -0 equals +0.
    """
    values = logits.detach().cpu().numpy()
    # Differences of huge logits, and quotients by a tiny temperature, may become -inf: probability 0.
    with np.errstate(over="ignore"):
        return [_draw(row, context) for row, context in zip(values, rows, strict=True)]


def propose(logits: torch.Tensor, rows: Sequence[RowContext]) -> list[int]:
    """Draws like `sample` and leaves out what only an answer needs; a row that cannot be drawn gives token 0."""
    values = logits.detach().cpu().numpy()
    with np.errstate(over="ignore"):
        choices = [_choose(row, context) for row, context in zip(values, rows, strict=True)]
    return [0 if isinstance(choice, FlashmeshError) else choice[0] for choice in choices]


def _draw(row: Logits, context: RowContext) -> Drawn | FlashmeshError:
    choice = _choose(row, context)
    if isinstance(choice, FlashmeshError):
        return choice
    token, processed_logprob = choice
    largest = float(row.max())
    shifted = np.subtract(row, largest, dtype=np.float64)
    log_sum = math.log(np.exp(shifted, out=shifted).sum()) + largest
    drawn = Drawn(token, float(row[token]) - log_sum, processed_logprob)
    if context.params.top_logprobs:
        ids = _ranked(row, context.params.top_logprobs)
        drawn.top_ids = ids.tolist()
        drawn.top_logprobs = (row[ids].astype(np.float64) - log_sum).tolist()
    return drawn


def _choose(row: Logits, context: RowContext) -> tuple[int, float] | FlashmeshError:
    """Returns the drawn token and the log of its processed probability."""
    if context.failure is not None:
        return context.failure
    params = context.params
    largest = row[np.argmax(row)]  # argmax finds the first NaN
    if not np.isfinite(largest):
        return _undrawable(context, f"the largest logit is {largest}")
    values = process(row, context)
    best = int(np.argmax(values))  # the first of equal values
    if values[best] == -np.inf:
        return _undrawable(context, "no token is allowed")
    if params.temperature == 0:
        return best, 0.0
    ids, scores = support(values, params)
    place = int(np.argmax(scores + gumbel(params.seed, params.choice, context.position, ids)))
    return int(ids[place]), float(scores[place]) - math.log(np.exp(scores).sum())


def _undrawable(context: RowContext, why: str) -> FlashmeshError:
    return FlashmeshError(f"the token at position {context.position} cannot be drawn: {why}")


def process(row: Logits, context: RowContext) -> Logits:
    """Applies penalties, bias, mask and minimum length.

    Args:
        row: `[vocab]` raw logits.
        context: of the row.

    Returns:
        `[vocab]` processed logits; `row` itself where nothing applies.

    Source of the repetition penalty: Keskar et al., "CTRL", 2019, section 4.1, with the product for negative logits;
    of the other two: the OpenAI API reference.
    """
    params, counts, excluded = context.params, context.counts, list(context.excluded)
    if counts is None and not params.logit_bias and context.allowed is None and not excluded:
        return row
    values = row.copy()
    if counts is not None:
        seen, penalty = values[counts.ids], np.float32(params.repetition_penalty)
        seen = np.where(seen > 0, seen / penalty, seen * penalty)
        seen -= np.float32(params.frequency_penalty) * counts.in_output.astype(np.float32)
        seen -= np.float32(params.presence_penalty) * (counts.in_output > 0)
        values[counts.ids] = seen
    if params.logit_bias:
        ids, amounts = zip(*params.logit_bias, strict=True)
        values[list(ids)] += np.array(amounts, dtype=np.float32)
    if context.allowed is not None:
        np.copyto(values, np.float32(-np.inf), where=~context.allowed)
    if excluded:
        ends = values[excluded]
        values[excluded] = -np.inf
        if values.max() == -np.inf:
            values[excluded] = ends
    return values


def support(values: Logits, params: SamplingParams) -> tuple[Ids, Scores]:
    """Finds which tokens may be drawn.

    Temperature comes first, then top-k, then top-p on what top-k left, then min-p. Equal values rank by ascending
    index.

    Args:
        values: `[vocab]` processed logits, finite or -inf, at least one finite.
        params: a temperature above 0.

    Returns:
        Ascending ids and, for each, log p up to one constant: the likeliest token has 0.
    """
    ids = _largest(values, params.top_k) if 0 < params.top_k < len(values) else None
    chosen = values if ids is None else values[ids]
    # Subtracting first keeps a tiny temperature from giving inf - inf.
    scores = np.subtract(chosen, chosen.max(), dtype=np.float64)
    scores /= params.temperature
    lowest = math.log(params.min_p) if params.min_p > 0 else -sys.float_info.max
    if params.top_p < 1:
        places = _nucleus(chosen, scores, params.top_p)
        places = places[scores[places] >= lowest]
    else:
        places = np.flatnonzero(scores >= lowest)
    return places if ids is None else ids[places], scores[places]


def _largest(values: Logits, count: int) -> Ids:
    """Keeps `count` ids by value descending, then index ascending; returns them ascending."""
    # Only the threshold is taken: in which order partition leaves equal values is undefined.
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= threshold)
    tied = np.flatnonzero(values[ids] == threshold)
    return np.delete(ids, tied[len(tied) - (len(ids) - count) :])


def _ranked(values: Logits, count: int) -> Ids:
    """Returns up to `count` ids by value descending, then index ascending."""
    ids = _largest(values, min(count, len(values)))
    return ids[np.argsort(-values[ids], kind="stable")]


def _nucleus(values: Logits, scores: Scores, top_p: float) -> Ids:
    """Returns the places of the shortest prefix, by falling probability, that reaches the mass `top_p`, ascending."""
    mass = np.exp(scores)
    target = top_p * mass.sum()
    # All tokens below this share together weigh less than 1 - top_p, so the prefix ends before them: a peaked
    # distribution then sorts a few tokens and not the whole vocabulary.
    likely = np.flatnonzero(mass >= target * ((1 - top_p) / (2 * len(mass))))
    reached = np.cumsum(np.sort(mass[likely])[::-1]) >= target
    if not reached.any():  # by rounding alone
        return likely
    return likely[_largest(values[likely], int(np.argmax(reached)) + 1)]


def gumbel(seed: int, choice: int, position: int, ids: Ids) -> Scores:
    """Returns the standard Gumbel noise of some tokens at one position.

    A pure function of its arguments, elementwise in `ids`. Four neighbouring ids share one block of the generator.

    Args:
        seed: 64 bits, the generator's key.
        choice: which of several answers, modulo 2^32.
        position: of the token to draw, modulo 2^32.
        ids: ascending token ids.
    """
    noise = np.empty(len(ids))
    for begin in range(0, len(ids), _NOISE_IDS):
        part = ids[begin : begin + _NOISE_IDS]
        first, last = part[0] >> 2, part[-1] >> 2
        is_dense = last - first < len(part)
        blocks = np.arange(first, last + 1) if is_dense else part >> 2
        words = np.empty((4, len(blocks)), dtype=np.uint64)
        words[0] = blocks
        words[1:] = [[position & 0xFFFFFFFF], [choice & 0xFFFFFFFF], [_TOKEN_NOISE]]
        drawn = philox(words, (seed & 0xFFFFFFFF, seed >> 32)).T
        # A block's words are those of ids 4 * block to 4 * block + 3.
        chosen = (
            drawn.ravel()[part - 4 * first] if is_dense else drawn[np.arange(len(part)), part & 3]
        )
        uniform = (chosen + 0.5) / 2.0**32  # never 0 or 1
        noise[begin : begin + _NOISE_IDS] = -np.log(-np.log(uniform))
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
    multiplied, mixed = counter[::2], counter[1::2]
    keys = np.array([[key[0]], [key[1]]], dtype=np.uint64)
    for _ in range(_ROUNDS):
        product = multiplied * _MULTIPLIERS
        # Each product's high word goes to the other side.
        multiplied, mixed = (product >> _SHIFT)[::-1] ^ mixed ^ keys, (product & _WORD)[::-1]
        keys = (keys + _KEY_STEPS) & _WORD
    return np.stack([multiplied[0], mixed[0], multiplied[1], mixed[1]])
