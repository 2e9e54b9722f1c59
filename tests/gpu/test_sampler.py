import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flashmesh.kernels import sampling
from flashmesh.kernels.ops import sampler as twin
from flashmesh.kernels.ops.sampler import Lists, SampleParams
from flashmesh.kernels.tilelang import sampler, sampler_noise
from flashmesh.kernels.tilelang.build import build

VOCAB = 129_280
NEAR = 3e-5
"""Score and noise differ from float64 by: rounding of log2(e) / temperature (2 * 2^-24) and of the score at
|score| <= 26, 5e-6 (beyond it no noise makes a token win); noise, NOISE_NEAR. Twice that for two tokens."""

NOISE_NEAR = 8.5e-6
"""Of `lg2.approx`: for the outer logarithm, of at most 33 bits, 2^-22 of it, 5.5e-6; for the inner one 2^-22 at 1 - u
of 1/16 or more, 2.6e-6 of its value there, and less by the series; fp32 of u, 1e-6 of the logarithm."""

SUM_NEAR = 2e-5
"""Of the logarithm of a sum of 129,280 terms, in a tree above runs of 64: 2^-24 * 80 and the terms' own errors."""

MASS_NEAR = 1e-5
"""Relative error of a mass: 2^-20 from fixed point, 4e-6 from the exponent as above, 2e-7 from ex2."""


def some_params(rows, **changes):
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 1,
        "choice": 0,
        "position": 0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    types = {
        "top_k": torch.int32,
        "seed": torch.int64,
        "choice": torch.int32,
        "position": torch.int32,
    }
    tensors = {}
    for name, default in defaults.items():
        value = changes.pop(name, default)
        dtype = types.get(name, torch.float32)
        tensors[name] = torch.as_tensor(value, dtype=dtype, device="cuda").expand(rows).contiguous()
    return SampleParams(**tensors, **changes)


def varied(rows, random, temperature=(0.3, 1.5)):
    """Seeds, choices and positions of all sizes."""
    draw = lambda low, high: torch.randint(low, high, (rows,), device="cuda", generator=random)
    low, high = temperature
    return {
        "seed": draw(-(2**63), 2**63 - 1),
        "choice": draw(0, 128),
        "position": draw(0, 2**20),
        "temperature": torch.rand(rows, device="cuda", generator=random) * (high - low) + low,
    }


def some_logits(rows, random, spread=3.0):
    return torch.randn(rows, VOCAB, device="cuda", generator=random) * spread


def check(logits, params):
    """Compares with the twin; a differing token must be within rounding of the twin's."""
    got, want = sampler.sample(logits, params), twin.sample(logits, params)
    differing = (got.token != want.token).nonzero().flatten().tolist()
    for row in differing:
        assert is_near(logits, params, row, got.token[row].item(), want.token[row].item()), (
            f"row {row}: {got.token[row]} and not {want.token[row]}"
        )
    assert len(differing) <= 1 + len(logits) // 50, differing
    same = got.token == want.token
    torch.testing.assert_close(
        got.logprob[same], want.logprob[same], rtol=1e-6, atol=SUM_NEAR, equal_nan=True
    )
    close = torch.isclose(
        got.processed_logprob, want.processed_logprob, rtol=1e-6, atol=SUM_NEAR, equal_nan=True
    )
    for row in (same & ~close).nonzero().flatten().tolist():
        check_nucleus(logits, params, row, got.token[row].item(), got.processed_logprob[row].item())
    return got


def check_nucleus(logits, params, row, token, logprob):
    """The logprob must be that of a nucleus which reaches `top_p` within rounding."""
    context = twin._context(params, row, logits.shape[1])
    one = context.params
    assert one.temperature > 0
    assert one.top_p < 1
    values = sampling.process(logits[row].cpu().numpy(), context)
    score = (float(values[token]) - float(values.max())) / one.temperature
    bounds = []
    for share in (one.top_p * (1 + MASS_NEAR), one.top_p * (1 - MASS_NEAR)):
        _, scores = sampling.support(values, replace(one, top_p=min(share, 1.0)))
        bounds.append(score - math.log(np.exp(scores).sum()))
    error = SUM_NEAR + 1e-6 * abs(logprob)
    assert bounds[0] - error <= logprob <= bounds[1] + error, (row, bounds, logprob)


def is_near(logits, params, row, got, want):
    context = twin._context(params, row, VOCAB)
    values = sampling.process(logits[row].cpu().numpy(), context)
    one = context.params
    if got < 0 or want < 0 or one.temperature == 0:
        return False
    ids = np.array(sorted({got, want}))
    noise = sampling.gumbel(one.seed, one.choice, context.position, ids)
    scores = (values[ids].astype(np.float64) - values.max()) / one.temperature + noise
    if abs(scores[0] - scores[1]) < NEAR:
        return True
    # Else one of both was cut off; it must be at the edge of the nucleus.
    if one.top_p == 1:
        return False
    scores = (values.astype(np.float64) - values.max()) / one.temperature
    masses = np.exp(scores)
    kept = sampling._largest(values, one.top_k) if one.top_k else np.arange(VOCAB)
    for token in (got, want):
        above = masses[kept][values[kept] > values[token]].sum() / masses[kept].sum()
        if abs(above - one.top_p) < MASS_NEAR + masses[token]:
            return True
    return False


def test_noise_is_that_of_the_twin(random):
    blocks = torch.arange(VOCAB // 4, dtype=torch.int32, device="cuda")
    for seed, choice, position in [(0, 0, 0), (-1, 127, 2**20), (0x0123456789ABCDEF, 1, 5)]:
        words = torch.empty(len(blocks), 4, dtype=torch.int32, device="cuda")
        noise = torch.full((len(blocks), 4), float("nan"), device="cuda")
        one = lambda value, dtype: torch.tensor([value], dtype=dtype, device="cuda")
        build(sampler_noise.token_noise)(
            blocks,
            one(seed, torch.int64),
            one(choice, torch.int32),
            one(position, torch.int32),
            words,
            noise,
        )
        counter = np.empty((4, len(blocks)), dtype=np.uint64)
        counter[0] = blocks.cpu().numpy()
        counter[1:] = [[position], [choice], [sampler_noise.TOKEN_NOISE]]
        unsigned = seed & 0xFFFFFFFFFFFFFFFF
        want = sampling.philox(counter, (unsigned & 0xFFFFFFFF, unsigned >> 32)).T
        assert np.array_equal(words.cpu().numpy().view(np.uint32), want.astype(np.uint32))
        exact = sampling.gumbel(unsigned, choice, position, np.arange(VOCAB))
        got = -noise.flatten().double().cpu().numpy() * np.log(2)
        assert np.abs(got - exact).max() < NOISE_NEAR


@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_plain_draws(random, rows):
    check(some_logits(rows, random), some_params(rows, **varied(rows, random)))


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_flat_and_peaked_rows(random, spread):
    check(some_logits(24, random, spread), some_params(24, **varied(24, random)))


@pytest.mark.parametrize("top_k", [1, 2, 50, 1000, 60_000, VOCAB - 1, VOCAB, 2**31 - 1])
def test_top_k(random, top_k):
    check(some_logits(12, random), some_params(12, top_k=top_k, **varied(12, random, (1, 4))))


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.95, 0.9999, 0.9999999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_top_p(random, top_p, spread):
    params = some_params(12, top_p=top_p, **varied(12, random))
    check(some_logits(12, random, spread), params)


def test_all_of_them_at_once(random):
    rows = 100
    uniform = lambda: torch.rand(rows, device="cuda", generator=random)
    params = some_params(
        rows,
        top_k=torch.randint(0, 200, (rows,), device="cuda", generator=random),
        top_p=1 - uniform() * 0.5,
        min_p=uniform() ** 8,
        **varied(rows, random),
    )
    params.temperature[::5] = 0
    params.min_p[::7] = 0
    check(some_logits(rows, random), params)


def test_ties_rank_by_id(random):
    # Bf16 values in a narrow range: thousands of tokens share each.
    logits = (some_logits(16, random, 0.3)).bfloat16().float()
    logits[0] = 0
    logits[1] = torch.where(logits[1] > 0, 0.0, -0.0)
    logits[2] = torch.where(logits[2] > 0, 1e-30, -1e-30)
    varying = varied(16, random)
    for changes in ({"top_k": 77}, {"top_p": 0.3}, {"top_k": 5000, "top_p": 0.7}, {}):
        check(logits, some_params(16, **changes, **varying))
    check(logits, some_params(16, temperature=0))


def test_which_tokens_are_kept(random):
    """The kept set itself, seen through many draws at a high temperature from few values."""
    logits = torch.full((1, VOCAB), -5.0, device="cuda")
    logits[:, [7, 100, 70_000, 129_279]] = torch.tensor([2.0, 2.0, 2.0, 3.0], device="cuda")
    rows = 512
    tokens = {}
    for top_k in (1, 2, 3, 4):
        params = some_params(rows, temperature=100, top_k=top_k, position=torch.arange(rows))
        drawn = sampler.sample(logits.expand(rows, VOCAB).contiguous(), params).token
        tokens[top_k] = set(drawn.tolist())
    assert tokens == {
        1: {129_279},
        2: {7, 129_279},
        3: {7, 100, 129_279},
        4: {7, 100, 70_000, 129_279},
    }


@pytest.mark.parametrize("spread", [1e-4, 0.1, 5.0])
def test_how_many_are_kept(random, spread):
    """At a high temperature the kept tokens share alike, so that their number shows."""
    rows = 96
    top_k = torch.randint(1, 5000, (rows,), device="cuda", generator=random)
    params = some_params(rows, top_k=top_k, position=torch.arange(rows), temperature=spread * 1e6)
    got = sampler.sample(some_logits(rows, random, spread), params)
    counts = got.processed_logprob.double().neg().exp()
    torch.testing.assert_close(counts, top_k.double(), rtol=1e-5, atol=0.1)


def test_extreme_values_and_temperatures(random):
    logits = some_logits(9, random)
    logits[0] *= 1e37
    logits[1] *= 1e-38
    logits[2, 1:] = -torch.inf
    logits[3, ::2] = -torch.inf
    logits[4] -= 1e9
    logits[5, :] = -3e38
    logits[5, 5] = 3e38
    logits[6, 17] = torch.nan
    logits[7, 17] = torch.inf
    logits[8] = -torch.inf
    for heat in (0, 1e-30, 1e-3, 1, 1e3, 1e30):
        for changes in ({}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 90_000, "top_p": 0.5}):
            params = some_params(9, temperature=heat, **changes)
            got = check(logits, params)
            assert got.token[6:].tolist() == [-1] * 3


def edit_lists(rows, random, sizes, kind):
    """Random ids for each row, ascending."""
    ends, ids = [0], []
    for size in sizes:
        chosen = torch.randperm(VOCAB, device="cuda", generator=random)[:size].sort().values
        ids.append(chosen.int())
        ends.append(ends[-1] + size)
    ids = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int32, device="cuda")
    values = None
    if kind == "counts":
        values = torch.randint(0, 9, ids.shape, device="cuda", generator=random).int()
    elif kind == "bias":
        values = torch.randn(ids.shape, device="cuda", generator=random) * 10
    return Lists(torch.tensor(ends, dtype=torch.int32, device="cuda"), ids, values)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("with_edits", [False, True])
def test_penalties_bias_masks_and_exclusions(random, with_edits, with_mask):
    rows = 12
    uniform = lambda: torch.rand(rows, device="cuda", generator=random)
    more = {}
    if with_edits:
        more["counts"] = edit_lists(rows, random, [0, 1, 5000, VOCAB] + [300] * 8, "counts")
        more["bias"] = edit_lists(rows, random, [300, 0, 1, 7] * 3, "bias")
        more["excluded"] = edit_lists(rows, random, [1, 0, 3] * 4, "excluded")
    if with_mask:
        more["allowed"] = torch.randint(
            -(2**31), 2**31 - 1, (rows, VOCAB // 32), device="cuda", generator=random
        ).int()
        more["allowed"][3] = 0
        more["allowed"][4] = 0
        more["allowed"][4, 77] = -(2**31)
        if with_edits:
            # The only admitted token is excluded: it is drawn after all.
            begin, word = more["excluded"].ends[5].item(), 4000
            more["excluded"].ids[begin : begin + 3] = torch.tensor(
                [5, word * 32 + 3, VOCAB - 1]
            ).int()
            more["allowed"][5] = 0
            more["allowed"][5, word] = 8
    params = some_params(
        rows,
        **varied(rows, random),
        repetition_penalty=uniform() + 0.5,
        frequency_penalty=uniform() * 2 - 1,
        presence_penalty=uniform() * 2 - 1,
        top_k=torch.tensor([0, 50, 0] * 4),
        top_p=torch.tensor([1, 1, 0.8, 0.9] * 3),
        **more,
    )
    params.temperature[::4] = 0
    got = check(some_logits(rows, random), params)
    if with_mask:
        assert got.token[3] == -1
        assert got.token[4] == 77 * 32 + 31
        if with_edits:
            assert got.token[5] == 4000 * 32 + 3


def test_a_row_does_not_depend_on_the_others(random):
    rows = 384
    logits = some_logits(rows, random)
    params = some_params(
        rows,
        **varied(rows, random),
        top_k=torch.tensor([0, 50, 0, 999] * 96),
        top_p=torch.tensor([1, 0.95, 0.8] * 128),
    )
    whole = sampler.sample(logits, params)
    for begin, end in ((0, 1), (5, 8), (17, 34), (300, 364)):
        part = SampleParams(*(None if p is None else p[begin:end].contiguous() for p in params))
        alone = sampler.sample(logits[begin:end].contiguous(), part)
        for one, two in zip(alone, whole, strict=True):
            assert torch.equal(one, two[begin:end])
    # A grammar that admits all, and lists without an entry, change nothing.
    ends = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    none = torch.zeros(0, dtype=torch.int32, device="cuda")
    edited = params._replace(
        allowed=torch.full((rows, VOCAB // 32), -1, dtype=torch.int32, device="cuda"),
        excluded=Lists(ends, none),
    )
    for one, two in zip(sampler.sample(logits, edited), whole, strict=True):
        assert torch.equal(one, two)


def test_every_output_is_written_in_a_graph_too(random, monkeypatch):
    rows = 33
    logits = some_logits(rows, random)
    params = some_params(rows, **varied(rows, random), top_p=0.9)
    empty = torch.empty

    def poisoned(*shape, **options):
        return empty(*shape, **options).fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned)
    want = sampler.sample(logits, params)
    assert (want.token >= 0).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sampler.sample(logits, params)
    graph.replay()
    for one, two in zip(got, want, strict=True):
        assert torch.equal(one, two)


def test_other_vocabularies(random):
    for vocab in (32, 1024, 4128, 131_072):
        logits = torch.randn(7, vocab, device="cuda", generator=random)
        params = some_params(7, top_p=0.9, position=torch.arange(7))
        assert torch.equal(sampler.sample(logits, params).token, twin.sample(logits, params).token)


def test_what_is_refused(random):
    params = some_params(2)
    with pytest.raises(ValueError, match="multiple of 32"):
        sampler.sample(torch.zeros(2, 33, device="cuda"), params)
    with pytest.raises(ValueError, match="fp32"):
        sampler.sample(torch.zeros(2, 64, device="cuda").bfloat16(), params)
    with pytest.raises(ValueError, match="top_k"):
        sampler.sample(torch.zeros(2, 64, device="cuda"), params._replace(top_k=params.top_p))


@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_top_logprobs(random, rows, count):
    logits = some_logits(rows, random)
    if rows > 7:
        logits[0] = 0
        logits[1] = logits[1].bfloat16().float().clamp(max=2)
        logits[2, 30:] = -torch.inf
        logits[3, 20:] = -torch.inf
        logits[4] *= 1e37
        logits[5, ::1024] = 50  # of one thread
        logits[6] = logits[6].sort().values
    got, want = sampler.top_logprobs(logits, count), twin.top_logprobs(logits, count)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=2e-5)
    if rows:
        for one, two in zip(sampler.top_logprobs(logits[-1:], count), got, strict=True):
            assert torch.equal(one, two[-1:])


def test_top_logprobs_refuses_other_counts():
    for count in (0, 21):
        with pytest.raises(ValueError, match="1 to 20"):
            sampler.top_logprobs(torch.zeros(1, 64, device="cuda"), count)
