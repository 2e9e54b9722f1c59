"""The command line: a fast --help, one line for every expected error, exit statuses."""

from __future__ import annotations

import json
import stat
import subprocess
import sys

import grpc
import pytest

from flashmesh import cli, mesh_file
from flashmesh.answers import Answer, Part
from flashmesh.commands import generate, secret_files
from flashmesh.errors import ConfigError, InvalidRequest, WorkerLost

SLOW_MODULES = ("torch", "grpc", "rich", "redis", "numpy", "tokenizers")


def test_help_imports_nothing_slow():
    script = (
        "import sys; from flashmesh.cli import build_parser; build_parser().format_help();"
        f"print([name for name in {SLOW_MODULES!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["generate"], ["decode", "--slots", "4"]])
def test_wrong_arguments_exit_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: flashmesh" in capsys.readouterr().err


def fail_with(monkeypatch, error):
    def run(args):
        raise error

    monkeypatch.setattr(cli.health, "run", run)
    return cli.main(["health", "127.0.0.1:1"])


def test_a_named_error_is_one_line_and_exit_1(monkeypatch, capsys):
    assert fail_with(monkeypatch, WorkerLost("decode-0: gone")) == 1
    assert capsys.readouterr().err == "flashmesh: decode-0: gone\n"


def test_an_error_out_of_a_task_group_is_a_line_too(monkeypatch, capsys):
    group = ExceptionGroup("tasks", [ExceptionGroup("inner", [ConfigError("mesh.x: unknown key")])])
    assert fail_with(monkeypatch, group) == 1
    assert capsys.readouterr().err == "flashmesh: mesh.x: unknown key\n"


def test_ctrl_c_exits_130(monkeypatch):
    assert fail_with(monkeypatch, KeyboardInterrupt()) == 130


def test_a_bug_keeps_its_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        fail_with(monkeypatch, ZeroDivisionError())


def test_a_grpc_error_names_its_status(monkeypatch, capsys):
    class Failed(grpc.RpcError, grpc.Call):
        def code(self):
            return grpc.StatusCode.UNAVAILABLE

        def details(self):
            return "nobody there"

    Failed.__abstractmethods__ = frozenset()
    assert fail_with(monkeypatch, Failed()) == 1
    assert capsys.readouterr().err == "flashmesh: UNAVAILABLE: nobody there\n"


def test_health_of_nobody_exits_1(capsys):
    assert cli.main(["health", "127.0.0.1:1", "--timeout", "2"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().out


def test_secrets_are_private_and_kept(tmp_path, capsys):
    folder = tmp_path / "run" / "flashmesh"
    assert cli.main(["secrets", str(folder)]) == 0
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(first) == ["mesh_token", "redis_password"]
    assert len(set(first.values())) == 2
    assert all(len(text.strip()) >= 40 for text in first.values())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
    assert cli.main(["secrets", str(folder)]) == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == first
    assert first["mesh_token"].strip() not in capsys.readouterr().out


def test_of_two_writers_one_wins(tmp_path):
    path = tmp_path / "mesh_token"
    assert [secret_files.write_once(path, "one"), secret_files.write_once(path, "two")] == [
        True,
        False,
    ]
    assert path.read_text() == "one\n"
    assert list(tmp_path.iterdir()) == [path]


def test_generate_says_that_no_mesh_is_up(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", "hi", "--address", "127.0.0.1:1"]) == 1
    assert "flashmesh: router 127.0.0.1:1: " in capsys.readouterr().err


def test_generate_refuses_bad_parameters_before_any_call(capsys):
    assert cli.main(["generate", "hi", "--max-tokens", "-3", "--top-p", "0"]) == 1
    error = capsys.readouterr().err
    assert "max_tokens must be at least 1, not -3" in error
    assert "top_p" in error


def test_token_ids_are_read_and_refused():
    assert generate.parse_ids("1, 2 3\n4,5") == [1, 2, 3, 4, 5]
    with pytest.raises(InvalidRequest, match="'-1'"):
        generate.parse_ids("1 -1")


def test_an_answer_adds_up_its_parts():
    parts = [Part([5], "a", [-0.5], seed=7), Part([6, 8], "bc", [-1.0, -2.0])]
    last = Part(finish_reason="length", prompt_tokens=300, cached_tokens=128)
    answer = Answer().read([*parts, last])
    shown = answer.as_json()
    assert shown["token_ids"] == [5, 6, 8]
    assert shown["text"] == "abc"
    assert (shown["seed"], shown["finish_reason"], shown["cached_tokens"]) == (7, "length", 128)
    assert len(answer.token_times_s) == 3
    assert "3 tokens" in answer.figures()
    assert "no token" in Answer().figures()


def test_mesh_file_lives_as_long_as_the_mesh(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".flashmesh").mkdir()
    assert mesh_file.find_router(None, None) == ("127.0.0.1:7100", "")
    (tmp_path / "token").write_text("secret\n")
    with mesh_file.announced("127.0.0.1:1234", {"router": 1}, str(tmp_path / "token")):
        assert json.loads(mesh_file.PATH.read_text())["router"] == "127.0.0.1:1234"
        assert mesh_file.find_router(None, None) == ("127.0.0.1:1234", "secret")
        # The secret of this mesh is not shown to another one.
        assert mesh_file.find_router("127.0.0.1:9", None) == ("127.0.0.1:9", "")
    assert not mesh_file.PATH.exists()


def test_no_benchmark_of_that_name(capsys):
    assert cli.main(["bench", "speed"]) == 1
    assert "there are: all, mesh, kv" in capsys.readouterr().err
