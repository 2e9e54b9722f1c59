"""Prompts and requests for tests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from flashmesh.client import RouterClient, prompt_request
from flashmesh.kernels.generate import generate_offline
from flashmesh.kernels.sampling import Drawn

if TYPE_CHECKING:
    from flashmesh.kernels.door import Engine
    from flashmesh.types import SamplingParams

VOCAB = 4096


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """`length` ordinary token ids."""
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(64, VOCAB) for _ in range(length)]


def offline_tokens(
    engine: Engine, prompt: list[int], params: SamplingParams, chunk_tokens: int = 1024
) -> list[int]:
    """The tokens that one process gives, and a check that it holds nothing afterwards."""
    items = list(generate_offline(engine, prompt, params, chunk_tokens=chunk_tokens))
    assert engine.stats().idle
    return [item.token for item in items if isinstance(item, Drawn)]


def mesh_answer(client: RouterClient, prompt: list[int], params: SamplingParams):
    """The tokens that the mesh gives, and its usage."""
    request = prompt_request(prompt, params, seed=params.seed)
    responses = list(client.generate(request, timeout_s=120))
    tokens = [token for response in responses for token in response.token_ids]
    return tokens, responses[-1].usage
