"""The benchmark of the index: what it counts, on fewer claims than it takes for its figures."""

import pytest

from flashmesh.bench import index


@pytest.fixture
def results(monkeypatch):
    monkeypatch.setattr(index, "NUM_CLAIMS", 20_000)
    monkeypatch.setattr(index, "NUM_LOOKUPS", 3)
    steps = []
    results = {result.metric: result.value for result in index.run(lambda: steps.append(1))}
    assert len(steps) == 2 + 3
    return results


def test_a_million_tokens_take_one_round_trip_and_a_claim_at_most_forty_bytes(results):
    assert results["index.lookup_round_trips"] == 1
    assert 8 <= results["index.bytes_per_block"] <= 40
    assert 0 < results["index.lookup_1m_tokens_server_ms"] <= results["index.lookup_1m_tokens_ms"]
