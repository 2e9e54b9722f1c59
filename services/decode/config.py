"""The `[decode]` section."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashmesh.config import ServiceConfig, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(ServiceConfig):
    """Configuration of a decode worker.

    Attributes:
        num_pages: pages of one block each, shared by the running sequences.
        num_slots: most running sequences.
        step_rows: most rows in a step: one for each running sequence, the rest for replays and small prefills.
        max_step_ms: while streams run, rows of replays and small prefills are cut so that a step is predicted to
            end within this; 16 of them run whatever it takes.
        num_drafts: tokens proposed in each step and verified in the next; 0 turns speculation off.
        scheduled_verification: propose and verify drafts where that is expected to pay; otherwise always, and all that
            fit in a step.
        pipeline_depth: plans under way at once; 2 makes the next one while a step runs.
        grammar_processes: grammars compiled at once, each in a process of its own.
        grammar_timeout_s: longest compilation of one grammar.
        grammar_memory_mb: most memory of one compilation.
        max_requests: most requests at once, those that still wait for blocks included; one more is refused.
        fetch_timeout_s: longest wait for a block.
        store_generated: put whole blocks of prompt tail and output into the store.
    """

    num_pages: int = limits(2048, 1, 1 << 24)
    num_slots: int = limits(32, 1, 4096)
    step_rows: int = limits(256, 16, 1 << 16)
    max_step_ms: float = limits(250.0, 1, 60_000)
    num_drafts: int = limits(5, 0, 5)
    scheduled_verification: bool = True
    pipeline_depth: int = field(default=1, metadata={"choices": (1, 2)})
    grammar_processes: int = limits(1, 1, 64)
    grammar_timeout_s: float = limits(10.0, 0.1, 600)
    grammar_memory_mb: int = limits(1024, 16, 1 << 20)
    max_requests: int = limits(128, 1, 1 << 16)
    fetch_timeout_s: float = limits(60.0, 0.1, 600)
    store_generated: bool = True
