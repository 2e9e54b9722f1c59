"""The committed stubs are what the contracts generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUBS = ROOT / "flashmesh" / "v1"


def test_stubs_are_fresh(tmp_path):
    protos = sorted((ROOT / "protos" / "flashmesh" / "v1").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "protos"), *outputs]
    # Stubs name the grpcio-tools that made them; another release than the pinned one may differ.
    done = subprocess.run([*command, *map(str, protos)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in (tmp_path / "flashmesh" / "v1").iterdir()}
    kept = {
        path.name: path.read_text()
        for path in STUBS.iterdir()
        if path.suffix in (".py", ".pyi") and path.name != "__init__.py"
    }
    assert sorted(made) == sorted(kept)
    stale = [name for name in made if made[name] != kept[name]]
    assert not stale, f"run `make protos`: {', '.join(stale)}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "protos").rglob("*.proto")), ids=lambda path: path.name
)
def test_every_service_and_file_says_what_it_is(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ")
    for number, line in enumerate(lines):
        if line.strip().startswith("rpc ") and number:
            previous = lines[number - 1].strip()
            assert previous.startswith(("//", "rpc", "service")), f"{path.name}:{number + 1}"
