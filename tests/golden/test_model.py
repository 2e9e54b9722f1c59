"""The model against an independent implementation: streams, caches, selections, logits."""

import pytest
import torch
from support import golden

from flashmesh.kernels import model, pages
from flashmesh.kernels.door import RowRun, SessionPlan
from flashmesh.kernels.quantize import fp8_32

QUIET_TOLERANCE, NOISY_TOLERANCE = 1e-4, 2e-2
"""fp32 implementations differ by the order of their sums only, and that differs between processors too."""


@pytest.fixture(scope="module")
def engine():
    return golden.golden_engine()


def check(actual, expected, noise, what):
    """Compares rows; one on no boundary still moves by its own noise when an earlier row's rounding flips."""
    gap = (actual - expected.float()).abs().flatten(1).amax(1)
    limit = torch.where(noise < golden.QUIET, QUIET_TOLERANCE + 2 * noise, NOISY_TOLERANCE)
    worst = int((gap / limit).argmax())
    assert (gap <= limit).all(), f"{what}: row {worst} differs by {gap[worst]:.2e}"


@pytest.mark.parametrize("name", golden.SEQUENCES)
def test_hidden_states_and_logits_agree(engine, name):
    record = golden.Recorder(engine)
    tokens, noise = golden.ids(name), golden.row_noise(name)
    images = golden.image_rows() if name == "img40" else None
    logits = golden.full_forward(engine, tokens, images)
    expected = golden.vectors("outputs_fp32")
    num = len(tokens)
    for layer in range(8):
        streams = record.get("streams", layer, num)
        check(streams, expected[f"{name}.streams"][layer], noise, f"streams into {layer}")
    for layer in range(9):
        carried = record.get("carried_pre", layer, num)
        check(carried, expected[f"{name}.carried_pre"][layer], noise, f"carried into {layer}")
    check(record.get("final", 8, num), expected[f"{name}.final"], noise, "final norm")
    check(logits, expected[f"{name}.logits"], noise, "logits")


@pytest.mark.parametrize("name", golden.SEQUENCES)
def test_a_bf16_run_of_the_other_implementation_is_near(engine, name):
    """Rounding to bf16 everywhere moves single rows far, so a sequence is judged by its direction."""
    record = golden.Recorder(engine)
    images = golden.image_rows() if name == "img40" else None
    logits = golden.full_forward(engine, golden.ids(name), images)
    final = record.get("final", 8, len(logits))
    expected = golden.vectors("outputs_bf16")
    for actual, wanted in ((logits, "logits"), (final, "final")):
        cosine = torch.nn.functional.cosine_similarity(
            actual, expected[f"{name}.{wanted}"].float(), dim=1
        )
        assert cosine.mean() >= 0.99, wanted


@pytest.mark.parametrize("name", ["s7", "s40"])
def test_without_the_cache_roundings_no_row_is_sensitive(monkeypatch, name):
    """The roundings are what makes rows jump: without them every row agrees as closely as a quiet one."""
    monkeypatch.setattr(model, "fp8_32", lambda values: values)
    monkeypatch.setattr(model, "mxfp4_32", lambda values: (None, None, values))
    for format in ("nvfp4_16", "mxfp4_32"):
        packed = getattr(pages, format)
        monkeypatch.setattr(
            pages, format, lambda values, packed=packed: (*packed(values)[:2], values)
        )
    engine = golden.golden_engine()
    record = golden.Recorder(engine)
    logits = golden.full_forward(engine, golden.ids(name))
    expected = golden.vectors("outputs_noqat")
    no_noise = torch.zeros(len(logits))
    check(logits, expected[f"{name}.logits"], no_noise, "logits")
    check(record.get("final", 8, len(logits)), expected[f"{name}.final"], no_noise, "final norm")
    rounded = golden.vectors("outputs_fp32")[f"{name}.logits"]
    assert (logits - rounded).abs().max() > 0.1  # the switch does something


def test_every_sub_step_of_a_sequence_agrees(engine):
    record = golden.Recorder(engine)
    tokens, noise = golden.ids("s40"), golden.row_noise("s40")
    golden.full_forward(engine, tokens)
    expected = golden.vectors("trace_s40_fp32")
    names = {
        "attn_in": "attn_in",
        "attn_out": "attn_out",
        "ffn_in": "ffn_in",
        "ffn_out": "ffn_out",
        "streams_mid": "streams_mid",
        "route_w": "ffn.route_w",
    } | {
        f"{site}_hc.{part}": f"hc_{site}_{part}"
        for site in ("attn", "ffn")
        for part in ("pre", "post", "comb")
    }
    for layer in range(8):
        for theirs, ours in names.items():
            got = record.get(f"layers.{layer}.{ours}", 0, 40)
            wanted = expected[f"L{layer}.{theirs}"]
            if theirs == "route_w":  # order of slots is not part of the vectors
                got, wanted = got.sort(1).values, wanted.sort(1).values
            check(got, wanted, noise, f"{theirs} of layer {layer}")
    for layer in (1, 3):
        got = record.get("streams_after_engram", layer, 40)
        check(got, expected[f"L{layer}.streams_after_engram"], noise, f"Engram of layer {layer}")
        looked_up = record.get("engram_rows", layer, 40)
        assert looked_up.shape == (40, 6 * 32)


def test_caches_and_selections_of_a_long_sequence_agree(engine):
    record = golden.Recorder(engine)
    tokens, quiet = golden.ids("s150"), golden.quiet_rows("s150")
    expected = golden.vectors("caches_fp32")
    with engine.open(golden.full_plan(150), []) as session:
        engine.step([RowRun(session=session, tokens=tokens)])
        pages = session.page_table
        for layer in (1, 3, 4):
            rows = engine.pages.sources[layer]
            for kind, stored in (("compressed_kv", rows.kv), ("index_k", rows.ik)):
                wanted = expected[f"s150.L{layer}.{kind}"].float()
                got = stored[pages].flatten(0, 1)[: len(wanted)]
                ratio = 150 // len(wanted)
                assert torch.equal(got[quiet[::ratio]], wanted[quiet[::ratio]]), (layer, kind)
    for layer in range(8):
        got = record.get("window_kv", layer, 150)
        wanted = expected[f"s150.L{layer}.window_kv"].float()
        assert torch.equal(got[quiet], wanted[quiet]), f"window of layer {layer}"
        routes = record.get(f"layers.{layer}.ffn.route_idx", 0, 150).sort(1).values
        wanted = expected[f"s150.L{layer}.route_idx"].long().sort(1).values
        assert torch.equal(routes[quiet], wanted[quiet]), f"routes of layer {layer}"
    for layer in (1, 3, 4, 6):
        got = record.get("topk", layer, 150)
        assert torch.equal(got[quiet], expected[f"s150.L{layer}.topk"].long()[quiet]), layer


def test_engram_rows_agree_across_an_image(engine):
    record = golden.Recorder(engine)
    golden.full_forward(engine, golden.ids("img40"), golden.image_rows())
    expected = golden.vectors("caches_fp32")
    for layer in (1, 3):
        wanted = expected[f"img40.L{layer}.engram_rows"].long()
        looked_up = record.get("engram_rows", layer, 40).view(40, 6, 32)
        weights = engine.model._w.engram_rows(layer, wanted)
        text = ~golden.vectors("inputs")["img40.image_mask"].bool()
        assert torch.equal(looked_up[text], weights[text])


@pytest.mark.parametrize("name", ["s7", "s40", "s150"])
def test_greedy_decoding_over_the_caches_gives_the_golden_tokens(engine, name):
    tokens = golden.ids(name)
    wanted = golden.vectors("greedy_fp32")[f"{name}.tokens"].tolist()
    got = []
    with engine.open(golden.full_plan(len(tokens) + 16), []) as session:
        while len(got) < 16:
            run = RowRun(session=session, tokens=tokens, num_logits=1, keep_logits=True)
            tokens = [int(engine.step([run])[0].logits.argmax())]
            got += tokens
    assert got == wanted


def test_a_truncated_decoder_agrees(engine):
    plan = SessionPlan(first_pos=0, global_start=0, decoder_start=130, max_tokens=150)
    with engine.open(plan, []) as session:
        run = RowRun(session=session, tokens=golden.ids("s150"), num_logits=20, keep_logits=True)
        logits = engine.step([run])[0].logits
    expected = golden.vectors("replay_fp32")["dec.logits"]
    check(logits, expected, golden.row_noise("s150")[130:], "logits")


def test_leaving_decoder_rows_out_equals_masking_what_they_show(engine):
    plan = SessionPlan(first_pos=0, global_start=0, decoder_start=130, max_tokens=150)
    answers = []
    for masked in (False, True):
        engine.masked_replay = masked
        try:
            with engine.open(plan, []) as session:
                run = RowRun(
                    session=session, tokens=golden.ids("s150"), num_logits=20, keep_logits=True
                )
                answers.append(engine.step([run])[0].logits)
        finally:
            engine.masked_replay = False
    assert torch.equal(*answers)


@pytest.mark.parametrize("cuts", [[70], [16, 30, 24], [1] * 70])
def test_a_replay_over_stored_rows_agrees(engine, cuts):
    tokens = golden.ids("s150")
    with engine.open(golden.full_plan(150), []) as cold:
        engine.step([RowRun(session=cold, tokens=tokens)])
        payload = cold.export_block(0)
    plan = SessionPlan(first_pos=80, global_start=96, decoder_start=130, max_tokens=150)
    record = golden.Recorder(engine)
    with engine.open(plan, tokens[:80]) as session:
        session.import_block(0, payload)
        logits, begin = [], 80
        for size in cuts:
            count = max(0, min(size, begin + size - 130))
            part = tokens[begin : begin + size]
            run = RowRun(session=session, tokens=part, num_logits=count, keep_logits=True)
            result = engine.step([run])[0]
            if count:
                logits.append(result.logits)
            begin += size
    expected = golden.vectors("replay_fp32")
    noise = golden.row_noise("s150")[130:]
    check(torch.cat(logits), expected["encdec.logits"], noise, "logits")
    if len(cuts) == 1:
        for layer in range(4):
            got = record.get("window_kv", layer, 70)
            wanted = expected[f"encdec.L{layer}.window_kv"].float()
            keep = golden.quiet_rows("s150")[80:]
            assert torch.equal(got[keep], wanted[keep]), f"window of layer {layer}"


def test_released_formats_load_to_the_values_of_their_dequantised_copy():
    plain, quantised = golden.golden_engine(), golden.golden_engine(quantized=True)
    tokens = golden.ids("s40")
    assert torch.equal(golden.full_forward(plain, tokens), golden.full_forward(quantised, tokens))


def test_quantised_gemm_inputs_change_little_and_keep_rows_invariant(engine):
    """No vectors exist for this switch: it is checked against the definition, by effect, and by law."""
    quantised = golden.golden_engine(gemm_quantized=True)
    assert quantised.info.gemm_quantized
    assert "gemmq-on" in quantised.info.numerics_id
    tokens = golden.ids("s40")
    record = golden.Recorder(quantised)
    logits = golden.full_forward(quantised, tokens)
    plain = golden.full_forward(engine, tokens)
    cosine = torch.nn.functional.cosine_similarity(logits, plain, dim=1)
    assert not torch.equal(logits, plain)
    assert cosine.mean() > 0.95
    with quantised.open(golden.full_plan(40), []) as session:
        parts = [
            quantised.step(
                [RowRun(session=session, tokens=[token], num_logits=1, keep_logits=True)]
            )[0].logits
            for token in tokens
        ]
    assert torch.equal(torch.cat(parts), logits)
    x = record.get("layers.0.attn_in", 0, 40)
    weights = quantised.model._w
    row = fp8_32(x) @ weights["layers.0.attn.wkv.weight"].t()
    normed = row * torch.rsqrt(row.square().mean(1, keepdim=True))
    normed = normed * weights["layers.0.attn.kv_norm.weight"]
    got = record.get("window_kv", 0, 40)
    still = normed[:, :48]  # not rotated; the stored row is that, in FP8
    assert ((got[:, :48] - still).abs() <= still.abs() / 8 + 1e-3).all()
