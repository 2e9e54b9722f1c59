"""The engine's benchmark, shortened."""

import pytest

from flashmesh.bench import engine as bench


@pytest.mark.slow
def test_every_figure_is_there_and_plausible(monkeypatch):
    for name, value in (
        ("BATCHES", (1, 2)),
        ("NUM_TOKENS", 8),
        ("NUM_PAIRS", 1),
        ("NUM_ROUNDS", 4),
        ("PREFILL_TOKENS", 256),
        ("FORCED_TOKENS", 200),
        ("NUM_STREAMS", 2),
        ("NUM_KILLS", 1),
    ):
        monkeypatch.setattr(bench, name, value)
    results = {result.metric: result.value for result in bench.run(lambda: None)}
    shares = [value for name, value in results.items() if name.startswith("engine.step_share.")]
    assert len(shares) == 4
    assert 0 < sum(shares) <= 100
    assert results["spec.accepted_per_round"] <= 5
    assert 0 <= results["spec.rejection_per_round"] <= 5
    assert all(
        results[name] > 0
        for name in (
            "engine.decode_tokens_per_s.b1",
            "engine.decode_tokens_per_s.b2",
            "spec.time_per_token_ratio",
            "grammar.step_overhead",
            "prefill.tokens_per_s",
            "replay.stall_ms",
            "failover.pause_ms",
        )
    )
