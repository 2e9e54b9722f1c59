"""Row invariance, bit for bit: neighbours, cuts, threads and ties leave no trace in a row.

The traps are those seen on CPUs: matrix products take other code paths for 1, 2, 3, 5 and 7 rows, selections break ties
by the padding around them, long sums are split by thread.
"""

import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import golden

from flashmesh.kernels.door import RowRun, SessionPlan
from flashmesh.kernels.reference.attention import index_scores
from flashmesh.kernels.reference.basics import linear
from flashmesh.kernels.reference.moe import route
from flashmesh.kernels.reference.select import candidate_mask, top_rows, top_sorted
from flashmesh.kernels.sampling import RowContext, sample
from flashmesh.types import SamplingParams

TOKENS = golden.ids("s150")


@pytest.fixture(scope="module")
def engine():
    return golden.golden_engine()


@pytest.fixture(scope="module")
def reference(engine):
    return golden.full_forward(engine, TOKENS)


def cut_forward(engine, tokens, cuts):
    parts, begin = [], 0
    with engine.open(golden.full_plan(len(tokens)), []) as session:
        for size in cuts:
            part = tokens[begin : begin + size]
            run = RowRun(session=session, tokens=part, num_logits=len(part), keep_logits=True)
            parts.append(engine.step([run])[0].logits)
            begin += size
    return torch.cat(parts)


def test_one_row_at_a_time_equals_the_full_forward(engine, reference):
    assert torch.equal(cut_forward(engine, TOKENS, [1] * 150), reference)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_any_cut_equals_the_full_forward(engine, reference, seed):
    rng, cuts = random.Random(seed), []
    while sum(cuts) < 150:
        cuts.append(min(rng.choice([1, 2, 3, 5, 7, 16, 17, 40, 128]), 150 - sum(cuts)))
    assert torch.equal(cut_forward(engine, TOKENS, cuts), reference)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 15, 16, 17, 64, 127, 128, 129])
def test_the_length_of_a_run_leaves_no_trace_in_its_rows(engine, reference, num_rows):
    assert torch.equal(golden.full_forward(engine, TOKENS[:num_rows]), reference[:num_rows])


def test_a_row_is_the_same_alone_and_in_a_batch_of_eight(engine):
    rng = random.Random(1)
    sequences = [[rng.randrange(3, 500) for _ in range(20)] for _ in range(8)]
    sessions = [engine.open(golden.full_plan(20), []) for _ in sequences]
    together = [[] for _ in sequences]
    try:
        for step in range(20):
            runs = [
                RowRun(session=session, tokens=[tokens[step]], num_logits=1, keep_logits=True)
                for session, tokens in zip(sessions, sequences, strict=True)
            ]
            for place, result in enumerate(engine.step(runs)):
                together[place].append(result.logits)
    finally:
        for session in sessions:
            session.close()
    for tokens, logits in zip(sequences, together, strict=True):
        assert torch.equal(torch.cat(logits), golden.full_forward(engine, tokens))
    assert engine.stats().idle


def test_a_prefill_beside_a_stream_leaves_no_trace_in_either(engine, reference):
    with (
        engine.open(golden.full_plan(150), []) as stream,
        engine.open(
            SessionPlan(first_pos=0, global_start=0, decoder_start=None, max_tokens=150), []
        ) as prefill,
    ):
        logits = []
        for step in range(30):
            stream_run = RowRun(
                session=stream, tokens=TOKENS[step : step + 1], num_logits=1, keep_logits=True
            )
            prefill_run = RowRun(session=prefill, tokens=TOKENS[step * 5 : step * 5 + 5])
            logits.append(engine.step([stream_run, prefill_run])[0].logits)
        assert torch.equal(torch.cat(logits), reference[:30])
        prefilled = prefill.export_block(0)
    with engine.open(golden.full_plan(150), []) as whole:
        engine.step([RowRun(session=whole, tokens=TOKENS)])
        assert whole.export_block(0) == prefilled


def test_imported_blocks_compute_what_their_writer_computed(engine):
    with engine.open(golden.full_plan(150), []) as writer:
        engine.step([RowRun(session=writer, tokens=TOKENS)])
        payload = writer.export_block(0)
    plan = SessionPlan(first_pos=112, global_start=128, decoder_start=128, max_tokens=150)
    answers = []
    for _ in range(2):
        with engine.open(plan, TOKENS[:112]) as reader:
            reader.import_block(0, payload)
            assert reader.export_block(0) == payload
            run = RowRun(session=reader, tokens=TOKENS[112:], num_logits=22, keep_logits=True)
            answers.append(engine.step([run])[0].logits)
            assert reader.export_block(0) == payload  # a replay writes no global row
    assert torch.equal(*answers)


def test_thread_counts_of_one_and_two_give_the_same_bits():
    code = (
        "import sys; sys.path.insert(0, 'tests');"
        "from support import golden; import hashlib;"
        "engine = golden.golden_engine(threads=int(sys.argv[1]));"
        "logits = golden.full_forward(engine, golden.ids('s150'));"
        "print(hashlib.sha256(logits.numpy().tobytes()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, threads],
            capture_output=True,
            text=True,
            check=True,
            cwd=golden.DATA.parents[2],
        ).stdout
        for threads in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(("inner", "outer"), [(64, 32), (37, 10), (256, 24), (512, 4096)])
def test_a_product_over_whole_tiles_does_not_depend_on_the_number_of_rows(inner, outer):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, inner, generator=generator)
    weight = torch.randn(outer, inner, generator=generator)
    tiles = torch.cat([linear(x[i : i + 16], weight) for i in range(0, 256, 16)])
    for rows in (16, 32, 48, 112, 128, 256):
        assert torch.equal(linear(x[:rows], weight), tiles[:rows])


def test_index_scores_do_not_depend_on_how_many_keys_or_queries_there_are():
    generator = torch.Generator().manual_seed(0)
    iq, iw = torch.randn(40, 16, 32, generator=generator), torch.randn(40, 16, generator=generator)
    ik = torch.randn(640, 32, generator=generator)
    whole = index_scores(iq, ik, iw)
    for rows in (1, 3, 17):
        for keys in (64, 128, 320):
            assert torch.equal(index_scores(iq[:rows], ik[:keys], iw[:rows]), whole[:rows, :keys])


def naive_top(row, allowed, count):
    order = sorted((i for i in range(len(row)) if allowed[i]), key=lambda i: (-row[i], i))
    chosen = sorted(order[:count])
    return chosen + [-1] * (count - len(chosen))


values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf")])


@given(row=st.lists(values, min_size=1, max_size=40), count=st.integers(1, 12), data=st.data())
def test_selection_breaks_every_tie_by_index(row, count, data):
    allowed = data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    got = top_rows(torch.tensor([row]), torch.tensor([allowed]), count)[0].tolist()
    assert got == naive_top(row, allowed, count)


@pytest.mark.parametrize("width", [64, 128, 1024])
def test_all_zero_scores_select_the_first_keys_whatever_the_padding(width):
    scores = torch.zeros(3, width)
    scores[1] = -0.0
    visible = torch.arange(width) < 50
    chosen = top_rows(scores, visible.expand(3, -1), 8)
    assert torch.equal(chosen, torch.arange(8).expand(3, -1))


def test_candidate_blocks_tie_by_index_and_keep_the_last_visible_one():
    scores = torch.zeros(1, 128)
    mask = candidate_mask(scores, torch.arange(128)[None] < 100, block=8, count=4)[0]
    kept = {int(i) // 8 for i in mask.nonzero().flatten()}
    assert kept == {0, 1, 2, 12}
    assert not mask[100:].any()


def test_routing_ties_go_to_the_lower_expert_at_any_batch_size():
    gate, bias = torch.zeros(8, 64), torch.zeros(8)
    for rows in (16, 32, 64):
        chosen, weights = route(torch.ones(rows, 64), gate, bias, 2, 1.5)
        assert torch.equal(chosen, torch.tensor([0, 1]).expand(rows, -1))
        assert torch.equal(weights, torch.full((rows, 2), 0.75))
    assert top_sorted(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), 3).tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_over_the_real_vocabulary_does_not_depend_on_the_batch(temperature):
    logits = torch.randn(8, 129_280, generator=torch.Generator().manual_seed(0))
    logits[:, 1000:1040] = logits.max()  # a forced tie for the argmax
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=7)
    contexts = [RowContext(params=params, position=position) for position in range(100, 108)]
    together = sample(logits, contexts)
    for row in range(8):
        assert sample(logits[row : row + 1], contexts[row : row + 1]) == together[row : row + 1]
    if temperature == 0:
        assert {drawn.token for drawn in together} == {1000}
