"""Real meshes for tests: own processes, ports and Redis, gone when the test ends.

with start_mesh(tmp_path, num_decode=2, overrides={"decode": {"num_slots": 4}}) as mesh:
    with mesh.client() as client: ...
"""

from __future__ import annotations

import contextlib
import signal
import urllib.request
from collections import defaultdict
from typing import TYPE_CHECKING

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from flashmesh.client import RouterClient
from flashmesh.launcher import Mesh as LaunchedMesh
from flashmesh.launcher import MeshPlan, Process
from flashmesh.redis_server import private_redis
from flashmesh.rpc import CHANNEL_OPTIONS
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from flashmesh.tls import Tls

START_TIMEOUT_S = 120.0
"""Against hangs only: generous, for a machine whose cores are shared."""

STOP_GRACE_S = 10.0


class Mesh:
    """A mesh that is up.

    Attributes:
        redis_url: its private Redis.
        processes: "router", "prefill-0", "decode-0", "kvstore-0", ... to the process.
    """

    def __init__(self, launched: LaunchedMesh, redis_url: str) -> None:
        self._launched = launched
        self.redis_url = redis_url

    @property
    def processes(self) -> dict[str, Process]:
        return self._launched.processes

    @property
    def router_address(self) -> str:
        return self._launched.router_address

    @property
    def http_address(self) -> str:
        """host:port of the router's HTTP server."""
        address = self.processes["router"].http_address
        assert address is not None
        return address

    def address(self, name: str) -> str:
        """host:port of a process's gRPC server."""
        return self.processes[name].address

    def client(self, token: str = "", tls: Tls | None = None) -> RouterClient:
        """A blocking client of the router; a context manager."""
        return RouterClient(self.router_address, token, tls)

    def router_channel(self) -> grpc.aio.Channel:
        """An asyncio channel to the router; an async context manager."""
        return self.channel("router")

    def channel(self, name: str) -> grpc.aio.Channel:
        """An asyncio channel to any process; an async context manager."""
        return grpc.aio.insecure_channel(self.address(name), options=CHANNEL_OPTIONS)

    def metrics(self, name: str) -> dict[str, float]:
        """Scrapes a process.

        Returns:
            `metric` -> sum over its labels, and `metric{label="value",...}` (labels by name) ->
            value.
        """
        url = f"http://{self.processes[name].metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            return parse_metrics(response.read().decode())

    def held(self) -> dict[str, float]:
        """Pages, slots, requests, leases and waiting Gets that are held anywhere, by name."""
        found: dict[str, float] = {}
        for name in (*self.names("prefill"), *self.names("decode")):
            values = self.metrics(name)
            found[f"{name} pages"] = values['flashmesh_pages{state="used"}']
            found[f"{name} slots"] = values['flashmesh_slots{state="used"}']
            found[f"{name} requests"] = values.get("flashmesh_decode_requests", 0)
        for name in self.names("kvstore"):
            values = self.metrics(name)
            found[f"{name} leases"] = values["flashmesh_kv_leases"]
            found[f"{name} gets"] = values["flashmesh_kv_waiting_gets"]
        router = self.metrics("router")
        found["requests"] = router["flashmesh_router_requests"]
        found["leases"] = router["flashmesh_router_leases"]
        return {name: value for name, value in found.items() if value}

    def wait_idle(self) -> None:
        """Waits until nothing is held."""
        wait_until(lambda: not self.held(), "nothing is held in the mesh")

    def busy_decode(self) -> str:
        """Name of the one decode worker that serves a request."""
        (name,) = (
            name for name in self.names("decode") if self.metrics(name)["flashmesh_decode_requests"]
        )
        return name

    def names(self, service: str) -> list[str]:
        """Names of a service's processes."""
        return [p.name for p in self.processes.values() if p.service == service]

    def kill(self, name: str) -> None:
        """SIGKILL, and waits for the end."""
        self.end(name, signal.SIGKILL)

    def terminate(self, name: str) -> int:
        """SIGTERM, waits for the end, returns the exit status."""
        return self.end(name, signal.SIGTERM)

    def end(self, name: str, number: int) -> int:
        process = self.processes[name]
        process.signal(number)
        return process.wait(START_TIMEOUT_S)

    def suspend(self, name: str) -> None:
        """SIGSTOP: a worker that hangs."""
        self.processes[name].signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.processes[name].signal(signal.SIGCONT)

    def restart(self, name: str) -> None:
        """Starts a process that ended, and waits for its health."""
        self._launched.start_process(name)
        self._launched.wait_healthy([name], timeout_s=START_TIMEOUT_S)

    def log(self, name: str) -> str:
        """The whole log of a process."""
        return self.processes[name].log_path.read_text()


@contextlib.contextmanager
def start_mesh(
    folder: Path,
    *,
    engine: str = "simulated",
    num_prefill: int = 1,
    num_decode: int = 1,
    num_kvstore: int = 1,
    num_routers: int = 1,
    overrides: Mapping[str, Mapping[str, object]] | None = None,
    env: Mapping[str, str] | None = None,
    config: Path | None = None,
    tls: Tls | None = None,
) -> Iterator[Mesh]:
    """Starts a mesh and yields it when every process is healthy.

    Args:
        folder: for logs, ports and Redis; one mesh each.
        engine: "simulated" or "reference".
        overrides: section ("decode", "mesh", "model") or process name ("decode-1") to settings.
        env: further environment of every process.
        config: a TOML file for every process.
        tls: certificates that the settings name; for health checks.
    """
    settings: dict[str, dict[str, object]] = {
        "mesh": {"drain_grace_s": 2.0, "log_level": "DEBUG"},
        "model": {"engine": engine},
    }
    for key, values in (overrides or {}).items():
        settings.setdefault(key, {}).update(values)
    with private_redis(folder / "redis") as redis_url:
        plan = MeshPlan(
            redis_url=redis_url,
            num_prefill=num_prefill,
            num_decode=num_decode,
            num_kvstore=num_kvstore,
            num_routers=num_routers,
            config=config,
            settings=settings,
            env=env or {},
            tls=tls,
        )
        launched = LaunchedMesh(plan, folder)
        mesh = Mesh(launched, redis_url)
        try:
            launched.start(timeout_s=START_TIMEOUT_S)
            yield mesh
        finally:
            for process in launched.processes.values():
                process.signal(signal.SIGCONT)  # a suspended one would sit out the grace
            launched.stop(STOP_GRACE_S)


def parse_metrics(text: str) -> dict[str, float]:
    """Flattens the Prometheus text format; see `Mesh.metrics`."""
    values: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
            if sample.labels:
                labels = ",".join(f'{key}="{sample.labels[key]}"' for key in sorted(sample.labels))
                values[f"{sample.name}{{{labels}}}"] = sample.value
    return dict(values)
