"""The least that each op of a step must move and multiply, counted while the step runs.

Every tensor that an op takes counts once, every one that it gives once; of caches, tables and experts only the rows
that this call reaches. The sum over a step, each op at the device's ceilings, is what the step is measured against.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flashmesh.kernels.ops.table import OpTable


class Work(NamedTuple):
    """What one call of an op comes to."""

    op: str
    num_bytes: int
    num_flops: int


def watched(ops: OpTable, log: list[Work]) -> OpTable:
    """Returns ops that note their work in `log`; each call waits for the device."""

    def wrap(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def call(*args: Any, **named: Any) -> Any:
            result = op(*args, **named)
            log.append(Work(name, *_count(name, args, result)))
            return result

        return call if not name.startswith("prepare") else op

    return ops.wrapped(wrap)


def _count(name: str, args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    special = _SPECIAL.get(name)
    if special is not None:
        return special(args, result)
    caches = _CACHES.get(name, ())
    moved = sum(_num_bytes(arg) for place, arg in enumerate(args) if place not in caches)
    flops = 0
    if name in ("dense", "plain_linear"):
        flops = 2 * args[0].shape[0] * _num_weights(name, args, result)
    return moved + _num_bytes(result), flops


def _num_weights(name: str, args: tuple[Any, ...], result: torch.Tensor) -> int:
    if name == "plain_linear":
        return int(args[1].numel())
    # A grouped product's weight has `N` rows over a group's columns.
    return int(result.shape[1] * args[0].shape[1] // args[1].groups)


def _experts(args: tuple[Any, ...], result: torch.Tensor) -> tuple[int, int]:
    x, ids, _, weights = args[:4]
    used = ids[ids >= 0]
    per_expert = _num_bytes(weights) // len(weights.w2)
    moved = per_expert * len(used.unique()) + x.nbytes + 2 * ids.nbytes + result.nbytes
    # Two codes a byte, two operations a weight, three matrices of one size.
    return moved, 12 * weights.w2[0].numel() * len(used)


def _attention(args: tuple[Any, ...], result: torch.Tensor) -> tuple[int, int]:
    q, _, _, window, window_index, kv, kv_index = args[:7]
    moved = q.nbytes + result.nbytes + window_index.nbytes + kv_index.nbytes
    present = 0
    for rows, index in ((window, window_index), (kv, kv_index)):
        seen = index[index >= 0]
        moved += len(seen.unique()) * rows.shape[1]
        present += len(seen)
    return moved, 4 * present * q.shape[1] * q.shape[2]


def _index_scores(args: tuple[Any, ...], result: torch.Tensor) -> tuple[int, int]:
    iq, iw, _, _, sequence, visible = args[:6]
    longest = torch.zeros(int(sequence.max()) + 1, dtype=torch.int64, device=iq.device)
    longest.scatter_reduce_(0, sequence.long(), visible.long(), "amax")
    total = int(visible.sum())
    keys = int(longest.sum()) * (iq.shape[2] * 17 // 32)
    return keys + iq.nbytes + iw.nbytes + 4 * total, 2 * total * iq.shape[1] * iq.shape[2]


def _candidate_scores(args: tuple[Any, ...], result: torch.Tensor) -> tuple[int, int]:
    iq = args[0]
    scored = int(torch.isfinite(result).sum())
    moved = scored * (iq.shape[2] * 17 // 32 + 4) + iq.nbytes + args[6].nbytes
    return moved, 2 * scored * iq.shape[1] * iq.shape[2]


def _selection(args: tuple[Any, ...], result: torch.Tensor) -> tuple[int, int]:
    return 4 * int(args[1].sum()) + result.nbytes, 0


def _engram_rows(args: tuple[Any, ...], result: torch.Tensor) -> tuple[int, int]:
    codes, scales, rows = args
    return rows.numel() * (codes.shape[1] + scales.shape[1] + 8) + result.nbytes, 0


_SPECIAL: dict[str, Callable[[tuple[Any, ...], Any], tuple[int, int]]] = {
    "experts": _experts,
    "sparse_attention": _attention,
    "index_scores": _index_scores,
    "candidate_scores": _candidate_scores,
    "top_rows": _selection,
    "top_blocks": _selection,
    "engram_rows": _engram_rows,
}

_CACHES = {
    "query_latent_and_window": (5,),
    "store_window": (4,),
    "join_pairs": (2,),
    "store_compressed": (3,),
    "store_index_key": (4,),
    "physical_rows": (1,),
}
"""Places of arguments of which a call reaches a few rows only; those few are left out of the count."""


def _num_bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value, in tuples and in prepared weights."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))
