import inspect
import shutil
import subprocess
import sys

import pytest

from flashmesh.errors import KernelsUnavailable
from flashmesh.kernels.ops import table
from flashmesh.kernels.tilelang.build import build
from flashmesh.kernels.tilelang.compile import all_variants, main

COMPILED_HERE = ("round_rows.1280", "engram_rows")


def test_each_kernel_has_its_twins_signature():
    twins, kernels = table.load_ops("reference"), table.load_ops("tilelang")
    for name in table._OPS:
        expected = inspect.signature(getattr(twins, name)).parameters
        found = inspect.signature(getattr(kernels, name)).parameters
        assert list(found) == list(expected), name


def test_a_table_reports_what_runs_where():
    assert set(table.load_ops("reference").report().values()) == {"reference"}
    assert set(table.load_ops("tilelang").report().values()) == {"tilelang"}


def test_a_lacking_op_is_refused_unless_it_may_fall_back(monkeypatch):
    monkeypatch.setitem(table._OPS, "round_rows", ("rounding", "nowhere"))
    with pytest.raises(KernelsUnavailable, match="lacks round_rows"):
        table.load_ops("tilelang")
    report = table.load_ops("tilelang", may_fall_back=["round_rows"]).report()
    assert report["round_rows"] == "reference"
    assert sum(where == "reference" for where in report.values()) == 1


def test_an_unknown_op_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no op 'nothing'"):
        _ = table.load_ops("reference").nothing


def test_kernels_import_without_tilelang():
    script = (
        "import sys; sys.modules['tilelang'] = None\n"
        "from flashmesh.kernels.tilelang.compile import all_variants\n"
        "from flashmesh.kernels.ops.table import load_ops\n"
        "load_ops('tilelang'); print(len(all_variants()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(all_variants())


def test_a_missing_tilelang_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tilelang", None)
    with pytest.raises(KernelsUnavailable, match=r"flashmesh\[cuda\]"):
        build(lambda: None)


def test_names_of_variants_are_unique():
    names = [variant.name for variant in all_variants()]
    assert len(set(names)) == len(names) > 20


def test_a_missing_compiler_is_named(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert main([]) == 1
    assert "nvcc is not on the path" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on the path")
def test_a_name_that_fits_nothing_fails(capsys):
    assert main(["nothing"]) == 1
    assert "0 of 0" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on the path")
@pytest.mark.parametrize("name", COMPILED_HERE)
def test_kernels_compile_for_hopper(name, capsys):
    assert main([name]) == 0, capsys.readouterr().err
