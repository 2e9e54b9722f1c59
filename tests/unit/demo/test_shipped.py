"""What ships beside the weights: the held-out set, the tokenizer, and how a question becomes a prompt."""

import json
from argparse import Namespace

import pytest
from tokenizers import Tokenizer

from flashmesh.chat_prompt import chat_prompt
from flashmesh.commands.generate import read_prompt
from flashmesh.data import demo_folder, shipped_tokenizer
from tools.train_demo.chats.chat import Chat, Renderer
from tools.train_demo.sizes import trained_config

FOLDER = demo_folder()
EVALUATION = json.loads((FOLDER / "evaluation.json").read_text(encoding="utf-8"))


def chat_of(stored):
    body = stored["body"]
    return Chat(
        family=stored["family"],
        messages=body["messages"],
        answer=stored["answer"],
        thinking="thinking" not in body,
        effort=body.get("reasoning_effort", "high"),
        tools=body.get("tools", []),
        response_format=body.get("response_format"),
    )


def test_every_conversation_of_the_set_was_kept_from_training():
    chats = [chat_of(stored) for stored in EVALUATION["chats"]]
    assert len(chats) == 200
    assert all(chat.held_out() for chat in chats)
    assert sum(chat.family == "tool_call" for chat in chats) == 40


def test_its_answers_are_those_that_the_library_renders():
    renderer = Renderer(shipped_tokenizer("demo"))
    for stored in EVALUATION["chats"]:
        chat = chat_of(stored)
        assert chat.body() == stored["body"]
        assert renderer.render(chat).answer == stored["answer_ids"]


def test_the_configuration_is_the_one_that_the_trainer_makes():
    tokenizer = Tokenizer.from_file(str(shipped_tokenizer("demo")))
    shipped = json.loads((FOLDER / "config.json").read_text())
    assert trained_config(tokenizer) == shipped


def test_its_tokenizer_has_the_special_tokens_of_the_built_in_one_and_lone_digits():
    mine, other = (
        Tokenizer.from_file(str(shipped_tokenizer(name))) for name in ("demo", "demo-random")
    )
    added = {token: added.content for token, added in mine.get_added_tokens_decoder().items()}
    assert added == {t: a.content for t, a in other.get_added_tokens_decoder().items()}
    assert mine.get_vocab_size() == other.get_vocab_size() == 4096
    assert len(mine.encode("12345").ids) == 5


def test_only_built_in_models_have_a_shipped_tokenizer():
    assert shipped_tokenizer("/some/folder") is None


def test_a_question_becomes_a_prompt_that_thinks_nothing():
    wanted = "<｜begin▁of▁sentence｜><｜User｜>Who are you?<｜Assistant｜></think>"
    assert chat_prompt("Who are you?") == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"chat": True, "token_ids": False}, chat_prompt("7 8")),
        ({"chat": False, "token_ids": True}, [7, 8]),
        ({"chat": False, "token_ids": False}, "7 8"),
    ],
)
def test_generate_reads_a_question_ids_or_plain_text(options, wanted):
    assert read_prompt(Namespace(**options), "7 8") == wanted
