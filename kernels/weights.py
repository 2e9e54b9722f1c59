"""Loads a checkpoint: checks it against the configuration, then expands what a role needs.

Stages run from cheap to dear, headers only until the last: files, names, coverage, shapes and
dtypes, values. Whatever is wrong ends as a `CheckpointError` naming tensor, file, expected and
found, before the engine has done anything. Engram tables are never expanded: they stay mapped in
their stored format, and rows are expanded as they are looked up.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flashmesh.errors import CheckpointError
from flashmesh.kernels.formats import Kind, expand, stored
from flashmesh.kernels.shards import (
    WHOLE_FILE_BYTES,
    Entry,
    MappedRows,
    Shard,
    fingerprint,
    open_shards,
)
from flashmesh.kernels.tensor_names import (
    Role,
    TensorSpec,
    engram_table_name,
    is_vision,
    needed_by,
    scale_name,
    tensors,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashmesh.kernels.config import ModelConfig

_OPTIONAL_PREFIX = "model."
_NUM_NAMED = 5
_SCAN_ROWS = 1 << 14


class _Place(NamedTuple):
    """Where a tensor lies: the shard, and its name there (maybe prefixed)."""

    shard: Shard
    name: str

    @property
    def entry(self) -> Entry:
        return self.shard.entries[self.name]


class _Table(NamedTuple):
    """An Engram table, mapped."""

    place: _Place
    weight: MappedRows
    scale: MappedRows | None

    @classmethod
    def open(cls, weight: _Place, scale: _Place | None) -> _Table:
        return cls(
            weight,
            weight.shard.rows(weight.name),
            None if scale is None else scale.shard.rows(scale.name),
        )

    @property
    def num_rows(self) -> int:
        return len(self.weight.data)

    def rows(self, ids: np.ndarray) -> torch.Tensor:
        scale = None if self.scale is None else self.scale.read(ids)
        values = expand("F8row", self.weight.read(ids), scale)
        _check_finite(values, self.place)
        return values


class Weights:
    """Loaded tensors, by released name.

    Attributes:
        fingerprint: 32 bytes over configuration and files, equal for every role.
    """

    def __init__(
        self, values: dict[str, torch.Tensor], tables: dict[int, _Table], fingerprint: bytes
    ) -> None:
        self.fingerprint = fingerprint
        self._values = values
        self._tables = tables

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a tensor, fp32; KeyError for one that the role does not load."""
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def stack(self, names: Iterable[str]) -> torch.Tensor:
        """Stacks tensors of one shape along a new first axis, into new memory."""
        return torch.stack([self._values[name] for name in names])

    def engram_rows(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Looks rows up in the table of an Engram layer.

        Args:
            layer: an Engram layer that the role loads.
            rows: int64 `[...]`, each in [0, rows of the table).

        Returns:
            fp32 `[..., head_dim]`.

        Raises:
            CheckpointError: a row holds NaN.
        """
        values = self._tables[layer].rows(rows.cpu().numpy().reshape(-1))
        return values.reshape(*rows.shape, values.shape[-1])


def load_weights(folder: Path, config: ModelConfig, role: Role) -> Weights:
    """Loads the tensors of a role.

    Args:
        folder: with `model.safetensors.index.json` and its shards, or one `model.safetensors`.
        config: what the files must fit.
        role: "prefill" loads the encoder half and what the first decoder layer's compressed rows
            need; "decode" and "all" load the whole backbone. Draft and vision tensors are
            recognised and not loaded.

    Raises:
        CheckpointError: see the module's text.
    """
    shards = open_shards(folder)
    specs = {spec.name: spec for spec in tensors(config)}
    needed = list(needed_by(config, role))
    places = _find(shards, specs)
    _check_coverage(places, needed, folder)
    for name, place in places.items():
        if name in specs:
            _check_storage(place, places.get(scale_name(name)), specs[name])
    tables = _open_tables(places, config, {spec.name for spec in needed})
    table_names = {engram_table_name(layer) for layer in tables}
    values = {s.name: _load(places, s) for s in needed if s.name not in table_names}
    return Weights(values, tables, fingerprint(config, shards, folder / "tokenizer.json"))


def _find(shards: Sequence[Shard], specs: dict[str, TensorSpec]) -> dict[str, _Place]:
    """Maps released names to places; refuses unknown names and names that occur twice."""
    places: dict[str, _Place] = {}
    for shard in shards:
        for name in shard.entries:
            bare = name.removeprefix(_OPTIONAL_PREFIX)
            if not (_is_known(bare, specs) or is_vision(bare)):
                raise CheckpointError(
                    f"{shard.path.name}: {name} belongs to no tensor of this configuration"
                )
            if bare in places:
                raise CheckpointError(
                    f"{shard.path.name}: {name} is there twice, also in "
                    f"{places[bare].shard.path.name}"
                )
            places[bare] = _Place(shard, name)
    return places


def _is_known(name: str, specs: dict[str, TensorSpec]) -> bool:
    if name in specs:
        return True
    owner = specs.get(name.removesuffix("scale") + "weight") if name.endswith(".scale") else None
    return owner is not None and stored(owner.kind, owner.shape).scale_shape is not None


def _check_coverage(places: dict[str, _Place], needed: Sequence[TensorSpec], folder: Path) -> None:
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


def _check_storage(place: _Place, scale: _Place | None, spec: TensorSpec) -> None:
    """Compares a header entry, and that of its scales, with the configuration."""
    expected = stored(spec.kind, spec.shape)
    if scale is None and place.entry.dtype == "BF16" and expected.scale_shape is not None:
        expected = stored("BF16", spec.shape)
    _check_entry(place, expected.dtype, expected.shape)
    if scale is not None and expected.scale_shape is not None:
        _check_entry(scale, "F8_E8M0", expected.scale_shape)


def _check_entry(place: _Place, dtype: str, shape: tuple[int, ...]) -> None:
    found = place.entry
    if (found.dtype, found.shape) != (dtype, shape):
        raise CheckpointError(
            f"{place.shard.path.name}: {place.name}: expected {dtype} {list(shape)}, "
            f"found {found.dtype} {list(found.shape)}"
        )


def _load(places: dict[str, _Place], spec: TensorSpec) -> torch.Tensor:
    place, scale = places[spec.name], places.get(scale_name(spec.name))
    raw_scale = None if scale is None else scale.shard.read(scale.name)
    values = expand(_stored_kind(place, spec.kind), place.shard.read(place.name), raw_scale)
    _check_finite(values, place)
    return values


def _stored_kind(place: _Place, kind: Kind) -> Kind:
    return "BF16" if place.entry.dtype == "BF16" else kind


def _open_tables(
    places: dict[str, _Place], config: ModelConfig, needed: set[str]
) -> dict[int, _Table]:
    tables = {}
    for layer in config.engram_layer_ids:
        name = engram_table_name(layer)
        if name in needed:
            tables[layer] = _Table.open(places[name], places.get(scale_name(name)))
            _scan(tables[layer])
    return tables


def _scan(table: _Table) -> None:
    """Looks for NaN in a table small enough for it; larger ones are checked as rows are read."""
    entry = table.place.entry
    if entry.stop - entry.start <= WHOLE_FILE_BYTES:
        for start in range(0, table.num_rows, _SCAN_ROWS):
            table.rows(np.arange(start, min(start + _SCAN_ROWS, table.num_rows)))


def _check_finite(values: torch.Tensor, place: _Place) -> None:
    finite = torch.isfinite(values)
    if not finite.all():
        raise CheckpointError(
            f"{place.shard.path.name}: {place.name}: expected finite values, "
            f"found {int((~finite).sum())} NaN or infinite of {values.numel()}"
        )


def checkpoint_folder(path_or_hub_id: str, revision: str | None) -> Path:
    """Finds a checkpoint's folder, downloading it from the Hugging Face hub where it is not local.

    Args:
        path_or_hub_id: a folder, or a hub id such as "owner/name".
        revision: branch, tag or commit on the hub; None means its default branch.

    Raises:
        CheckpointError: there is no such folder and the hub gave none.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    if path_or_hub_id.startswith((".", "/", "~")) or path_or_hub_id.count("/") != 1:
        raise CheckpointError(f"{path_or_hub_id}: no such folder, and not a hub id (owner/name)")
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(path_or_hub_id, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client lets errors of several libraries through
        where = f"{path_or_hub_id} at revision {revision or 'default'}"
        raise CheckpointError(f"{where}: not a folder, and not downloaded: {error}") from error
