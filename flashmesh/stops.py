"""Stop strings: ends a text before the first of some strings, however the text is cut into pieces.

The one matcher of the project: the router runs it over streams, offline generation over its own. It looks at text
only; whoever produces the tokens is cancelled when `matched` is set. The match that ends first wins, so nothing has to
wait for a longer one; of several that end at the same character, the longest, so the most is trimmed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from flashmesh.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_STOPS = 16
MAX_STOP_CHARS = 256


def check_stops(stops: Sequence[str]) -> None:
    """Refuses what is not usable as stop strings.

    Raises:
        InvalidRequest: lists every problem.
    """
    problems = []
    if len(stops) > MAX_STOPS:
        problems.append(f"at most {MAX_STOPS} stop strings are allowed, not {len(stops)}")
    problems += [
        f"stop string {place} must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}"
        for place, stop in enumerate(stops)
        if not 1 <= len(stop) <= MAX_STOP_CHARS
    ]
    if problems:
        raise InvalidRequest("; ".join(problems))


class StopMatcher:
    """Finds stop strings in a text that comes in pieces.

    Args:
        stops: strings of at least one character; none matches nothing.
        include: keep the matched string at the end of the text.

    Attributes:
        matched: the string that ended the text; nothing is shown after it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """Adds a piece and returns what may be shown: all but an end that may become a stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        if found := self._first_match(text):
            end, start, self.matched = found
            self._held = ""
            return text[: end if self._include else start]
        shown = self._first_candidate(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Ends the text and returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """Returns (end, start, string) of the match that ends first, the longest of those."""
        found = ((text.find(stop), stop) for stop in self._stops)
        return min(
            ((start + len(stop), start, stop) for start, stop in found if start >= 0), default=None
        )

    def _first_candidate(self, text: str) -> int:
        """Returns where the longest end of `text` begins that is the beginning of a stop string."""
        first = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < first:
                if stop.startswith(text[start:]):
                    first = start
                start = text.find(stop[0], start + 1)
        return first


class TokenText(Protocol):
    """Turns tokens into text as soon as it is certain (`flashmesh.services.router.text.TextStream`)."""

    def push(self, tokens: list[int]) -> str:
        """Adds tokens and returns the text that became certain."""

    def finish(self) -> str:
        """Returns what is left."""


class StoppedText:
    """The text of a stream of tokens up to a stop string.

    Args:
        text: of the tokens, from its beginning.
        stops: see `StopMatcher`.
        include: see `StopMatcher`.
    """

    def __init__(self, text: TokenText, stops: Sequence[str], *, include: bool = False) -> None:
        self._text = text
        self._matcher = StopMatcher(stops, include=include)

    @property
    def matched(self) -> str | None:
        """The string that ended the text."""
        return self._matcher.matched

    def push(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Adds tokens.

        Returns:
            The text to show, and how many of the tokens are part of the answer: the one that completes a stop string
            is the last. The others are an overrun, neither sent nor counted.
        """
        shown = []
        for count, token in enumerate(tokens, 1):
            shown.append(self._matcher.push(self._text.push([token])))
            if self.matched is not None:
                return "".join(shown), count
        return "".join(shown), len(tokens)

    def finish(self) -> str:
        """Returns the text that was held back, unless a stop string ended it."""
        if self.matched is not None:
            return ""
        return self._matcher.push(self._text.finish()) + self._matcher.finish()
