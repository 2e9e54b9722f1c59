"""The import law: services import kernels and flashmesh, kernels flashmesh; nothing back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("router", "prefill", "decode", "kvstore")
# These start or embed the rest of the tree. They reach up inside functions only.
TOP = ("flashmesh.launcher", "flashmesh.offline", "flashmesh.bench.", "flashmesh.commands.")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "flashmesh" else ("flashmesh", *parts))


def sources() -> dict[str, Path]:
    paths = (
        p for folder in ("flashmesh", "services", "kernels") for p in (ROOT / folder).rglob("*.py")
    )
    return {module_of(path): path for path in paths}


def imports(tree: ast.AST) -> set[str]:
    """Every imported module below `flashmesh.`, absolute, `from a import b` counted as `a.b`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("flashmesh.")}


def allowed(module: str, imported: str) -> bool:
    layer = imported.split(".")[1]
    if layer not in ("services", "kernels"):
        return True
    if module.startswith("flashmesh.services."):
        return layer == "kernels" or imported.split(".")[2] == module.split(".")[2]
    if module.startswith("flashmesh.kernels"):
        return layer == "kernels"
    return module.startswith(TOP)


def at_import(tree: ast.Module) -> ast.Module:
    """What runs when the module is imported: no function bodies, no TYPE_CHECKING blocks."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        visit_AsyncFunctionDef = visit_FunctionDef

        def visit_If(self, node):
            names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
            return None if "TYPE_CHECKING" in names else node

    return Strip().visit(tree)


@pytest.mark.parametrize("module", sorted(sources()))
def test_imports_point_one_way(module):
    tree = ast.parse(sources()[module].read_text())
    wrong = sorted(name for name in imports(tree) if not allowed(module, name))
    assert not wrong, f"{module} must not import {', '.join(wrong)}"


@pytest.mark.parametrize("module", sorted(m for m in sources() if m.startswith(TOP)))
def test_what_reaches_up_does_so_lazily(module):
    tree = at_import(ast.parse(sources()[module].read_text()))
    eager = sorted(n for n in imports(tree) if n.split(".")[1] in ("services", "kernels"))
    assert not eager, f"{module} must import {', '.join(eager)} inside a function"


def test_command_modules_import_only_the_standard_library_eagerly():
    for module, path in sources().items():
        if module.startswith("flashmesh.commands."):
            eager = imports(at_import(ast.parse(path.read_text())))
            assert not eager, f"{module} imports {eager} eagerly; --help would be slow"


def test_the_law_is_not_vacuous():
    assert not allowed("flashmesh.kernels.engine", "flashmesh.services.decode")
    assert not allowed("flashmesh.services.decode.fetch", "flashmesh.services.prefill.service")
    assert not allowed("flashmesh.rpc", "flashmesh.kernels.door")
    assert allowed("flashmesh.services.decode.fetch", "flashmesh.services.decode.config")
    assert len(sources()) > 30
