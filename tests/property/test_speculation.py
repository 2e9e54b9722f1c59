"""Law 2: drafting, its depth and its schedule never change a token, and taking rows back leaves no trace."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import golden
from support.prompts import random_prompt

from flashmesh.errors import InvalidRequest, NoFreeBlocks
from flashmesh.kernels.door import RowRun, SessionPlan
from flashmesh.kernels.sequence import DecodeSequence
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.replay import plan_replay
from flashmesh.types import SamplingParams

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def golden_model():
    return golden.golden_engine()


def plan(length):
    return SessionPlan(first_pos=0, global_start=0, decoder_start=0, max_tokens=length)


def speculate(engine, prompt, params, depth):
    """Decodes with up to `depth()` drafts verified in each round.

    Returns:
        Tokens, how many drafts were accepted, and the drafts proposed after each position that ended a round.
    """
    rule = plan_replay(len(prompt), window=128, replay_tokens=140)
    sequence = DecodeSequence(engine, prompt, params, rule, num_drafts=5)
    tokens, accepted, proposed = [], 0, {}
    sequence.open()
    done = False
    while not done:
        run = sequence.rows(len(prompt), min(depth(), len(sequence.confidences)))
        (result,) = engine.step([run])
        assert run.session.num_tokens == sequence.num_known + len(result.drawn) - 1
        progress = sequence.commit(result)
        tokens += progress.tokens
        accepted += progress.num_accepted
        proposed[len(tokens)] = list(result.drafts)
        done = progress.done
    sequence.close()
    assert engine.stats().idle
    return tokens, accepted, proposed


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1 << 20), temperature=st.sampled_from([0.0, 0.3, 1.0]))
def test_any_depth_gives_the_tokens_of_plain_decoding(golden_model, seed, temperature):
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, 30))]
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=temperature, seed=seed, ignore_eos=True
    )
    plain, _, wanted = speculate(golden_model, prompt, params, lambda: 0)
    assert len(plain) == NUM_TOKENS
    for depth in (lambda: 5, lambda: 1, lambda: rng.randint(0, 5)):
        tokens, _, proposed = speculate(golden_model, prompt, params, depth)
        assert tokens == plain
        # Rows of rejected drafts leave nothing behind that a later draft could see.
        assert proposed == {place: wanted[place] for place in proposed}


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


def test_a_copied_session_goes_on_alone_with_the_same_bits(golden_model):
    tokens = golden.ids("s150")
    reference = golden.full_forward(golden_model, tokens)
    with golden_model.open(plan(100), []) as session:
        golden_model.step([RowRun(session=session, tokens=tokens[:100])])
        with session.fork() as twin:
            for wrong in (7, 9):  # the original takes another way
                session.grow(session.num_tokens + 20)
                golden_model.step([RowRun(session=session, tokens=[wrong] * 20)])
            twin.grow(150)
            run = RowRun(session=twin, tokens=tokens[100:], num_logits=50, keep_logits=True)
            assert torch.equal(golden_model.step([run])[0].logits, reference[100:150])
    assert golden_model.stats().idle


def test_a_session_without_room_stays_as_it_was(golden_model):
    assert golden_model.stats().num_pages == 64
    with (
        golden_model.open(plan(100), []) as session,
        golden_model.open(plan(32 * 128), []),
        golden_model.open(plan(31 * 128), []),
    ):
        for take_more in (lambda: session.grow(129), session.fork):
            with pytest.raises(NoFreeBlocks, match="1 pages needed, 0 of 64 are free"):
                take_more()
        golden_model.step([RowRun(session=session, tokens=[5] * 100)])
    assert golden_model.stats().idle


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
    plain, accepted, _ = speculate(engine, prompt, params, lambda: 0)
    assert accepted == 0
    tokens, accepted, _ = speculate(engine, prompt, params, lambda: 5)
    assert tokens == plain
    assert 0 < accepted < NUM_TOKENS  # it is right most of the time, and not always
