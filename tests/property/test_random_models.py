"""Law 3 over random architectures: incremental equals full, whatever the layer map, the window or the top-k."""

import json
import random
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import golden

from flashmesh.kernels.door import RowRun, SessionPlan
from flashmesh.kernels.engine import load_engine
from flashmesh.kernels.engram import bucket_primes
from flashmesh.kernels.maker import write_checkpoint

LENGTH = 136


@st.composite
def raw_configs(draw):
    """config.json of a random small model on the golden tokenizer."""
    raw = json.loads((golden.DATA / "config.json").read_text())
    text = raw["text_config"]
    windows = draw(st.integers(0, 2))
    encoder = draw(st.integers(1, 3))
    decoder = draw(st.integers(1, 3))
    first, layers = windows + encoder, windows + encoder + decoder
    ratios = [0] * windows + [draw(st.sampled_from([2]))] * encoder + [1] * decoder
    sources = [windows, *draw_some(draw, range(windows + 1, first)), first]
    index = sorted({*sources, *draw_some(draw, range(first + 1, layers))})
    engrams = sorted(set(draw(st.lists(st.integers(0, first - 1), min_size=1, max_size=2))))
    drafts = draw(st.integers(0, 2))
    primes = bucket_primes(num_layers=len(engrams), num_orders=3, num_heads=2, start=64)
    text.update(
        num_hidden_layers=layers,
        compress_ratios=ratios + [0] * drafts,
        kv_source_layer_ids=sources,
        index_source_layer_ids=index,
        candidate_source_layer_id=first,
        candidate_topk_blocks=draw(st.sampled_from([1, 3, 64])),
        index_topk=draw(st.sampled_from([4, 16, 256])),
        sliding_window=draw(st.sampled_from([1, 7, 16, 128])),
        engram_layer_ids=engrams,
        engram_num_embeddings=[sum(map(sum, layer)) for layer in primes],
        num_nextn_predict_layers=drafts,
        dspark_target_layer_ids=[layers - 1],
    )
    return raw


def draw_some(draw, layers):
    return [layer for layer in layers if draw(st.booleans())]


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(raw=raw_configs(), seed=st.integers(0, 1 << 16))
def test_incremental_equals_full_on_any_architecture(raw, seed):
    folder = Path(tempfile.mkdtemp(prefix="flashmesh-random-"))
    try:
        engine = random_engine(folder, raw, seed)
        check_cuts(engine, seed)
        check_replay(engine, seed)
    finally:
        shutil.rmtree(folder)


def random_engine(folder, raw, seed):
    tokenizer = (golden.DATA / "tokenizer.json").read_text()
    write_checkpoint(folder / "out", raw, tokenizer, seed=seed)
    return load_engine(folder / "out", role="all", name="random", num_pages=16, num_slots=4)


def prompt(seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(LENGTH)]


def check_cuts(engine, seed):
    """Rows in random cuts equal all rows in one step."""
    tokens, rng = prompt(seed), random.Random(seed)
    whole = golden.full_forward(engine, tokens)
    assert torch.isfinite(whole).all()
    parts, begin = [], 0
    with engine.open(golden.full_plan(LENGTH), []) as session:
        while begin < LENGTH:
            part = tokens[begin : begin + rng.choice([1, 2, 3, 17, 40])]
            run = RowRun(session=session, tokens=part, num_logits=len(part), keep_logits=True)
            parts.append(engine.step([run])[0].logits)
            begin += len(part)
    assert torch.equal(torch.cat(parts), whole)


def check_replay(engine, seed):
    """A replay over imported rows is the same whoever wrote them and however it is cut."""
    tokens = prompt(seed)
    with engine.open(golden.full_plan(LENGTH), []) as writer:
        engine.step([RowRun(session=writer, tokens=tokens)])
        payload = writer.export_block(0)
    plan = SessionPlan(first_pos=30, global_start=40, decoder_start=44, max_tokens=LENGTH)
    answers = []
    for cut in (LENGTH, 7):
        with engine.open(plan, tokens[:30]) as session:
            session.import_block(0, payload)
            parts = []
            for begin in range(30, LENGTH, cut):
                part = tokens[begin : min(begin + cut, LENGTH)]
                count = max(0, min(len(part), begin + len(part) - 44))
                run = RowRun(session=session, tokens=part, num_logits=count, keep_logits=True)
                result = engine.step([run])[0]
                if count:
                    parts.append(result.logits)
            answers.append(torch.cat(parts))
    assert torch.equal(*answers)
