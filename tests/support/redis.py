"""Redis as tests need it: the claims of a node, and a server that goes away."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from flashmesh.index import claims_key
from flashmesh.redis_server import find_server
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import redis.asyncio


def claims_of(hashes: Iterable[bytes]) -> set[int]:
    """What a node that holds these blocks claims."""
    return {int.from_bytes(hash[:6]) for hash in hashes}


async def claimed(client: redis.asyncio.Redis, mesh: str, epoch: bytes) -> set[int] | None:
    """What the index holds for an epoch; None before its node has published all."""
    key = claims_key(mesh, epoch.hex())
    state = await client.get(key)
    num_buckets = int(state.split()[0]) if state else 0
    if not num_buckets:
        return None
    async with client.pipeline(transaction=False) as pipe:
        for bucket in range(num_buckets):
            pipe.smembers(f"{key}:{num_buckets}:{bucket}")
        return {int(claim) for members in await pipe.execute() for claim in members}


class Server:
    """A server that keeps nothing on disk and may be killed, started again and suspended."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._socket = folder / "redis.sock"
        self._options = options
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        """Starts an empty server and waits for it."""
        argv = [find_server(), "--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        argv += ["--appendonly", "no", "--dir", str(self._socket.parent), *self._options]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        with redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0)) as client:
            wait_until(lambda: _answers(client), "the server answers")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def suspend(self) -> None:
        """SIGSTOP: it takes connections and says nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running_server(*options: str) -> Iterator[Server]:
    """Runs a server; a socket's path may have about 100 bytes, so not in the test's own folder."""
    with tempfile.TemporaryDirectory(prefix="flashmesh-redis-") as folder:
        server = Server(Path(folder), *options)
        try:
            yield server
        finally:
            server.kill()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
