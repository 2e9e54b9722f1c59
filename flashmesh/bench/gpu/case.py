"""What a GPU benchmark case is, how its time is taken, and what comes of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashmesh.bench.gpu.bounds import Work

CALLS = 10
REPLAYS = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one size.

    Attributes:
        name: "OP.SIZE".
        run: launches the op once. Gets the number of the call, so that it can take turns between sets of inputs which
            together exceed the L2 cache.
        num_bytes: fewest bytes that must move through device memory: every input once, every output once.
        num_flops: floating-point operations that tensor cores must do.
        peer: the same work through torch, or None.
        peer_name: of the torch function.
    """

    name: str
    run: Callable[[int], object]
    num_bytes: int
    num_flops: int = 0
    peer: Callable[[int], object] | None = None
    peer_name: str = ""


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


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device attained in this run: bytes a second copied, operations a second in bf16 and FP8 products."""

    copy: float
    bf16: float
    fp8: float

    def bound(self, work: Case | Work) -> float:
        """Seconds that the work takes at least, with bf16 products."""
        return max(work.num_bytes / self.copy, work.num_flops / self.bf16)


def seconds(run: Callable[[int], object], calls: int = CALLS) -> float:
    """Returns the median time of one call, in a CUDA graph of several."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in range(2):
            run(call)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call)
    return statistics.median(timed(graph.replay) for _ in range(REPLAYS)) / calls


def timed(run: Callable[[], object]) -> float:
    """Returns the seconds that the device takes over what `run` launches."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure_ceilings() -> Ceilings:
    """Measures copy bandwidth (bytes read plus written) and 8192^3 products on random data."""
    return Ceilings(_copied(), *_multiplied(8192))


def _copied() -> float:
    """Returns bytes read and written a second, of the better of a middling and a large copy."""
    return max(_copy_rate(1 << 26), _copy_rate(1 << 30))


def _copy_rate(num_words: int) -> float:
    source = torch.randint(0, 1 << 30, (num_words,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    times = [timed(lambda: target.copy_(source)) for _ in range(2 * REPLAYS)]
    return float(2 * source.nbytes / statistics.median(times))


def _multiplied(n: int) -> tuple[float, float]:
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16 = seconds(lambda _: a @ b.t())
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    rows, columns = torch.ones(n, 1, device="cuda"), torch.ones(1, n, device="cuda")
    fp8 = seconds(
        lambda _: torch._scaled_mm(
            a8,
            b8.t(),
            scale_a=rows,
            scale_b=columns,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    )
    return 2 * n**3 / bf16, 2 * n**3 / fp8
