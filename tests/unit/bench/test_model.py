"""The model benchmark at sizes that take no time."""

import os

import pytest

from flashmesh.bench import model
from flashmesh.bench.registry import Result
from flashmesh.bench.sparse_checkpoint import NoSparseFilesError, write_sparse_table


def test_loading_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "LOAD_SIZES", {})
    steps = []
    result = model.load_rate(tmp_path, lambda: steps.append(1))
    assert isinstance(result, Result)
    assert result.value > 0
    assert len(steps) == model.NUM_LOADS


def test_lookups_are_measured_on_holes(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "NUM_LOOKUPS", 2)
    monkeypatch.setattr(model, "LOOKUP_TOKENS", 2)
    rate, growth = model.lookups(tmp_path)
    assert rate.metric == "engram.rows_per_s"
    assert rate.value > 0
    assert growth.value < 50


def test_the_golden_error_is_small():
    result = model.golden_error("fp8_fp4", "model_quantized")
    assert 0 < result.value < 1e-4


def test_a_file_system_without_holes_is_named(tmp_path, monkeypatch):
    def refuse(path, size):
        raise OSError("too large")

    monkeypatch.setattr(os, "truncate", refuse)
    with pytest.raises(NoSparseFilesError, match="too large"):
        write_sparse_table(tmp_path / "table", "layers.1.engram.embed.weight", 64, 256)
