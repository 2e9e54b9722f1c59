"""The golden model and vectors (tests/golden/data/README.md)."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from flashmesh.kernels.door import RowRun, SessionPlan
from flashmesh.kernels.engine import ReferenceEngine, load_engine
from flashmesh.kernels.pages import RUN_ROWS

DATA = Path(__file__).parent.parent / "golden" / "data"
SEQUENCES = ("s7", "s40", "s150", "img40")
QUIET = 1e-3
"""Rows whose logits move less than this under 1e-6 perturbations sit on no rounding boundary."""


@cache
def vectors(name: str) -> dict[str, torch.Tensor]:
    """One file of golden vectors."""
    return load_file(DATA / f"{name}.safetensors")


def ids(sequence: str) -> list[int]:
    """Token ids of a golden sequence."""
    return vectors("inputs")[sequence].tolist()


def row_noise(sequence: str) -> torch.Tensor:
    """fp32 `[T]`: how far perturbations of 1e-6 move each row's logits."""
    return vectors("row_noise")[f"{sequence}.row_noise"]


def quiet_rows(sequence: str) -> torch.Tensor:
    """bool `[T]`: rows that no rounding boundary makes sensitive."""
    return row_noise(sequence) < QUIET


def checkpoint(quantized: bool = False) -> Path:
    """A checkpoint folder with the golden weights; the caller removes it."""
    folder = Path(tempfile.mkdtemp(prefix="flashmesh-golden-"))
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DATA / name, folder)
    weights = "model_quantized" if quantized else "model"
    shutil.copy(DATA / f"{weights}.safetensors", folder / "model.safetensors")
    return folder


def golden_engine(
    *, role="all", threads=1, quantized=False, num_slots=12, gemm_quantized=False
) -> ReferenceEngine:
    """The golden model, loaded."""
    folder = checkpoint(quantized)
    try:
        return load_engine(
            folder,
            role=role,
            name="golden",
            num_pages=64,
            num_slots=num_slots,
            threads=threads,
            gemm_quantized=gemm_quantized,
        )
    finally:
        shutil.rmtree(folder)


class Recorder:
    """Collects what a model's layers computed, without the rows that pad a pass."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._parts: defaultdict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        engine.model.observe = self._add

    def _add(self, name: str, layer: int, value: torch.Tensor) -> None:
        self._parts[name, layer].append(value.clone())

    def get(self, name: str, layer: int, num_rows: int) -> torch.Tensor:
        """Rows of a run of one session, all passes joined."""
        parts, left = [], num_rows
        for part in self._parts[name, layer]:
            taken = min(left, RUN_ROWS)
            parts.append(part[:taken])
            left -= taken
        return torch.cat(parts)[:num_rows]


def full_plan(length: int) -> SessionPlan:
    """Everything from position 0 on."""
    return SessionPlan(first_pos=0, global_start=0, decoder_start=0, max_tokens=length)


def full_forward(engine: ReferenceEngine, tokens: list[int], images=None) -> torch.Tensor:
    """Logits of every row, all rows in one step."""
    with engine.open(full_plan(len(tokens)), []) as session:
        session.images = images or {}
        run = RowRun(session=session, tokens=tokens, num_logits=len(tokens), keep_logits=True)
        return engine.step([run])[0].logits


def image_rows() -> dict[int, torch.Tensor]:
    """Embedding rows of img40's image span, by position."""
    inputs = vectors("inputs")
    positions = inputs["img40.image_mask"].nonzero().flatten().tolist()
    return dict(zip(positions, inputs["img40.image_embeds"].float(), strict=True))
