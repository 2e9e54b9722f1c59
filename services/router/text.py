"""Text to tokens and back, the only place where the router knows what a token says."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import deepseek_recipe
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from flashmesh.data import shipped_tokenizer
from flashmesh.errors import CheckpointError

if TYPE_CHECKING:
    from flashmesh.config import ModelSection


class TextCodec:
    """A checkpoint's tokenizer; any number of threads may use it at once.

    Args:
        tokenizer_json: text of the checkpoint's tokenizer.json.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.encode_special_tokens = True  # their text is ordinary text

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def recipe(self) -> deepseek_recipe.Tokenizer:
        """The same tokenizer as deepseek-recipe takes it: with the text of special tokens as these tokens."""
        return deepseek_recipe.Tokenizer.from_str(self._json)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Returns the ids of a text; without `parse_special`, "<|eos|>" is just seven characters.

        Other threads run meanwhile.
        """
        if parse_special:
            return self.recipe.encode(text)
        # Of the library's ways to encode, this one alone lets other threads run.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens, special ones included."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def stream(self) -> TextStream:
        """Starts turning a stream of tokens into text."""
        return TextStream(self._tokenizer)


class TextStream:
    """Tokens in, text out as soon as it is certain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._pending: list[int] = []

    def push(self, tokens: list[int]) -> str:
        """Adds tokens and returns the text that became certain; half a character waits for its other half."""
        parts = []
        for token in tokens:
            self._pending.append(token)
            text = self._decode.step(self._tokenizer, token)
            if text is not None:
                parts.append(text)
                self._pending.clear()
        return "".join(parts)

    def finish(self) -> str:
        """Returns what is left; bytes that never became a character show as U+FFFD."""
        if not self._pending:
            return ""
        return self._tokenizer.decode(self._pending, skip_special_tokens=False)


def load_codec(model: ModelSection) -> TextCodec:
    """Loads the tokenizer of the configured model.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = shipped_tokenizer(model.path) or _tokenizer_file(model)
    try:
        return TextCodec(path.read_text())
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(f"{path}: {error}") from error


def _tokenizer_file(model: ModelSection) -> Path:
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return folder / "tokenizer.json"
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model.path, "tokenizer.json", revision=model.revision or None))
    except Exception as error:
        raise CheckpointError(f"{model.path}: neither a folder nor on the hub ({error})") from error
