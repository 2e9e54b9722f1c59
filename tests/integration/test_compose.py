"""compose.yaml without containers: its very commands and environment, addresses replaced."""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.waiting import wait_until

from flashmesh.client import RouterClient, health_status, prompt_request
from flashmesh.errors import Unauthenticated
from flashmesh.redis_server import find_server
from flashmesh.types import SamplingParams

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
MESH = ("router", "prefill", "decode", "kvstore")
SCALE = {"prefill": 2, "decode": 2}
END_LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Containers:
    """Starts services of compose.yaml as processes."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.run_folder = folder / "run"
        self.redis_port = free_port()
        self.addresses: dict[str, str] = {}
        self.http_address = ""
        self._stack = stack
        (folder / "config").mkdir()
        for path in (ROOT / "config").iterdir():
            text = path.read_text().replace("/run/flashmesh", str(self.run_folder))
            (folder / "config" / path.name).write_text(text)

    def run_to_end(self, service: str) -> None:
        command = [self._outside(word) for word in COMPOSE["services"][service]["command"]]
        subprocess.run(
            [sys.executable, "-P", "-m", "flashmesh.cli", *command],
            cwd=self.folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def start_redis(self) -> None:
        words = [self._outside(word) for word in COMPOSE["services"]["redis"]["command"]]
        script = words[-1]
        for inside, outside in (
            ("$$", "$"),
            ("/tmp/valkey.conf", shlex.quote(str(self.folder / "valkey.conf"))),
            ("exec valkey-server", f"exec {shlex.quote(find_server())}"),
            ("--port 6379", f"--bind 127.0.0.1 --port {self.redis_port}"),
        ):
            assert inside in script
            script = script.replace(inside, outside)
        self._start("redis", [*words[:-1], script], dict(os.environ))

    def start(self, service: str, number: int) -> None:
        """Starts one replica as a container would: its own port, its own advertised address."""
        spec = COMPOSE["services"][service]
        section = f"FLASHMESH_{service.upper()}__"
        address = f"127.0.0.1:{free_port()}"
        environment = {key: self._outside(value) for key, value in spec["environment"].items()}
        assert environment[section + "BIND"].startswith("0.0.0.0:")
        environment[section + "BIND"] = address
        if (key := section + "HTTP_BIND") in environment:
            environment[key] = f"127.0.0.1:{free_port()}"
            self.http_address = environment[key]
        environment[section + "METRICS_PORT"] = "0"
        environment[section + "ADVERTISE"] = address
        environment["FLASHMESH_MODEL__ENGINE"] = "simulated"
        environment["FLASHMESH_MESH__DRAIN_GRACE_S"] = "2"
        name = f"{service}-{number}"
        command = [sys.executable, "-P", "-m", "flashmesh.cli", *spec["command"]]
        self._start(name, command, {**os.environ, **environment})
        self.addresses[name] = address

    def healthy(self) -> bool:
        """Runs each replica's own health check."""
        return all(self._check(name) for name in self.addresses)

    def _check(self, name: str) -> bool:
        kind, *command = COMPOSE["services"][name.partition("-")[0]]["healthcheck"]["test"]
        assert (kind, *command[:2]) == ("CMD", "flashmesh", "health")
        return health_status(self.addresses[name]) == "SERVING"

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log
            )
        self._stack.callback(process.wait, END_LIMIT_S)
        self._stack.callback(process.terminate)

    def _outside(self, text: str) -> str:
        text = text.replace("/run/flashmesh", str(self.run_folder))
        text = text.replace("/var/lib/flashmesh", str(self.folder / "disk"))
        return text.replace("redis://redis:6379", f"redis://127.0.0.1:{self.redis_port}")


@pytest.fixture(scope="module")
def containers(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        containers = Containers(tmp_path_factory.mktemp("compose"), stack)
        containers.run_to_end("secrets")
        containers.start_redis()
        for service in MESH:
            for number in range(SCALE.get(service, 1)):
                containers.start(service, number)
        wait_until(containers.healthy, "all services are healthy")
        yield containers


def ask(containers: Containers, token: str):
    prompt = [100 + i % 1000 for i in range(700)]
    with RouterClient(containers.addresses["router-0"], token) as client:
        request = prompt_request(prompt, SamplingParams(max_tokens=5, ignore_eos=True), seed=1)
        return list(client.parts(request, timeout_s=60))


def test_a_prompt_goes_through_with_the_drawn_token(containers):
    token = (containers.run_folder / "mesh_token").read_text().strip()
    parts = ask(containers, token)
    assert sum(len(part.token_ids) for part in parts) == 5
    assert parts[-1].prompt_tokens == 700
    assert parts[-1].finish_reason == "length"


@pytest.mark.parametrize("token", ["", "guess"])
def test_a_wrong_token_is_refused(containers, token):
    with pytest.raises(Unauthenticated, match="token is missing or wrong"):
        ask(containers, token)


@pytest.mark.parametrize(("token", "status"), [("drawn", 200), ("guess", 401)])
def test_http_takes_the_drawn_token_as_a_key(containers, token, status):
    if token == "drawn":
        token = (containers.run_folder / "mesh_token").read_text().strip()
    connection = http.client.HTTPConnection(containers.http_address, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {token}"})
        assert connection.getresponse().status == status


def test_redis_refuses_a_wrong_password(containers):
    import redis

    with (
        contextlib.closing(redis.Redis(port=containers.redis_port, password="guess")) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


def test_only_the_router_is_published_and_on_loopback():
    published = {name: s["ports"] for name, s in COMPOSE["services"].items() if "ports" in s}
    assert published == {"router": ["127.0.0.1:7100:7100", "127.0.0.1:7180:7180"]}


def test_every_kvstore_has_a_disk_of_its_own():
    service = COMPOSE["services"]["kvstore"]
    assert service["environment"]["FLASHMESH_KVSTORE__DISK_PATH"] in service["volumes"]


def test_every_service_can_be_scaled_and_checked():
    for name in MESH:
        service = COMPOSE["services"][name]
        assert "container_name" not in service
        assert "hostname" not in service
        bound = service["environment"][f"FLASHMESH_{name.upper()}__BIND"]
        assert service["healthcheck"]["test"][-1] == bound.replace("0.0.0.0", "127.0.0.1")
        assert service["depends_on"]["secrets"]["condition"] == "service_completed_successfully"
    assert all("healthcheck" in COMPOSE["services"][name] for name in (*MESH, "redis"))
