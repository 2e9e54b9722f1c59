"""`flashmesh up`: a whole mesh on this machine.

Starts it, has it answer one prompt, says how to call it, and stays up until Ctrl-C or SIGTERM. A
process that dies at the start ends everything with its last log lines; one that dies later is
started again, a bounded number of times.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from flashmesh.config import MeshConfig, ModelSection
    from flashmesh.launcher import Mesh

PROMPT = "What is flashmesh?"
ANSWER_TOKENS = 32
ANSWER_TIMEOUT_S = 120.0
STOP_MARGIN_S = 5.0
MAX_STARTS = 6
RESTART_DELAY_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file (docs/running.md)")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="what to answer first")
    parser.add_argument("--once", action="store_true", help="stop after the answer")
    for service in ("prefill", "decode", "kvstore"):
        parser.add_argument(
            f"--{service}", type=int, default=1, metavar="N", help=f"number of {service} processes"
        )


def run(args: argparse.Namespace) -> int:
    """Runs the mesh; Ctrl-C and SIGTERM are orderly ends."""
    # One path out: whatever the signal, every `with` below cleans up.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return up(args)
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)


def up(args: argparse.Namespace) -> int:
    """Starts, answers, watches.

    Raises:
        WorkerLost: a process died at the start, or too often.
        ConfigError: the configuration cannot be used.
    """
    from flashmesh import config, mesh_file
    from flashmesh.config import MeshConfig, ModelSection
    from flashmesh.launcher import MeshPlan, running_mesh
    from flashmesh.services.router.config import RouterConfig

    kinds: dict[str, type] = {"mesh": MeshConfig, "model": ModelSection, "router": RouterConfig}
    sections: dict[str, Any] = config.load(args.config, kinds)
    mesh_config, router = sections["mesh"], sections["router"]
    require_free("bind", router.bind)
    if router.http_bind:
        require_free("http_bind", router.http_bind)
    folder = mesh_file.FOLDER / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    print(f"starting router, prefill, decode and kvstore; logs in {folder}", flush=True)
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        plan = MeshPlan(
            redis_url=private_redis_url(mesh_config, folder, stack),
            num_prefill=args.prefill,
            num_decode=args.decode,
            num_kvstore=args.kvstore,
            config=args.config,
            router_bind=router.bind,
            http_bind=router.http_bind,
            tls=mesh_config.tls(),
            name_workers=not mesh_config.redis_url,
        )
        grace_s = mesh_config.drain_grace_s + STOP_MARGIN_S
        mesh = stack.enter_context(running_mesh(plan, folder, grace_s=grace_s))
        pids = {"launcher": os.getpid()} | {p.name: p.pid for p in mesh.processes.values()}
        token_file = os.path.abspath(mesh_config.token_file) if mesh_config.token_file else ""
        stack.enter_context(
            mesh_file.announced(
                mesh.router_address,
                pids,
                token_file,
                http=mesh.processes["router"].http_address,
                name=mesh_config.name,
                redis_url=plan.redis_url,
            )
        )
        print(f"healthy after {time.perf_counter() - started:.1f} s\n", flush=True)
        answer_once(mesh, mesh_config, sections["model"], args.prompt)
        if args.once:
            return 0
        print_how_to_call(mesh)
        keep_up(mesh)
    return 0


def require_free(key: str, bind: str) -> None:
    """Refuses a router port that is taken, before anything starts.

    Raises:
        ConfigError: somebody listens there.
    """
    from flashmesh.errors import ConfigError

    host, _, port = bind.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise ConfigError(
                f"router.{key} = {bind}: {error.strerror}; is another mesh up? "
                f"FLASHMESH_ROUTER__{key.upper()}=127.0.0.1:PORT chooses another port"
            ) from error


def private_redis_url(mesh: MeshConfig, folder: Path, stack: contextlib.ExitStack) -> str:
    """Starts a private Redis where none is configured; an empty URL leaves the configured one."""
    if mesh.redis_url:
        return ""
    from flashmesh.redis_server import private_redis

    return stack.enter_context(private_redis(folder / "redis"))


def answer_once(mesh: Mesh, config: MeshConfig, model: ModelSection, prompt: str) -> None:
    """Streams one answer to the terminal."""
    from flashmesh.answers import Answer
    from flashmesh.chat_prompt import chat_prompt
    from flashmesh.client import RouterClient, prompt_request
    from flashmesh.types import SamplingParams

    if model.engine == "simulated":
        print(f"model:  {model.name}, simulated: the tokens below are hashes, not language")
    elif model.path == "demo":
        print(f"model:  {model.name}, built in and very small (docs/demo.md)")
    else:
        print(f"model:  {model.name} from {model.path}")
    print(f"prompt: {prompt}\nanswer: ", end="", flush=True)
    answer = Answer()
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=model.engine == "simulated")
    with RouterClient(mesh.router_address, config.secret(), config.tls()) as client:
        request = prompt_request(client.tokenize(chat_prompt(prompt), parse_special=True), params)
        for part in answer.watch(client.parts(request, timeout_s=ANSWER_TIMEOUT_S)):
            print(part.text, end="", flush=True)
    print(f"\n[{answer.figures()}]\n", flush=True)


def print_how_to_call(mesh: Mesh) -> None:
    """Says where everything is."""
    for process in mesh.processes.values():
        print(
            f"{process.name:<10} {process.address:<21} metrics http://{process.metrics_address}/metrics"
            f"  pid {process.pid}"
        )
    print(
        '\ncall it:  flashmesh generate --chat "What can you do?"'
        f"\n          any gRPC client: flashmesh.v1.Router/Generate at {mesh.router_address}"
    )
    if http := mesh.processes["router"].http_address:
        print(
            "          flashmesh chat"
            f"\n          OpenAI clients: http://{http}/v1; Anthropic clients: http://{http}"
        )
    print("stop it:  Ctrl-C", flush=True)


def keep_up(mesh: Mesh) -> None:
    """Starts processes again when they end; returns never.

    Raises:
        WorkerLost: one has ended too often.
    """
    from flashmesh.errors import WorkerLost

    while True:
        process = mesh.next_exit()
        status = process.wait()
        if process.num_starts >= MAX_STARTS:
            raise WorkerLost(
                f"{process.name} ended {process.num_starts} times, last with status {status}; "
                f"its log ends with:\n{process.log_tail()}"
            )
        print(
            f"{process.name} ended with status {status} ({process.log_path}); starting it again",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(RESTART_DELAY_S * 2 ** (process.num_starts - 1))
        mesh.start_process(process.name)
