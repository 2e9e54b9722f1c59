"""The step loop: one task that plans, and the one thread that touches a worker's device.

Requests submit a sequence and read what it produces from a ticket. The task asks `scheduling` for a plan, the thread
carries it out (close, open, run, commit), and the task reports the outcome and hands progress to the tickets. With a
pipeline of depth 2 the next plan waits at the thread's door while a step runs, so the device never waits for the event
loop; tokens are the same, since rows do not depend on who shares their step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import prometheus_client

from flashmesh.errors import Draining, FlashmeshError
from flashmesh.scheduling import Scheduler
from flashmesh.speculation import DraftGate, StepCost, choose_drafts
from flashmesh.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flashmesh.scheduling import Limits, Plan, Work
    from flashmesh.ticket import Steppable

log = logging.getLogger(__name__)

STEPS = prometheus_client.Counter("flashmesh_steps_total", "Engine steps.")
ROWS = prometheus_client.Counter("flashmesh_rows_total", "Rows run in steps.")
PREEMPTED = prometheus_client.Counter(
    "flashmesh_preempted_total", "Times a running sequence gave its pages back to go on later."
)
STEP_SECONDS = prometheus_client.Counter(
    "flashmesh_step_seconds_total", "Time by what it went to.", ["part"]
)
VERIFIED = prometheus_client.Counter(
    "flashmesh_drafts_verified_total", "Drafts run as rows, by place in their round.", ["place"]
)
ACCEPTED = prometheus_client.Counter(
    "flashmesh_drafts_accepted_total", "Drafts that were right, by place in their round.", ["place"]
)
DRAFTED = prometheus_client.Counter(
    "flashmesh_drafts_total", "Drafts proposed, by place in their round.", ["place"]
)
BATCH = prometheus_client.Histogram(
    "flashmesh_step_sequences", "Sequences in a step.", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)
RUNNING = prometheus_client.Gauge("flashmesh_running_sequences", "Sequences that hold pages.")
WAITING = prometheus_client.Gauge("flashmesh_waiting_sequences", "Sequences that wait for pages.")


class StepLoop:
    """Owner of a worker's sequences.

    Args:
        step: the engine's `step`, called on the device thread.
        limits: what sequences share.
        depth: plans under way at once: 1, or 2 to make the next one while a step runs.
        scheduled: propose and verify drafts where that is expected to pay; otherwise always, and all that fit.
    """

    def __init__(
        self,
        step: Callable[[Sequence[Any]], Sequence[Any]],
        limits: Limits,
        *,
        depth: int = 1,
        scheduled: bool = True,
    ) -> None:
        self._step = step
        self._cost = StepCost()
        self._gate = DraftGate()
        self._scheduler = Scheduler(limits, self._cost.rows_within)
        self._depth = depth
        self._scheduled = scheduled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._tickets: dict[int, Ticket] = {}
        self._work = asyncio.Event()

    def submit(
        self, sequence: Steppable, *, leads: bool = False, leader: Ticket | None = None
    ) -> Ticket:
        """Queues a sequence.

        Args:
            sequence: fresh.
            leads: others will name it their leader; submit them before anything is awaited.
            leader: a sequence over the same prompt, whose session this one may copy.

        Raises:
            Overloaded: the queue is full.
            NoFreeBlocks: it would not even fit alone.
        """
        ticket = Ticket(sequence, self._let_go)
        demand = replace(sequence.demand, leads=leads, follows=leader.key if leader else None)
        ticket.key = self._scheduler.submit(demand)
        self._tickets[ticket.key] = ticket
        self._count()
        self._work.set()
        return ticket

    @property
    def num_waiting(self) -> int:
        """Sequences without pages."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences with pages."""
        return self._scheduler.num_running

    @property
    def num_pending_rows(self) -> int:
        """Known rows that no plan covers yet."""
        return self._scheduler.num_pending_rows

    @property
    def step_line(self) -> tuple[float, float]:
        """Seconds that a step takes, and that each row of it adds, as fitted; zeros before the first step."""
        return self._cost.line

    @property
    def num_used_pages(self) -> int:
        """Pages that sequences hold once everything planned has run."""
        return self._scheduler.num_used_pages

    def rows_per_s(self, rows: int) -> float:
        """Returns the speed of steps of so many rows; 0 before the first step."""
        seconds = self._cost.predict(rows)
        return rows / seconds if seconds else 0.0

    def hand_over(self, seconds: float) -> int:
        """Ends what is not certain to be done in that time, so that others go on with it; returns how many.

        Raises in their readers:
            Draining: another worker goes on from the tokens that were emitted.
        """
        step_s = self._cost.predict(self._scheduler.num_running)
        leaving = [
            ticket
            for key, ticket in self._tickets.items()
            if not ticket.cancelled and self._scheduler.num_rows_left(key) * step_s > seconds
        ]
        for ticket in leaving:
            ticket.end(Draining("this worker is stopping"))
            ticket.close()
        return len(leaving)

    async def run(self) -> None:
        """Steps until cancelled."""
        loop = asyncio.get_running_loop()
        flying: deque[asyncio.Future[_Turn]] = deque()
        try:
            while True:
                while len(flying) < self._depth and (plan := self._plan()):
                    flying.append(
                        loop.run_in_executor(self._thread, self._turn, plan, self._tickets_of(plan))
                    )
                if flying:
                    # A step cannot be interrupted: shielded, it ends by itself, and closing waits for it.
                    self._apply(await asyncio.shield(flying[0]))
                    flying.popleft()
                else:
                    await self._work.wait()
                    self._work.clear()
        finally:
            held = list(self._tickets.values())
            await asyncio.shield(loop.run_in_executor(self._thread, _close, held))
            self._thread.shutdown(wait=True)
            for ticket in held:
                ticket.end(Draining("this worker has stopped"))

    def _let_go(self, ticket: Ticket) -> None:
        self._scheduler.leave(ticket.key)
        self._count()
        self._work.set()

    def _plan(self) -> Plan:
        begin = time.perf_counter()
        plan = self._scheduler.plan()
        STEP_SECONDS.labels("plan").inc(time.perf_counter() - begin)
        return plan

    def _tickets_of(self, plan: Plan) -> dict[int, Ticket]:
        """Returns the tickets that a plan names; those that it closes are named for the last time."""
        keys = {*plan.preempt, *(work.key for work in plan.work)}
        for key, leader in plan.open:
            keys |= {key} if leader is None else {key, leader}
        tickets = {key: self._tickets[key] for key in keys}
        return tickets | {key: self._tickets.pop(key) for key in plan.close}

    def _turn(self, plan: Plan, tickets: Mapping[int, Ticket]) -> _Turn:
        """Carries a plan out, on the device thread; changes nothing that the loop's side reads."""
        turn = _Turn()
        _close(tickets[key] for key in plan.close)
        # What has finished since the plan was made has no part in it.
        for ticket in (tickets[key] for key in plan.preempt):
            if not ticket.finished:
                PREEMPTED.inc()
                ticket.sequence.suspend()
        for key, leader_key in plan.open:
            leader = tickets[leader_key] if leader_key else None
            try:
                tickets[key].sequence.open(
                    leader.sequence if leader and not leader.finished else None
                )
            except Exception as error:
                turn.fail(tickets[key], error)
        work = [
            (tickets[item.key], item)
            for item in plan.work
            if not tickets[item.key].cancelled and not tickets[item.key].finished
        ]
        if work:
            self._run(work, plan.num_drafts, turn)
        return turn

    def _run(self, work: Sequence[tuple[Ticket, Work]], budget: int, turn: _Turn) -> None:
        """Runs one step and commits it."""
        offers = [ticket.sequence.confidences if item.generating else () for ticket, item in work]
        drafts = self._choose(offers, sum(item.rows for _, item in work), budget)
        propose = self._gate.draft() if self._scheduled else True
        runs = [
            ticket.sequence.rows(item.rows, count, propose=propose)
            for (ticket, item), count in zip(work, drafts, strict=True)
        ]
        begin = time.perf_counter()
        try:
            results = self._step(runs)
        except Exception as error:
            for ticket, _ in work:
                turn.fail(ticket, error)
            return
        turn.seconds = time.perf_counter() - begin
        turn.rows = sum(len(run.tokens) for run in runs)
        if all(item.generating for _, item in work):
            self._gate.observe(
                offered=any(offers),
                drafted=any(run.num_drafts for run in runs),
                streams=len(work),
                tokens=sum(len(result.drawn) for result in results),
                seconds=turn.seconds,
            )
        for (ticket, _), result in zip(work, results, strict=True):
            try:
                progress = ticket.sequence.commit(result)
            except FlashmeshError as error:  # its own: the others go on
                turn.fail(ticket, error)
                continue
            sequence = ticket.sequence
            turn.progress.append((ticket, progress, sequence.position, sequence.num_known))
            if progress.done:
                ticket.finished = True
                sequence.close()

    def _choose(self, offers: Sequence[Sequence[float]], rows: int, budget: int) -> list[int]:
        """Chooses how many drafts of each sequence to verify; `rows` run anyway."""
        streams = [place for place, offer in enumerate(offers) if offer]
        if self._scheduled:
            chosen = choose_drafts(
                [offers[place] for place in streams],
                other_rows=rows - len(streams),
                budget=budget,
                cost=self._cost,
            )
        else:
            chosen = []
            for place in streams:
                chosen.append(min(len(offers[place]), budget - sum(chosen)))
        counts = [0] * len(offers)
        for place, count in zip(streams, chosen, strict=True):
            counts[place] = count
        return counts

    def _apply(self, turn: _Turn) -> None:
        """Tells scheduler and tickets what a turn gave."""
        begin = time.perf_counter()
        for ticket, error in turn.failed.items():
            if not isinstance(error, FlashmeshError):
                log.error("a step failed", exc_info=error)
            self._scheduler.leave(ticket.key)
            ticket.end(error)
        for ticket, progress, position, num_known in turn.progress:
            self._scheduler.report(ticket.key, position, num_known)
            _count_drafts(progress)
            ticket.put(progress)
            if progress.done:
                self._scheduler.leave(ticket.key)
                ticket.end()
        self._count()
        if turn.rows:
            self._cost.observe(turn.rows, turn.seconds)
            STEPS.inc()
            ROWS.inc(turn.rows)
            BATCH.observe(len(turn.progress))
            STEP_SECONDS.labels("step").inc(turn.seconds)
        STEP_SECONDS.labels("stream").inc(time.perf_counter() - begin)

    def _count(self) -> None:
        RUNNING.set(self._scheduler.num_running)
        WAITING.set(self._scheduler.num_waiting)


@dataclass(slots=True)
class _Turn:
    """What carrying out a plan gave; `progress` comes with the sequence's position and number of known tokens."""

    failed: dict[Ticket, Exception] = field(default_factory=dict)
    progress: list[tuple[Ticket, Any, int, int]] = field(default_factory=list)
    rows: int = 0
    seconds: float = 0.0

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """Ends a sequence that cannot go on."""
        ticket.finished = True
        ticket.sequence.close()
        self.failed[ticket] = error


def _count_drafts(progress: Any) -> None:
    for counter, count in (
        (DRAFTED, progress.num_drafted),
        (VERIFIED, progress.num_verified),
        (ACCEPTED, progress.num_accepted),
    ):
        for place in range(count):
            counter.labels(place).inc()


def _close(tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        ticket.sequence.close()
