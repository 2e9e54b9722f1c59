"""`flashmesh secrets DIR`: the secrets of a deployment, drawn once and kept."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

NAMES = ("mesh_token", "redis_password")
NUM_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("folder", type=Path, metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Writes what is missing, readable by the owner only, and names each file."""
    from flashmesh.errors import ConfigError

    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            made = write_once(args.folder / name, secrets.token_urlsafe(NUM_BYTES))
            print(f"{args.folder / name}: {'made' if made else 'kept'}")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return 0


def write_once(path: Path, text: str) -> bool:
    """Writes a file of mode 0600 unless it exists; says whether it did.

    A reader never sees half a secret: the file is written aside and linked to its name, and of two
    writers one wins.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(text + "\n")
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True
