"""Request traces: when requests came, how long they were, and what they shared.

Two public formats, plain or compressed (.gz, .xz). Mooncake: JSON lines with block ids, each of which
stands for 512 tokens and all before them (Qin et al., FAST 2025). Azure 2023: CSV with lengths alone
(Patel et al., ISCA 2024), so that no two prompts share anything. Neither holds text: token ids are
drawn from the block ids, so equal ids give equal tokens in every run.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import lzma
from array import array
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from typing import TYPE_CHECKING

from flashmesh.errors import InvalidRequest
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from importlib.resources.abc import Traversable
    from pathlib import Path

TRACE_BLOCK_TOKENS = 512
MS_PER_S = 1000
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
FIRST_TOKEN_ID = 2048
"""Drawn ids are in [2048, 4096): ordinary tokens of every vocabulary that is served, the smallest too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        at_s: seconds from the trace's start.
        num_prompt_tokens, num_output_tokens: both at least 1.
        block_ids: of the prompt's 512-token blocks, the last one perhaps partial.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Sequence[int]

    def prompt(self) -> list[int]:
        """Returns the prompt's token ids."""
        tokens = []
        for block_id in self.block_ids:
            tokens += draw_tokens(f"block/{block_id}", TRACE_BLOCK_TOKENS)
        return tokens[: self.num_prompt_tokens]


def draw_tokens(name: str, count: int) -> list[int]:
    """Returns so many token ids that follow from a name alone."""
    noise = array("H", hashlib.shake_256(name.encode()).digest(2 * count))
    return [FIRST_TOKEN_ID + number % FIRST_TOKEN_ID for number in noise]


def bundled() -> dict[str, Traversable]:
    """Returns the traces that come with flashmesh, by name."""
    folder = resources.files("flashmesh.data") / "traces"
    files = {trace_name(item.name): item for item in folder.iterdir() if item.name.endswith(".xz")}
    return {name: files[name] for name in sorted(files)}


def trace_name(file_name: str) -> str:
    """Names a trace by its file: without suffixes, and without the publisher's name."""
    return file_name.partition(".")[0].removeprefix("mooncake_")


def read_trace(source: Path | Traversable) -> list[TraceRequest]:
    """Returns the requests in order of arrival.

    Raises:
        InvalidRequest: the file cannot be read, or a line is not of either format; names the line.
    """
    try:
        text = _unpack(source.name, source.read_bytes()).decode()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{source}: not a readable trace: {error}") from error
    lines = text.splitlines()
    head = lines[0] if lines else ""
    if head.startswith("{"):
        parsed = _mooncake(lines)
    elif head.split(",") == AZURE_COLUMNS:
        parsed = _azure(lines)
    else:
        raise InvalidRequest(
            f"{source}: expected Mooncake's JSON lines or Azure's CSV, found {head[:60]!r}"
        )
    requests: list[TraceRequest] = []
    try:
        requests.extend(map(_checked, parsed))
    except (ValueError, KeyError, TypeError, InvalidRequest) as error:
        line = len(requests) + (1 if head.startswith("{") else 2)
        raise InvalidRequest(f"{source}, line {line}: {error!r}") from error
    return sorted(requests, key=lambda request: request.at_s)


def cacheable_tokens(requests: Iterable[TraceRequest]) -> int:
    """Counts what a store without bounds, that takes every prompt at once, would find of these prompts.

    These are leading blocks of 128 tokens that an earlier prompt had.
    """
    stored: dict[int, int] = {}
    total = 0
    for request in requests:
        left = request.num_prompt_tokens // BLOCK_TOKENS
        leading = True
        for block_id in request.block_ids:
            num_blocks = min(left, TRACE_BLOCK_TOKENS // BLOCK_TOKENS)
            left -= num_blocks
            before = stored.get(block_id, 0)
            if leading:
                total += min(before, num_blocks)
                leading = before >= num_blocks
            stored[block_id] = max(before, num_blocks)
    return total * BLOCK_TOKENS


def _unpack(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.decompress(data)
    return lzma.decompress(data) if name.endswith(".xz") else data


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for line in lines:
        fields = json.loads(line)
        yield TraceRequest(
            at_s=fields["timestamp"] / MS_PER_S,
            num_prompt_tokens=fields["input_length"],
            num_output_tokens=fields["output_length"],
            block_ids=fields["hash_ids"],
        )


def _azure(lines: Sequence[str]) -> Iterator[TraceRequest]:
    first = None
    next_id = 0
    for row in csv.DictReader(lines, strict=True):
        # Seven digits of a second, of which Python 3.11 takes them all and keeps six.
        time = datetime.fromisoformat(row["TIMESTAMP"])
        first = first or time
        num_prompt = int(row["ContextTokens"])
        num_blocks = _num_trace_blocks(num_prompt)
        yield TraceRequest(
            at_s=(time - first).total_seconds(),
            num_prompt_tokens=num_prompt,
            num_output_tokens=int(row["GeneratedTokens"]),
            block_ids=range(next_id, next_id + num_blocks),
        )
        next_id += num_blocks


def _checked(request: TraceRequest) -> TraceRequest:
    """Refuses lengths that make no prompt."""
    if request.num_prompt_tokens < 1 or request.num_output_tokens < 1:
        raise InvalidRequest(
            f"{request.num_prompt_tokens} tokens in and {request.num_output_tokens} out; "
            "both must be at least 1"
        )
    expected = _num_trace_blocks(request.num_prompt_tokens)
    if len(request.block_ids) != expected:
        raise InvalidRequest(
            f"{request.num_prompt_tokens} tokens have {expected} blocks of {TRACE_BLOCK_TOKENS}, "
            f"not {len(request.block_ids)}"
        )
    return request


def _num_trace_blocks(num_tokens: int) -> int:
    return -(-num_tokens // TRACE_BLOCK_TOKENS)
