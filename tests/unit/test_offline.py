"""Offline generation ends as the mesh does: at a stop string, with nothing held, and obeying its grammar."""

import re

import pytest

from flashmesh.config import ModelSection
from flashmesh.errors import InvalidRequest
from flashmesh.kernels.load import load_vocabulary
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.offline import Offline
from flashmesh.services.router.text import load_codec
from flashmesh.types import GrammarKind, GrammarSpec, SamplingParams


@pytest.fixture(scope="module")
def offline():
    model, engine = ModelSection(engine="simulated"), SimulatedEngine()
    return Offline(engine, load_codec(model), 140, lambda: load_vocabulary(model, engine.info))


def read(parts):
    parts = list(parts)
    tokens = [token for part in parts for token in part.token_ids]
    return "".join(part.text for part in parts), tokens, parts[-1]


def test_the_answer_ends_before_the_stop_string(offline):
    params = SamplingParams(max_tokens=40)
    text, tokens, last = read(offline.parts("hello", params))
    assert (len(tokens), last.finish_reason, last.stop) == (40, "length", "")
    stop = text[20:24]
    shown, kept, last = read(offline.parts("hello", params, stops=[stop]))
    assert shown == text[: text.find(stop)]
    assert kept == tokens[: len(kept)]
    assert (last.finish_reason, last.stop) == ("stop", stop)
    assert len(kept) < 40
    assert offline.engine.stats().idle


def test_unusable_stop_strings_are_refused(offline):
    with pytest.raises(InvalidRequest, match="stop string 0"):
        read(offline.parts("hello", SamplingParams(), stops=[""]))


def test_the_answer_obeys_its_grammar(offline):
    spec = GrammarSpec(kind=GrammarKind.REGEX, text=r"[a-f]{4}-\d{3}")
    for seed in range(3):
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, grammar=spec)
        text, _, last = read(offline.parts("hello", params))
        assert re.fullmatch(spec.text, text)
        assert last.finish_reason == "stop"
