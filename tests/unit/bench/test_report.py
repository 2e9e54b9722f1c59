"""Results come out as a table and as JSON lines."""

from __future__ import annotations

import json

from flashmesh.bench.registry import MODULES, Result, p50, select
from flashmesh.bench.report import report


class Steps:
    num_steps = 2

    def run(self, advance):
        advance()
        yield Result("steps.first", 1.5, "ms", 3)
        advance()
        yield p50("steps.middle", "x", [9.0, 1.0, 2.0])


def test_results_are_json_lines_with_commit_and_machine(tmp_path, capsys):
    path = tmp_path / "figures.jsonl"
    report({"steps": Steps()}, path)
    first, second = map(json.loads, path.read_text().splitlines())
    assert set(first) == {"metric", "value", "unit", "n", "commit", "machine"}
    assert (first["metric"], first["value"], first["unit"], first["n"]) == (
        "steps.first",
        1.5,
        "ms",
        3,
    )
    assert (second["metric"], second["value"], second["n"]) == ("steps.middle", 2.0, 3)
    assert "steps.middle" in capsys.readouterr().out


def test_a_suite_is_several_benchmarks():
    assert list(select("kv")) == ["kv", "index", "trace-cache"]
    assert list(select("index")) == ["index"]


def test_every_listed_benchmark_is_one():
    assert [*select("all"), "gpu"] == list(MODULES)  # that one needs a GPU
    assert all(select(name)[name].num_steps > 0 for name in MODULES)
