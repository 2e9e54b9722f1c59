"""The real-dimension slice: prefill of 16k tokens, decode steps over a context of 64k.

A step stands against the sum of its ops' bounds. Its time is that of the recorded step, with embedding, the output
head and the small index arithmetic between ops, none of which is in the bound but the head.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flashmesh.bench.gpu.bounds import Work, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashmesh.bench.gpu.case import Ceilings
    from flashmesh.kernels.device.runner import DeviceRunner, DeviceSequence

PROMPT = 16384
CONTEXT = 65536 - 256
BATCHES = (1, 8, 64)
STEPS = 20


@dataclass(frozen=True, slots=True)
class SliceFigure:
    """A pass of the slice: seconds it took, seconds its ops take at the ceilings, and the ops' shares."""

    name: str
    took: float
    bound: float
    ops: dict[str, float]


def figures(ceilings: Ceilings) -> Iterator[SliceFigure]:
    """Builds the slice and measures it."""
    from flashmesh.bench.gpu.slice_model import slice_runner

    # Room for a few tokens after the context; all sequences have pages of their own.
    runner = slice_runner(max_tokens=65536, num_slots=max(BATCHES), num_tokens=CONTEXT + 256)
    yield from _prefill(runner, ceilings)
    for batch in BATCHES:
        yield _decode(runner, ceilings, batch)


def _prefill(runner: DeviceRunner, ceilings: Ceilings) -> Iterator[SliceFigure]:
    tokens = torch.randint(3, 129000, (PROMPT,)).tolist()
    for name, rows in (("slice.prefill_16k", 140), ("slice.prefill_16k_all_rows", PROMPT)):
        times = [_prefill_seconds(runner, tokens, rows) for _ in range(4)]
        log: list[Work] = []
        ops = runner.model.ops
        runner.model.ops = watched(ops, log)
        _prefill_seconds(runner, tokens, rows)
        runner.model.ops = ops
        bounds = _bounds(log, ceilings)
        yield SliceFigure(name, statistics.median(times[1:]), sum(bounds.values()), bounds)


def _prefill_seconds(runner: DeviceRunner, tokens: list[int], decoder_rows: int) -> float:
    state = runner.open(len(tokens))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    runner.prefill(state, tokens, decoder_rows=decoder_rows)
    end.record()
    end.synchronize()
    runner.close(state)
    return float(begin.elapsed_time(end)) / 1e3


def _decode(runner: DeviceRunner, ceilings: Ceilings, batch: int) -> SliceFigure:
    """Times recorded steps of sequences whose caches were filled at random: what rows say does not change the work."""
    states = [runner.open(CONTEXT + 256) for _ in range(batch)]
    for state in states:
        fill(runner, state)
    step = [(state, [7 + place]) for place, state in enumerate(states)]
    runner.decode(step)
    recorded = next(reversed(runner._recorded.values()))
    assert recorded.graph is not None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(STEPS):
        begin.record()
        recorded.graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    log: list[Work] = []
    ops = runner.model.ops
    runner.model.ops = watched(ops, log)
    with torch.inference_mode():
        runner._step(recorded.rows)
    runner.model.ops = ops
    for state in states:
        runner.close(state)
    bounds = _bounds(log, ceilings)
    return SliceFigure(
        f"slice.decode_64k.b{batch}", statistics.median(times), sum(bounds.values()), bounds
    )


def fill(runner: DeviceRunner, state: DeviceSequence) -> None:
    """Writes random rows of a whole context into a sequence's caches."""
    caches = runner.model.caches
    state.tokens = torch.randint(3, 129000, (CONTEXT,)).tolist()
    pages = torch.tensor(state.pages, device=caches.window[0].device)
    ring = torch.arange(caches.ring, device=pages.device) + state.slot * caches.ring
    for window in caches.window:
        window[ring] = _random_rows(window[ring], 1 / 33)
    for source, num_rows in caches.rows.items():
        rows = (pages.unsqueeze(1) * num_rows + torch.arange(num_rows, device=pages.device)).view(
            -1
        )
        caches.kv[source][rows] = _random_rows(caches.kv[source][rows], 1 / 9)
        keys = caches.ik[source]
        keys[pages] = _random_rows(keys[pages], 1 / 17)


def _random_rows(like: torch.Tensor, scale_share: float) -> torch.Tensor:
    """Random codes, and scales of about one; all bytes are valid in every format here."""
    rows = torch.randint_like(like, 0, 256) & 0x77  # no e4m3 NaN
    width = like.shape[1]
    scales = round(width * scale_share)
    one = {33: 120, 9: 0x38, 17: 124}[round(1 / scale_share)]
    rows[:, width - scales :] = one + (rows[:, width - scales :] & 1)
    return rows


def _bounds(log: list[Work], ceilings: Ceilings) -> dict[str, float]:
    total: dict[str, float] = {}
    for op, num_bytes, num_flops in log:
        bound = max(num_bytes / ceilings.copy, num_flops / ceilings.bf16)
        total[op] = total.get(op, 0.0) + bound
    return total
