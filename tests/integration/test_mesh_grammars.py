"""Grammars through the mesh: answers obey, and a bad grammar is its own request's fault."""

import json
import re

import pytest
from support.mesh import start_mesh
from support.prompts import random_prompt

from flashmesh.client import prompt_request
from flashmesh.errors import InvalidRequest
from flashmesh.types import GrammarKind, GrammarSpec, SamplingParams

PROMPT = random_prompt(300)
THINK_END = 16

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with start_mesh(tmp_path_factory.mktemp("mesh")) as mesh, mesh.client() as client:
        yield client


def ask(client, kind, text="", *, max_tokens=40, seed=1, **spec):
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0,
        seed=seed,
        grammar=GrammarSpec(kind=kind, text=text, **spec),
    )
    parts = list(client.parts(prompt_request(PROMPT, params, seed=seed), timeout_s=120))
    return "".join(part.text for part in parts), parts[-1].finish_reason


def test_every_answer_matches_the_regular_expression(client):
    for seed in range(4):
        text, reason = ask(client, GrammarKind.REGEX, r"(yes|no), \d{2}", seed=seed)
        assert re.fullmatch(r"(yes|no), \d{2}", text)
        assert reason == "stop"


def test_an_answer_is_json_of_its_schema(client):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
    }
    text, reason = ask(client, GrammarKind.JSON_SCHEMA, json.dumps(schema), max_tokens=400)
    assert set(json.loads(text)) == {"city", "warm"}
    assert reason == "stop"


def test_a_free_beginning_never_ends_the_answer(client):
    text, reason = ask(client, GrammarKind.REGEX, "done", start_after=THINK_END)
    assert reason == "length"
    assert text


def test_a_bad_grammar_fails_its_request_and_no_other(client):
    with pytest.raises(InvalidRequest, match="parenthesis is not closed"):
        ask(client, GrammarKind.REGEX, "(a")
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        ask(client, GrammarKind.REGEX, "((-*)*)*b")
    assert ask(client, GrammarKind.REGEX, "abc") == ("abc", "stop")
