"""Conversations over gRPC: the prompts of HTTP, and the model's own words back."""

import json

import pytest
from support.http import openai_client
from support.mesh import start_mesh

from flashmesh.client import prompt_request
from flashmesh.errors import InvalidRequest
from flashmesh.types import SamplingParams
from flashmesh.v1 import router_pb2

PARAMS = SamplingParams(max_tokens=8)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "cold", "tool_call_id": "call_1"},
]
TURNS = [
    router_pb2.Turn(role="system", content="Be brief."),
    router_pb2.Turn(role="user", content="How is it in Oslo?"),
    router_pb2.Turn(role="assistant", tool_calls_json=json.dumps([CALL])),
    router_pb2.Turn(role="tool", content="cold", tool_call_id="call_1"),
]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    with start_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        yield mesh


def ask(mesh, **conversation):
    request = prompt_request([1], PARAMS, seed=1)
    request.conversation.CopyFrom(router_pb2.Conversation(**conversation))
    with mesh.client() as client:
        return list(client.generate(request, timeout_s=60))


@pytest.mark.parametrize("thinking", [False, True])
def test_a_conversation_has_the_prompt_that_http_gives_it(mesh, thinking):
    responses = ask(mesh, turns=TURNS, thinking=thinking, tools_json=json.dumps([TOOL]))
    with openai_client(mesh) as client:
        answer = client.chat.completions.create(
            model="DeepSeek-V4.1-Flash-demo",
            messages=MESSAGES,
            tools=[TOOL],
            max_tokens=8,
            temperature=0,
            extra_body={"thinking": {"type": "enabled" if thinking else "disabled"}},
        )
    assert responses[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(len(r.token_ids) for r in responses) == 8


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ({}, "conversation"),
        ({"turns": [router_pb2.Turn(role="nobody", content="a")]}, "unknown variant `nobody`"),
        ({"turns": TURNS, "tools_json": "[{"}, "tools_json is not JSON"),
        ({"turns": TURNS, "tools_json": "3"}, "expected a sequence"),
        (
            {"turns": [router_pb2.Turn(role="assistant", tool_calls_json="{")]},
            "turn 0: tool_calls_json is not JSON",
        ),
    ],
)
def test_a_conversation_that_cannot_be_is_refused(mesh, conversation, message):
    with pytest.raises(InvalidRequest, match=message):
        ask(mesh, **conversation)
