"""The workers that this router may use, and what it has sent to each.

The registry's view says who is alive; load is counted here at dispatch and given back when the call ends, so that a
burst spreads before any worker has reported it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from typing import TYPE_CHECKING

from flashmesh.errors import Incompatible, UnknownModel, WorkerLost
from flashmesh.services.router.placement import (
    Choice,
    DecodeView,
    PrefillView,
    place_decode,
    place_prefill,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

    from flashmesh.registry import RegistryView, WorkerRecord
    from flashmesh.types import ModelInfo

log = logging.getLogger(__name__)


class Replicas:
    """Workers by role.

    Args:
        view: the registry's table.
        wait_s: how long `wait_model` waits for a worker to register.
    """

    def __init__(self, view: RegistryView, wait_s: float) -> None:
        self._view = view
        self._wait_s = wait_s
        self._dispatched: Counter[str] = Counter()
        self._dispatched_pages: Counter[str] = Counter()

    async def wait_model(self, name: str) -> ModelInfo:
        """Returns the served model, waiting a little for a mesh that is still starting.

        Raises:
            UnknownModel: another model is served.
            WorkerLost: no decode worker or no kvstore node is registered.
            Incompatible: decode workers disagree about the model's bytes.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                await self._view.wait_for(
                    lambda: bool(self._view.workers("decode") and self._view.workers("kvstore"))
                )
        models = [w.model for w in self._view.workers("decode") if w.model is not None]
        if not models:
            raise WorkerLost("no decode worker is registered")
        if name and all(model.name != name for model in models):
            served = ", ".join(sorted({model.name for model in models}))
            raise UnknownModel(f"model {name!r} is not served here; served: {served}")
        chosen = next(model for model in models if not name or model.name == name)
        if any(m.name == chosen.name and not same_blocks(m, chosen) for m in models):
            raise Incompatible(
                f"decode workers for {chosen.name} differ in weights, block layout or GEMM quantisation"
            )
        return chosen

    def models(self) -> list[ModelInfo]:
        """Returns the models that decode workers serve, by name."""
        models = {w.model.name: w.model for w in self._view.workers("decode") if w.model}
        return [models[name] for name in sorted(models)]

    async def wait_fresh(self, role: str, avoid: Set[str], wait_s: float) -> None:
        """Waits a little for a worker that has not failed: another one, or a failed one that started again."""

        def is_there() -> bool:
            return any(worker.epoch not in avoid for worker in self._view.workers(role))

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._view.wait_for(is_there)

    def nodes(self) -> list[WorkerRecord]:
        """Returns the live kvstore nodes.

        Raises:
            WorkerLost: there is none.
        """
        nodes = self._view.workers("kvstore")
        if not nodes:
            raise WorkerLost("no kvstore node is registered")
        return nodes

    def choose_prefill(self, model: ModelInfo, rows: int, avoid: Set[str]) -> WorkerRecord | None:
        """Places a prefill of so many rows; None where no worker does it: decode can, too.

        Args:
            model: that the worker must hold.
            rows: that it will run.
            avoid: epochs of workers not to take.
        """
        workers = {
            id: worker
            for id, worker in self._serving("prefill", model).items()
            if worker.epoch not in avoid
        }
        choice = place_prefill(
            (
                PrefillView(
                    id=worker.id,
                    reported_rows=worker.load.get("pending_rows", 0.0),
                    dispatched_rows=self._dispatched[worker.id],
                    rows_per_s=worker.load.get("rows_per_s", 0.0),
                )
                for worker in workers.values()
            ),
            rows,
        )
        return self._chosen(workers, choice)

    def choose_decode(
        self, model: ModelInfo, pages: int, sequences: int, avoid: Set[str], numerics: str
    ) -> WorkerRecord | None:
        """Places a request's sequences; None where no worker serves the model.

        Args:
            model: that the worker must hold.
            pages: that they hold when they start.
            sequences: how many.
            avoid: epochs of workers to take only if there is no other.
            numerics: numerics id to prefer, as only equal ones give equal bits; empty for any.
        """
        workers = self._serving("decode", model)
        choice = place_decode(
            (
                DecodeView(
                    id=worker.id,
                    avoid=worker.epoch in avoid
                    or bool(numerics and numerics_of(worker) != numerics),
                    kind=numerics_of(worker),
                    reported_sequences=worker.load.get("num_sequences", 0.0),
                    dispatched_sequences=self._dispatched[worker.id],
                    reported_pages=worker.load.get("used_pages", 0.0),
                    dispatched_pages=self._dispatched_pages[worker.id],
                    num_pages=worker.capacity.get("num_pages", math.inf),
                    step_base_s=worker.load.get("step_base_s", 0.0),
                    step_row_s=worker.load.get("step_row_s", 0.0),
                )
                for worker in workers.values()
            ),
            pages,
            sequences,
        )
        return self._chosen(workers, choice)

    def _serving(self, role: str, model: ModelInfo) -> dict[str, WorkerRecord]:
        return {
            worker.id: worker
            for worker in self._view.workers(role)
            if worker.model is not None and same_blocks(worker.model, model)
        }

    def _chosen(
        self, workers: dict[str, WorkerRecord], choice: Choice | None
    ) -> WorkerRecord | None:
        if choice is None:
            return None
        log.debug("placed", extra={"worker": choice.id, "terms": dict(choice.terms)})
        return workers[choice.id]

    @contextlib.contextmanager
    def dispatched(self, worker: WorkerRecord, load: int, pages: int = 0) -> Iterator[None]:
        """Counts load, rows or sequences, and pages against a worker until the block ends."""
        self._dispatched[worker.id] += load
        self._dispatched_pages[worker.id] += pages
        try:
            yield
        finally:
            for counter, amount in ((self._dispatched, load), (self._dispatched_pages, pages)):
                counter[worker.id] -= amount
                if not counter[worker.id]:
                    del counter[worker.id]


def same_blocks(one: ModelInfo, other: ModelInfo) -> bool:
    """Says whether two workers may share blocks."""
    return (one.fingerprint, one.layout_id, one.gemm_quantized) == (
        other.fingerprint,
        other.layout_id,
        other.gemm_quantized,
    )


def numerics_of(worker: WorkerRecord) -> str:
    """Returns what names a worker's arithmetic; empty for one without a model."""
    return worker.model.numerics_id if worker.model else ""
