"""docs/running.md holds the tables that the configuration classes give."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

from flashmesh import config
from flashmesh.config import MeshConfig, ModelSection

ROOT = Path(__file__).parents[2]


def tool():
    spec = importlib.util.spec_from_file_location(
        "config_reference", ROOT / "tools" / "config_reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh():
    module = tool()
    page = (ROOT / "docs" / "running.md").read_text()
    assert module.page(page) == page, "run `make config-reference`"
    assert "| `token_file` |" in page


@pytest.mark.parametrize("name", ["local", "compose"])
def test_the_shipped_configurations_have_known_keys_only(name):
    path = ROOT / "config" / f"{name}.toml"
    sections = {"mesh": MeshConfig, "model": ModelSection}
    sections |= {service: tool().config_class(service) for service in tool().SERVICES}
    loaded = config.load(path, sections)
    assert loaded["mesh"].name == name
    assert set(tomllib.loads(path.read_text())) <= set(sections)
