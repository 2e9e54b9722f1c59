"""The benchmarks that load a mesh, small: real processes, and figures that add up."""

import json
import signal

import pytest
from support.mesh import start_mesh

from flashmesh import cli
from flashmesh.bench import router
from flashmesh.bench.agents import Agents, Workload
from flashmesh.bench.load import Objectives
from flashmesh.bench.target import Where
from flashmesh.bench.trace import Pace, of_file

LENIENT = Objectives(ttft_ms=1e6, itl_ms=1e6)
NUM_REQUESTS = 6


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    with start_mesh(tmp_path_factory.mktemp("mesh"), num_decode=2) as mesh:
        yield mesh


@pytest.fixture
def trace_file(tmp_path):
    """Requests of 2,048 tokens; from the second one on, three quarters of the prompt are known."""
    lines = [
        {
            "timestamp": 50 * number,
            "input_length": 2048,
            "output_length": 3,
            "hash_ids": [0, 1, 2, 3 + number],
        }
        for number in range(NUM_REQUESTS)
    ]
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_finds_all_that_an_unlimited_store_would(mesh, trace_file, tmp_path, capsys):
    figures = tmp_path / "figures.jsonl"
    argv = ["bench", "trace", str(trace_file), "--address", mesh.router_address]
    argv += ["--max-in-flight", "1", "--ttft-ms", "1e6", "--itl-ms", "1e6"]
    assert cli.main([*argv, "--json", str(figures)]) == 0
    assert "trace.small.hit_ratio" in capsys.readouterr().out
    found = {line["metric"]: line for line in map(json.loads, figures.read_text().splitlines())}
    values = {metric: line["value"] for metric, line in found.items()}
    cached = (NUM_REQUESTS - 1) * 3 * 512
    assert values["trace.small.hit_ratio"] == pytest.approx(cached / (NUM_REQUESTS * 2048))
    assert values["trace.small.hit_over_unlimited"] == 1.0
    assert values["trace.small.errors"] == 0
    assert values["trace.small.goodput_per_s"] == values["trace.small.answered_per_s"] > 0
    assert found["trace.small.ttft_ms.p99"]["n"] == NUM_REQUESTS
    assert not any("balance" in metric for metric in values)  # nobody told us who the workers are


def test_ctrl_c_ends_a_trace_with_the_figures_so_far(mesh, trace_file):
    where = Where(address=mesh.router_address)
    benchmark = of_file(trace_file, Pace(max_in_flight=1), where, LENIENT)
    results = []
    with pytest.raises(KeyboardInterrupt):
        results.extend(benchmark.run(lambda: signal.raise_signal(signal.SIGINT)))
    numbers = {result.metric: result.n for result in results}
    assert 1 <= numbers["trace.small.errors"] < NUM_REQUESTS


def test_a_router_that_is_not_there_is_an_error_of_every_request(trace_file):
    benchmark = of_file(trace_file, Pace(speed=1000), Where(address="127.0.0.1:1"), LENIENT)
    values = {result.metric: result.value for result in benchmark.run(lambda: None)}
    assert values["trace.small.errors.UNAVAILABLE"] == NUM_REQUESTS
    assert "trace.small.hit_ratio" not in values


def test_agent_sessions_find_their_histories(tmp_path):
    """On a mesh that the benchmark starts itself."""
    workload = Workload(num_sessions=2, num_turns=5, system=2000)
    steps = []
    benchmark = Agents(workload, Where(num_prefill=1), LENIENT)
    values = {result.metric: result.value for result in benchmark.run(lambda: steps.append(1))}
    assert len(steps) == benchmark.num_steps == 10
    lost = {metric: value for metric, value in values.items() if metric.startswith("agent.lost")}
    assert set(lost) == {f"agent.lost_to_{reason}" for reason in ("new", "grain", "replay", "lag")}
    assert values["agent.hit_ratio"] + sum(lost.values()) == pytest.approx(1)
    # Of a turn, at least the system prompt and all but the last turn's additions are there again.
    assert values["agent.hit_ratio"] > 0.5
    assert values["agent.errors"] == 0
    assert "agent.balance.decode.max_over_min" in values
    assert "agent.balance.prefill.max_over_min" not in values  # of one worker there is none


@pytest.mark.slow
def test_the_router_is_measured(monkeypatch):
    small = {
        "NUM_PROMPTS": 6,
        "WARM_UP_PAIRS": 2,
        "NUM_STREAM_PAIRS": 2,
        "NUM_LOAD_STREAMS": 4,
        "NUM_BURST": 8,
        "BURST_TOKENS": 1000,
    }
    for name, value in small.items():
        monkeypatch.setattr(router, name, value)
    steps = []
    results = {result.metric: result for result in router.run(lambda: steps.append(1))}
    assert set(results) == {
        "router.added_ms.p50",
        "router.added_ms.p99",
        "router.added_us_per_token.p50",
        "router.requests_per_s",
        "router.wall_requests_per_s",
        "router.tokens_per_s",
        "router.wall_tokens_per_s",
        "router.decisions_per_s",
        "router.decision_hash_ms.p50",
        "router.decision_place_ms.p50",
        "balance.max_over_min",
    }
    assert results["router.added_ms.p50"].n == 4
    assert results["router.tokens_per_s"].n == 4 * router.STREAM_TOKENS
    assert len(steps) == 2 * 6 + 2 + 3 + router.decisions.NUM_DECISIONS
