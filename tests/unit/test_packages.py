"""pyproject.toml lists packages by hand; the list is the tree."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_listed_packages_are_the_folders_with_modules():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        path.parent.relative_to(ROOT)
        for name in ("flashmesh", "services", "kernels")
        for path in (ROOT / name).rglob("*.py")
    }
    names = {".".join(folder.parts) for folder in folders}
    expected = {n if n.split(".")[0] == "flashmesh" else f"flashmesh.{n}" for n in names}
    assert sorted(listed) == sorted(expected)


def test_every_package_has_an_init():
    for name in ("flashmesh", "services", "kernels"):
        for path in (ROOT / name).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.parent
