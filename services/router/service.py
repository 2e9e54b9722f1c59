"""The router's gRPC door: a message becomes a request, tokens become messages."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import deepseek_recipe as dr

from flashmesh.errors import InvalidRequest
from flashmesh.services.router.door import counted, off_loop
from flashmesh.services.router.http.conversations import Conversations
from flashmesh.services.router.http.recipe import CHAT
from flashmesh.stops import StoppedText, check_stops
from flashmesh.types import FinishReason
from flashmesh.v1 import router_pb2, router_pb2_grpc, types_pb2
from flashmesh.wire import finish_to_proto, sampling_from_proto

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    import grpc.aio

    from flashmesh.services.router.door import Door
    from flashmesh.services.router.generate import Generation, Tokens
    from flashmesh.services.router.prefix import Call
    from flashmesh.types import ModelInfo


class RouterServicer(router_pb2_grpc.RouterServicer):
    """Serves `Generate` and `Tokenize`."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._conversations = Conversations(door.codec)

    async def Generate(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Continues a prompt."""
        with self._door.admitted():
            model = await self._door.mesh.replicas.wait_model(request.model)
            generation = await self._start(request, model)
            async with contextlib.aclosing(self._respond(generation)) as responses:
                async for response in responses:
                    yield response

    async def Tokenize(  # noqa: N802
        self, request: router_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> router_pb2.TokenizeResponse:
        """Encodes text as `Generate` would."""
        ids = await self._encode(request.text, parse_special=request.parse_special)
        return router_pb2.TokenizeResponse(token_ids=ids)

    async def _encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        encode = self._door.codec.encode
        return await off_loop(len(text), lambda: encode(text, parse_special=parse_special))

    async def _start(self, request: router_pb2.GenerateRequest, model: ModelInfo) -> Generation:
        match request.WhichOneof("prompt"):
            case "text":
                prompt = await self._encode(request.text)
            case "token_ids":
                prompt = list(request.token_ids.ids)
            case "conversation":
                conversation = request.conversation
                prompt = await off_loop(
                    conversation.ByteSize(), lambda: self._render(conversation, model)
                )
            case _:
                raise InvalidRequest("the request has no prompt")
        check_stops(request.stop)
        sampling = request.sampling
        return self._door.start(
            model,
            prompt,
            sampling_from_proto(sampling),
            seed=sampling.seed if sampling.HasField("seed") else None,
            cache_salt=request.cache_salt,
            priority=request.priority,
            stops=request.stop,
            include_stop=request.include_stop,
        )

    def _render(self, conversation: router_pb2.Conversation, model: ModelInfo) -> list[int]:
        try:
            return self._conversations.prompt(CHAT, chat_body(conversation), model)
        except dr.ConversionError as error:
            raise InvalidRequest(f"conversation: {error}") from error

    async def _respond(
        self, generation: Generation
    ) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        call = generation.call
        texts = {
            choice: StoppedText(self._door.codec.stream(), call.stops, include=call.include_stop)
            for choice in generation.unfinished
        }
        first = True
        async with contextlib.aclosing(counted(generation)) as stream:
            async for tokens in stream:
                response = self._response(generation, tokens, texts[tokens.choice])
                response.request_id = call.request_id
                if first:
                    response.seed = call.params.seed
                    first = False
                if not generation.unfinished:
                    response.usage.CopyFrom(usage(generation, call))
                yield response

    def _response(
        self, generation: Generation, tokens: Tokens, text: StoppedText
    ) -> router_pb2.GenerateResponse:
        """Turns tokens into a message, and ends their choice where its text has met a stop string."""
        chunk, finish = tokens.chunk, tokens.finish_reason
        shown, count = text.push(chunk.token_ids)
        if finish:
            shown += text.finish()
        if text.matched is not None:
            generation.end(tokens.choice, len(chunk.token_ids) - count)
            finish = FinishReason.STOP
        return router_pb2.GenerateResponse(
            choice=tokens.choice,
            token_ids=chunk.token_ids[:count],
            logprobs=chunk.logprobs[:count],
            processed_logprobs=chunk.processed_logprobs[:count],
            top_logprobs=chunk.top_logprobs[:count],
            text=shown,
            finish_reason=finish_to_proto(finish),
            stop=text.matched or "",
        )


def usage(generation: Generation, call: Call) -> types_pb2.Usage:
    """Says what a finished request took."""
    return types_pb2.Usage(
        prompt_tokens=len(call.prompt),
        cached_tokens=generation.cached_tokens,
        completion_tokens=generation.num_emitted,
    )


def chat_body(conversation: router_pb2.Conversation) -> dict[str, Any]:
    """Returns the conversation as the body of a chat request.

    Raises:
        InvalidRequest: a field that holds JSON does not.
    """
    messages = []
    for place, turn in enumerate(conversation.turns):
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls_json:
            message["tool_calls"] = _parse(turn.tool_calls_json, f"turn {place}: tool_calls_json")
        if turn.tool_call_id:
            message["tool_call_id"] = turn.tool_call_id
        messages.append(message)
    thinking = "enabled" if conversation.thinking else "disabled"
    body: dict[str, Any] = {"messages": messages, "thinking": {"type": thinking}}
    if conversation.tools_json:
        body["tools"] = _parse(conversation.tools_json, "tools_json")
    return body


def _parse(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from error
