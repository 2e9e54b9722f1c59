"""The held-out set that ships with the checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.train_demo.chats.mixture import chats
from tools.train_demo.corpus import gather, source_code
from tools.train_demo.packing import COUNTED, Documents

if TYPE_CHECKING:
    from pathlib import Path

    from tools.train_demo.chats.chat import Chat, Renderer

NUM_CHATS, NUM_TOOL_CALLS = 160, 40
NUM_PIECES, PIECE_TOKENS = 12, 512
_SEED = 11


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What training never sees: 200 conversations, 40 of them a tool call, and pieces of source code."""

    chats: list[Chat]
    code: Documents


def draw(tokenizer: Path) -> HeldOut:
    """Draws the set; `tokenizer` is the path of tokenizer.json."""
    drawn = chats(_SEED, held_out=True)
    calls = [chat for chat in islice(drawn, 900) if chat.family == "tool_call"]
    others = [chat for chat in islice(drawn, 200) if chat.family != "tool_call"]
    code = source_code(tokenizer, held_out=True)
    step = max(1, len(code) // NUM_PIECES)
    pieces = [code.document(place)[:PIECE_TOKENS] for place in range(0, len(code), step)]
    return HeldOut([*others[:NUM_CHATS], *calls[:NUM_TOOL_CALLS]], gather(pieces[:NUM_PIECES]))


def describe(held_out: HeldOut, renderer: Renderer) -> dict[str, Any]:
    """Returns the set as `flashmesh bench demo` reads it.

    Returns:
        `chats`: for each its family, the request's body, the answer as a message and as ids, and whether that is the
        only right one; `code`: token ids of each piece.
    """
    code = held_out.code
    return {
        "chats": [
            {
                "family": chat.family,
                "exact": chat.exact,
                "body": chat.body(),
                "answer": chat.answer,
                "answer_ids": renderer.render(chat).answer,
            }
            for chat in held_out.chats
        ],
        "code": [(code.document(i) & (COUNTED - 1)).tolist() for i in range(len(code))],
    }


def answers(held_out: HeldOut, renderer: Renderer) -> Documents:
    """Returns the conversations as documents of which the answer counts, and no turn before it."""
    found = []
    for chat in held_out.chats:
        rendered = renderer.render(chat)
        ids = np.array([*rendered.prompt, *rendered.answer], dtype=np.uint16)
        ids[len(rendered.prompt) :] |= COUNTED
        found.append(ids)
    return gather(found)


def write(path: Path, evaluation: dict[str, Any]) -> None:
    """Writes the set, a conversation a line, so that it can be read and compared."""
    parts = []
    for key, value in evaluation.items():
        if isinstance(value, list):
            lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in value)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
