"""The shipped demo checkpoint, and the benchmark that judges it, on a few of its held-out conversations."""

import json

import pytest

from flashmesh.bench import demo
from flashmesh.bench.demo_chats import Conversations, is_valid_call, token_losses
from flashmesh.data import demo_folder
from flashmesh.kernels.engine import load_engine
from flashmesh.kernels.inspect import inspect_checkpoint

MAX_BYTES = 24 << 20


@pytest.fixture(scope="module")
def engine():
    return load_engine(demo_folder(), role="all", name="demo", num_pages=16, num_slots=1)


@pytest.fixture(scope="module")
def found():
    return Conversations(demo_folder())


def some(found, family, count):
    chats = [chat for chat in found.chats if chat.family == family and len(chat.prompt) < 400]
    return chats[:count]


def test_the_folder_is_complete_small_and_in_the_released_format():
    folder = demo_folder()
    assert inspect_checkpoint(folder).problem is None
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    assert (folder / "README.md").read_text().startswith("#")


def test_it_answers_simple_questions_and_stops(engine, found):
    for family in ("arithmetic", "facts", "lists"):
        for chat in some(found, family, 2):
            given = demo.answer(engine, chat, demo.greedy())
            assert given.stopped
            assert given.ids == chat.answer_ids[:-1], chat.body


def test_drafts_are_accepted_and_change_nothing(engine, found):
    (chat,) = some(found, "about", 1)
    drafted = demo.answer(engine, chat, demo.greedy())
    plain = demo.answer(engine, chat, demo.greedy(), num_drafts=0)
    assert drafted.ids == plain.ids
    assert plain.rounds == []
    assert len(drafted.rounds) < len(drafted.ids) / 3


def test_a_call_is_made_in_the_markup_that_clients_get_parsed(engine, found):
    (chat,) = some(found, "tool_call", 1)
    message = found.message(chat, demo.answer(engine, chat, demo.greedy()).ids)
    assert demo.calls(message) == demo.calls(chat.answer)
    assert is_valid_call(message, chat.body["tools"])


def test_a_likely_answer_costs_less_than_an_unlikely_one(engine, found):
    (chat,) = some(found, "facts", 1)
    likely = token_losses(engine, [*chat.prompt, *chat.answer_ids])
    unlikely = token_losses(engine, [*chat.prompt, *reversed(chat.answer_ids)])
    assert len(likely) == len(chat.prompt) + len(chat.answer_ids) - 1
    assert sum(likely) < sum(unlikely)
    assert min(likely) >= 0


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lamp",
            "parameters": {
                "type": "object",
                "properties": {"room": {"type": "string"}, "level": {"type": "integer"}},
                "required": ["room", "level"],
            },
        },
    }
]


@pytest.mark.parametrize(
    ("name", "arguments", "valid"),
    [
        ("lamp", {"room": "attic", "level": 3}, True),
        ("lamps", {"room": "attic", "level": 3}, False),
        ("lamp", {"room": "attic"}, False),
        ("lamp", {"room": "attic", "level": "3"}, False),
        ("lamp", {"room": "attic", "level": True}, False),
        ("lamp", {"room": "attic", "level": 3, "colour": "red"}, False),
    ],
)
def test_a_call_is_valid_if_it_fits_the_declaration(name, arguments, valid):
    call = {"function": {"name": name, "arguments": json.dumps(arguments)}}
    assert is_valid_call({"tool_calls": [call]}, TOOLS) is valid


def test_no_call_and_broken_json_are_not_valid():
    assert not is_valid_call({"content": "hello"}, TOOLS)
    broken = {"function": {"name": "lamp", "arguments": "{"}}
    assert not is_valid_call({"tool_calls": [broken]}, TOOLS)


def test_confidences_are_compared_with_what_was_accepted():
    rounds = [([0.9, 0.9, 0.1], 2), ([0.9, 0.1, 0.1], 0)]
    accepted, error = demo.speculation(iter([demo.Answer(rounds=rounds)]))
    assert accepted.value == 1
    # Four drafts were put to the test: 0.9 three times, right twice; 0.1 once, wrong.
    assert error.n == 4
    assert error.value == pytest.approx((abs(2.7 - 2) + 0.1) / 4)
