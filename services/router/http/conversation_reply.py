"""The answers of the three conversation APIs: tokens in, events or one body out.

deepseek-recipe's parser words them. Added here: several choices (it takes one; each has a parser of its own), exact
counts of tokens (the library counts those whose text came out, and reasoning by tokenising its text again), and what
`call_gate.py` is for.
"""

from __future__ import annotations

import functools
import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deepseek_recipe as dr

from flashmesh.services.router.http.call_gate import DSML, MARK, CallGate, Item, chunks
from flashmesh.services.router.http.errors import dump
from flashmesh.services.router.http.exchange import frame
from flashmesh.services.router.http.recipe import MESSAGES, RESPONSES
from flashmesh.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashmesh.services.router.generate import Tokens
    from flashmesh.services.router.http.errors import Problem
    from flashmesh.services.router.http.recipe import Converted
    from flashmesh.services.router.text import TextCodec

_FINISH = {
    FinishReason.STOP: dr.InferenceFinishReason.Stop,
    FinishReason.LENGTH: dr.InferenceFinishReason.Length,
}
_COUNT = re.compile(r'"(reasoning|completion|output|total)_tokens":\d+')
"""A count in usage. Inside a JSON string the quotes would be escaped, so this cannot match an answer's text."""

_INCOMPLETE = "\ufffd"
"""How a text ends whose last character is not complete."""


@dataclass(slots=True)
class _Choice:
    """One of the answers.

    Attributes:
        processor: parses it.
        gate: lets markup of tool calls through to it; None where none is parsed.
        reasoning: its thinking section goes on.
        num_reasoning: tokens of that section.
        num_tokens: all that belong to it.
        response: what it adds up to; there once the answer has begun.
    """

    processor: dr.StreamProcessor
    gate: CallGate | None
    reasoning: bool
    num_reasoning: int = 0
    num_tokens: int = 0
    response: Any = None


class ConversationReply:
    """Words an answer through a stream parser for each choice; see `Reply`."""

    def __init__(
        self,
        converted: Converted,
        codec: TextCodec,
        *,
        answer_id: str,
        num_choices: int,
        num_prompt: int,
        eos: int,
        think_end: int,
    ) -> None:
        request = converted.request
        self.stream = request.stream
        self._api = converted.api
        self._codec = codec
        self._model = converted.model
        self._answer_id = answer_id
        self._num_prompt = num_prompt
        self._eos = eos
        self._think_end = think_end
        self._with_logprobs = request.inference_options.logprobs
        options = request.parsing_options
        options.special_tokens = dr.SpecialTokens(dsml=MARK)
        self._choices = [
            _Choice(
                dr.StreamProcessor(converted.generator(answer_id), options, codec.recipe),
                CallGate(codec, inside=options.starts_in_tool_calls)
                if options.parse_tool_calls
                else None,
                reasoning=converted.begins_thinking,
            )
            for _ in range(num_choices)
        ]
        self._with_stops = bool(options.stop_sequences)
        self._usage: dict[str, Any] = {}
        self._unfinished = set(range(num_choices))
        self._num_events = 0

    def start(self, cached_tokens: int) -> bytes:
        """Begins every choice."""
        usage = dr.PromptUsage(
            prompt_tokens=self._num_prompt, prompt_cache_hit_tokens=cached_tokens
        )
        events = []
        for index, choice in enumerate(self._choices):
            choice.response = self._api.response(
                self._answer_id, self._model, int(time.time()), self._num_prompt, cached_tokens
            )
            ready = dr.InferenceChunk.ready(prompt_usage=usage)
            events.append(self._word(index, choice.processor.push(ready)))
        return b"".join(events)

    def push(self, tokens: Tokens) -> tuple[bytes, int | None]:
        """Parses tokens; a stop string ends their choice with the token that completes it."""
        index, items = tokens.choice, self._items(tokens)
        choice = self._choices[index]
        size = 1 if self._one_by_one(tokens) else max(1, len(items))
        events = []
        for first in range(0, len(items), size):
            events.append(self._push(index, items[first : first + size]))
            if choice.processor.finished:
                events.append(self._word(index, choice.processor.finish()))
                return b"".join(events), len(items) - first - size
        if tokens.finish_reason:
            if choice.gate:
                events.append(self._feed(index, choice.gate.finish()))
            if not choice.processor.finished:
                last = dr.InferenceChunk.finish(_FINISH[tokens.finish_reason])
                events.append(self._word(index, choice.processor.push(last)))
            events.append(self._word(index, choice.processor.finish()))
        return b"".join(events), None

    def finish(self) -> bytes:
        """Returns the API's end mark, where it has one."""
        mark = self._api.response.sse_done_data() if self.stream else None
        return frame(mark.encode()) if mark else b""

    def body(self) -> bytes:
        """Returns the answer; several choices are put into the first one's."""
        texts = [self._corrected(choice, choice.response.to_json()) for choice in self._choices]
        if len(texts) == 1:
            return texts[0].encode()
        answers = [json.loads(text) for text in texts]
        choices = [answer["choices"][0] | {"index": index} for index, answer in enumerate(answers)]
        usage = functools.reduce(_added, (answer["usage"] for answer in answers))
        return dump(answers[0] | {"choices": choices, "usage": usage})

    def failure(self, problem: Problem) -> bytes:
        """Returns the API's own kind of error event."""
        if self._api is MESSAGES:
            return frame(problem.body(anthropic=True, request_id=""), "error")
        if self._api is RESPONSES:
            event = {
                "type": "error",
                "code": problem.code,
                "message": problem.message,
                "param": None,
                "sequence_number": self._num_events,
            }
            return frame(dump(event), "error")
        return frame(problem.body(anthropic=False, request_id=""))

    def _one_by_one(self, tokens: Tokens) -> bool:
        """Says whether each token needs a push of its own.

        A stop string may end the text inside a chunk. And the parser holds a chunk that ends inside a character back as
        a whole, until a token follows; if none does it never shows it.
        """
        return self._with_stops or self._codec.decode(list(tokens.token_ids)).endswith(_INCOMPLETE)

    def _items(self, tokens: Tokens) -> list[Item]:
        chunk = tokens.chunk
        if not self._with_logprobs:
            return [Item(token) for token in chunk.token_ids]
        tops = [list(zip(top.token_ids, top.logprobs, strict=True)) for top in chunk.top_logprobs]
        tops = tops or [[] for _ in chunk.logprobs]  # none were asked for
        logprobs = zip(chunk.logprobs, tops, strict=True)
        return [Item(token, pair) for token, pair in zip(chunk.token_ids, logprobs, strict=True)]

    def _push(self, index: int, items: list[Item]) -> bytes:
        choice = self._choices[index]
        choice.num_tokens += len(items)
        # With `ignore_eos` end tokens come, and the parser would show their text.
        items = [item for item in items if item.token != self._eos]
        if choice.reasoning:
            tokens = [item.token for item in items]
            choice.reasoning = self._think_end not in tokens
            choice.num_reasoning += (
                len(tokens) if choice.reasoning else tokens.index(self._think_end)
            )
        if choice.gate:
            items = [clear for item in items for clear in choice.gate.push(item)]
        return self._feed(index, items)

    def _feed(self, index: int, items: list[Item]) -> bytes:
        processor, events = self._choices[index].processor, []
        for chunk in chunks(items, with_logprobs=self._with_logprobs):
            if processor.finished:
                break
            events.append(self._word(index, processor.push(chunk)))
        return b"".join(events)

    def _word(self, index: int, chunks: Sequence[Any]) -> bytes:
        choice, events = self._choices[index], []
        for chunk in chunks:
            if self.stream:
                text = self._corrected(choice, chunk.to_json())
                if len(self._choices) > 1:
                    text = self._as_choice(index, text)
                events.append(frame(text.encode(), self._api.response.sse_event_name(chunk)))
                self._num_events += 1
            choice.response.accumulate(chunk)
        return b"".join(events)

    def _corrected(self, choice: _Choice, text: str) -> str:
        text = text.replace(MARK, DSML)  # left over where markup stood in a place without any
        counts = {
            "reasoning": choice.num_reasoning,
            "completion": choice.num_tokens,
            "output": choice.num_tokens,
            "total": self._num_prompt + choice.num_tokens,
        }
        return _COUNT.sub(lambda found: f'"{found[1]}_tokens":{counts[found[1]]}', text)

    def _as_choice(self, index: int, text: str) -> str:
        """Numbers a chunk of one of several choices, and keeps the usage of all for the last one."""
        chunk = json.loads(text)
        for part in chunk["choices"]:
            part["index"] = index
        usage = chunk.get("usage")
        if usage:
            self._usage = _added(self._usage, usage) if self._usage else usage
            self._unfinished.discard(index)
            if self._unfinished:
                del chunk["usage"]
            else:
                chunk["usage"] = self._usage
        return dump(chunk).decode()


def _added(total: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    """Adds a choice's usage: its prompt is everybody's, its completion its own."""
    completion = total["completion_tokens"] + usage["completion_tokens"]
    merged = total | {
        "completion_tokens": completion,
        "total_tokens": total["prompt_tokens"] + completion,
    }
    key = "completion_tokens_details"
    if key in total:
        merged[key] = {name: total[key][name] + value for name, value in usage[key].items()}
    return merged
