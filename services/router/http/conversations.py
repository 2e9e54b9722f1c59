"""Chat Completions, Responses and Messages: a body becomes a prompt, parameters, and who words the answer.

deepseek-recipe converts and renders, so prompts are those of the provider's own API. Added here is what it drops
(`parameters.py`), and grammars for what it only describes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import deepseek_recipe as dr

from flashmesh.errors import InvalidRequest
from flashmesh.services.router.http import parameters
from flashmesh.services.router.http.conversation_reply import ConversationReply
from flashmesh.services.router.http.exchange import Exchange
from flashmesh.services.router.http.fields import take
from flashmesh.services.router.http.recipe import CHAT, Api, Converted
from flashmesh.services.router.http.tool_grammar import tool_grammar
from flashmesh.types import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashmesh.services.router.text import TextCodec
    from flashmesh.types import ModelInfo


class Conversations:
    """Reads requests of the three APIs.

    Args:
        codec: the served model's tokenizer.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._encoding = dr.DeepseekV41Encoding().with_tokenizer(codec.recipe)
        (self._think_end,) = codec.recipe.encode(dr.SpecialToken.ThinkingEnd.default_str())

    def read(self, api: Api, body: dict[str, Any], model: ModelInfo, answer_id: str) -> Exchange:
        """Turns a request into what is to be generated.

        Args:
            api: the one that was called.
            body: the request.
            model: the served one.
            answer_id: of the answer, without the API's prefix.

        Raises:
            InvalidRequest, dr.ConversionError: say what is wrong.
        """
        num_choices = take(body, "n", int, 1) if api is CHAT else 1
        converted = Converted(api, body, model.name)
        prompt = self._encode(converted.request)
        options = converted.request.inference_options
        start_after = self._think_end if converted.begins_thinking else None
        params = parameters.sampling(
            body | {"n": num_choices},
            parameters.Settled(
                max_tokens=converted.request.resolve_max_tokens(
                    len(prompt), model.max_context_tokens
                ),
                temperature=1.0 if options.temperature is None else options.temperature,
                top_p=1.0 if options.top_p is None else options.top_p,
                top_logprobs=(options.top_logprobs or 0) if options.logprobs else None,
                grammar=parameters.one_grammar(
                    _constraint(options.output_constraint, start_after),
                    parameters.own_grammar(body, start_after),
                ),
            ),
        )
        reply = ConversationReply(
            converted,
            self._codec,
            answer_id=api.id_prefix + answer_id,
            num_choices=num_choices,
            num_prompt=len(prompt),
            eos=model.eos_token_id,
            think_end=self._think_end,
        )
        return Exchange(
            prompt=prompt,
            params=params,
            seed=parameters.take_seed(body),
            cache_salt=parameters.take_salt(body),
            reply=reply,
        )

    def prompt(self, api: Api, body: Mapping[str, Any], model: ModelInfo) -> list[int]:
        """Returns the prompt of a request, and looks at nothing else of it.

        Raises:
            InvalidRequest, dr.ConversionError: say what is wrong.
        """
        named = {"model": model.name, **body}
        return self._encode(Converted(api, named, model.name).request)

    def _encode(self, request: dr.ConversationRequest) -> list[int]:
        if any(message.image_sources for message in request.conversation.messages):
            raise InvalidRequest("images are not supported")
        return self._encoding.encode(request.conversation)


def _constraint(
    constraint: dr.OutputConstraint | None, start_after: int | None
) -> GrammarSpec | None:
    if constraint is None:
        return None
    kind, text = constraint.kind, constraint.schema
    match kind:
        case "json" if not text:
            return GrammarSpec(kind=GrammarKind.JSON_OBJECT, start_after=start_after)
        case "json":
            return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=text, start_after=start_after)
        case "regex":
            return GrammarSpec(kind=GrammarKind.REGEX, text=text, start_after=start_after)
        case _:
            required = kind == "tool_call_required"
            return tool_grammar(json.loads(text), required=required, start_after=start_after)
