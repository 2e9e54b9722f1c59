"""Which conversations there are and how often each kind is drawn."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from tools.train_demo.chats import puzzles, reading, structured, talk, tool_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.train_demo.chats.chat import Chat

_SINGLE = (
    talk.about,
    puzzles.arithmetic,
    puzzles.lists,
    puzzles.word_play,
    puzzles.facts,
    reading.reading,
)


def dialogue(draw: Random) -> Chat:
    """A question after one or two others, which have nothing to do with it."""
    turns: list[Chat] = []
    last = draw.randint(2, 3)
    while len(turns) < last:
        chat = draw.choice(_SINGLE)(draw)
        if not chat.thinking and (not turns or chat.messages[0]["role"] == "user"):
            turns.append(chat)
    *before, final = turns
    history = [message for chat in before for message in (*chat.messages, chat.answer)]
    return replace(final, family="dialogue", messages=history + final.messages)


_FAMILIES = {
    talk.small_talk: 3,
    talk.hello_named: 2,
    talk.about: 4,
    talk.refusal: 1,
    puzzles.arithmetic: 18,
    puzzles.compare: 4,
    puzzles.counting: 3,
    puzzles.lists: 16,
    puzzles.word_play: 10,
    puzzles.facts: 5,
    reading.reading: 12,
    reading.recall: 6,
    reading.memory: 5,
    dialogue: 6,
    structured.json_answer: 8,
    tool_calls.tool_call: 6,
    tool_calls.tool_answer: 7,
    tool_calls.no_tool: 2,
}
"""Family to weight."""


def chats(seed: int, *, held_out: bool) -> Iterator[Chat]:
    """Yields conversations without end.

    Args:
        seed: of the draws.
        held_out: those that training never sees, or the others.
    """
    draw = Random(seed)
    families, weights = list(_FAMILIES), list(_FAMILIES.values())
    while True:
        (family,) = draw.choices(families, weights)
        chat = family(draw)
        if chat.held_out() == held_out:
            yield chat
