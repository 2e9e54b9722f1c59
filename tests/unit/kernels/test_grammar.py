"""Grammars: masks admit exactly what the grammar does, through rollback, special tokens and a free beginning."""

import json
from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flashmesh.errors import InvalidRequest
from flashmesh.kernels.grammar import Grammar, Vocabulary, compile_grammar
from flashmesh.types import GrammarKind, GrammarSpec

TOKENIZER_JSON = resources.files("flashmesh.data").joinpath("tokenizer.json").read_text()
TOKENIZER = Tokenizer.from_str(TOKENIZER_JSON)
VOCAB, EOS = 4096, 1
VOCABULARY = Vocabulary(TOKENIZER_JSON, VOCAB, EOS)

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}

TOOL_CALLS = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<｜DSML｜ calls>",
        "content": {"type": "json_schema", "json_schema": CITY},
        "end": "</｜DSML｜ calls>",
    },
}


def compiled(kind, text=""):
    return compile_grammar(GrammarSpec(kind=kind, text=text), VOCABULARY)


def ids(text):
    TOKENIZER.encode_special_tokens = False
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def admits(matcher, tokens):
    """Walks tokens under the masks, as an engine would; True if the output may then end."""
    for token in tokens:
        if not (matcher.mask()[token] and matcher.accept(token)):
            return False
    return bool(matcher.mask()[EOS])


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        (GrammarKind.REGEX, r"\d{3}-[ab]+", ["123-a", "000-abba"], ["12-a", "123-", "123-c", "x"]),
        (
            GrammarKind.JSON_SCHEMA,
            json.dumps(CITY),
            ['{"city": "Zürich"}', '{"city":""}'],
            ['{"location": "x"}', '{"city": 3}', '{"city": "x", "y": 1}', "{}", ""],
        ),
        (
            GrammarKind.EBNF,
            'root ::= item ("," item)*\nitem ::= [a-c] | "(" root ")"',
            ["a", "(a,b),c"],
            ["(a", "a,", "d"],
        ),
        (
            GrammarKind.JSON_OBJECT,
            "",
            ['{"any": [1, null, {"x": "</think>"}]}', "{}"],
            ["[1]", '{"a": }'],
        ),
        (
            GrammarKind.STRUCTURAL_TAG,
            json.dumps(TOOL_CALLS),
            ['<｜DSML｜ calls>{"city": "x"}</｜DSML｜ calls>'],
            ["<｜DSML｜ calls>", '{"city": "x"}'],
        ),
    ],
)  # fmt: skip
def test_an_output_may_end_exactly_where_it_obeys_the_grammar(kind, text, good, bad):
    grammar = compiled(kind, text)
    for output in good:
        tokens = ids(output) if kind is GrammarKind.STRUCTURAL_TAG else plain_ids(output)
        assert admits(grammar.start(), tokens), output
    for output in bad:
        assert not admits(grammar.start(), plain_ids(output)), output


def plain_ids(text):
    """Ids of a text whose special tokens are spelled out."""
    TOKENIZER.encode_special_tokens = True
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_special_tokens_take_part_only_where_a_structural_tag_names_them():
    (think_end,), (dsml,), (user,) = ids("</think>"), ids("｜DSML｜"), ids("<｜User｜>")
    anything = compiled(GrammarKind.REGEX, r"(.|\n)*").start().mask()
    assert not anything[[think_end, dsml, user, 0, 2]].any()
    assert anything[EOS]
    tag = compiled(GrammarKind.STRUCTURAL_TAG, json.dumps(TOOL_CALLS))  # \uff5c in it is escaped
    matcher = tag.start()
    assert matcher.accept(ids("<")[0])
    assert np.flatnonzero(matcher.mask())[0] == dsml
    assert not matcher.mask()[[think_end, user]].any()


def test_when_nothing_may_follow_only_the_end_token_is_left():
    matcher = compiled(GrammarKind.REGEX, "ab").start()
    assert admits(matcher, ids("ab"))
    assert np.flatnonzero(matcher.mask()).tolist() == [EOS]


pieces = st.lists(st.sampled_from("ab,()x"), max_size=8).map("".join)


@settings(deadline=None)
@given(kept=pieces, taken_back=pieces, then=pieces)
def test_tokens_taken_back_leave_no_trace(kept, taken_back, then):
    grammar = compiled(GrammarKind.EBNF, 'root ::= item ("," item)*\nitem ::= [ab] | "(" root ")"')
    matcher, other = grammar.start(), grammar.start()
    for token in plain_ids(kept):
        assert matcher.accept(token) == other.accept(token)
    matcher.rollback(sum(matcher.accept(token) for token in plain_ids(taken_back)))
    for token in plain_ids(then):
        assert np.array_equal(matcher.mask(), other.mask())
        assert matcher.accept(token) == other.accept(token)


def test_blanks_inside_json_come_to_an_end():
    for kind, text in ((GrammarKind.JSON_SCHEMA, json.dumps(CITY)), (GrammarKind.JSON_OBJECT, "")):
        matcher = compiled(kind, text).start()
        assert matcher.accept(plain_ids("{")[0])
        (newline,) = plain_ids("\n")
        assert sum(matcher.accept(newline) for _ in range(100)) == 16
        assert matcher.mask().any()


def test_the_thinking_section_is_free_until_its_end_token():
    (think_end,) = ids("</think>")
    matcher = compiled(GrammarKind.JSON_SCHEMA, json.dumps(CITY)).start(think_end)
    for token in plain_ids("hm, <think> "):
        assert matcher.mask() is None
        assert not matcher.may_end
        assert matcher.accept(token)
    # One round of drafts: the end of thinking, a brace, and a key that the schema does not have.
    assert matcher.accept(think_end)
    assert matcher.may_end
    assert matcher.accept(plain_ids("{")[0])
    assert not matcher.accept(plain_ids("location")[0])
    matcher.rollback(2)
    assert matcher.mask() is None
    matcher.accept(think_end)
    matcher.rollback(0)
    assert admits(matcher, plain_ids('{"city": "x"}'))


def test_a_fork_goes_its_own_way():
    matcher = compiled(GrammarKind.REGEX, "a(b|c)").start(5)
    matcher.accept(5)
    matcher.accept(ids("a")[0])
    twin = matcher.fork()
    assert twin.accept(ids("b")[0])
    assert np.flatnonzero(twin.mask()).tolist() == [EOS]
    assert matcher.mask()[ids("c")[0]]
    twin.rollback(3)
    assert twin.mask() is None
    assert matcher.may_end


def test_a_packed_grammar_is_the_same_in_another_process():
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(CITY))
    first = compile_grammar(spec, VOCABULARY)
    second = Grammar.unpack(first.pack(), spec, Vocabulary(TOKENIZER_JSON, VOCAB, EOS))
    assert second.num_bytes == first.num_bytes > 0
    one, two = first.start(), second.start()
    for token in plain_ids('{"city": "x"}'):
        assert np.array_equal(one.mask(), two.mask())
        assert one.accept(token)
        assert two.accept(token)


def test_ids_that_the_tokenizer_lacks_are_never_allowed():
    padded = Vocabulary(TOKENIZER_JSON, VOCAB + 100, EOS)
    spec = GrammarSpec(kind=GrammarKind.REGEX, text=r"(.|\n)*")
    mask = compile_grammar(spec, padded).start().mask()
    assert len(mask) == VOCAB + 100
    assert not mask[VOCAB:].any()


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "(a", "regex grammar is not usable: Regex parsing error at position 3"),
        (GrammarKind.REGEX, r"(a)\1", "Backreference is not supported"),
        (GrammarKind.JSON_SCHEMA, '{"type": "objct"}', 'Unsupported type "objct"'),
        (GrammarKind.JSON_SCHEMA, "{", "Failed to parse JSON"),
        (GrammarKind.EBNF, "root ::= other", 'Rule "other" is not defined'),
        (GrammarKind.EBNF, "root ::= root", "admits no text"),
        (GrammarKind.STRUCTURAL_TAG, "{", "structural_tag grammar is not JSON"),
        (GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag"}', "Invalid structural tag"),
        (GrammarKind.REGEX, "((a*)*)*b", "too ambiguous"),
    ],
)
def test_an_unusable_grammar_says_why(kind, text, message):
    with pytest.raises(InvalidRequest) as raised:
        compiled(kind, text)
    assert message in str(raised.value)
    assert ".cc" not in str(raised.value)


def test_a_grammar_that_grows_too_slow_stops_its_own_output_only(monkeypatch):
    matcher = compiled(GrammarKind.REGEX, "a*b").start()
    (letter,) = ids("a")
    assert matcher.accept(letter)
    monkeypatch.setattr("flashmesh.kernels.grammar.MAX_STEP_S", -1.0)
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        matcher.mask()
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        matcher.accept(ids("b")[0])
    monkeypatch.undo()
    assert matcher.mask()[letter]  # the failed calls have changed nothing


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "", "regex needs its text"),
        (GrammarKind.JSON_OBJECT, "{}", "json_object takes no text"),
    ],
)
def test_a_specification_with_the_wrong_parts_is_refused(kind, text, message):
    with pytest.raises(InvalidRequest, match=message):
        GrammarSpec(kind=kind, text=text)
