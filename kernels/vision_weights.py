"""Loads the vision tower of a checkpoint, with the same stages as the text model's tensors.

A separate door, since text never needs the tower: `weights.load_weights` recognises its tensors and leaves them. All of
them are BF16 in the released files, and are expanded once: a step of a large image uses each of them once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmesh.errors import CheckpointError
from flashmesh.kernels.checkpoint import check_coverage, check_storage, find_tensors
from flashmesh.kernels.shards import open_shards
from flashmesh.kernels.stored_tensor import check_finite
from flashmesh.kernels.tensor_names import is_vision, tensors, vision_tensors
from flashmesh.kernels.vision import VisionTower
from flashmesh.kernels.vision_config import VisionConfig

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from flashmesh.kernels.checkpoint import Place
    from flashmesh.kernels.config import ModelConfig


def load_tower(folder: Path, config: ModelConfig) -> VisionTower:
    """Loads the vision tower that `config.json` describes.

    Args:
        folder: of the checkpoint.
        config: of the text model.

    Raises:
        CheckpointError: there is no tower, or `load_vision` refuses its tensors.
    """
    sizes = VisionConfig.load(folder)
    if sizes is None:
        raise CheckpointError(f"{folder / 'config.json'}: vision_config describes no vision tower")
    return VisionTower(sizes, load_vision(folder, config, sizes))


def load_vision(folder: Path, config: ModelConfig, vision: VisionConfig) -> dict[str, Tensor]:
    """Loads the tower, the aligner and the embeddings of an image's marks.

    Args:
        folder: of the checkpoint.
        config: of the text model, which sets the width of the aligner's rows.
        vision: of the tower.

    Returns:
        fp32 tensors by released name.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape or dtype, or not finite.
    """
    specs = {spec.name: spec for spec in vision_tensors(vision, config.hidden_size)}
    known = {spec.name: spec for spec in tensors(config)} | specs
    places = find_tensors(open_shards(folder), known)
    for name, place in places.items():
        if is_vision(name) and name not in specs:
            raise CheckpointError(f"{place} belongs to no tensor of this vision_config")
    check_coverage(places, specs.values(), folder)
    check_storage(places, specs)
    return {name: _read(places[name]) for name in specs}


def _read(place: Place) -> Tensor:
    values = place.shard.read(place.name).float()
    check_finite(values, place)
    return values
