"""The yardstick for block transfers: a process that streams bytes over grpc.aio and does no more.

    python -m flashmesh.bench.bare_stream PARENT_PID PORT_FILE CHUNK_BYTES NUM_CHUNKS

It sends one buffer again and again, so its bytes stay in the processor's cache: a ceiling, not a
rival.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from flashmesh.commands.serve import end_with_parent
from flashmesh.errors import WorkerLost
from flashmesh.rpc import SERVER_OPTIONS, Channels

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SERVICE = "flashmesh.bench.Bare"
METHOD = "Stream"
START_LIMIT_S = 30.0
POLL_S = 0.02


class BareStream:
    """The server, as its reader sees it."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def read(self, channels: Channels) -> AsyncIterator[int]:
        """Reads all chunks and yields their sizes."""
        call = channels.get(self._address).unary_stream(f"/{SERVICE}/{METHOD}")(b"")
        async for chunk in call:
            yield len(chunk)


@contextlib.contextmanager
def running_bare_stream(folder: Path, *, chunk_bytes: int, num_chunks: int) -> Iterator[BareStream]:
    """Starts the process and stops it.

    Raises:
        WorkerLost: it ended or did not start in time.
    """
    port_file = folder / "bare_port"
    argv = [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(port_file)]
    process = subprocess.Popen([*argv, str(chunk_bytes), str(num_chunks)], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise WorkerLost("the bare stream's server did not start")
            time.sleep(POLL_S)
        yield BareStream(f"127.0.0.1:{port_file.read_text()}")
    finally:
        process.kill()
        process.wait()


async def serve(port_file: Path, chunk_bytes: int, num_chunks: int) -> None:
    """Serves until killed."""
    chunk = random.Random(0).randbytes(chunk_bytes)

    async def stream(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for _ in range(num_chunks):
            yield chunk

    handlers = {METHOD: grpc.unary_stream_rpc_method_handler(stream)}
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    temporary = port_file.with_suffix(".tmp")
    temporary.write_text(str(port))
    temporary.replace(port_file)
    await server.wait_for_termination()


def main() -> None:
    """Runs the server."""
    import uvloop

    parent, port_file, chunk_bytes, num_chunks = sys.argv[1:]
    end_with_parent(int(parent))
    # uvloop, as in every service, so that the loop is no difference.
    uvloop.run(serve(Path(port_file), int(chunk_bytes), int(num_chunks)))


if __name__ == "__main__":
    main()
