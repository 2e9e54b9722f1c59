"""Placement of runs: pure, stable, and only the lost node's share moves."""

from collections import Counter

import pytest
from support.kv import Chain

from flashmesh.runs import RUN_BLOCKS, place_run, place_runs

NODES = [(f"kvstore-{i}", f"127.0.0.1:{7000 + i}") for i in range(4)]
RUNS = [i.to_bytes(16, "big") for i in range(2000)]


def test_places_cover_the_chain_in_order_without_gaps():
    places = place_runs(Chain(150).hashes, NODES)
    assert [place.first_block for place in places] == [0, 64, 128]
    assert all(place.num_blocks == RUN_BLOCKS for place in places)
    assert all((place.node_id, place.address) in NODES for place in places)


def test_a_prompt_without_a_whole_block_has_a_place_for_what_is_generated():
    (place,) = place_runs([], NODES)
    assert (place.first_block, place.num_blocks) == (0, RUN_BLOCKS)
    assert place_runs([], list(reversed(NODES))) == [place]


def test_a_longer_prompt_keeps_the_places_of_a_shorter_one():
    hashes = Chain(150).hashes
    assert place_runs(hashes, NODES)[:2] == place_runs(hashes[:100], NODES)


def test_the_order_of_the_nodes_does_not_matter():
    assert all(place_run(run, NODES) == place_run(run, NODES[::-1]) for run in RUNS)


def test_a_node_that_leaves_moves_only_its_own_runs():
    for run in RUNS:
        before = place_run(run, NODES)
        after = place_run(run, NODES[:-1])
        assert after == before or before == NODES[-1]


def test_a_node_that_restarts_on_another_port_keeps_its_runs():
    moved = [(node_id, "127.0.0.1:9999") for node_id, _ in NODES]
    assert all(place_run(run, NODES)[0] == place_run(run, moved)[0] for run in RUNS)


def test_runs_spread_evenly():
    counts = Counter(place_run(run, NODES) for run in RUNS)
    assert len(counts) == len(NODES)
    assert min(counts.values()) > len(RUNS) / len(NODES) * 0.85


@pytest.mark.parametrize(
    ("run", "node"), [(0, "kvstore-1"), (1, "kvstore-1"), (2, "kvstore-0"), (4, "kvstore-2")]
)
def test_golden_places(run, node):
    assert place_run(run.to_bytes(16, "big"), NODES)[0] == node
