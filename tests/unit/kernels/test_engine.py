"""What an engine refuses, and what it holds and gives back."""

import pytest
from support import golden

from flashmesh.errors import CorruptBlock, Incompatible, InvalidRequest, NoFreeBlocks
from flashmesh.kernels.door import RowRun, SessionPlan

TOKENS = golden.ids("s150")
HIT = SessionPlan(first_pos=112, global_start=128, decoder_start=128, max_tokens=150)


@pytest.fixture(scope="module")
def engine():
    return golden.golden_engine(num_slots=2)


@pytest.fixture(scope="module")
def prefill_engine():
    return golden.golden_engine(role="prefill", num_slots=2)


@pytest.fixture
def session(engine):
    with engine.open(golden.full_plan(150), []) as session:
        yield session
    assert engine.stats().idle


def test_blocks_are_exported_only_when_their_rows_are_there(engine, session):
    engine.step([RowRun(session=session, tokens=TOKENS[:127])])
    with pytest.raises(InvalidRequest, match="block 0 has rows"):
        session.export_block(0)
    engine.step([RowRun(session=session, tokens=TOKENS[127:128])])
    assert len(session.export_block(0)) == engine.info.block_bytes
    for index in (1, 2, -1):
        with pytest.raises(InvalidRequest):
            session.export_block(index)


def test_a_closed_session_touches_no_page(engine):
    session = engine.open(HIT, TOKENS[:112])
    payload = bytes(engine.info.block_bytes)
    session.import_block(0, payload)
    session.close()
    session.close()
    assert engine.stats().idle
    with pytest.raises(InvalidRequest):
        session.import_block(0, payload)
    with pytest.raises(InvalidRequest):
        session.export_block(0)
    with pytest.raises(InvalidRequest, match="closed"):
        engine.step([RowRun(session=session, tokens=TOKENS[112:])])


def test_rows_do_not_run_over_blocks_that_nobody_imported(engine):
    with engine.open(HIT, TOKENS[:112]) as session:
        with pytest.raises(CorruptBlock, match="block 0 was never imported"):
            engine.step([RowRun(session=session, tokens=TOKENS[112:])])
        with pytest.raises(CorruptBlock, match="a payload has 3 bytes"):
            session.import_block(0, b"abc")
        with pytest.raises(InvalidRequest, match="own to write"):
            session.import_block(1, bytes(engine.info.block_bytes))
        session.import_block(0, bytes(engine.info.block_bytes))
        engine.step([RowRun(session=session, tokens=TOKENS[112:])])
    assert engine.stats().idle


@pytest.mark.parametrize(
    "numbers",
    [
        {"first_pos": -1},
        {"first_pos": 2},
        {"first_pos": 2, "global_start": 3},
        {"global_start": 256},
        {"first_pos": 4, "global_start": 128, "decoder_start": 2},
        {"max_tokens": 4097},
    ],
)
def test_plans_that_cannot_run_are_refused_and_hold_nothing(engine, numbers):
    plan = {"first_pos": 0, "global_start": 0, "decoder_start": 0, "max_tokens": 150} | numbers
    with pytest.raises(InvalidRequest):
        engine.open(SessionPlan(**plan), TOKENS[: max(0, plan["first_pos"])])
    assert engine.stats().idle


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [512]}, "not in"),
        ({"tokens": [-1]}, "not in"),
        ({"tokens": [3] * 151}, "exceed max_tokens"),
        ({"tokens": [3], "num_logits": 2}, "2 logits of 1 rows"),
    ],
)
def test_bad_runs_are_refused_before_anything_runs(engine, session, change, message):
    with pytest.raises(InvalidRequest, match=message):
        engine.step([RowRun(session=session, **change)])
    assert session.num_tokens == 0


def test_logits_of_encoder_rows_are_refused(engine):
    plan = SessionPlan(first_pos=0, global_start=0, decoder_start=10, max_tokens=20)
    with engine.open(plan, []) as session, pytest.raises(InvalidRequest, match="encoder half"):
        engine.step([RowRun(session=session, tokens=TOKENS[:12], num_logits=3)])


def test_what_ran_out_is_named_and_the_rest_stays_free(engine):
    with engine.open(golden.full_plan(4096), []):  # 32 of 64 pages
        with engine.open(golden.full_plan(4096), []):
            stats = engine.stats()
            assert (stats.num_free_pages, stats.num_free_slots) == (0, 0)
            with pytest.raises(NoFreeBlocks, match="1 pages needed, 0 of 64"):
                engine.open(golden.full_plan(1), [])
        with engine.open(golden.full_plan(1), []), pytest.raises(NoFreeBlocks, match="slots"):
            engine.open(golden.full_plan(1), [])
        assert engine.stats().num_free_pages == 32
    assert engine.stats().idle


def test_a_prefill_engine_writes_the_same_blocks_and_refuses_a_decoder(engine, prefill_engine):
    plan = SessionPlan(first_pos=0, global_start=0, decoder_start=None, max_tokens=128)
    payloads = []
    for each in (engine, prefill_engine):
        with each.open(plan, []) as session:
            each.step([RowRun(session=session, tokens=TOKENS[:128])])
            payloads.append(session.export_block(0))
    assert payloads[0] == payloads[1]
    assert engine.info == prefill_engine.info
    with pytest.raises(Incompatible):
        prefill_engine.open(golden.full_plan(128), [])
