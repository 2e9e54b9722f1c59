"""Loads a checkpoint: checks it against the configuration, then reads what a role needs.

Stages run from cheap to dear, headers only until the last: files, names, coverage, shapes and
dtypes, values. Whatever is wrong ends as a `CheckpointError` naming tensor, file, expected and
found, before the engine has done anything. Weights stay in their stored format and are expanded
whenever they are used, except in a model so small that all of them are expanded once. Engram tables
stay in their files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from flashmesh.errors import CheckpointError
from flashmesh.kernels.checkpoint import (
    Place,
    check_coverage,
    check_storage,
    find_tensors,
    stored_kind,
)
from flashmesh.kernels.engram_table import EngramTable
from flashmesh.kernels.loading_bar import loading_bar
from flashmesh.kernels.shards import fingerprint, open_shards
from flashmesh.kernels.stored_tensor import StoredTensor, check_finite
from flashmesh.kernels.tensor_names import (
    EVERY_EXPERT,
    ExpertShard,
    Role,
    TensorSpec,
    engram_table_name,
    needed_by,
    scale_name,
    tensors,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from flashmesh.kernels.config import ModelConfig

EXPAND_BELOW_BYTES = 2048 << 20
"""Expanded size below which a model is expanded once, where nobody says otherwise."""


class Weights:
    """Loaded tensors, by released name.

    Attributes:
        fingerprint: 32 bytes over configuration and files, equal for every role.
        num_bytes: memory that the tensors take; mapped Engram tables take none.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor | StoredTensor],
        tables: Mapping[int, EngramTable],
        fingerprint: bytes,
    ) -> None:
        self.fingerprint = fingerprint
        self._values = values
        self._tables = tables

    def __getitem__(self, name: str) -> Tensor:
        """Returns a tensor, fp32; KeyError for one that the role does not load.

        A tensor kept in its stored format is expanded anew by every call.
        """
        value = self._values[name]
        return value.expand() if isinstance(value, StoredTensor) else value.float()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def stored(self, name: str) -> Tensor | StoredTensor:
        """Returns a tensor as it is kept, an Engram table read whole; KeyError for one that is not loaded."""
        for layer, table in self._tables.items():
            if name == engram_table_name(layer):
                return table.stored()
        return self._values[name]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory behind all tensors."""
        return sum(
            value.weight.nbytes + value.scale.nbytes
            if isinstance(value, StoredTensor)
            else value.nbytes
            for value in self._values.values()
        )

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Returns rows of a 2-D tensor, fp32, expanding no others of an unquantised one."""
        value = self._values[name]
        return self[name][ids] if isinstance(value, StoredTensor) else value[ids].float()

    def experts(self, prefix: str) -> ExpertWeights:
        """Returns a block's routed experts; `prefix` as in "layers.3."."""
        return ExpertWeights(self, prefix)

    def engram_rows(self, layer: int, rows: Tensor) -> Tensor:
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


class ExpertWeights:
    """Routed experts of one block: an expert's matrices are expanded when it is asked for."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = f"{prefix}ffn.experts."

    def __getitem__(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns w1 `[n, D]`, w2 `[D, n]` and w3 `[n, D]` of an expert, fp32."""
        name = f"{self._prefix}{expert}."
        w1, w2, w3 = (self._weights[f"{name}{part}.weight"] for part in ("w1", "w2", "w3"))
        return w1, w2, w3


def load_weights(
    folder: Path,
    config: ModelConfig,
    role: Role,
    *,
    experts: ExpertShard = EVERY_EXPERT,
    expand_below_bytes: int = EXPAND_BELOW_BYTES,
) -> Weights:
    """Loads the tensors of a role.

    Args:
        folder: with `model.safetensors.index.json` and its shards, or one `model.safetensors`.
        config: what the files must fit.
        role: "prefill" loads the encoder half and what the first decoder layer's compressed rows
            need; "decode" and "all" load the whole model. Vision tensors are recognised and not
            loaded.
        experts: the routed experts to load, of an expert-parallel rank.
        expand_below_bytes: expand the tensors once if their fp32 values take less than this.

    Raises:
        CheckpointError: see the module's text.
        Incompatible: `experts` does not divide this model's.
    """
    shards = open_shards(folder)
    specs = {spec.name: spec for spec in tensors(config)}
    needed = list(needed_by(config, role, experts))
    places = find_tensors(shards, specs)
    check_coverage(places, needed, folder)
    check_storage(places, specs)
    tables = _open_tables(places, config, {spec.name for spec in needed})
    table_names = {engram_table_name(layer) for layer in tables}
    loaded = [spec for spec in needed if spec.name not in table_names]
    expands = expanded_bytes(loaded) < expand_below_bytes
    values = {}
    with loading_bar(sum(places[spec.name].num_bytes for spec in loaded)) as count_bytes:
        for spec in loaded:
            value = _read(places, spec)
            values[spec.name] = _expanded(value) if expands else value
            count_bytes(places[spec.name].num_bytes)
    return Weights(values, tables, fingerprint(config, shards, folder / "tokenizer.json"))


def expanded_bytes(specs: Iterable[TensorSpec]) -> int:
    """Returns how much memory tensors would take as fp32."""
    return sum(4 * math.prod(spec.shape) for spec in specs)


def _read(places: Mapping[str, Place], spec: TensorSpec) -> Tensor | StoredTensor:
    """Copies a tensor out of its file, in its stored format."""
    place, scale = places[spec.name], places.get(scale_name(spec.name))
    raw = place.shard.read(place.name)
    value: Tensor | StoredTensor = raw
    if scale is not None:
        value = StoredTensor(stored_kind(place, spec.kind), raw, scale.shard.read(scale.name))
    check_finite(value, place)
    return value


def _expanded(value: Tensor | StoredTensor) -> Tensor:
    return value.expand() if isinstance(value, StoredTensor) else value.float()


def _open_tables(
    places: Mapping[str, Place], config: ModelConfig, needed: set[str]
) -> dict[int, EngramTable]:
    tables = {}
    for layer in config.engram_layer_ids:
        name = engram_table_name(layer)
        if name in needed:
            tables[layer] = EngramTable.open(places[name], places.get(scale_name(name)))
            tables[layer].scan()
    return tables


def checkpoint_folder(path_or_hub_id: str, revision: str | None) -> Path:
    """Finds a checkpoint's folder, downloading it from the Hugging Face hub where it is not local.

    Args:
        path_or_hub_id: a folder, or a hub id such as "owner/name".
        revision: commit, tag or branch on the hub; a hub id needs one, so that a worker started
            later loads the same files.

    Raises:
        CheckpointError: there is no such folder and the hub gave none, or no revision was named.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    if path_or_hub_id.startswith((".", "/", "~")) or path_or_hub_id.count("/") != 1:
        raise CheckpointError(f"{path_or_hub_id}: no such folder, and not a hub id (owner/name)")
    if not revision:
        raise CheckpointError(
            f"{path_or_hub_id}: no such folder; to download it from the hub, pin a revision "
            "([model] revision, best a commit)"
        )
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(path_or_hub_id, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client lets errors of several libraries through
        where = f"{path_or_hub_id} at revision {revision}"
        raise CheckpointError(f"{where}: not a folder, and not downloaded: {error}") from error
