"""`.flashmesh/mesh.json`: where `flashmesh up` says which mesh runs here, for other commands."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flashmesh import config
from flashmesh.config import MeshConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(".flashmesh")
PATH = FOLDER / "mesh.json"
DEFAULT_ADDRESS = "127.0.0.1:7100"


@contextlib.contextmanager
def announced(router: str, pids: dict[str, int], token_file: str) -> Iterator[None]:
    """Writes the file for the time of the body.

    Args:
        router: host:port.
        pids: process name to process id, the launcher's included.
        token_file: path of the mesh token, or an empty string.
    """
    text = json.dumps({"router": router, "token_file": token_file, "pids": pids}, indent=2) + "\n"
    temporary = PATH.with_suffix(f".{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(PATH)
    try:
        yield
    finally:
        # Another `up` in this folder may have written it since.
        with contextlib.suppress(FileNotFoundError):
            if PATH.read_text() == text:
                PATH.unlink()


def find_router(address: str | None, config_path: Path | None) -> tuple[str, str]:
    """Returns a router's address and the mesh token.

    What the caller says comes first, then the file, then the default address.

    Raises:
        ConfigError: the configuration or the token file cannot be read.
    """
    found = _read()
    mesh = config.load(config_path, {"mesh": MeshConfig})["mesh"]
    token = mesh.secret()
    if not token and address in (None, found.get("router")):
        token = MeshConfig(token_file=found.get("token_file", "")).secret()
    return address or found.get("router", DEFAULT_ADDRESS), token


def _read() -> dict[str, str]:
    try:
        content = json.loads(PATH.read_text())
    except (OSError, ValueError):
        return {}
    return {key: content[key] for key in ("router", "token_file") if key in content}
