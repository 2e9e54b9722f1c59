"""Configuration: precedence, types, and every problem in one error."""

import pytest

from flashmesh import config
from flashmesh.config import MeshConfig
from flashmesh.errors import ConfigError
from flashmesh.services.kvstore.config import KvstoreConfig

SECTIONS = {"mesh": MeshConfig, "kvstore": KvstoreConfig}


def load(tmp_path, text):
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    return config.load(path, SECTIONS)


def test_without_a_file_the_defaults_hold():
    loaded = config.load(None, SECTIONS)
    assert loaded == {"mesh": MeshConfig(), "kvstore": KvstoreConfig()}


def test_the_environment_wins_over_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHMESH_KVSTORE__MEMORY_BYTES", "4096")
    loaded = load(tmp_path, "[kvstore]\nmemory_bytes = 2048\nmax_wait_s = 5\n")
    assert loaded["kvstore"] == KvstoreConfig(memory_bytes=4096, max_wait_s=5.0)


def test_every_problem_is_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHMESH_KVSTORE__MAX_LEASED_SHARE", "much")
    text = """
        [mesh]
        nmae = "typo"
        [kvstore]
        memory_bytes = "large"
        max_lease_ttl_s = 0
        max_wait_s = true
        [kvsotre]
        id = "typo"
    """
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    lines = str(caught.value).splitlines()
    assert str(tmp_path / "mesh.toml") in lines[0]
    reported = {line.split(":")[0].split(" =")[0].strip() for line in lines[1:]}
    assert reported == {
        "[kvsotre] is not a section",
        "mesh.nmae",
        "kvstore.memory_bytes",
        "kvstore.max_lease_ttl_s",
        "kvstore.max_wait_s",
        "kvstore.max_leased_share",
    }
    assert "kvstore.max_lease_ttl_s = 0: allowed: 1 to 3600" in str(caught.value)


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        config.load(tmp_path / "absent.toml", SECTIONS)
    with pytest.raises(ConfigError, match=r"mesh\.toml"):
        load(tmp_path, "[mesh")


def test_a_redis_off_this_host_needs_a_password(tmp_path):
    with pytest.raises(ConfigError, match="password"):
        MeshConfig(redis_url="redis://redis.example:6379/0").redis()
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    url = MeshConfig(
        redis_url="redis://redis.example:6379/0", redis_password_file=str(secret)
    ).redis()
    assert url == "redis://:s3cret@redis.example:6379/0"
    assert MeshConfig(redis_url="unix:///run/redis.sock").redis().endswith("/run/redis.sock")
    with pytest.raises(ConfigError, match="required"):
        MeshConfig().redis()


def test_secrets_stay_out_of_the_text_of_a_configuration():
    assert "s3cret" not in repr(MeshConfig(token="s3cret"))
