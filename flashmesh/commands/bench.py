"""`flashmesh bench NAME|all`: figures on a terminal and as JSON lines.

`trace` and `agents` load a mesh, one of their own or one that is up, and take options; Ctrl-C ends them
with the figures of what had been answered.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashmesh.bench.registry import Benchmark

PACE = ("speed", "limit", "max_in_flight")
OBJECTIVES = ("ttft_ms", "itl_ms")
OWN_MESH = ("num_prefill", "num_decode", "num_kvstore")
WHERE = ("address", "config", *OWN_MESH)
TAKEN = {"trace": (*PACE, *OBJECTIVES, *WHERE), "agents": (*OBJECTIVES, *WHERE)}
"""Options by benchmark."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("name", metavar="NAME", help="a benchmark, or all")
    parser.add_argument("file", metavar="FILE", nargs="?", help="of `trace`: a file, or its name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a line")
    loads = parser.add_argument_group(
        "options of `trace` and `agents`", argument_default=argparse.SUPPRESS
    )
    add = loads.add_argument
    add("--address", metavar="HOST:PORT", help="a router that is up; without, a mesh is started")
    add("--config", type=Path, metavar="FILE", help="of the mesh; without, workers are simulated")
    for service in ("prefill", "decode", "kvstore"):
        add(f"--{service}", type=int, metavar="N", dest=f"num_{service}", help="processes to start")
    add("--ttft-ms", type=float, metavar="MS", help="a good answer's most time to the first token")
    add("--itl-ms", type=float, metavar="MS", help="a good answer's most mean time between tokens")
    add("--speed", type=float, metavar="X", help="of `trace`: times as fast as it was recorded")
    add("--limit", type=int, metavar="N", help="of `trace`: send the first N requests")
    add("--max-in-flight", type=int, metavar="N", help="of `trace`: most requests at once")


def run(args: argparse.Namespace) -> int:
    """Measures and reports."""
    from flashmesh.bench.report import report

    given = {name: value for name, value in vars(args).items() if name in TAKEN["trace"]}
    report(chosen(args.name, args.file, given), args.json)
    return 0


def chosen(name: str, file: str | None, given: Mapping[str, Any]) -> Mapping[str, Benchmark]:
    """Makes the benchmark that was asked for.

    Args:
        name: of a benchmark or a suite.
        file: of a trace, or None.
        given: options by their names in `TAKEN`.

    Raises:
        InvalidRequest: there is none of that name, or it does not take what was given.
    """
    from flashmesh.bench.registry import select
    from flashmesh.errors import InvalidRequest

    refused = [option for option in given if option not in TAKEN.get(name, ())]
    if refused or (file is not None and name != "trace"):
        what = " or ".join(refused) or "a file"
        raise InvalidRequest(f"benchmark {name!r} does not take {what}")
    if "address" in given and any(option in given for option in OWN_MESH):
        raise InvalidRequest(
            "numbers of processes are for a mesh that is started, not for --address"
        )
    if file is None and not given:
        return select(name)

    from flashmesh.bench import agents, trace
    from flashmesh.bench.load import Objectives
    from flashmesh.bench.target import Where

    pace, objectives, where = (
        {option: given[option] for option in options if option in given}
        for options in (PACE, OBJECTIVES, WHERE)
    )
    if name == "agents":
        return {name: agents.Agents(agents.Workload(), Where(**where), Objectives(**objectives))}
    if file is None:
        raise InvalidRequest(
            f"`trace` with options needs a FILE, or one of {', '.join(trace.NAMES)}"
        )
    replayed = trace.of_file(
        Path(file), trace.Pace(**pace), Where(**where), Objectives(**objectives)
    )
    return {name: replayed}
