"""`flashmesh generate PROMPT`: an answer from a running mesh, or from an engine in this process.

The answer streams to stdout and figures go to stderr. Equal prompt, seed and parameters give equal
tokens either way.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

    from flashmesh.answers import Part
    from flashmesh.types import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help="text to continue; - reads it from stdin")
    add("--address", metavar="HOST:PORT", help="the router; default: the mesh started here by `up`")
    add("--config", type=Path, metavar="FILE", help="for [mesh] token_file; offline, for [model]")
    add("--offline", action="store_true", help="run the engine in this process")
    add("--max-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-k", type=int, default=0, metavar="K")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--seed", type=int, metavar="S", help="drawn where not given")
    add(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated"
    )
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--chat", action="store_true", help="PROMPT is a question, to be answered")
    how.add_argument("--token-ids", action="store_true", help="PROMPT and answer are token ids")
    add("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    """Prints the answer as it comes."""
    from flashmesh.answers import Answer

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = sampling(args)
    source = offline if args.offline else remote
    parts = source(args, read_prompt(args, prompt), params)
    answer = Answer()  # after an engine was loaded: its clock starts here
    with contextlib.closing(parts):  # Ctrl-C leaves the loop, and closing cancels the call
        for part in answer.watch(parts):
            if not args.json:
                print(shown(part, ids=args.token_ids), end="", flush=True)
    print(json.dumps(answer.as_json()) if args.json else "")
    print(f"[{answer.figures()}]", file=sys.stderr)
    return 0


def read_prompt(args: argparse.Namespace, text: str) -> str | list[int]:
    """Turns what was typed into a prompt."""
    from flashmesh.chat_prompt import chat_prompt

    if args.token_ids:
        return parse_ids(text)
    return chat_prompt(text) if args.chat else text


def shown(part: Part, *, ids: bool) -> str:
    """Returns what to print of a part."""
    return "".join(f"{token} " for token in part.token_ids) if ids else part.text


def parse_ids(text: str) -> list[int]:
    """Reads token ids with spaces or commas between.

    Raises:
        InvalidRequest: something is not a whole number >= 0.
    """
    from flashmesh.errors import InvalidRequest

    words = text.replace(",", " ").split()
    bad = [word for word in words if not (word.isascii() and word.isdigit())]
    if bad:
        raise InvalidRequest(f"not a token id: {bad[0]!r}")
    return [int(word) for word in words]


def sampling(args: argparse.Namespace) -> SamplingParams:
    """Checks the parameters here, so that a bad one costs no call."""
    from flashmesh.types import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed or 0,
        ignore_eos=args.ignore_eos,
    )


def remote(
    args: argparse.Namespace, prompt: str | list[int], params: SamplingParams
) -> Generator[Part]:
    """Streams from a router."""
    from flashmesh import mesh_file
    from flashmesh.client import RouterClient, prompt_request

    address, token = mesh_file.find_router(args.address, args.config)
    with RouterClient(address, token, mesh_file.find_tls(args.config)) as client:
        if args.chat and isinstance(prompt, str):
            prompt = client.tokenize(prompt, parse_special=True)
        yield from client.parts(prompt_request(prompt, params, seed=args.seed, stops=args.stop))


def offline(
    args: argparse.Namespace, prompt: str | list[int], params: SamplingParams
) -> Generator[Part]:
    """Streams from an engine in this process."""
    from flashmesh.offline import Offline, with_seed

    # A token has at least one byte of text, so this bounds a text prompt too.
    num_prompt = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
    engine = Offline.open(args.config, max_tokens=num_prompt + args.max_tokens)
    if args.chat and isinstance(prompt, str):
        prompt = engine.codec.encode(prompt, parse_special=True)
    return engine.parts(prompt, with_seed(params, args.seed), stops=args.stop)
