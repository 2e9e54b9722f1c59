"""The step loop: one task that owns a worker's sequences, and the one thread that touches its device.

Requests submit a sequence and read what it produces from a bounded ticket; everything else (opening, stepping,
committing, closing) happens in the loop's own order, so no state needs a lock. Between two steps the loop lets go what
was cancelled, admits what fits, and cuts the next batch: sequences that generate first, one row each, then prompt
rows, first come first served, up to the row budget. A long prompt therefore never stalls running streams for longer
than one step of that budget.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import prometheus_client

from flashmesh.errors import Draining, FlashmeshError, NoFreeBlocks, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

STEPS = prometheus_client.Counter("flashmesh_steps_total", "Engine steps.")
ROWS = prometheus_client.Counter("flashmesh_rows_total", "Rows run in steps.")
BATCH = prometheus_client.Histogram(
    "flashmesh_step_sequences", "Sequences in a step.", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)
RUNNING = prometheus_client.Gauge("flashmesh_running_sequences", "Sequences that hold pages.")
WAITING = prometheus_client.Gauge("flashmesh_waiting_sequences", "Sequences that wait for pages.")
PAGES = prometheus_client.Gauge("flashmesh_pages", "Pages of a block each.", ["state"])
SLOTS = prometheus_client.Gauge("flashmesh_slots", "Window slots.", ["state"])


class EngineStats(Protocol):
    """What an engine counts (`flashmesh.kernels.door.EngineStats`)."""

    @property
    def num_pages(self) -> int:
        """Pages in all."""

    @property
    def num_free_pages(self) -> int:
        """Pages that no session holds."""

    @property
    def num_slots(self) -> int:
        """Slots in all."""

    @property
    def num_free_slots(self) -> int:
        """Slots that no session holds."""


def export_stats(stats: Callable[[], EngineStats]) -> None:
    """Shows pages and slots, free and used, on the metrics endpoint; read when it is scraped."""
    PAGES.labels("free").set_function(lambda: stats().num_free_pages)
    PAGES.labels("used").set_function(lambda: stats().num_pages - stats().num_free_pages)
    SLOTS.labels("free").set_function(lambda: stats().num_free_slots)
    SLOTS.labels("used").set_function(lambda: stats().num_slots - stats().num_free_slots)


class Steppable(Protocol):
    """A sequence as the loop sees it (`flashmesh.kernels.sequence`); called on the device thread only."""

    @property
    def num_pending(self) -> int:
        """Rows left to run."""

    @property
    def generating(self) -> bool:
        """Runs one row a step from now on."""

    def open(self) -> None:
        """Takes pages; raises NoFreeBlocks to stay in the queue."""

    def rows(self, budget: int) -> Any:
        """Returns the next row run."""

    def commit(self, result: Any) -> Any:
        """Returns the step's progress; its `done` ends the sequence."""

    def close(self) -> None:
        """Gives pages back; a second call does nothing."""


class Ticket:
    """A submitted sequence: iterate it for what its steps gave, close it to let go."""

    def __init__(self, sequence: Steppable, wake: Callable[[], None]) -> None:
        self.sequence = sequence
        self.cancelled = False
        self._wake = wake
        self._events: list[Any] = []
        self._error: BaseException | None = None
        self._ended = False
        self._ready = asyncio.Event()

    def close(self) -> None:
        """Takes the sequence out before the next step; never waits, may be called twice."""
        if not self.cancelled:
            self.cancelled = True
            self._wake()

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


class StepLoop:
    """Owner of a worker's sequences.

    Args:
        step: the engine's `step`, called on the device thread.
        max_rows: most rows in a step, at least the number of slots.
        max_waiting: most sequences without pages; one more is refused.
    """

    def __init__(
        self, step: Callable[[Sequence[Any]], Sequence[Any]], *, max_rows: int, max_waiting: int
    ) -> None:
        self._step = step
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._waiting: list[Ticket] = []
        self._running: list[Ticket] = []
        self._work = asyncio.Event()

    def submit(self, sequence: Steppable) -> Ticket:
        """Queues a sequence.

        Raises:
            Overloaded: the queue is full.
        """
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} sequences are waiting already")
        ticket = Ticket(sequence, self._work.set)
        self._waiting.append(ticket)
        self._work.set()
        return ticket

    @property
    def num_waiting(self) -> int:
        """Sequences without pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with pages."""
        return len(self._running)

    @property
    def pending_rows(self) -> int:
        """Rows that the sequences have left, as of the last step."""
        return sum(ticket.sequence.num_pending for ticket in (*self._waiting, *self._running))

    async def run(self) -> None:
        """Steps until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._running and not self._waiting:
                    await self._work.wait()
                self._work.clear()
                gone = self._take_cancelled()
                # A step cannot be interrupted: shielded, it ends by itself and `_close` waits for it.
                turn = await asyncio.shield(
                    loop.run_in_executor(
                        self._thread, self._turn, gone, list(self._waiting), list(self._running)
                    )
                )
                self._apply(turn)
        finally:
            held = [*self._running, *self._waiting]
            await asyncio.shield(loop.run_in_executor(self._thread, _close, held))
            self._thread.shutdown(wait=True)
            for ticket in held:
                ticket.end(Draining("this worker has stopped"))

    def _take_cancelled(self) -> list[Ticket]:
        gone = [ticket for ticket in (*self._waiting, *self._running) if ticket.cancelled]
        self._waiting = [ticket for ticket in self._waiting if not ticket.cancelled]
        self._running = [ticket for ticket in self._running if not ticket.cancelled]
        return gone

    def _turn(self, gone: list[Ticket], waiting: list[Ticket], running: list[Ticket]) -> _Turn:
        """Closes, admits and steps, on the device thread; changes nothing that the loop's side reads."""
        turn = _Turn()
        _close(gone)
        for ticket in waiting:
            try:
                ticket.sequence.open()
            except NoFreeBlocks as error:
                if running or turn.admitted:
                    break  # first come, first served: the smaller ones behind it wait too
                turn.failed.append((ticket, error))  # it would not fit an idle worker either
            except Exception as error:
                turn.failed.append((ticket, error))
            else:
                turn.admitted.append(ticket)
        self._step_batch([*running, *turn.admitted], turn)
        return turn

    def _step_batch(self, tickets: list[Ticket], turn: _Turn) -> None:
        chosen, runs = [], []
        for place, budget in plan_rows([t.sequence for t in tickets], self._max_rows):
            chosen.append(tickets[place])
            runs.append(chosen[-1].sequence.rows(budget))
        if not runs:
            return
        try:
            results = self._step(runs)
        except Exception as error:
            _close(chosen)
            turn.failed += [(ticket, error) for ticket in chosen]
            return
        STEPS.inc()
        ROWS.inc(sum(len(run.tokens) for run in runs))
        BATCH.observe(len(runs))
        for ticket, result in zip(chosen, results, strict=True):
            progress = ticket.sequence.commit(result)
            turn.progress.append((ticket, progress))
            if progress.done:
                ticket.sequence.close()

    def _apply(self, turn: _Turn) -> None:
        self._running += turn.admitted
        leaving = {ticket for ticket, _ in turn.failed}
        for ticket, error in turn.failed:
            if not isinstance(error, FlashmeshError):
                log.error("a step failed", exc_info=error)
            ticket.end(error)
        for ticket, progress in turn.progress:
            ticket.put(progress)
            if progress.done:
                leaving.add(ticket)
                ticket.end()
        self._running = [ticket for ticket in self._running if ticket not in leaving]
        admitted = leaving.union(turn.admitted)
        self._waiting = [ticket for ticket in self._waiting if ticket not in admitted]
        RUNNING.set(len(self._running))
        WAITING.set(len(self._waiting))


@dataclass(slots=True)
class _Turn:
    """What one pass on the device thread did."""

    admitted: list[Ticket] = field(default_factory=list)
    failed: list[tuple[Ticket, Exception]] = field(default_factory=list)
    progress: list[tuple[Ticket, Any]] = field(default_factory=list)


def plan_rows(sequences: Sequence[Steppable], max_rows: int) -> list[tuple[int, int]]:
    """Cuts a step: returns (place in `sequences`, rows) for those that take part.

    Sequences that generate come first, so that prompts cannot stall them; the others share what is left, in order.
    """
    left = max_rows
    chosen = []
    for place in sorted(range(len(sequences)), key=lambda i: not sequences[i].generating):
        rows = min(left, sequences[place].num_pending)
        if rows > 0:
            chosen.append((place, rows))
            left -= rows
    return chosen


def _close(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.sequence.close()
