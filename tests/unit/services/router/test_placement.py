"""Placement with numbers."""

import random

import pytest

from flashmesh.services.router.placement import (
    DecodeView,
    PrefillView,
    place_decode,
    place_prefill,
)


def test_a_prefill_goes_where_it_is_done_first():
    # 900 rows at 1,000 a second are done before 100 rows at 50 a second.
    views = [
        PrefillView(id="fast", reported_rows=900, rows_per_s=1000),
        PrefillView(id="slow", reported_rows=100, rows_per_s=50),
    ]
    choice = place_prefill(views, 100)
    assert choice.id == "fast"
    assert choice.terms == pytest.approx({"queue_s": 0.9, "compute_s": 0.1})


def test_load_counts_from_the_moment_of_dispatch():
    # b has reported nothing yet, but this router has just sent it 1,000 rows.
    views = [
        PrefillView(id="a", reported_rows=900, rows_per_s=100),
        PrefillView(id="b", dispatched_rows=1000, rows_per_s=100),
    ]
    assert place_prefill(views, 50).id == "a"


def test_an_unmeasured_worker_is_tried():
    views = [
        PrefillView(id="a", reported_rows=10, rows_per_s=100),
        PrefillView(id="b"),
    ]
    assert place_prefill(views, 50).id == "b"


def test_a_sequence_goes_where_the_step_will_be_shortest():
    # 8 sequences at 2 ms a row beat 3 at 10 ms, and a long base loses to both.
    views = [
        DecodeView(id="a", kind="a", reported_sequences=8, step_base_s=0.010, step_row_s=0.002),
        DecodeView(id="b", kind="b", reported_sequences=3, step_base_s=0.010, step_row_s=0.010),
        DecodeView(id="c", kind="c", reported_sequences=0, step_base_s=0.040, step_row_s=0.002),
    ]
    choice = place_decode(views, pages=2)
    assert choice.id == "a"
    assert choice.terms["step_s"] == pytest.approx(0.028)


def test_a_worker_whose_pages_do_not_suffice_is_the_last_resort():
    full = DecodeView(id="a", reported_pages=98, num_pages=100, step_base_s=0.01)
    busy = DecodeView(
        id="b", reported_sequences=50, num_pages=100, step_base_s=0.01, step_row_s=0.01
    )
    assert place_decode([full, busy], pages=3).id == "b"
    assert place_decode([full, busy], pages=2).id == "a"
    assert place_decode([full], pages=3).id == "a"


def test_among_equals_the_emptier_one_wins_then_the_name():
    views = [DecodeView(id="b"), DecodeView(id="a")]
    assert place_decode(views, pages=1).id == "a"
    flat = [
        DecodeView(id="a", dispatched_sequences=2, step_base_s=0.01),
        DecodeView(id="b", dispatched_sequences=1, step_base_s=0.01),
    ]
    assert place_decode(flat, pages=1).id == "b"


def test_a_worker_that_failed_this_request_is_the_last_resort():
    views = [DecodeView(id="a", avoid=True), DecodeView(id="b", reported_sequences=1e6)]
    assert place_decode(views, 1).id == "b"
    assert place_decode(views[:1], 1).id == "a"


def test_without_candidates_there_is_no_choice():
    assert place_prefill([], 1) is None
    assert place_decode([], 1) is None


def test_a_burst_spreads_evenly():
    """64 equal prompts over 4 workers, each counted when it is sent: 16 each, whatever the order of the views."""
    rng = random.Random(0)
    sent = dict.fromkeys("abcd", 0)
    for _ in range(64):
        views = [PrefillView(id=name, dispatched_rows=32_000 * n) for name, n in sent.items()]
        rng.shuffle(views)
        sent[place_prefill(views, 32_000).id] += 1
    assert set(sent.values()) == {16}


def test_a_lucky_fit_does_not_draw_the_load():
    """40 sequences over 4 workers of a kind; their fitted bases differ by thousands of times a row's cost."""
    bases_s = {"a": 3.9e-3, "b": 3.1e-3, "c": 3.3e-3, "d": 4.2e-3}
    sent = dict.fromkeys(bases_s, 0)
    for _ in range(40):
        views = [
            DecodeView(
                id=name, dispatched_sequences=sent[name], step_base_s=base_s, step_row_s=0.3e-6
            )
            for name, base_s in bases_s.items()
        ]
        sent[place_decode(views, pages=1).id] += 1
    assert set(sent.values()) == {10}


def test_a_faster_kind_is_preferred_and_an_unmeasured_one_tried():
    fast = DecodeView(
        id="b", kind="fast", dispatched_sequences=9, step_base_s=3e-3, step_row_s=1e-5
    )
    slow = DecodeView(id="a", kind="slow", step_base_s=4e-3, step_row_s=1e-5)
    new = DecodeView(id="c", kind="new")
    assert place_decode([fast, slow], pages=1).id == "b"
    assert place_decode([fast, slow, new], pages=1).id == "c"
