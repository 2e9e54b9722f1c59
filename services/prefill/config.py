"""The `[prefill]` section."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashmesh.config import ServiceConfig, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(ServiceConfig):
    """Configuration of a prefill worker.

    Attributes:
        num_pages: pages of one block each, shared by the prompts in work.
        num_slots: most prompts with pages at once.
        chunk_tokens: most rows in a step.
        max_waiting: most prompts without pages; one more is refused.
        pipeline_depth: plans under way at once; 2 makes the next one while a step runs.
        fetch_timeout_s: longest wait for blocks that should be in the store.
    """

    num_pages: int = limits(1024, 1, 1 << 24)
    num_slots: int = limits(8, 1, 4096)
    chunk_tokens: int = limits(1024, 16, 1 << 16)
    max_waiting: int = limits(64, 1, 1 << 16)
    pipeline_depth: int = field(default=1, metadata={"choices": (1, 2)})
    fetch_timeout_s: float = limits(10.0, 0.1, 600)
