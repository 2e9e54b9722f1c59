"""`flashmesh bench NAME|all`: figures on a terminal and as JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("name", metavar="NAME", help="a benchmark, or all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Measures and reports."""
    from flashmesh.bench.registry import select
    from flashmesh.bench.report import report

    report(select(args.name), args.json)
    return 0
