"""Text to tokens and back, the only place where the router knows what a token says."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from flashmesh.errors import CheckpointError

if TYPE_CHECKING:
    from flashmesh.config import ModelSection


class TextCodec:
    """A checkpoint's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Returns the ids of a text; without `parse_special`, "<|eos|>" is just seven characters."""
        self._tokenizer.encode_special_tokens = not parse_special
        return self._tokenizer.encode(text, add_special_tokens=False).ids

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
    if model.path == "demo":
        return TextCodec(
            Tokenizer.from_str(
                resources.files("flashmesh.data").joinpath("tokenizer.json").read_text()
            )
        )
    path = _tokenizer_file(model)
    try:
        return TextCodec(Tokenizer.from_file(str(path)))
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
