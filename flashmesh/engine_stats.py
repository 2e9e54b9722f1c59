"""What a worker's engine has free, on the metrics endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import prometheus_client

if TYPE_CHECKING:
    from collections.abc import Callable

PAGES = prometheus_client.Gauge("flashmesh_pages", "Pages of a block each.", ["state"])
SLOTS = prometheus_client.Gauge("flashmesh_slots", "Window slots.", ["state"])


class EngineStats(Protocol):
    """What an engine counts (`flashmesh.kernels.door.EngineStats`)."""

    @property
    def num_pages(self) -> int:
        """Pages in all."""

    @property
    def num_free_pages(self) -> int:
        """Pages that no session holds."""

    @property
    def num_slots(self) -> int:
        """Slots in all."""

    @property
    def num_free_slots(self) -> int:
        """Slots that no session holds."""


def export_stats(stats: Callable[[], EngineStats]) -> None:
    """Shows pages and slots, free and used, on the metrics endpoint; read when it is scraped."""
    PAGES.labels("free").set_function(lambda: stats().num_free_pages)
    PAGES.labels("used").set_function(lambda: stats().num_pages - stats().num_free_pages)
    SLOTS.labels("free").set_function(lambda: stats().num_free_slots)
    SLOTS.labels("used").set_function(lambda: stats().num_slots - stats().num_free_slots)
