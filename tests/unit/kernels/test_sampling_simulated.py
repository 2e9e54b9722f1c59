"""The simulated engine draws a hash, and still obeys what ends, excludes and tells apart."""

from flashmesh.kernels.generate import generate_offline
from flashmesh.kernels.simulated import SimulatedEngine
from flashmesh.types import FinishReason, SamplingParams

PROMPT = [70, 71, 72]


def generate(**params):
    """The tokens of an answer, and why it ended."""
    *drawn, reason = generate_offline(SimulatedEngine(), PROMPT, SamplingParams(**params))
    return [item.token for item in drawn], reason


def test_a_stop_token_ends_the_answer_and_a_minimum_length_passes_it_by():
    tokens, reason = generate(max_tokens=6)
    assert reason is FinishReason.LENGTH
    stop = tokens[2]
    shorter, reason = generate(max_tokens=6, stop_token_ids=(stop,))
    assert (shorter, reason) == (tokens[:2], FinishReason.STOP)
    longer, _ = generate(max_tokens=6, stop_token_ids=(stop,), min_tokens=4)
    assert longer[:3] == [*tokens[:2], stop + 1]
    assert len(longer) >= 4


def test_seed_and_choice_count_above_temperature_zero_only():
    assert generate(max_tokens=5, seed=1) == generate(max_tokens=5, seed=2, choice=3)
    answers = [
        generate(max_tokens=5, temperature=1.0, seed=seed, choice=choice)[0]
        for seed, choice in ((1, 0), (2, 0), (1, 1))
    ]
    assert len(set(map(tuple, answers))) == 3


def test_asked_for_likeliest_tokens_it_reports_its_own():
    params = SamplingParams(max_tokens=2, top_logprobs=3)
    first, *_ = generate_offline(SimulatedEngine(), PROMPT, params)
    assert (first.top_ids, first.top_logprobs) == ([first.token], [0.0])
