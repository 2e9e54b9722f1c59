"""Outcomes as figures."""

import pytest

from flashmesh.bench.load import Objectives, Outcome, balance, figures, percentile

OBJECTIVES = Objectives(ttft_ms=100, itl_ms=10)


def outcome(first_ms, last_ms, num_tokens, cached=0):
    return Outcome(
        status="OK",
        token_ids=[0] * num_tokens,
        num_prompt_tokens=1000,
        num_cached_tokens=cached,
        due_s=5.0,
        first_s=5.0 + first_ms / 1000,
        last_s=5.0 + last_ms / 1000,
    )


def measured(outcomes, elapsed_s=2.0):
    return {r.metric: r.value for r in figures("x", outcomes, elapsed_s, OBJECTIVES)}


def test_figures_of_good_slow_and_failed_requests():
    found = measured(
        [
            outcome(50, 130, 11, cached=640),  # 8 ms between tokens
            outcome(50, 250, 11),  # 20 ms
            outcome(200, 200, 1),  # late, and no time between tokens
            Outcome(status="UNAVAILABLE"),
            Outcome(status="RESOURCE_EXHAUSTED"),
            Outcome(status="UNAVAILABLE"),
        ]
    )
    assert found["x.hit_ratio"] == pytest.approx(640 / 3000)
    assert found["x.ttft_ms.p50"] == pytest.approx(50)
    assert found["x.ttft_ms.p99"] == pytest.approx(200)
    assert found["x.itl_ms.p50"] == pytest.approx(8)
    assert found["x.itl_ms.p90"] == pytest.approx(20)
    assert found["x.goodput_per_s"] == 0.5
    assert found["x.answered_per_s"] == 1.5
    assert found["x.errors"] == 3
    assert found["x.errors.UNAVAILABLE"] == 2
    assert found["x.errors.RESOURCE_EXHAUSTED"] == 1


def test_without_an_answer_there_are_only_errors():
    assert measured([Outcome(status="INTERNAL")]) == {
        "x.goodput_per_s": 0,
        "x.answered_per_s": 0,
        "x.errors": 1,
        "x.errors.INTERNAL": 1,
    }


def test_percentiles_are_values_that_occurred():
    values = list(range(100, 0, -1))
    assert [percentile(values, percent) for percent in (1, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0


class Counted:
    """A target whose processes have done so much."""

    def __init__(self, work):
        self._work = work

    def totals(self, service, metric):
        return self._work


@pytest.mark.parametrize(("work", "ratio"), [((30, 10), 3), ((30, 0), 30), ((0, 0), 0)])
def test_balance_compares_the_busiest_with_the_idlest(work, ratio):
    (result,) = balance("x", Counted(dict(enumerate(work))), "decode")
    assert (result.metric, result.value, result.n) == ("x.max_over_min", ratio, 2)


@pytest.mark.parametrize("work", [{}, {"decode-0": 5.0}])
def test_there_is_no_balance_of_fewer_than_two(work):
    assert list(balance("x", Counted(work), "decode")) == []
