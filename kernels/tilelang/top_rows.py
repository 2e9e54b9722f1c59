"""Exact selection of the best columns of every row; see `kernels.ops.indexer.top_rows` and `top_blocks`.

A level holds the maxima of groups of the level below, and is selected from before it: when groups are ranked by
maximum, then by position, the best `count` columns lie in the best `count` groups. (A column outside them is preceded
by the maximum of each: a larger value, or an equal one further left.) So one pass reads the scores once and writes
the maxima, and one block of threads for a row goes down the levels with `group * count` values at a time, whatever
the scores are. Below the first level those go into a list that are not less than the last maximum selected: few as a
rule, and never too many.
"""

from typing import Any

import torch
from torch import Tensor

from flashmesh.kernels.tilelang.build import Variant, build
from flashmesh.kernels.tilelang.top_peaks import OCTET, peaks_of
from flashmesh.kernels.tilelang.top_select import select_rows, shape_of


def top_rows(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Selects columns; contract of `kernels.ops.indexer.top_rows`.

    Raises:
        ValueError: a number of columns that is no multiple of 128, a count that is no multiple of 16 or above 4096, or
            too many columns for the count: up to 1024 are selected of 1,048,576 and more, 4096 of 262,144.
    """
    return _top(scores, visible, count, 1, 32 if count <= 1024 else 8)


def top_blocks(scores: Tensor, visible: Tensor, *, block: int = 8, count: int = 2048) -> Tensor:
    """Selects blocks; contract of `kernels.ops.indexer.top_blocks`.

    Raises:
        ValueError: blocks other than of 8, and as `top_rows`; 2048 blocks are selected of 131,072, 16 of 8192.
    """
    if block != OCTET:
        raise ValueError(f"blocks of {block} columns: needs blocks of {OCTET}")
    return _top(scores, visible, count, block, 8)


def plan(num_columns: int, count: int, base: int, group: int) -> tuple[int, ...]:
    """Sizes of the groups that are ranked before groups of `base` columns."""
    threads, per_thread = shape_of(count, group)
    # Where groups are large a first level is better short.
    most = threads * (min(per_thread, 16) if group > OCTET else per_thread)
    sizes: tuple[int, ...] = ()
    while -(-num_columns // (base * group ** len(sizes))) > most:
        sizes += (base * group ** (len(sizes) + 1),)
    return sizes


def _top(scores: Tensor, visible: Tensor, count: int, base: int, group: int) -> Tensor:
    num_rows, num_columns = scores.shape
    if num_columns % 128 or not 0 < count <= 4096 or count % 16 or len(visible) != num_rows:
        raise ValueError(
            f"{count} of {num_columns} columns for {num_rows} rows and {len(visible)} visible counts: needs a"
            " multiple of 16 up to 4096, of a multiple of 128"
        )
    selected = torch.empty(num_rows, count, dtype=torch.int32, device=scores.device)
    if not num_rows:
        return selected
    sizes = plan(num_columns, count, base, group)
    levels = len(sizes)
    if base > 1:
        sizes = (base, *sizes)
    if len(sizes) > 2 or (count > 2048 and levels > 1):
        raise ValueError(f"{num_columns} columns are too many to select {count}")
    arrays = [scores.view(num_rows, -1, OCTET)]
    for size in sizes:
        octets = -(-num_columns // (size * OCTET))
        arrays.append(torch.empty(num_rows, octets, OCTET, device=scores.device))
    arrays += arrays[:1] * (3 - len(arrays))
    if sizes:
        build(peaks_of, sizes)(arrays[0], visible, *arrays[1:])
    if base > 1:
        arrays = arrays[1:] + arrays[:1]
    build(select_rows, count, group, base, levels)(*arrays, visible, selected)
    return selected


def variants() -> list[Variant]:
    """Kernels of V4.1-Flash: 512 columns of up to 1,048,576, 2048 blocks of them."""
    peaks = sorted({sizes for *_, sizes in _uses()})
    selects = sorted({(count, group, base, levels) for count, group, base, levels, _ in _uses()})
    return [
        *(
            Variant("top_rows.peaks." + ".".join(map(str, sizes)), peaks_of, (sizes,))
            for sizes in peaks
            if sizes
        ),
        *(
            Variant("top_rows.select." + ".".join(map(str, args)), select_rows, args)
            for args in selects
        ),
    ]


def _uses() -> list[tuple[Any, ...]]:
    uses = []
    for count, base, group in ((512, 1, 32), (2048, 8, 8)):
        for columns in (1 << shift for shift in range(7, 21)):
            sizes = plan(columns, count, base, group)
            above = (base, *sizes) if base > 1 else sizes
            uses.append((count, group, base, len(sizes), above))
    return uses
