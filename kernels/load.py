"""From the `[model]` section of a configuration to a loaded engine, and to the spelling of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flashmesh.data import demo_folder, shipped_tokenizer
from flashmesh.errors import CheckpointError, Incompatible

if TYPE_CHECKING:
    from flashmesh.config import ModelSection
    from flashmesh.kernels.door import Engine
    from flashmesh.kernels.grammar import Vocabulary
    from flashmesh.types import ModelInfo

Role = Literal["prefill", "decode", "all"]


def model_folder(model: ModelSection) -> Path:
    """Returns the checkpoint's folder, making the random one or downloading from the hub where asked.

    Raises:
        CheckpointError: it is not there.
    """
    if model.path == "demo":
        return demo_folder()
    if model.path == "demo-random":
        from flashmesh.kernels.demo import demo_checkpoint

        return demo_checkpoint(Path(model.cache_dir).expanduser())
    from flashmesh.kernels.weights import checkpoint_folder

    return checkpoint_folder(model.path, model.revision or None)


def open_engine(model: ModelSection, role: Role, *, num_pages: int, num_slots: int) -> Engine:
    """Loads what a role needs.

    Args:
        model: which model, on which engine.
        role: "prefill" reads the encoder half only; "all" is for offline runs.
        num_pages: pages for the global rows of one block each.
        num_slots: most sessions at once.

    Raises:
        CheckpointError: names the file and tensor at fault.
    """
    if model.engine == "simulated":
        from flashmesh.kernels.simulated import SimulatedEngine

        return SimulatedEngine(
            name=model.name,
            num_pages=num_pages,
            num_slots=num_slots,
            step_s=model.sim_step_ms / 1000,
            row_s=model.sim_row_ms / 1000,
        )
    from flashmesh.kernels.engine import load_engine

    return load_engine(
        model_folder(model),
        role=role,
        name=model.name,
        num_pages=num_pages,
        num_slots=num_slots,
        threads=model.threads,
        gemm_quantized=model.gemm_quantized,
        expand_below_mb=model.expand_below_mb,
    )


def load_vocabulary(model: ModelSection, info: ModelInfo) -> Vocabulary:
    """Reads how the tokens of a loaded model are spelled, for grammars.

    Raises:
        CheckpointError: there is no tokenizer.json.
        Incompatible: this installation lacks what grammars need.
    """
    try:
        from flashmesh.kernels.grammar import Vocabulary
    except ImportError as error:
        raise Incompatible(
            f"grammars need the package xgrammar (docs/grammars.md): {error}"
        ) from error
    path = shipped_tokenizer("demo" if model.engine == "simulated" else model.path)
    path = path or model_folder(model) / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return Vocabulary(text, info.vocab_size, info.eos_token_id)
