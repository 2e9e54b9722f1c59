"""What a trace benchmark refuses, on the command line and below it."""

import pytest

from flashmesh import cli
from flashmesh.bench import agents, trace
from flashmesh.bench.load import Objectives
from flashmesh.bench.target import Where
from flashmesh.bench.trace import Pace, of_file
from flashmesh.commands.bench import chosen
from flashmesh.errors import InvalidRequest


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Pace(speed=0), "speed must be above 0, not 0"),
        (lambda: Pace(speed=float("nan")), "speed must be above 0, not nan"),
        (lambda: Pace(limit=0), "at least 1 request must be sent, not 0"),
        (lambda: Pace(max_in_flight=0), "at least 1 request must be in flight, not 0"),
        (lambda: Where(num_decode=0), "decode processes: at least 1, not 0"),
        (lambda: Where(num_prefill=-1), "prefill processes: at least 0, not -1"),
        (lambda: Where(num_kvstore=0), "kvstore processes: at least 1, not 0"),
    ],
)
def test_settings_out_of_range_are_refused(make, problem):
    with pytest.raises(InvalidRequest, match=problem):
        make()


def test_a_trace_that_is_nowhere_is_refused_with_the_names_there_are(tmp_path):
    with pytest.raises(InvalidRequest, match="azure2023_code, conversation, synthetic"):
        of_file(tmp_path / "none", Pace(), Where(), Objectives())


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["kv", "--speed", "2"], "benchmark 'kv' does not take speed"),
        (["agents", "--limit", "2"], "benchmark 'agents' does not take limit"),
        (["agents", "file"], "benchmark 'agents' does not take a file"),
        (["all", "--address", "x"], "benchmark 'all' does not take address"),
        (["trace", "--speed", "2"], "needs a FILE, or one of conversation, synthetic"),
        (["trace", "synthetic", "--speed", "-1"], "speed must be above 0, not -1"),
        (["trace", "synthetic", "--address", "x", "--decode", "2"], "not for --address"),
    ],
)
def test_the_command_line_refuses_what_it_would_not_obey(capsys, argv, problem):
    assert cli.main(["bench", *argv]) == 1
    assert problem in capsys.readouterr().err


def test_a_trace_is_a_benchmark_with_a_step_for_every_request():
    (benchmark,) = chosen("trace", "synthetic", {"limit": 7, "num_decode": 3}).values()
    assert benchmark.num_steps == 7


def test_without_options_the_defaults_run():
    assert chosen("trace", None, {}) == {"trace": trace}
    assert chosen("agents", None, {}) == {"agents": agents}
    (benchmark,) = chosen("agents", None, {"itl_ms": 5.0}).values()
    assert benchmark.num_steps == agents.num_steps
