"""From the `[model]` section of a configuration to a loaded engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flashmesh.config import ModelSection
    from flashmesh.kernels.door import Engine

Role = Literal["prefill", "decode", "all"]


def model_folder(model: ModelSection) -> Path:
    """Returns the checkpoint's folder, making the built-in one or downloading from the hub where asked.

    Raises:
        CheckpointError: it is not there.
    """
    if model.path == "demo":
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
