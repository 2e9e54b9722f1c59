"""`flashmesh model make-demo OUT`: the small built-in checkpoint as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    text = "write the built-in checkpoint (random weights) below OUT and print its folder"
    make_demo = actions.add_parser("make-demo", help=text, description=text)
    make_demo.add_argument("out", type=Path, metavar="OUT")


def run(args: argparse.Namespace) -> int:
    """Makes the checkpoint where it is not there yet."""
    from flashmesh.kernels.demo import demo_checkpoint

    print(demo_checkpoint(args.out))
    return 0
