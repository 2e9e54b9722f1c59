"""The demo model's tokenizer: a byte-level BPE over its own training text.

It differs from the built-in tokenizer in two ways. Digits stand alone, as sums are learned digit by digit; and the
merges come from conversations as well as from source code, so that a declared tool takes half as many tokens.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from flashmesh.kernels.maker import built_in_tokenizer
from tools.make_tokenizer import VOCAB_SIZE, sources, special_tokens
from tools.train_demo.chats.chat import Renderer
from tools.train_demo.chats.mixture import chats

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_CHATS = 40_000
_SEED = 1


def train(built_in: Path) -> Tokenizer:
    """Trains the tokenizer; takes half a minute.

    Args:
        built_in: the built-in tokenizer.json, which renders the conversations.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = special_tokens()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(built_in, specials), trainer)
    return tokenizer


def _texts(built_in: Path, specials: list[str]) -> Iterator[str]:
    yield from sources()
    plain = Tokenizer.from_str(built_in_tokenizer())
    render = Renderer(built_in).render
    for chat in islice(chats(_SEED, held_out=False), NUM_CHATS):
        rendered = render(chat)
        text = plain.decode([*rendered.prompt, *rendered.answer], skip_special_tokens=False)
        for special in specials:
            text = text.replace(special, "\0")
        yield from text.split("\0")
