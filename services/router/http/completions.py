"""Completions: raw text or token ids in, raw text out.

Nothing is rendered: the prompt goes to the model as it is, and the text of special tokens is ordinary text unless
`parse_special` is set.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashmesh.errors import InvalidRequest
from flashmesh.services.router.http import parameters
from flashmesh.services.router.http.errors import dump
from flashmesh.services.router.http.exchange import Exchange, frame
from flashmesh.services.router.http.fields import take, take_ids
from flashmesh.stops import StoppedText, check_stops
from flashmesh.types import FinishReason, GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from flashmesh.services.router.generate import Tokens
    from flashmesh.services.router.http.errors import Problem
    from flashmesh.services.router.text import TextCodec
    from flashmesh.types import ModelInfo
    from flashmesh.v1 import types_pb2

DEFAULT_MAX_TOKENS = 16
"""As OpenAI documents it."""


def read(codec: TextCodec, body: dict[str, Any], model: ModelInfo, answer_id: str) -> Exchange:
    """Turns a request into what is to be generated.

    Raises:
        InvalidRequest: says what is wrong, or what a decoder over stored blocks cannot give.
    """
    _refuse_impossible(body)
    prompt = _prompt(codec, body)
    top_logprobs = take(body, "logprobs", int)
    params = parameters.sampling(
        body,
        parameters.Settled(
            max_tokens=take(body, "max_tokens", int, DEFAULT_MAX_TOKENS),
            temperature=take(body, "temperature", float, 1.0),
            top_p=take(body, "top_p", float, 1.0),
            top_logprobs=top_logprobs,
            grammar=parameters.one_grammar(
                _response_format(body), parameters.own_grammar(body, None)
            ),
        ),
    )
    stops = _stops(body)
    reply = CompletionReply(
        codec,
        answer_id=f"cmpl-{answer_id}",
        model=model.name,
        stream=take(body, "stream", bool, False),
        with_usage=_include_usage(body),
        with_logprobs=top_logprobs is not None,
        num_prompt=len(prompt),
        texts=[StoppedText(codec.stream(), stops) for _ in range(params.num_choices)],
    )
    return Exchange(
        prompt=prompt,
        params=params,
        seed=parameters.take_seed(body),
        cache_salt=parameters.take_salt(body),
        reply=reply,
    )


def _refuse_impossible(body: dict[str, Any]) -> None:
    if take(body, "echo", bool, False):
        raise InvalidRequest("echo is not supported: a cached prompt has no logits to echo")
    if take(body, "suffix", str):
        raise InvalidRequest("suffix is not supported")
    if take(body, "best_of", int, 1) not in (1, take(body, "n", int, 1)):
        raise InvalidRequest("best_of must be 1 or equal to n: answers are not ranked")


def _prompt(codec: TextCodec, body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return codec.encode(prompt, parse_special=take(body, "parse_special", bool, False))
    if isinstance(prompt, list):
        if any(isinstance(part, str | list) for part in prompt):
            raise InvalidRequest("prompt must be one prompt; send one request for each")
        ids = list(take_ids({"prompt": prompt}, "prompt"))
        if any(token < 0 for token in ids):
            raise InvalidRequest("prompt has a token id below 0")
        return ids
    raise InvalidRequest("prompt must be a string or a list of token ids")


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise InvalidRequest("stop must be a string or a list of strings")
    check_stops(stops)
    return tuple(stops)


def _include_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options must be an object")
    return take(options, "include_usage", bool, False)


def _response_format(body: dict[str, Any]) -> GrammarSpec | None:
    value = body.get("response_format")
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return GrammarSpec(kind=GrammarKind.JSON_OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=dump(schema).decode())
        case _:
            raise InvalidRequest(
                "response_format must have the type text, json_object or json_schema with its schema"
            )


@dataclass(slots=True)
class _Logprobs:
    """The lists that the API reports, a member for each token of a choice.

    Attributes:
        offset: characters of text before the next token.
    """

    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.values,
            "top_logprobs": self.tops,
            "text_offset": self.offsets,
        }


@dataclass(slots=True)
class _Choice:
    text: StoppedText
    shown: str = ""
    num_tokens: int = 0
    logprobs: _Logprobs = field(default_factory=_Logprobs)
    finish_reason: str | None = None


class CompletionReply:
    """Words a completion; see `Reply`."""

    def __init__(
        self,
        codec: TextCodec,
        *,
        answer_id: str,
        model: str,
        stream: bool,
        with_usage: bool,
        with_logprobs: bool,
        num_prompt: int,
        texts: list[StoppedText],
    ) -> None:
        self.stream = stream
        self._codec = codec
        self._head = {"id": answer_id, "object": "text_completion", "created": 0, "model": model}
        self._with_usage = with_usage
        self._with_logprobs = with_logprobs
        self._num_prompt = num_prompt
        self._choices = [_Choice(text) for text in texts]
        self._cached_tokens = 0

    def start(self, cached_tokens: int) -> bytes:
        self._head["created"] = int(time.time())
        self._cached_tokens = cached_tokens
        return b""

    def push(self, tokens: Tokens) -> tuple[bytes, int | None]:
        choice = self._choices[tokens.choice]
        shown, count = choice.text.push(tokens.token_ids)
        ended = choice.text.matched is not None
        if tokens.finish_reason:
            shown += choice.text.finish()
            choice.finish_reason = tokens.finish_reason.value
        if ended:
            choice.finish_reason = FinishReason.STOP.value
        choice.num_tokens += count
        logprobs = self._logprobs(choice, tokens, count) if self._with_logprobs else None
        event = b""
        if self.stream:
            if shown or logprobs or choice.finish_reason:
                event = self._event(tokens.choice, shown, logprobs, choice.finish_reason)
        else:
            choice.shown += shown
        return event, len(tokens.token_ids) - count if ended else None

    def finish(self) -> bytes:
        if not self.stream:
            return b""
        last = b""
        if self._with_usage:
            last = frame(dump(self._head | {"choices": [], "usage": self._usage()}))
        return last + frame(b"[DONE]")

    def body(self) -> bytes:
        choices = [
            {
                "index": index,
                "text": choice.shown,
                "logprobs": choice.logprobs.as_json() if self._with_logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return dump(self._head | {"choices": choices, "usage": self._usage()})

    def failure(self, problem: Problem) -> bytes:
        return frame(problem.body(anthropic=False, request_id=""))

    def _event(
        self, index: int, text: str, logprobs: _Logprobs | None, finish_reason: str | None
    ) -> bytes:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs.as_json() if logprobs else None,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._with_usage else {}
        return frame(dump(self._head | {"choices": [choice]} | usage))

    def _logprobs(self, choice: _Choice, tokens: Tokens, count: int) -> _Logprobs:
        """Notes the logprobs of new tokens, and returns those to send with them."""
        chunk, known = tokens.chunk, choice.logprobs
        new = known if not self.stream else _Logprobs()
        for place in range(count):
            text = self._codec.decode([chunk.token_ids[place]])
            new.tokens.append(text)
            new.values.append(chunk.logprobs[place])
            new.tops.append(self._top(chunk.top_logprobs[place]) if chunk.top_logprobs else {})
            new.offsets.append(known.offset)
            known.offset += len(text)
        return new

    def _top(self, top: types_pb2.TopLogprobs) -> dict[str, float]:
        """Maps texts to logprobs; of tokens that look alike the likeliest stays."""
        pairs = zip(reversed(top.token_ids), reversed(top.logprobs), strict=True)
        return {self._codec.decode([token]): value for token, value in pairs}

    def _usage(self) -> dict[str, Any]:
        completion = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": completion,
            "total_tokens": self._num_prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
