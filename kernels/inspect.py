"""What a checkpoint holds and what serving it takes, from headers and configuration alone.

Nothing here reads payload, so half a terabyte is inspected in seconds, on any machine. Byte counts
are the files' own; active parameters and cache bytes follow from the configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flashmesh.errors import CheckpointError
from flashmesh.kernels.checkpoint import bare_name, check_coverage, check_storage, find_tensors
from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.layout import BlockLayout
from flashmesh.kernels.shards import Shard, open_shards
from flashmesh.kernels.tensor_names import (
    EVERY_EXPERT,
    ExpertShard,
    Role,
    TensorSpec,
    engram_table_name,
    is_vision,
    needed_by,
    scale_name,
    tensors,
)
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

ROLES: tuple[Role, ...] = ("prefill", "decode")
_SCALE_DTYPE = "F8_E8M0"


class Total(NamedTuple):
    """Tensors, scales counted like any other, and their payload bytes."""

    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RoleTotal:
    """What a worker takes from a checkpoint.

    Attributes:
        loaded: read into memory.
        mapped: Engram tables, which stay in their files.
    """

    loaded: Total
    mapped: Total


@dataclass(frozen=True, slots=True)
class ActiveParameters:
    """Parameters that one token is multiplied with.

    Attributes:
        layers: attention projections, shared and chosen experts, router and stream mixing of every
            layer run, and the head: what the model's size is named after.
        others: Engram projections, compressors and indexers.
    """

    layers: int
    others: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that `inspect_checkpoint` finds.

    Attributes:
        num_shards: files.
        total: of all files.
        kinds: by what is stored, such as "FP4".
        parts: by part of the model.
        parameters: logical parameters without scales, by part of the model.
        roles: by role; a tensor that is missing counts as nothing.
        active: by role.
        kv_bytes_per_token: global rows that a token adds, all source layers together.
        block_bytes: payload of one stored block.
        problem: why an engine would refuse the files; None where headers give no reason.
    """

    num_shards: int
    total: Total
    kinds: Mapping[str, Total]
    parts: Mapping[str, Total]
    parameters: Mapping[str, int]
    roles: Mapping[Role, RoleTotal]
    active: Mapping[Role, ActiveParameters]
    kv_bytes_per_token: float
    block_bytes: int
    problem: str | None


class _Item(NamedTuple):
    """A header entry and what it counts as."""

    name: str
    kind: str
    part: str
    num_bytes: int
    num_parameters: int


def inspect_checkpoint(folder: Path, experts: ExpertShard = EVERY_EXPERT) -> Inspection:
    """Reads the headers of a checkpoint.

    Args:
        folder: of the checkpoint.
        experts: the share of the routed experts that a worker loads.

    Raises:
        CheckpointError: config.json is unusable, or a shard is missing or is no whole file. Tensors
            that do not fit the configuration end up in `Inspection.problem` instead.
        Incompatible: `experts` does not divide this model's.
    """
    config = ModelConfig.load(folder)
    shards = open_shards(folder)
    items = list(_items(shards))
    num_bytes = {item.name: item.num_bytes for item in items}
    block_bytes = BlockLayout.of(config).block_bytes
    parts = sorted({item.part for item in items})
    return Inspection(
        num_shards=len(shards),
        total=_total(items),
        kinds={
            kind: _total(item for item in items if item.kind == kind)
            for kind in sorted({item.kind for item in items})
        },
        parts={part: _total(item for item in items if item.part == part) for part in parts},
        parameters={
            part: sum(item.num_parameters for item in items if item.part == part) for part in parts
        },
        roles={role: role_total(config, role, num_bytes, experts) for role in ROLES},
        active={role: active_parameters(config, role) for role in ROLES},
        kv_bytes_per_token=block_bytes / BLOCK_TOKENS,
        block_bytes=block_bytes,
        problem=_problem(folder, config, shards),
    )


def _items(shards: Iterable[Shard]) -> Iterator[_Item]:
    for shard in shards:
        for name, entry in shard.entries.items():
            bare = bare_name(name)
            num_parameters = math.prod(entry.shape) * (2 if entry.dtype == "I8" else 1)
            yield _Item(
                bare,
                _kind(bare, entry.dtype),
                _part(bare),
                entry.stop - entry.start,
                0 if entry.dtype == _SCALE_DTYPE else num_parameters,
            )


def _kind(name: str, dtype: str) -> str:
    """Names what is stored, a weight and its scales alike."""
    if dtype == "I8" or (dtype == _SCALE_DTYPE and ".experts." in name):
        return "FP4, scale for 32"
    if dtype in ("F8_E4M3", _SCALE_DTYPE):
        return "FP8, scale for 32" if ".engram.embed." in name else "FP8, scale for 32x32"
    return dtype


def _part(name: str) -> str:
    if is_vision(name):
        return "vision"
    if name.startswith("mtp."):
        return "draft"
    return "engram" if ".engram." in name else "backbone"


def _total(items: Iterable[_Item]) -> Total:
    sizes = [item.num_bytes for item in items]
    return Total(len(sizes), sum(sizes))


def role_total(
    config: ModelConfig,
    role: Role,
    num_bytes: Mapping[str, int],
    experts: ExpertShard = EVERY_EXPERT,
) -> RoleTotal:
    """Adds up what a role takes.

    Args:
        config: of the model.
        role: whose.
        num_bytes: payload bytes of every tensor there is, by released name.
        experts: the share of the routed experts that it loads.
    """
    tables = {engram_table_name(layer) for layer in config.engram_layer_ids}
    loaded: list[int] = []
    mapped: list[int] = []
    for spec in needed_by(config, role, experts):
        sizes = [num_bytes[name] for name in _with_scale(spec) if name in num_bytes]
        (mapped if spec.name in tables else loaded).extend(sizes)
    return RoleTotal(Total(len(loaded), sum(loaded)), Total(len(mapped), sum(mapped)))


def _with_scale(spec: TensorSpec) -> tuple[str, ...]:
    return (spec.name, scale_name(spec.name)) if spec.name.endswith("weight") else (spec.name,)


def active_parameters(config: ModelConfig, role: Role) -> ActiveParameters:
    """Counts the parameters that a token is multiplied with.

    Lookups (embedding, Engram tables), norms, biases and the draft do not count. Of the routed
    experts a token takes `num_experts_per_tok`.
    """
    first = f"layers.{config.num_encoder_layers}."
    layers = others = routed = 0
    for spec in needed_by(config, role):
        name, size = spec.name, math.prod(spec.shape)
        if len(spec.shape) != 2 or name.startswith(("embed.", "mtp.")) or is_vision(name):
            continue
        if ".experts." in name:
            routed += size
        elif any(part in name for part in (".engram.", ".compressor.", ".indexer.")):
            others += 0 if ".engram.embed." in name else size
        elif role == "decode" or not name.startswith(first):
            layers += size
    chosen = routed * config.num_experts_per_tok // config.n_routed_experts
    return ActiveParameters(layers + chosen, others)


def _problem(folder: Path, config: ModelConfig, shards: Sequence[Shard]) -> str | None:
    """Runs the header stages of loading; a checkpoint is judged as the role that needs all."""
    try:
        specs = {spec.name: spec for spec in tensors(config)}
        places = find_tensors(shards, specs)
        check_coverage(places, needed_by(config, "all"), folder)
        check_storage(places, specs)
    except CheckpointError as error:
        return str(error)
    return None
