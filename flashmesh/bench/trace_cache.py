"""How many blocks a kvstore node finds again in public traces, and how many it could.

A prompt's hit is its leading blocks that are stored; then all its blocks are used, or put. The node's
own `BlockTable` decides what goes, beside it least recently used and the clairvoyant optimum, at
capacities that are a share of the trace's distinct blocks. A unit is the trace's block of 512 tokens,
the last, partial one included. `hit_over_unlimited` is the share of what a store without bounds finds.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING

from flashmesh.bench.registry import Result
from flashmesh.bench.trace_files import TRACE_BLOCK_TOKENS, bundled, read_trace
from flashmesh.hashing import HASH_BYTES, BlockHash
from flashmesh.objects import KIND_BLOCK, StoredObject
from flashmesh.runs import RUN_BLOCKS
from flashmesh.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from flashmesh.services.kvstore.blocks import BlockTable

    Prompt = Sequence[int]

TRACES = ("conversation", "synthetic")
PERCENTS = (5, 10, 25, 50, 100)
RUN = RUN_BLOCKS * BLOCK_TOKENS // TRACE_BLOCK_TOKENS
NEVER = 1 << 60

num_steps = len(TRACES) * len(PERCENTS)


def run(advance: Callable[[], None]) -> Iterator[Result]:
    """Replays both traces at every capacity."""
    for name in TRACES:
        prompts = load(name)
        num_blocks = sum(map(len, prompts))
        num_distinct = len(set(itertools.chain.from_iterable(prompts)))
        unlimited = num_blocks - num_distinct
        for percent in PERCENTS:
            capacity = num_distinct * percent // 100
            policy, lru, optimum = (
                count(prompts, capacity) for count in (policy_hits, lru_hits, optimum_hits)
            )
            trace = f"trace.{name}"
            yield Result(f"{trace}.hit.{percent}", policy / num_blocks, "x", num_blocks)
            yield Result(f"{trace}.lru_hit.{percent}", lru / num_blocks, "x", num_blocks)
            yield Result(f"{trace}.optimum_hit.{percent}", optimum / num_blocks, "x", num_blocks)
            ratio = policy / unlimited
            yield Result(f"{trace}.hit_over_unlimited.{percent}", ratio, "x", num_blocks)
            if optimum > lru:
                closed = (policy - lru) / (optimum - lru)
                yield Result(f"{trace}.distance_closed.{percent}", closed, "x", num_blocks)
            advance()


def load(name: str) -> list[Prompt]:
    """Returns the prompts of a trace in order of arrival; an id names a block and its prefix."""
    return [request.block_ids for request in read_trace(bundled()[name])]


def policy_hits(prompts: Iterable[Prompt], capacity: int) -> int:
    """Counts the hits of a node that holds so many blocks and evicts by its policy."""
    table = make_table(capacity)
    return sum(serve(table, prompt) for prompt in prompts)


def make_table(capacity: int) -> BlockTable:
    """Makes a table for blocks of one byte."""
    from flashmesh.services.kvstore.blocks import BlockTable

    return BlockTable(memory_bytes=capacity, max_leased_share=0.9, clock=lambda: 0.0)


def serve(table: BlockTable, prompt: Prompt) -> int:
    """Reads a prompt's leading blocks and puts the rest; returns how many were read."""
    hashes = [_hash(block) for block in prompt]
    num_hits = _leading(hash in table for hash in hashes)
    table.touch(hashes[:num_hits])
    for place in range(num_hits, len(prompt)):
        table.put(
            StoredObject(
                kind=KIND_BLOCK,
                layout_id=bytes(16),
                hash=hashes[place],
                parent=hashes[place - 1] if place else bytes(HASH_BYTES),
                run=hashes[place - place % RUN],
                position=place * TRACE_BLOCK_TOKENS,
                fingerprint=bytes(16),
                checksum=bytes(16),
                data=b"x",
            ),
            same_request=True,
        )
    return num_hits


def lru_hits(prompts: Iterable[Prompt], capacity: int) -> int:
    """Counts the hits of least recently used; of one prompt's blocks the last go first."""
    stored: OrderedDict[int, None] = OrderedDict()
    total = 0
    for prompt in prompts:
        total += _leading(block in stored for block in prompt)
        for block in reversed(prompt):
            stored[block] = None
            stored.move_to_end(block)
        while len(stored) > capacity:
            stored.popitem(last=False)
    return total


def optimum_hits(prompts: Iterable[Prompt], capacity: int) -> int:
    """Counts the hits when the block goes whose next use is farthest away (Belady 1966).

    No prefix of a prompt is used later than its rest, so the blocks found are leading ones.
    """
    blocks = list(itertools.chain.from_iterable(prompts))
    next_use = _next_uses(blocks)
    stored: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    total = 0
    for block, following in zip(blocks, next_use, strict=True):
        total += block in stored
        stored[block] = following
        heapq.heappush(farthest, (-following, block))
        while len(stored) > capacity:
            use, victim = heapq.heappop(farthest)
            if stored.get(victim) == -use:
                del stored[victim]
    return total


def _next_uses(blocks: Sequence[int]) -> list[int]:
    following = [NEVER] * len(blocks)
    seen: dict[int, int] = {}
    for place in range(len(blocks) - 1, -1, -1):
        following[place] = seen.get(blocks[place], NEVER)
        seen[blocks[place]] = place
    return following


def _hash(block: int) -> BlockHash:
    return BlockHash(block.to_bytes(HASH_BYTES))


def _leading(flags: Iterable[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, flags))
