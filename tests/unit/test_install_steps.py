"""Makefile, Dockerfile and the pins agree: one constraints file, torch first, one version of it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pip_installs(name: str) -> list[str]:
    return re.findall(r"pip install (?:--quiet )?(.+)", (ROOT / name).read_text())


def test_makefile_and_dockerfile_install_the_same_pins():
    torch, rest, grammars = pip_installs("Makefile")
    image_torch, image_rest, image_grammars = pip_installs("Dockerfile")
    assert torch == image_torch
    assert rest == "-c constraints.txt -e '.[dev]'"
    assert image_rest == "-c constraints.txt '.[grammar-cpu]' \\"
    assert grammars == image_grammars == "-c constraints.txt --no-deps xgrammar"
    version = torch.removeprefix("-c constraints.txt ")
    assert version in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_image_gets_all_that_the_wheel_is_built_from():
    dockerfile = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in ("flashmesh", "kernels", "services", "pyproject.toml", "LICENSE", "README.md"):
        assert re.search(rf"^COPY .*\b{re.escape(source)}", dockerfile, re.MULTILINE), source
        assert f"!{source}" in ignored


def test_every_constraint_is_an_exact_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert len(pins) > 30
