"""The mesh that a benchmark sends its load to: one of its own on this machine, or one that is up."""

from __future__ import annotations

import contextlib
import tempfile
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from flashmesh import config, mesh_file
from flashmesh.config import MeshConfig
from flashmesh.launcher import MeshPlan, running_mesh
from flashmesh.redis_server import private_redis
from flashmesh.types import raise_problems

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flashmesh.launcher import Process

GRACE_S = 5.0
SCRAPE_TIMEOUT_S = 10.0
REPLAY_TOKENS = 140
"""Of the routers started here, and what a router assumes where its configuration says nothing else."""

SIMULATED: Mapping[str, Mapping[str, object]] = {
    "model": {"engine": "simulated", "sim_step_ms": 2.0, "sim_row_ms": 0.01},
    "router": {"replay_tokens": REPLAY_TOKENS},
    "prefill": {"num_pages": 8192, "max_waiting": 256},
    "decode": {"num_pages": 16384, "num_slots": 64, "max_requests": 256},
}
"""Workers that take prompts of 200,000 tokens, and 64 sequences each, on no hardware to speak of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which mesh to load.

    Attributes:
        address: host:port of a router that is up; None starts a mesh, with a Redis of its own.
        config: TOML file of that mesh, or for the token of the one that is up; None simulates.
        num_prefill, num_decode, num_kvstore: processes to start.
        settings: of the mesh to start where no file says otherwise.
    """

    address: str | None = None
    config: Path | None = None
    num_prefill: int = 2
    num_decode: int = 2
    num_kvstore: int = 1
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: SIMULATED)

    def __post_init__(self) -> None:
        raise_problems(
            (self.num_prefill >= 0, f"prefill processes: at least 0, not {self.num_prefill}"),
            (self.num_decode >= 1, f"decode processes: at least 1, not {self.num_decode}"),
            (self.num_kvstore >= 1, f"kvstore processes: at least 1, not {self.num_kvstore}"),
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A router, and the processes behind it where this benchmark has started them.

    Attributes:
        address: host:port of the router.
        token: of the mesh; empty for none.
        redis_url: of a mesh of our own.
        processes: by name; empty where the mesh is somebody else's.
    """

    address: str
    token: str = ""
    redis_url: str = ""
    processes: Mapping[str, Process] = field(default_factory=dict)

    def totals(self, service: str, metric: str) -> dict[str, float]:
        """Returns a counter of each of a service's processes, by process name."""
        return {
            name: scrape(process.metrics_address, metric)
            for name, process in self.processes.items()
            if process.service == service
        }


@contextlib.contextmanager
def opened(where: Where) -> Iterator[Target]:
    """Yields the mesh, and stops it if it was started here.

    Raises:
        WorkerLost: a process ended at the start.
        ConfigError: the configuration cannot be used.
    """
    if where.address is not None:
        yield Target(*mesh_file.find_router(where.address, where.config))
        return
    token = config.load(where.config, {"mesh": MeshConfig})["mesh"].secret()
    with tempfile.TemporaryDirectory() as name, private_redis(Path(name) / "redis") as redis_url:
        plan = MeshPlan(
            redis_url=redis_url,
            num_prefill=where.num_prefill,
            num_decode=where.num_decode,
            num_kvstore=where.num_kvstore,
            config=where.config,
            http_bind="",
            settings={} if where.config else where.settings,
        )
        with running_mesh(plan, Path(name), grace_s=GRACE_S) as mesh:
            yield Target(mesh.router_address, token, redis_url, mesh.processes)


def scrape(address: str, metric: str) -> float:
    """Reads a metric of a process, summed over its labels; 0 where there is none of that name."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_TIMEOUT_S) as response:
        text = response.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == metric
    )
