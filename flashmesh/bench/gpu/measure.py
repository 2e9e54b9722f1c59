"""Measures the cases of a family."""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

import torch

from flashmesh.bench.gpu.case import Ceilings, Figure, measure_ceilings, seconds
from flashmesh.errors import KernelsUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


def ceilings_of_this_device() -> Ceilings:
    """Measures the ceilings.

    Raises:
        KernelsUnavailable: this is no Hopper GPU.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise KernelsUnavailable("the kernels run on Hopper (H100, H200), and there is none here")
    return measure_ceilings()


def figures(family: str, ceilings: Ceilings) -> Iterator[Figure]:
    """Yields a family's figures; frees each case's memory before the next."""
    if family == "slice":
        from flashmesh.bench.gpu.slice import figures as passes

        yield from passes(ceilings)
        return
    module = importlib.import_module(f"flashmesh.bench.gpu.{family}")
    for case in module.cases():
        took = seconds(case.run)
        peer = seconds(case.peer) if case.peer else 0.0
        yield Figure(
            case.name,
            took,
            ceilings.bound(case),
            case.num_bytes,
            case.num_flops,
            case.peer_name,
            peer,
        )
        del case
        gc.collect()
        torch.cuda.empty_cache()
