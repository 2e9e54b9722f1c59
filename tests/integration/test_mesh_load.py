"""Many requests with one prefix: load spreads all the same, and what is stored is found."""

import asyncio
import time

from support.mesh import start_mesh
from support.prompts import random_prompt

from flashmesh.bench.load import Client, cached_tokens, prompt_tokens
from flashmesh.bench.target import Target
from flashmesh.types import BLOCK_TOKENS

SHARED_BLOCKS = 100
NUM_SHARING = 76
NUM_OTHERS = 4
TAIL_TOKENS = 200
ANSWER_TOKENS = 32


async def burst(mesh, prompts):
    """Sends all at once; returns the outcomes."""
    async with Client(Target(mesh.router_address)) as client:
        asks = [client.ask(prompt, ANSWER_TOKENS, time.perf_counter()) for prompt in prompts]
        return await asyncio.gather(*asks)


def decoded(mesh):
    """Requests that each decode worker has answered."""
    return {
        name: mesh.metrics(name)["flashmesh_decode_tokens_total"] / ANSWER_TOKENS
        for name in mesh.names("decode")
    }


async def test_requests_that_share_blocks_of_one_decode_worker_spread_over_all(tmp_path):
    settings = {
        "model": {"sim_step_ms": 50.0},
        "decode": {"num_pages": 4096, "num_drafts": 0},
    }
    with start_mesh(tmp_path, num_decode=4, overrides=settings) as mesh:
        shared = random_prompt(SHARED_BLOCKS * BLOCK_TOKENS, seed=1)
        first = await burst(mesh, [shared + random_prompt(TAIL_TOKENS, seed=2)])
        before = decoded(mesh)
        assert sorted(before.values()) == [0, 0, 0, 1]  # the one that has the blocks
        sharing = [
            shared + random_prompt(TAIL_TOKENS, seed=100 + number) for number in range(NUM_SHARING)
        ]
        others = [random_prompt(len(sharing[0]), seed=number) for number in range(NUM_OTHERS)]
        outcomes = await burst(mesh, [*sharing, *others])
        assert [outcome.status for outcome in (*first, *outcomes)] == ["OK"] * (1 + len(outcomes))
        assigned = [count - before[name] for name, count in decoded(mesh).items()]
        assert sum(assigned) == NUM_SHARING + NUM_OTHERS
        assert max(assigned) <= 1.5 * min(assigned), assigned
        # No placement finds more than what an earlier prompt had, one without regard to who has it included.
        most = NUM_SHARING * SHARED_BLOCKS * BLOCK_TOKENS / prompt_tokens(outcomes)
        assert cached_tokens(outcomes) / prompt_tokens(outcomes) >= 0.9 * most
