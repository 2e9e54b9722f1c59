"""`flashmesh keys FILE NAME`: draws an API key for a tenant.

The key is printed once; the file gets its hash and a random cache salt. A router reads the file when it starts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="made with mode 0600 if absent")
    parser.add_argument("name", metavar="NAME", help="the tenant: letters, digits, - and _")


def run(args: argparse.Namespace) -> int:
    """Appends to the file and prints the key."""
    from flashmesh.errors import ConfigError
    from flashmesh.services.router.http.keys import draw_key, load_tenants

    if not NAME.fullmatch(args.name):
        raise ConfigError(f"{args.name!r} is not a name: 1 to 64 letters, digits, - and _")
    if args.file.exists():
        tenants = load_tenants(args.file).values()
        if args.name in {tenant.name for tenant in tenants}:
            raise ConfigError(f"{args.file} has a key for {args.name} already")
    key, table = draw_key(args.name)
    args.file.touch(mode=0o600)
    with args.file.open("a") as file:
        file.write(table)
    print(key)
    return 0
