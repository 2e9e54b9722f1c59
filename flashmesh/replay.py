"""The replay rule: which rows of a prompt are stored, replayed or computed, from the prompt's length alone.

Prefill after a hit, decode after a prefill and decode after a failover are one operation: a short suffix runs again
from an empty window over stored global rows. The numbers never depend on hits, on who prefilled, or on tokens
already produced, so every worker that serves the same prompt runs the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmesh.errors import InvalidRequest
from flashmesh.types import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Where the parts of one prompt begin.

    Attributes:
        num_prompt_tokens: L.
        start: the store supplies the global rows of [0, start); all layers run from here on.
        replay_start: [replay_start, start) runs through the encoder half again, writing no global rows.
    """

    num_prompt_tokens: int
    start: int
    replay_start: int

    @property
    def num_stored_blocks(self) -> int:
        """Blocks that decode takes from the store; none when it computes the whole prompt itself."""
        return self.start // BLOCK_TOKENS if self.replay_start else 0

    @property
    def global_start(self) -> int:
        """First position whose global rows decode writes itself."""
        return self.start if self.replay_start else 0


def plan_replay(num_prompt_tokens: int, *, window: int, replay_tokens: int) -> ReplayPlan:
    """Returns the plan for a prompt.

    Args:
        num_prompt_tokens: prompt length L, at least 1.
        window: the model's sliding window in tokens.
        replay_tokens: rows that all layers run at least, where the prompt has them.

    Raises:
        InvalidRequest: the prompt is empty, or no row would be left to draw the first token from.
    """
    if num_prompt_tokens < 1:
        raise InvalidRequest("the prompt is empty")
    if replay_tokens < 1:
        raise InvalidRequest(f"replay_tokens must be at least 1, not {replay_tokens}")
    start = max(0, (num_prompt_tokens - replay_tokens) // BLOCK_TOKENS * BLOCK_TOKENS)
    return ReplayPlan(num_prompt_tokens, start, max(0, start - window))
