"""Who may call, and the file that says so."""

import pytest

from flashmesh import cli
from flashmesh.errors import ConfigError, Unauthenticated
from flashmesh.services.router.config import RouterConfig
from flashmesh.services.router.http.keys import (
    ApiKeys,
    Tenant,
    draw_key,
    hash_key,
    load_keys,
    load_tenants,
)


def written(tmp_path, *tables):
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(tables))
    return path


def test_a_drawn_key_opens_and_is_not_in_the_file(tmp_path):
    key, table = draw_key("team-a")
    other, more = draw_key("team-b")
    path = written(tmp_path, table, more)
    assert key not in path.read_text()
    keys = ApiKeys(load_tenants(path))
    one = keys.authenticate({"authorization": f"Bearer {key}"})
    two = keys.authenticate({"x-api-key": other})
    assert (one.name, two.name) == ("team-a", "team-b")
    assert one.salt != two.salt
    assert len(one.salt) == len(two.salt) == 32


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic right"},
        {"x-api-key": "wrong"},
        {"x-api-key": "r\xefght"},
    ],
)
def test_without_the_right_key_nobody_is_admitted(headers):
    keys = ApiKeys({hash_key("right"): Tenant("t", b"s" * 32)}, mesh_token="token")
    with pytest.raises(Unauthenticated):
        keys.authenticate(headers)


def test_the_mesh_token_is_a_key_without_a_salt():
    keys = ApiKeys({}, mesh_token="token")
    assert keys.authenticate({"authorization": "bearer token"}) == Tenant()


def test_where_no_key_is_needed_any_will_do():
    assert ApiKeys({}).authenticate({"authorization": "Bearer whatever"}) == Tenant()


def test_all_problems_of_a_file_come_at_once(tmp_path):
    _, good = draw_key("a")
    path = written(
        tmp_path,
        good,
        good,
        '[[key]]\nname = "b"',
        good.replace('sha256 = "', 'sha256 = "zz'),
        '[[key]]\nname = "c"\nsha256 = "00"\nsalt = "00"',
    )
    with pytest.raises(ConfigError) as caught:
        load_tenants(path)
    text = str(caught.value)
    for number, problem in ((2, "already"), (3, "expected name"), (4, "hex"), (5, "32 bytes")):
        assert f"key {number}: " in text
        assert problem in text
    assert "key 1" not in text


@pytest.mark.parametrize("content", ["", "[[key", "key = 1"])
def test_a_file_without_keys_is_refused(tmp_path, content):
    with pytest.raises(ConfigError):
        load_tenants(written(tmp_path, content))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"api_keys_file = .*absent"):
        load_tenants(tmp_path / "absent")


def test_the_command_prints_a_key_that_its_file_admits(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    printed = []
    for name in ("one", "two"):
        assert cli.main(["keys", str(path), name]) == 0
        printed.append(capsys.readouterr().out.strip())
    assert path.stat().st_mode & 0o777 == 0o600
    keys = ApiKeys(load_tenants(path))
    assert [keys.authenticate({"x-api-key": key}).name for key in printed] == ["one", "two"]


@pytest.mark.parametrize("name", ["one", "a b", 'x"', "", "n" * 65])
def test_a_second_key_of_a_name_and_a_bad_name_are_refused(tmp_path, capsys, name):
    path = tmp_path / "keys.toml"
    assert cli.main(["keys", str(path), "one"]) == 0
    before = path.read_text()
    assert cli.main(["keys", str(path), name]) == 1
    assert path.read_text() == before


@pytest.mark.parametrize("bind", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", ":80"])
def test_off_loopback_somebody_must_hold_a_key(bind):
    config = RouterConfig(http_bind=bind)
    with pytest.raises(ConfigError, match=r"http_bind = .* needs router.api_keys_file"):
        load_keys(config, "")
    assert load_keys(config, "token").needed


@pytest.mark.parametrize("bind", ["127.0.0.1:80", "[::1]:80", "localhost:80"])
def test_on_loopback_nobody_needs_one(bind):
    assert not load_keys(RouterConfig(http_bind=bind), "").needed
