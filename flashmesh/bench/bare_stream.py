"""The yardsticks for block transfers: a process that moves bytes over grpc.aio, or TCP, and does no more.

    python -m flashmesh.bench.bare_stream PARENT_PID PORTS_FILE CHUNK_BYTES NUM_CHUNKS

All chunks differ and are made before: it moves as many bytes through memory as the store has to, and
does nothing else with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
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
    from collections.abc import AsyncIterator, Iterator, Sequence

SERVICE = "flashmesh.bench.Bare"
READ = "Read"
WRITE = "Write"
START_LIMIT_S = 30.0
POLL_S = 0.02


class BareStream:
    """The server, as its peer sees it.

    Args:
        grpc_port, tcp_port: on this host.
        num_bytes: that it sends to a reader.
    """

    def __init__(self, grpc_port: int, tcp_port: int, num_bytes: int) -> None:
        self._address = f"127.0.0.1:{grpc_port}"
        self._tcp_port = tcp_port
        self.num_bytes = num_bytes

    async def read(self, channels: Channels) -> int:
        """Reads all chunks over gRPC; returns their bytes."""
        call = channels.get(self._address).unary_stream(f"/{SERVICE}/{READ}")(b"")
        total = 0
        async for chunk in call:
            total += len(chunk)
        return total

    async def write(self, channels: Channels, chunks: Sequence[bytes]) -> None:
        """Sends chunks over gRPC and waits for the answer."""
        await channels.get(self._address).stream_unary(f"/{SERVICE}/{WRITE}")(iter(chunks))

    def read_tcp(self) -> int:
        """Reads as many bytes over a TCP connection; returns their number."""
        buffer = bytearray(1 << 20)
        total = 0
        with socket.create_connection(("127.0.0.1", self._tcp_port)) as connection:
            while size := connection.recv_into(buffer):
                total += size
        return total


@contextlib.contextmanager
def running_bare_stream(folder: Path, *, chunk_bytes: int, num_chunks: int) -> Iterator[BareStream]:
    """Starts the process and stops it.

    Raises:
        WorkerLost: it ended or did not start in time.
    """
    ports_file = folder / "bare_ports"
    argv = [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(ports_file)]
    process = subprocess.Popen([*argv, str(chunk_bytes), str(num_chunks)], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not ports_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise WorkerLost("the bare stream's server did not start")
            time.sleep(POLL_S)
        grpc_port, tcp_port = json.loads(ports_file.read_text())
        yield BareStream(grpc_port, tcp_port, chunk_bytes * num_chunks)
    finally:
        process.kill()
        process.wait()


async def serve(ports_file: Path, chunk_bytes: int, num_chunks: int) -> None:
    """Serves until killed."""
    draw = random.Random(0)
    chunks = [draw.randbytes(chunk_bytes) for _ in range(num_chunks)]

    async def read(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def write(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        async for _ in requests:
            pass
        return b""

    async def write_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
        writer.close()

    handlers = {
        READ: grpc.unary_stream_rpc_method_handler(read),
        WRITE: grpc.stream_unary_rpc_method_handler(write),
    }
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tcp = await asyncio.start_server(write_tcp, "127.0.0.1", 0)
    temporary = ports_file.with_suffix(".tmp")
    temporary.write_text(json.dumps([grpc_port, tcp.sockets[0].getsockname()[1]]))
    temporary.replace(ports_file)
    await server.wait_for_termination()


def main() -> None:
    """Runs the server."""
    import uvloop

    parent, ports_file, chunk_bytes, num_chunks = sys.argv[1:]
    end_with_parent(int(parent))
    # uvloop, as in every service, so that the loop is no difference.
    uvloop.run(serve(Path(ports_file), int(chunk_bytes), int(num_chunks)))


if __name__ == "__main__":
    main()
