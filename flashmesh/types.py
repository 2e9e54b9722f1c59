"""The nouns that services and the runtime share: frozen, validated, free of protobuf and tensors."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from flashmesh.errors import InvalidRequest

BLOCK_TOKENS = 128
"""Tokens of a block: the one grain of hashing, storing, hits and replay (even, so no ratio-2 pair straddles it)."""


def pages_for(num_tokens: int) -> int:
    """Returns how many pages, of a block each, hold the global rows of so many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


class FinishReason(enum.Enum):
    """Why a stream of tokens ended."""

    STOP = "stop"
    LENGTH = "length"


class GrammarKind(enum.Enum):
    """How a grammar is written."""

    REGEX = "regex"
    JSON_SCHEMA = "json_schema"
    EBNF = "ebnf"
    JSON_OBJECT = "json_object"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What an output must obey.

    Attributes:
        kind: how `text` is written.
        text: a regular expression, a JSON Schema, EBNF rules from `root` on, or a structural tag as JSON; empty for
            a JSON object, which is any.
        start_after: the output is free up to and including this token (the end of a thinking section); None governs
            it from the first token on.
    """

    kind: GrammarKind
    text: str = ""
    start_after: int | None = None

    def __post_init__(self) -> None:
        raise_problems(
            (
                bool(self.text) != (self.kind is GrammarKind.JSON_OBJECT),
                f"a grammar of kind {self.kind.value} "
                f"{'takes no text' if self.text else 'needs its text'}",
            ),
            (
                self.start_after is None or self.start_after >= 0,
                f"start_after must be a token id, not {self.start_after}",
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop; docs/sampling.md has the exact order.

    Attributes:
        max_tokens: most tokens to produce, at least 1.
        min_tokens: the end token and stop tokens are not drawn before so many; at most `max_tokens`.
        temperature: 0 means the plain argmax.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the shortest prefix, by falling probability, that reaches this mass, in (0, 1].
        min_p: drop tokens less likely than this share of the likeliest one, in [0, 1].
        presence_penalty: taken from the logit of every token that the output has, in [-2, 2].
        frequency_penalty: taken as often as the output has the token, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of every token that prompt or output has,
            in [0.01, 10]; 1 changes nothing.
        logit_bias: (token id, amount in [-100, 100]) added to logits; ids ascend.
        seed: 64-bit key of the noise; equal seeds draw equal noise at equal positions.
        choice: which of several answers to one prompt this is; part of the noise's key.
        num_choices: answers wanted, with choices [choice, choice + num_choices); at most 128.
        ignore_eos: go on after the model's end token.
        stop_token_ids: further tokens that end the stream; like the end token they are not emitted.
        top_logprobs: report so many of the likeliest tokens at every position, at most 20; None reports none.
        grammar: what the output must obey.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0
    num_choices: int = 1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        biased = [token for token, _ in self.logit_bias]
        counts = {"max_tokens": self.max_tokens, "top_k": self.top_k, "choice": self.choice}
        raise_problems(
            (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
            *(
                (count <= MAX_COUNT, f"{name} must be at most {MAX_COUNT}, not {count}")
                for name, count in counts.items()
            ),
            (
                0 <= self.min_tokens <= max(1, self.max_tokens),
                f"min_tokens must be in [0, max_tokens], not {self.min_tokens}",
            ),
            (
                math.isfinite(self.temperature) and self.temperature >= 0,
                f"temperature must be a finite number >= 0, not {self.temperature}",
            ),
            (self.top_k >= 0, f"top_k must be >= 0, not {self.top_k}"),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}"),
            *(
                (-2 <= value <= 2, f"{name} must be in [-2, 2], not {value}")
                for name, value in (
                    ("presence_penalty", self.presence_penalty),
                    ("frequency_penalty", self.frequency_penalty),
                )
            ),
            (
                0.01 <= self.repetition_penalty <= 10,
                f"repetition_penalty must be in [0.01, 10], not {self.repetition_penalty}",
            ),
            *(
                (
                    -100 <= amount <= 100,
                    f"logit_bias must be in [-100, 100], not {amount} (token {token})",
                )
                for token, amount in self.logit_bias
            ),
            (biased == sorted(set(biased)), "logit_bias must name distinct tokens by ascending id"),
            (
                0 <= self.seed <= MAX_SEED,
                f"seed must be an unsigned 64-bit number, not {self.seed}",
            ),
            (self.choice >= 0, f"choice must be >= 0, not {self.choice}"),
            (
                1 <= self.num_choices <= MAX_CHOICES,
                f"num_choices must be in [1, {MAX_CHOICES}], not {self.num_choices}",
            ),
            (
                self.top_logprobs is None or 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
                f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], not {self.top_logprobs}",
            ),
            (
                self.grammar is None or not self.ignore_eos,
                "ignore_eos cannot be set with a grammar, whose end is the end token",
            ),
        )

    @property
    def has_penalties(self) -> bool:
        """Drawing depends on which tokens came before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def check_vocab(self, vocab_size: int) -> None:
        """Refuses token ids that a model does not have.

        Raises:
            InvalidRequest: lists every problem.
        """
        named = {
            "stop token id": self.stop_token_ids,
            "logit_bias token id": [token for token, _ in self.logit_bias],
            "start_after": [self.grammar.start_after or 0] if self.grammar else [],
        }
        raise_problems(
            *(
                (0 <= token < vocab_size, f"{name} {token} is not in [0, {vocab_size})")
                for name, tokens in named.items()
                for token in tokens
            )
        )


def raise_problems(*checks: tuple[bool, str]) -> None:
    """Raises one error for all checks that do not hold.

    Args:
        checks: (holds, what is wrong otherwise).

    Raises:
        InvalidRequest: lists every problem.
    """
    problems = [text for holds, text in checks if not holds]
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
