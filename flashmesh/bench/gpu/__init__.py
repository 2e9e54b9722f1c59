"""GPU kernels against the ceilings of their device: achieved over attainable, op by op, size by size.

`gpu.OP.SIZE` is the least time that the op's bytes and operations take over the time it took, with the copy bandwidth
and the bf16 product measured in the same run; `gpu.OP.SIZE.over_PEER` the time of a torch function for the same work
over ours. `gpu.slice.*` are passes of four layers at real sizes, against the sum of their ops' bounds. The families
are modules beside this one with `cases()`. `python -m flashmesh.bench.gpu [FAMILY ...]` needs no service's
dependencies and prints times too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmesh.bench.registry import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAMILIES = (
    "rounding",
    "linear",
    "moe",
    "attention",
    "indexer",
    "rows",
    "mixing",
    "engram",
    "sampler",
    "slice",
)
num_steps = len(FAMILIES)


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Measures every family.

    Raises:
        KernelsUnavailable: no Hopper GPU, or no TileLang.
    """
    from flashmesh.bench.gpu.measure import ceilings_of_this_device, figures

    ceilings = ceilings_of_this_device()
    yield Result("gpu.copy", ceilings.copy / 1e12, "TB/s", 1)
    yield Result("gpu.bf16", ceilings.bf16 / 1e12, "TFLOP/s", 1)
    yield Result("gpu.fp8", ceilings.fp8 / 1e12, "TFLOP/s", 1)
    for family in FAMILIES:
        for figure in figures(family, ceilings):
            yield Result(f"gpu.{figure.name}", figure.bound / figure.took, "of ceiling", 1)
            if figure.peer_took:
                ratio = figure.peer_took / figure.took
                yield Result(f"gpu.{figure.name}.over_{figure.peer_name}", ratio, "x", 1)
        advance()
