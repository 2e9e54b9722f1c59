"""`flashmesh up` as a user runs it: a process, its output, its signals, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import wait_until

SIMULATED = {"FLASHMESH_MODEL__ENGINE": "simulated", "FLASHMESH_MESH__DRAIN_GRACE_S": "2"}
END_LIMIT_S = 120.0


def environment(extra):
    free = {f"FLASHMESH_ROUTER__{key}": "127.0.0.1:0" for key in ("BIND", "HTTP_BIND")}
    return {**os.environ, **free, **SIMULATED, **extra}


@contextlib.contextmanager
def running_up(folder, *args, **extra):
    """Runs `flashmesh up` in a folder of its own; whatever happens, it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "flashmesh.cli", "up", *args],
        cwd=folder,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process, text):
    """Reads stdout up to the line that holds `text`."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"{text!r} did not come:\n{''.join(lines)}\n{process.stderr.read()}")


def pids_in(folder):
    pids = json.loads((folder / ".flashmesh" / "mesh.json").read_text())["pids"]
    return {name: pid for name, pid in pids.items() if name != "launcher"}


def runs(pid):
    """A zombie does not count: it has ended, and only its parent has not looked."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def children_of(pid):
    return {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def generate(folder, *args):
    return flashmesh(folder, "generate", *args)


def flashmesh(folder, *args, text=None):
    return subprocess.run(
        [sys.executable, "-P", "-m", "flashmesh.cli", *args],
        cwd=folder,
        env=environment({}),
        input=text,
        capture_output=True,
        text=True,
        timeout=END_LIMIT_S,
    )


def test_once_answers_and_ends(tmp_path):
    with running_up(tmp_path, "--once", "--prompt", "hello", "--decode", "2") as process:
        out, err = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == 0, err
    assert "simulated" in out
    assert "prompt: hello" in out
    assert "first token after" in out
    assert "32 tokens" in out
    (run,) = (tmp_path / ".flashmesh").iterdir()  # mesh.json is gone
    logs = {path.name for path in run.glob("*.log")}
    names = ("router", "prefill-0", "decode-0", "decode-1", "kvstore-0")
    assert logs >= {f"{name}.log" for name in names}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_in_order(tmp_path, number):
    with running_up(tmp_path) as process:
        out = read_until(process, "stop it:")
        assert "flashmesh.v1.Router/Generate" in out
        assert "OpenAI clients: http://127.0.0.1:" in out
        children = children_of(process.pid)
        assert children > set(pids_in(tmp_path).values())  # the services, and Redis

        answer = generate(tmp_path, "one two three", "--max-tokens", "7", "--ignore-eos", "--json")
        assert answer.returncode == 0, answer.stderr
        assert len(json.loads(answer.stdout)["token_ids"]) == 7

        talk = flashmesh(tmp_path, "chat", "--no-think", "--max-tokens", "3", text="hello\n")
        assert talk.returncode == 0, talk.stderr
        assert talk.stdout.strip()

        process.send_signal(number)
        out, err = process.communicate(timeout=END_LIMIT_S)
        assert process.returncode == 0, err
        assert "stopped" in out
        assert not any(runs(pid) for pid in children)
        assert not (tmp_path / ".flashmesh" / "mesh.json").exists()


def test_kill_9_of_the_launcher_leaves_no_process(tmp_path):
    with running_up(tmp_path) as process:
        read_until(process, "stop it:")
        children = children_of(process.pid)
        process.kill()
        wait_until(lambda: not any(runs(pid) for pid in children), "the children are gone")


def test_a_process_that_dies_is_started_again(tmp_path):
    with running_up(tmp_path) as process:
        read_until(process, "stop it:")
        os.kill(pids_in(tmp_path)["decode-0"], signal.SIGKILL)
        assert "decode-0 ended with status -9" in process.stderr.readline()
        # The one decode worker is back when it answers; until then the router says that it is lost.
        wait_until(
            lambda: generate(tmp_path, "still there?", "--max-tokens", "3").returncode == 0,
            "an answer comes again",
        )
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_LIMIT_S)
        assert process.returncode == 0


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with running_up(tmp_path, FLASHMESH_ROUTER__BIND=bind) as process:
            _, err = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == 1
    assert err.startswith(f"flashmesh: router.bind = {bind}: ")
    assert err.count("\n") == 1
    assert not (tmp_path / ".flashmesh").exists()


def test_all_configuration_problems_come_in_one_message(tmp_path):
    (tmp_path / "bad.toml").write_text("[mesh]\ntypo = 1\n[router]\nmax_attempts = 0\n")
    with running_up(tmp_path, "--config", "bad.toml") as process:
        _, err = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == 1
    assert "mesh.typo: unknown key" in err
    assert "router.max_attempts = 0" in err
    assert "Traceback" not in err


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory):
    from flashmesh.kernels.demo import demo_checkpoint

    return demo_checkpoint(tmp_path_factory.mktemp("demo"))


def test_a_damaged_checkpoint_names_file_and_tensor_before_anything_is_healthy(
    tmp_path, demo_folder
):
    folder = tmp_path / "checkpoint"
    shutil.copytree(demo_folder, folder)
    shard, tensor = damage(folder)
    settings = {"FLASHMESH_MODEL__ENGINE": "reference", "FLASHMESH_MODEL__PATH": str(folder)}
    with running_up(tmp_path, **settings) as process:
        out, err = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == 1
    assert "healthy" not in out
    assert shard in err
    assert tensor in err
    assert not list((tmp_path / ".flashmesh").glob("*/*.ports.json"))


def test_a_missing_checkpoint_is_named(tmp_path):
    settings = {
        "FLASHMESH_MODEL__ENGINE": "reference",
        "FLASHMESH_MODEL__PATH": str(tmp_path / "not-there"),
    }
    with running_up(tmp_path, **settings) as process:
        _, err = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == 1
    assert "not-there" in err


def damage(folder):
    """Makes the first norm of a shard NaN; returns the names of shard and tensor."""
    from safetensors.torch import load_file, save_file

    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = sorted(name for name in tensors if name.endswith("norm.weight"))[0]
    tensors[name][:] = float("nan")
    save_file(tensors, shard)
    return shard.name, name


def test_offline_and_mesh_give_the_same_tokens(tmp_path):
    config = tmp_path / "simulated.toml"
    config.write_text('[model]\nengine = "simulated"\n')
    arguments = ["the same tokens " * 200, "--max-tokens", "12", "--ignore-eos", "--json"]
    arguments += ["--seed", "3", "--temperature", "0.8", "--config", str(config)]
    alone = generate(tmp_path, *arguments, "--offline")
    assert alone.returncode == 0, alone.stderr
    with running_up(tmp_path, "--config", str(config)) as process:
        read_until(process, "stop it:")
        meshed = generate(tmp_path, *arguments)
    assert meshed.returncode == 0, meshed.stderr
    alone, meshed = json.loads(alone.stdout), json.loads(meshed.stdout)
    assert alone["prompt_tokens"] == meshed["prompt_tokens"] > 396
    for key in ("token_ids", "text", "finish_reason", "seed"):
        assert alone[key] == meshed[key], key
