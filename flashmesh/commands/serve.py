"""`flashmesh router|prefill|decode|kvstore`: one service in this process, until SIGTERM."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that all services share."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file (docs/running.md)")
    # For launchers: end with this process, even when it is killed.
    parser.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the service."""
    if args.parent is not None:
        end_with_parent(args.parent)
    importlib.import_module(f"flashmesh.services.{args.service}.__main__").main(args.config)
    return 0


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, whatever ends it.

    Elsewhere than on Linux this does nothing: there only an orderly end of the launcher stops its
    children.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the line above
        sys.exit(f"flashmesh: the parent {parent} is gone")
