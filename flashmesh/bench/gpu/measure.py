"""Measures the cases of a family."""

from __future__ import annotations

import gc
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flashmesh.bench.gpu.case import Ceilings, measure_ceilings, seconds
from flashmesh.errors import KernelsUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Figure:
    """One op at one size.

    Attributes:
        name: "OP.SIZE".
        took: seconds of a call.
        bound: least seconds at the device's ceilings.
        num_bytes, num_flops: what the bound is made of; of a whole pass, 0.
        peer_name, peer_took: of a torch function for the same work; "" and 0 where there is none.
        note: what a pass's bound is made of.
    """

    name: str
    took: float
    bound: float
    num_bytes: int = 0
    num_flops: int = 0
    peer_name: str = ""
    peer_took: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        line = f"gpu.{self.name:<40} {self.bound / self.took:5.2f} {self.took * 1e6:10.1f} us"
        if self.num_bytes:
            line += f" {self.num_bytes / self.took / 1e12:6.2f} TB/s"
        if self.num_flops:
            line += f" {self.num_flops / self.took / 1e12:7.1f} TFLOP/s"
        if self.peer_took:
            line += f"  {self.peer_name} {self.peer_took * 1e6:.1f} us = {self.peer_took / self.took:.2f}x"
        return line + (f"  {self.note}" if self.note else "")


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
        yield from _slice(ceilings)
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


def _slice(ceilings: Ceilings) -> Iterator[Figure]:
    from flashmesh.bench.gpu.slice import figures as passes

    for figure in passes(ceilings):
        largest = sorted(figure.ops.items(), key=lambda item: -item[1])[:5]
        note = ", ".join(f"{op} {bound * 1e6:.0f}" for op, bound in largest)
        yield Figure(figure.name, figure.took, figure.bound, note=f"bounds: {note} us")
