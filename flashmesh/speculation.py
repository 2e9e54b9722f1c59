"""How many drafts are worth verifying: acceptance that is expected, against time that a row costs.

Tokens are the same for every choice (sampling is coupled), so the choice may use the newest confidences and measured
times; it decides about speed only. The idea is DSpark's confidence-scheduled verification.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORGETTING = 0.98
"""Weight that an observation keeps at the next one: about fifty steps are remembered."""


class StepCost:
    """Time of a step by its rows: a line, fitted by least squares that forget.

    Not a table by size: one slow step would make its size look bad, and as nobody chose it again, for good.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._time = self._rows_rows = self._rows_time = 0.0
        self.line = (0.0, 0.0)
        """Base and slope in seconds; replaced as one, since it is read on another thread."""
        self._most_rows = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Counts a step."""
        self._most_rows = max(rows, _FORGETTING * self._most_rows)
        self._weight = _FORGETTING * self._weight + 1
        self._rows = _FORGETTING * self._rows + rows
        self._time = _FORGETTING * self._time + seconds
        self._rows_rows = _FORGETTING * self._rows_rows + rows * rows
        self._rows_time = _FORGETTING * self._rows_time + rows * seconds
        self.line = self._fit()

    def predict(self, rows: int) -> float:
        """Returns the seconds that a step of so many rows takes; 0 before the first observation."""
        base, slope = self.line
        return base + slope * rows

    def rows_within(self, seconds: float, most: int) -> int:
        """Returns how many rows a step of that time may have, at most `most`, at least 0.

        At most twice what was tried of late: what larger steps cost is not known.
        """
        base, slope = self.line
        if self._most_rows:
            most = min(most, int(2 * self._most_rows))
        if base + slope * most <= seconds:
            return most
        return max(0, int((seconds - base) / slope)) if slope else 0

    def _fit(self) -> tuple[float, float]:
        """Returns base and slope, neither negative: rows never cost less than nothing."""
        rows, time = self._rows / self._weight, self._time / self._weight
        variance = self._rows_rows / self._weight - rows * rows
        covariance = self._rows_time / self._weight - rows * time
        # All steps of one size say nothing about another size.
        slope = max(0.0, covariance / variance) if variance > 1e-9 * rows * rows else 0.0
        if slope * rows > time:
            return 0.0, time / rows
        return time - slope * rows, slope


class DraftGate:
    """Whether drafting pays at all, by measurement: tokens that a step with drafts gives, against time that it adds.

    Steps of the other kind are tried now and then, a few in a row, so that the answer may change.
    """

    PERIOD = 64
    TRIAL = 4

    def __init__(self) -> None:
        self._plain = StepCost()
        self._tokens = self._slowdown = 1.0
        self._num_decisions = 0

    def draft(self) -> bool:
        """Decides about the next step."""
        self._num_decisions += 1
        trial = self._num_decisions % self.PERIOD < self.TRIAL
        pays = self._tokens >= self._slowdown
        return pays is not trial

    def observe(
        self, *, offered: bool, drafted: bool, streams: int, tokens: int, seconds: float
    ) -> None:
        """Counts a step of streams alone.

        Args:
            offered: the step had drafts that it might verify.
            drafted: it proposed drafts for the next.
            streams: sequences in it.
            tokens: that it gave.
            seconds: that it took.
        """
        if not offered and not drafted:
            self._plain.observe(streams, seconds)
        plain_s = self._plain.predict(streams)
        if offered and drafted and plain_s:
            self._tokens += 0.1 * (tokens / streams - self._tokens)
            self._slowdown += 0.1 * (seconds / plain_s - self._slowdown)


def choose_drafts(
    confidences: Sequence[Sequence[float]], *, other_rows: int, budget: int, cost: StepCost
) -> list[int]:
    """Chooses how many drafts of each sequence to verify, so that tokens a second are most.

    A draft counts if all before it do, so its chance is the product of the confidences up to it. Drafts join in order
    of that chance, and the number that gives the best expected rate wins; the fewest of equally good ones.

    Args:
        confidences: of each generating sequence's drafts, in order; each sequence runs one row anyway.
        other_rows: rows that the step runs besides (prompts).
        budget: most drafts in all.
        cost: of a step.

    Returns:
        A number for each sequence, at most that of its confidences.
    """
    chances = sorted(
        (-chance, sequence, depth)
        for sequence, of_sequence in enumerate(confidences)
        for depth, chance in enumerate(accumulate(of_sequence, mul))
    )[: max(0, budget)]
    rows = other_rows + len(confidences)
    expected, best_rate, best = float(len(confidences)), 0.0, 0
    for count, chance in enumerate((0.0, *(-chance for chance, _, _ in chances))):
        expected += chance
        rate = expected / max(cost.predict(rows + count), 1e-9)
        if rate > best_rate:
            best_rate, best = rate, count
    chosen = [0] * len(confidences)
    for _, sequence, _ in chances[:best]:
        chosen[sequence] += 1
    return chosen
