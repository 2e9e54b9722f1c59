"""Which block goes first: a pure function of how a block has been used.

The table computes a block's priority when it is used and evicts the lowest. It gives ancestors at
least the priority of their descendants, so that within a run the leaf goes before what it depends on.

Least recently used keeps a block that nobody asks for again for as long as any other: for the
*horizon*, from its use until the floor has risen to that time. Here a block earns its horizon: each use
is worth two fifths of it, and what has been used three times is kept as long as LRU would keep it. The
horizon follows load and capacity by itself. docs/kvstore.md has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

HORIZON_PER_USE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How a block has been used so far.

    Attributes:
        num_uses: times it was put or read, remembered for a while after an eviction.
        last_use: the table's clock (it counts requests) at the latest use.
        previous_use: at the one before; 0 if there was none.
        position: of its first token in the prompt.
    """

    num_uses: int
    last_use: int
    previous_use: int
    position: int


def priority(usage: Usage, floor: float) -> float:
    """Returns the priority of a block that is used now; the lowest is evicted first.

    Args:
        usage: with this use counted.
        floor: the priority of the latest eviction, 0 before the first; never above `last_use`.
    """
    horizon = usage.last_use - floor
    return floor + min(1.0, HORIZON_PER_USE * usage.num_uses) * horizon
