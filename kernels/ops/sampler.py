"""Drawing of tokens on the device that has the logits: `kernels.sampling`, which defines it, for parameters in tensors.

The noise of a token is a function of seed, choice, position and id alone, so what a row draws depends on no other row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flashmesh.kernels import sampling
from flashmesh.types import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Lists(NamedTuple):
    """One list of ids for each row, end to end.

    Attributes:
        ends: int32 `[R + 1]`, ascending from 0: row r has the entries `ends[r]` up to `ends[r + 1]`.
        ids: int32 `[n]` token ids, distinct within a row.
        values: `[n]` one for each id, or None.
    """

    ends: Tensor
    ids: Tensor
    values: Tensor | None = None


class SampleParams(NamedTuple):
    """How to draw from R rows: tensors on the device of the logits, valid as `flashmesh.types.SamplingParams` says.

    Attributes:
        temperature: fp32 `[R]`; 0 takes the largest value, the lowest id of equal ones.
        top_k: int32 `[R]`; 0 keeps all.
        top_p: fp32 `[R]`, in (0, 1].
        min_p: fp32 `[R]`, in [0, 1].
        seed: int64 `[R]`, the 64 bits of the noise's key.
        choice: int32 `[R]`.
        position: int32 `[R]`, of the drawn token.
        repetition_penalty: fp32 `[R]`; it and the next two apply to the ids of `counts`.
        frequency_penalty: fp32 `[R]`.
        presence_penalty: fp32 `[R]`.
        counts: ids that the penalties look at, with int32 counts in the output; None leaves penalties out.
        bias: ids and the fp32 amounts added to their logits; None adds nothing.
        excluded: ids that would end an output too early; they are admitted after all where nothing else is.
        allowed: int32 `[R, vocab / 32]`: bit v % 32 of word v / 32 admits token v; None admits all.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    counts: Lists | None = None
    bias: Lists | None = None
    excluded: Lists | None = None
    allowed: Tensor | None = None


class Sampled(NamedTuple):
    """One drawn token for each row.

    Attributes:
        token: int32 `[R]`; -1 where none can be drawn.
        logprob: fp32 `[R]`, natural logarithm of its probability in the softmax of the raw logits; NaN without a token.
        processed_logprob: fp32 `[R]`, in the distribution that it was drawn from; 0 at temperature 0.
    """

    token: Tensor
    logprob: Tensor
    processed_logprob: Tensor


def sample(logits: Tensor, params: SampleParams) -> Sampled:
    """Draws one token a row; `kernels.sampling.sample` says how.

    A row is not drawn (token -1) if it has a NaN, if its largest logit is not finite, or if it admits no token.

    Kernels compute in fp32 where this function has float64. They may choose another token only where two candidates
    are within rounding: if scores plus noise differ by less than 3e-5, or if the mass up to a token is within
    1e-5 of `top_p` times the whole, or its score within 2e-5 of the one that `min_p` asks.

    Args:
        logits: fp32 `[R, vocab]`; -inf excludes a token.
        params: of the rows.
    """
    contexts = [_context(params, row, logits.shape[1]) for row in range(len(logits))]
    drawn = [
        (-1, float("nan"), float("nan"))
        if isinstance(one, Exception)
        else (one.token, one.logprob, one.processed_logprob)
        for one in sampling.sample(logits, contexts)
    ]
    columns = list(zip(*drawn, strict=True)) or [(), (), ()]
    types = (torch.int32, torch.float32, torch.float32)
    return Sampled(
        *(
            torch.tensor(column, dtype=dtype, device=logits.device)
            for column, dtype in zip(columns, types, strict=True)
        )
    )


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Finds the likeliest tokens of the raw distribution.

    Args:
        logits: fp32 `[R, vocab]`, no NaN, the largest of a row finite.
        count: how many, from 1 to 20.

    Returns:
        int32 `[R, count]` ids, likeliest first and equal ones by ascending id, and fp32 `[R, count]` their logprobs.
    """
    wide = logits.double()
    order = wide.sort(dim=1, descending=True, stable=True).indices[:, :count]
    logprobs = wide.gather(1, order) - wide.logsumexp(1, keepdim=True)
    return order.int(), logprobs.float()


def _context(params: SampleParams, row: int, vocab: int) -> sampling.RowContext:
    numbers = SamplingParams(
        temperature=float(params.temperature[row]),
        top_k=int(params.top_k[row]),
        top_p=float(params.top_p[row]),
        min_p=float(params.min_p[row]),
        repetition_penalty=float(params.repetition_penalty[row]),
        frequency_penalty=float(params.frequency_penalty[row]),
        presence_penalty=float(params.presence_penalty[row]),
        seed=int(params.seed[row]) & 0xFFFFFFFFFFFFFFFF,
        choice=int(params.choice[row]),
        logit_bias=tuple(sorted(zip(*_entries(params.bias, row), strict=True)))
        if params.bias
        else (),
    )
    counts = None
    if params.counts is not None:
        ids, in_output = _entries(params.counts, row)
        counts = sampling.TokenCounts(np.array(ids, dtype=np.int64), np.array(in_output, "int32"))
    allowed = None
    if params.allowed is not None:
        words = params.allowed[row].cpu().numpy().astype("<i4")
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab].astype(np.bool_)
    return sampling.RowContext(
        params=numbers,
        position=int(params.position[row]),
        counts=counts,
        allowed=allowed,
        excluded=tuple(_entries(params.excluded, row)[0]) if params.excluded else (),
    )


def _entries(lists: Lists, row: int) -> tuple[list[int], list[float]]:
    """Returns a row's ids and values."""
    begin, end = lists.ends[row : row + 2].tolist()
    values = [] if lists.values is None else lists.values[begin:end].tolist()
    return lists.ids[begin:end].tolist(), values
