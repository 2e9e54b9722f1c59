"""The draft module through the ops' twins, on the CPU, against golden vectors."""

import shutil

import pytest
import torch
from support import golden
from support.device import device_runner

COSINE = 0.99
"""What golden vectors of two bf16 implementations agree to (tests/golden/data/README.md)."""

ANCHORS = [("s7", 7), ("s40", 20), ("s40", 40), ("s150", 20), ("s150", 150)]


@pytest.fixture(scope="module")
def runner():
    folder = golden.checkpoint(quantized=True)
    yield device_runner(folder, drafts=True)
    shutil.rmtree(folder)


def greedy(logits, place):
    return logits.argmax(-1)


@pytest.mark.parametrize(("name", "position"), ANCHORS)
def test_drafts_and_confidences_follow_the_golden_ones(runner, name, position):
    expected = {
        key: golden.vectors("draft_fp32")[f"{name}.anchor{position}.{key}"]
        for key in ("anchor", "draft_tokens", "base_logits", "confidence_logit_prenorm")
    }
    seen = {}
    state = runner.open(256)
    runner.prefill(state, golden.ids(name)[:position], decoder_rows=160)
    anchor, pos, slot = (torch.tensor([n]) for n in (*expected["anchor"].tolist(), state.slot))
    runner.model.observe = lambda name, layer, value: seen.update({name: value})
    low = torch.zeros(1, dtype=torch.int32)
    tokens, confidences = runner.drafter.draft(anchor, pos.int(), slot.int(), low, greedy)
    runner.model.observe = lambda name, layer, value: None
    runner.close(state)
    found, base = seen["base_logits"].double(), expected["base_logits"].double()
    assert torch.nn.functional.cosine_similarity(found, base, dim=-1).mean() > COSINE
    assert tokens[0, 0] == expected["draft_tokens"][0]
    wanted = expected["confidence_logit_prenorm"]
    agreeing = (tokens[0] == expected["draft_tokens"]).cumprod(0).bool()
    # A confidence reads the drafts before it; its logit is a sum of 80 bf16 products of order one.
    assert ((confidences[0].logit() - wanted)[agreeing].abs() < 0.25).all()


def test_an_anchor_gets_the_same_drafts_beside_others(runner):
    tokens = golden.ids("s150")
    states = [runner.open(256) for _ in range(3)]
    for state, length in zip(states, (150, 40, 77), strict=True):
        runner.prefill(state, tokens[:length], decoder_rows=160)
    pos = torch.tensor([150, 40, 77], dtype=torch.int32)
    anchor, slot = torch.tensor([5, 6, 7]), torch.tensor([s.slot for s in states]).int()
    low = torch.zeros(3, dtype=torch.int32)
    together, _ = runner.drafter.draft(anchor, pos, slot, low, greedy)
    for n in range(3):
        one = slice(n, n + 1)
        alone, _ = runner.drafter.draft(anchor[one], pos[one], slot[one], low[one], greedy)
        assert alone[0, 0] == together[n, 0]
    for state in states:
        runner.close(state)
