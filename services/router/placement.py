"""Which worker takes a request: pure functions of what the router knows, lowest cost wins.

Costs are in seconds where a speed is known and in rows otherwise; each decision comes with its terms, for the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A worker as placement sees it.

    Attributes:
        id: its name; the last tie-breaker, so that equal routers decide alike.
        reported: load as the worker last said (rows or sequences).
        dispatched: load that this router has sent and not seen end; counted from the moment of dispatch, because
            the report is up to a heartbeat old.
        avoid: it failed this very request before.
    """

    id: str
    reported: float
    dispatched: float
    avoid: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen worker and what it would cost."""

    id: str
    cost: float


def place(views: Iterable[ReplicaView], added: float) -> Choice | None:
    """Chooses the worker with the least load after adding a request.

    Args:
        views: the candidates.
        added: rows that a prefill would run, or 1 for a sequence.

    Returns:
        None where there are no candidates. A worker that failed this request is chosen only if all did.
    """
    ranked = sorted(
        (view.avoid, max(view.reported, view.dispatched) + added, view.id) for view in views
    )
    return Choice(ranked[0][2], ranked[0][1]) if ranked else None
