"""Law 2: drafting, its depth and its schedule never change a token, and taking rows back leaves no trace."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import golden
from support.prompts import random_prompt

from flashmesh.errors import InvalidRequest
from flashmesh.kernels.door import RowRun, SessionPlan
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.types import SamplingParams

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def golden_model():
    return golden.golden_engine()


def plan(length):
    return SessionPlan(first_pos=0, global_start=0, decoder_start=0, max_tokens=length)


def speculate(engine, prompt, params, depth):
    """Decodes with `depth()` drafts verified in each round; returns tokens and how many drafts were accepted."""
    tokens, accepted = [], 0
    rows, drafts = list(prompt), []
    with engine.open(plan(len(prompt) + NUM_TOKENS + 8), []) as session:
        while len(tokens) < NUM_TOKENS:
            run = RowRun(
                session=session,
                tokens=[*rows, *drafts],
                num_logits=1 + len(drafts),
                sampling=params,
                num_drafts=engine.max_drafts,
            )
            (result,) = engine.step([run])
            kept = 0
            while kept < len(drafts) and drafts[kept] == result.tokens[kept]:
                kept += 1
            rejected = len(drafts) - kept
            tokens += result.tokens[: kept + 1]
            accepted += kept
            rows = [tokens[-1]]
            session.rollback(rejected)
            # After a rejection the proposals continue another history: no drafts in the next round.
            drafts = result.drafts[: depth()] if not rejected else []
    return tokens[:NUM_TOKENS], accepted


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1 << 20), temperature=st.sampled_from([0.0, 0.3, 1.0]))
def test_any_depth_gives_the_tokens_of_plain_decoding(golden_model, seed, temperature):
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, 30))]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=seed)
    plain, _ = speculate(golden_model, prompt, params, lambda: 0)
    for depth in (5, 1):
        assert speculate(golden_model, prompt, params, lambda d=depth: d)[0] == plain
    assert speculate(golden_model, prompt, params, lambda: rng.randint(0, 5))[0] == plain


def test_rows_taken_back_leave_no_trace(golden_model):
    tokens = golden.ids("s150")
    reference = golden.full_forward(golden_model, tokens)
    rng = random.Random(3)
    with golden_model.open(plan(160), []) as session:
        position = 0
        while position < 140:
            size = rng.randint(1, 9)
            wrong = [rng.randrange(3, 500) for _ in range(rng.randint(0, 8))]
            part = tokens[position : position + size]
            run = RowRun(
                session=session,
                tokens=[*part, *wrong],
                num_logits=len(part) + len(wrong),
                keep_logits=True,
            )
            logits = golden_model.step([run])[0].logits[: len(part)]
            assert torch.equal(logits, reference[position : position + len(part)])
            session.rollback(len(wrong))
            position += len(part)


def test_only_rows_that_the_rings_still_hold_can_be_taken_back(golden_model):
    with golden_model.open(plan(64), []) as session:
        golden_model.step([RowRun(session=session, tokens=[5, 6])])
        with pytest.raises(InvalidRequest, match="3 rows cannot be taken back, 2 can"):
            session.rollback(3)
        golden_model.step([RowRun(session=session, tokens=[7] * 20)])
        session.rollback(8)
        with pytest.raises(InvalidRequest, match="1 rows cannot"):
            session.rollback(1)


def test_the_simulated_engine_drafts_and_takes_back_alike():
    engine = SimulatedEngine()
    prompt = random_prompt(250)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    plain, accepted = speculate(engine, prompt, params, lambda: 0)
    assert accepted == 0
    tokens, accepted = speculate(engine, prompt, params, lambda: 5)
    assert tokens == plain
    assert 0 < accepted < NUM_TOKENS  # it is right most of the time, and not always
