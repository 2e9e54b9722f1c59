"""Which rows run next: a pure state machine. Events go in, a plan for one step comes out.

No clock, no thread, no engine: `stepping` carries plans out and reports what they gave. Plans may be made ahead, while
earlier ones still run; the machine then counts on every row to run and on every sequence to go on, and is told later
which did not.

Sequences are ordered by (priority, arrival), the first never waits for a later one, and it is never preempted, so
everybody gets done. Pages are taken as rows need them. Where none are left, the last in order gives its pages back and
starts again later, over the same rows, so no bit of it changes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashmesh.errors import NoFreeBlocks, Overloaded
from flashmesh.types import pages_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MIN_PROMPT_ROWS = 16
"""Prompt rows that a step takes however slow steps are: else a replay beside many streams would never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What sequences share.

    Attributes:
        num_pages: pages of a block each.
        num_slots: sequences with pages at once.
        max_rows: rows of a step, at least one a slot.
        max_waiting: sequences without pages; one more is refused.
        max_step_s: while streams run, prompt rows are cut so that a step is predicted to end within this.
    """

    num_pages: int
    num_slots: int
    max_rows: int
    max_waiting: int
    max_step_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a sequence is going to run.

    Attributes:
        first_row: position of its first row.
        num_known: rows [first_row, num_known) are known when it comes (prompt and forced tokens).
        max_tokens: it never runs a row at or after this position.
        num_stored: pages of [0, num_stored) are filled when it opens.
        generates: after the known rows it draws on, one row a step; else it ends with them.
        max_drafts: rows beside that one which it may have verified.
        priority: lower goes first.
        leads: it stops for a step before its last known row, so that others may copy its session there.
        follows: the sequence whose session it may copy instead of running the same prompt, and waits for.
    """

    first_row: int
    num_known: int
    max_tokens: int
    num_stored: int = 0
    generates: bool = False
    max_drafts: int = 0
    priority: int = 0
    leads: bool = False
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of one sequence: so many known ones, or, with `generating`, one and what drafts fit."""

    key: int
    rows: int
    generating: bool


@dataclass(slots=True)
class Plan:
    """One step, in this order.

    Attributes:
        close: give up; pages and slot are free then.
        preempt: likewise, to be opened again later.
        open: take a slot and pages, by copying the session of the second sequence where there is one.
        work: rows to run.
        num_drafts: most drafts to verify, all sequences together.
    """

    close: list[int] = field(default_factory=list)
    preempt: list[int] = field(default_factory=list)
    open: list[tuple[int, int | None]] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    num_drafts: int = 0

    def __bool__(self) -> bool:
        return bool(self.close or self.preempt or self.open or self.work)


@dataclass(slots=True)
class _Sequence:
    """State of one sequence; `position` and `known` are as last reported.

    Attributes:
        ahead: most rows of each planned step that was not reported yet.
        lost: planned steps from before a preemption, whose reports say nothing about rows.
    """

    key: int
    order: tuple[int, int]
    demand: Demand
    position: int
    known: int
    pages: int = 0
    running: bool = False
    ahead: deque[int] = field(default_factory=deque)
    lost: int = 0

    @property
    def num_pending(self) -> int:
        """Known rows that no plan covers."""
        return self.known - self.position - sum(self.ahead)

    @property
    def num_prompt_rows(self) -> int:
        """Known rows that the next step may run."""
        return self.num_pending - (self.demand.leads and self.known == self.demand.num_known)

    @property
    def generating(self) -> bool:
        return self.demand.generates and self.num_pending <= 1

    def may_end(self) -> bool:
        """Whether the planned steps reach its last row, were each to give one token only."""
        return self.position + len(self.ahead) >= self.demand.max_tokens

    def pages_for(self, rows: int) -> int:
        """Pages that it holds once it has run so many more rows."""
        end = min(self.demand.max_tokens, self.position + sum(self.ahead) + rows)
        return max(self.pages, pages_for(max(end, self.demand.num_stored)))


class Scheduler:
    """The state machine.

    Args:
        limits: what sequences share.
        rows_within: how many rows fit a time, at most the second argument (`speculation.StepCost.rows_within`).
    """

    def __init__(
        self,
        limits: Limits,
        rows_within: Callable[[float, int], int] = lambda seconds, most: most,
    ) -> None:
        self.limits = limits
        self._rows_within = rows_within
        self._sequences: dict[int, _Sequence] = {}
        self._leaving: list[int] = []
        self._num_submitted = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without pages."""
        return sum(not sequence.running for sequence in self._sequences.values())

    @property
    def num_running(self) -> int:
        """Sequences with pages."""
        return sum(sequence.running for sequence in self._sequences.values())

    @property
    def num_used_pages(self) -> int:
        """Pages that sequences hold once everything planned has run."""
        return sum(sequence.pages for sequence in self._sequences.values())

    @property
    def num_pending_rows(self) -> int:
        """Known rows that no plan covers."""
        return sum(max(0, sequence.num_pending) for sequence in self._sequences.values())

    def num_rows_left(self, key: int) -> int:
        """Rows that a sequence may still run, as last reported."""
        sequence = self._sequences[key]
        return sequence.demand.max_tokens - sequence.position

    def submit(self, demand: Demand) -> int:
        """Queues a sequence and returns its key.

        Raises:
            Overloaded: the queue is full.
            NoFreeBlocks: it would not fit if it were alone.
        """
        if self.num_waiting >= self.limits.max_waiting:
            raise Overloaded(f"{self.num_waiting} sequences are waiting already")
        needed = pages_for(demand.max_tokens)
        if needed > self.limits.num_pages:
            raise NoFreeBlocks(
                f"{demand.max_tokens} tokens need {needed} pages, this worker has "
                f"{self.limits.num_pages}"
            )
        self._num_submitted += 1
        key = self._num_submitted
        self._sequences[key] = _Sequence(
            key, (demand.priority, key), demand, demand.first_row, demand.num_known
        )
        return key

    def leave(self, key: int) -> None:
        """Takes a sequence out: cancelled, failed or done. Its pages are free in the next plan."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._leaving.append(key)

    def report(self, key: int, position: int, known: int) -> None:
        """Tells what a planned step gave a sequence: the next row's position, and how many tokens are known."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        sequence.known = max(sequence.known, known)
        if sequence.lost:
            sequence.lost -= 1
            return
        sequence.ahead.popleft()
        sequence.position = position

    def plan(self) -> Plan:
        """Plans one step; an empty plan means that there is nothing to do until the next event."""
        plan = Plan(close=self._leaving)
        self._leaving = []
        ordered = sorted(self._sequences.values(), key=lambda sequence: sequence.order)
        self._admit(ordered, plan)
        streams = [s for s in ordered if s.running and s.generating and not s.may_end()]
        prompts = [s for s in ordered if s.running and not s.generating and s.num_pending > 0]
        left = self.limits.max_rows - len(streams)
        for_drafts = sum(sequence.demand.max_drafts for sequence in streams)
        if streams:
            in_time = self._rows_within(self.limits.max_step_s, self.limits.max_rows)
            left = min(left, max(in_time - len(streams), MIN_PROMPT_ROWS if prompts else 0))
            # Drafts may claim half: speculation goes on beside a long replay.
            left_for_prompts = max(left // 2, left - for_drafts)
        else:
            left_for_prompts = left
        for sequence in (*streams, *prompts):
            if not sequence.running:  # preempted for one before it
                continue
            rows = 1 if sequence.generating else min(sequence.num_prompt_rows, left_for_prompts)
            if rows <= 0:
                continue
            drafts = sequence.demand.max_drafts if sequence.generating else 0
            if not self._grow(sequence, rows + drafts, ordered, plan):
                continue
            if not sequence.generating:
                left_for_prompts -= rows
                left -= rows
            plan.work.append(Work(sequence.key, rows, sequence.generating))
            sequence.ahead.append(rows + drafts)
        plan.num_drafts = max(0, min(left, for_drafts))
        return plan

    def _admit(self, ordered: Iterable[_Sequence], plan: Plan) -> None:
        """Opens waiting sequences in order until one does not fit."""
        for sequence in ordered:
            if sequence.running:
                continue
            leader = self._leader(sequence)
            if leader is not None and leader.num_pending > 1:
                continue  # soon it can be copied; the others need not wait for that
            if not self._make_room(sequence, ordered, plan):
                return
            sequence.running = True
            sequence.pages = self._pages_to_open(sequence)
            if leader is not None:
                sequence.position = sequence.known - 1
            plan.open.append((sequence.key, leader.key if leader else None))

    def _leader(self, sequence: _Sequence) -> _Sequence | None:
        """Returns whose session it can still copy: that of one which has not run its last known row."""
        leader = self._sequences.get(sequence.demand.follows or 0)
        fresh = sequence.known == sequence.demand.num_known and not sequence.lost
        if leader is None or not fresh or leader.num_pending < 1 or leader.known != sequence.known:
            return None
        return leader

    def _pages_to_open(self, sequence: _Sequence) -> int:
        """Pages of all that it knows: opened with fewer, it might have to leave before its first token."""
        return pages_for(max(sequence.known, sequence.demand.num_stored))

    def _make_room(self, sequence: _Sequence, ordered: Iterable[_Sequence], plan: Plan) -> bool:
        """Says whether a sequence can open, after taking room from lower priorities if need be."""
        while True:
            running = [other for other in ordered if other.running]
            free = self.limits.num_pages - sum(other.pages for other in running)
            # One page for everybody who runs, so that nobody has to leave because of the newcomer at once.
            enough = self._pages_to_open(sequence) + len(running) <= free
            if enough and len(running) < self.limits.num_slots:
                return True
            victim = max(running, key=lambda other: other.order, default=None)
            if victim is None or victim.demand.priority <= sequence.demand.priority:
                return False
            self._preempt(victim, plan)

    def _grow(
        self, sequence: _Sequence, rows: int, ordered: Iterable[_Sequence], plan: Plan
    ) -> bool:
        """Takes the pages that more rows need; says no if the sequence itself had to leave for want of them."""
        while True:
            needed = sequence.pages_for(rows)
            used = sum(other.pages for other in ordered if other.running)
            if used - sequence.pages + needed <= self.limits.num_pages:
                sequence.pages = needed
                return True
            victim = max((other for other in ordered if other.running), key=lambda s: s.order)
            self._preempt(victim, plan)
            if victim is sequence:
                return False

    def _preempt(self, sequence: _Sequence, plan: Plan) -> None:
        opened = [key for key, _ in plan.open]
        if sequence.key in opened:  # it never ran
            del plan.open[opened.index(sequence.key)]
        else:
            plan.preempt.append(sequence.key)
        planned = [work.key for work in plan.work]
        if sequence.key in planned:
            del plan.work[planned.index(sequence.key)]
            sequence.ahead.pop()
        sequence.running = False
        sequence.pages = 0
        sequence.lost += len(sequence.ahead)
        sequence.ahead.clear()
        sequence.position = sequence.demand.first_row
