"""How many drafts to verify, with numbers."""

import random

import pytest

from flashmesh.speculation import DraftGate, StepCost, choose_drafts


def line(base, slope):
    cost = StepCost()
    for rows in (1, 2, 8, 32, 64):
        cost.observe(rows, base + slope * rows)
    return cost


def test_a_line_is_found_again():
    cost = line(0.030, 0.002)
    assert cost.predict(1) == pytest.approx(0.032)
    assert cost.predict(100) == pytest.approx(0.230)
    assert cost.rows_within(0.050, most=1000) == pytest.approx(10, abs=1)
    assert cost.rows_within(1.0, most=100) == 100
    assert cost.rows_within(1.0, most=1000) == 128  # twice the largest that was tried
    assert cost.rows_within(0.010, most=100) == 0


def test_steps_of_one_size_say_nothing_of_another():
    cost = StepCost()
    for _ in range(5):
        cost.observe(8, 0.04)
    assert cost.predict(8) == cost.predict(500) == pytest.approx(0.04)


def test_noise_never_makes_rows_cost_less_than_nothing():
    cost = StepCost()
    rng = random.Random(1)
    for _ in range(50):
        cost.observe(rng.randint(1, 64), rng.random())
        assert 0 <= cost.predict(1) <= cost.predict(1000)


def test_old_steps_are_forgotten():
    cost = line(1.0, 0.1)
    for _ in range(400):
        for rows in (1, 64):
            cost.observe(rows, 0.01 + 0.001 * rows)
    assert cost.predict(64) == pytest.approx(0.074, rel=0.05)


def test_free_rows_are_all_verified():
    confidences = [[0.9, 0.5, 0.1], [0.2]]
    assert choose_drafts(confidences, other_rows=0, budget=99, cost=line(0.03, 0.0)) == [3, 1]


def test_before_any_step_was_measured_all_are_verified():
    assert choose_drafts([[0.9, 0.5]], other_rows=0, budget=5, cost=StepCost()) == [2]


def test_dear_rows_are_verified_only_where_they_pay():
    # A row costs a fifth of a step: a chance of 0.9 pays, one of 0.09 does not.
    cost = line(0.008, 0.002)
    assert choose_drafts([[0.9, 0.1]], other_rows=0, budget=9, cost=cost) == [1]
    assert choose_drafts([[0.1, 0.9]], other_rows=0, budget=9, cost=cost) == [0]


def test_the_likeliest_drafts_take_a_small_budget_and_prefixes_stay_whole():
    confidences = [[0.5, 0.99], [0.9, 0.9, 0.2]]
    # Chances: 0.5, 0.495 and 0.9, 0.81, 0.162.
    assert choose_drafts(confidences, other_rows=0, budget=3, cost=StepCost()) == [1, 2]
    assert choose_drafts(confidences, other_rows=0, budget=0, cost=StepCost()) == [0, 0]


def test_nobody_speculates():
    assert choose_drafts([], other_rows=4, budget=9, cost=StepCost()) == []
    assert choose_drafts([[], []], other_rows=4, budget=9, cost=StepCost()) == [0, 0]


def decide(gate, count, accepted, slowdown):
    """Runs steps of two streams; returns how many of them drafted."""
    offered, num_drafted = False, 0
    for _ in range(count):
        drafted = gate.draft()
        seconds = 0.03 * (slowdown if drafted else 1)
        tokens = 2 + 2 * accepted * offered
        gate.observe(offered=offered, drafted=drafted, streams=2, tokens=tokens, seconds=seconds)
        offered = drafted
        num_drafted += drafted
    return num_drafted


def test_drafts_that_are_right_are_made_and_those_that_are_wrong_are_not():
    for accepted, slowdown, pays in (
        (2, 1.7, True),
        (0, 1.7, False),
        (0.5, 1.7, False),
        (1, 1.2, True),
    ):
        gate = DraftGate()
        decide(gate, 500, accepted, slowdown)
        share = decide(gate, 640, accepted, slowdown) / 640
        trials = DraftGate.TRIAL / DraftGate.PERIOD
        assert share == pytest.approx(1 - trials if pays else trials), (accepted, slowdown)


def test_a_change_is_noticed():
    gate = DraftGate()
    decide(gate, 1000, 0, 1.7)
    decide(gate, 3000, 3, 1.7)
    assert decide(gate, 640, 3, 1.7) == 600
