"""Raw text: what is read, and how the answer is worded."""

import json

import pytest
from support.recipe import MODEL, byte_by_byte, codec, events_of, tokens_of

from flashmesh.errors import InvalidRequest
from flashmesh.services.router.http import completions
from flashmesh.types import FinishReason, GrammarKind

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def read(**fields):
    return completions.read(codec(), {"model": MODEL.name, "prompt": "hi"} | fields, MODEL, "1")


def test_special_token_text_is_text_unless_asked():
    (assistant,) = codec().recipe.encode("<｜Assistant｜>")
    assert assistant not in read(prompt="<｜Assistant｜>").prompt
    assert read(prompt="<｜Assistant｜>", parse_special=True).prompt == [assistant]


@pytest.mark.parametrize("prompt", ["漢", ["漢"], [5, 6], [[5, 6]]])
def test_a_prompt_is_text_or_ids_and_may_stand_in_a_list(prompt):
    assert read(prompt=prompt).prompt in ([5, 6], codec().encode("漢"))


def test_text_streams_with_usage_at_the_end():
    reply = read(stream=True, stream_options={"include_usage": True}).reply
    data = reply.start(2)
    for token in byte_by_byte("é!"):
        data += reply.push(tokens_of([token]))[0]
    data += reply.push(tokens_of([], LENGTH))[0] + reply.finish()
    *chunks, usage, (_, mark) = events_of(data)
    assert "".join(chunk["choices"][0]["text"] for _, chunk in chunks) == "é!"
    assert [chunk["choices"][0]["finish_reason"] for _, chunk in chunks][-1] == "length"
    assert all(chunk["usage"] is None for _, chunk in chunks)
    assert usage[1]["choices"] == []
    assert usage[1]["usage"]["completion_tokens"] == 3
    assert usage[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert mark == "[DONE]"


def test_a_stop_string_cuts_text_and_tokens():
    reply = read(stop="END", logprobs=1).reply
    reply.start(0)
    assert reply.push(tokens_of(byte_by_byte("ab END more"), tops=1)) == (b"", len(" more"))
    body = json.loads(reply.body())
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab ", "stop")
    assert body["usage"]["completion_tokens"] == len("ab END") == len(choice["logprobs"]["tokens"])


def test_logprobs_are_lists_by_token():
    reply = read(logprobs=2, n=2).reply
    reply.start(0)
    for choice, text in ((0, "ab"), (1, "c")):
        reply.push(tokens_of(byte_by_byte(text), LENGTH, choice=choice, tops=2))
    first, second = json.loads(reply.body())["choices"]
    assert first["logprobs"]["tokens"] == ["a", "b"]
    assert first["logprobs"]["token_logprobs"] == [-0.5, -0.5]
    assert first["logprobs"]["text_offset"] == [0, 1]
    assert [len(top) for top in first["logprobs"]["top_logprobs"]] == [2, 2]
    assert second["logprobs"]["tokens"] == ["c"]


def test_offsets_go_on_over_streamed_chunks():
    reply = read(logprobs=0, stream=True).reply
    data = b"".join(reply.push(tokens_of(byte_by_byte(text)))[0] for text in ("ab", "c"))
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for _, event in events_of(data)]
    assert offsets == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            GrammarKind.JSON_SCHEMA,
        ),
        ({"regex": "a+"}, GrammarKind.REGEX),
    ],
)
def test_grammars_govern_from_the_first_token(fields, kind):
    grammar = read(**fields).params.grammar
    assert (grammar.kind, grammar.start_after) == (kind, None)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"echo": True}, "echo is not supported"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": None}, "prompt must be"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"prompt": [[1], [2]]}, "one prompt"),
        ({"prompt": [1, "a"]}, "one prompt"),
        ({"prompt": [1, 2.5]}, "token ids"),
        ({"prompt": [-1]}, "below 0"),
        ({"prompt": {"a": 1}}, "prompt must be"),
        ({"stop": ["a"] * 17}, "at most 16"),
        ({"stop": [1]}, "stop must be"),
        ({"stop": ""}, "1 to 256"),
        ({"logprobs": 21}, "top_logprobs"),
        ({"stream_options": 1}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_fields_are_refused_with_their_name(fields, text):
    with pytest.raises(InvalidRequest, match=text):
        read(**fields)
