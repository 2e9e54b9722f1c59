"""A few steps of training on a CPU: it learns, restarts where it stopped, and what it writes can be served."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from flashmesh.data import shipped_tokenizer
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.door import RowRun, SessionPlan
from flashmesh.kernels.engine import load_engine
from flashmesh.kernels.engram import token_map
from tools.train_demo.backbone import Plan, Trainer, rate
from tools.train_demo.batches import Supply
from tools.train_demo.corpus import conversations
from tools.train_demo.drafts import DraftTrainer, draw_anchors, gumbel
from tools.train_demo.export import export
from tools.train_demo.losses import loss
from tools.train_demo.network import Network
from tools.train_demo.packing import Documents, Hasher, alone
from tools.train_demo.parameters import initial, kinds, rounded
from tools.train_demo.sizes import trained_config

TOKENIZER = shipped_tokenizer("demo")
NUM_STEPS = 20


@pytest.fixture(scope="module")
def small():
    """A configuration that takes a fraction of a second a step, and its data."""
    torch.set_num_threads(1)  # more would sum gradients in an order that changes
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    sizes = {"hidden_size": 64, "hc_sinkhorn_iters": 3, "engram_vocab_size": 300}
    raw = trained_config(tokenizer, index_topk=16, **sizes)
    config = ModelConfig.from_dict(raw)
    table = token_map(tokenizer, config.vocab_size)
    documents = conversations(TOKENIZER, 60, seed=5)
    supply = Supply(config, table, [(documents, 2)], num_tokens=256)
    net = Network(config, product=torch.float32, device="cpu")
    return raw, config, table, documents, supply, net


def masters_of(config, *, drafts):
    return {n: v for n, v in initial(config, seed=1).items() if n.startswith("mtp.") == drafts}


def plan(num_steps):
    return Plan(num_steps=num_steps, device="cpu", compiled=False, save_every=NUM_STEPS // 2)


def test_a_smoke_run_learns_restarts_and_is_served(small, tmp_path):
    raw, config, table, documents, supply, net = small
    masters = masters_of(config, drafts=False)
    hasher = Hasher(config, table)
    few = Documents(documents.tokens, documents.ends[:8])
    before = loss(net, masters, hasher, few, "cpu")
    assert before == pytest.approx(torch.tensor(4096.0).log().item(), abs=0.01)

    trainer = Trainer(net, masters, plan(NUM_STEPS))
    works = [work for work, _ in zip(supply.batches(3), range(NUM_STEPS), strict=False)]
    trainer.run(iter(works), tmp_path)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == NUM_STEPS
    assert last["skipped"] == 0
    trained = loss(net, masters, hasher, few, "cpu")
    assert trained < before - 0.1

    again = masters_of(config, drafts=False)
    second = Trainer(net, again, plan(NUM_STEPS))
    second.load(tmp_path / "backbone-state.pt")
    assert second.step == NUM_STEPS
    for name, value in masters.items():
        assert torch.equal(again[name], value), name
    # One more step from both: the optimiser's state came back as well.
    for each in (trainer, second):
        each.advance(works[0])
    for name, value in masters.items():
        assert torch.equal(again[name], value), name

    stored = rounded(masters, kinds(config), weights=True)
    drafts = masters_of(config, drafts=True)
    DraftTrainer(net, stored, drafts, plan(2)).run(iter(works), tmp_path)
    export(tmp_path / "checkpoint", raw, TOKENIZER.read_text(), masters | drafts)
    assert_served(tmp_path / "checkpoint", net, stored, hasher, documents)


def assert_served(folder, net, weights, hasher, documents):
    """The engine computes from the files what the trainer computed before it wrote them."""
    engine = load_engine(folder, role="all", name="smoke", num_pages=4, num_slots=1)
    document = documents.document(0)
    batch = hasher.batch(alone(document, 128, pad=2)).ids[0, : len(document)]
    rows = alone(document, 128, pad=2)
    with torch.no_grad():
        result = net.forward(weights, hasher.batch(rows), torch.tensor(False))
        wanted = net.linear(result.hidden, weights["head.weight"])[0, : len(document)]
    session_plan = SessionPlan(
        first_pos=0, global_start=0, decoder_start=0, max_tokens=len(document)
    )
    with engine.open(session_plan, []) as session:
        run = RowRun(
            session=session, tokens=batch.tolist(), num_logits=len(document), keep_logits=True
        )
        logits = engine.step([run])[0].logits
    assert (logits - wanted).abs().max() < 1e-3


def test_every_tensor_has_a_gradient_after_two_steps(small):
    _, config, _, _, supply, net = small
    masters = masters_of(config, drafts=False)
    trainer = Trainer(net, masters, plan(10))
    works = supply.batches(4)
    for _ in range(2):
        trainer.advance(next(works))
    for name, value in masters.items():
        if not name.endswith(("gate.bias", "gate.bias_vl")):
            assert value.grad is not None, name
            assert value.grad.abs().max() > 0, name


def test_a_later_token_changes_no_earlier_output(small):
    _, config, table, documents, _, net = small
    masters = masters_of(config, drafts=False)
    draw = torch.Generator().manual_seed(2)
    weights = {n: v + 0.05 * torch.randn(v.shape, generator=draw) for n, v in masters.items()}
    hasher = Hasher(config, table)
    rows = alone(documents.document(0), 128, pad=2)
    other = alone(documents.document(0), 128, pad=2)
    place = 21
    other.tokens[0, place] = 300
    with torch.no_grad():
        first, second = (
            net.forward(weights, hasher.batch(each), torch.tensor(False)).hidden[0]
            for each in (rows, other)
        )
    assert torch.equal(first[:place], second[:place])
    assert not torch.equal(first[place], second[place])


def test_the_learning_rate_rises_stays_and_falls():
    rates = [rate(step, 1000) for step in (0, 59, 300, 500, 750, 999)]
    assert rates[0] < 0.05
    assert rates[1:4] == [1.0, 1.0, 1.0]
    assert rates[4] == pytest.approx(0.5)
    assert rates[5] == pytest.approx(0.05)


def test_noise_is_gumbel_and_accepts_some_drafts_only():
    noise = gumbel((2000, 8), torch.Generator().manual_seed(0))
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)  # Euler's constant
    log_p = torch.tensor([0.7, 0.1, 0.1, 0.1, 1e-9, 1e-9, 1e-9, 1e-9]).log()
    log_q = torch.tensor([0.3, 0.5, 0.1, 0.1, 1e-9, 1e-9, 1e-9, 1e-9]).log()
    drawn = (log_p + noise).argmax(1)
    assert (drawn == 0).float().mean().item() == pytest.approx(0.7, abs=0.04)
    same = (drawn == (log_q + noise).argmax(1)).float().mean().item()
    # Exact: 0.3/0.7 of token 0 is kept at least, and never more than the overlap of the two.
    assert 0.4 < same <= 0.6 + 0.04


def test_anchors_stand_where_the_next_token_counts():
    weights = torch.tensor([[0.1, 1.0, 0.0, 1.0, 0.1, 1.0]])
    anchors = draw_anchors(weights, 3, torch.Generator().manual_seed(0))
    assert sorted(anchors[0].tolist()) == [1, 3, 5]
