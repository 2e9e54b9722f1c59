"""Text to tokens and back, on the built-in tokenizer."""

import threading

import pytest
from support.recipe import byte_by_byte, codec

TEXTS = [
    "",
    "plain text",
    "naïve 漢字 👩‍🚀",
    "a\x00b\r\n\t",
    "<｜Assistant｜></think>",
    "x" * 50_000,
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back(text):
    assert codec().decode(codec().encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_special_text_is_text_unless_asked(text):
    plain, special = (codec().encode(text, parse_special=parse) for parse in (False, True))
    assert (plain == special) == ("｜" not in text)


def test_half_a_character_waits_for_its_other_half():
    stream = codec().stream()
    assert [stream.push([token]) for token in byte_by_byte("a漢b")] == ["a", "", "", "漢", "b"]
    assert stream.finish() == ""


def test_a_character_that_never_ends_shows_as_its_replacement():
    stream = codec().stream()
    assert stream.push(byte_by_byte("漢")[:2]) == ""
    assert stream.finish() == "�"


def test_threads_encode_at_once():
    text = "the same words on every thread " * 500
    expected, results = codec().encode(text), []
    threads = [
        threading.Thread(target=lambda: results.append(codec().encode(text))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
