"""The kv benchmark at a size that takes no time."""

from flashmesh.bench import kv

METRICS = [
    "kv.put_over_bare_grpc",
    "kv.put_mb_per_s",
    "kv.get_over_bare_grpc",
    "kv.get_mb_per_s",
    "kv.get_shm_over_memcpy",
    "kv.get_shm_over_memcpy_all",
    "kv.get_shm_mb_per_s",
    "kv.block_p50_us",
    "kv.block_p99_us",
    "kv.tcp_mb_per_s",
]


def test_every_figure_is_measured_in_as_many_steps_as_announced(monkeypatch):
    monkeypatch.setattr(kv, "NUM_BLOCKS", 16)
    monkeypatch.setattr(kv, "NUM_SINGLE", 20)
    steps = []
    results = list(kv.run(lambda: steps.append(1)))
    assert [result.metric for result in results] == METRICS
    assert all(result.value > 0 for result in results)
    assert len(steps) == kv.num_steps
