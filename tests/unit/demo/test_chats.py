"""The generated conversations: right answers, two splits that never meet, and the library's own rendering."""

import json
import re
from itertools import islice
from random import Random

import pytest
from tokenizers import Tokenizer

from flashmesh.data import shipped_tokenizer
from tools.train_demo.chats import puzzles, reading, structured, tool_calls
from tools.train_demo.chats.chat import Renderer
from tools.train_demo.chats.mixture import chats
from tools.train_demo.chats.stories import story

TOKENIZER = shipped_tokenizer("demo")
PLAIN = Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def renderer():
    return Renderer(TOKENIZER)


def drawn(family, count):
    draw = Random(3)
    return [family(draw) for _ in range(count)]


def text(ids):
    return PLAIN.decode(ids, skip_special_tokens=False)


def test_sums_and_their_columns_are_right():
    for chat in drawn(puzzles.arithmetic, 300):
        a, sign, b, result = re.fullmatch(
            r"(\d+) (.) (\d+) = (\d+)", chat.answer["content"]
        ).groups()
        assert eval(f"{a} {sign} {b}") == int(result)
        thoughts = chat.answer.get("reasoning_content", "")
        for step in re.findall(r"(?<!\d)(\d(?: [-+] \d)+) = (-?\d+)[,;.]", thoughts):
            assert eval(step[0]) == int(step[1])


def test_the_answer_to_a_reading_question_stands_in_the_text():
    for chat in drawn(reading.reading, 100):
        assert chat.answer["content"] in chat.messages[0]["content"]


def test_a_recalled_code_is_the_one_of_the_thing_that_is_asked_for():
    for chat in drawn(reading.recall, 50):
        *_, question = chat.messages[0]["content"].splitlines()
        thing = re.search(r"(?:of the|has the) (\w+ \w+)[.?]", question)[1]
        code = re.search(rf"{thing}(?: is|:| has the number) (\d+)", chat.messages[0]["content"])
        assert chat.answer["content"] == code[1]


def test_json_answers_have_the_keys_of_their_schema():
    for chat in drawn(structured.json_answer, 50):
        answer = json.loads(chat.answer["content"])
        if chat.response_format["type"] == "json_schema":
            schema = chat.response_format["json_schema"]["schema"]
            assert list(answer) == schema["required"] == list(schema["properties"])


def test_calls_name_a_declared_tool_and_all_its_parameters():
    for chat in drawn(tool_calls.tool_call, 100):
        (call,) = chat.answer["tool_calls"]
        declared = {tool["function"]["name"]: tool["function"] for tool in chat.tools}
        schema = declared[call["function"]["name"]]["parameters"]
        assert list(json.loads(call["function"]["arguments"])) == schema["required"]


def test_the_splits_share_no_prompt_and_a_seed_gives_the_same_again():
    def prompts(seed, *, held_out, count):
        return [json.dumps(c.body()) for c in islice(chats(seed, held_out=held_out), count)]

    training = prompts(1, held_out=False, count=1500)
    assert training == prompts(1, held_out=False, count=1500)
    held_out = set(prompts(2, held_out=True, count=100))
    assert not held_out & set(training)


def test_rendering_counts_what_the_assistant_says_and_nothing_else(renderer):
    (chat,) = drawn(reading.memory, 1)
    chat.thinking = False
    chat.answer.pop("reasoning_content", None)
    rendered = renderer.render(chat)
    ids = [*rendered.prompt, *rendered.answer]
    counted = text([i for i, counts in zip(ids, rendered.counted, strict=True) if counts])
    said = [m["content"] for m in [*chat.messages, chat.answer] if m["role"] == "assistant"]
    assert counted == "".join(f"{words}<｜end▁of▁sentence｜>" for words in said)
    assert text(rendered.prompt).endswith("<｜Assistant｜></think>")


def test_thoughts_of_earlier_turns_do_not_count(renderer):
    chat = next(c for c in drawn(reading.memory, 50) if c.thinking)
    rendered = renderer.render(chat)
    assert not any(rendered.counted[: len(rendered.prompt)])
    wanted = f"{chat.answer['reasoning_content']}</think>{chat.answer['content']}"
    assert text(rendered.answer) == wanted + "<｜end▁of▁sentence｜>"


def test_a_call_is_written_as_the_library_writes_it_in_a_history(renderer):
    draw = Random(8)
    chat = next(c for c in iter(lambda: tool_calls.tool_answer(draw), None) if not c.thinking)
    call = chat.messages[1]
    before = tool_calls.Chat(
        family="tool_call", messages=chat.messages[:1], answer=call, tools=chat.tools
    )
    answer = text(renderer.render(before).answer)
    assert answer in text(renderer.prompt(chat))
    assert answer.startswith("\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=")
    assert answer.endswith("</｜DSML｜ calls><｜end▁of▁sentence｜>")


def test_stories_name_their_hero_and_end():
    for seed in range(20):
        told = story(Random(seed))
        assert told[-1] in ".!"
        assert "{" not in told
        assert not re.search(r"\b[Aa] [aeiou]", told)
