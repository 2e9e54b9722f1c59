"""Tells the markup of tool calls from text that only looks like it, before the parser sees either.

deepseek-recipe's parser takes everything after `<｜DSML｜ calls>` for calls and drops what is none, so a malformed
wrapper would swallow the answer. Therefore the parser is told that the marker is spelled as a character that no text
has, and this gate decides which marker tokens of the model it gets in that spelling: those of a block that begins as a
block must, and all that follow up to its end. Any other marker reaches the parser as the text that it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import deepseek_recipe as dr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashmesh.services.router.text import TextCodec

    Logprob = tuple[float, list[tuple[int, float]]]

DSML = dr.SpecialToken.Dsml.default_str()
MARK = "\U0010ffff"
"""The marker as the parser knows it: a noncharacter, which Unicode keeps out of any text."""

_OPENING = f'{DSML} calls>\n<{DSML} invoke name="'
_NAME = re.compile(r'[^"\n]{1,256}">')
_MAX_NAME = 258
_END = f"</{DSML} calls>"


@dataclass(frozen=True, slots=True)
class Item:
    """A token on its way to the parser.

    Attributes:
        marker: the parser gets `MARK` in its place.
    """

    token: int
    logprob: Logprob | None = None
    marker: bool = False


class CallGate:
    """The gate of one answer.

    Args:
        codec: the model's tokenizer.
        inside: the prompt has opened a block of calls.
    """

    def __init__(self, codec: TextCodec, *, inside: bool) -> None:
        (self._dsml,) = codec.recipe.encode(DSML)
        self._inside = inside
        self._text = codec.stream()
        self._tail = ""
        self._held: list[Item] = []
        self._opening = ""

    def push(self, item: Item) -> list[Item]:
        """Takes a token and returns those whose nature is clear by now."""
        text = self._text.push([item.token])
        if self._held:
            self._held.append(item)
            self._opening += text
            return self._judged()
        if self._inside:
            self._tail = (self._tail + text)[-len(_END) :]
            self._inside = self._tail != _END
            return [self._as_marker(item)]
        if item.token == self._dsml and self._tail.endswith("<"):
            self._held, self._opening = [item], text
            return []
        self._tail = (self._tail + text)[-1:]
        return [item]

    def finish(self) -> list[Item]:
        """Returns what is held: a block that never began is text."""
        held, self._held = self._held, []
        return held

    def _judged(self) -> list[Item]:
        """Lets the held tokens go once it is clear whether a block begins with them."""
        opening = self._opening
        name = opening.removeprefix(_OPENING)
        if name == opening:
            possible = _OPENING.startswith(opening)
        elif _NAME.match(name):
            self._inside, self._tail = True, ""
            return [self._as_marker(item) for item in self.finish()]
        else:
            possible = "\n" not in name and len(name) < _MAX_NAME
        if possible:
            return []
        self._tail = opening[-1:]
        return self.finish()

    def _as_marker(self, item: Item) -> Item:
        return Item(item.token, item.logprob, marker=item.token == self._dsml)


def chunks(items: list[Item], *, with_logprobs: bool) -> Iterator[dr.InferenceChunk]:
    """Yields what to push: tokens in runs, and markers as text."""
    run: list[Item] = []
    for item in items:
        if not item.marker:
            run.append(item)
            continue
        if run:
            yield _tokens(run, with_logprobs=with_logprobs)
            run = []
        yield dr.InferenceChunk.text(MARK, 1)
    if run:
        yield _tokens(run, with_logprobs=with_logprobs)


def _tokens(items: list[Item], *, with_logprobs: bool) -> dr.InferenceChunk:
    logprobs = [item.logprob for item in items if item.logprob] if with_logprobs else None
    return dr.InferenceChunk.tokens([item.token for item in items], logprobs)
