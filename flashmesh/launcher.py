"""A whole mesh on this machine: one process a service, started, watched and stopped together.

`flashmesh up`, the benchmarks and the tests start meshes through this module, so there is one way
to do it. Every child runs `flashmesh SERVICE` with the caller's configuration file; what the
launcher decides (ports, ids, Redis) goes to it as FLASHMESH_SECTION__KEY. Children end with the
process that started them, however that one ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashmesh.client import health_status
from flashmesh.config import ENV_PREFIX
from flashmesh.errors import WorkerLost

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from flashmesh.tls import Tls

WAVES = (("prefill", "decode"), ("kvstore",), ("router",))
POLL_S = 0.02
LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """What to start.

    Attributes:
        redis_url: a Redis that is up; empty leaves the one that the file and the environment name.
        num_prefill, num_decode, num_kvstore, num_routers: processes of each; more than one router need ports of their
            own, so a `router_bind` and `http_bind` of port 0.
        config: handed to every service; None means defaults.
        router_bind: host:port of the router; workers always take a free port on loopback.
        http_bind: host:port of its HTTP server; empty for none.
        settings: section or process name ("decode", "decode-1", "mesh") to keys and values; they
            win over the file.
        env: further environment of every child.
        tls: certificates of the mesh, where its configuration names some; for health checks.
        name_workers: register processes under their names here; off where other launchers share the
            Redis.
    """

    redis_url: str = ""
    num_prefill: int = 1
    num_decode: int = 1
    num_kvstore: int = 1
    num_routers: int = 1
    config: Path | None = None
    router_bind: str = "127.0.0.1:0"
    http_bind: str = "127.0.0.1:0"
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    tls: Tls | None = None
    name_workers: bool = True

    def process_names(self) -> list[str]:
        """Names every process: the service, then a number where there may be several."""
        counts = {
            "prefill": self.num_prefill,
            "decode": self.num_decode,
            "kvstore": self.num_kvstore,
        }
        names = [f"{service}-{i}" for service, count in counts.items() for i in range(count)]
        return [*names, "router", *(f"router-{i}" for i in range(1, self.num_routers))]


class Process:
    """One service process: how to start it, and where it is while it runs."""

    def __init__(self, name: str, plan: MeshPlan, folder: Path) -> None:
        self.name = name
        self.service = name.partition("-")[0]
        self.log_path = folder / f"{name}.log"
        self.port_file = folder / f"{name}.ports.json"
        self.num_starts = 0
        # -P: the folder we stand in may hold another flashmesh.
        self._argv = [sys.executable, "-P", "-m", "flashmesh.cli", self.service]
        if plan.config is not None:
            self._argv += ["--config", str(plan.config)]
        self._env = _environment(self, plan)
        self._tls = plan.tls
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the process, or starts it again after it ended; its log goes on in the same file.

        Call it on a thread that lives as long as the mesh: Linux counts the end of the starting
        thread as the end of the parent.
        """
        assert not self.alive
        self.port_file.unlink(missing_ok=True)
        # --parent, and not a preexec_fn: forking without exec is unsafe in a process with gRPC
        # threads.
        argv = [*self._argv, "--parent", str(os.getpid())]
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                # Out of the terminal's group, or Ctrl-C would reach the child beside our SIGTERM,
                # and a second signal means "at once".
                process_group=0,
            )
        self.num_starts += 1
        return self._popen

    @property
    def pid(self) -> int:
        """Process id of the latest start."""
        assert self._popen is not None
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """It was started and has not ended."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def address(self) -> str:
        """host:port of its gRPC server; known once it serves."""
        return f"127.0.0.1:{self._ports()['port']}"

    @property
    def http_address(self) -> str | None:
        """host:port of its HTTP server; None where it has none. Known once it serves."""
        port = self._ports().get("http_port")
        return None if port is None else f"127.0.0.1:{port}"

    @property
    def metrics_address(self) -> str:
        """host:port of its Prometheus endpoint; known once it serves."""
        return f"127.0.0.1:{self._ports()['metrics_port']}"

    def healthy(self) -> bool:
        """Says whether it serves.

        Raises:
            WorkerLost: it has ended; the text ends with the last lines of its log.
        """
        if not self.alive:
            assert self._popen is not None
            raise WorkerLost(
                f"{self.name} ended with status {self._popen.returncode}; "
                f"{self.log_path} ends with:\n{self.log_tail()}"
            )
        return self.port_file.exists() and health_status(self.address, tls=self._tls) == "SERVING"

    def signal(self, number: int) -> None:
        """Sends a signal if the process lives."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end and returns the exit status (negative: the signal).

        Raises:
            subprocess.TimeoutExpired: it lives on.
        """
        assert self._popen is not None
        return self._popen.wait(timeout_s)

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """Returns the last lines of the log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _ports(self) -> dict[str, int]:
        ports: dict[str, int] = json.loads(self.port_file.read_text())
        return ports


class Mesh:
    """The processes of one mesh."""

    def __init__(self, plan: MeshPlan, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.processes = {name: Process(name, plan, folder) for name in plan.process_names()}
        self._exits: queue.SimpleQueue[Process] = queue.SimpleQueue()

    @property
    def router_address(self) -> str:
        """host:port that clients call."""
        return self.processes["router"].address

    def start(self, *, timeout_s: float | None = None) -> None:
        """Starts everything and returns when all of it is healthy.

        Workers come first: a checkpoint that cannot be loaded ends the start before anything looks
        usable. Routers come last: they find all the others registered.

        Raises:
            WorkerLost: a process ended, or was not healthy in time.
        """
        for wave in WAVES:
            names = [p.name for p in self.processes.values() if p.service in wave]
            for name in names:
                self.start_process(name)
            self.wait_healthy(names, timeout_s=timeout_s)

    def start_process(self, name: str) -> None:
        """Starts one process (again) and watches for its end; does not wait for health."""
        process = self.processes[name]
        popen = process.start()
        threading.Thread(target=self._watch, args=(process, popen), daemon=True).start()

    def wait_healthy(self, names: Iterable[str], *, timeout_s: float | None = None) -> None:
        """Waits until the named processes serve.

        Raises:
            WorkerLost: one ended, or the time is up.
        """
        waiting = [self.processes[name] for name in names]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while waiting := [process for process in waiting if not process.healthy()]:
            if deadline is not None and time.monotonic() > deadline:
                raise WorkerLost(
                    f"not healthy after {timeout_s:g} s: {', '.join(p.name for p in waiting)}; "
                    f"{waiting[0].log_path} ends with:\n{waiting[0].log_tail()}"
                )
            time.sleep(POLL_S)

    def next_exit(self) -> Process:
        """Waits until a process ends, whoever ended it."""
        return self._exits.get()

    def stop(self, grace_s: float) -> None:
        """Ends all processes: SIGTERM, and SIGKILL for those still there after the grace."""
        deadline = time.monotonic() + grace_s
        for process in self.processes.values():
            process.signal(signal.SIGTERM)
        try:
            for process in self._started():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also when the user presses Ctrl-C once more
            for process in self._started():
                process.signal(signal.SIGKILL)
                process.wait()

    def _started(self) -> list[Process]:
        return [process for process in self.processes.values() if process.num_starts]

    def _watch(self, process: Process, popen: subprocess.Popen[bytes]) -> None:
        popen.wait()
        self._exits.put(process)


@contextlib.contextmanager
def running_mesh(
    plan: MeshPlan, folder: Path, *, grace_s: float, timeout_s: float | None = None
) -> Iterator[Mesh]:
    """Starts a mesh, yields it when it is healthy, and stops it whatever happens.

    Args:
        plan: what to start.
        folder: for logs and port files.
        grace_s: how long running requests may take to end at the stop.
        timeout_s: bound on the start; None waits as long as every process lives.

    Raises:
        WorkerLost: a process ended at the start; the text ends with its last log lines.
    """
    mesh = Mesh(plan, folder)
    try:
        mesh.start(timeout_s=timeout_s)
        yield mesh
    finally:
        mesh.stop(grace_s)


def _environment(process: Process, plan: MeshPlan) -> dict[str, str]:
    """Merges what a child sees: this process's environment, the plan's, then the settings."""
    settings: dict[str, dict[str, object]] = {
        "mesh": {"redis_url": plan.redis_url} if plan.redis_url else {},
        process.service: {
            "bind": plan.router_bind if process.service == "router" else "127.0.0.1:0",
            "port_file": process.port_file.absolute(),
        },
    }
    if process.service == "router":
        settings["router"]["http_bind"] = plan.http_bind
    if plan.name_workers:
        settings[process.service]["id"] = process.name
    for key, values in plan.settings.items():
        if key == process.name or "-" not in key:
            section = process.service if key == process.name else key
            settings.setdefault(section, {}).update(values)
    named = {
        f"{ENV_PREFIX}{section}__{key}".upper(): str(value)
        for section, values in settings.items()
        for key, value in values.items()
    }
    return {**os.environ, **plan.env, **named}
