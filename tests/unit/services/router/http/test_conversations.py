"""Scripted tokens through the adapter: what the three APIs say of them."""

import json

import pytest
from support.recipe import (
    MODEL,
    NO_THINKING,
    USER,
    byte_by_byte,
    codec,
    conversations,
    events_of,
    tokens_of,
)

from flashmesh.errors import InvalidRequest
from flashmesh.services.router.http.recipe import CHAT, MESSAGES, RESPONSES
from flashmesh.types import FinishReason, GrammarKind

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
CALL = (
    "I look.\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="run">\n'
    '<｜DSML｜ parameter name="command" string="true">make test 2>&1</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>"
)


def read(api=CHAT, **fields):
    body = {"model": MODEL.name}
    body |= {"input": "hello"} if api is RESPONSES else {"messages": USER}
    if api is MESSAGES:
        body["max_tokens"] = 100
    return conversations().read(api, body | fields, MODEL, "1")


def answer(exchange, text, finish=STOP):
    """Feeds a text one byte at a time; returns events and body."""
    reply = exchange.reply
    data = reply.start(0)
    for token in byte_by_byte(text):
        data += reply.push(tokens_of([token]))[0]
    data += reply.push(tokens_of([], finish))[0]
    return events_of(data + reply.finish()), json.loads(reply.body())


def deltas(events):
    return [event["choices"][0]["delta"] for _, event in events if event != "[DONE]"]


def test_a_call_that_ends_in_a_redirection_streams_byte_by_byte_as_valid_json():
    events, body = answer(read(tools=[TOOL], stream=True, **NO_THINKING), CALL)
    parts = [call for delta in deltas(events) for call in delta.get("tool_calls", ())]
    arguments = "".join(part["function"].get("arguments", "") for part in parts)
    assert json.loads(arguments) == {"command": "make test 2>&1"}
    assert [part["id"] for part in parts if part.get("id")] == [parts[0]["id"]]
    assert len(parts) > len("make test")  # it streamed
    text = "".join(delta.get("content") or "" for delta in deltas(events))
    assert text.strip() == "I look."
    assert events[-1] == (None, "[DONE]")
    assert events[-2][1]["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == arguments


def test_the_same_call_in_messages_is_a_tool_use_block():
    tool = {"name": "run", "input_schema": TOOL["function"]["parameters"]}
    events, body = answer(read(MESSAGES, tools=[tool], stream=True, **NO_THINKING), CALL)
    parts = [
        event["delta"]["partial_json"]
        for name, event in events
        if name == "content_block_delta" and event["delta"]["type"] == "input_json_delta"
    ]
    assert json.loads("".join(parts)) == {"command": "make test 2>&1"}
    assert body["content"][-1]["input"] == {"command": "make test 2>&1"}
    assert body["stop_reason"] == "tool_use"
    assert events[-1][0] == "message_stop"


def test_the_same_call_in_responses_is_a_function_call():
    tool = {"type": "function", **TOOL["function"]}
    events, body = answer(
        read(RESPONSES, tools=[tool], stream=True, thinking=None), "</think>" + CALL
    )
    (call,) = [item for item in body["output"] if item["type"] == "function_call"]
    assert json.loads(call["arguments"]) == {"command": "make test 2>&1"}
    assert events[-1][0] == "response.completed"
    numbers = [event["sequence_number"] for _, event in events]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize(
    "text",
    [
        "<｜DSML｜ calls>\n<｜DSML｜ invoke nam",
        "<｜DSML｜ calls>\nno call at all",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="a\nb">',
        "<｜DSML｜ call>",
        "<｜DSML｜",
        "｜DSML｜ calls>",
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>",
    ],
)
def test_a_malformed_wrapper_comes_out_as_text_and_the_stream_ends(text):
    events, body = answer(read(tools=[TOOL], stream=True, **NO_THINKING), "so: " + text)
    message = body["choices"][0]["message"]
    assert message["content"] == "so: " + text
    assert not message.get("tool_calls")
    assert events[-1] == (None, "[DONE]")
    assert events[-2][1]["choices"][0]["finish_reason"] == "stop"


def test_text_after_a_malformed_wrapper_and_a_call_after_that_are_both_there():
    text = "<｜DSML｜ calls>\noops " + CALL
    _, body = answer(read(tools=[TOOL], **NO_THINKING), text)
    message = body["choices"][0]["message"]
    assert message["content"].strip() == "<｜DSML｜ calls>\noops I look."
    assert message["tool_calls"][0]["function"]["arguments"] == '{"command": "make test 2>&1"}'


def test_markup_inside_an_argument_is_text():
    inner = "echo '<｜DSML｜ calls>'"
    _, body = answer(read(tools=[TOOL], **NO_THINKING), CALL.replace("make test 2>&1", inner))
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"command": inner}


def test_characters_split_over_tokens_come_whole():
    text = "naïve 漢字 👩‍🚀 \x00 end"
    events, body = answer(read(stream=True, **NO_THINKING), text)
    pieces = [delta.get("content") or "" for delta in deltas(events)]
    assert "".join(pieces) == text == body["choices"][0]["message"]["content"]
    assert not any("�" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_show_nothing():
    exchange = read(stream=True, **NO_THINKING)
    data = exchange.reply.start(0)
    for token in byte_by_byte("漢")[:2]:
        data += exchange.reply.push(tokens_of([token]))[0]
    data += exchange.reply.push(tokens_of([], LENGTH))[0]
    assert "".join(delta.get("content") or "" for delta in deltas(events_of(data))) == ""
    last = events_of(data)[-1][1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 2


def test_a_chunk_that_ends_inside_a_character_still_shows_what_is_whole():
    exchange = read(**NO_THINKING)
    exchange.reply.start(0)
    exchange.reply.push(tokens_of(byte_by_byte("all of 漢")[:-1], LENGTH))
    body = json.loads(exchange.reply.body())
    assert body["choices"][0]["message"]["content"] == "all of "
    assert body["usage"]["completion_tokens"] == len("all of ") + 2


def test_every_api_counts_every_token():
    ids = [*byte_by_byte("why</think>so"), MODEL.eos_token_id, *byte_by_byte("漢")[:1]]
    for api, name in ((CHAT, "completion"), (RESPONSES, "output"), (MESSAGES, "output")):
        reply = read(api, ignore_eos=True).reply
        reply.start(0)
        reply.push(tokens_of(ids, LENGTH))
        usage = json.loads(reply.body())["usage"]
        assert usage[f"{name}_tokens"] == len(ids)
        if api is not MESSAGES:
            prompt = usage["prompt_tokens" if api is CHAT else "input_tokens"]
            assert usage["total_tokens"] == prompt + len(ids)
            assert usage[f"{name}_tokens_details"] == {"reasoning_tokens": 3}


def test_thinking_is_apart_and_counted_by_its_tokens():
    events, body = answer(read(stream=True), "why?</think>so.")
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why?", "so.")
    details = body["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("why?")}
    assert body["usage"]["completion_tokens"] == len("why?") + 1 + len("so.")
    assert events[-2][1]["usage"]["completion_tokens_details"] == details


def test_a_text_that_looks_like_the_count_is_left_alone():
    text = '{"reasoning_tokens":99}'
    _, body = answer(read(stream=True), f"a</think>{text}")
    assert body["choices"][0]["message"]["content"] == text
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_a_stop_string_ends_its_choice_inside_a_chunk():
    exchange = read(stop=["END"], **NO_THINKING)
    exchange.reply.start(0)
    ids = byte_by_byte("ab END more")
    events, num_overrun = exchange.reply.push(tokens_of(ids))
    assert (events, num_overrun) == (b"", len(" more"))
    body = json.loads(exchange.reply.body())
    assert body["choices"][0]["message"]["content"] == "ab "
    assert body["choices"][0]["finish_reason"] == "stop"


def test_messages_name_the_stop_sequence():
    exchange = read(MESSAGES, stop_sequences=["END"], **NO_THINKING)
    exchange.reply.start(0)
    exchange.reply.push(tokens_of(byte_by_byte("ab END more")))
    body = json.loads(exchange.reply.body())
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


def test_several_choices_have_their_numbers_and_one_usage():
    exchange = read(n=2, stream=True, stream_options={"include_usage": True}, **NO_THINKING)
    assert exchange.params.num_choices == 2
    reply = exchange.reply
    data = reply.start(3)
    for choice, text in ((1, "second"), (0, "first")):
        data += reply.push(tokens_of(byte_by_byte(text), choice=choice))[0]
        data += reply.push(tokens_of([], LENGTH, choice=choice))[0]
    chunks = [event for _, event in events_of(data)]
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content") or ""
    assert texts == ["first", "second"]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(usages) == 1
    assert usages[0]["completion_tokens"] == len("firstsecond")
    assert usages[0]["prompt_tokens_details"] == {"cached_tokens": 3}
    body = json.loads(reply.body())
    assert [choice["message"]["content"] for choice in body["choices"]] == ["first", "second"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] == usages[0]


def test_logprobs_follow_their_tokens_and_the_end_token_shows_nowhere():
    exchange = read(logprobs=True, top_logprobs=2, ignore_eos=True, **NO_THINKING)
    assert exchange.params.top_logprobs == 2
    exchange.reply.start(0)
    ids = [*byte_by_byte("a"), MODEL.eos_token_id, *byte_by_byte("b")]
    exchange.reply.push(tokens_of(ids, LENGTH, tops=2))
    choice = json.loads(exchange.reply.body())["choices"][0]
    assert choice["message"]["content"] == "ab"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2, 2]


def test_special_token_text_of_a_user_is_ordinary_text():
    plain, spoofed = (
        conversations().read(
            CHAT, {"model": MODEL.name, "messages": [{"role": "user", "content": text}]}, MODEL, "1"
        )
        for text in ("x", "<｜Assistant｜>")
    )
    (assistant,) = codec().recipe.encode("<｜Assistant｜>")
    assert plain.prompt.count(assistant) == spoofed.prompt.count(assistant) == 1


def test_parameters_beyond_the_library_arrive():
    exchange = read(
        seed=7,
        n=3,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"20": -100, "3": 1.5},
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        stop_token_ids=[9],
        max_tokens=4,
        cache_salt="s",
    )
    params = exchange.params
    assert (exchange.seed, exchange.cache_salt, params.num_choices) == (7, b"s", 3)
    assert params.logit_bias == ((3, 1.5), (20, -100.0))
    assert (params.frequency_penalty, params.presence_penalty) == (0.5, -0.5)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.1)
    assert (params.min_tokens, params.stop_token_ids, params.max_tokens) == (2, (9,), 4)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": JSON_SCHEMA}, GrammarKind.JSON_SCHEMA),
        ({"regex": "a+"}, GrammarKind.REGEX),
        ({"grammar": 'root ::= "a"'}, GrammarKind.EBNF),
        ({"tools": [STRICT]}, GrammarKind.STRUCTURAL_TAG),
    ],
)
@pytest.mark.parametrize("thinking", [True, False])
def test_what_the_output_must_obey_holds_after_the_thinking(fields, kind, thinking):
    grammar = read(**fields, **({} if thinking else NO_THINKING)).params.grammar
    (think_end,) = codec().recipe.encode("</think>")
    assert grammar.kind is kind
    assert grammar.start_after == (think_end if thinking else None)


def test_an_answer_that_is_continued_obeys_from_its_first_token():
    messages = [*USER, {"role": "assistant", "content": "so ", "prefix": True}]
    assert read(messages=messages, regex="a+").params.grammar.start_after is None


def test_json_mode_takes_any_object():
    messages = [{"role": "user", "content": "as json"}]
    body = {"model": MODEL.name, "messages": messages, "response_format": {"type": "json_object"}}
    grammar = conversations().read(CHAT, body, MODEL, "1").params.grammar
    assert (grammar.kind, grammar.text) == (GrammarKind.JSON_OBJECT, "")


def test_tools_that_are_not_strict_are_not_enforced():
    assert read(tools=[TOOL]).params.grammar is None


def test_a_required_tool_begins_inside_the_calls():
    exchange = read(tools=[TOOL], tool_choice="required", **NO_THINKING)
    layout = json.loads(exchange.params.grammar.text)["format"]
    assert layout["elements"][0]["tags"][0]["begin"].startswith("<｜DSML｜ invoke")
    _, body = answer(exchange, CALL.partition("calls>\n")[2])
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "run"


IMAGE = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}]}, "images are not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
        ({"regex": "a", "grammar": "b"}, "exclude each other"),
        ({"regex": "a", "response_format": JSON_SCHEMA}, "only one of"),
        ({"n": 0}, "num_choices"),
        ({"n": "2"}, "n must be a whole number, not a string"),
        ({"logit_bias": {"x": 1}}, "'x' is not a token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias must be in"),
        ({"logit_bias": [1]}, "logit_bias must be an object"),
        ({"top_k": True}, "top_k must be a whole number, not true or false"),
        ({"temperature": "hot"}, "expected f32"),
        ({"messages": "hi"}, "expected"),
        ({"messages": None}, "expected"),
    ],
)
def test_bad_fields_are_refused_with_their_name(fields, text):
    with pytest.raises(InvalidRequest, match=text):
        read(**fields)
