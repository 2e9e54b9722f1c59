"""deepseek-recipe's side of a conversation: the three APIs, and a request as the library understands it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deepseek_recipe as dr

from flashmesh.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Api:
    """One of the three APIs.

    Attributes:
        request, response: the library's classes; they share their methods, though not a base.
        id_prefix: what its answers' ids begin with.
    """

    request: Any
    response: Any
    id_prefix: str


CHAT = Api(dr.ChatCompletionRequest, dr.ChatCompletionResponse, "chatcmpl-")
RESPONSES = Api(dr.ResponsesRequest, dr.ResponsesResponse, "resp_")
MESSAGES = Api(dr.MessagesRequest, dr.MessagesResponse, "msg_")


class Converted:
    """A request as the library understands it.

    Args:
        api: whose request.
        body: as it came; `n` is not for the library.
        model: the served one's name.

    Attributes:
        request: what the library made of it.

    Raises:
        InvalidRequest, dr.ConversionError: say what is wrong.
    """

    def __init__(self, api: Api, body: Mapping[str, Any], model: str) -> None:
        self.api = api
        self.model = model
        names = {model: dr.ModelVersion.DeepseekV41Flash}
        options = dr.ConversionOptions().with_model_versions_by_name(names)
        given = {key: value for key, value in body.items() if key != "n"}
        try:
            request = api.request(given)
            if api is RESPONSES:
                self._tools, self._echo = request.namespace_tool_map(options), request.echo()
            self.request: dr.ConversationRequest = request.convert(options)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(str(error)) from error

    def generator(self, answer_id: str) -> Any:
        """Makes what words one choice's chunks."""
        generator = self.api.request.chunk_generator(self.request, answer_id, self.model)
        if self.api is RESPONSES:
            return generator.with_namespace_tool_map(self._tools).with_echo(self._echo)
        return generator

    @property
    def begins_thinking(self) -> bool:
        """The answer begins inside a thinking section; one that continues an answer does not."""
        stage = self.request.parsing_options.thinking_initial_stage
        return stage is not None and stage.starts_in_reasoning()
