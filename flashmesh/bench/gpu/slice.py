"""The real-dimension slice: prefill of 16k tokens, decode steps over a context of 64k.

A step stands against the sum of its ops' bounds. Its time is that of the recorded step, with embedding, the output
head and the small index arithmetic between ops, none of which is in the bound but the head.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import TYPE_CHECKING

import torch

from flashmesh.bench.gpu.bounds import Work, watched
from flashmesh.bench.gpu.case import Figure, timed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashmesh.bench.gpu.case import Ceilings
    from flashmesh.kernels.device.runner import DeviceRunner, DeviceSequence

PROMPT = 16384
CONTEXT = 65536 - 256
BATCHES = (1, 8, 64)
STEPS = 20


def figures(ceilings: Ceilings) -> Iterator[Figure]:
    """Builds the slice and measures it."""
    from flashmesh.bench.gpu.slice_model import slice_runner

    # Room for a few tokens after the context; all sequences have pages of their own.
    runner = slice_runner(max_tokens=65536, num_slots=max(BATCHES), num_tokens=CONTEXT + 256)
    yield from _prefill(runner, ceilings)
    for batch in BATCHES:
        yield _decode(runner, ceilings, batch)


def _prefill(runner: DeviceRunner, ceilings: Ceilings) -> Iterator[Figure]:
    from flashmesh.kernels.device.runner import REPLAY_ROWS

    tokens = torch.randint(3, 129000, (PROMPT,)).tolist()
    for name, rows in (("slice.prefill_16k", REPLAY_ROWS), ("slice.prefill_16k_all_rows", PROMPT)):
        times = [_prefill_seconds(runner, tokens, rows) for _ in range(4)]
        with counted(runner) as log:
            _prefill_seconds(runner, tokens, rows)
        yield _figure(name, times[1:], log, ceilings)


def _prefill_seconds(runner: DeviceRunner, tokens: list[int], decoder_rows: int) -> float:
    state = runner.open(len(tokens))
    torch.cuda.synchronize()
    took = timed(lambda: runner.prefill(state, tokens, decoder_rows=decoder_rows))
    runner.close(state)
    return took


def _decode(runner: DeviceRunner, ceilings: Ceilings, batch: int) -> Figure:
    """Times recorded steps of sequences whose caches were filled at random: what rows say does not change the work."""
    states = [runner.open(CONTEXT + 256) for _ in range(batch)]
    for state in states:
        fill(runner, state)
    step = [(state, [7 + place]) for place, state in enumerate(states)]
    runner.decode(step)
    recorded = next(reversed(runner._recorded.values()))
    times = [timed(recorded.graph.replay) for _ in range(STEPS)]
    with counted(runner) as log, torch.inference_mode():
        runner._step(recorded.rows)
    for state in states:
        runner.close(state)
    return _figure(f"slice.decode_64k.b{batch}", times, log, ceilings)


@contextlib.contextmanager
def counted(runner: DeviceRunner) -> Iterator[list[Work]]:
    """Yields a list that gets the work of every op that the runner's model calls meanwhile."""
    ops = runner.model.ops
    log: list[Work] = []
    runner.model.ops = watched(ops, log)
    try:
        yield log
    finally:
        runner.model.ops = ops


def fill(runner: DeviceRunner, state: DeviceSequence) -> None:
    """Writes random rows of a whole context into a sequence's caches."""
    caches = runner.model.caches
    state.tokens = torch.randint(3, 129000, (CONTEXT,)).tolist()
    pages = state.page_table.to(caches.device, torch.int64)
    ring = caches.ring_rows(state.slot, torch.arange(caches.ring, device=pages.device))
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


def _figure(name: str, times: list[float], log: list[Work], ceilings: Ceilings) -> Figure:
    bounds: dict[str, float] = {}
    for work in log:
        bounds[work.op] = bounds.get(work.op, 0.0) + ceilings.bound(work)
    largest = sorted(bounds.items(), key=lambda item: -item[1])[:5]
    note = ", ".join(f"{op} {bound * 1e6:.0f}" for op, bound in largest)
    return Figure(name, statistics.median(times), sum(bounds.values()), note=f"bounds: {note} us")
