"""How fast a router decides: where the blocks of a long prompt live, and which of a thousand workers take it.

The router's own pure functions on records that went through a real registry; nothing is sent. A decision is
the chain of block hashes, the places of its runs, one prefill and one decode worker, each counted as
dispatched before the next prompt is looked at.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from typing import TYPE_CHECKING

from flashmesh.bench.registry import Result, p50
from flashmesh.bench.target import REPLAY_TOKENS
from flashmesh.redis_client import connect
from flashmesh.registry import Registry, RegistryView, WorkerRecord
from flashmesh.replay import plan_replay
from flashmesh.types import BLOCK_TOKENS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashmesh.types import ModelInfo

MESH = "decisions"
WORKERS = {"prefill": 496, "decode": 496, "kvstore": 8}
PROMPT_TOKENS = 30_000
NUM_DECISIONS = 50
TTL_S = 300.0
MS_PER_S = 1000


async def measure(redis_url: str, advance: Callable[[], None]) -> list[Result]:
    """Registers the workers on a Redis that is up, under a mesh name of their own, and decides."""
    from flashmesh.kernels.simulated import SimulatedEngine
    from flashmesh.services.router.prefix import Call, Prefix
    from flashmesh.services.router.replicas import Replicas

    draw = random.Random(0)
    model = SimulatedEngine().info
    async with contextlib.aclosing(connect(redis_url)) as client:
        view = RegistryView(Registry(client, MESH))
        for record in records(draw, model):
            await Registry(client, MESH).heartbeat(record, TTL_S)
        await view.poll()
    replicas = Replicas(view, wait_s=0.0)
    plan = plan_replay(PROMPT_TOKENS, window=model.window, replay_tokens=REPLAY_TOKENS)
    hash_s, place_s = [], []
    with contextlib.ExitStack() as stack:
        for number in range(NUM_DECISIONS):
            prompt = [draw.randrange(model.vocab_size) for _ in range(PROMPT_TOKENS)]
            call = Call(request_id=str(number), model=model, prompt=prompt, params=SamplingParams())
            started = time.perf_counter()
            Prefix(call, plan.num_stored_blocks, replicas.nodes())
            hashed = time.perf_counter()
            pages = PROMPT_TOKENS // BLOCK_TOKENS + 1
            prefill = replicas.choose_prefill(model, plan.start, set())
            decode = replicas.choose_decode(model, pages, 1, set(), "")
            place_s.append(time.perf_counter() - hashed)
            hash_s.append(hashed - started)
            assert prefill is not None
            assert decode is not None
            stack.enter_context(replicas.dispatched(prefill, plan.start))
            stack.enter_context(replicas.dispatched(decode, 1, pages))
            advance()
    rates = [1 / (one + other) for one, other in zip(hash_s, place_s, strict=True)]
    return [
        p50("router.decisions_per_s", "1/s", rates),
        p50("router.decision_hash_ms.p50", "ms", [s * MS_PER_S for s in hash_s]),
        p50("router.decision_place_ms.p50", "ms", [s * MS_PER_S for s in place_s]),
    ]


def records(draw: random.Random, model: ModelInfo) -> list[WorkerRecord]:
    """Makes workers that are busy to different degrees."""
    return [
        WorkerRecord(
            id=f"{role}-{number}",
            epoch=secrets.token_hex(16),
            role=role,
            address="127.0.0.1:1",
            model=None if role == "kvstore" else model,
            capacity={"num_pages": 1 << 20},
            load={
                "pending_rows": draw.randrange(100_000),
                "rows_per_s": draw.uniform(50_000, 60_000),
                "num_sequences": draw.randrange(64),
                "used_pages": draw.randrange(1 << 14),
                "step_base_s": draw.uniform(0.01, 0.02),
                "step_row_s": draw.uniform(0.0001, 0.0002),
            },
        )
        for role, count in WORKERS.items()
        for number in range(count)
    ]
