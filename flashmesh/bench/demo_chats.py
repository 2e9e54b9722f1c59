"""The demo model's held-out conversations: prompts rendered, answers parsed and compared.

Both sides are deepseek-recipe's, as in the router: what counts as a tool call here is what a client would be given.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deepseek_recipe as recipe
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flashmesh.kernels.door import Engine

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One conversation.

    Attributes:
        family: what it exercises.
        exact: whether the expected answer is the only right one.
        body: of the chat-completions request.
        prompt: its ids.
        answer: the expected message.
        answer_ids: the expected ids, end token and reasoning included.
    """

    family: str
    exact: bool
    body: dict[str, Any]
    prompt: list[int]
    answer: dict[str, Any]
    answer_ids: list[int]

    @property
    def thinking(self) -> bool:
        """Whether the answer begins with reasoning."""
        return "thinking" not in self.body


class Conversations:
    """The evaluation set of a checkpoint folder.

    Args:
        folder: has evaluation.json and tokenizer.json.

    Attributes:
        chats: the conversations.
        code: pieces of source code, as ids.
        recorded: losses that the training recorded for the same set (docs/demo.md).
    """

    def __init__(self, folder: Path) -> None:
        stored = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        self._tokenizer = recipe.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self._tokenizer)
        (self.think_end,) = self._tokenizer.encode(recipe.SpecialToken.ThinkingEnd.default_str())
        self.code: list[list[int]] = stored["code"]
        self.recorded: dict[str, dict[str, float]] = stored["losses"]
        self.chats = [
            HeldOut(
                chat["family"],
                chat["exact"],
                chat["body"],
                list(self._encoding.encode(_convert(chat["body"]).conversation)),
                chat["answer"],
                chat["answer_ids"],
            )
            for chat in stored["chats"]
        ]

    def message(self, chat: HeldOut, ids: Sequence[int]) -> dict[str, Any]:
        """Parses an answer without its end token into the message that a client gets."""
        converted = _convert(chat.body)
        generator = recipe.ChatCompletionRequest.chunk_generator(converted, "0", "demo")
        processor: Any = recipe.StreamProcessor(
            generator, converted.parsing_options, self._tokenizer
        )
        response = recipe.ChatCompletionResponse("0", "demo", 0, len(chat.prompt), 0)
        usage = recipe.PromptUsage(prompt_tokens=len(chat.prompt))
        chunks = [
            recipe.InferenceChunk.ready(prompt_usage=usage),
            *(recipe.InferenceChunk.tokens([token]) for token in ids),
            recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop),
        ]
        for chunk in chunks:
            for part in processor.push(chunk):
                response.accumulate(part)
        for part in processor.finish():
            response.accumulate(part)
        message: dict[str, Any] = json.loads(response.to_json())["choices"][0]["message"]
        return message


def _convert(body: dict[str, Any]) -> Any:
    return recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())


def is_valid_call(message: dict[str, Any], tools: Sequence[dict[str, Any]]) -> bool:
    """Whether a message calls declared tools, and with arguments that fit their declaration."""
    declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls = message.get("tool_calls") or []
    return bool(calls) and all(
        call["function"]["name"] in declared
        and _fits(call["function"]["arguments"], declared[call["function"]["name"]])
        for call in calls
    )


def _fits(text: str, schema: dict[str, Any]) -> bool:
    """Checks flat objects, which is all that the set declares."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return False
    properties = schema["properties"]
    return (
        isinstance(arguments, dict)
        and set(schema["required"]) <= set(arguments) <= set(properties)
        and all(
            isinstance(value, _TYPES[properties[key]["type"]])
            and isinstance(value, bool) == (properties[key]["type"] == "boolean")
            for key, value in arguments.items()
        )
    )


def token_losses(engine: Engine, ids: Sequence[int]) -> list[float]:
    """Returns the loss in nats of every token but the first, each given those before it."""
    from flashmesh.kernels.door import RowRun, SessionPlan

    plan = SessionPlan(first_pos=0, global_start=0, decoder_start=0, max_tokens=len(ids))
    with engine.open(plan, []) as session:
        run = RowRun(session=session, tokens=ids[:-1], num_logits=len(ids) - 1, keep_logits=True)
        logits = engine.step([run])[0].logits.double().numpy()
    peaks = logits.max(1)
    normalisers = np.log(np.exp(logits - peaks[:, None]).sum(1)) + peaks
    chosen = logits[np.arange(len(ids) - 1), list(ids[1:])]
    return [float(loss) for loss in normalisers - chosen]


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan
