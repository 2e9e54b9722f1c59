"""Wiring of a prefill worker: `python -m flashmesh.services.prefill --config FILE`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from flashmesh import config
from flashmesh.config import MeshConfig, ModelSection
from flashmesh.engine_stats import export_stats
from flashmesh.kernels.load import open_engine
from flashmesh.kv_client import KvClient
from flashmesh.lifecycle import Running, background, run, service_main
from flashmesh.membership import new_record, registered
from flashmesh.rpc import Channels
from flashmesh.scheduling import Limits
from flashmesh.services.prefill.config import PrefillConfig
from flashmesh.services.prefill.service import PrefillServicer
from flashmesh.stepping import StepLoop
from flashmesh.v1 import prefill_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


def main(path: Path | None) -> None:
    """Runs a prefill worker until it is told to stop."""
    sections = config.load(
        path, {"mesh": MeshConfig, "model": ModelSection, "prefill": PrefillConfig}
    )
    mesh, model, prefill = sections["mesh"], sections["model"], sections["prefill"]

    @contextlib.asynccontextmanager
    async def start(running: Running) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        engine = open_engine(
            model, "prefill", num_pages=prefill.num_pages, num_slots=prefill.num_slots
        )
        export_stats(engine.stats)
        limits = Limits(
            num_pages=prefill.num_pages,
            num_slots=prefill.num_slots,
            max_rows=prefill.chunk_tokens,
            max_waiting=prefill.max_waiting,
        )
        loop = StepLoop(engine.step, limits, depth=prefill.pipeline_depth)
        channels = Channels(mesh.secret(), mesh.tls())
        servicer = PrefillServicer(engine, loop, KvClient(channels), prefill)
        prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, running.server)
        running.service_names.append("flashmesh.v1.Prefill")

        record = new_record("prefill", prefill, running, model=engine.info)
        async with (
            contextlib.aclosing(channels),
            background(loop.run()),
            registered(
                mesh,
                record,
                running,
                lambda: {
                    "pending_rows": loop.num_pending_rows,
                    "num_sequences": loop.num_running + loop.num_waiting,
                    "rows_per_s": loop.rows_per_s(prefill.chunk_tokens),
                },
            ) as leave,
        ):

            async def drain() -> None:
                await leave()
                loop.hand_over(mesh.drain_grace_s)

            yield drain

    run("prefill", mesh, prefill, start)


if __name__ == "__main__":
    service_main(main)
