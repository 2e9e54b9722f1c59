"""Law 2 under a grammar: whatever a drafter offers, the output obeys, and is the one without speculation."""

import json
import random
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import golden
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from flashmesh.kernels.grammar import Vocabulary, compile_grammar
from flashmesh.kernels.sequence import DecodeSequence
from flashmesh.kernels.simulated import SimulatedEngine, SimulatedSession
from flashmesh.replay import plan_replay
from flashmesh.types import GrammarKind, GrammarSpec, SamplingParams

TOKENIZER_JSON = resources.files("flashmesh.data").joinpath("tokenizer.json").read_text()
TOKENIZER = Tokenizer.from_str(TOKENIZER_JSON)
THINK_END = TOKENIZER.token_to_id("</think>")
EOS = 1
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(TOKENIZER_JSON, 4096, EOS)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def answer(engine, prompt, params, matcher, depth, forced=()):
    """Tokens of an answer with up to `depth()` drafts verified in each step."""
    plan = plan_replay(len(prompt), window=engine.info.window, replay_tokens=140)
    sequence = DecodeSequence(
        engine, prompt, params, plan, forced=forced, grammar=matcher, num_drafts=5
    )
    tokens = []
    sequence.open()
    try:
        done = False
        while not done:
            count = min(depth(), len(sequence.confidences))
            (result,) = engine.step([sequence.rows(len(prompt) + len(forced), count)])
            progress = sequence.commit(result)
            tokens += progress.tokens
            done = progress.done
    finally:
        sequence.close()
    assert engine.stats().idle
    return tokens


def scripted(monkeypatch, proposals):
    """Makes the simulated engine's drafter offer these, again and again."""
    monkeypatch.setattr(
        SimulatedSession, "_proposals", lambda self, anchor, params, count: (proposals * 5)[:count]
    )


@pytest.mark.parametrize(
    "offer",
    [
        [THINK_END, *ids("{"), *ids('"location"')],
        [EOS, EOS, EOS],
        [*ids('{"city"'), EOS],
        [*ids('{"city": "'), *ids('"}'), EOS],
    ],
)
@pytest.mark.parametrize("start_after", [None, THINK_END])
def test_what_a_drafter_offers_against_the_grammar_is_masked(
    monkeypatch, vocabulary, offer, start_after
):
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=SCHEMA, start_after=start_after)
    grammar = compile_grammar(spec, vocabulary)
    prompt = ids("Which city?")
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=4)

    # A thinking section does not end by itself on this engine.
    forced = [*ids("hm"), THINK_END] if start_after else []

    def run(depth):
        matcher = grammar.start(start_after)
        return answer(SimulatedEngine(), prompt, params, matcher, lambda: depth, forced)

    plain = run(0)
    scripted(monkeypatch, offer)
    for depth in (1, 3, 5):
        assert run(depth) == plain
    value = json.loads(TOKENIZER.decode(plain))
    assert list(value) == ["city"]
    assert isinstance(value["city"], str)


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 1 << 20), temperature=st.sampled_from([0.0, 1.0]))
def test_a_model_under_a_grammar_gives_the_same_at_any_depth(
    golden_model, golden_grammar, seed, temperature
):
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, 30))]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=seed, min_tokens=3)
    plain = answer(golden_model, prompt, params, golden_grammar.start(), lambda: 0)
    for depth in (lambda: 5, lambda: rng.randint(0, 5)):
        assert answer(golden_model, prompt, params, golden_grammar.start(), depth) == plain


@pytest.fixture(scope="module")
def golden_model():
    return golden.golden_engine()


@pytest.fixture(scope="module")
def golden_grammar(golden_model):
    """Capitalised runs; the golden vocabulary spells nothing, so it gets letters and digits here."""
    info = golden_model.info
    vocab = {chr(33 + i % 90) * (1 + i // 90): i for i in range(info.vocab_size)}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.decoder = ByteLevel()
    spelled = Vocabulary(tokenizer.to_str(), info.vocab_size, info.eos_token_id)
    spec = GrammarSpec(kind=GrammarKind.REGEX, text="([A-Z][a-z]*[0-9]?)+")
    return compile_grammar(spec, spelled)
