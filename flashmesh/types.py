"""The nouns that services and the runtime share: frozen, validated, free of protobuf and tensors."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from flashmesh.errors import InvalidRequest

BLOCK_TOKENS = 128
"""Tokens of a block: the one grain of hashing, storing, hits and replay (even, so no ratio-2 pair straddles it)."""

MAX_SEED = 2**64 - 1


class FinishReason(enum.Enum):
    """Why a stream of tokens ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop.

    Attributes:
        max_tokens: most tokens to produce, at least 1.
        temperature: 0 means the plain argmax.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the shortest prefix, by falling probability, that reaches this mass, in (0, 1].
        min_p: drop tokens less likely than this share of the likeliest one, in [0, 1].
        seed: 64-bit key of the noise; equal seeds draw equal noise at equal positions.
        choice: which of several answers to one prompt this is; part of the noise's key.
        ignore_eos: go on after the model's end token.
        stop_token_ids: further tokens that end the stream; like the end token they are not emitted.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            text
            for ok, text in (
                (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
                (
                    math.isfinite(self.temperature) and self.temperature >= 0,
                    f"temperature must be a finite number >= 0, not {self.temperature}",
                ),
                (self.top_k >= 0, f"top_k must be >= 0, not {self.top_k}"),
                (0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}"),
                (0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}"),
                (
                    0 <= self.seed <= MAX_SEED,
                    f"seed must be an unsigned 64-bit number, not {self.seed}",
                ),
                (self.choice >= 0, f"choice must be >= 0, not {self.choice}"),
            )
            if not ok
        ]
        if problems:
            raise InvalidRequest("; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a loaded model is, as far as other processes must know it.

    Attributes:
        name: the name that clients ask for.
        fingerprint: 32 bytes over the configuration and the weights' index and contents.
        layout_id: 16 bytes naming the byte layout of a block.
        numerics_id: names everything that can change a bit of a result (backend, device, threads, versions).
        block_bytes: payload bytes of one block.
        window: sliding-window length in tokens.
        vocab_size: token ids are below it.
        max_context_tokens: most tokens of prompt and output together.
        eos_token_id: the token that ends an answer.
        gemm_quantized: the switch for quantised GEMM inputs, which changes every stored row.
    """

    name: str
    fingerprint: bytes
    layout_id: bytes
    numerics_id: str
    block_bytes: int
    window: int
    vocab_size: int
    max_context_tokens: int
    eos_token_id: int
    gemm_quantized: bool = False
