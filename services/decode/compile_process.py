"""The parent's side of a process that compiles grammars: start it, ask it, kill it.

A message is a frame: a big-endian u32 length and so many bytes of JSON. `grammar_worker.py` is the other side.
"""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Any

from flashmesh.errors import FlashmeshError, InvalidRequest

if TYPE_CHECKING:
    from flashmesh.kernels.grammar import Vocabulary
    from flashmesh.types import GrammarSpec

WORKER_MODULE = "flashmesh.services.decode.grammar_worker"

LENGTH = struct.Struct(">I")

OUT_OF_MEMORY = "out of memory"
"""The error after which a process is replaced, as nobody knows what the failed compilation still holds."""

START_TIMEOUT_S = 120.0
"""Against hangs only: a process imports its libraries and spells the vocabulary, seconds on a busy machine."""


def encode(message: Any) -> bytes:
    """Returns a message as a frame."""
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def read(source: IO[bytes]) -> Any:
    """Reads a message; None at the end of the pipe."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = source.read(length)
    return json.loads(data) if len(data) == length else None


class CompileProcess:
    """One process, started when it is first needed.

    Args:
        timeout_s: longest compilation.
        memory_bytes: most memory of one, beyond what the process has when idle.
    """

    def __init__(self, *, timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """It has been started, and not been killed since."""
        return self._process is not None

    async def start(self, vocabulary: Vocabulary) -> None:
        """Starts it and waits until it is ready.

        Raises:
            FlashmeshError: it does not start.
        """
        self._process = process = _spawn()
        setup = {
            "tokenizer": vocabulary.tokenizer_json,
            "vocab_size": vocabulary.vocab_size,
            "eos_token_id": vocabulary.eos_token_id,
            "memory_bytes": self._memory_bytes,
            "timeout_s": self._timeout_s,
        }
        try:
            await _ask(process, setup, START_TIMEOUT_S)
        except (TimeoutError, EOFError, OSError) as error:
            await self.stop()
            raise FlashmeshError(
                f"the process that compiles grammars does not start (status {process.returncode})"
            ) from error

    async def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> str:
        """Compiles a grammar; whatever goes wrong, the next one finds a process in order.

        Returns:
            The packed grammar.

        Raises:
            InvalidRequest: it is not usable, or exceeds a limit.
        """
        if self._process is None:
            await self.start(vocabulary)
        assert self._process is not None
        request = {"kind": spec.kind.value, "text": spec.text}
        try:
            answer = await _ask(self._process, request, self._timeout_s)
        except TimeoutError:
            await self.stop()
            problem = f"takes longer than {self._timeout_s:g} s to compile"
        except (EOFError, OSError):
            await self.stop()
            problem = "is more than the compiler can take"
        else:
            if "grammar" in answer:
                return answer["grammar"]
            if answer["error"] != OUT_OF_MEMORY:
                raise InvalidRequest(answer["error"])
            await self.stop()
            problem = f"takes more than {self._memory_bytes >> 20} MiB to compile"
        raise InvalidRequest(f"the {spec.kind.value} grammar {problem}")

    async def stop(self) -> None:
        """Kills it, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.communicate)  # closes both pipes and waits for the end


def _spawn() -> subprocess.Popen[bytes]:
    """Starts the program; not the event loop's way, which forks: gRPC's fork handlers may crash such a child."""
    return subprocess.Popen(
        [sys.executable, "-m", WORKER_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is its parent's to handle
    )


async def _ask(process: subprocess.Popen[bytes], message: Any, timeout_s: float) -> dict[str, str]:
    """Sends a message and waits for the answer; after a time-out the thread that reads ends with the process."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.to_thread(_exchange, process, message)


def _exchange(process: subprocess.Popen[bytes], message: Any) -> dict[str, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(encode(message))
    process.stdin.flush()
    answer: dict[str, str] | None = read(process.stdout)
    if answer is None:
        raise EOFError
    return answer
