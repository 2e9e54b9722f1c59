"""What a body says beyond the conversation: how to sample, and what the output must obey.

The official fields that deepseek-recipe drops and flashmesh's own ones are read here; docs/http.md lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashmesh.errors import InvalidRequest
from flashmesh.services.router.http.fields import take, take_ids
from flashmesh.types import GrammarKind, GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Parameters that the endpoint has settled itself."""

    max_tokens: int
    temperature: float
    top_p: float
    top_logprobs: int | None
    grammar: GrammarSpec | None


def sampling(body: Mapping[str, Any], settled: Settled) -> SamplingParams:
    """Reads all that is not settled yet; `seed` stays 0 where the body has none (see `take_seed`).

    Raises:
        InvalidRequest: lists every value that is out of range.
    """
    if body.get("prompt_logprobs") is not None:
        raise InvalidRequest("prompt_logprobs is not supported: a cached prompt has no logits")
    return SamplingParams(
        max_tokens=settled.max_tokens,
        temperature=settled.temperature,
        top_p=settled.top_p,
        top_logprobs=settled.top_logprobs,
        grammar=settled.grammar,
        min_tokens=take(body, "min_tokens", int, 0),
        top_k=take(body, "top_k", int, 0),
        min_p=take(body, "min_p", float, 0.0),
        presence_penalty=take(body, "presence_penalty", float, 0.0),
        frequency_penalty=take(body, "frequency_penalty", float, 0.0),
        repetition_penalty=take(body, "repetition_penalty", float, 1.0),
        logit_bias=_logit_bias(body.get("logit_bias")),
        seed=take_seed(body) or 0,
        num_choices=take(body, "n", int, 1),
        ignore_eos=take(body, "ignore_eos", bool, False),
        stop_token_ids=take_ids(body, "stop_token_ids"),
    )


def take_seed(body: Mapping[str, Any]) -> int | None:
    """Returns the seed; None leaves it to the router."""
    return take(body, "seed", int)


def take_salt(body: Mapping[str, Any]) -> bytes:
    """Returns the caller's cache salt."""
    return take(body, "cache_salt", str, "").encode()


def own_grammar(body: Mapping[str, Any], start_after: int | None) -> GrammarSpec | None:
    """Returns what the extension fields `regex` and `grammar` demand.

    Args:
        body: the request.
        start_after: see `GrammarSpec`.

    Raises:
        InvalidRequest: both are there.
    """
    regex, ebnf = take(body, "regex", str), take(body, "grammar", str)
    if regex is not None and ebnf is not None:
        raise InvalidRequest("regex and grammar exclude each other")
    if regex is not None:
        return GrammarSpec(kind=GrammarKind.REGEX, text=regex, start_after=start_after)
    if ebnf is not None:
        return GrammarSpec(kind=GrammarKind.EBNF, text=ebnf, start_after=start_after)
    return None


def one_grammar(*specs: GrammarSpec | None) -> GrammarSpec | None:
    """Returns the only grammar that is asked for, if any.

    Raises:
        InvalidRequest: there are several.
    """
    wanted = [spec for spec in specs if spec is not None]
    if len(wanted) > 1:
        raise InvalidRequest(
            "only one of response_format, strict or required tools, regex and grammar can hold"
        )
    return wanted[0] if wanted else None


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias must be an object of token id to amount")
    bad = next(
        (key for key in value if not (key.isascii() and key.isdigit() and len(key) < 10)), None
    )
    if bad is not None:
        raise InvalidRequest(f"logit_bias: {bad[:20]!r} is not a token id")
    return tuple(sorted((int(key), take(value, key, float, 0.0)) for key in value))
