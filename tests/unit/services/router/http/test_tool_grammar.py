"""The tag of tool calls against xgrammar itself, on what deepseek-recipe's markup looks like."""

from importlib import resources

import pytest
from support.recipe import MODEL, byte_by_byte

pytest.importorskip("xgrammar")

from flashmesh.kernels.grammar import Vocabulary, compile_grammar
from flashmesh.services.router.http.tool_grammar import tool_grammar

STRICT = {
    "name": "run",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
LOOSE = {"name": "note", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def vocabulary():
    text = resources.files("flashmesh.data").joinpath("tokenizer.json").read_text()
    return Vocabulary(text, MODEL.vocab_size, MODEL.eos_token_id)


def invoke(name, parameter, value):
    return (
        f'<｜DSML｜ invoke name="{name}">\n'
        f'<｜DSML｜ parameter name="{parameter}" string="false">{value}</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
    )


def accepts(vocabulary, text, *, required):
    tools = [{"type": "function", "function": function} for function in (STRICT, LOOSE)]
    spec = tool_grammar(tools, required=required, start_after=None)
    matcher = compile_grammar(spec, vocabulary).start()
    return all(matcher.accept(token) for token in [*byte_by_byte(text), MODEL.eos_token_id])


BEGIN, END = "<｜DSML｜ calls>\n", "</｜DSML｜ calls>"
CALL = invoke("run", "n", 3)


@pytest.mark.parametrize(
    ("text", "required", "accepted"),
    [
        ("just text", False, True),
        (f"text \n\n{BEGIN}{CALL}{END}", False, True),
        (f"{BEGIN}{CALL}{CALL}{END}", False, True),
        (f"{BEGIN}{invoke('note', 'any', '[1]')}{END}", False, True),
        (f"{BEGIN}{invoke('run', 'n', '[1]')}{END}", False, False),
        (f"{BEGIN}{invoke('run', 'm', 3)}{END}", False, False),
        (f"{BEGIN}{invoke('other', 'n', 3)}{END}", False, False),
        (f"{BEGIN}{END}", False, False),
        (f"{CALL}{END}", True, True),
        (f"text{CALL}{END}", True, False),
        (f"{CALL}{END}", False, True),
    ],
)
def test_a_strict_tool_is_called_as_declared(vocabulary, text, required, accepted):
    assert accepts(vocabulary, text, required=required) == accepted


def test_without_a_strict_tool_nothing_is_enforced():
    tools = [{"type": "function", "function": LOOSE}]
    assert tool_grammar(tools, required=False, start_after=None) is None
