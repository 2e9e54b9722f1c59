"""The order in which a service comes up."""

import contextlib

import pytest

from flashmesh import lifecycle
from flashmesh.config import MeshConfig, ServiceConfig
from flashmesh.membership import new_record, registered


@pytest.mark.parametrize("redis_is_there", [True, False])
async def test_a_service_is_in_the_registry_before_it_says_that_it_serves(
    redis_url, tmp_path, redis_is_there
):
    url = redis_url if redis_is_there else f"unix://{tmp_path}/nothing.sock"
    mesh = MeshConfig(redis_url=url)
    config = ServiceConfig(port_file=str(tmp_path / "ports.json"), metrics_port=-1)
    said_so = []

    @contextlib.asynccontextmanager
    async def start(running):
        def load():
            said_so.append((tmp_path / "ports.json").exists())  # written after SERVING
            running.stopping.set()
            return {}

        async with registered(mesh, new_record("decode", config, running), running, load) as leave:
            yield leave

    await lifecycle._serve("decode", mesh, config, start)
    assert said_so[0] is False
    assert (tmp_path / "ports.json").exists()
