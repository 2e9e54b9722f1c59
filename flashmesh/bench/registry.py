"""What a benchmark is, and which there are.

A benchmark is a generator: it calls `advance()` after each of its `num_steps` steps and yields
results as they are known. It bounds its own time, compares two things within one run, and asserts
nothing: figures are for reading.
"""

from __future__ import annotations

import importlib
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flashmesh.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MODULES = {
    "mesh": "flashmesh.bench.mesh",
    "kv": "flashmesh.bench.kv",
    "index": "flashmesh.bench.index",
    "trace-cache": "flashmesh.bench.trace_cache",
    "model": "flashmesh.bench.model",
    "engine": "flashmesh.bench.engine",
    "router": "flashmesh.bench.router",
    "trace": "flashmesh.bench.trace",
    "agents": "flashmesh.bench.agents",
    "demo": "flashmesh.bench.demo",
    "gpu": "flashmesh.bench.gpu",
}
"""Name to module; a module has `num_steps: int` and `run(advance) -> Iterator[Result]`."""

SUITES = {
    "all": [name for name in MODULES if name != "gpu"],  # that one needs a Hopper GPU
    "kv": ["kv", "index", "trace-cache"],
}
"""Names that stand for several benchmarks."""


@dataclass(frozen=True, slots=True)
class Result:
    """One figure.

    Attributes:
        metric: dotted name, benchmark first.
        value: the figure.
        unit: "ms", "x" (a ratio), "MB/s".
        n: how many measurements it stands for.
    """

    metric: str
    value: float
    unit: str
    n: int


class Benchmark(Protocol):
    """A module of `MODULES`."""

    num_steps: int

    def run(self, advance: Callable[[], None]) -> Iterator[Result]:
        """Measures."""


def select(name: str) -> dict[str, Benchmark]:
    """Imports the named benchmark, or those of a suite.

    Raises:
        InvalidRequest: there is none of that name.
    """
    names = SUITES.get(name, [name])
    if names[0] not in MODULES:
        raise InvalidRequest(f"no benchmark {name!r}; there are: all, {', '.join(MODULES)}")
    return {name: importlib.import_module(MODULES[name]) for name in names}


def p50(metric: str, unit: str, values: Sequence[float]) -> Result:
    """The median as a result."""
    return Result(metric, statistics.median(values), unit, len(values))
