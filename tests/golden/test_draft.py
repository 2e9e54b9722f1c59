"""The draft module against an independent implementation."""

import pytest
import torch
from support import golden

from flashmesh.kernels.door import RowRun
from flashmesh.kernels.draft import Anchor
from flashmesh.types import SamplingParams

ANCHORS = [
    ("s7", 7),
    ("s40", 20),
    ("s40", 40),
    ("s150", 20),
    ("s150", 150),
    ("img40", 40),
]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine():
    return golden.golden_engine()


def vectors(file, name, position):
    """What one file says of one anchor."""
    prefix = f"{name}.anchor{position}."
    return {
        key.removeprefix(prefix): value
        for key, value in golden.vectors(file).items()
        if key.startswith(prefix)
    }


@pytest.mark.parametrize(("name", "position"), ANCHORS)
def test_drafts_and_confidences_agree(engine, name, position):
    expected = vectors("draft_fp32", name, position)
    token, at = expected["anchor"].tolist()
    assert at == position
    record = golden.Recorder(engine)
    with engine.open(golden.full_plan(position), []) as session:
        session.images = golden.image_rows() if name == "img40" else {}
        engine.step([RowRun(session=session, tokens=golden.ids(name)[:position])])
        main_x = record.get("main_x", 0, position)[-24:]
        assert (main_x - expected["main_x"]).abs().max() < TOLERANCE
        anchor = Anchor(token, position, session.slot, 0, SamplingParams())
        with torch.inference_mode():
            (draft,) = engine.model.drafter.draft([anchor])
    for block in range(3):
        got = record.get("stage_streams", block, 5)
        assert (got - expected["stage_streams"][block]).abs().max() < TOLERANCE
    assert (record.get("base_logits", 0, 5) - expected["base_logits"]).abs().max() < TOLERANCE
    assert draft.tokens == expected["draft_tokens"].tolist()
    for step in range(5):
        logits = record.get("draft_logits", step, 1)[0]
        assert (logits - expected["draft_logits"][step]).abs().max() < TOLERANCE
    logits = torch.tensor(draft.confidences).logit()
    assert (logits - expected["confidence_logit_prenorm"]).abs().max() < 1e-3
    near = vectors("draft_bf16", name, position)
    assert draft.tokens[0] == near["draft_tokens"][0]
    for got, wanted in ((main_x, "main_x"), (record.get("base_logits", 0, 5), "base_logits")):
        cosine = torch.nn.functional.cosine_similarity(
            got.flatten(), near[wanted].float().flatten(), dim=0
        )
        assert cosine >= 0.99, wanted
