"""One conversation with the answer that it asks for, and its rendering by DeepSeek's own library.

A conversation belongs to the held-out split by a hash of its messages, so the two splits share templates and words but
never a prompt, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import deepseek_recipe as recipe

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "DeepSeek-V4.1-Flash"
HELD_OUT_OF = 50
"""One conversation of so many is held out."""


@dataclass(slots=True, kw_only=True)
class Chat:
    """A conversation up to an answer, and the answer.

    Attributes:
        family: what it exercises.
        messages: of the API, the last one from the user or a tool.
        answer: the assistant's message: `content`, `reasoning_content` where it thinks, `tool_calls`.
        thinking: whether the model is asked to think.
        exact: whether there is one right answer, to the letter.
        effort: of thinking: "low" or "high".
        tools: declared ones.
        response_format: of the API.
    """

    family: str
    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    thinking: bool = False
    exact: bool = True
    effort: str = "high"
    tools: list[dict[str, Any]] = field(default_factory=list)
    response_format: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """Returns the body of a chat-completions request for the answer."""
        body: dict[str, Any] = {"model": MODEL, "messages": self.messages}
        if self.thinking:
            body["reasoning_effort"] = self.effort
        else:
            body["thinking"] = {"type": "disabled"}
        if self.tools:
            body["tools"] = self.tools
        if self.response_format:
            body["response_format"] = self.response_format
        return body

    def held_out(self) -> bool:
        """Whether training must not see this conversation."""
        text = json.dumps([self.messages, self.response_format], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % HELD_OUT_OF == 0


def ask(text: str) -> list[dict[str, Any]]:
    """Returns messages of one question."""
    return [{"role": "user", "content": text}]


def reply(text: str, reasoning: str = "") -> dict[str, Any]:
    """Returns an assistant's message."""
    message = {"role": "assistant", "content": text}
    return message | {"reasoning_content": reasoning} if reasoning else message


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as tokens.

    Attributes:
        prompt: ids that the model is given.
        answer: ids that it should produce, the end token last.
        counted: for each id of both, whether training counts its prediction.
    """

    prompt: list[int]
    answer: list[int]
    counted: list[bool]


class Renderer:
    """Renders conversations with the V4.1 encoding.

    Args:
        tokenizer: path of tokenizer.json.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = recipe.Tokenizer.from_file(str(tokenizer))
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self._tokenizer)
        self._options = recipe.ConversionOptions()
        kinds = recipe.SpecialToken
        self._assistant, self._end, self._think, self._answer = (
            self._tokenizer.encode(kind.default_str())[0]
            for kind in (kinds.Assistant, kinds.Eos, kinds.ThinkingStart, kinds.ThinkingEnd)
        )

    def prompt(self, chat: Chat) -> list[int]:
        """Returns the ids of a conversation's prompt."""
        return self._render(chat.body())

    def render(self, chat: Chat) -> Rendered:
        """Renders a conversation and its answer."""
        prompt = self._render(chat.body())
        answer = self._answer_ids(chat, prompt)
        # Without tools, the reasoning of earlier turns is dropped: what is left shows an answer without its thoughts.
        whole_history = bool(chat.tools) or not chat.thinking
        counted = self._assistant_spans(prompt) if whole_history else [False] * len(prompt)
        return Rendered(prompt, answer, counted + [True] * len(answer))

    def _render(self, body: dict[str, Any]) -> list[int]:
        conversation = recipe.ChatCompletionRequest(body).convert(self._options).conversation
        return list(self._encoding.encode(conversation))

    def _answer_ids(self, chat: Chat, prompt: list[int]) -> list[int]:
        if chat.answer.get("tool_calls"):
            # The library alone writes calls: as history, before a result.
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "-"}
                for call in chat.answer["tool_calls"]
            ]
            messages = [*chat.messages, chat.answer, *results]
            rendered = self._render(chat.body() | {"messages": messages})[len(prompt) :]
            return rendered[: rendered.index(self._end) + 1]
        reasoning = chat.answer.get("reasoning_content", "")
        text = chat.answer["content"]
        ids = [*self._tokenizer.encode(reasoning), self._answer] if chat.thinking else []
        return [*ids, *self._tokenizer.encode(text), self._end]

    def _assistant_spans(self, ids: list[int]) -> list[bool]:
        """Marks what the assistant said: after its opening tokens, up to and with the end token."""
        counted = [False] * len(ids)
        inside = False
        for place, token in enumerate(ids):
            opening = token in (self._think, self._answer) and ids[place - 1] == self._assistant
            if inside:
                counted[place] = True
                inside = token != self._end
            inside = inside or opening
        return counted
