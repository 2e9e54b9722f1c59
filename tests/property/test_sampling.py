"""A row's token equals a plain reading of the definition, one number at a time, and nothing beside a row moves it."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmesh.errors import FlashmeshError
from flashmesh.kernels.sampler import SequenceSampler
from flashmesh.kernels.sampling import RowContext, TokenCounts, gumbel, propose, sample
from flashmesh.types import ModelInfo, SamplingParams

VOCAB = 12
F32 = np.float32

INFO = ModelInfo(
    name="model",
    fingerprint=b"",
    layout_id=b"",
    numerics_id="",
    block_bytes=1,
    window=128,
    vocab_size=VOCAB,
    max_context_tokens=1 << 20,
    eos_token_id=1,
)

tokens = st.integers(0, VOCAB - 1)
# Few values, so that ties are common; the last stands for a token that the model itself rules out.
logits_rows = st.lists(
    st.sampled_from([-3.0, -0.5, -0.0, 0.0, 0.25, 1.0, 4.0, -math.inf]),
    min_size=VOCAB,
    max_size=VOCAB,
)
penalties = st.sampled_from([0.0, 0.0, -0.7, 0.5, 2.0])
biases = st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.3, 50.0]), max_size=3)

all_params = st.builds(
    SamplingParams,
    max_tokens=st.just(40),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 7, 100]),
    top_p=st.sampled_from([0.05, 0.43, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.6]),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    logit_bias=biases.map(lambda bias: tuple(sorted(bias.items()))),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    top_logprobs=st.sampled_from([None, 0, 1, 5]),
)


def ranked(values):
    """Ids by value descending, then index ascending."""
    return sorted(range(VOCAB), key=lambda token: (-values[token], token))


def naive_processed(row, prompt, output, params, allowed):
    """Logits after penalties, bias, mask and minimum length, from the definition."""
    values = [F32(value) for value in row]
    for token in range(VOCAB):
        if token in prompt + output:
            penalty = F32(params.repetition_penalty)
            positive = values[token] > 0
            values[token] = values[token] / penalty if positive else values[token] * penalty
        if token in output:
            values[token] -= F32(params.frequency_penalty) * F32(output.count(token))
            values[token] -= F32(params.presence_penalty)
    for token, amount in params.logit_bias:
        values[token] += F32(amount)
    if allowed is not None:
        values = [v if ok else F32(-np.inf) for v, ok in zip(values, allowed, strict=True)]
    if len(output) < params.min_tokens:
        ends = {INFO.eos_token_id, *params.stop_token_ids}
        kept = [F32(-np.inf) if token in ends else v for token, v in enumerate(values)]
        if max(kept) > -np.inf:
            values = kept
    return values


def naive_distribution(values, params):
    """{token: probability} after temperature, top-k, top-p and min-p, from the definition."""
    order = [token for token in ranked(values) if values[token] > -np.inf]
    if params.temperature == 0:
        return {order[0]: 1.0}
    order = order[: params.top_k or None]
    best = float(values[order[0]])
    weights = {t: math.exp((float(values[t]) - best) / params.temperature) for t in order}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for token in order:
        if params.top_p < 1 and mass >= params.top_p * total - 1e-12:
            break
        nucleus.append(token)
        mass += weights[token]
    kept = {t: weights[t] for t in nucleus if weights[t] >= params.min_p - 1e-12}
    return {t: weight / sum(kept.values()) for t, weight in kept.items()}


def naive_draw(row, prompt, output, params, allowed):
    """(token, processed logprob), or None where no token can be drawn."""
    values = naive_processed(row, prompt, output, params, allowed)
    if max(row) == -math.inf or max(values) == -np.inf:
        return None
    chances = naive_distribution(values, params)
    noise = {
        t: gumbel(params.seed, params.choice, len(prompt) + len(output), np.array([t]))[0]
        for t in chances
    }
    token = min(chances, key=lambda t: (-(math.log(chances[t]) + noise[t]), t))
    return token, math.log(chances[token])


@settings(deadline=None, max_examples=400)
@given(
    row=logits_rows,
    prompt=st.lists(tokens, max_size=6),
    output=st.lists(tokens, max_size=8),
    params=all_params,
    allowed=st.none() | st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB),
)
def test_a_row_is_drawn_as_defined(row, prompt, output, params, allowed):
    sampler = SequenceSampler(params, prompt, INFO, grammar=Fixed(allowed) if allowed else None)
    sampler.accept(output)
    (context,) = sampler.rows(len(prompt) + len(output))
    (drawn,) = sample(torch.tensor([row]), [context])
    expected = naive_draw(row, prompt, output, params, allowed)
    if expected is None:
        assert isinstance(drawn, FlashmeshError)
        return
    token, processed_logprob = expected
    raw = torch.tensor(row, dtype=torch.float64).log_softmax(0).tolist()
    assert drawn.token == token
    assert math.isclose(drawn.logprob, raw[token], abs_tol=1e-6)
    assert math.isclose(drawn.processed_logprob, processed_logprob, abs_tol=1e-6)
    assert drawn.top_ids == ranked(row)[: params.top_logprobs or 0]
    assert np.allclose(drawn.top_logprobs, [raw[top] for top in drawn.top_ids])
    assert propose(torch.tensor([row]), [context]) == [token]


class Fixed:
    """A grammar that always admits the same tokens."""

    may_end = True

    def __init__(self, allowed):
        self._allowed = np.array(allowed)

    def accept(self, token):
        return True

    def rollback(self, count):
        pass

    def mask(self):
        return self._allowed


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.tuples(logits_rows, all_params, st.lists(tokens, max_size=5)), min_size=1),
    order=st.randoms(),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(rows, order):
    contexts = [context_of(params, output) for _, params, output in rows]
    alone = [
        outcome(sample(torch.tensor([row]), [context])[0])
        for (row, _, _), context in zip(rows, contexts, strict=True)
    ]
    places = list(range(len(rows)))
    order.shuffle(places)
    together = sample(
        torch.tensor([rows[place][0] for place in places]), [contexts[place] for place in places]
    )
    assert [outcome(item) for item in together] == [alone[place] for place in places]


def context_of(params, output):
    ids, in_output = np.unique(np.array(output, dtype=np.int64), return_counts=True)
    counts = TokenCounts(ids, in_output.astype(np.int32))
    return RowContext(params=params, position=7, counts=counts)


def outcome(item):
    return str(item) if isinstance(item, FlashmeshError) else item
