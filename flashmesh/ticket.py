"""A sequence in a step loop, from both sides: what the loop calls, and what the submitter reads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashmesh.scheduling import Demand


class Steppable(Protocol):
    """A sequence as the loop sees it (`flashmesh.kernels.sequence`); only `demand` is read off the device thread."""

    @property
    def demand(self) -> Demand:
        """What it is going to run, as of now; read once, when it is submitted."""

    @property
    def position(self) -> int:
        """Of the next row."""

    @property
    def num_known(self) -> int:
        """Tokens that may run as rows: prompt, forced and drawn ones."""

    @property
    def confidences(self) -> Sequence[float]:
        """Of the drafts that may be verified beside the next row; empty where there are none."""

    def open(self, leader: Any | None) -> None:
        """Takes a slot and pages; copies the session of `leader` if given."""

    def rows(self, count: int, num_drafts: int, *, propose: bool) -> Any:
        """Returns the next `count` known rows and so many drafts after them, as a run that proposes more or not."""

    def commit(self, result: Any) -> Any:
        """Returns the step's progress; its `done` ends the sequence."""

    def suspend(self) -> None:
        """Gives slot and pages back, to be opened again."""

    def close(self) -> None:
        """Gives slot and pages back for good; a second call does nothing."""


class Ticket:
    """A submitted sequence: iterate it for what its steps gave, close it to let go.

    Attributes:
        key: the scheduler's.
        cancelled: let go by its reader.
        finished: done or failed, and closed; set on the device thread, before the loop hears of it.
    """

    def __init__(self, sequence: Steppable, let_go: Callable[[Ticket], None]) -> None:
        self.sequence = sequence
        self.key = 0
        self.cancelled = False
        self.finished = False
        self._let_go = let_go
        self._events: list[Any] = []
        self._error: BaseException | None = None
        self._ended = False
        self._ready = asyncio.Event()

    def close(self) -> None:
        """Takes the sequence out before the next step; never waits, may be called twice."""
        if not self.cancelled:
            self.cancelled = True
            self._let_go(self)

    async def next(self) -> list[Any]:
        """Waits for progress and returns all of it since the last call; an empty list is the end.

        Raises:
            FlashmeshError: the sequence could not go on.
        """
        await self._ready.wait()
        self._ready.clear()
        events, self._events = self._events, []
        if self._ended:
            self._ready.set()
            if not events and self._error is not None:
                raise self._error
        return events

    def put(self, event: Any) -> None:
        """Adds progress (the loop's side)."""
        self._events.append(event)
        self._ready.set()

    def end(self, error: BaseException | None = None) -> None:
        """Marks the end (the loop's side)."""
        self._ended, self._error = True, error
        self._ready.set()
