"""The `[decode]` section."""

from __future__ import annotations

from dataclasses import dataclass

from flashmesh.config import ServiceConfig, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(ServiceConfig):
    """Configuration of a decode worker.

    Attributes:
        num_pages: pages of one block each, shared by the running sequences.
        num_slots: most running sequences.
        step_rows: most rows in a step: one for each running sequence, the rest for replays and small prefills.
        max_requests: most requests at once, those that still wait for blocks included; one more is refused.
        fetch_timeout_s: longest wait for a block.
        store_generated: put whole blocks of prompt tail and output into the store.
    """

    num_pages: int = limits(2048, 1, 1 << 24)
    num_slots: int = limits(32, 1, 4096)
    step_rows: int = limits(256, 16, 1 << 16)
    max_requests: int = limits(128, 1, 1 << 16)
    fetch_timeout_s: float = limits(60.0, 0.1, 600)
    store_generated: bool = True
