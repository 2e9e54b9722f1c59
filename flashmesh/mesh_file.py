"""`.flashmesh/mesh.json`: where `flashmesh up` says which mesh runs here, for other commands."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flashmesh import config
from flashmesh.config import MeshConfig
from flashmesh.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashmesh.tls import Tls

FOLDER = Path(".flashmesh")
PATH = FOLDER / "mesh.json"
KEYS = ("router", "http", "token_file", "name", "redis_url")
DEFAULT_ADDRESS = "127.0.0.1:7100"
DEFAULT_HTTP = "127.0.0.1:7180"


@contextlib.contextmanager
def announced(
    router: str,
    pids: dict[str, int],
    token_file: str,
    *,
    http: str | None = None,
    name: str = "",
    redis_url: str = "",
) -> Iterator[None]:
    """Writes the file for the time of the body.

    Args:
        router: host:port.
        pids: process name to process id, the launcher's included.
        token_file: path of the mesh token, or an empty string.
        http: host:port of the router's HTTP server, if it has one.
        name: the mesh's, in its Redis.
        redis_url: of a private Redis; empty for one that the configuration names.
    """
    content = {
        "router": router,
        "http": http or "",
        "token_file": token_file,
        "name": name,
        "redis_url": redis_url,
        "pids": pids,
    }
    text = json.dumps(content, indent=2) + "\n"
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
    return _find("router", DEFAULT_ADDRESS, address, config_path)


def find_http(address: str | None, config_path: Path | None) -> tuple[str, str]:
    """Returns the address of a router's HTTP server and the mesh token, found like `find_router`.

    Raises:
        ConfigError: the configuration or the token file cannot be read.
    """
    return _find("http", DEFAULT_HTTP, address, config_path)


def find_tls(config_path: Path | None) -> Tls | None:
    """Returns the configured certificates of a mesh.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    mesh: MeshConfig = config.load(config_path, {"mesh": MeshConfig})["mesh"]
    return mesh.tls()


def find_redis(config_path: Path | None) -> tuple[str, str, str]:
    """Returns Redis URL and name of a mesh, and its token: the configured one's, else the one that is up here.

    Raises:
        ConfigError: neither names a Redis.
    """
    mesh = config.load(config_path, {"mesh": MeshConfig})["mesh"]
    found = _read()
    if mesh.redis_url:
        return mesh.redis(), mesh.name, mesh.secret()
    if not found.get("redis_url"):
        raise ConfigError(
            "no Redis: --config FILE with mesh.redis_url names one, and no mesh with its own is up here"
        )
    token = MeshConfig(token_file=found["token_file"]).secret()
    return found["redis_url"], found["name"], token


def _find(key: str, default: str, address: str | None, config_path: Path | None) -> tuple[str, str]:
    found = _read()
    mesh = config.load(config_path, {"mesh": MeshConfig})["mesh"]
    token = mesh.secret()
    if not token and address in (None, found.get(key)):
        token = MeshConfig(token_file=found.get("token_file", "")).secret()
    return address or found.get(key) or default, token


def _read() -> dict[str, str]:
    try:
        content = json.loads(PATH.read_text())
    except (OSError, ValueError):
        return {}
    return {key: content[key] for key in KEYS if key in content}
