"""Images in sessions: text, an image and text again, on a small checkpoint with a random tower."""

import numpy as np
import pytest
import torch
from support import golden

from flashmesh.errors import CheckpointError, InvalidRequest
from flashmesh.kernels.demo import make_demo_checkpoint
from flashmesh.kernels.door import RowRun, SessionPlan
from flashmesh.kernels.engine import load_engine
from flashmesh.kernels.engram import BLOCKED

START = 100
PIXELS = np.random.default_rng(5).integers(0, 256, (200, 260, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "demo"
    make_demo_checkpoint(folder, vision=True)
    return load_engine(folder, role="all", name="demo", num_pages=12, num_slots=4, vision=True)


@pytest.fixture(scope="module")
def span(engine):
    """Positions of the image; they cross the end of a block and of a pass."""
    span = range(START, START + engine.vision.num_tokens(PIXELS))
    assert span.start < 128 < span.stop
    return span


@pytest.fixture(scope="module")
def tokens(engine, span):
    image = engine.config.image_token_id
    ids = [200 + 7 * place for place in range(span.stop + 20)]
    return [image if place in span else token for place, token in enumerate(ids)]


def run(engine, session, tokens, num_logits=None):
    count = len(tokens) if num_logits is None else num_logits
    part = RowRun(session=session, tokens=tokens, num_logits=count, keep_logits=True)
    return engine.step([part])[0].logits


@pytest.fixture(scope="module")
def reference(engine, tokens):
    """Logits of all rows in one step."""
    with engine.open(golden.full_plan(len(tokens)), []) as session:
        session.add_image(START, PIXELS)
        return run(engine, session, tokens)


def test_an_image_equals_its_rows_given_directly(engine, tokens, span, reference):
    rows = dict(zip(span, engine.vision.embed(PIXELS), strict=True))
    assert torch.equal(golden.full_forward(engine, tokens, rows), reference)


def test_an_image_matters_to_the_text_after_it_and_not_before(engine, tokens, span, reference):
    with engine.open(golden.full_plan(len(tokens)), []) as session:
        assert session.add_image(START, 255 - PIXELS) == span
        other = run(engine, session, tokens)
    assert torch.equal(other[:START], reference[:START])
    assert not torch.equal(other[span.stop :], reference[span.stop :])


@pytest.mark.parametrize("cuts", [[101, 1, 30], [100, 8, 8, 8, 8], [128], [110] + [1] * 12])
def test_chunks_across_an_image_change_no_bit(engine, tokens, reference, cuts):
    parts, begin = [], 0
    with engine.open(golden.full_plan(len(tokens)), []) as session:
        session.add_image(START, PIXELS)
        for size in [*cuts, len(tokens) - sum(cuts)]:
            parts.append(run(engine, session, tokens[begin : begin + size]))
            begin += size
    assert torch.equal(torch.cat(parts), reference)


def test_an_image_may_be_added_after_the_text_before_it_has_run(engine, tokens, reference):
    with engine.open(golden.full_plan(len(tokens)), []) as session:
        first = run(engine, session, tokens[:START])
        session.add_image(START, PIXELS)
        got = torch.cat((first, run(engine, session, tokens[START:])))
    assert torch.equal(got, reference)


def test_a_neighbour_in_the_step_changes_no_bit_of_either(engine, tokens, reference):
    plain = [300 + place for place in range(40)]
    alone = golden.full_forward(engine, plain)
    plan = golden.full_plan(len(tokens))
    with engine.open(plan, []) as left, engine.open(plan, []) as right:
        right.add_image(START, PIXELS)
        runs = [
            RowRun(session=session, tokens=ids, num_logits=len(ids), keep_logits=True)
            for session, ids in ((left, plain), (right, tokens))
        ]
        results = engine.step(runs)
    assert torch.equal(results[0].logits, alone)
    assert torch.equal(results[1].logits, reference)


@pytest.mark.parametrize("first", [1, 2, 5, 0, -1])
def test_a_replay_blocks_look_back_as_the_first_run_did(engine, tokens, span, first):
    """`first` counts from the image's end; at 0 and below the replay begins at it or inside."""
    first += span.stop
    with engine.open(golden.full_plan(len(tokens)), []) as cold:
        cold.add_image(START, PIXELS)
        run(engine, cold, tokens[:first], 0)
        expected = cold.tail[-3:]
    plan = SessionPlan(first_pos=first, global_start=256, decoder_start=256, max_tokens=300)
    with engine.open(plan, tokens[:first]) as session:
        session.add_image(START, PIXELS)
        assert session.tail[-3:] == expected
        assert (BLOCKED in expected) == (first < span.stop + 3)


def test_a_replay_over_a_stored_block_with_an_image_changes_no_bit(engine, tokens, reference):
    """The window covers everything from position 0 on, so a replay from there is a first run."""
    plan = SessionPlan(first_pos=0, global_start=128, decoder_start=0, max_tokens=len(tokens))
    with engine.open(golden.full_plan(len(tokens)), []) as cold:
        cold.add_image(START, PIXELS)
        run(engine, cold, tokens, 0)
        payload = cold.export_block(0)
    with engine.open(plan, []) as session:
        session.import_block(0, payload)
        session.add_image(START, PIXELS)
        assert torch.equal(run(engine, session, tokens), reference)


def refused(session, start=START, pixels=PIXELS):
    with pytest.raises(InvalidRequest) as caught:
        session.add_image(start, pixels)
    assert not session.images or START in session.images
    return str(caught.value)


def test_spans_that_do_not_fit_are_refused(engine, span):
    with engine.open(golden.full_plan(400), []) as session:
        assert "is not within [0, 400)" in refused(session, -1)
        assert "is not within [0, 400)" in refused(session, 400 - len(span) + 1)
        assert "uint8" in refused(session, START, PIXELS.astype(float))
        session.add_image(START, PIXELS)
        assert "overlaps another" in refused(session, START - len(span) + 1)
        assert "overlaps another" in refused(session, span.stop - 1)
    assert "closed" in refused(session, 0)


def test_a_span_over_other_tokens_is_refused_before_any_row_runs(engine, tokens, span):
    wrong = list(tokens)
    wrong[span.stop - 1] = 77
    with engine.open(golden.full_plan(len(tokens)), []) as session:
        session.add_image(START, PIXELS)
        with pytest.raises(InvalidRequest, match=f"token id 77 at position {span.stop - 1} lies"):
            run(engine, session, wrong)
        assert session.num_tokens == 0


def test_a_span_over_other_tokens_of_the_prefix_is_refused(engine, tokens, span):
    plan = SessionPlan(first_pos=128, global_start=128, decoder_start=128, max_tokens=170)
    with engine.open(plan, [5] * 128) as session:
        assert f"token id 5 at position {START} lies in an image" in refused(session)


def test_an_image_after_its_rows_is_refused(engine, tokens):
    with engine.open(golden.full_plan(len(tokens)), []) as session:
        run(engine, session, tokens[: START + 1])
        assert f"comes too late, rows up to {START + 1} have run" in refused(session)


def test_an_engine_without_a_tower_refuses_images_and_its_checkpoint_a_tower():
    engine = golden.golden_engine()
    with engine.open(golden.full_plan(16), []) as session:
        assert "without a vision tower" in refused(session, 0)
    folder = golden.DATA
    with pytest.raises(CheckpointError, match="describes no vision tower"):
        load_engine(folder, role="all", name="x", num_pages=1, num_slots=1, vision=True)
