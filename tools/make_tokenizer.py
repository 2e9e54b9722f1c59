"""Makes flashmesh/data/tokenizer.json: a small byte-level BPE with the released special tokens.

Trained on the Python standard library's sources, read in sorted order, with merges chosen by count
and then by id, so one Python version gives one file. Run it from the repository root:

    python tools/make_tokenizer.py [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from typing import TYPE_CHECKING

import deepseek_recipe
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB_SIZE = 4096
PAD = "<｜▁pad▁｜>"
IMAGE = "<｜image｜>"
NOISE = "<｜noise｜>"
OUTPUT = Path("flashmesh/data/tokenizer.json")
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def special_tokens() -> list[str]:
    """Begin, end and padding take ids 0, 1 and 2, as released; the rest follow by name."""
    kinds = deepseek_recipe.SpecialToken
    texts = {
        name: getattr(kinds, name).default_str()
        for name in sorted(vars(kinds))
        if isinstance(getattr(kinds, name), kinds)
    }
    first = [texts.pop("Bos"), texts.pop("Eos"), PAD]
    return list(dict.fromkeys([*first, *texts.values(), IMAGE, NOISE]))


def sources() -> Iterator[str]:
    """Yields the text of each module of the standard library, in path order, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="ignore")


def train() -> Tokenizer:
    """Trains the tokenizer; takes a few seconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            AddedToken(text, normalized=False, special=True) for text in special_tokens()
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources(), trainer)
    return tokenizer


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output = parser.parse_args().output
    train().save(str(output), pretty=False)


if __name__ == "__main__":
    main()
