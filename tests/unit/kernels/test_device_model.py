"""The device model through the ops' twins, on the CPU, against golden vectors and the reference engine."""

import shutil

import pytest
import torch
from support import golden
from support.device import device_runner

from flashmesh.errors import InvalidRequest, NoFreeBlocks
from flashmesh.kernels.device.inputs import SpanWindow

COSINE = 0.99
"""What golden vectors of two bf16 implementations agree to (tests/golden/data/README.md)."""

RELATIVE = 0.04
"""Bound of a layer's error against fp32, over the norm of what the layer adds: bf16 has 8 bits, so about 0.4 % for each
of some ten roundings in a row, and a row on the boundary of a selection may take another key."""


@pytest.fixture(scope="module")
def runner():
    folder = golden.checkpoint(quantized=True)
    yield device_runner(folder)
    shutil.rmtree(folder)


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


@pytest.mark.parametrize("sequence", ["s7", "s40", "s150"])
def test_prefill_gives_the_golden_logits(runner, sequence):
    tokens = golden.ids(sequence)
    state = runner.open(len(tokens))
    logits = runner.prefill(state, tokens, decoder_rows=len(tokens) + 24)
    expected = golden.vectors("outputs_fp32")[f"{sequence}.logits"][-1]
    assert cosine(logits, expected) > COSINE
    runner.close(state)


def test_decode_in_any_cut_gives_the_golden_logits(runner):
    tokens = golden.ids("s150")
    expected = golden.vectors("outputs_fp32")["s150.logits"]
    state = runner.open(len(tokens))
    runner.prefill(state, tokens[:100], decoder_rows=160)
    parts, begin = [], 100
    for count in (1, 3, 6, 1, 8, 5) * 3:
        part = tokens[begin : begin + count]
        if part:
            parts.append(runner.decode([(state, part)])[0].clone())
        begin += len(part)
    runner.close(state)
    assert begin == 150
    assert cosine(torch.cat(parts), expected[100:]).mean() > COSINE


def test_drafts_that_are_taken_back_leave_nothing_behind(runner):
    tokens = golden.ids("s150")
    straight, drafted = runner.open(150), runner.open(150)
    for state in (straight, drafted):
        runner.prefill(state, tokens[:101], decoder_rows=160)
    runner.decode([(straight, tokens[101:103])])
    runner.decode([(drafted, [*tokens[101:103], 7, 8, 9, 10])])
    drafted.rollback(4)
    assert drafted.tokens == straight.tokens
    found = [runner.decode([(state, tokens[103:105])])[0].clone() for state in (straight, drafted)]
    assert torch.equal(*found)
    with pytest.raises(InvalidRequest, match="9 of 105"):
        drafted.rollback(9)
    for state in (straight, drafted):
        runner.close(state)


def test_no_more_is_taken_back_in_several_calls_than_in_one(runner):
    state = runner.open(150)
    runner.prefill(state, golden.ids("s150")[:100], decoder_rows=24)
    state.rollback(5)
    with pytest.raises(InvalidRequest, match="4 of 95"):
        state.rollback(4)
    state.rollback(3)
    with pytest.raises(InvalidRequest, match="1 of 92"):
        state.rollback(1)
    runner.decode([(state, [5, 6])])
    state.rollback(2)
    with pytest.raises(InvalidRequest, match="8 of 92"):
        state.rollback(8)
    runner.close(state)


def test_rows_of_other_sequences_change_nothing(runner):
    tokens = golden.ids("s150")
    alone = runner.open(150)
    runner.prefill(alone, tokens[:60], decoder_rows=160)
    expected = runner.decode([(alone, tokens[60:63])])[0].clone()
    runner.close(alone)
    first, second = runner.open(150), runner.open(150)
    runner.prefill(first, tokens[3:120], decoder_rows=160)
    runner.prefill(second, tokens[:60], decoder_rows=160)
    _, found = runner.decode([(first, tokens[120:121]), (second, tokens[60:63])])
    runner.close(first)
    runner.close(second)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_chunks_give_what_one_pass_gives(runner):
    tokens = golden.ids("s150")
    answers = []
    for chunk in (150, 128, 64, 16):
        state = runner.open(150)
        answers.append(runner.prefill(state, tokens, decoder_rows=24, chunk_rows=chunk).clone())
        runner.close(state)
    for answer in answers[1:]:
        assert (
            cosine(answer, answers[0]) > 0.999999
        )  # whole tiles of rows: CPU products do not differ either


def test_every_layer_follows_the_golden_streams(runner):
    sequence = "s150"
    tokens = golden.ids(sequence)
    streams = golden.vectors("outputs_fp32")[f"{sequence}.streams"]
    carried = golden.vectors("outputs_fp32")[f"{sequence}.carried_pre"]
    model, state = runner.model, runner.open(len(tokens))
    rows = runner._rows([(state, tokens)], len(tokens), 4096, 1)
    passed = model.begin(rows, SpanWindow(rows, model.caches, 16, pos=0, slot=state.slot))
    first = model.config.num_encoder_layers
    for layer in range(model.config.num_hidden_layers - 1):
        entering = streams[layer].bfloat16()
        if layer == first:  # its rows are written at the end of the encoder half
            x = model.ops.collapse_norm(
                entering, carried[layer], model._w.blocks[layer].attn_norm, 1e-20
            )
            model._write_global_rows(layer, passed, x)
        left, pre = model.run_layers(range(layer, layer + 1), passed, entering, carried[layer])
        added = streams[layer + 1] - streams[layer]
        error = (left.float() - streams[layer + 1]).flatten(1).norm(dim=1)
        assert (error / added.flatten(1).norm(dim=1)).median() < RELATIVE, layer
        torch.testing.assert_close(pre, carried[layer + 1], rtol=0.05, atol=0.02)
    runner.close(state)


def test_too_much_is_refused_and_nothing_leaks(runner):
    with pytest.raises(InvalidRequest, match="4096 at most"):
        runner.open(5000)
    held = [runner.open(4096) for _ in range(4)]
    with pytest.raises(NoFreeBlocks):
        runner.open(1)
    with pytest.raises(InvalidRequest, match="9 tokens"):
        runner.decode([(held[0], [1] * 9)])
    for state in held:
        runner.close(state)
    runner.close(runner.open(1))
