"""The official openai and anthropic clients, unmodified, against a real mesh on the simulated engine."""

import json

import pytest
from support.http import anthropic_client, openai_client
from support.mesh import start_mesh

MODEL = "DeepSeek-V4.1-Flash-demo"
USER = [{"role": "user", "content": "hello"}]
NO_THINKING = {"thinking": {"type": "disabled"}}
MAX_BODY = 4_000_000
FUNCTION = {
    "name": "run",
    "description": "runs a command",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    settings = {
        "decode": {"num_pages": 1024},
        "router": {"http_max_body_bytes": MAX_BODY, "http_keep_alive_s": 0.2},
        "model": {"sim_step_ms": 1.0},
    }
    with start_mesh(tmp_path_factory.mktemp("mesh"), overrides=settings) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def _nothing_stays_held(mesh):
    yield
    mesh.wait_idle()


@pytest.fixture
def client(mesh):
    with openai_client(mesh) as client:
        yield client


@pytest.fixture
def claude(mesh):
    with anthropic_client(mesh) as client:
        yield client


def chat(client, **fields):
    # The simulated engine's noise may end inside a character, whose bytes show nowhere: not with this seed.
    fields = {"model": MODEL, "messages": USER, "max_tokens": 12, "seed": 1} | fields
    return client.chat.completions.create(**fields)


def test_models_are_listed_and_shown_to_both_clients(client, claude):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert [model.id for model in claude.models.list()] == [MODEL]
    assert claude.models.retrieve(MODEL).display_name == MODEL


def test_chat_streamed_and_whole_say_the_same(client):
    whole = chat(client, seed=5)
    message = whole.choices[0].message
    chunks = list(chat(client, seed=5, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.reasoning_content or "" for d in deltas) == message.reasoning_content
    assert "".join(d.content or "" for d in deltas) == message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"


def test_a_resent_conversation_reports_what_was_cached(client):
    messages = [{"role": "user", "content": "a long story " * 400}]
    first = chat(client, messages=messages, max_tokens=2)
    again = chat(client, messages=messages, max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= 768
    salted = chat(client, messages=messages, max_tokens=2, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_several_choices_differ_and_repeat_with_their_seed(client):
    fields = {"n": 3, "seed": 9, "extra_body": NO_THINKING}
    first, again = (chat(client, **fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.completion_tokens == 36
    streamed = ["", "", ""]
    for chunk in chat(client, stream=True, **fields):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs_come_with_every_token(client, top):
    answer = chat(client, logprobs=True, top_logprobs=top, extra_body=NO_THINKING)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 12
    assert all(entry.logprob <= 0 for entry in entries)
    assert all(len(entry.top_logprobs) <= (top or 0) for entry in entries)


def test_a_stop_string_ends_the_answer_before_it(client):
    text = chat(client, seed=3, extra_body=NO_THINKING).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    answer = chat(client, seed=3, stop=[stop], extra_body=NO_THINKING)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens <= 12


def test_completions_streamed_and_whole_say_the_same(client):
    fields = {"model": MODEL, "prompt": "Once upon", "max_tokens": 8, "seed": 4}
    whole = client.completions.create(**fields, logprobs=2)
    chunks = list(
        client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert len(whole.choices[0].logprobs.tokens) == 8


def test_responses_streamed_and_whole_say_the_same(client):
    fields = {"model": MODEL, "input": "hello", "max_output_tokens": 8, "extra_body": {"seed": 2}}
    whole = client.responses.create(**fields)
    assert whole.status == "incomplete"
    assert whole.usage.output_tokens == 8
    with client.responses.stream(**fields) as stream:
        types = [event.type for event in stream]
    assert types[0] == "response.created"
    assert types[-1] == "response.incomplete"
    last = list(client.responses.create(**fields, stream=True))[-1].response
    assert [item.content for item in last.output] == [item.content for item in whole.output]
    assert last.usage == whole.usage


def test_messages_streamed_and_whole_say_the_same(claude):
    fields = {"model": MODEL, "max_tokens": 8, "messages": USER, "extra_body": {"seed": 6}}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert final.content[0].thinking == whole.content[0].thinking
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)
    counted = claude.messages.count_tokens(model=MODEL, messages=USER).input_tokens
    assert counted == whole.usage.input_tokens


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"type": "string", "enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


def test_an_answer_obeys_its_json_schema(client):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    answer = chat(client, max_tokens=200, response_format=schema, extra_body=NO_THINKING)
    value = json.loads(answer.choices[0].message.content)
    assert isinstance(value["ok"], bool)
    assert value["kind"] in ("a", "b")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("field", "text"), [("regex", "(yes|no)!"), ("grammar", 'root ::= "yes!" | "no!"')]
)
def test_an_answer_obeys_the_extension_fields(client, field, text):
    answer = client.completions.create(
        model=MODEL, prompt="?", max_tokens=50, extra_body={field: text}
    )
    assert answer.choices[0].text in ("yes!", "no!")


def test_a_required_strict_tool_is_called_as_declared_streamed_and_whole(client):
    function = {"name": "set", "parameters": SCHEMA, "strict": True}
    fields = {
        "max_tokens": 400,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "extra_body": NO_THINKING,
    }
    answer = chat(client, **fields).choices[0]
    call = answer.message.tool_calls[0]
    assert answer.finish_reason == "tool_calls"
    assert call.function.name == "set"
    assert set(json.loads(call.function.arguments)) == {"ok", "kind"}
    parts = [
        part
        for chunk in chat(client, stream=True, **fields)
        for part in chunk.choices[0].delta.tool_calls or ()
        if part.index == 0
    ]
    assert parts[0].function.name == "set"
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_a_tool_round_trip_renders_the_call_and_its_result(client, claude):
    tool = {"type": "function", "function": FUNCTION}
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "run", "arguments": '{"command": "ls 2>&1"}'}
    history = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "file.txt"},
    ]
    plain = chat(client, tools=[tool], max_tokens=2).usage.prompt_tokens
    answer = chat(client, messages=history, tools=[tool], max_tokens=2)
    assert answer.usage.prompt_tokens > plain
    claude_tool = {"name": "run", "input_schema": FUNCTION["parameters"]}
    use = {"type": "tool_use", "id": "t1", "name": "run", "input": {"command": "ls 2>&1"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "file.txt"}
    messages = [
        *USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    message = claude.messages.create(
        model=MODEL, max_tokens=2, messages=messages, tools=[claude_tool]
    )
    plain = claude.messages.count_tokens(model=MODEL, messages=USER, tools=[claude_tool])
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens > plain.input_tokens
