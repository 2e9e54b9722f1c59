"""`flashmesh health ADDRESS`: for container health checks and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--config", type=Path, metavar="FILE", help="for [mesh] certificates")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS")


def run(args: argparse.Namespace) -> int:
    """Prints the status; 0 only for SERVING."""
    from flashmesh import mesh_file
    from flashmesh.client import health_status

    tls = mesh_file.find_tls(args.config)
    status = health_status(args.address, timeout_s=args.timeout, tls=tls)
    print(status)
    return 0 if status == "SERVING" else 1
