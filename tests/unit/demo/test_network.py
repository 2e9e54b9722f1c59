"""The trainer's forward pass is the runtime's: equal logits, drafts and selections on one checkpoint."""

import numpy as np
import torch

from flashmesh.kernels.door import RowRun, SessionPlan
from flashmesh.kernels.draft import Anchor
from flashmesh.types import SamplingParams
from tools.train_demo.batches import Work
from tools.train_demo.drafts import blocks
from tools.train_demo.packing import Rows

LENGTHS = (119, 90, 83, 64, 141)
"""Of the packed documents: beyond the top-k at both ratios, odd ones among them."""


def packed(seed, pad):
    draw = np.random.default_rng(seed)
    documents = [draw.integers(20, 4096, length) for length in LENGTHS]
    tokens = np.full((1, 512), pad, dtype=np.uint16)
    start = np.arange(512)[None].copy()
    begin = 0
    spans = []
    for document in documents:
        end = begin + len(document)
        tokens[0, begin:end] = document
        start[0, begin:end] = begin
        spans.append(slice(begin, end))
        begin = end + -end % 8
    return documents, spans, Rows(tokens, start)


def plan(num_tokens):
    return SessionPlan(first_pos=0, global_start=0, decoder_start=0, max_tokens=num_tokens)


@torch.no_grad()
def forward(model, rows):
    work = Work(model.hasher.batch(rows), torch.ones(rows.tokens.shape))
    return work, model.net.forward(model.weights, work.batch, torch.tensor(False))


def test_packed_documents_have_the_logits_that_the_engine_gives_each_alone(model):
    documents, spans, rows = packed(5, model.config.pad_token_id)
    _, result = forward(model, rows)
    logits = model.net.linear(result.hidden, model.weights["head.weight"])[0]
    gaps = []
    for document, span in zip(documents, spans, strict=True):
        with model.engine.open(plan(len(document)), []) as session:
            run = RowRun(
                session=session,
                tokens=document.tolist(),
                num_logits=len(document),
                keep_logits=True,
            )
            wanted = model.engine.step([run])[0].logits
        gaps.append((logits[span] - wanted).abs().amax(1))
    # A value next to a rounding boundary may fall on either side of it, as the two sum in different orders, and then
    # everything after it differs a little. A wrong formula would spoil every document.
    exact = [bool((gap < 1e-3).all()) for gap in gaps]
    assert sum(exact) >= 2, [float(gap.max()) for gap in gaps]


def test_drafts_start_from_the_states_that_the_engine_gives(model):
    documents, spans, rows = packed(1, model.config.pad_token_id)
    work, result = forward(model, rows)
    size = model.config.dspark_block_size
    found = {}
    model.engine.model.observe = lambda name, layer, value: found.setdefault(name, value.clone())
    for document, span in zip(documents[:3], spans[:3], strict=True):
        anchor = len(document) - size - 1
        drafted = blocks(
            model.net, model.weights, work, result.features, torch.tensor([[span.start + anchor]])
        )
        logits = model.net.linear(drafted.hidden, model.weights["head.weight"])[0, 0]
        found.clear()
        with model.engine.open(plan(len(document)), []) as session, torch.inference_mode():
            model.engine.step([RowRun(session=session, tokens=document[:anchor].tolist())])
            at = Anchor(int(document[anchor]), anchor, session.slot, 0, SamplingParams())
            model.engine.model.drafter.draft([at])
        assert (found["base_logits"] - logits).abs().max() < 1e-3
