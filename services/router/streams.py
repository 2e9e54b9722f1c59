"""Server streams from workers, with failures as flashmesh errors and silence as a failure."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import grpc.aio

from flashmesh.errors import Overloaded, WorkerFailed, WorkerLost, from_rpc_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from flashmesh.registry import WorkerRecord


class WorkerStream:
    """One open call to one worker; leaving the context cancels what has not ended.

    Args:
        worker: who answers.
        call: the open call.
        stall_s: longest silence that counts as work.
        blame: told the worker's epoch when it is lost, failed or overloaded.
        watch: shown every message, and None at the end.
    """

    def __init__(
        self,
        worker: WorkerRecord,
        call: grpc.aio.UnaryStreamCall,
        stall_s: float,
        blame: Callable[[str], None],
        watch: Callable[[Any], None] = lambda message: None,
    ) -> None:
        self._worker = worker
        self._call = call
        self._stall_s = stall_s
        self._blame = blame
        self._watch = watch

    async def read(self, *, patient: bool = False) -> Any | None:
        """Returns the next message, None at the end.

        Args:
            patient: silence is no failure (somebody else watches over the work that this waits for).

        Raises:
            FlashmeshError: what the worker raised, or WorkerLost where it broke or fell silent.
        """
        try:
            async with asyncio.timeout(None if patient else self._stall_s):
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    await self._call.code()
                    self._watch(None)
                    return None
                self._watch(message)
                return message
        except TimeoutError as error:
            self._blame(self._worker.epoch)
            raise WorkerLost(f"{self._who()}: silent for {self._stall_s} s") from error
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, self._who())
            if isinstance(failure, WorkerLost | WorkerFailed | Overloaded):
                self._blame(self._worker.epoch)
            raise failure from error

    def _who(self) -> str:
        return f"{self._worker.role} {self._worker.id}"

    async def drain(self) -> None:
        """Reads to the end and drops the messages."""
        while await self.read() is not None:
            pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._call.cancel()


async def read_beside(main: WorkerStream, side: WorkerStream | None) -> AsyncGenerator[Any, None]:
    """Yields `main`'s messages; while `side` still runs, its failure ends the iteration at once.

    Raises:
        FlashmeshError: the first failure of either stream.
    """
    watch = asyncio.ensure_future(side.drain()) if side else None
    try:
        while True:
            if watch is None or watch.done():
                message = await main.read()
            else:
                message = await _first(main, watch)
            if message is None:
                return
            yield message
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


async def _first(main: WorkerStream, watch: asyncio.Future[None]) -> Any | None:
    read = asyncio.ensure_future(main.read(patient=True))
    try:
        await asyncio.wait({read, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and not read.done():
            watch.result()  # raises what ended the side stream
            await asyncio.wait({read})
        return await read
    finally:
        if not read.done():
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)
