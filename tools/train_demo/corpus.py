"""The training data: rendered conversations, little tales, and the sources of Python's standard library.

Of each kind a share is held out: conversations by a hash of their messages, modules by a hash of their path. The
standard library is copyright Python Software Foundation, under the PSF License Agreement.
"""

from __future__ import annotations

import hashlib
import sysconfig
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from tools.make_tokenizer import SKIPPED_FOLDERS
from tools.train_demo.chats.chat import HELD_OUT_OF, Renderer
from tools.train_demo.chats.mixture import chats
from tools.train_demo.chats.stories import story
from tools.train_demo.packing import COUNTED, Documents

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

TEXT_TOKENS = 1024
"""Most tokens of a piece of source code."""
CHATS_FOR_A_STORY = 12


def conversations(tokenizer: Path, count: int, *, seed: int) -> Documents:
    """Draws and renders conversations, with a tale after every few.

    Args:
        tokenizer: path of tokenizer.json.
        count: of conversations.
        seed: of the draws.
    """
    renderer, plain = Renderer(tokenizer), Tokenizer.from_file(str(tokenizer))
    draw = Random(seed)
    (end,) = plain.encode("<｜end▁of▁sentence｜>").ids

    def documents() -> Iterator[NDArray[np.uint16]]:
        for number, chat in enumerate(islice(chats(seed, held_out=False), count)):
            rendered = renderer.render(chat)
            ids = np.array([*rendered.prompt, *rendered.answer], dtype=np.uint16)
            yield ids | np.array(rendered.counted, dtype=np.uint16) * np.uint16(COUNTED)
            if number % CHATS_FOR_A_STORY == 0:
                yield np.array([*plain.encode(story(draw)).ids, end], dtype=np.uint16) | np.uint16(
                    COUNTED
                )

    return gather(documents())


def source_code(tokenizer: Path, *, held_out: bool) -> Documents:
    """Cuts the standard library's modules into pieces; all their tokens count."""
    plain = Tokenizer.from_file(str(tokenizer))

    def documents() -> Iterator[NDArray[np.uint16]]:
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if SKIPPED_FOLDERS & set(relative.parts) or is_held_out(str(relative)) != held_out:
                continue
            ids = plain.encode(path.read_text(encoding="utf-8", errors="ignore")).ids
            for begin in range(0, len(ids), TEXT_TOKENS):
                yield np.array(ids[begin : begin + TEXT_TOKENS], dtype=np.uint16) | np.uint16(
                    COUNTED
                )

    return gather(documents())


def is_held_out(path: str) -> bool:
    """Whether training must not see this module."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % HELD_OUT_OF == 0


def gather(documents: Iterable[NDArray[np.uint16]]) -> Documents:
    """Joins documents."""
    parts = list(documents)
    return Documents(np.concatenate(parts), np.cumsum([len(part) for part in parts]))
