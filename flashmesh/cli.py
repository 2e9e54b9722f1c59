"""The `flashmesh` command: runs one subcommand, turns what went wrong into a line and a status.

Exit status: 0 done, 1 a named error, 2 wrong arguments, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from flashmesh.commands import (
    bench,
    chat,
    generate,
    health,
    keys,
    kv,
    model,
    secret_files,
    serve,
    up,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SERVICES = {
    "router": "run a router: the public API, placement and retries",
    "prefill": "run a prefill worker: the encoder half, blocks into the store",
    "decode": "run a decode worker: replay, sampling, tokens out",
    "kvstore": "run a kvstore node: blocks by prefix hash",
}
COMMANDS = {
    "up": (up, "start a whole mesh on this machine, answer a prompt, stay up until Ctrl-C"),
    "generate": (generate, "continue a prompt on a running mesh, or in this process (--offline)"),
    "chat": (chat, "talk with a running mesh"),
    "health": (health, "ask a service for its health"),
    "kv": (kv, "look into kvstore nodes: stat, ls, verify, evict"),
    "keys": (keys, "draw an API key for the router's HTTP"),
    "secrets": (secret_files, "write the mesh token and the Redis password, keeping what is there"),
    "model": (model, "make checkpoints"),
    "bench": (bench, "measure"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    args = build_parser().parse_args(argv)
    # torch_npu without its driver breaks `import torch` itself unless its autoload is off.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `flashmesh ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        lines = [_as_line(leaf) for leaf in _leaves(error)]
        if None in lines:
            raise
        print("\n".join(f"flashmesh: {line}" for line in lines), file=sys.stderr)
        return 1
    return status


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="flashmesh", description="A serving mesh for DeepSeek-V4.1-Flash."
    )
    parser.add_argument("--version", action="version", version=version("flashmesh"))
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in SERVICES.items():
        command = commands.add_parser(name, help=text, description=text)
        serve.add_arguments(command)
        command.set_defaults(run=serve.run, service=name)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _leaves(error: Exception) -> Iterator[Exception]:
    """Opens the groups that a service's tasks wrap their errors in."""
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _as_line(error: Exception) -> str | None:
    """Returns the text of an expected error; None for a bug, which deserves its traceback."""
    import grpc

    from flashmesh.errors import FlashmeshError

    if isinstance(error, FlashmeshError):
        return str(error)
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return None


if __name__ == "__main__":
    sys.exit(main())
