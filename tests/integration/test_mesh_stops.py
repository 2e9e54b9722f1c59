"""Stop strings through the mesh: the text is trimmed, the overrun is neither sent nor counted, nothing stays held."""

from dataclasses import replace

import pytest
from support.mesh import start_mesh
from support.prompts import random_prompt

from flashmesh.client import prompt_request
from flashmesh.errors import InvalidRequest
from flashmesh.types import SamplingParams

PROMPT = random_prompt(300)
PARAMS = SamplingParams(max_tokens=60)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    with start_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        yield mesh


@pytest.fixture
def client(mesh):
    with mesh.client() as client:
        yield client


def ask(client, params=PARAMS, **request):
    message = prompt_request(PROMPT, params, seed=params.seed)
    for name, value in request.items():
        getattr(message, name).extend(value) if name == "stop" else setattr(message, name, value)
    responses = list(client.generate(message, timeout_s=60))
    text = "".join(response.text for response in responses)
    tokens = [token for response in responses for token in response.token_ids]
    return text, tokens, responses[-1]


def test_the_answer_ends_before_the_stop_string_and_counts_no_overrun(client):
    text, tokens, last = ask(client)
    assert len(tokens) == 60
    assert last.stop == ""
    stop = text[len(text) // 2 :][:5]
    shown, kept, last = ask(client, stop=["never in it, surely", stop])
    assert shown == text[: text.find(stop)]
    assert last.stop == stop
    assert kept == tokens[: len(kept)]
    assert last.usage.completion_tokens == len(kept) < 60
    included, _, _ = ask(client, stop=[stop], include_stop=True)
    assert included == shown + stop


def test_a_choice_that_met_its_stop_string_lets_the_others_go_on(client):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=7, num_choices=2)
    texts = [ask(client, replace(params, num_choices=1, choice=choice))[0] for choice in (0, 1)]
    stop = next(
        texts[0][start : start + 4]
        for start in range(8, len(texts[0]))
        if texts[0][start : start + 4] not in texts[1]
    )
    message = prompt_request(PROMPT, params, seed=params.seed, stops=[stop])
    got, stops = {0: "", 1: ""}, {}
    for response in client.generate(message, timeout_s=60):
        got[response.choice] += response.text
        if response.finish_reason:
            stops[response.choice] = response.stop
    assert got == {0: texts[0][: texts[0].find(stop)], 1: texts[1]}
    assert stops == {0: stop, 1: ""}


def test_unusable_stop_strings_are_refused(client):
    with pytest.raises(InvalidRequest, match="stop string 1 must have 1 to 256 characters"):
        ask(client, stop=["a", ""])
