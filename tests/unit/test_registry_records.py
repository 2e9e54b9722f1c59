"""Worker records as text."""

import json

from flashmesh.registry import WorkerRecord
from flashmesh.types import ModelInfo

MODEL = ModelInfo(
    name="m",
    fingerprint=bytes(range(32)),
    layout_id=bytes(range(16)),
    numerics_id="reference/cpu/1",
    block_bytes=113_920,
    window=128,
    vocab_size=129_280,
    max_context_tokens=1 << 20,
    eos_token_id=1,
)


def record(**changes):
    fields = {"id": "decode-0", "epoch": "ab" * 16, "role": "decode", "address": "127.0.0.1:1"}
    return WorkerRecord(**fields | changes)


def test_a_record_survives_the_round_trip():
    full = record(model=MODEL, capacity={"num_slots": 4}, load={"pending_rows": 1.5})
    assert WorkerRecord.from_json(full.to_json()) == full
    assert WorkerRecord.from_json(record().to_json().encode()) == record()


def test_fields_of_a_later_version_are_left_out():
    fields = json.loads(record(model=MODEL).to_json())
    fields["zone"] = "a"
    fields["model"]["num_layers"] = 40
    assert WorkerRecord.from_json(json.dumps(fields)) == record(model=MODEL)
