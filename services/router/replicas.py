"""The workers that this router may use, and what it has sent to each.

The registry's view says who is alive; load is counted here at dispatch and given back when the call ends, so that a
burst spreads before any worker has reported it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from flashmesh.errors import Incompatible, InvalidRequest, WorkerLost
from flashmesh.services.router.placement import ReplicaView, place

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

    from flashmesh.registry import RegistryView, WorkerRecord
    from flashmesh.types import ModelInfo

_LOAD_KEY = {"prefill": "pending_rows", "decode": "num_sequences"}


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

    async def wait_model(self, name: str) -> ModelInfo:
        """Returns the served model, waiting a little for a mesh that is still starting.

        Raises:
            InvalidRequest: another model is served.
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
            raise InvalidRequest(f"model {name!r} is not served here; served: {served}")
        chosen = next(model for model in models if not name or model.name == name)
        if any(m.name == chosen.name and not same_blocks(m, chosen) for m in models):
            raise Incompatible(
                f"decode workers for {chosen.name} differ in weights, block layout or GEMM quantisation"
            )
        return chosen

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

    def choose(
        self, role: str, model: ModelInfo, added: float, avoid: Set[str], numerics: str = ""
    ) -> WorkerRecord | None:
        """Places a request.

        Args:
            role: "prefill" or "decode".
            model: that the worker must hold.
            added: load that the request brings.
            avoid: epochs of workers to take only if there is no other.
            numerics: numerics id to prefer, as only equal ones give equal bits; empty for any.

        Returns:
            None where no worker of the role serves the model.
        """
        workers = {
            worker.id: worker
            for worker in self._view.workers(role)
            if worker.model is not None and same_blocks(worker.model, model)
        }
        choice = place(
            (
                ReplicaView(
                    worker.id,
                    float(worker.load.get(_LOAD_KEY[role], 0)),
                    self._dispatched[worker.id],
                    worker.epoch in avoid or bool(numerics and numerics_of(worker) != numerics),
                )
                for worker in workers.values()
            ),
            added,
        )
        return workers[choice.id] if choice else None

    @contextlib.contextmanager
    def dispatched(self, worker: WorkerRecord, load: int) -> Iterator[None]:
        """Counts load against a worker until the block ends."""
        self._dispatched[worker.id] += load
        try:
            yield
        finally:
            self._dispatched[worker.id] -= load
            if not self._dispatched[worker.id]:
                del self._dispatched[worker.id]


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
