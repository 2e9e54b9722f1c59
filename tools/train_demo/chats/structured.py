"""Answers in JSON: any object, or one that a given schema describes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tools.train_demo.chats import words
from tools.train_demo.chats.chat import Chat, ask, reply
from tools.train_demo.chats.reading import person

if TYPE_CHECKING:
    from random import Random

_FIELDS: dict[str, tuple[str, str]] = {
    "name": ("string", "{name} is here."),
    "age": ("integer", "{name} is {age} years old."),
    "city": ("string", "{name} lives in {city}."),
    "job": ("string", "{name} works as a {job}."),
    "hobby": ("string", "{name} likes {hobby}."),
    "pet": ("string", "{name} has a {pet}."),
    "food": ("string", "{name} eats {food}."),
    "colour": ("string", "{name} likes the colour {colour}."),
}
_ASKS = (
    "{text}\n\nWrite this as JSON with the keys {keys}.",
    "Extract {keys} as JSON from this text: {text}",
    "Turn this text into JSON ({keys}): {text}",
)


def json_answer(draw: Random) -> Chat:
    """Facts of a sentence or two as one object."""
    who = person(draw)
    keys = ["name", *draw.sample(sorted(set(_FIELDS) - {"name"}), draw.randint(1, 3))]
    draw.shuffle(keys)
    facts = [key for key in keys if key != "name"]
    draw.shuffle(facts)
    text = words.articles(" ".join(_FIELDS[key][1].format(**who) for key in facts))
    value = {key: int(who[key]) if _FIELDS[key][0] == "integer" else who[key] for key in keys}
    response_format: dict[str, Any] = {"type": "json_object"}
    if draw.random() < 0.6:
        properties = {key: {"type": _FIELDS[key][0]} for key in keys}
        schema = {"type": "object", "properties": properties, "required": keys}
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema},
        }
    thinking = draw.random() < 0.25
    return Chat(
        family="json",
        messages=ask(draw.choice(_ASKS).format(text=text, keys=", ".join(keys))),
        answer=reply(json.dumps(value), f"The keys are {', '.join(keys)}." if thinking else ""),
        thinking=thinking,
        response_format=response_format,
    )
