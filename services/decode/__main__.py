"""Wiring of a decode worker: `python -m flashmesh.services.decode --config FILE`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from flashmesh import config
from flashmesh.config import MeshConfig, ModelSection
from flashmesh.engine_stats import export_stats
from flashmesh.errors import ConfigError
from flashmesh.kernels.load import load_vocabulary, open_engine
from flashmesh.kv_client import KvClient
from flashmesh.lifecycle import Running, background, run, service_main
from flashmesh.membership import new_record, registered
from flashmesh.rpc import Channels
from flashmesh.scheduling import Limits
from flashmesh.services.decode.config import DecodeConfig
from flashmesh.services.decode.grammars import GrammarLimits, Grammars
from flashmesh.services.decode.publish import Publisher
from flashmesh.services.decode.service import DecodeServicer
from flashmesh.stepping import StepLoop
from flashmesh.v1 import decode_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


def main(path: Path | None) -> None:
    """Runs a decode worker until it is told to stop."""
    sections = config.load(
        path, {"mesh": MeshConfig, "model": ModelSection, "decode": DecodeConfig}
    )
    mesh, model, decode = sections["mesh"], sections["model"], sections["decode"]
    if decode.step_rows < decode.num_slots:
        raise ConfigError(
            f"decode.step_rows = {decode.step_rows}: at least decode.num_slots = {decode.num_slots}, "
            "or running streams would starve"
        )

    @contextlib.asynccontextmanager
    async def start(running: Running) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        engine = open_engine(
            model, "decode", num_pages=decode.num_pages, num_slots=decode.num_slots
        )
        export_stats(engine.stats)
        limits = Limits(
            num_pages=decode.num_pages,
            num_slots=decode.num_slots,
            max_rows=decode.step_rows,
            max_waiting=decode.max_requests,
            max_step_s=decode.max_step_ms / 1000,
        )
        loop = StepLoop(
            engine.step,
            limits,
            depth=decode.pipeline_depth,
            scheduled=decode.scheduled_verification,
        )
        publisher = Publisher()
        channels = Channels(mesh.secret(), mesh.tls())
        grammars = Grammars(
            lambda: load_vocabulary(model, engine.info),
            GrammarLimits(
                num_processes=decode.grammar_processes,
                timeout_s=decode.grammar_timeout_s,
                memory_bytes=decode.grammar_memory_mb << 20,
            ),
        )
        servicer = DecodeServicer(engine, loop, KvClient(channels), publisher, grammars, decode)
        decode_pb2_grpc.add_DecodeServicer_to_server(servicer, running.server)
        running.service_names.append("flashmesh.v1.Decode")

        record = new_record(
            "decode",
            decode,
            running,
            model=engine.info,
            capacity={
                "num_slots": decode.num_slots,
                "num_pages": decode.num_pages,
                "max_requests": decode.max_requests,
            },
        )
        async with (
            contextlib.aclosing(channels),
            background(loop.run(), publisher.run(), grammars.run()),
            registered(
                mesh,
                record,
                running,
                lambda: {
                    "num_sequences": servicer.num_requests,
                    "pending_rows": loop.num_pending_rows,
                    "used_pages": loop.num_used_pages,
                    "step_base_s": loop.step_line[0],
                    "step_row_s": loop.step_line[1],
                },
            ) as leave,
        ):

            async def drain() -> None:
                await leave()
                loop.hand_over(mesh.drain_grace_s)

            yield drain
            await publisher.flush()

    run("decode", mesh, decode, start)


if __name__ == "__main__":
    service_main(main)
