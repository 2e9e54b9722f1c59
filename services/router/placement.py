"""Which worker takes a request: pure functions of what the router knows, in seconds; the lowest cost wins.

Load counts from the moment of dispatch: a report is up to a heartbeat old, so of what a worker said and what this
router has sent it and not seen end, the larger counts. Every decision comes with its terms, for the log. All hits are
remote, and cost every worker the same, so they are no term.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillView:
    """A prefill worker.

    Attributes:
        id: its name; the last tie-breaker, so that equal routers decide alike.
        reported_rows, dispatched_rows: rows it has to run.
        rows_per_s: its measured speed; 0 if it has not run any.
    """

    id: str
    reported_rows: float = 0.0
    dispatched_rows: float = 0.0
    rows_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeView:
    """A decode worker.

    Attributes:
        id: as in `PrefillView`.
        avoid: it failed this very request before, or gives other bits.
        kind: of hardware and software; workers of one kind take equal time for equal steps.
        reported_sequences, dispatched_sequences: that it runs.
        reported_pages, dispatched_pages: that they hold.
        num_pages: that it has.
        step_base_s, step_row_s: the fitted time of a step, and of each row in it; 0 if it has not run any.
    """

    id: str
    avoid: bool = False
    kind: str = ""
    reported_sequences: float = 0.0
    dispatched_sequences: float = 0.0
    reported_pages: float = 0.0
    dispatched_pages: float = 0.0
    num_pages: float = math.inf
    step_base_s: float = 0.0
    step_row_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen worker, and what its cost is made of."""

    id: str
    terms: Mapping[str, float]


def place_prefill(views: Iterable[PrefillView], rows: float) -> Choice | None:
    """Chooses who computes `rows` of a prompt.

    Returns:
        None where there are no candidates.
    """
    views = list(views)
    # One that has run nothing yet is taken to be as fast as the fastest: it is tried, and then known.
    fastest = max((view.rows_per_s for view in views), default=0.0) or 1.0
    costs = []
    for view in views:
        speed = view.rows_per_s or fastest
        queued = max(view.reported_rows, view.dispatched_rows)
        terms = {"queue_s": queued / speed, "compute_s": rows / speed}
        costs.append((sum(terms.values()), view.id, terms))
    if not costs:
        return None
    *_, id, terms = min(costs, key=lambda cost: cost[:2])
    return Choice(id, terms)


def place_decode(views: Iterable[DecodeView], pages: float, sequences: int = 1) -> Choice | None:
    """Chooses who runs a request's sequences, which hold `pages` when they start.

    Returns:
        None where there are no candidates. One to avoid is chosen only if all are; one whose pages do not suffice now,
        only if nobody's do.
    """
    views = list(views)
    lines = _step_lines(views)
    # A kind that has run nothing yet is tried; before anything is measured, a sequence counts as a second.
    unmeasured = min(lines.values(), default=(0.0, 1.0))
    costs = []
    for view in views:
        base_s, row_s = lines.get(view.kind, unmeasured)
        running = max(view.reported_sequences, view.dispatched_sequences) + sequences
        used = max(view.reported_pages, view.dispatched_pages)
        is_full = used + pages > view.num_pages
        terms = {"step_s": base_s + row_s * running, "full": math.inf if is_full else 0.0}
        # Where rows cost nothing measurable, the shorter queue still is the better one.
        costs.append((view.avoid, is_full, terms["step_s"], running, view.id, terms))
    if not costs:
        return None
    *_, id, terms = min(costs, key=lambda cost: cost[:5])
    return Choice(id, terms)


def _step_lines(views: Iterable[DecodeView]) -> dict[str, tuple[float, float]]:
    """Returns the base and the cost of a row of each kind of worker that has run steps: the medians.

    A row costs a few thousandths of a step. The noise of single fits would send dozens of sequences to whoever has the
    luckiest one, while a worker that really is slower keeps its sequences for longer and so gets fewer.
    """
    measured: defaultdict[str, list[DecodeView]] = defaultdict(list)
    for view in views:
        if view.step_base_s or view.step_row_s:
            measured[view.kind].append(view)
    return {
        kind: (median(v.step_base_s for v in same), median(v.step_row_s for v in same))
        for kind, same in measured.items()
    }
