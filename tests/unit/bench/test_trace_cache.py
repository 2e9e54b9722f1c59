"""Replaying block streams: the definitions, on streams small enough to check by hand or by force."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmesh.bench import trace_cache
from flashmesh.bench.trace_cache import load, lru_hits, optimum_hits, policy_hits


def named(paths):
    """Numbers blocks as the traces do: one id for a block and everything before it."""
    ids = {}
    return [
        [ids.setdefault(tuple(path[: end + 1]), len(ids)) for end in range(len(path))]
        for path in paths
    ]


streams = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), max_size=7).map(named)
capacities = st.integers(1, 6)


def best(prompts, capacity):
    """The most leading blocks that any choice of what to keep after each prompt can find."""
    found = {frozenset(): 0}
    for prompt in prompts:
        after = {}
        for stored, hits in found.items():
            hits += len(list(itertools.takewhile(stored.__contains__, prompt)))
            blocks = stored.union(prompt)
            for kept in itertools.combinations(blocks, min(capacity, len(blocks))):
                key = frozenset(kept)
                after[key] = max(after.get(key, 0), hits)
        found = after
    return max(found.values())


@settings(max_examples=30, deadline=None)
@given(prompts=streams, capacity=st.integers(4, 5))
def test_the_optimum_is_the_best_of_all_choices(prompts, capacity):
    assert optimum_hits(prompts, capacity) == best(prompts, capacity)


@given(prompts=streams, capacity=capacities)
def test_nobody_finds_more_than_the_optimum(prompts, capacity):
    if capacity >= max(map(len, prompts), default=0):  # else a prompt evicts itself
        limit = optimum_hits(prompts, capacity)
        assert lru_hits(prompts, capacity) <= limit
        assert policy_hits(prompts, capacity) <= limit


@given(prompts=streams)
def test_with_room_for_everything_every_repetition_is_a_hit(prompts):
    blocks = list(itertools.chain.from_iterable(prompts))
    room = max(1, len(set(blocks)))
    expected = len(blocks) - len(set(blocks))
    assert [count(prompts, room) for count in (policy_hits, lru_hits, optimum_hits)] == (
        [expected] * 3
    )


def test_only_leading_blocks_count_and_the_last_of_a_prompt_go_first():
    prompts = [[0, 1, 2], [3, 4], [0, 1, 2]]
    assert [lru_hits(prompts, capacity) for capacity in (2, 3, 4, 5)] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lru", "optimum"),
    [
        ("conversation", [0.196, 0.279, 0.354], [0.366, 0.366, 0.366]),
        ("synthetic", [0.157, 0.262, 0.444], [0.396, 0.506, 0.626]),
    ],
)
def test_the_traces_give_the_published_figures(name, lru, optimum):
    """Least recently used and optimum at 5, 10 and 25 % of the distinct blocks."""
    prompts = load(name)
    blocks = list(itertools.chain.from_iterable(prompts))
    capacities = [len(set(blocks)) * percent // 100 for percent in (5, 10, 25)]
    for count, expected in ((lru_hits, lru), (optimum_hits, optimum)):
        found = [count(prompts, capacity) / len(blocks) for capacity in capacities]
        assert found == pytest.approx(expected, abs=0.0006)


def test_the_benchmark_reports_all_three_side_by_side(monkeypatch):
    once = [[number] for number in range(100, 170)]
    prompts = named([[0, 1, 2], [0, 1, 3], *once, [0, 1, 2], [5, 6, 7]] * 2)
    monkeypatch.setattr(trace_cache, "load", lambda name: prompts)
    steps = []
    results = {r.metric: r.value for r in trace_cache.run(lambda: steps.append(1))}
    assert len(steps) == trace_cache.num_steps
    for name in trace_cache.TRACES:
        assert results[f"trace.{name}.hit_over_unlimited.100"] == 1.0
        for percent in trace_cache.PERCENTS:
            trace = f"trace.{name}"
            optimum = results[f"{trace}.optimum_hit.{percent}"]
            assert results[f"{trace}.hit.{percent}"] <= optimum
            assert results[f"{trace}.lru_hit.{percent}"] <= optimum
