"""The built-in tokenizer: any text survives it, and DeepSeek's own library accepts it."""

from importlib import resources

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

PATH = str(resources.files("flashmesh.data").joinpath("tokenizer.json"))
TOKENIZER = Tokenizer.from_file(PATH)
SPECIALS = [
    getattr(deepseek_recipe.SpecialToken, name)
    for name in dir(deepseek_recipe.SpecialToken)
    if isinstance(getattr(deepseek_recipe.SpecialToken, name), deepseek_recipe.SpecialToken)
]


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_it_has_4096_entries_with_dense_ids():
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(4096))


@settings(deadline=None, max_examples=60)
@given(st.text())
def test_any_text_survives_a_round_trip(text):
    assert TOKENIZER.decode(encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("special", SPECIALS, ids=str)
def test_every_special_token_is_one_id_below_20(special):
    (token,) = encode(special.default_str())
    assert token < 20
    assert TOKENIZER.id_to_token(token) == special.default_str()


def test_begin_end_and_padding_have_their_released_ids():
    kinds = deepseek_recipe.SpecialToken
    texts = [kinds.Bos.default_str(), kinds.Eos.default_str(), "<｜▁pad▁｜>"]
    assert [encode(text) for text in texts] == [[0], [1], [2]]


def test_special_text_is_parsed_inside_ordinary_text():
    user = deepseek_recipe.SpecialToken.User.default_str()
    ids = encode(f"hello{user}world")
    assert ids == [*encode("hello"), *encode(user), *encode("world")]


def test_nothing_is_added_around_a_text():
    assert encode("") == []
    assert TOKENIZER.encode("word").ids == encode("word")


def test_source_code_takes_few_tokens():
    text = resources.files("flashmesh").joinpath("errors.py").read_text()
    assert len(text.encode()) / len(encode(text)) > 2.5


def test_deepseek_recipe_renders_a_conversation_with_it():
    tokenizer = deepseek_recipe.Tokenizer.from_file(PATH)
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "hi"}]}
    request = deepseek_recipe.ChatCompletionRequest(body)
    conversation = request.convert(deepseek_recipe.ConversionOptions()).conversation
    ids = encoding.encode(conversation)
    assert ids[0] == 0
    assert TOKENIZER.token_to_id("<｜User｜>") in ids
    assert max(ids) < 4096
