"""Which implementation of every op the device model runs.

A table is complete or is not built: where a backend lacks an op, the table refuses to load unless the caller names
that op as one that may fall back to its twin, and `report` shows it. Nothing falls back in silence.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

from flashmesh.errors import KernelsUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

Backend = Literal["reference", "tilelang"]

_OPS: dict[str, tuple[str, str]] = {
    # op: (twin's module in kernels.ops, kernel's module in kernels.tilelang)
    "round_rows": ("rounding", "rounding"),
    "prepare_dense": ("linear", "dense"),
    "dense": ("linear", "dense"),
    "plain_linear": ("linear", "plain_linear"),
    "rms_norm": ("rows", "norm"),
    "query_latent_and_window": ("rows", "window_store"),
    "store_window": ("rows", "window_store"),
    "join_pairs": ("rows", "pair"),
    "store_compressed": ("rows", "compressed_store"),
    "store_index_key": ("rows", "index_keys"),
    "index_queries": ("rows", "index_keys"),
    "prepare_mix": ("mixing", "mixing"),
    "mix": ("mixing", "mixing"),
    "spread": ("mixing", "spread"),
    "spread_mix": ("mixing", "mixing"),
    "collapse_norm": ("mixing", "mixing"),
    "index_scores": ("indexer", "index_scores"),
    "candidate_scores": ("indexer", "candidate"),
    "top_rows": ("indexer", "top_rows"),
    "top_blocks": ("indexer", "top_rows"),
    "gather_columns": ("indexer", "index_rows"),
    "physical_rows": ("indexer", "index_rows"),
    "sparse_attention": ("attention", "attention"),
    "route": ("moe", "route"),
    "prepare_experts": ("moe", "expert_layout"),
    "experts": ("moe", "experts"),
    "swiglu": ("moe", "swiglu"),
    "engram_rows": ("engram", "engram_rows"),
    "engram_gate": ("engram", "engram_gate"),
    "markov_logits": ("draft", "draft_head"),
    "confidence": ("draft", "draft_head"),
    "sample": ("sampler", "sampler"),
    "top_logprobs": ("sampler", "sampler"),
}


class OpTable:
    """The ops of one backend, as attributes: `table.dense(x, weight)`."""

    def __init__(self, ops: Mapping[str, Callable[..., Any]]) -> None:
        self._ops = dict(ops)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.__dict__["_ops"][name]
        except KeyError:
            raise AttributeError(f"no op {name!r}") from None

    def wrapped(self, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> OpTable:
        """Returns a table of `wrap(name, op)` for every op, to watch what runs."""
        return OpTable({name: wrap(name, op) for name, op in self._ops.items()})

    def report(self) -> dict[str, Backend]:
        """Says what runs where: op to backend."""
        return {
            name: "reference" if op.__module__.startswith("flashmesh.kernels.ops.") else "tilelang"
            for name, op in self._ops.items()
        }


def load_ops(backend: Backend, *, may_fall_back: Collection[str] = ()) -> OpTable:
    """Collects the ops of a backend.

    Args:
        backend: "reference" for the twins, on any device; "tilelang" for Hopper.
        may_fall_back: ops that may run as their twins where the backend lacks them.

    Raises:
        KernelsUnavailable: the backend lacks an op that may not fall back, named in the error.
    """
    ops, missing = {}, []
    for name, (twin, kernel) in _OPS.items():
        op = _find("tilelang", kernel, name) if backend == "tilelang" else None
        if op is None and (backend == "reference" or name in may_fall_back):
            op = _find("ops", twin, name)
        if op is None:
            missing.append(name)
        else:
            ops[name] = op
    if missing:
        raise KernelsUnavailable(f"the {backend} backend lacks {', '.join(missing)}")
    return OpTable(ops)


def _find(package: str, module: str, name: str) -> Callable[..., Any] | None:
    path = f"flashmesh.kernels.{package}.{module}"
    try:
        return getattr(importlib.import_module(path), name, None)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
