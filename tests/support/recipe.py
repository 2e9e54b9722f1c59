"""Conversations without a mesh: scripted tokens through the adapter that words answers."""

from __future__ import annotations

import functools
import json
import re
from importlib import resources

from tokenizers import Tokenizer

from flashmesh.services.router.generate import Tokens
from flashmesh.services.router.http.conversations import Conversations
from flashmesh.services.router.text import TextCodec
from flashmesh.types import FinishReason, ModelInfo
from flashmesh.v1 import decode_pb2, types_pb2

MODEL = ModelInfo(
    name="demo",
    fingerprint=bytes(32),
    layout_id=bytes(16),
    numerics_id="none",
    block_bytes=1,
    window=128,
    vocab_size=4096,
    max_context_tokens=100_000,
    eos_token_id=1,
)
NO_THINKING = {"thinking": {"type": "disabled"}}
USER = [{"role": "user", "content": "hello"}]


@functools.cache
def codec() -> TextCodec:
    return TextCodec(resources.files("flashmesh.data").joinpath("tokenizer.json").read_text())


@functools.cache
def conversations() -> Conversations:
    return Conversations(codec())


@functools.cache
def _byte_tokens() -> list[int]:
    """Token of each single byte, by the alphabet that byte-level tokenizers spell bytes with."""
    tokenizer = Tokenizer.from_str(
        resources.files("flashmesh.data").joinpath("tokenizer.json").read_text()
    )
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letter = dict(zip(plain, plain, strict=True))
    letter |= {byte: 256 + place for place, byte in enumerate(others)}
    return [tokenizer.token_to_id(chr(letter[byte])) for byte in range(256)]


def byte_by_byte(text: str) -> list[int]:
    """A token for every byte, and one for each special token in the text."""
    tokens = []
    for part in re.split("(｜DSML｜|</think>)", text):
        if part in ("｜DSML｜", "</think>"):
            tokens += codec().recipe.encode(part)
        else:
            tokens += [_byte_tokens()[byte] for byte in part.encode()]
    return tokens


def tokens_of(
    ids: list[int], finish: FinishReason | None = None, *, choice: int = 0, tops: int = 0
) -> Tokens:
    """A message of a decode worker."""
    chunk = decode_pb2.TokenChunk(
        token_ids=ids,
        logprobs=[-0.5] * len(ids),
        top_logprobs=[
            types_pb2.TopLogprobs(token_ids=list(range(50, 50 + tops)), logprobs=[-1.0] * tops)
            for _ in ids
        ],
        choice=choice,
    )
    return Tokens(chunk, finish)


def events_of(data: bytes) -> list[tuple[str | None, object]]:
    """Server-sent events as (name, JSON); the end mark as (None, "[DONE]")."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        text = lines["data"]
        events.append((lines.get("event"), text if text == "[DONE]" else json.loads(text)))
    return events
