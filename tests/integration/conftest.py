"""A real Redis for the tests that talk to one directly."""

import contextlib

import pytest

from flashmesh.redis_client import connect
from flashmesh.redis_server import private_redis


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    with private_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
async def client(redis_url):
    async with contextlib.aclosing(connect(redis_url)) as client:
        await client.flushall()
        yield client
