"""Runs benchmarks under a progress bar, then prints a table and, where asked, JSON lines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from flashmesh.bench.registry import Benchmark, Result


def report(benchmarks: Mapping[str, Benchmark], json_path: Path | None) -> None:
    """Measures, shows and writes; what an error or Ctrl-C leaves unmeasured does not cost the rest."""
    results: list[Result] = []
    try:
        results.extend(measure(benchmarks))
    finally:
        if results:
            _report(results, json_path)


def _report(results: Sequence[Result], json_path: Path | None) -> None:
    where = {"commit": commit(), "machine": machine()}
    if json_path is not None:
        lines = [
            json.dumps({"metric": r.metric, "value": r.value, "unit": r.unit, "n": r.n} | where)
            for r in results
        ]
        json_path.write_text("".join(line + "\n" for line in lines))
    console = Console()
    console.print(table(results))
    console.print(f"commit {where['commit']}, {where['machine']}", soft_wrap=True)


def measure(benchmarks: Mapping[str, Benchmark]) -> Iterator[Result]:
    """Runs one benchmark after the other."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Drawn between measurements only: a drawing thread would take the interpreter from an engine
    # that is measured in this process.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        for name, benchmark in benchmarks.items():
            task = progress.add_task(name, total=benchmark.num_steps)
            yield from benchmark.run(partial(_advance, progress, task))


def _advance(progress: Progress, task: TaskID) -> None:
    progress.advance(task)
    progress.refresh()


def table(results: Iterable[Result]) -> Table:
    """Lays the results out for a terminal."""
    shown = Table("metric", "value", "unit", "n")
    shown.columns[1].justify = shown.columns[3].justify = "right"
    for result in results:
        shown.add_row(result.metric, f"{result.value:,.4g}", result.unit, str(result.n))
    return shown


def commit() -> str:
    """Names the commit that the code comes from; "-dirty" where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def machine() -> str:
    """Names processor, cores, system and Python."""
    return (
        f"{_processor()} x{os.cpu_count()}, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
