"""The header stages of loading: which tensors a checkpoint has, and whether they fit the model.

Names, then coverage, then shapes and dtypes, all from headers: a wrong checkpoint is refused before
a byte of payload is read. Every `CheckpointError` names tensor, file, expected and found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashmesh.errors import CheckpointError
from flashmesh.kernels.formats import Kind, stored
from flashmesh.kernels.tensor_names import TensorSpec, is_vision, scale_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from flashmesh.kernels.shards import Entry, Shard

_OPTIONAL_PREFIX = "model."
_NUM_NAMED = 5


class Place(NamedTuple):
    """Where a tensor lies: the shard, and its name there (maybe prefixed)."""

    shard: Shard
    name: str

    @property
    def entry(self) -> Entry:
        """The tensor's header entry."""
        return self.shard.entries[self.name]

    @property
    def num_bytes(self) -> int:
        """Payload bytes."""
        return self.entry.stop - self.entry.start

    def __str__(self) -> str:
        return f"{self.shard.path.name}: {self.name}"


def bare_name(name: str) -> str:
    """Returns the released name: without the prefix that some checkpoints put before all."""
    return name.removeprefix(_OPTIONAL_PREFIX)


def find_tensors(shards: Sequence[Shard], specs: Mapping[str, TensorSpec]) -> dict[str, Place]:
    """Maps released names to places.

    Args:
        shards: of the checkpoint.
        specs: every tensor of the model, by name.

    Raises:
        CheckpointError: a name belongs to no tensor, or occurs twice.
    """
    places: dict[str, Place] = {}
    for shard in shards:
        for name in shard.entries:
            place, bare = Place(shard, name), bare_name(name)
            if not (_is_known(bare, specs) or is_vision(bare)):
                raise CheckpointError(f"{place} belongs to no tensor of this configuration")
            if bare in places:
                other = places[bare].shard.path.name
                raise CheckpointError(f"{place} is there twice, also in {other}")
            places[bare] = place
    return places


def _is_known(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    if name in specs:
        return True
    owner = specs.get(name.removesuffix("scale") + "weight") if name.endswith(".scale") else None
    return owner is not None and stored(owner.kind, owner.shape).scale_shape is not None


def check_coverage(places: Mapping[str, Place], needed: Iterable[TensorSpec], folder: Path) -> None:
    """Refuses a checkpoint that lacks a needed tensor, or the scales of one.

    Raises:
        CheckpointError: with how many are missing, and the first of them.
    """
    missing = []
    for name, shape, kind in needed:
        if name not in places:
            missing.append(name)
        elif (
            stored(kind, shape).scale_shape is not None
            and places[name].entry.dtype != "BF16"  # a dequantised copy has no scales
            and scale_name(name) not in places
        ):
            missing.append(scale_name(name))
    if missing:
        more = f" and {len(missing) - _NUM_NAMED} more" if len(missing) > _NUM_NAMED else ""
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing from all shards: "
            f"{', '.join(missing[:_NUM_NAMED])}{more}"
        )


def check_storage(places: Mapping[str, Place], specs: Mapping[str, TensorSpec]) -> None:
    """Compares shapes and dtypes of all tensors, and of their scales, with the configuration.

    Raises:
        CheckpointError: names the first that differs.
    """
    for name, place in places.items():
        if name not in specs:
            continue
        spec, scale = specs[name], places.get(scale_name(name))
        expected = stored(spec.kind, spec.shape)
        if scale is None and place.entry.dtype == "BF16" and expected.scale_shape is not None:
            expected = stored("BF16", spec.shape)
        _check_entry(place, expected.dtype, expected.shape)
        if scale is not None and expected.scale_shape is not None:
            _check_entry(scale, "F8_E8M0", expected.scale_shape)


def _check_entry(place: Place, dtype: str, shape: tuple[int, ...]) -> None:
    found = place.entry
    if (found.dtype, found.shape) != (dtype, shape):
        raise CheckpointError(
            f"{place}: expected {dtype} {list(shape)}, found {found.dtype} {list(found.shape)}"
        )


def stored_kind(place: Place, kind: Kind) -> Kind:
    """Returns the format a tensor really has: BF16 in a dequantised copy."""
    return "BF16" if place.entry.dtype == "BF16" else kind
